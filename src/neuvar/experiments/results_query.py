"""Select results of runs, and turn them into lines, tables and comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from neuvar.experiments.findings import Case, Cell, Line, Result, Role, Table, gain

Column: TypeAlias = Callable[[Sequence[Result]], "str | Cell"]
"""What a column of a table shows of the trials of a row."""
Setting: TypeAlias = "tuple[tuple[str, ...], Sequence[Result]]"
"""A setting in words, such as a data set and a method, and its results."""
ON_AXIS = " (b on the x-axis)"
"""Follows the name of a method in figures that have b on the x-axis."""


def matching(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The results whose runs have these values, including runs that diverged."""
    return [r for r in results if all(getattr(r.run, k) == v for k, v in wanted.items())]


def group(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The finished results whose runs have these values, sorted by seed."""
    finished = [r for r in matching(results, **wanted) if r.finished]
    return sorted(finished, key=lambda r: r.run.seed)


def values(results: Sequence[Result], field: str) -> list[Any]:
    """The distinct values of a field of the runs, sorted."""
    return sorted({getattr(r.run, field) for r in results})


def cell(results: Sequence[Result], metric: str) -> Cell:
    """The last value of a metric over all trials."""
    return Cell(tuple(r.last(metric) for r in results))


def last(metric: str) -> Column:
    """A column with the last value of a metric."""
    return lambda results: cell(results, metric)


def best(metric: str) -> Column:
    """A column with the best value of a metric at any epoch."""
    return lambda results: Cell(tuple(r.best(metric) for r in results))


TEST_COLUMNS: dict[str, Column] = {
    "test, last epoch": last("test_accuracy"),
    "test, best epoch": best("test_accuracy"),
    "test, batch norm at clean weights": lambda results: Cell(
        tuple(r.line["reestimated"]["test_accuracy"] for r in results)
    ),
}
LABEL_COLUMNS = TEST_COLUMNS | {"memorized, last epoch": last("memorized")}


def make_table(
    names: Sequence[str], rows: Iterable[Setting], columns: Mapping[str, Column]
) -> Table:
    """A table with a row for each setting: its names, n, and what the columns show.

    Args:
        names: the first columns, such as ("data", "method").
        rows: the text of these columns, and the finished results of the setting.
        columns: the other columns by their names, such as ``{"test": last("test_accuracy")}``.
    """
    made = (
        (*words, str(len(results)), *(show(results) for show in columns.values()))
        for words, results in rows
    )
    return Table((*names, "n", *columns), tuple(made))


def rows_by_b(settings: Iterable[Setting], plain: str) -> list[Setting]:
    """A row of a table for each b of each setting; ``plain`` is the optimizer without noise."""
    return [
        ((*words, label_of_b(plain, b)), group(results, b=b))
        for words, results in settings
        for b in values(results, "b")
    ]


def curve(
    results: Sequence[Result], metric: str, label: str, role: Role = "other", b: float = 0.0
) -> Line:
    """A metric by epoch or by task, with a row for each trial."""
    rows = tuple(r.curve(metric) for r in results)
    steps = range(1, max(map(len, rows), default=0) + 1)
    return Line(label, tuple(map(float, steps)), rows, role, b)


def curves(
    results: Sequence[Result], metric: str, plain: str, at: Iterable[float] | None = None
) -> tuple[Line, ...]:
    """A :func:`curve` for each b; ``plain`` is the name of the optimizer without noise."""
    return tuple(
        curve(group(results, b=b), metric, label_of_b(plain, b), role_of_b(b), b)
        for b in (values(results, "b") if at is None else at)
    )


def against(
    results: Sequence[Result], field: str, at: Iterable[float], metric: str, label: str, role: Role
) -> Line:
    """The last value of a metric against a field of the runs, of trials that have every value."""
    groups = {x: {r.run.seed: r.last(metric) for r in group(results, **{field: x})} for x in at}
    groups = {x: trials for x, trials in groups.items() if trials}
    seeds = set.intersection(*map(set, groups.values())) if groups else set()
    rows = tuple(tuple(trials[seed] for trials in groups.values()) for seed in sorted(seeds))
    return Line(label, tuple(groups), rows, role)


def flat(results: Sequence[Result], at: Iterable[float], metric: str, label: str) -> Line:
    """The last value of a method without noise, as a horizontal line over the range of x."""
    every = sorted(set(at))
    x = tuple(dict.fromkeys([*every[:1], *every[-1:]]))
    return Line(label, x, tuple((r.last(metric),) * len(x) for r in results), "plain")


def chosen(results: Sequence[Result], field: str, metric: str = "held_out_accuracy") -> Any:
    """The value of a field with the best mean accuracy on held-out images.

    A value with a trial that diverged is not chosen. A single value is chosen without comparison.
    None if there are no results, or if there are several values and none has held-out images.
    """
    every = values(results, field)
    if len(every) < 2:
        return every[0] if every else None
    means = {}
    for value in every:
        trials = matching(results, **{field: value})
        if all(r.finished and metric in r.line["last"] for r in trials):
            means[value] = statistics.fmean(r.last(metric) for r in trials)
    return max(means, key=lambda value: means[value]) if means else None


def at_chosen(results: Sequence[Result]) -> list[Result]:
    """The results of one method at its chosen b."""
    return matching(results, b=chosen(results, "b"))


def compare(
    name: str,
    better: Sequence[Result],
    worse: Sequence[Result],
    metric: str | Callable[[Result], float],
    *,
    lower: bool = False,
    percent: bool = True,
) -> Case:
    """Compare two methods, seed by seed.

    Args:
        name: of the comparison.
        better: results of the method that the claim favours, including runs that diverged.
        worse: those of the other method.
        metric: what is compared: the last value of a metric, or a function of a finished result.
        lower: whether lower values are better.
        percent: whether the metric is a share, to be shown in percentage points.
    """
    value = metric if callable(metric) else lambda r: r.last(metric)
    high, low = ({r.run.seed: value(r) for r in group(results)} for results in (better, worse))
    differences = gain(low, high) if lower else gain(high, low)
    lost = sum(not r.finished for r in (*better, *worse))
    return Case(name, differences, lost, lower, percent)


def label_of_b(plain: str, b: float) -> str:
    """The name of a method with its b; without noise it is the plain optimizer."""
    return f"NVRM-{plain}, b = {b:g}" if b else plain


def role_of_b(b: float) -> Role:
    """The role of a method with this b."""
    return "nvrm" if b else "plain"
