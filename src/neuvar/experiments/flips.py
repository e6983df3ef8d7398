"""3 and its supplement: NVRM does not memorize wrong labels. Pair flips and symmetric flips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict, judge
from neuvar.experiments.images import PAPER_B, TRIALS, flipped_run, words
from neuvar.experiments.reading import (
    best,
    cell,
    chosen,
    compare,
    curve,
    group,
    label_of_b,
    matching,
    values,
)
from neuvar.experiments.run_spec import Run, Training

RATES = {"pair": (0.4, 0.3, 0.2, 0.1), "symmetric": (0.4, 0.2, 0.6, 0.8)}
SETS = {
    "mnist-excerpt": "MNIST excerpt",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
MNIST_GRID = (0.03, 0.04, PAPER_B, 0.06, 0.07)
CIFAR_GRID = (0.02, 0.03)
"""The paper's .05 is too much for a network this narrow, as held-out images say."""


CIFAR_WORDS = (
    "CIFAR-10 at 40 % only, and made smaller than in the paper: 10,000 training images instead of "
    "50,000, of which 1,000 are held out; 2,000 test images; 30 epochs instead of 300, with the "
    "learning rate of .1 divided by ten every 10 instead of every 100; no random crops and flips; "
    "ResNet-10 of width 16 instead of ResNet-34; three trials instead of ten; bf16 mixed "
    "precision. SGD with momentum .9, batch 128, weight decay .0001. "
)


def mnist_run(b: float, seed: int, **others: Any) -> Training:
    """The paper's fully connected network on part of MNIST."""
    what: dict[str, Any] = {
        "data": "mnist",
        "normalize": "none",
        "images": 10_000,
        "held_out": 1000,
        "test_images": 2000,
        "model": "mlp",
        "width": 0,
        "lr": 0.1,
        "batch": 128,
        "epochs": 40,
        "drop_every": 14,
        "channels_last": False,
    }
    return flipped_run("cpu", b, seed, **(what | others))


def cifar_run(b: float, seed: int, **others: Any) -> Training:
    """A small ResNet on a fifth of CIFAR-10, which is more than the other experiments have."""
    what: dict[str, Any] = {
        "images": 10_000,
        "held_out": 1000,
        "test_images": 2000,
        "epochs": 30,
        "batch": 128,
        "lr": 0.1,
    }
    return flipped_run("cpu", b, seed, **(what | others))


def smoke_run(b: float, seed: int, **others: Any) -> Training:
    """A small fully connected network on the MNIST excerpt: what the demonstration shows."""
    what: dict[str, Any] = {
        "images": 0,
        "held_out": 600,
        "test_images": 0,
        "model": "mlp",
        "width": 256,
        "epochs": 30,
        "drop_every": 10,
    }
    return flipped_run("smoke", b, seed, **(what | others))


def runs_of(kind: str) -> Callable[[Scale, int], list[Run]]:
    """The runs for a kind of wrong labels."""

    def runs(scale: Scale, trials: int = 0) -> list[Run]:
        seeds = range(trials or TRIALS[scale])
        rates = RATES[kind]
        if scale == "smoke":
            return [
                smoke_run(b, s, label_noise=kind, noise_rate=0.4)
                for s in seeds
                for b in (0.0, PAPER_B)
            ]
        if scale == "paper":
            return [
                flipped_run(scale, b, s, label_noise=kind, noise_rate=rate, data=data)
                for s in seeds
                for data in ("cifar10", "cifar100")
                for rate in rates
                for b in (0.0, PAPER_B)
            ]
        images: list[Run] = [cifar_run(b, s) for s in seeds for b in (0.0, *CIFAR_GRID)]
        digits: list[Run] = [
            mnist_run(b, s, label_noise=kind, noise_rate=rate)
            for s in seeds
            for rate in rates
            for b in ((0.0, *MNIST_GRID) if rate == rates[0] else (0.0, PAPER_B))
        ]
        return [*images, *digits] if kind == "pair" else digits

    return runs


def settings_of(kind: str) -> Callable[[Scale], str]:
    """What was run for a kind of wrong labels."""
    flips = (
        "the label of class i becomes that of class i + 1, and the last class's the first's"
        if kind == "pair"
        else "the label becomes one of the others, each alike, never itself"
    )

    def settings(scale: Scale) -> str:
        if scale == "smoke":
            return (
                f"5,400 images of the MNIST excerpt, 40 % wrong labels: {flips}. 784-256-256-10, "
                "SGD with momentum .9 at .1, divided by ten every 10 of 30 epochs, batch 128."
            )
        more = ""
        if scale == "cpu":
            more = (
                "b is chosen on the held-out images, whose labels are as wrong. On MNIST: the "
                "paper's fully connected network 784-1024-1024-10, 9,000 training and 1,000 "
                "held-out images, 2,000 test images, pixels from 0 to 1, SGD with momentum .9 at "
                ".1, divided by ten every 14 of 40 epochs, batch 128, three trials; bf16 mixed "
                "precision."
            )
        if scale == "cpu" and kind == "symmetric":
            return f"Wrong labels: {flips}. MNIST instead of CIFAR. {more}"
        if scale == "cpu":
            return f"Wrong labels: {flips}. {CIFAR_WORDS}{more}"
        return f"Wrong labels: {flips}. {words(scale)}"

    return settings


def cases(results: Sequence[Result]) -> list[tuple[str, float, list[Result], float | None]]:
    """Data set, rate of wrong labels, results, and the b that is compared with SGD.

    b is chosen on held-out images where there are several; where there is one, it is that. Not
    every rate has every b, so each rate has its own choice.
    """
    found = []
    for data, rate in product(values(results, "data"), values(results, "noise_rate")):
        if trials := matching(results, data=data, noise_rate=rate):
            found.append((data, rate, trials, chosen([r for r in trials if r.run.b], "b")))
    return found


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy, accuracy on the labels trained with, and wrong labels memorized."""
    shown = cases(results)
    hardest = {data: max(rate for d, rate, _, _ in shown if d == data) for data, *_ in shown}
    found = []
    for data, rate, trials, b in shown:
        metrics = [("test_accuracy", "test accuracy")]
        if rate == 0.4 or rate == hardest[data]:
            metrics += [
                ("train_accuracy", "accuracy on the labels given"),
                ("memorized", "wrong labels memorized"),
            ]
        for metric, title in metrics:
            lines = [
                curve(group(trials, b=s), metric, label_of_b("SGD", s), "nvrm" if s else "plain")
                for s in (0.0, b)
                if s is not None
            ]
            name = f"{SETS[data]}, {100 * rate:.0f} % wrong: {title}"
            found.append(Panel(name, "epoch", title, tuple(lines)))
    return found


def table(results: Sequence[Result]) -> Table:
    """The last epoch, and the best; the last is what a user without clean data gets."""
    rows = []
    for data, rate, trials, chosen_b in cases(results):
        for b in values(trials, "b"):
            found = group(trials, b=b)
            mark = " (chosen)" if b and b == chosen_b and len(values(trials, "b")) > 2 else ""
            rows.append(
                (
                    SETS[data],
                    f"{100 * rate:.0f} %",
                    label_of_b("SGD", b) + mark,
                    str(len(found)),
                    cell(found, "test_accuracy"),
                    best(found, "test_accuracy"),
                    cell(found, "train_accuracy"),
                    cell(found, "memorized"),
                )
            )
    return Table(
        (
            "data",
            "wrong",
            "method",
            "n",
            "test, last epoch",
            "test, best epoch",
            "labels given, last",
            "wrong labels memorized, last",
        ),
        tuple(rows),
    )


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM-SGD tests better and memorizes fewer wrong labels, in every case."""
    found = []
    for data, rate, trials, b in cases(results):
        plain, noisy = matching(trials, b=0.0), matching(trials, b=b)
        name = f"{SETS[data]} {100 * rate:.0f} %"
        found += [
            compare(f"{name}, test accuracy", noisy, plain, "test_accuracy"),
            compare(f"{name}, wrong labels not memorized", noisy, plain, "memorized", lower=True),
        ]
    return judge("At the last epoch, NVRM-SGD against SGD.", found)


PAIR = Experiment(
    name="pair-flips",
    number="3",
    title="Wrong labels, pair flips",
    sentence="SGD seriously overfits noisy labels; meanwhile, NVRM can avoid memorizing noisy "
    "labels effectively.",
    source="section 4, experiment 3",
    runs=runs_of("pair"),
    settings=settings_of("pair"),
    panels=panels,
    table=table,
    check=check,
)
SYMMETRIC = Experiment(
    name="symmetric-flips",
    number="3 S",
    title="Wrong labels, symmetric flips",
    sentence="NVRM can also significantly improve the robustness to symmetric label noise.",
    source="appendix, supplementary results",
    runs=runs_of("symmetric"),
    settings=settings_of("symmetric"),
    panels=panels,
    table=table,
    check=check,
)
