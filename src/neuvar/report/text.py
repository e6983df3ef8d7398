"""Words that every form of the report shares, and where its results come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from neuvar.experiments.findings import Result
from neuvar.experiments.run_spec import NOT_IN_KEY, as_dict

VERDICTS = {
    "true": ("✓", "holds"),
    "false": ("✗", "does not hold"),
    "undecided": ("?", "undecided"),
    "": ("–", "not run"),
}
"""A sign and words for each outcome; "" is a claim without results."""

SCALE_TITLES = {
    "paper": "Paper scale: the paper's own settings",
    "cpu": "CPU scale: the same claim, smaller",
    "smoke": "Smoke scale: a quick test of the code",
}

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Replace characters that XML forbids.

    >>> printable("b = 0.05" + chr(0))
    'b = 0.05�'
    """
    return _CONTROL.sub("�", text)


def duration(seconds: float) -> str:
    """A time in a suitable unit.

    >>> duration(42), duration(150), duration(5400), duration(400000)
    ('42 s', '2.5 min', '1.5 h', '4.6 days')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def total_time(lines: Iterable[dict[str, Any]]) -> str:
    """The computing time of recorded lines."""
    return duration(sum(float(line.get("seconds") or 0) for line in lines))


def provenance(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Time, dates, machines, versions and commits of results, as pairs of name and values."""
    lines = [result.line for result in results]
    days = sorted(str(line["when"])[:10] for line in lines if line.get("when"))
    versions = [line.get("versions") or {} for line in lines]
    packages = dict.fromkeys(["neuvar", "torch", "python", "numpy"])
    packages |= dict.fromkeys(sorted({name for found in versions for name in found}))
    runs = [line.get("run") or {} for line in lines]
    pairs = {
        "Time": total_time(lines),
        "Dates": " to ".join(dict.fromkeys(days[:1] + days[-1:])),
        "Machine": _distinct(line.get("machine") for line in lines),
        "Device": _distinct(line.get("device") for line in lines),
        "Threads": _distinct(line.get("threads") for line in lines),
        **{name: _distinct(found.get(name) for found in versions) for name in packages},
        "Commit": _distinct(_short(line.get("commit")) for line in lines),
        **{
            name.replace("_", " ").capitalize(): _distinct(run.get(name) for run in runs)
            for name in NOT_IN_KEY
        },
    }
    return [(name, value) for name, value in pairs.items() if value]


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


def _short(commit: str | None) -> str:
    """The beginning of a commit; "+" marks sources that differ from it."""
    return commit[:12] + "+" * commit.endswith("+") if commit else ""


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(value[name])}" for name in sorted(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _distinct(values: Iterable[Any]) -> str:
    return "; ".join(sorted(set(map(_words, values)) - {""}))
