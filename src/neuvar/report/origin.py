"""Where results come from: machines, versions, dates, and what became of runs that diverged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from neuvar.experiments.findings import Result
from neuvar.experiments.run_spec import NOT_IN_KEY, as_dict


def facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    """What was recorded beside the numbers, as pairs of a name and its values."""
    lines = [result.line for result in results]
    days = sorted(str(line["when"]) for line in lines if line.get("when"))
    versions = [line.get("versions") or {} for line in lines]
    pairs = [
        ("Time", duration(sum(float(line.get("seconds") or 0) for line in lines))),
        ("Dates", " to ".join(dict.fromkeys(day[:10] for day in days[:1] + days[-1:]))),
        ("Machine", _distinct(_words(line.get("machine")) for line in lines)),
        ("Device", _distinct(str(line.get("device") or "") for line in lines)),
        ("Threads", _distinct(str(line.get("threads") or "") for line in lines)),
        *((name, _distinct(str(v.get(name) or "") for v in versions)) for name in _names(versions)),
        ("Commit", _distinct(_short(line.get("commit")) for line in lines)),
    ]
    how = [line.get("run") or {} for line in lines]
    pairs += [
        (name.replace("_", " ").capitalize(), _distinct(_words(run.get(name)) for run in how))
        for name in NOT_IN_KEY
    ]
    return [(name, said) for name, said in pairs if said]


def _short(commit: str | None) -> str:
    """The beginning of a commit, with the sign for sources that differ from it."""
    return commit[:12] + "+" * commit.endswith("+") if commit else ""


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(42), duration(150), duration(5400), duration(400000)
    ('42 s', '2.5 min', '1.5 h', '4.6 days')
    """
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def mishaps(diverged: Iterable[Result], results: Sequence[Result]) -> list[tuple[str, str]]:
    """Runs that diverged, as pairs of what sets the run apart from the others and the reason."""
    runs = [as_dict(result.run) for result in results]
    names = dict.fromkeys(name for run in runs for name in run)
    apart = [name for name in names if len({str(run.get(name)) for run in runs}) > 1]
    said = []
    for result in diverged:
        run = as_dict(result.run)
        what = ", ".join(f"{name} = {_words(run[name])}" for name in apart if name in run)
        said.append((what or f"seed = {run['seed']}", str(result.line.get("reason") or "diverged")))
    return said


def _names(versions: Iterable[dict[str, Any]]) -> list[str]:
    first = ["neuvar", "torch", "python", "numpy"]
    return [*first, *sorted({name for found in versions for name in found} - set(first))]


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


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values) - {""}))
