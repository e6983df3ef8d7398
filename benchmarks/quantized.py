"""What quantization by torch and torchao does to trained networks, and which training helps.

    pip install "torchao>=0.18"               # not needed for --table
    python benchmarks/quantized.py            # five seeds of each method
    python benchmarks/quantized.py --table    # run nothing, print the tables

Networks, data and settings are those of moved_weights.py: 784-256-256-10 on 10,000 MNIST images,
20 epochs. "Rounding noise" trains with uniform noise of half a rounding step, set again after each
epoch (``neuvar.optim.rounding_parameters``). "Rounding in training" is quantization-aware training.
Each network is quantized by torch and by torchao, and rounded by ``neuvar.measures.rounding``. One
line per run in results/quantized.jsonl; tools/write_tables.py puts the tables in docs/results.md.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import moved_weights
import neuvar
from moved_weights import (
    BATCH,
    EPOCHS,
    LR,
    Data,
    Line,
    Setting,
    arguments,
    key,
    percent,
    run_missing,
)
from neuvar import measures
from neuvar.engine import Results
from neuvar.engine.job import provenance
from spread import difference

SEEDS = 5
BITS = (8, 4, 3, 2)
METHODS: dict[str, tuple[str, Setting]] = {
    "Adam": ("Adam", {}),
    "dropout 0.5": ("dropout", {"dropout": 0.5}),
    "NVRM-Adam, b = 0.07": ("NVRM-Adam", {"b": 0.07}),
    "rounding noise, 4 bits": ("rounding noise", {"noise_bits": 4}),
    "rounding noise, 3 bits": ("rounding noise", {"noise_bits": 3}),
    "rounding noise, 2 bits": ("rounding noise", {"noise_bits": 2}),
    "rounding in training, 3 bits": ("rounding to 3 bits in training", {"bits": 3}),
    "rounding in training, 2 bits": ("rounding to 2 bits in training", {"bits": 2}),
}
"""Name in the table: method of moved_weights.py, and its setting, chosen there on held-out data."""
NO_PREPARATION = ("Adam", "dropout 0.5", "NVRM-Adam, b = 0.07")
QUANTIZERS = {
    "torch, 8 bits": ("tensor", 8),
    "torchao, 8 bits": ("row", 8),
    "torchao, 8 bits, activations too": ("row", 8),
    "torch, 4 bits in groups": ("row", 4),
    "torchao, 4 bits": ("row", 4),
    "torchao, 4 bits, activations of 8": ("row", 4),
    "torchao, 3 bits": ("row", 3),
    "torchao, 2 bits": ("row", 2),
}
"""What quantizes the weights, and the closest setting of ``measures.rounding``."""


def quantized(model: nn.Module, quantizer: str) -> nn.Module:
    """A copy of a model, quantized by torch or by torchao."""
    bits = QUANTIZERS[quantizer][1]
    if quantizer.startswith("torch,"):
        return measures.quantized_copy(model, bits=bits)
    import torchao.quantization as ao

    whole_rows = ao.PerAxis(0)
    kind = getattr(torch, f"int{bits}")
    configs: dict[str, Callable[[], Any]] = {
        "torchao, 8 bits": ao.Int8WeightOnlyConfig,
        "torchao, 8 bits, activations too": ao.Int8DynamicActivationInt8WeightConfig,
        "torchao, 4 bits, activations of 8": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=kind, weight_granularity=whole_rows
        ),
    }
    config = configs.get(
        quantizer, lambda: ao.IntxWeightOnlyConfig(weight_dtype=kind, granularity=whole_rows)
    )
    own = copy.deepcopy(model)
    ao.quantize_(own, config())
    return own


def train(method: str, setting: Setting, data: Data, seed: int, **size: Any) -> nn.Sequential:
    if method == "rounding noise":
        model = train_with_rounding_noise(int(setting["noise_bits"]), data, seed, **size)
    else:
        known = moved_weights.METHODS[method]
        model = moved_weights.train(known, setting, data, seed, **size)
    # Quantizers look for nn.Linear itself, so rounding in training must leave no class of its own.
    layers: list[nn.Module] = []
    for own in (module for module in model.modules() if isinstance(module, nn.Linear)):
        layers += [nn.Linear(own.in_features, own.out_features), nn.ReLU()]
        layers[-2].load_state_dict(own.state_dict())
    return nn.Sequential(*layers[:-1]).eval()


def train_with_rounding_noise(bits: int, data: Data, seed: int, **size: Any) -> nn.Module:
    x, y = data
    model = moved_weights.network({}, seed, **size)
    groups = neuvar.optim.rounding_parameters(model, bits=bits)
    optimizer = neuvar.NVRMAdam(groups, model=model, lr=LR, b=0, seed=seed)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x), generator=order).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        neuvar.optim.update_rounding_noise(optimizer)
    return model.eval()


def accuracies(model: nn.Module, data: Data) -> dict[str, Any]:
    """Accuracy in full precision, with rounded weights, and after each quantizer."""
    rounded = measures.rounding(model, data, bits=BITS)
    x, y = data
    with torch.no_grad():
        real = {
            name: float((quantized(model, name)(x).argmax(1) == y).double().mean())
            for name in QUANTIZERS
        }
    simulated = {
        f"{by}, {bits} bits": own.value
        for by, points in rounded.accuracies.items()
        for bits, own in points.items()
    }
    return {"clean": rounded.clean.value, "simulated": simulated, "real": real}


def run_one(run: dict[str, Any]) -> Line:
    import torchao

    began, parts = time.process_time(), moved_weights.images()
    model = train(*METHODS[run["method"]], parts["train"], run["seed"])
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    last = accuracies(model, parts["test"]) if finite else {}
    line = {"key": key(run), "run": run, "status": "finished" if finite else "diverged"}
    line |= {"reason": None, "last": last, "seconds": round(time.process_time() - began, 1)}
    return line | {"torchao": torchao.__version__} | provenance("cpu", 1)


def by_seed(lines: Sequence[Line], method: str) -> dict[int, dict[str, Any]]:
    return {
        line["run"]["seed"]: line["last"]
        for line in lines
        if line["run"]["method"] == method and line["last"]
    }


def table(lines: Sequence[Line]) -> list[str]:
    """What quantizers cost, how well rounding predicts it, and which training helps."""
    found = {name: own for name in METHODS if (own := by_seed(lines, name))}
    return [
        "Change of the accuracy in points, with 95 % intervals over seeds:",
        "",
        *_costs(found),
        "",
        "Accuracy after the quantizer minus that of `measures.rounding`, in points. Runs with "
        "rounding in training are apart, because these networks fit one rounding only:",
        "",
        *_differences(found),
        "",
        "Accuracy in percent with few bits; mean ± standard deviation over seeds:",
        "",
        *_few_bits(found),
    ]


def _head(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |", "| --- |" + " ---: |" * (len(cells) - 1)]


def _costs(found: dict[str, dict[int, Any]]) -> list[str]:
    names = [name for name, (_, bits) in QUANTIZERS.items() if bits >= 4]
    rows = _head("training", "n", "full precision, %", *names)
    for method in NO_PREPARATION:
        if runs := list(found.get(method, {}).values()):
            cells = [_change([run["real"][name] - run["clean"] for run in runs]) for name in names]
            full = percent([run["clean"] for run in runs])
            rows.append(f"| {method} | {len(runs)} | {full} | {' | '.join(cells)} |")
    return rows


def _differences(found: dict[str, dict[int, Any]]) -> list[str]:
    groups = {"other training": False, "rounding in training": True}
    titles = [f"{title}: {what}" for title in groups for what in ("n", "mean", "largest")]
    rows = _head("quantizer", "closest rounding", *titles)
    for name, (by, bits) in QUANTIZERS.items():
        cells = []
        for apart in groups.values():
            gaps = [
                100 * (run["real"][name] - run["simulated"][f"{by}, {bits} bits"])
                for method, own in found.items()
                if method.startswith("rounding in training") is apart
                for run in own.values()
            ]
            cells.append(str(len(gaps)))
            cells.append(f"{statistics.fmean(gaps):+.2f}" if gaps else "–")
            cells.append(f"{max(gaps, key=abs):+.2f}" if gaps else "–")
        rows.append(f"| {name} | {bits} bits, by {by} | {' | '.join(cells)} |")
    return rows


def _few_bits(found: dict[str, dict[int, Any]]) -> list[str]:
    settings = [(by, bits) for by in ("tensor", "row") for bits in BITS[1:]]
    real = [f"torchao, {bits} bits" for bits in BITS[1:]]
    rounded = [f"{bits} bits, by {by}" for by, bits in settings]
    rows = _head("training", "n", "full precision", *rounded, *real)
    for method, own in found.items():
        runs = list(own.values())
        cells = [percent([run["clean"] for run in runs])]
        cells += [
            percent([run["simulated"][f"{by}, {bits} bits"] for run in runs])
            for by, bits in settings
        ]
        cells += [percent([run["real"][name] for run in runs]) for name in real]
        rows.append(f"| {method} | {len(runs)} | {' | '.join(cells)} |")
    return rows


def _change(changes: Sequence[float]) -> str:
    return difference(changes, 2, factor=100)


def main() -> None:
    options = arguments(__doc__)
    results = Results(options.results / "quantized.jsonl")
    # All methods with the first seed, then with the second: the table is fair at any time.
    runs = [{"method": name, "seed": seed} for seed in range(SEEDS) for name in METHODS]
    run_missing(results, [] if options.table else runs, run_one)
    print("\n".join(table(list(results.lines().values()))))


if __name__ == "__main__":
    main()
