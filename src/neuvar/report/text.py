"""Words that every form of the report shares, and where its results come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from neuvar.experiments.findings import Cell, Result, Table, Verdict
from neuvar.experiments.run_spec import NOT_IN_KEY, as_dict

VERDICTS = {
    "true": ("✓", "holds"),
    "false": ("✗", "does not hold"),
    "undecided": ("?", "undecided"),
    "preliminary-true": ("(✓)", "preliminary: holds so far"),
    "preliminary-false": ("(✗)", "preliminary: does not hold so far"),
    "preliminary-undecided": ("(?)", "preliminary: undecided so far"),
    "numbers": ("–", "numbers only"),
    "": ("–", "not run"),
}
"""A sign and words for each status of a finding; "" is a claim without results."""

SCALE_TITLES = {
    "paper": "Paper scale: the paper's own settings",
    "cpu": "CPU scale: the same claim, smaller",
    "smoke": "Smoke scale: a quick test of the code",
}


def number(cell: str | Cell) -> float | None:
    """The value by which a cell of a table is sorted, if it is a number.

    >>> number("40 %"), number("0.05"), number("SGD"), number(Cell((0.5, 0.7)))
    (40.0, 0.05, None, 0.6)
    """
    if isinstance(cell, Cell):
        value = cell.mean
    else:
        try:
            value = float(cell.strip().removesuffix("%").replace("−", "-").replace(",", ""))
        except ValueError:
            return None
    return value if math.isfinite(value) else None


def numeric_columns(table: Table) -> list[bool]:
    """Whether each column of a table holds only numbers and empty cells."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    known = [[cell for cell in cells if str(cell) not in ("", "–")] for cells in columns]
    return [bool(cells) and all(number(cell) is not None for cell in cells) for cells in known]


def comparisons(verdict: Verdict) -> Table:
    """The numbers of a verdict: a row for each case."""
    rows = []
    for case in verdict.cases:
        size, between = case.numbers
        word = case.word if case.judged else f"{case.word}, not judged"
        trials, lost = str(len(case.differences)), str(case.lost)
        rows.append((case.name, size or "–", between or "–", trials, lost, word))
    columns = ("comparison", "difference", "95 % interval", "n", "diverged", "result")
    return Table(columns, tuple(rows))


def total_time(lines: Iterable[dict[str, Any]]) -> str:
    """The computing time of recorded lines, in a suitable unit.

    >>> [total_time([{"seconds": s}]) for s in (42, 150, 5400, 400000)]
    ['42 s', '2.5 min', '1.5 h', '4.6 days']
    """
    seconds = sum(float(line.get("seconds") or 0) for line in lines)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def dates(lines: Iterable[dict[str, Any]]) -> str:
    """The first and the last day of recorded lines; empty if no line has a date."""
    days = sorted(str(line["when"])[:10] for line in lines if line.get("when"))
    return " to ".join(dict.fromkeys(days[:1] + days[-1:]))


def provenance(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Time, dates, machines, versions and commits of results, as pairs of name and values."""
    lines = [result.line for result in results]
    values: dict[str, set[str]] = {}
    for line in lines:
        run, commit = line.get("run") or {}, line.get("commit") or ""
        facts = {
            "Machine": line.get("machine"),
            "Device": line.get("device"),
            "Threads": line.get("threads"),
            **dict.fromkeys(["neuvar", "torch", "python", "numpy"]),
            **dict(sorted((line.get("versions") or {}).items())),
            # "+" marks sources that differ from the commit.
            "Commit": commit[:12] + "+" * commit.endswith("+"),
            **{name.replace("_", " ").capitalize(): run.get(name) for name in NOT_IN_KEY},
        }
        for name, value in facts.items():
            values.setdefault(name, set()).add(_words(value))
    pairs = {"Time": total_time(lines), "Dates": dates(lines)}
    pairs |= {name: "; ".join(sorted(words - {""})) for name, words in values.items()}
    return [(name, words) for name, words in pairs.items() if words]


def diverged_runs(diverged: Iterable[Result], results: Sequence[Result]) -> list[tuple[str, str]]:
    """Runs that diverged, as pairs: the settings that differ among the results, and the reason."""
    runs = [as_dict(result.run) for result in results]
    names = dict.fromkeys(name for run in runs for name in run)
    differing = [name for name in names if len({str(run.get(name)) for run in runs}) > 1]
    pairs = []
    for result in diverged:
        run = as_dict(result.run)
        what = ", ".join(f"{name} = {_words(run[name])}" for name in differing if name in run)
        reason = str(result.line.get("reason") or "diverged")
        pairs.append((what or f"seed = {run['seed']}", reason))
    return pairs


def _words(value: Any) -> str:
    """A recorded value as text; empty for None and False."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(value[name])}" for name in sorted(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)
