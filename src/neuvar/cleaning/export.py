"""Write flagged labels in the formats of cleanlab and Label Studio."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from neuvar._atomic import write_files
from neuvar._validate import one_of
from neuvar.cleaning.score import LabelIssues
from neuvar.cleaning.tables import csv_bytes
from neuvar.pages import printable

CLEANLAB = ("is_label_issue", "label_quality", "given_label", "predicted_label")
"""Columns of cleanlab's ``CleanLearning.find_label_issues()``."""
TAGS = {"image": "Image", "text": "Text", "audio": "Audio", "table": "Table"}
"""Label Studio's tag for each kind of example."""
CHOICE = "label"
"""Name of the class field in Label Studio."""


def export_cleanlab(issues: LabelIssues, path: str | Path) -> None:
    """Write the labels as a table for cleanlab's ``CleanLearning``.

    The table has one row per example, in the order of the data. Its columns are those of
    ``CleanLearning.find_label_issues()``: ``is_label_issue``, ``label_quality``, ``given_label``
    and ``predicted_label``, with class indices from 0. ``predicted_label`` is the suggested class.
    Load the table with ``pandas.read_csv(path)``, and pass it to
    ``CleanLearning().fit(x, labels, label_issues=...)``. Datalab's name for ``label_quality`` is
    ``label_score``.

    >>> from tempfile import TemporaryDirectory
    >>> from neuvar import find_label_issues
    >>> issues = find_label_issues([[0.9, 0.1], [0.1, 0.9], [0.2, 0.8]], ["cat", "dog", "dog"])
    >>> with TemporaryDirectory() as folder:
    ...     export_cleanlab(issues, Path(folder, "cleanlab.csv"))
    ...     Path(folder, "cleanlab.csv").read_text().splitlines()[0]
    'is_label_issue,label_quality,given_label,predicted_label'
    """
    write_files({Path(path): cleanlab_table(issues)})


def cleanlab_table(issues: LabelIssues) -> bytes:
    """Content of the file for cleanlab."""
    columns = (issues.flagged, issues.quality, issues.labels, issues.suggested)
    return csv_bytes([CLEANLAB, *zip(*(column.tolist() for column in columns), strict=True)])


def export_label_studio(
    issues: LabelIssues,
    path: str | Path,
    data: Sequence[str | Mapping[str, Any]],
    *,
    kind: str = "image",
) -> None:
    """Write the flagged labels as tasks for Label Studio, lowest quality first.

    Each task has one prediction: the suggested class. Its score is the probability that the
    suggestion is right. The labeling configuration is written to a file of the same name with the
    ending ``.xml``. Paste it into the project's settings before you import the tasks.

    Args:
        issues: the result of :func:`~neuvar.find_label_issues`.
        path: a ``.json`` file.
        data: what Label Studio shows for each example, flagged or not: the URL of an image or a
            sound, a text, or for a table a dict of names and values.
        kind: ``"image"``, ``"text"``, ``"audio"`` or ``"table"``.

    >>> from tempfile import TemporaryDirectory
    >>> from neuvar import find_label_issues
    >>> p = [[0.99, 0.01]] * 20 + [[0.01, 0.99]] * 20
    >>> issues = find_label_issues(p, ["sport"] * 20 + ["weather"] * 19 + ["sport"])
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "tasks.json")
    ...     export_label_studio(issues, path, ["a title"] * 40, kind="text")
    ...     task = json.loads(path.read_text())[0]
    >>> task["data"]["given_label"], task["predictions"][0]["result"][0]["value"]
    ('sport', {'choices': ['weather']})
    """
    path = Path(path)
    if path.suffix != ".json":
        raise ValueError(f"path must end in .json, got {path.name!r}")
    tasks, config = label_studio_files(issues, data, kind=kind)
    write_files({path: tasks, path.with_suffix(".xml"): config})


def label_studio_files(
    issues: LabelIssues,
    data: Sequence[str | Mapping[str, Any]],
    *,
    kind: str,
    ids: Sequence[str] | None = None,
) -> tuple[bytes, bytes]:
    """The tasks and the labeling configuration."""
    one_of("kind", kind, TAGS)
    if len(data) != len(issues):
        raise ValueError(
            f"data must have one element for each of {len(issues)} examples, got {len(data)}"
        )
    names = [printable(name) for name in issues.names]
    model = f"neuvar {version('neuvar')}"
    tasks = []
    for i in issues.worst.tolist():
        value = data[i]
        facts = {"id": printable(ids[i]) if ids else i, "given_label": names[issues.labels[i]]}
        suggestion = {
            "id": f"neuvar-{i}",
            "from_name": CHOICE,
            "to_name": kind,
            "type": "choices",
            "value": {"choices": [names[issues.suggested[i]]]},
        }
        prediction = {
            "model_version": model,
            "score": float(f"{issues.suggestion_probability[i]:.6g}"),
            "result": [suggestion],
        }
        shown = printable(value) if isinstance(value, str) else dict(value)
        tasks.append({"data": {kind: shown} | facts, "predictions": [prediction]})
    text = json.dumps(tasks, indent=1, allow_nan=False) + "\n"
    return text.encode(), _configuration(names, kind).encode()


def _configuration(names: Sequence[str], kind: str) -> str:
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in names)
    return (
        f'<View>\n  <{TAGS[kind]} name="{kind}" value="${kind}"/>\n'
        '  <Header value="Given label: $given_label"/>\n'
        f'  <Choices name="{CHOICE}" toName="{kind}" choice="single" showInline="true">\n'
        f"{choices}  </Choices>\n</View>\n"
    )
