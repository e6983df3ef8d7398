"""Claims 1, 2, 6 and S of the paper with 10,000 CIFAR-10 images: the runs, in order of importance.

    neuvar run benchmarks/claims.py --scale cpu --workers 2

It takes about eleven hours on two cores with bfloat16. Ctrl-C stops it, and the same command goes
on. Trials from ``CHOICE_SEED`` on are for choosing b: their held-out accuracy is compared, then b
is written down in ``CHOSEN``, and ten other trials with it are judged against SGD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuvar.experiments import (
    Experiment,
    Result,
    Run,
    Scale,
    Table,
    Training,
    Verdict,
    last,
    make_table,
    matching,
    values,
)
from neuvar.experiments.run_spec import CHOICE_SEED

CHOICE_SEEDS = (CHOICE_SEED, CHOICE_SEED + 1)
TRIALS = 10
COMMON: dict[str, Any] = {
    "data": "cifar10", "images": 10_000, "held_out": 1000, "test_images": 5000, "epochs": 30,
    "lr": 0.1, "weight_decay": 1e-4, "precision": "bf16", "channels_last": True,
    "reestimate": True,
}  # fmt: skip
RESNET = {"model": "resnet-10", "width": 16, "momentum": 0.9, "batch": 128}
VGG = {"model": "vgg-11", "width": 16, "batch": 32}
MOBILENET = {"model": "mobilenet-v2", "width": 8, "batch": 32}
PAIR = {"label_noise": "pair", "noise_rate": 0.4, "drop_every": 10}
CLEAN = {"eval_noise": (0.01, 0.02, 0.03, 0.04, 0.06, 0.08), "drop_every": 10}

GRIDS: dict[str, tuple[float, ...]] = {
    "gaussian": (0.01, 0.02, 0.03, 0.05),
    "laplace": (0.01, 0.02, 0.03, 0.05),
    "uniform": (0.01, 0.02, 0.03, 0.05, 0.08),
    "resnet-10": (0.005, 0.01, 0.02, 0.03),
    "vgg-11": (0.002, 0.005, 0.01, 0.02),
    "mobilenet-v2": (0.002, 0.005, 0.01, 0.02),
}
"""Values of b to choose from: by family of noise (wrong labels), by network (clean labels)."""
CHOSEN: dict[str, float] = {}
"""The b with the best mean held-out accuracy of the trials for choosing, by the same names."""
RATES = (0.03, 0.1, 0.3, 1.0)


def training(b: float, seed: int, **what: Any) -> Training:
    labels = {"label_seed": seed} if "label_noise" in what else {}
    return Training(**COMMON | what | labels, b=b, seed=seed, optimizer="nvrm-sgd" if b else "sgd")


def wrong(b: float, seed: int, **what: Any) -> Training:
    return training(b, seed, **RESNET | PAIR | what)


def choosing() -> list[Run]:
    """Every b, with two seeds of its own."""
    runs: list[Run] = []
    for seed in CHOICE_SEEDS:
        for noise in ("gaussian", "laplace", "uniform"):
            runs += [wrong(b, seed, noise=noise) for b in GRIDS[noise]]
        for network in (RESNET, VGG, MOBILENET):
            runs += [training(b, seed, **network | CLEAN) for b in GRIDS[str(network["model"])]]
    return runs


def judging(trials: int) -> list[Run]:
    """Trials that are judged, as far as b is chosen."""
    runs: list[Run] = []
    for seed in range(trials):
        runs += [wrong(b, seed) for b in (0.0, *_b("gaussian"))]  # claim 6, and S at rate 0.1
        runs += [wrong(b, seed, noise=n) for n in ("laplace", "uniform") for b in _b(n)]
        for network in (VGG, RESNET):  # claims 1 and 2
            for b in (0.0, *_b(str(network["model"]))):
                runs.append(training(b, seed, **network | CLEAN))
        for rate in RATES:  # claim S
            drops = {"lr": rate, "drop_every": 6}
            runs += [wrong(b, seed, **drops) for b in (0.0, *_b("gaussian"))]
        if seed < 5:
            for b in (0.0, *_b("mobilenet-v2")):
                runs.append(training(b, seed, **MOBILENET | CLEAN))
            for noise in ("gaussian", "laplace", "uniform"):  # how sensitive is each to b?
                runs += [wrong(b, seed, noise=noise) for b in GRIDS[noise]]
    return list(dict.fromkeys(runs))


def _b(name: str) -> tuple[float, ...]:
    return (CHOSEN[name],) if name in CHOSEN else ()


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """First the runs to choose by, then those to judge."""
    return [*choosing(), *judging(trials or TRIALS)]


def table(results: Sequence[Result]) -> Table:
    """Means of every setting: how well the training labels are fitted, and accuracies."""
    rows = []
    for model in values(results, "model"):
        for noise in values(results, "noise"):
            for lr in values(results, "lr"):
                for b in values(results, "b"):
                    own = matching(results, model=model, noise=noise, lr=lr, b=b)
                    if own:
                        rows.append(((model, noise, f"{lr:g}", f"{b:g}"), own))
    columns = {
        "training": last("train_accuracy"),
        "held out": last("held_out_accuracy"),
        "test": last("test_accuracy"),
    }
    return make_table(("network", "noise", "rate", "b"), rows, columns)


EXPERIMENT = Experiment(
    title="Claims 1, 2, 6 and S with 10,000 images",
    sentence="These runs decide claims of the paper; see the experiments of these numbers.",
    runs=runs,
    table=table,
    check=lambda results: Verdict("undecided", "The claims are judged by their own experiments."),
)
