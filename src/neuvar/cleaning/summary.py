"""What came of a cleaning, in words and numbers: for a person, and for a program."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neuvar.cleaning.files import Source
from neuvar.cleaning.issues import Array, LabelIssues, Transition

MADE_BY = "neuvar clean"
MOST_CLASSES = 12
"""Classes up to which the matrix is a table that a person can read."""
MOST_ROWS = 50
"""Classes up to which the summary for programs has the whole matrix."""
SHOWN = 10
"""Rows of the tables of the worst."""

_SPECIAL = re.compile(r"([\\`*_\[\]|~$#])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, eq=False)
class Cleaning:
    """Labels that were looked at, and how.

    Attributes:
        source: the data.
        issues: what was found.
        settings: how it was found, by the names of the options.
        command: the command line.
        again: those of its words that say where data and labels are.
        seconds: how long it took.
    """

    source: Source
    issues: LabelIssues
    settings: dict[str, Any]
    command: str
    again: tuple[str, ...]
    seconds: float

    @property
    def flagged(self) -> int:
        """How many labels are taken to be wrong."""
        return int(self.issues.flagged.sum())


def printable(text: str) -> str:
    """A text without signs that no page can show.

    >>> printable("cat" + chr(0))
    'cat�'
    """
    return _CONTROL.sub("�", text)


def worst_pairs(issues: LabelIssues, most: int = SHOWN) -> list[tuple[str, str, int]]:
    """Given label, suggested label and number of flagged examples; the most frequent first."""
    pairs = issues.pairs
    order = np.argsort(-pairs, axis=None, kind="stable")[:most]
    found = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, pairs.shape), strict=True)]
    return [(issues.names[i], issues.names[j], int(pairs[i, j])) for i, j in found if pairs[i, j]]


def versions() -> dict[str, str]:
    """Of what has computed it."""
    return {
        "python": platform.python_version(),
        "neuvar": importlib.metadata.version("neuvar"),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def summary(cleaning: Cleaning) -> dict[str, Any]:
    """What a program may want to know, ready for JSON."""
    source, issues = cleaning.source, cleaning.issues
    rate = issues.noise_rate
    return {
        "made_by": MADE_BY,
        "data": {"name": source.name, "kind": source.kind, "sha256": source.sha256},
        "classes": list(issues.names),
        "n": len(issues),
        "flagged": cleaning.flagged,
        "noise_rate": {
            "value": rate.value,
            "low": rate.low,
            "high": rate.high,
            "confidence": rate.confidence,
        },
        "transition": _transition(issues.transition) | {"confidence": issues.transition.confidence},
        "settings": cleaning.settings,
        "seed": cleaning.settings.get("seed"),
        "command": cleaning.command,
        "versions": versions(),
        "seconds": round(cleaning.seconds, 3),
    }


def _transition(t: Transition) -> dict[str, Any]:
    """The whole matrix with its intervals, or of many classes what is not 0."""
    if len(t.matrix) <= MOST_ROWS:
        return {
            "meaning": "probability of each given label (column) for each true class (row)",
            "matrix": _rows(t.matrix),
            "low": _rows(t.low),
            "high": _rows(t.high),
        }
    true, given = np.nonzero(np.nan_to_num(t.matrix))
    shares = _rows(np.stack([x[true, given] for x in (t.matrix, t.low, t.high)], 1))
    return {
        "meaning": "number of a true class, number of a given label, probability of this label for "
        "this class, lower and upper end of its interval; elements that are 0 are left out",
        "elements": [[int(i), int(j), *row] for i, j, row in zip(true, given, shares, strict=True)],
    }


def _rows(matrix: Array) -> list[list[float | None]]:
    """Numbers to six digits; None where nothing is known."""
    return [
        [float(f"{value:.6g}") if np.isfinite(value) else None for value in row]
        for row in matrix.tolist()
    ]


def summary_markdown(cleaning: Cleaning) -> str:
    """A page of text and tables."""
    source, issues = cleaning.source, cleaning.issues
    sure = f"{100 * issues.noise_rate.confidence:.3g} %"
    parts = [
        f"# Labels of {escaped(source.name)}",
        f"{findings(cleaning)} Intervals have a confidence of {sure} and are those of "
        "sampling: where the network itself is mistaken, they are too narrow.",
        "`issues.csv` has all examples, the most suspicious first; `labels.csv` has all labels in "
        "the order of the data, with flagged ones replaced by what is suggested; `index.html` "
        "shows the worst, to be accepted or rejected.",
    ]
    if cleaning.flagged:
        parts += ["## Pairs", _pairs_table(issues)]
    parts += ["## Classes", _class_table(issues)]
    if cleaning.flagged:
        parts += ["## The most suspicious", _worst_table(cleaning)]
    if len(issues.names) <= MOST_CLASSES:
        parts += [
            "## From true classes to given labels",
            "Estimated probability of each given label (column) for each true class (row), in "
            "percent, with its interval.",
            _transition_table(issues),
        ]
    said = [*cleaning.settings.items(), ("seconds", f"{cleaning.seconds:.1f}")]
    said += [(f"version of {name}", version) for name, version in versions().items()]
    facts = [(escaped(name.replace("_", " ")), escaped(str(value))) for name, value in said]
    parts += ["## How it was found", _table(("setting", "value"), facts)]
    command = printable(cleaning.command).replace("\n", "�")
    parts.append(f"```sh\n{command}\n```")
    return "\n\n".join(parts) + "\n"


def findings(cleaning: Cleaning) -> str:
    """What was found, in a sentence or two."""
    n, flagged = len(cleaning.issues), cleaning.flagged
    share = f"{100 * flagged / n:.1f} %"
    are = "label is" if flagged == 1 else "labels are"
    return (
        f"{flagged:,} of {n:,} {are} flagged ({share}); about {cleaning.issues.noise_rate} of all "
        f"labels are wrong."
    )


def _pairs_table(issues: LabelIssues) -> str:
    rows = [(escaped(a), escaped(b), f"{count:,}") for a, b, count in worst_pairs(issues)]
    return _table(("given", "suggested", "flagged"), rows, right=[2])


def _class_table(issues: LabelIssues) -> str:
    classes = len(issues.names)
    given = np.bincount(issues.labels, minlength=classes)
    wrong = np.bincount(issues.labels[issues.flagged], minlength=classes)
    gained = np.bincount(issues.suggested[issues.flagged], minlength=classes)
    rows = [
        (
            escaped(name),
            f"{given[i]:,}",
            f"{wrong[i]:,}",
            f"{100 * wrong[i] / given[i]:.1f} %" if given[i] else "–",
            f"{given[i] - wrong[i] + gained[i]:,}",
        )
        for i, name in enumerate(issues.names)
    ]
    head = ("class", "given", "flagged", "share", "after cleaning")
    return _table(head, rows, right=[1, 2, 3, 4])


def _worst_table(cleaning: Cleaning) -> str:
    issues, places = cleaning.issues, cleaning.source.places
    rows = [
        (
            escaped(places[i]),
            escaped(issues.names[issues.labels[i]]),
            escaped(issues.names[issues.suggested[i]]),
            f"{issues.quality[i]:.3g}",
        )
        for i in issues.worst[:SHOWN]
    ]
    return _table((cleaning.source.place_name, "given", "suggested", "quality"), rows, right=[3])


def _transition_table(issues: LabelIssues) -> str:
    t, names = issues.transition, [escaped(name) for name in issues.names]
    rows = [
        [
            name,
            *(
                f"{100 * p:.1f} [{100 * low:.1f}, {100 * high:.1f}]" if np.isfinite(p) else "–"
                for p, low, high in zip(t.matrix[i], t.low[i], t.high[i], strict=True)
            ),
        ]
        for i, name in enumerate(names)
    ]
    return _table(["true", *names], rows, right=range(1, len(names) + 1))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    sides = ["---:" if i in set(right) else "---" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, sides, *rows))


def escaped(text: str) -> str:
    r"""A text as Markdown that shows just that text, in one line.

    >>> escaped("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    line = " ".join(printable(text).split())
    safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", safe)
