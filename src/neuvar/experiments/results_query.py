"""Select results of runs, and turn them into lines, tables and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from neuvar._validate import one_of
from neuvar.experiments.findings import NO_CHOICE, Case, Cell, Line, Result, Role, Table, gain
from neuvar.experiments.run_spec import Run, as_dict, format_value, no_run_has

Column: TypeAlias = Callable[[Sequence[Result]], "str | Cell"]
"""A column of a table: what it shows for the trials of a row."""
Setting: TypeAlias = "tuple[tuple[str, ...], Sequence[Result]]"
"""A setting in words, such as a dataset and a method, and its results."""
SEEDS = ("seed", "label_seed")
ON_AXIS = " (b on the x-axis)"
"""Follows the name of a method in figures that have b on the x-axis."""


class PlannedResults(list[Result]):
    """Results of a user's experiment, with all runs that it plans.

    So a value that no run has is not mistaken for one without results yet.
    """

    def __init__(self, results: Iterable[Result], planned: Sequence[Run]) -> None:
        super().__init__(results)
        self.planned = planned


def matching(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The results whose runs have these values, including runs that diverged."""
    for r in results[:1]:
        for name in wanted:
            one_of("field", name, [f.name for f in fields(r.run)])
    found = [r for r in results if all(getattr(r.run, k) == v for k, v in wanted.items())]
    if not isinstance(results, PlannedResults):
        return found
    for name, value in wanted.items():
        existing = [getattr(run, name) for run in results.planned if hasattr(run, name)]
        if existing and value not in existing and name not in SEEDS:  # more trials may follow
            raise ValueError(no_run_has(name, format_value(value), existing))
    return PlannedResults(found, results.planned)


def group(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """The finished results whose runs have these values, by seed, without trials for choosing b."""
    finished = [r for r in matching(results, **wanted) if r.finished and not r.for_choice]
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
    "training, last epoch": last("train_accuracy"),
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
    table_rows = (
        (*words, str(len(results)), *(show(results) for show in columns.values()))
        for words, results in rows
    )
    return Table((*names, "n", *columns), tuple(table_rows))


def rows_by_b(
    settings: Iterable[Setting], plain: str, *, fixed: float | None = None
) -> list[Setting]:
    """A row of a table for each b of each setting, also if all its trials diverged.

    The b that a verdict compares is marked. ``plain`` is the optimizer without noise.
    """
    return [
        ((*words, label_of_b(plain, b) + mark(results, b, fixed)), shown(results, b))
        for words, results in settings
        for b in values(results, "b")
    ]


def shown(results: Sequence[Result], b: float) -> list[Result]:
    """The finished trials at a b; trials for choosing b only if there are no others."""
    trials = matching(results, b=b)
    only_tried = all(r.for_choice for r in trials)
    return [r for r in trials if r.finished] if only_tried else group(results, b=b)


def mark(results: Sequence[Result], b: float, fixed: float | None = None) -> str:
    """If there are several b, the mark of the one that :func:`compare` compares."""
    noisy = with_noise(results)
    if b not in (grid := values(noisy, "b")) or len(grid) < 2:
        return ""
    compared, how = choice(noisy, fixed)
    if b == compared:
        return " (the paper's)" if how == FIXED else " (chosen)"
    return " (tried)" if all(r.for_choice for r in matching(results, b=b)) else ""


def with_noise(results: Sequence[Result]) -> list[Result]:
    """The results with weight noise."""
    return [r for r in results if r.run.b]


def curve(
    results: Sequence[Result], metric: str, label: str, role: Role = "other", b: float = 0.0
) -> Line:
    """A metric by epoch or by task, with a row for each trial.

    Args:
        results: of one method, from :func:`group`.
        metric: its name, such as "test_accuracy".
        label: name of the method in the legend.
        role: sets the colour: "plain" without noise, "nvrm" for NVRM, else "other", "third" or
            "fourth". Without roles, lines have shades of one colour.
        b: scale of the weight noise; sets the shade: the larger b, the darker.
    """
    rows = tuple(r.curve(metric) for r in results)
    steps = range(1, max(map(len, rows), default=0) + 1)
    return Line(label, tuple(map(float, steps)), rows, role, b)


def curves(
    results: Sequence[Result], metric: str, plain: str, at: Iterable[float] | None = None
) -> tuple[Line, ...]:
    """A :func:`curve` for each b in ``at``, by default all; ``plain`` names the plain optimizer."""
    return tuple(
        curve(group(results, b=b), metric, label_of_b(plain, b), "nvrm" if b else "plain", b)
        for b in (values(results, "b") if at is None else at)
    )


def against(
    results: Sequence[Result], field: str, at: Iterable[float], metric: str, label: str, role: Role
) -> Line:
    """A line of a metric's last value over a field; only seeds that have every value."""
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


FIXED = "fixed in advance"
HELD_OUT = "held_out_accuracy"


def choice(results: Sequence[Result], fixed: float | None = None) -> tuple[Any, str]:
    """The b that verdicts compare and tables mark, and how it was chosen.

    The chosen b has the highest mean accuracy on held-out images, over the seeds that were run with
    every b. If there are trials for choosing b (seeds from ``CHOICE_SEED``), only these count, and
    every b needs them. A b with more diverged trials than another is skipped. Without held-out
    images, the b that was fixed in advance is used, or None. A single b needs no choice.
    """
    every = values(results, "b")
    if len(every) < 2 and fixed in (None, *every):
        return (every[0] if every else None), ""
    choice_trials = [r for r in results if r.for_choice]
    pool = choice_trials or results
    trials = {b: by_seed(matching(pool, b=b)) for b in every}
    seeds = set.intersection(*map(set, trials.values())) if trials else set()
    known = {b: [t[s] for s in sorted(seeds) if t[s].finished] for b, t in trials.items()}
    finished = [r for some in known.values() for r in some]
    held_out = bool(seeds) and all(HELD_OUT in r.line["last"] for r in finished)
    if not held_out or (fixed is not None and not finished):
        return (fixed, FIXED) if fixed in every else (None, NO_CHOICE if every else "")

    scores = {b: {r.run.seed: r.last(HELD_OUT) for r in some} for b, some in known.items()}
    scores = {b: {s: x for s, x in own.items() if math.isfinite(x)} for b, own in scores.items()}
    most = max(map(len, scores.values()))
    scores = {b: own for b, own in scores.items() if len(own) == most}
    common = set.intersection(*map(set, scores.values()))
    if most and not common:  # each b diverged in other trials
        return None, NO_CHOICE
    how = f"chosen on held-out images in {'other' if choice_trials else 'the same'} trials"
    return max(scores, key=lambda b: sum(scores[b][seed] for seed in common)), how


def by_seed(results: Sequence[Result]) -> dict[int, Result]:
    """The results by seed; an error if two have the same seed."""
    results_by_seed: dict[int, Result] = {}
    for result in results:
        other = results_by_seed.setdefault(result.run.seed, result)
        if other is not result:
            one, two = as_dict(other.run), as_dict(result.run)
            names = [name for name in one if one[name] != two.get(name)]
            raise ValueError(
                f"two results have seed {result.run.seed} and b = {result.run.b:g}, but differ in "
                f"{', '.join(names) or 'nothing'}; compare one setting at a time"
            )
    return results_by_seed


def compare(
    name: str,
    better: Sequence[Result],
    worse: Sequence[Result],
    metric: str | Callable[[Result], float],
    *,
    lower: bool = False,
    percent: bool = True,
    ratio: bool = False,
    judged: bool = True,
    fixed: float | None = None,
) -> Case:
    """Compare two methods, seed by seed, each at one b.

    If a method has several b, the one with the best held-out accuracy is compared. A run that
    diverged, or whose metric is not finite, never counts for the claim. Each method must have one
    result per b and seed.

    Args:
        name: of the comparison.
        better: results of the method that the claim favours, including runs that diverged.
        worse: those of the other method.
        metric: what is compared: the last value of a metric, or a function of a finished result.
        lower: whether lower values are better.
        percent: whether the metric is a share, to be shown in percentage points.
        ratio: whether the metric is a logarithm, so that differences are shown as ratios.
        judged: whether it is part of the claim; otherwise it is only shown.
        fixed: the b of ``better`` that was fixed in advance, compared if nothing was held out.
    """
    value = metric if callable(metric) else lambda r: r.last(metric)
    scores: list[dict[int, float]] = []
    compared, how = [], ""
    for results, fixed_b in ((better, fixed), (worse, None)):
        b, chosen_how = choice(results, fixed_b)
        if chosen_how:
            compared.append("?" if b is None else f"{b:g}")
            how = NO_CHOICE if NO_CHOICE in (how, chosen_how) else chosen_how
        trials = by_seed([r for r in results if r.run.b == b and not r.for_choice])
        sign = -1 if lower else 1
        scores.append({s: sign * value(r) if r.finished else -math.inf for s, r in trials.items()})
    if compared:
        name += f", b = {' against '.join(compared)}"
    high, low = scores
    return Case(
        name,
        tuple(x for x in gain(high, low) if math.isfinite(x)),
        sum(not math.isfinite(x) for x in (*high.values(), *low.values())),
        lower,
        percent,
        ratio,
        failed=len(high) > 1
        and set(high.values()) == {-math.inf}
        and any(map(math.isfinite, low.values())),
        judged=judged,
        choice=how,
    )


def compare_noise(
    name: str, results: Sequence[Result], metric: str | Callable[[Result], float], **options: Any
) -> Case:
    """Compare the results with weight noise to those without; the options of :func:`compare`."""
    noisy, plain = with_noise(results), matching(results, b=0.0)
    return compare(name, noisy, plain, metric, **options)


def label_of_b(plain: str, b: float) -> str:
    """The name of a method with its b; without noise it is the plain optimizer."""
    return f"NVRM-{plain}, b = {b:g}" if b else plain
