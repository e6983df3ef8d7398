"""Read results: which belong together, and their numbers by trial."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from neuvar.experiments.findings import Cell, Line, Result, Role


def group(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The finished results whose runs have the wanted values, in the order of their seeds."""
    found = [
        r for r in results if r.finished and all(getattr(r.run, k) == v for k, v in wanted.items())
    ]
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

    None if there are no results, or none that set images aside.
    """
    means = {
        value: statistics.fmean(r.last(metric) for r in found)
        for value in values(results, field)
        if (found := [r for r in group(results, **{field: value}) if metric in r.line["last"]])
    }
    return max(means, key=lambda value: means[value]) if means else None


def number(x: float) -> str:
    """A number as we write it: .03 rather than 0.03.

    >>> number(0.03), number(0.1), number(3.0)
    ('.03', '.1', '3')
    """
    return f"{x:g}".removeprefix("0") if 0 < x < 1 else f"{x:g}"


def label_of_b(plain: str, b: float) -> str:
    """The name of a method with its scale of noise; without noise it is the plain one."""
    return f"NVRM-{plain}, b = {number(b)}" if b else plain
