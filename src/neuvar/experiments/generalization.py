"""2: NVRM narrows the generalization gap. VGG and MobileNetV2 on clean labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Case, Cell, Line, Panel, Result, Table, Verdict, gain, judge
from neuvar.experiments.images import FAMILIES, TRIALS, image_run, words
from neuvar.experiments.reading import (
    best,
    cell,
    compare,
    curve,
    group,
    label_of_b,
    matching,
    number,
    values,
)
from neuvar.experiments.run_spec import Run

DATA = {"mnist-excerpt": "MNIST excerpt", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NOISE: dict[Scale, dict[str, tuple[float, ...]]] = {
    "smoke": dict.fromkeys(FAMILIES, (0.0, 0.01)),
    "cpu": {"resnet": (0.0, 0.02), "vgg": (0.0, 0.01, 0.02), "mobilenet": (0.0, 0.01)},
    "paper": {"resnet": (0.0, 0.05), "vgg": (0.0, 0.01, 0.02), "mobilenet": (0.0, 0.01, 0.02)},
}
EVAL_NOISE: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.01, 0.02),
    "cpu": (0.01, 0.02, 0.03, 0.04, 0.06, 0.08),
    "paper": (0.01, 0.012, 0.014, 0.016, 0.018, 0.02),
}


def clean_runs(scale: Scale, families: Sequence[str], trials: int = 0) -> list[Run]:
    """Training on right labels; measured under weight noise in the end, for experiment 1."""
    sets: list[dict[str, Any]] = [{}]
    if scale == "paper":
        sets = [{"data": "cifar10"}, {"data": "cifar100"}]
    return [
        image_run(scale, family, b, seed, eval_noise=EVAL_NOISE[scale], reestimate=True, **others)
        for seed in range(trials or TRIALS[scale])
        for others in sets
        for family in families
        for b in NOISE[scale][family]
    ]


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """VGG and MobileNetV2."""
    return clean_runs(scale, ("vgg", "mobilenet"), trials)


def settings(scale: Scale) -> str:
    """What was run."""
    return (
        f"Clean labels. {words(scale, ('vgg', 'mobilenet'))}The generalization "
        "gap is training accuracy minus test accuracy."
    )


def method(b: float) -> str:
    """The name of a method."""
    return label_of_b("SGD", b)


def diverged(results: Sequence[Result], model: str, b: float) -> int:
    """How many trials of a network diverged, without noise and with noise of one scale."""
    trials = [r for r in matching(results, model=model) if r.run.b in (0.0, b)]
    return sum(not r.finished for r in trials)


def networks(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Each network on each data set, with its results."""
    names = {"vgg-16": "VGG-16", "vgg-11": "VGG-11", "mobilenet-v2": "MobileNetV2"}
    return [
        (f"{names.get(model, model)} on {DATA[data]}", group(results, model=model, data=data))
        for data in values(results, "data")
        for model in values(group(results, data=data), "model")
    ]


def gap(result: Result) -> tuple[float, ...]:
    """Training accuracy minus test accuracy, after each epoch."""
    train, test = result.curve("train_accuracy"), result.curve("test_accuracy")
    return tuple(a - b for a, b in zip(train, test, strict=True))


def panels(results: Sequence[Result]) -> list[Panel]:
    """Gap and test accuracy by epoch."""
    found = []
    for name, trials in networks(results):
        by_b = {b: group(trials, b=b) for b in values(trials, "b")}
        gaps, tests = [], []
        for b, rs in by_b.items():
            line = curve(rs, "test_accuracy", method(b), "nvrm" if b else "plain")
            tests.append(line)
            gaps.append(Line(line.label, line.x, tuple(map(gap, rs)), line.role))
        found += [
            Panel(f"{name}: generalization gap", "epoch", "gap", tuple(gaps)),
            Panel(f"{name}: test accuracy", "epoch", "test accuracy", tuple(tests)),
        ]
    return found


def table(results: Sequence[Result]) -> Table:
    """The last epoch, and the best; and with new statistics of batch normalisation."""
    rows = []
    for name, trials in networks(results):
        for b in values(trials, "b"):
            rs = group(trials, b=b)
            anew = Cell(tuple(r.line["reestimated"]["test_accuracy"] for r in rs))
            rows.append(
                (
                    name,
                    method(b),
                    str(len(rs)),
                    Cell(tuple(gap(r)[-1] for r in rs)),
                    cell(rs, "test_accuracy"),
                    best(rs, "test_accuracy"),
                    anew,
                )
            )
    columns = (
        "network",
        "method",
        "n",
        "gap, last epoch",
        "test, last epoch",
        "test, best epoch",
        "test, batch norm at clean weights",
    )
    return Table(columns, tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether every b narrows the gap and improves the test accuracy."""
    cases = []
    for name, trials in networks(results):
        if not group(trials, b=0.0):
            continue
        every = matching(results, model=trials[0].run.model, data=trials[0].run.data)
        for b in filter(None, values(trials, "b")):
            wide, narrow = ({r.run.seed: gap(r)[-1] for r in group(every, b=s)} for s in (0.0, b))
            test = compare(
                f"{name}, b = {number(b)}, test accuracy",
                matching(every, b=b),
                matching(every, b=0.0),
                "test_accuracy",
            )
            gaps = f"{name}, b = {number(b)}, gap narrower"
            cases += [Case(gaps, gain(wide, narrow), test.lost), test]
    return judge("At the last epoch, NVRM-SGD against SGD.", cases)


EXPERIMENT = Experiment(
    name="generalization",
    number="2",
    title="Generalization",
    sentence="NVRM can significantly narrow the generalization gap while slightly improve the test "
    "accuracy.",
    source="section 4, experiment 2",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
