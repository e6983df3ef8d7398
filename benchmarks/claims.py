"""Claims 1, 2, 6 and S of the paper with 10,000 CIFAR-10 images: the runs of four experiments.

    neuvar run benchmarks/claims_*.py --workers 2
    neuvar report benchmarks/claims_*.py

All runs take about eleven hours on two cores with bfloat16. Ctrl-C stops them, and the same
command continues. First come two trials of every b, which only choose: the b with the best mean
accuracy on held-out images wins. Then come the trials that are judged, with SGD and with the chosen
b. Verdicts, figures and tables are those of the experiments ``robustness``, ``generalization``,
``noise-types`` and ``gradient-noise``. ``make report`` writes them into docs/reproduction.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from neuvar.experiments import EXPERIMENTS, Experiment, Result, Run, Scale, Training, matching
from neuvar.experiments.results_query import choice, with_noise
from neuvar.experiments.run_spec import CHOICE_SEED

CHOICE_SEEDS = (CHOICE_SEED, CHOICE_SEED + 1)
TRIALS = 10
FEWER = 5
"""Trials of MobileNetV2, and of each b where the sensitivity to b is compared."""
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

FAMILIES = ("gaussian", "laplace", "uniform")
GRIDS: dict[str, tuple[float, ...]] = {
    "gaussian": (0.01, 0.02, 0.03, 0.05),
    "laplace": (0.01, 0.02, 0.03, 0.05),
    "uniform": (0.01, 0.02, 0.03, 0.05, 0.08),
    "resnet-10": (0.005, 0.01, 0.02, 0.03),
    "vgg-11": (0.002, 0.005, 0.01, 0.02),
    "mobilenet-v2": (0.002, 0.005, 0.01, 0.02),
}
"""Values of b to choose from: by family of noise (wrong labels), by network (clean labels)."""
RATES = (0.03, 0.1, 0.3, 1.0)


def training(b: float, seed: int, **what: Any) -> Training:
    labels = {"label_seed": seed} if "label_noise" in what else {}
    return Training(**COMMON | what | labels, b=b, seed=seed, optimizer="nvrm-sgd" if b else "sgd")


def wrong(b: float, seed: int, **what: Any) -> Training:
    return training(b, seed, **RESNET | PAIR | what)


def chosen(results: Sequence[Result], **setting: Any) -> tuple[float, ...]:
    """The b that was chosen for a network or a family of noise; none if that is not possible."""
    b, _ = choice(with_noise(matching(results, **setting)))
    return () if b is None else (b,)


class Clean:
    """Claims 1 and 2: clean labels, several networks."""

    def __init__(self, *networks: dict[str, Any]) -> None:
        self.networks = networks

    def runs(self, scale: Scale, trials: int) -> list[Run]:
        return [
            training(b, seed, **network | CLEAN)
            for seed in CHOICE_SEEDS
            for network in self.networks
            for b in GRIDS[network["model"]]
            if scale == "cpu"
        ]

    def then(self, scale: Scale, trials: int, results: Sequence[Result]) -> list[Run]:
        return [
            training(b, seed, **network | CLEAN)
            for seed in range(trials or TRIALS)
            for network in self.networks
            if network is not MOBILENET or seed < FEWER
            for b in (0.0, *chosen(results, model=network["model"]))
        ]


class Families:
    """Claim 6: wrong labels, three families of noise."""

    def runs(self, scale: Scale, trials: int) -> list[Run]:
        return families(CHOICE_SEEDS if scale == "cpu" else ())

    def then(self, scale: Scale, trials: int, results: Sequence[Result]) -> list[Run]:
        seeds, runs = range(trials or TRIALS), list[Run]()
        for seed in seeds:
            runs.append(wrong(0.0, seed))
            runs += [wrong(b, seed, noise=n) for n in FAMILIES for b in chosen(results, noise=n)]
        return [*runs, *families(seeds[:FEWER])]  # the latter show the sensitivity to b


def families(seeds: Sequence[int]) -> list[Run]:
    return [wrong(b, seed, noise=n) for seed in seeds for n in FAMILIES for b in GRIDS[n]]


class Rates:
    """Claim S: wrong labels, several learning rates; b is chosen by the runs of claim 6."""

    def runs(self, scale: Scale, trials: int) -> list[Run]:
        seeds = CHOICE_SEEDS if scale == "cpu" else ()
        return [wrong(b, seed) for seed in seeds for b in GRIDS["gaussian"]]

    def then(self, scale: Scale, trials: int, results: Sequence[Result]) -> list[Run]:
        return [
            wrong(b, seed, lr=rate, drop_every=6)
            for seed in range(trials or TRIALS)
            for rate in RATES
            for b in (0.0, *chosen(results))
        ]


def judged(results: Sequence[Result]) -> list[Result]:
    """Without the trials that only choose."""
    return [result for result in results if not result.for_choice]


PLANS: dict[str, Clean | Families | Rates] = {
    "robustness": Clean(RESNET, VGG, MOBILENET),
    "generalization": Clean(VGG, MOBILENET),
    "noise-types": Families(),
    "gradient-noise": Rates(),
}
SETTINGS = (
    "9,000 CIFAR-10 images for training and 1,000 held-out images; 5,000 test images; 30 epochs; "
    "no random crops and flips; {networks}; learning rate {rate}, divided by ten every {every} "
    "epochs; weight decay 0.0001; bf16 mixed precision. {what} {choice} Ten trials of SGD and of "
    "the chosen b, {fewer}."
)
ONE = "ResNet-10 of width 16 (momentum 0.9, batch size 128)"
OTHERS = "VGG-11 of width 16 and MobileNetV2 of width 8 (no momentum, batch size 32)"
NETWORKS = {"robustness": f"{ONE}, {OTHERS}", "generalization": OTHERS}
CHOICE = (
    "b is chosen by the mean accuracy on the held-out images of two trials that are not judged. In "
    "the table, a b that was not chosen has these trials."
)
WHAT = {
    "robustness": "Clean labels. After training, noise of each scale is added to all weights.",
    "generalization": "Clean labels.",
    "noise-types": "40 % of the labels are moved to the next class, held-out labels as well.",
    "gradient-noise": "40 % of the labels are moved to the next class.",
}


def experiment(name: str) -> Experiment:
    """The experiment of a claim with these runs."""
    base, plan = EXPERIMENTS[name], PLANS[name]
    rates = name == "gradient-noise"
    text = SETTINGS.format(
        networks=NETWORKS.get(name, ONE),
        rate=", ".join(f"{rate:g}" for rate in RATES) if rates else "0.1",
        every=6 if rates else 10,
        what=WHAT[name],
        choice="b is the one chosen for Gaussian noise in experiment 6." if rates else CHOICE,
        fewer="at each learning rate" if rates else "five of MobileNetV2"
        if name != "noise-types" else "five of every b",
    )  # fmt: skip
    own = replace(
        base,
        title=f"{base.title}, 10,000 images",
        runs=plan.runs,
        then=plan.then,
        settings=lambda scale: text if scale == "cpu" else "Only at the cpu scale.",
    )
    if not rates:
        return own
    return replace(
        own,
        panels=lambda results: base.panels(judged(results)),
        table=lambda results: base.table(judged(results)),
        check=lambda results: base.check(judged(results)),
    )
