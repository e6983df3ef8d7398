"""1: networks trained by NVRM are more robust to weight perturbation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Case, Cell, Line, Panel, Result, Table, Verdict, gain, judge
from neuvar.experiments.generalization import DATA, clean_runs, diverged, method
from neuvar.experiments.images import FAMILIES, words
from neuvar.experiments.reading import group, number, values
from neuvar.experiments.run_spec import Run


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Clean labels; every family of networks."""
    return clean_runs(scale, ("resnet", "vgg", "mobilenet"), trials)


def settings(scale: Scale) -> str:
    """What was run."""
    text = words(scale, ("resnet", "vgg", "mobilenet"))
    more = (
        "After training, Gaussian noise of each scale is added to all weights: accuracy on the "
        "test images, rise of the loss on the training images, each a mean of 6 draws."
    )
    wider = (
        " Networks this small bear more noise than the paper's, so the scales go beyond its .02."
        if scale == "cpu"
        else ""
    )
    return f"Clean labels. {text}{more}{wider}"


def under_noise(results: Sequence[Result], metric: str) -> dict[int, tuple[float, ...]]:
    """A metric at each scale of evaluation noise, by seed; NaN for what was not finite."""
    return {
        r.run.seed: tuple(math.nan if x is None else x for x in r.line["under_noise"][metric])
        for r in results
    }


def scales(results: Sequence[Result]) -> tuple[float, ...]:
    """The scales of evaluation noise."""
    return tuple(results[0].line["under_noise"]["scales"]) if results else ()


def networks(results: Sequence[Result]) -> list[tuple[str, str, list[Result]]]:
    """Name and data of each network, and its results."""
    return [
        (FAMILIES[family], DATA[data], found)
        for data in values(results, "data")
        for family in FAMILIES
        if (found := [r for r in group(results, data=data) if family in _family(r)])
    ]


def _family(result: Result) -> str:
    """Family of a network; in tests of the code a perceptron stands for VGG."""
    return "vgg" if result.run.model == "mlp" else result.run.model


def panels(results: Sequence[Result]) -> list[Panel]:
    """Test accuracy and expected sharpness against the scale of the noise."""
    found = []
    for metric, title, percent in (
        ("test_accuracy", "test accuracy", True),
        ("expected_sharpness", "expected sharpness", False),
    ):
        for name, data, trials in networks(results):
            lines = tuple(
                Line(
                    method(b),
                    scales(group(trials, b=b)),
                    tuple(under_noise(group(trials, b=b), metric).values()),
                    "nvrm" if b else "plain",
                )
                for b in values(trials, "b")
            )
            panel = Panel(
                f"{name} on {data}: {title}", "scale of weight noise", title, lines, percent=percent
            )
            found.append(panel)
    return found


def table(results: Sequence[Result]) -> Table:
    """Accuracy without noise, and at three of the scales."""
    at = scales(group(results))
    shown = [at[k] for k in sorted({1, len(at) // 2, len(at) - 1})] if len(at) > 2 else list(at)
    rows: list[tuple[str | Cell, ...]] = []
    for name, data, trials in networks(results):
        for b in values(trials, "b"):
            found = group(trials, b=b)
            noisy = under_noise(found, "test_accuracy").values()
            clean = Cell(tuple(r.last("test_accuracy") for r in found))
            cells = [Cell(tuple(row[at.index(x)] for row in noisy)) for x in shown]
            rows.append((f"{name}, {data}", method(b), str(len(found)), clean, *cells))
    noise = (f"at {number(x)}" for x in shown)
    return Table(("network", "method", "n", "no noise", *noise), tuple(rows))


def check(results: Sequence[Result]) -> Verdict:
    """Whether accuracy is higher and sharpness lower, averaged over the scales, for every b."""
    cases = []
    for name, data, trials in networks(results):
        for b in filter(None, values(trials, "b")):
            for metric, title, sign in (
                ("test_accuracy", "test accuracy", 1.0),
                ("expected_sharpness", "sharpness lower, loss × 100", -1.0),
            ):
                rows = [under_noise(group(trials, b=s), metric) for s in (b, 0.0)]
                found = tuple(sign * x for x in gain(*_means(*rows)))
                words = f"{name} on {data}, b = {number(b)}, {title}"
                cases.append(Case(words, found, diverged(results, trials[0].run.model, b)))
    return judge("Mean over the scales of weight noise, NVRM-SGD against SGD.", cases)


def _means(*methods: dict[int, tuple[float, ...]]) -> list[dict[int, float]]:
    """For each method the mean over the scales by seed, of scales where all losses are finite."""
    rows = [row for method in methods for row in method.values()]
    kept = [k for k in range(len(rows[0])) if all(math.isfinite(row[k]) for row in rows)]
    return [
        {seed: statistics.fmean(row[k] for k in kept) for seed, row in method.items()}
        if kept
        else {}
        for method in methods
    ]


EXPERIMENT = Experiment(
    name="robustness",
    number="1",
    title="Robustness to weight noise",
    sentence="The models trained by NVRM are significantly more robust to weight perturbation and "
    "have lower expected minima sharpness.",
    source="section 4, experiment 1",
    runs=runs,
    settings=settings,
    panels=panels,
    table=table,
    check=check,
)
