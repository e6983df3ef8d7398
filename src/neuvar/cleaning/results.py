"""Write the results folder of ``neuvar clean``, and apply decisions to it."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from neuvar._atomic import HIDDEN, write_files, write_folder
from neuvar.cleaning.duplicates import Duplicates
from neuvar.cleaning.export import cleanlab_table, label_studio_files
from neuvar.cleaning.page import is_images, render_page
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.readers import Source, with_classes
from neuvar.cleaning.summary import (
    MADE_BY,
    Cleaning,
    issue_rows,
    json_summary,
    markdown_summary,
)
from neuvar.cleaning.tables import csv_bytes, read_texts, replace_column
from neuvar.pages import printable

FILES = frozenset(
    (
        *("cleaned.csv", "duplicates.csv", "index.html", "issues.csv", "labels.csv"),
        *("labels.npy", "probabilities.npz", "summary.json", "summary.md"),
        *("cleanlab.csv", "label_studio.json", "label_studio.xml"),
    )
)
"""Files of a results folder. A folder with any other file is not overwritten."""
MAX_PROBABILITIES = 1 << 28
"""Larger probabilities, in bytes, are not written to the results folder."""
LOCAL_FILES = "/data/local-files/?d="
"""URL prefix of local files in Label Studio, before their path below its document root."""

DECISIONS = "Your decisions are applied to"
"""Beginning of the line of summary.md about decisions."""

_ROW_OF_NUMBERS = re.compile(r'\[\n[^"\[\]{}]*\]')


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
    p = cleaning.issues.probabilities
    if cleaning.history is not None and p.nbytes <= MAX_PROBABILITIES:
        file = io.BytesIO()
        np.savez(file, probabilities=p, history=cleaning.history)
        contents["probabilities.npz"] = file.getvalue()
    contents["summary.json"] = contents.pop("summary.json")  # last: it marks a complete result
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


def _ranked_rows(cleaning: Cleaning) -> Iterable[Sequence[str]]:
    """Rows of issues.csv: all examples, lowest label quality first."""
    issues, replaced = cleaning.issues, cleaning.replaced
    columns = ("given", "suggested", "quality", "error_probability", "suggestion_probability")
    yield cleaning.source.id_column, *columns, "flagged", "replaced"
    rows = issue_rows(cleaning, issues.ranked, digits=6)
    for i, row in zip(issues.ranked, rows, strict=True):
        flags = ("true" if mask[i] else "false" for mask in (issues.flagged, replaced))
        chances = issues.error_probability[i], issues.suggestion_probability[i]
        yield *row, *(f"{chance:.6g}" for chance in chances), *flags


def _duplicate_rows(source: Source, duplicates: Duplicates) -> Iterable[Sequence[str]]:
    """Rows of duplicates.csv: the examples of each group, groups with different labels first."""
    yield source.id_column, "label", "group", "labels_differ"
    ids, names, labels = source.ids, duplicates.names, duplicates.labels
    conflicts = {int(group[0]) for group in duplicates.conflicts}
    groups = sorted(duplicates.groups, key=lambda group: int(group[0]) not in conflicts)
    for number, group in enumerate(groups):
        differ = "true" if int(group[0]) in conflicts else "false"
        for i in group:
            yield ids[i], names[labels[i]], str(number), differ


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
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, {out} is a file")
    nearest = next(path for path in (target, *target.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=HIDDEN, dir=nearest):
            pass
    except OSError as error:
        what = f"written to {out}" if out.exists() else f"created in {nearest}"
        raise ValueError(f"--out cannot be {what}: {error.strerror}") from None
    if not out.exists():
        return
    if not target.stat().st_mode & 0o222:  # root could write to it nevertheless
        raise ValueError(f"--out cannot be written to {out}: the folder is read-only")
    if target == Path.cwd():
        raise ValueError(f"--out must not be the current folder, got {out}")
    files = sorted(p.name for p in out.iterdir() if not p.name.startswith(HIDDEN))
    foreign = [name for name in files if name not in FILES]
    if foreign:
        raise ValueError(
            f"--out must be a new folder, {out} has {foreign[0]!r}, which neuvar clean did not "
            f"write{'; --overwrite would delete it: move it' if overwrite else ''}"
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
    if not decisions.is_file():
        raise ValueError(f"there is no {decisions}; --decisions must be a .csv file from the page")
    summary = _earlier_summary(out)
    source = with_classes(source, len(summary["classes"]))
    if source.sha256 != summary["data"]["sha256"]:
        raise ValueError(f"{out} holds results for other data or labels")
    decided = read_decisions(decisions, source)
    files = _label_files(source, decided_labels(source, decided))
    files["summary.json"] = _json(summary | {"decisions": len(decided)})
    if (out / "summary.md").is_file():
        text = (out / "summary.md").read_text(encoding="utf-8", errors="surrogateescape")
        title, _, rest = text.partition("\n\n")
        rest = rest.partition("\n\n")[2] if rest.startswith(DECISIONS) else rest
        count = f"{DECISIONS} {len(decided):,} of {len(source.examples):,} labels."
        files["summary.md"] = _encode(f"{title}\n\n{count}\n\n{rest}")
    write_files({out / name: content for name, content in files.items()})
    return decided


def decided_labels(source: Source, decided: Mapping[int, int]) -> Array:
    """The given labels, replaced by the decided classes."""
    labels = source.examples.labels.copy()
    labels[list(decided)] = list(decided.values())
    return labels


def read_decisions(path: Path, source: Source) -> dict[int, int]:
    """Decided class of each example, by index."""
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
