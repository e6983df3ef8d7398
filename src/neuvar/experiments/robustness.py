"""1: networks trained by NVRM are more robust to weight perturbation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Cell, Line, Panel, Result, Table, Verdict, judge
from neuvar.experiments.generalization import HELD_OUT, clean_runs, networks
from neuvar.experiments.images import FAMILIES, recipe
from neuvar.experiments.run_spec import Run

SMALL = " Small networks tolerate more noise than the paper's, so the scales go beyond 0.02."


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Clean labels; every family of networks."""
    return clean_runs(scale, tuple(FAMILIES), trials)


def under_noise(results: Sequence[Result], metric: str) -> dict[int, tuple[float, ...]]:
    """A metric at each scale of evaluation noise, by seed; NaN where it was not finite."""
    return {
        r.run.seed: tuple(math.nan if x is None else x for x in r.line["under_noise"][metric])
        for r in results
    }


def scales(results: Sequence[Result]) -> tuple[float, ...]:
    """The scales of evaluation noise."""
    return tuple(results[0].line["under_noise"]["scales"]) if results else ()


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and expected sharpness against the scale of the noise."""
    made = []
    for metric, y_label, percent in (
        ("test_accuracy", "test accuracy", True),
        ("expected_sharpness", "sharpness (loss rise)", False),
    ):
        for (name,), every in networks(query.group(results)):
            lines = []
            for b in query.values(every, "b"):
                trials = query.group(every, b=b)
                rows = tuple(under_noise(trials, metric).values())
                label, role = query.label_of_b("SGD", b), query.role_of_b(b)
                lines.append(Line(label, scales(trials), rows, role, b))
            panel = Panel(name, "scale of weight noise", y_label, tuple(lines))
            made.append(replace(panel, percent=percent, log_y=not percent))
    return made


def table(results: Sequence[Result]) -> Table:
    """Accuracy without noise, and at three of the scales."""
    at = scales(query.group(results))
    shown = [at[k] for k in sorted({1, len(at) // 2, len(at) - 1})] if len(at) > 2 else list(at)

    def noisy(scale: float) -> query.Column:
        return lambda trials: Cell(
            tuple(row[at.index(scale)] for row in under_noise(trials, "test_accuracy").values())
        )

    columns = {f"noise {scale:g}": noisy(scale) for scale in shown}
    clean = {"no noise": query.last("test_accuracy")}
    rows = query.rows_by_b(networks(results), "SGD")
    return query.make_table(("network", "method"), rows, clean | columns)


def check(results: Sequence[Result]) -> Verdict:
    """Whether accuracy is higher and sharpness lower at the chosen b, averaged over the scales."""
    cases = []
    for (name,), trials in networks(results):
        pair = query.with_noise(trials), query.matching(trials, b=0.0)
        title = f"{name}, sharpness (rise of the loss)"
        cases += [
            query.compare(f"{name}, test accuracy", *pair, mean_accuracy),
            query.compare(title, *pair, mean_log_rise, lower=True, percent=False, ratio=True),
        ]
    return judge("Mean over the scales of weight noise, NVRM-SGD against SGD", cases)


def mean_accuracy(result: Result) -> float:
    """Mean test accuracy over the scales of evaluation noise."""
    (row,) = under_noise([result], "test_accuracy").values()
    return statistics.fmean(row)


def mean_log_rise(result: Result) -> float:
    """Mean over the scales of the logarithm of the rise of the loss.

    Infinite if a rise is not finite; NaN if one is not positive, and so has no logarithm.
    """
    (row,) = under_noise([result], "expected_sharpness").values()
    if not all(map(math.isfinite, row)):
        return math.inf
    return statistics.fmean(map(math.log, row)) if min(row) > 0 else math.nan


EXPERIMENT = Experiment(
    name="robustness",
    number="1",
    title="Robustness to weight noise",
    sentence="The models trained by NVRM are significantly more robust to weight perturbation and "
    "have lower expected minima sharpness.",
    source="section 4, experiment 1",
    runs=runs,
    settings=lambda scale: (
        f"Clean labels. {recipe(scale, tuple(FAMILIES))}After training, Gaussian noise of each "
        "scale is added to all weights. Accuracy is measured on the test images, the rise of the "
        "loss (expected sharpness) on the training images; each is a mean of 6 draws. "
        "Sharpness is compared by the mean of its logarithm over the scales, and shown as a ratio."
        f"{HELD_OUT[scale]}{SMALL if scale == 'cpu' else ''}"
    ),
    panels=panels,
    table=table,
    check=check,
)
