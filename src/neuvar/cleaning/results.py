"""Write the results folder of ``neuvar clean``, and apply decisions to it."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neuvar._atomic import write_files, write_folder
from neuvar.cleaning.page import render_page
from neuvar.cleaning.readers import Source, with_classes
from neuvar.cleaning.score import Array, LabelIssues
from neuvar.cleaning.summary import MADE_BY, Cleaning, json_summary, markdown_summary
from neuvar.cleaning.tables import escape_cell, read_texts

FILES = frozenset(
    ("index.html", "issues.csv", "labels.csv", "labels.npy", "summary.json", "summary.md")
)
"""Files that may be replaced; a folder with any other file is left alone."""

_ROW_OF_NUMBERS = re.compile(r'\[\n[^"\[\]{}]*\]')


def write_cleaning(cleaning: Cleaning, out: Path, *, top: int, overwrite: bool = False) -> None:
    """Write the results folder, completely or not at all; the page shows ``top`` examples."""
    issues = cleaning.issues
    contents = {
        "issues.csv": _csv(issue_rows(issues, cleaning.source)),
        **_label_files(cleaning.source, np.where(issues.flagged, issues.suggested, issues.labels)),
        "summary.json": _json(json_summary(cleaning)),
        "summary.md": _encode(markdown_summary(cleaning)),
        "index.html": _encode(render_page(cleaning, top=top, folder=str(out))),
    }
    check_folder(out, overwrite=overwrite)
    write_folder(out, contents)


def issue_rows(issues: LabelIssues, source: Source) -> Iterable[Sequence[str]]:
    """Rows of issues.csv: all examples, lowest quality first."""
    names, ids = issues.names, source.ids
    yield source.id_column, "given", "suggested", "quality", "flagged"
    for i in issues.ranked:
        given, suggested = names[issues.labels[i]], names[issues.suggested[i]]
        flagged = "true" if issues.flagged[i] else "false"
        yield ids[i], given, suggested, f"{issues.quality[i]:.6g}", flagged


def label_rows(source: Source, labels: Array) -> Iterable[Sequence[str]]:
    """Rows of labels.csv: a label for each example, in the order of the data."""
    yield source.id_column, "label"
    for id_, label in zip(source.ids, labels, strict=True):
        yield id_, source.examples.names[label]


def _label_files(source: Source, labels: Array) -> dict[str, bytes]:
    files = {"labels.csv": _csv(label_rows(source, labels))}
    if source.kind == "npz":
        file = io.BytesIO()
        np.save(file, source.values[labels], allow_pickle=False)
        files["labels.npy"] = file.getvalue()
    return files


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_cell, row) for row in rows)
    return _encode(text.getvalue())


def _json(value: Any) -> bytes:
    """JSON with each row of numbers on one line."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    return _encode(_ROW_OF_NUMBERS.sub(lambda row: " ".join(row[0].split()), text))


def _encode(text: str) -> bytes:
    # File names need not be valid text; their bytes are written back unchanged.
    return text.encode(errors="surrogateescape")


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be replaced or cannot be created."""
    target = out.resolve()
    if target.is_mount():
        raise ValueError(f"--out must be a folder below a mount point, {target} is one itself")
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
            f"--out must be a new folder, {out} has {foreign[0]!r}, not written by neuvar clean"
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
        raise ValueError(f"{folder} has no readable result of neuvar clean")
    return summary


def write_decided(source: Source, out: Path, decisions: Path) -> int:
    """Apply the decisions made on the page to the labels in its folder; their number."""
    summary = _earlier_summary(out)
    source = with_classes(source, len(summary["classes"]))
    if source.sha256 != summary["data"]["sha256"]:
        raise ValueError(f"{out} must be the result for the same data and labels, it is not")
    names = source.examples.names
    index_of = {text: i for i, text in enumerate(source.ids)}
    class_of = {name: k for k, name in enumerate(names)}
    labels = source.examples.labels.copy()
    for row in read_texts(out / "issues.csv", [source.id_column, "suggested", "flagged"]):
        if row["flagged"] == "true":
            labels[index_of[row[source.id_column]]] = class_of[row["suggested"]]
    decided = read_decisions(decisions, source)
    labels[list(decided)] = list(decided.values())
    files = _label_files(source, labels)
    files["summary.json"] = _json(summary | {"decisions": len(decided)})
    write_files({out / name: content for name, content in files.items()})
    return len(decided)


def read_decisions(path: Path, source: Source) -> dict[int, int]:
    """Decided class of each example, by index."""
    if not path.is_file():
        raise ValueError(f"--decisions must be a .csv file from the page, there is no {path}")
    column, names = source.id_column, source.examples.names
    index_of = {text: i for i, text in enumerate(source.ids)}
    class_of = {name: k for k, name in enumerate(names)}
    decided: dict[int, int] = {}
    for row in read_texts(path, [column, "given", "label"]):
        index = index_of.get(row[column])
        if index is None or row["given"] != names[source.examples.labels[index]]:
            raise ValueError(
                f"{path} must be about {source.name}, which has no {column} {row[column]!r} with "
                f"the label {row['given']!r}"
            )
        if row["label"] not in class_of:
            raise ValueError(
                f"{path}: the label of {column} {row[column]!r} must be a class of {source.name}, "
                f"got {row['label']!r}"
            )
        if index in decided:
            raise ValueError(f"{path} must decide on {column} {row[column]!r} once, not twice")
        decided[index] = class_of[row["label"]]
    return decided
