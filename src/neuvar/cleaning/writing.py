"""The folder of a cleaning: all of it or nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.cleaning.columns import safe
from neuvar.cleaning.decisions import decided_labels, earlier_summary
from neuvar.cleaning.files import Source
from neuvar.cleaning.issues import Array, LabelIssues
from neuvar.cleaning.page import page
from neuvar.cleaning.summary import Cleaning, summary, summary_markdown

WRITTEN = frozenset(
    ("index.html", "issues.csv", "labels.csv", "labels.npy", "summary.json", "summary.md")
)
"""Files of a folder that may be replaced; one with any other file is left alone."""

_NUMBERS = re.compile(r'\[\n[^"\[\]{}]*\]')


def write_cleaning(cleaning: Cleaning, out: Path, *, top: int, overwrite: bool = False) -> None:
    """Write tables, labels, summaries and the page into a folder.

    Args:
        cleaning: what was found.
        out: the folder. It is there with all of its files, or not at all.
        top: how many flagged examples the page shows.
        overwrite: whether an earlier result may be replaced.
    """
    issues = cleaning.issues
    contents = {
        "issues.csv": _csv(issue_rows(issues, cleaning.source)),
        **_label_files(cleaning.source, np.where(issues.flagged, issues.suggested, issues.labels)),
        "summary.json": _json(summary(cleaning)),
        "summary.md": _bytes(summary_markdown(cleaning)),
        "index.html": _bytes(page(cleaning, top=top, folder=str(out))),
    }
    put_folder(out, contents, overwrite=overwrite)


def write_decided(source: Source, out: Path, decisions: Path) -> int:
    """Write the labels of an earlier result anew, with decisions; how many decisions there are."""
    source, labels, count = decided_labels(source, out, decisions)
    said = _json(earlier_summary(out) | {"decisions": count})
    put_files(out, {**_label_files(source, labels), "summary.json": said})
    return count


def issue_rows(issues: LabelIssues, source: Source) -> Iterable[Sequence[str]]:
    """All examples, the most suspicious first, below a row of names."""
    names, places = issues.names, source.places
    yield source.place_name, "given", "suggested", "quality", "flagged"
    for i in issues.ranked:
        given, suggested = names[issues.labels[i]], names[issues.suggested[i]]
        flagged = "true" if issues.flagged[i] else "false"
        yield places[i], given, suggested, f"{issues.quality[i]:.6g}", flagged


def label_rows(source: Source, labels: Array) -> Iterable[Sequence[str]]:
    """A label for each example in the order of the data, below a row of names."""
    yield source.place_name, "label"
    for place, label in zip(source.places, labels, strict=True):
        yield place, source.examples.names[label]


def _label_files(source: Source, labels: Array) -> dict[str, bytes]:
    files = {"labels.csv": _csv(label_rows(source, labels))}
    if source.kind == "npz":
        file = io.BytesIO()
        np.save(file, source.values[labels], allow_pickle=False)
        files["labels.npy"] = file.getvalue()
    return files


def _csv(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(safe, row) for row in rows)
    return _bytes(text.getvalue())


def _json(value: Any) -> bytes:
    """JSON with a line for each row of numbers."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    return _bytes(_NUMBERS.sub(lambda row: " ".join(row[0].split()), text))


def _bytes(text: str) -> bytes:
    # Names of files need not be text; their bytes go out as they came in.
    return text.encode(errors="surrogateescape")


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that must not be replaced, or cannot be made."""
    _check_place(out.resolve())
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out must be a folder, {out} is a file")
    if out.resolve() == Path.cwd():
        raise ValueError(f"--out must not be the folder one is in, got {out}")
    there = sorted(path.name for path in out.iterdir())
    foreign = [name for name in there if name not in WRITTEN]
    if foreign:
        raise ValueError(
            f"--out must be a new folder, {out} has {foreign[0]!r}, which neuvar clean has not "
            f"written"
        )
    if there:
        earlier_summary(out)
        if not overwrite:
            raise ValueError(f"{out} has an earlier result, which --overwrite would replace")


def _check_place(target: Path) -> None:
    """Try whether a folder can be put there, before anybody trains for nothing."""
    if target.is_mount():
        raise ValueError(f"--out must be a folder below a mount point, {target} is one itself")
    nearest = next(path for path in target.parents if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".neuvar-", dir=nearest):
            return
    except OSError as error:
        raise ValueError(f"--out cannot be made in {nearest}: {error.strerror}") from None


def put_folder(out: Path, contents: Mapping[str, bytes], *, overwrite: bool) -> None:
    """Write a folder under another name, and rename it when it is complete.

    Whoever interrupts it finds the old folder, or none if there was none.
    """
    check_folder(out, overwrite=overwrite)
    target = out.resolve()
    missing = [path for path in target.parents if not path.exists()]
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        for name, content in contents.items():
            _write(part / name, content)
        _exchange(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for path in missing:  # the innermost first
            with suppress(OSError):
                path.rmdir()
        raise


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _exchange(part: Path, target: Path) -> None:
    """Put a complete folder in the place of the one that may be there."""
    old = part.with_suffix(".old")
    try:
        if target.exists():
            target.rename(old)
        part.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def put_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files of a folder, once all of them are on disk under other names."""
    waiting = {name: folder / f".{name}.{secrets.token_hex(8)}.part" for name in contents}
    try:
        for name, content in contents.items():
            _write(waiting[name], content)
        for name, unfinished in waiting.items():
            unfinished.replace(folder / name)
    finally:
        for unfinished in waiting.values():
            unfinished.unlink(missing_ok=True)
