"""1: networks trained by NVRM are more robust to weight perturbation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from neuvar.experiments import results_query as query
from neuvar.experiments.experiment import Experiment
from neuvar.experiments.findings import Cell, Line, Panel, Result, Table, Verdict, judge
from neuvar.experiments.generalization import HELD_OUT, clean_runs, networks
from neuvar.experiments.images import FAMILY_TITLES, recipe

SMALL = " Small networks tolerate more noise than the paper's, so the scales go beyond 0.02."


def under_noise(result: Result, metric: str) -> tuple[float, ...]:
    """A metric at each scale of evaluation noise; NaN where it was not finite."""
    return tuple(math.nan if x is None else x for x in result.line["under_noise"][metric])


def scales(results: Sequence[Result]) -> tuple[float, ...]:
    """The scales of evaluation noise."""
    return tuple(results[0].line["under_noise"]["scales"]) if results else ()


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and expected sharpness against the scale of the noise."""
    plots = []
    for metric, y_label, percent in (
        ("test_accuracy", "test accuracy", True),
        ("expected_sharpness", "sharpness (loss rise)", False),
    ):
        for (name,), every in networks(query.group(results)):
            lines = []
            for b in query.values(every, "b"):
                trials = query.group(every, b=b)
                rows = tuple(under_noise(r, metric) for r in trials)
                label = query.label_of_b("SGD", b)
                lines.append(Line(label, scales(trials), rows, "nvrm" if b else "plain", b))
            panel = Panel(name, "scale of weight noise", y_label, tuple(lines))
            plots.append(replace(panel, percent=percent, log_y=not percent))
    return plots


def table(results: Sequence[Result]) -> Table:
    """Accuracy without noise, and at three of the scales."""
    at = scales(query.group(results))
    shown = [at[k] for k in sorted({1, len(at) // 2, len(at) - 1})] if len(at) > 2 else list(at)

    def noisy(scale: float) -> query.Column:
        return lambda trials: Cell(
            tuple(under_noise(r, "test_accuracy")[at.index(scale)] for r in trials)
        )

    columns = {f"noise {scale:g}": noisy(scale) for scale in shown}
    clean = {
        "training": query.last("train_accuracy"),
        "no noise": query.last("test_accuracy"),
    }
    rows = query.rows_by_b(networks(results), "SGD")
    return query.make_table(("network", "method"), rows, clean | columns)


def check(results: Sequence[Result]) -> Verdict:
    """Whether accuracy is higher and sharpness lower at the chosen b, averaged over the scales."""
    cases = []
    for (name,), trials in networks(results):
        title = f"{name}, sharpness (rise of the loss)"
        shown = {"lower": True, "percent": False, "ratio": True}
        cases += [
            query.compare_noise(f"{name}, test accuracy", trials, mean_accuracy),
            query.compare_noise(title, trials, mean_log_rise, **shown),
        ]
    return judge("Mean over the scales of weight noise, NVRM-SGD against SGD", cases)


def mean_accuracy(result: Result) -> float:
    """Mean test accuracy over the scales of evaluation noise."""
    return statistics.fmean(under_noise(result, "test_accuracy"))


def mean_log_rise(result: Result) -> float:
    """Mean over the scales of the logarithm of the rise of the loss.

    Infinite if a rise is not finite; NaN if one is not positive, and so has no logarithm.
    """
    rises = under_noise(result, "expected_sharpness")
    if not all(map(math.isfinite, rises)):
        return math.inf
    return statistics.fmean(map(math.log, rises)) if min(rises) > 0 else math.nan


EXPERIMENT = Experiment(
    name="robustness",
    number="1",
    title="Robustness to weight noise",
    sentence="The models trained by NVRM are significantly more robust to weight perturbation and "
    "have lower expected minima sharpness.",
    source="section 4, experiment 1",
    runs=partial(clean_runs, tuple(FAMILY_TITLES)),
    settings=lambda scale: (
        f"Clean labels. {recipe(scale, tuple(FAMILY_TITLES))}After training, Gaussian noise of "
        "each scale is added to all weights. Accuracy is measured on the test images, the rise of "
        "the loss (expected sharpness) on the training images; each is a mean of 6 draws. "
        "Sharpness is compared by the mean of its logarithm over the scales, and shown as a ratio."
        f"{HELD_OUT[scale]}{SMALL if scale == 'cpu' else ''}"
    ),
    panels=panels,
    table=table,
    check=check,
)
