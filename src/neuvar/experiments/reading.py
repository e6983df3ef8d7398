"""Read results: which belong together, and their numbers by trial."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from neuvar.experiments.findings import Case, Cell, Line, Result, Role, gain

BATCHNORM = "test, batch norm at clean weights"
"""What :func:`anew` is called in tables."""


def group(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The finished results whose runs have the wanted values, in the order of their seeds."""
    found = [r for r in matching(results, **wanted) if r.finished]
    return sorted(found, key=lambda r: r.run.seed)


def values(results: Sequence[Result], field: str) -> list[Any]:
    """The different values of a field among the runs, in order."""
    return sorted({getattr(r.run, field) for r in results})


def by_seed(results: Sequence[Result], metric: str) -> dict[int, float]:
    """The last value of a metric for each seed."""
    return {r.run.seed: r.last(metric) for r in results}


def cell(results: Sequence[Result], metric: str) -> Cell:
    """The last value of a metric over all trials."""
    return Cell(tuple(r.last(metric) for r in results))


def best(results: Sequence[Result], metric: str) -> Cell:
    """The best value of a metric at any epoch, over all trials."""
    return Cell(tuple(r.best(metric) for r in results))


def curve(results: Sequence[Result], metric: str, label: str, role: Role) -> Line:
    """A metric by epoch or by task, with a row for each trial."""
    rows = tuple(r.curve(metric) for r in results)
    steps = range(1, max(map(len, rows), default=0) + 1)
    return Line(label, tuple(map(float, steps)), rows, role)


def against(
    results: Sequence[Result], field: str, at: Iterable[float], metric: str, label: str, role: Role
) -> Line:
    """The last value of a metric against a field of the runs, where every trial has it."""
    groups = {x: by_seed(group(results, **{field: x}), metric) for x in at}
    groups = {x: found for x, found in groups.items() if found}
    seeds = set.intersection(*(set(found) for found in groups.values())) if groups else set()
    rows = tuple(tuple(found[seed] for found in groups.values()) for seed in sorted(seeds))
    return Line(label, tuple(groups), rows, role)


def flat(results: Sequence[Result], at: Iterable[float], metric: str, label: str) -> Line:
    """The last value of a method without noise, as a level line to compare with."""
    x = tuple(at)
    return Line(label, x, tuple((r.last(metric),) * len(x) for r in results), "plain")


def chosen(results: Sequence[Result], field: str, metric: str = "held_out_accuracy") -> Any:
    """The value of a field that did best on held-out images, on average over the trials.

    A value with a trial that diverged is not chosen. If there is but one value it is that; None if
    there are no results, or several and none that set images aside.
    """
    every = values(results, field)
    if len(every) < 2:
        return every[0] if every else None
    means = {}
    for value in every:
        trials = [r for r in results if getattr(r.run, field) == value]
        if all(r.finished and metric in r.line["last"] for r in trials):
            means[value] = statistics.fmean(r.last(metric) for r in trials)
    return max(means, key=lambda value: means[value]) if means else None


def at_chosen(results: Sequence[Result]) -> list[Result]:
    """The results of one method at the b that was chosen for it."""
    return matching(results, b=chosen(results, "b"))


def anew(results: Sequence[Result]) -> Cell:
    """Test accuracy with statistics of batch normalisation estimated anew, at clean weights."""
    return Cell(tuple(r.line["reestimated"]["test_accuracy"] for r in results))


def compare(
    name: str,
    better: Sequence[Result],
    worse: Sequence[Result],
    metric: str,
    *,
    lower: bool = False,
) -> Case:
    """By how much one method's last value of a metric is above another's, trial by trial.

    Args:
        name: of the comparison.
        better: results of the method that a sentence favours, with those that diverged.
        worse: those of the other.
        metric: what is compared.
        lower: whether lower values are better.
    """
    found = gain(by_seed(group(better), metric), by_seed(group(worse), metric))
    lost = sum(not r.finished for r in (*better, *worse))
    return Case(name, tuple(-x for x in found) if lower else found, lost)


def matching(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The results whose runs have the wanted values, with those that diverged."""
    return [r for r in results if all(getattr(r.run, k) == v for k, v in wanted.items())]


def number(x: float) -> str:
    """A number as we write it: .03 rather than 0.03.

    >>> number(0.03), number(0.1), number(3.0)
    ('.03', '.1', '3')
    """
    return f"{x:g}".removeprefix("0") if 0 < x < 1 else f"{x:g}"


def label_of_b(plain: str, b: float) -> str:
    """The name of a method with its scale of noise; without noise it is the plain one."""
    return f"NVRM-{plain}, b = {number(b)}" if b else plain
