"""Which training keeps a network working when its weights move? Noise, rounding and bit flips.

    python benchmarks/moved_weights.py            # the choice runs, then ten seeds of each method
    python benchmarks/moved_weights.py --table    # run nothing, write the table

784-256-256-10 on 10,000 MNIST images, 20 epochs, batch 128, learning rate 0.001. The disturbance is
known before training: for each one, the settings of a method are chosen with another seed by the
accuracy of held-out images under it. SAM takes two gradients per step: it is trained for as many
epochs, and for half of them, beside Adam for half of them. The average of the weights is
exponential, over steps. One line per run in results/moved_weights.jsonl, the table in
results/moved_weights.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import neuvar
from neuvar import measures
from neuvar.baselines import SAM
from neuvar.data import load
from neuvar.engine import Results
from neuvar.engine.job import provenance
from spread import best, interval, spread

RESULTS = Path(__file__).parents[1] / "results"
CHOICE_SEED, SEEDS = 1000, 10
NAMES = {"rho": "ρ", "weight_decay": "λ", "dropout": "p", "hess_init": "h₀", "relative_b": "b",
         "average": "decay"}  # fmt: skip
"""Symbols of settings in the table."""
EPOCHS, BATCH, LR = 20, 128, 1e-3
DRAWS = 8
Line = dict[str, Any]
Setting = dict[str, float]
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """A way to train, the settings to choose from, and its cost in gradients, that of Adam = 1."""

    settings: tuple[Setting, ...] = ({},)
    optimizer: str = "adam"
    cost: float = 1.0
    epochs: float = 1.0
    """Share of the epochs."""
    chosen_with: str = ""
    """Method whose choice counts for this one as well."""


def grid(name: str, *values: float, **others: float) -> tuple[Setting, ...]:
    return tuple({name: value} | others for value in values)


RHO = grid("rho", 0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
METHODS = {
    "Adam": Method(),
    "weight decay (AdamW)": Method(grid("weight_decay", 0.1, 0.3, 1.0), "adamw"),
    "weight clipping": Method(grid("clip", 0.05, 0.1, 0.2)),
    "dropout": Method(grid("dropout", 0.2, 0.5, 0.8, 0.9)),
    "rounding to 3 bits in training": Method(grid("bits", 3)),
    "rounding to 2 bits in training": Method(grid("bits", 2)),
    "SAM, half the epochs": Method(RHO, "sam", epochs=0.5),
    "SAM": Method(RHO, "sam", cost=2.0, chosen_with="SAM, half the epochs"),
    "IVON": Method(
        (
            *grid("hess_init", 0.5, 0.1, lr=0.1),
            *grid("lr", 0.5, 2.0, 5.0, hess_init=0.5),
            *grid("hess_init", 0.1, 0.05, lr=2.0),
            *grid("ess", 0.3, 0.1, 0.03, lr=2.0, hess_init=0.5),
        ),
        "ivon",
    ),
    "NVRM-Adam": Method(grid("b", 0.03, 0.05, 0.07, 0.1, 0.14), "nvrm"),
    "NVRM-Adam, relative to filters": Method(grid("relative_b", 0.4, 0.8, 1.2, 1.6, 2.0), "nvrm"),
    "dropout + NVRM-Adam": Method(grid("b", 0.03, 0.05, 0.07, dropout=0.2), "nvrm"),
    "weight clipping + NVRM-Adam": Method(grid("b", 0.03, 0.05, 0.1, clip=0.1), "nvrm"),
    "Adam, half the epochs": Method(epochs=0.5),
    "average of the weights": Method(grid("average", 0.99, 0.999)),
}
NOISY = tuple(name for name, method in METHODS.items() if method.optimizer == "nvrm")
BASELINES = tuple(name for name in METHODS if name not in NOISY)
DISTURBANCES = {
    "noise 0.1": "Gaussian noise of scale 0.1",
    "noise 0.2": "Gaussian noise of scale 0.2",
    "noise of the whole size": "noise of 1 × each tensor's root mean square",
    "noise of twice the size": "noise of 2 × each tensor's root mean square",
    "analog 0.1": "analog hardware: noise of 0.1 × the largest weight of each tensor",
    "3 bits": "3 bits per weight, by row",
    "2 bits": "2 bits per weight, by row",
    "bit flips": "one bit in 100 flipped, 8-bit weights",
}
MEASURES = {"clean": "as trained"} | DISTURBANCES


@cache
def images() -> dict[str, Data]:
    data = load("mnist")
    x, y = data.train.images.flatten(1).float() / 255, data.train.labels
    test = data.test.images.flatten(1).float() / 255, data.test.labels
    return {"train": (x[:10_000], y[:10_000]), "held_out": (x[10_000:15_000], y[10_000:15_000]),
            "test": test}  # fmt: skip


class RoundedLinear(nn.Linear):
    """Trains with rounded weights, whose gradient goes to the weights themselves.

    This is quantization-aware training with the straight-through estimator of Bengio et al. 2013.
    """

    bits = 2

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.training:
            step = weight.detach().abs().amax(1, keepdim=True) / (2 ** (self.bits - 1) - 1)
            weight = weight + ((weight / step).round() * step - weight).detach()
        return linear(x, weight, self.bias)


def network(setting: Setting, seed: int, width: int = 256) -> nn.Module:
    dropout = setting.get("dropout", 0.0)
    kind = RoundedLinear if "bits" in setting else nn.Linear
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in (784, width):
            layers += [kind(size, width), nn.ReLU()]
            layers += [nn.Dropout(dropout)] if dropout else []
        model = nn.Sequential(*layers, kind(width, 10))
    for module in model:
        if isinstance(module, RoundedLinear):
            module.bits = int(setting["bits"])
    return model


def optimizer_for(method: Method, model: nn.Module, setting: Setting, count: int, seed: int) -> Any:
    params = model.parameters()
    if method.optimizer == "ivon":
        from ivon import IVON

        # Its authors advise the number of training images as the effective sample size. A smaller
        # one makes its noise larger.
        ess = setting.get("ess", 1.0) * count
        return IVON(params, lr=setting["lr"], ess=ess, hess_init=setting["hess_init"])
    if method.optimizer == "nvrm":
        relative = "relative_b" in setting
        b = setting["relative_b" if relative else "b"]
        how = {"relative_to": "filter"} if relative else {}
        return neuvar.NVRMAdam(model, lr=LR, b=b, seed=seed, **how)
    if method.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=LR, fused=True, weight_decay=setting["weight_decay"])
    adam = torch.optim.Adam(params, lr=LR, fused=True)
    return SAM(adam, rho=setting["rho"]) if method.optimizer == "sam" else adam


def train(method: Method, setting: Setting, data: Data, seed: int, **size: Any) -> nn.Module:
    """Train with the steps that the optimizer's authors ask for."""
    x, y = data
    model = network(setting, seed, **size)
    optimizer = optimizer_for(method, model, setting, len(x), seed)
    order = torch.Generator().manual_seed(seed)
    averaged = None
    if decay := setting.get("average"):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout, and IVON's noise
        for _ in range(math.ceil(method.epochs * EPOCHS)):
            for index in torch.randperm(len(x), generator=order).split(BATCH):

                def backward(index: Tensor = index) -> None:
                    optimizer.zero_grad()
                    cross_entropy(model(x[index]), y[index]).backward()

                if method.optimizer == "ivon":
                    with optimizer.sampled_params(train=True):
                        backward()
                else:
                    backward()
                if method.optimizer == "sam":
                    optimizer.climb()
                    backward()
                optimizer.step()
                if limit := setting.get("clip"):
                    with torch.no_grad():
                        for p in model.parameters():
                            p.clamp_(-limit, limit)
                if averaged is not None:
                    averaged.update_parameters(model)
    return model.eval() if averaged is None else averaged.module.eval()


def accuracies(model: nn.Module, data: Data, seed: int) -> dict[str, float]:
    """Accuracy at the clean weights and under every disturbance."""

    def noisy(b: float, **how: Any) -> float:
        found = neuvar.neural_variability(
            model, cross_entropy, data, b=b, draws=DRAWS, seed=seed, **how
        )
        assert found.accuracy is not None
        return found.accuracy.mean

    rounded = measures.rounding(model, data, bits=(3, 2), by="row")
    flips = measures.bit_flips(model, data, rates=(1e-2,), bits=8, draws=DRAWS, seed=seed)
    analog = measures.analog_noise(
        model, data, scales=(0.1,), kind="additive", draws=DRAWS, seed=seed
    )
    return {
        "clean": rounded.clean.value,
        "noise 0.1": noisy(0.1),
        "noise 0.2": noisy(0.2),
        "noise of the whole size": noisy(1.0, relative_to="tensor"),
        "noise of twice the size": noisy(2.0, relative_to="tensor"),
        "analog 0.1": analog.accuracies[0].mean,
        "3 bits": rounded.accuracies["row"][3].value,
        "2 bits": rounded.accuracies["row"][2].value,
        "bit flips": flips.accuracies[0].mean,
    }


def run_one(run: dict[str, Any]) -> Line:
    began, parts = time.process_time(), images()
    model = train(METHODS[run["method"]], run["setting"], parts["train"], run["seed"])
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    split = "held_out" if run["seed"] == CHOICE_SEED else "test"
    last = accuracies(model, parts[split], run["seed"]) if finite else {}
    line = {"key": key(run), "run": run, "status": "finished" if finite else "diverged"}
    line |= {"reason": None, "last": last, "seconds": round(time.process_time() - began, 1)}
    return line | provenance("cpu", 1)


def key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


def choice_runs() -> Iterator[dict[str, Any]]:
    for name, method in METHODS.items():
        for setting in () if method.chosen_with else method.settings:
            yield {"method": name, "setting": setting, "seed": CHOICE_SEED}


def reported_runs(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """All methods with the first seed, then with the second: the table is fair at any time."""
    for seed in range(SEEDS):
        for name in METHODS:
            settings = [chosen(lines, name, measure) for measure in MEASURES]
            for setting in {key(setting): setting for setting in settings}.values():
                yield {"method": name, "setting": setting, "seed": seed}


def held_out_scores(lines: Sequence[Line], name: str, measure: str) -> dict[str, float]:
    """Accuracy of held-out images under a disturbance, for each setting of a method."""
    return {
        key(line["run"]["setting"]): line["last"][measure]
        for line in lines
        if (line["run"]["method"], line["run"]["seed"]) == (name, CHOICE_SEED) and line["last"]
    }


def chosen(lines: Sequence[Line], name: str, measure: str) -> Setting:
    """The setting with the best accuracy of held-out images under a disturbance."""
    name = METHODS[name].chosen_with or name
    scores, settings = held_out_scores(lines, name, measure), METHODS[name].settings
    return max(settings, key=lambda setting: scores.get(key(setting), -math.inf))


def chosen_noise(lines: Sequence[Line], measure: str) -> str:
    """The method with noise that is best on held-out images under a disturbance."""
    scores = {name: held_out_scores(lines, name, measure).values() for name in NOISY}
    return max(NOISY, key=lambda name: max(scores[name], default=-math.inf))


def values(lines: Sequence[Line], name: str, measure: str) -> dict[int, float]:
    """A measure of a method at the setting chosen for it, by seed."""
    setting = chosen(lines, name, measure)
    return {
        line["run"]["seed"]: line["last"][measure]
        for line in lines
        if line["run"]["method"] == name
        and line["run"]["setting"] == setting
        and line["run"]["seed"] < SEEDS
        and line["last"]
    }


def best_baseline(lines: Sequence[Line], measure: str) -> str:
    """The baseline without noise that is best on the test set, at no more than Adam's cost."""
    known = {n: values(lines, n, measure) for n in BASELINES if METHODS[n].cost <= 1}
    return best({name: own for name, own in known.items() if own})[0]


def gain(lines: Sequence[Line], name: str, measure: str) -> tuple[float, float, float] | None:
    """A method's accuracy minus that of the best baseline, in points, paired by seed."""
    own, other = (values(lines, n, measure) for n in (name, best_baseline(lines, measure)))
    pairs = [100 * (own[seed] - other[seed]) for seed in sorted(own.keys() & other.keys())]
    return interval(pairs) if pairs else None


def table(lines: Sequence[Line]) -> list[str]:
    """Accuracy in percent of every method under every disturbance, with the chosen setting."""
    rows = [f"| method | gradients | n | {' | '.join(MEASURES.values())} |"]
    rows.append("| --- | ---: |" + " ---: |" * (1 + len(MEASURES)))
    for name, method in METHODS.items():
        found = {m: list(values(lines, name, m).values()) for m in MEASURES}
        if n := min(map(len, found.values())):
            cells = [cell(found[m], chosen(lines, name, m)) for m in MEASURES]
            count = str(n) if n >= SEEDS else f"{n} of {SEEDS}"
            rows.append(f"| {name} | {method.cost:g} × | {count} | {' | '.join(cells)} |")
    if len(rows) == 2:
        return rows
    rows += ["", "Minus the best baseline of the same cost, in points, with 95 % intervals:", ""]
    rows += [
        f"| method | {' | '.join(MEASURES.values())} |",
        "| --- |" + " ---: |" * len(MEASURES),
    ]
    baselines = [best_baseline(lines, m) for m in MEASURES]
    rows.append(f"| best baseline | {' | '.join(baselines)} |")
    for name in NOISY:
        gains = [gain(lines, name, m) for m in MEASURES]
        cells = ["–" if g is None else f"{g[0]:+.1f} ({g[1]:+.1f} to {g[2]:+.1f})" for g in gains]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def cell(accuracies: Sequence[float], setting: Setting) -> str:
    words = ", ".join(f"{NAMES.get(k, k)} = {v:g}" for k, v in setting.items())
    return percent(accuracies) + (f"<br>{words}" if words else "")


percent = partial(spread, digits=1, factor=100)


def arguments(description: str) -> argparse.Namespace:
    """The command line of this benchmark and of those that train as it does."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    torch.set_num_threads(1)
    return parser.parse_args()


def run_missing(results: Results, runs: Iterable[Line], run: Callable[[Line], Line]) -> None:
    """Run what has no result yet."""
    for one in runs:
        if results.recorded(key(one)) is None:
            line = run(one)
            results.add(line)
            print(*one.values(), line["status"], line["last"], line["seconds"], flush=True)


def main() -> None:
    options = arguments(__doc__)
    results = Results(options.results / "moved_weights.jsonl")
    if not options.table:
        run_missing(results, choice_runs(), run_one)
        run_missing(results, reported_runs(list(results.lines().values())), run_one)
    text = "\n".join(table(list(results.lines().values()))) + "\n"
    (options.results / "moved_weights.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
