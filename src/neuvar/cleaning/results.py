"""Write the results folder of ``neuvar clean``, and apply decisions to it."""

from __future__ import annotations

import io
import json
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from neuvar._atomic import write_files, write_folder
from neuvar.cleaning.duplicates import Duplicates
from neuvar.cleaning.export import cleanlab_table, label_studio_files
from neuvar.cleaning.page import is_images, render_page
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.readers import Source, with_classes
from neuvar.cleaning.score import REPLACE_AT, LabelIssues, Transition
from neuvar.cleaning.tables import csv_bytes, read_texts, replace_column
from neuvar.pages import escape_markdown, printable

MADE_BY = "neuvar clean"
FILES = frozenset(
    (
        *("cleaned.csv", "duplicates.csv", "index.html", "issues.csv", "labels.csv"),
        *("labels.npy", "summary.json", "summary.md"),
        *("cleanlab.csv", "label_studio.json", "label_studio.xml"),
    )
)
"""Files of a results folder. A folder with any other file is not overwritten."""
MAX_MARKDOWN_CLASSES = 12
"""With more classes, summary.md has no transition matrix."""
MAX_JSON_CLASSES = 50
"""With more classes, summary.json has only the elements of the matrix that are not 0."""
TOP_ROWS = 10
LOCAL_FILES = "/data/local-files/?d="
"""URL prefix of local files in Label Studio, before their path below its document root."""

_ROW_OF_NUMBERS = re.compile(r'\[\n[^"\[\]{}]*\]')


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
            return f" No label is replaced: no suggestion is right {sure}."
        labels = "1 label is" if count == 1 else f"{count:,} labels are"
        return f" {labels} replaced: the suggestion is right {sure}."


def write_cleaning(cleaning: Cleaning, out: Path, *, top: int, overwrite: bool = False) -> None:
    """Write the results folder, completely or not at all. The page shows ``top`` examples."""
    contents = {
        "issues.csv": csv_bytes(_ranked_rows(cleaning)),
        **_label_files(cleaning.source, cleaning.labels),
        "summary.json": _json(json_summary(cleaning)),
        "summary.md": _encode(markdown_summary(cleaning)),
        "index.html": _encode(render_page(cleaning, top=top, folder=str(out))),
        **_exported(cleaning),
    }
    if cleaning.duplicates is not None:
        contents["duplicates.csv"] = csv_bytes(
            _duplicate_rows(cleaning.source, cleaning.duplicates)
        )
    check_folder(out, overwrite=overwrite)
    write_folder(out, contents)


def check_exports(source: Source, exports: Sequence[str]) -> None:
    """Refuse to export examples that Label Studio cannot show."""
    if "labelstudio" in exports and source.kind != "folder" and is_images(source.examples.inputs):
        raise ValueError(
            "--export labelstudio needs a folder of images or a table: Label Studio shows images "
            f"by URL, and those of {source.name} have none"
        )


def _exported(cleaning: Cleaning) -> dict[str, bytes]:
    """Content of the files for other programs."""
    source, issues, files = cleaning.source, cleaning.issues, {}
    if "cleanlab" in cleaning.exports:
        files["cleanlab.csv"] = cleanlab_table(issues)
    if "labelstudio" in cleaning.exports:
        kind, show = _label_studio_data(source)
        data = [show(i) if flag else "" for i, flag in enumerate(issues.flagged)]
        tasks, config = label_studio_files(issues, data, kind=kind, ids=source.ids)
        files |= {"label_studio.json": tasks, "label_studio.xml": config}
    return files


def _label_studio_data(source: Source) -> tuple[str, Callable[[int], str | dict[str, str]]]:
    """Kind of an example in Label Studio, and a function that returns its data by index."""
    if source.kind == "folder":
        return "image", lambda i: LOCAL_FILES + quote(_encode(f"{source.name}/{source.ids[i]}"))
    if len(source.cells) == 1:
        return "text", lambda i: source.cells[0][i]
    rows = source.examples.inputs.flatten(1)
    columns = source.columns or [f"feature {k}" for k in range(rows.shape[1])]

    def table(i: int) -> dict[str, str]:
        values = [cells[i] for cells in source.cells] or [f"{x:.6g}" for x in rows[i].tolist()]
        return {printable(k): printable(v) for k, v in zip(columns, values, strict=True)}

    return "table", table


def _issue_rows(cleaning: Cleaning, examples: Array, *, digits: int) -> Iterable[Sequence[str]]:
    """Id, given label, suggested label and quality of some examples."""
    ids, issues = cleaning.source.ids, cleaning.issues
    for i in examples:
        given, suggested = issues.names[issues.labels[i]], issues.names[issues.suggested[i]]
        yield ids[i], given, suggested, f"{issues.quality[i]:.{digits}g}"


def _ranked_rows(cleaning: Cleaning) -> Iterable[Sequence[str]]:
    """Rows of issues.csv: all examples, lowest label quality first."""
    issues, replaced = cleaning.issues, cleaning.replaced
    columns = ("given", "suggested", "quality", "error_probability", "flagged", "replaced")
    yield cleaning.source.id_column, *columns
    rows = _issue_rows(cleaning, issues.ranked, digits=6)
    for i, row in zip(issues.ranked, rows, strict=True):
        flags = ("true" if mask[i] else "false" for mask in (issues.flagged, replaced))
        yield *row, f"{issues.error_probability[i]:.6g}", *flags


def _duplicate_rows(source: Source, duplicates: Duplicates) -> Iterable[Sequence[str]]:
    """Rows of duplicates.csv: the examples of each group, groups with different labels first."""
    yield source.id_column, "label", "group", "labels_differ"
    names, labels = duplicates.names, duplicates.labels
    conflicts = {int(group[0]) for group in duplicates.conflicts}
    groups = sorted(duplicates.groups, key=lambda group: int(group[0]) not in conflicts)
    for number, group in enumerate(groups):
        differ = "true" if int(group[0]) in conflicts else "false"
        for i in group:
            yield source.ids[i], names[labels[i]], str(number), differ


def label_rows(source: Source, labels: Array) -> Iterable[Sequence[str]]:
    """Rows of labels.csv: a label for each example, in the order of the data."""
    yield source.id_column, "label"
    for id_, label in zip(source.ids, labels, strict=True):
        yield id_, source.examples.names[label]


def _label_files(source: Source, labels: Array) -> dict[str, bytes]:
    files = {"labels.csv": csv_bytes(label_rows(source, labels))}
    if source.kind == "npz":
        file = io.BytesIO()
        np.save(file, source.values[labels], allow_pickle=False)
        files["labels.npy"] = file.getvalue()
    if source.label_column is not None:
        e = source.examples
        new = [e.names[k] if k != old else None for k, old in zip(labels, e.labels, strict=True)]
        files["cleaned.csv"] = _encode(replace_column(*source.label_column, new))
    return files


def _json(value: Any) -> bytes:
    """Indented JSON with each row of numbers on one line."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    return _encode(_ROW_OF_NUMBERS.sub(lambda row: " ".join(row[0].split()), text))


def _encode(text: str) -> bytes:
    # File names need not be valid UTF-8; surrogateescape keeps their bytes.
    return text.encode(errors="surrogateescape")


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a results folder that must not be replaced or cannot be created."""
    target = out.resolve()
    if target.is_mount():
        raise ValueError(f"--out must not be a mount point, got {target}")
    nearest = next(path for path in target.parents if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".neuvar-", dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"--out cannot be created in {nearest}: {error.strerror}") from None
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out must be a folder, {out} is a file")
    if target == Path.cwd():
        raise ValueError(f"--out must not be the current folder, got {out}")
    files = sorted(path.name for path in out.iterdir())
    foreign = [name for name in files if name not in FILES]
    if foreign:
        raise ValueError(
            f"--out must be a new folder, {out} has {foreign[0]!r}, which neuvar clean did not "
            "write"
        )
    if files:
        _earlier_summary(out)
        if not overwrite:
            raise ValueError(f"{out} has an earlier result, use --overwrite to replace it")


def _earlier_summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    if not isinstance(summary, dict) or summary.get("made_by") != MADE_BY:
        raise ValueError(
            f"{folder} has no readable result of neuvar clean; give its folder with --out"
        )
    return summary


def write_decided(source: Source, out: Path, decisions: Path) -> dict[int, int]:
    """Apply decisions from the page to the given labels, write them, and return the decisions."""
    summary = _earlier_summary(out)
    source = with_classes(source, len(summary["classes"]))
    if source.sha256 != summary["data"]["sha256"]:
        raise ValueError(f"{out} holds results for other data or labels")
    decided = read_decisions(decisions, source)
    files = _label_files(source, decided_labels(source, decided))
    files["summary.json"] = _json(summary | {"decisions": len(decided)})
    write_files({out / name: content for name, content in files.items()})
    return decided


def decided_labels(source: Source, decided: Mapping[int, int]) -> Array:
    """The given labels, replaced by the decided classes."""
    labels = source.examples.labels.copy()
    labels[list(decided)] = list(decided.values())
    return labels


def read_decisions(path: Path, source: Source) -> dict[int, int]:
    """Decided class of each example, by index."""
    if not path.is_file():
        raise ValueError(f"--decisions must be a .csv file from the page, there is no {path}")
    column, names = source.id_column, source.examples.names
    index_of = {id_: index for index, id_ in enumerate(source.ids)}
    class_of = {name: k for k, name in enumerate(names)}
    decided: dict[int, int] = {}
    for row in read_texts(path, [column, "given", "label"]):
        index = index_of.get(row[column])
        if index is None or row["given"] != names[source.examples.labels[index]]:
            raise ValueError(
                f"{path} must have decisions for {source.name}, which has no {column} "
                f"{row[column]!r} with the label {row['given']!r}"
            )
        if row["label"] not in class_of:
            raise ValueError(
                f"{path}: the label of {column} {row[column]!r} must be a class of {source.name}, "
                f"got {row['label']!r}"
            )
        if index in decided:
            raise ValueError(f"{path} must have {column} {row[column]!r} once, not twice")
        decided[index] = class_of[row["label"]]
    return decided


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
        worst = _issue_rows(cleaning, issues.worst[:TOP_ROWS], digits=3)
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
