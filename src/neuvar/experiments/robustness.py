"""1: networks trained by NVRM are more robust to weight perturbation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.findings import Cell, Line, Panel, Result, Table, Verdict, decide, gain
from neuvar.experiments.generalization import DATA, clean_runs, method
from neuvar.experiments.images import FAMILIES, words
from neuvar.experiments.reading import group, number, values
from neuvar.experiments.runs import Run


def runs(scale: Scale, trials: int = 0) -> list[Run]:
    """Clean labels; every family of networks."""
    return clean_runs(scale, ("resnet", "vgg", "mobilenet"), trials)


def settings(scale: Scale) -> str:
    """What was run."""
    text = words(scale, "ResNet-34, VGG-16 and MobileNetV2")
    more = (
        "After training, Gaussian noise of each scale is added to all weights; accuracy on 500 "
        "test images, rise of the loss on 500 training images, means of 10 draws."
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
    """Whether accuracy, averaged over the scales of noise, is higher for NVRM in every network."""
    outcomes, said = [], []
    for name, data, trials in networks(results):
        grid = values(trials, "b")
        if len(grid) < 2:
            continue
        means = [
            {
                seed: sum(row) / len(row)
                for seed, row in under_noise(group(trials, b=b), "test_accuracy").items()
            }
            for b in (0.0, grid[-1])
        ]
        verdict = decide(gain(means[1], means[0]))
        outcomes.append(verdict.outcome)
        said.append(f"{name} on {data}, b = {number(grid[-1])}: {verdict.because.rstrip('.')}")
    if not outcomes:
        return Verdict("undecided", "There are no finished trials to compare.")
    whole = outcomes[0] if len(set(outcomes)) == 1 else "undecided"
    return Verdict(
        whole, f"Test accuracy, mean over the scales of noise, against SGD. {'; '.join(said)}."
    )


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
