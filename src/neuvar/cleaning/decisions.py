"""What a person has decided on the page, taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuvar.cleaning.columns import read_texts
from neuvar.cleaning.files import Source, with_classes
from neuvar.cleaning.issues import Array
from neuvar.cleaning.summary import MADE_BY


def earlier_summary(folder: Path) -> dict[str, Any]:
    """The summary of a folder that was written before."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("made_by") != MADE_BY:
        raise ValueError(f"{folder} has no result of neuvar clean that can be read")
    return found


def decided_labels(source: Source, folder: Path, decisions: Path) -> tuple[Source, Array, int]:
    """Labels with a person's decisions in place of what was found.

    Args:
        source: the data.
        folder: where an earlier command wrote what it found in them.
        decisions: the CSV file that its page has given out.

    Returns:
        The data with the classes of that folder, their labels, and the number of decisions.
    """
    summary = earlier_summary(folder)
    source = with_classes(source, len(summary["classes"]))
    if source.sha256 != summary["data"]["sha256"]:
        raise ValueError(
            f"{folder} must be made from the same data and labels, it was made from others"
        )
    labels = _found(source, folder / "issues.csv")
    made = read_decisions(decisions, source)
    labels[list(made)] = list(made.values())
    return source, labels, len(made)


def _found(source: Source, issues: Path) -> Array:
    """The labels that the command itself would give."""
    labels = source.examples.labels.copy()
    known = {name: k for k, name in enumerate(source.examples.names)}
    place = {text: i for i, text in enumerate(source.places)}
    for row in read_texts(issues, [source.place_name, "suggested", "flagged"]):
        if row["flagged"] == "true":
            labels[place[row[source.place_name]]] = known[row["suggested"]]
    return labels


def read_decisions(path: Path, source: Source) -> dict[int, int]:
    """The class that was decided on, by the number of the example."""
    if not path.is_file():
        raise ValueError(f"--decisions must be the .csv file of a page, there is no {path}")
    what, names = source.place_name, source.examples.names
    places = {text: i for i, text in enumerate(source.places)}
    known = {name: k for k, name in enumerate(names)}
    made: dict[int, int] = {}
    for row in read_texts(path, [what, "given", "label"]):
        index = places.get(row[what])
        if index is None or row["given"] != names[source.examples.labels[index]]:
            raise ValueError(
                f"{path} must be about {source.name}, which has no {what} {row[what]!r} with the "
                f"label {row['given']!r}"
            )
        if row["label"] not in known:
            raise ValueError(
                f"{path}: the label of {what} {row[what]!r} must be a class of {source.name}, "
                f"got {row['label']!r}"
            )
        if index in made:
            raise ValueError(f"{path} must decide on {what} {row[what]!r} once, it does so twice")
        made[index] = known[row["label"]]
    return made
