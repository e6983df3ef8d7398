"""2: NVRM narrows the generalization gap. VGG and MobileNetV2 on clean labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Cell, Panel, Result, Table, Verdict, judge
from neuvar.experiments.images import DATA_NAMES, FAMILY_TITLES, SIZES, TRIALS, image_run, recipe
from neuvar.experiments.run_spec import Run

NOISE: dict[Scale, dict[str, tuple[float, ...]]] = {
    "smoke": dict.fromkeys(FAMILY_TITLES, (0.0, 0.01)),
    "cpu": {"resnet": (0.0, 0.02), "vgg": (0.0, 0.01, 0.02), "mobilenet": (0.0, 0.01)},
    "paper": {"resnet": (0.0, 0.05), "vgg": (0.0, 0.01, 0.02), "mobilenet": (0.0, 0.01, 0.02)},
}
EVAL_NOISE: dict[Scale, tuple[float, ...]] = {
    "smoke": (0.01, 0.02),
    "cpu": (0.01, 0.02, 0.03, 0.04, 0.06, 0.08),
    "paper": (0.01, 0.012, 0.014, 0.016, 0.018, 0.02),
}
HELD_OUT: dict[Scale, str] = dict.fromkeys(
    SIZES, " Where a network has several b, the one with the best held-out accuracy is compared."
) | {"paper": " b is chosen on 5,000 training images that are held out, unlike in the paper."}


def clean_runs(families: Sequence[str], scale: Scale, trials: int = 0) -> list[Run]:
    """Train on clean labels, then evaluate under weight noise, for experiments 1 and 2."""
    sets = ("cifar10", "cifar100") if scale == "paper" else (SIZES[scale]["data"],)
    evaluated: dict[str, Any] = {"eval_noise": EVAL_NOISE[scale], "reestimate": True}
    evaluated |= {"held_out": 5000} if scale == "paper" else {}
    return [
        image_run(scale, family, b, seed, data=data, **evaluated)
        for seed in range(trials or TRIALS[scale])
        for data in sets
        for family in families
        for b in NOISE[scale][family]
    ]


def networks(results: Sequence[Result]) -> list[query.Setting]:
    """Each family of networks on each dataset, with its results."""
    settings: list[query.Setting] = []
    for data, (family, name) in product(query.values(results, "data"), FAMILY_TITLES.items()):
        # At the smoke scale an MLP stands for VGG.
        prefixes = (family, "mlp") if family == "vgg" else (family,)
        on_data = query.matching(results, data=data)
        if trials := [r for r in on_data if r.run.model.startswith(prefixes)]:
            settings.append(((f"{name}, {DATA_NAMES[data]}",), trials))
    return settings


def gap(result: Result) -> tuple[float, ...]:
    """Training accuracy minus test accuracy, after each epoch."""
    train, test = result.curve("train_accuracy"), result.curve("test_accuracy")
    return tuple(a - b for a, b in zip(train, test, strict=True))


def panels(results: Sequence[Result]) -> list[Panel]:
    """Gap and test accuracy by epoch."""
    plots = []
    for (name,), trials in networks(query.group(results)):
        tests = query.curves(trials, "test_accuracy", "SGD")
        gaps = tuple(
            replace(test, trials=tuple(map(gap, query.group(trials, b=test.b)))) for test in tests
        )
        plots += [
            Panel(name, "epoch", "generalization gap", gaps, signed=True),
            Panel(name, "epoch", "test accuracy", tests),
        ]
    return plots


def table(results: Sequence[Result]) -> Table:
    """The last epoch, and the best; and with new statistics of batch normalization."""
    rows = query.rows_by_b(networks(results), "SGD")
    gaps = {"gap, last epoch": lambda trials: Cell(tuple(gap(r)[-1] for r in trials))}
    return query.make_table(("network", "method"), rows, gaps | query.TEST_COLUMNS)


def check(results: Sequence[Result]) -> Verdict:
    """Whether NVRM, at its chosen b, narrows the gap and improves the test accuracy."""
    cases = []
    for (name,), trials in networks(results):
        title = f"{name}, generalization gap"
        cases += [
            query.compare_noise(title, trials, lambda r: gap(r)[-1], lower=True),
            query.compare_noise(f"{name}, test accuracy", trials, "test_accuracy"),
        ]
    return judge("At the last epoch, NVRM-SGD against SGD", cases)


EXPERIMENT = Experiment(
    name="generalization",
    number="2",
    title="Generalization",
    sentence="NVRM can significantly narrow the generalization gap while slightly improve the test "
    "accuracy.",
    source="section 4, experiment 2",
    runs=partial(clean_runs, ("vgg", "mobilenet")),
    settings=lambda scale: (
        f"Clean labels. {recipe(scale, ('vgg', 'mobilenet'))}The generalization "
        f"gap is training accuracy minus test accuracy.{HELD_OUT[scale]}"
    ),
    panels=panels,
    table=table,
    check=check,
)
