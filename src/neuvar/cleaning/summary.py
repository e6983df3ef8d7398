"""Summaries of ``neuvar clean``: a sentence, summary.json and summary.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from neuvar.cleaning.duplicates import Duplicates
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.readers import Source
from neuvar.cleaning.score import REPLACE_AT, LabelIssues, Transition
from neuvar.pages import escape_markdown, printable

MADE_BY = "neuvar clean"
MAX_MARKDOWN_CLASSES = 12
"""With more classes, summary.md has no transition matrix."""
MAX_JSON_CLASSES = 50
"""With more classes, summary.json has only the elements of the matrix that are not 0."""
TOP_ROWS = 10


@dataclass(frozen=True, eq=False)
class Cleaning:
    """The results of one ``neuvar clean`` command."""

    source: Source
    issues: LabelIssues
    settings: dict[str, Any]  # training options, by name
    command: str
    data_arguments: tuple[str, ...]  # the arguments for data and labels
    seconds: float
    replace_at: float = REPLACE_AT  # probability from which a suggestion replaces a label
    exports: tuple[str, ...] = ()  # "cleanlab", "labelstudio"
    duplicates: Duplicates | None = None
    history: bool | None = None  # of judge_labels(); None if the user has the probabilities

    @property
    def labels(self) -> Array:
        """The cleaned labels, class indices."""
        return np.where(self.replaced, self.issues.suggested, self.issues.labels)

    @property
    def replaced(self) -> Array:
        """Mask of the labels that are replaced by their suggestion."""
        return self.issues.sure(self.replace_at)

    @property
    def flagged(self) -> int:
        """Number of flagged labels."""
        return int(self.issues.flagged.sum())

    @property
    def details(self) -> dict[str, str]:
        """Settings and duration, as printable text."""
        values = self.settings | {"seconds": f"{self.seconds:.1f}"}
        return {key.replace("_", " "): printable(str(value)) for key, value in values.items()}

    def __str__(self) -> str:
        n, flagged = len(self.issues), self.flagged
        return (
            f"{flagged:,} of {n:,} {'label is' if flagged == 1 else 'labels are'} flagged "
            f"({100 * flagged / n:.1f} %); about {self.issues.noise_rate} of all labels are wrong."
            f"{self._replaced_sentence()}"
        )

    def _replaced_sentence(self) -> str:
        if not self.flagged:
            return ""
        count = int(self.replaced.sum())
        sure = f"with a probability of at least {self.replace_at:g}"
        if not count:
            return (
                f" No label is replaced: a label may be wrong, but no suggestion is right {sure}. "
                "Review the page, then apply your decisions with --decisions."
            )
        labels = "1 label is" if count == 1 else f"{count:,} labels are"
        return f" {labels} replaced: the suggestion is right {sure}."


def issue_rows(cleaning: Cleaning, examples: Array, *, digits: int) -> Iterable[Sequence[str]]:
    """Id, given label, suggested label and quality of some examples."""
    ids, issues = cleaning.source.ids, cleaning.issues
    for i in examples:
        given, suggested = issues.names[issues.labels[i]], issues.names[issues.suggested[i]]
        yield ids[i], given, suggested, f"{issues.quality[i]:.{digits}g}"


def frequent_pairs(issues: LabelIssues, count: int = TOP_ROWS) -> list[tuple[str, str, int]]:
    """Given label, suggested label and number of flagged examples, most frequent first."""
    pairs = issues.pairs
    order = np.argsort(-pairs, axis=None, kind="stable")[:count]
    indices = [divmod(int(k), len(pairs)) for k in order]
    return [(issues.names[i], issues.names[j], int(pairs[i, j])) for i, j in indices if pairs[i, j]]


def _versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute the result."""
    packages = {name: version(name) for name in ("neuvar", "torch", "numpy")}
    return {"python": platform.python_version()} | packages


def json_summary(cleaning: Cleaning) -> dict[str, Any]:
    """The content of summary.json."""
    source, issues = cleaning.source, cleaning.issues
    return {
        "made_by": MADE_BY,
        "data": {"name": source.name, "kind": source.kind, "sha256": source.sha256},
        "classes": list(issues.names),
        "n": len(issues),
        "flagged": cleaning.flagged,
        "replaced": int(cleaning.replaced.sum()),
        "replace_at": cleaning.replace_at,
        "noise_rate": asdict(issues.noise_rate),
        "transition": _transition(issues.transition) | {"confidence": issues.transition.confidence},
        "settings": cleaning.settings,
        "seed": cleaning.settings.get("seed"),
        "command": cleaning.command,
        "versions": _versions(),
        "seconds": round(cleaning.seconds, 3),
    }


def _transition(t: Transition) -> dict[str, Any]:
    if len(t.matrix) <= MAX_JSON_CLASSES:
        return {
            "meaning": "probability of each given label (column) for each true class (row)",
            "matrix": _rows(t.matrix),
            "low": _rows(t.low),
            "high": _rows(t.high),
        }
    true, given = np.nonzero(np.nan_to_num(t.matrix))
    rows = _rows(np.stack([x[true, given] for x in (t.matrix, t.low, t.high)], 1))
    return {
        "meaning": "index of the true class, index of the given label, probability of this label "
        "for this class, lower and upper end of its interval; elements that are 0 are left out",
        "elements": [[int(i), int(j), *row] for i, j, row in zip(true, given, rows, strict=True)],
    }


def _rows(matrix: Array) -> list[list[float | None]]:
    """Numbers with six digits; None for nan."""
    return [
        [float(f"{value:.6g}") if np.isfinite(value) else None for value in row]
        for row in matrix.tolist()
    ]


def markdown_summary(cleaning: Cleaning) -> str:
    """The content of summary.md."""
    source, issues = cleaning.source, cleaning.issues
    parts = [
        f"# Labels of {escape_markdown(source.name)}",
        f"{cleaning} The {100 * issues.noise_rate.confidence:.3g} % interval of the noise rate "
        "also covers unclear examples. Those of the transition matrix cover sampling error only.",
        "`issues.csv` lists all examples, lowest label quality first. `labels.csv` has the cleaned "
        "labels, in the order of the data. On the page `index.html` you review the examples with "
        "the lowest label quality, and accept or reject each suggestion.",
    ]
    if cleaning.flagged:
        pairs = [(a, b, f"{count:,}") for a, b, count in frequent_pairs(issues)]
        parts += ["## Most frequent pairs", _table(("given", "suggested", "flagged"), pairs)]
    parts += ["## Classes", _class_table(issues)]
    if cleaning.flagged:
        worst = issue_rows(cleaning, issues.worst[:TOP_ROWS], digits=3)
        head = (source.id_column, "given", "suggested", "quality")
        parts += ["## Lowest label quality", _table(head, worst, text=3)]
    if len(issues.names) <= MAX_MARKDOWN_CLASSES:
        parts += [
            "## Noise transition matrix",
            "Estimated probability of each given label (column) for each true class (row), in "
            "percent, with its interval.",
            _transition_table(issues),
        ]
    details = [*cleaning.details.items(), *_versions().items()]
    command = printable(cleaning.command).replace("\n", "�")
    parts += ["## Settings and versions", _table(("name", "value"), details, text=2)]
    return "\n\n".join([*parts, f"```sh\n{command}\n```"]) + "\n"


def _class_table(issues: LabelIssues) -> str:
    given = np.bincount(issues.labels, minlength=len(issues.names))
    wrong, gained = issues.pairs.sum(1), issues.pairs.sum(0)
    rows = []
    for i, name in enumerate(issues.names):
        share = f"{100 * wrong[i] / given[i]:.1f} %" if given[i] else "–"
        after = given[i] - wrong[i] + gained[i]
        rows.append((name, f"{given[i]:,}", f"{wrong[i]:,}", share, f"{after:,}"))
    return _table(("class", "given", "flagged", "share", "with all suggestions"), rows, text=1)


def _transition_table(issues: LabelIssues) -> str:
    t = issues.transition
    rows = []
    for i, name in enumerate(issues.names):
        ends = zip(100 * t.matrix[i], 100 * t.low[i], 100 * t.high[i], strict=True)
        cells = [f"{p:.1f} ({a:.1f} – {b:.1f})" if np.isfinite(p) else "–" for p, a, b in ends]
        rows.append([name, *cells])
    return _table(["true", *issues.names], rows, text=1)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 2) -> str:
    """A Markdown table; the first ``text`` columns are text, the others numbers."""
    sides = ["---" if i < text else "---:" for i in range(len(head))]
    lines = [map(escape_markdown, head), sides, *(map(escape_markdown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
