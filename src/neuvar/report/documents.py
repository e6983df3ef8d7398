"""Insert results into documents between markers, so that no number is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from neuvar._atomic import write_files
from neuvar.experiments.experiment import SCALES
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.markdown import (
    counts,
    escape,
    summary_markdown,
    table_markdown,
    verdict_markdown,
)
from neuvar.report.text import total_time

KNOWN = ("results", "verdict", "settings", "figure")
_MARKER = re.compile(r"<!-- (begin|end) (.+?) -->")


def insert(path: Path | str, claims: Sequence[Claim], *, figures: Path | str | None = None) -> bool:
    """Update the text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a document.

    NAME is ``verdicts`` for the table of all claims, or one of these for one claim and scale:
    ``results robustness cpu`` (the table), ``verdict robustness cpu``, ``settings robustness cpu``
    (with command and time), ``figure robustness cpu``.

    Args:
        path: the document, in Markdown; it is replaced only if something changes.
        claims: from :func:`neuvar.report.gather`.
        figures: the folder with the figures of a report, for documents that show them.

    Returns:
        Whether it changed.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> document = Path(folder.name) / "document.md"
    >>> size = document.write_text("<!-- begin verdicts -->old<!-- end verdicts -->")
    >>> insert(document, []), insert(document, [])
    (True, False)
    >>> folder.cleanup()
    """
    path = Path(path)
    old = path.read_bytes().decode()
    text = old.replace("\r\n", "\n")
    parts, end = [], 0
    for begin, close, name in _sections(text, path):
        parts += [text[end:begin], f"\n{_content(name, claims, path, figures)}\n"]
        end = close
    new = "".join([*parts, text[end:]])
    if "\r\n" in old:
        new = new.replace("\n", "\r\n")
    if new == old:
        return False
    write_files({path.resolve(): new.encode()})  # a link stays a link
    return True


def _sections(text: str, path: Path) -> list[tuple[int, int, str]]:
    """Begin, end and name of the text between each pair of markers."""
    sections: list[tuple[int, int, str]] = []
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        kind, name = marker.groups()
        if (kind == "end") != (opened is not None) or (opened and opened[2] != name):
            raise ValueError(f"{path} has a marker without its other half: {marker[0]}")
        if opened is None:
            opened = marker
        else:
            sections.append((opened.end(), marker.start(), name))
            opened = None
    if opened is not None:
        raise ValueError(f"{path} has a marker without its other half: {opened[0]}")
    return sections


def _content(name: str, claims: Sequence[Claim], path: Path, figures: Path | str | None) -> str:
    if name == "verdicts":
        return summary_markdown(claims)
    known = {claim.experiment.name: claim for claim in claims}
    what, _, rest = name.partition(" ")
    which, _, wanted = rest.partition(" ")
    scale = next((s for s in SCALES if s == wanted), None)
    if what not in KNOWN or which not in known or scale is None:
        raise ValueError(
            f"{path} has an unknown marker {name!r}; known are verdicts, and {', '.join(KNOWN)} "
            f"followed by NAME SCALE, with NAME one of {', '.join(known)} and SCALE one of "
            f"{', '.join(SCALES)}"
        )
    finding = next((f for f in known[which].findings if f.scale == scale), None)
    if finding is None:
        missing = f"No results yet: `{command(known[which].experiment, scale)}`"
        return missing if what == "results" else ""
    if what == "verdict":
        return verdict_markdown(finding.verdict)
    if what == "settings":
        return _settings(finding)
    if what == "figure":
        if figures is None:
            raise ValueError(f"{path} has a figure marker, but figures is not given")
        file = Path(relpath(Path(figures) / f"{finding.name}.svg", path.resolve().parent))
        return f"\n![{escape(finding.experiment.title)}]({file.as_posix()})\n"
    return f"\n{table_markdown(finding.table)}\n\n{counts(finding)}\n"


def _settings(finding: Finding) -> str:
    """The settings, the command and the time."""
    text = escape(finding.experiment.settings(finding.scale))
    time = total_time(result.line for result in finding.results)
    return f"\n{text}\n\n```sh\n{finding.command}\n```\n\nTime for all runs in sequence: {time}.\n"
