"""Put results into documents, between markers, so that no number is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from neuvar.experiments.experiment import SCALES
from neuvar.report.files import put
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.origin import duration
from neuvar.report.tables import counts, escape, summary_markdown, table_markdown, verdict_words

KNOWN = ("results", "verdict", "settings", "figure")
_MARKER = re.compile(r"<!-- (begin|end) (.+?) -->")


def insert(path: Path | str, claims: Sequence[Claim], *, figures: Path | str | None = None) -> bool:
    """Renew what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a document.

    NAME is ``verdicts`` for the table of all claims, or for one claim ``results robustness cpu``
    for its numbers, ``verdict robustness cpu`` for what they say, or ``settings robustness cpu``
    for what was run, by which command and in what time, or ``figure robustness cpu``.

    Args:
        path: the document, in Markdown; it is replaced only if something changes.
        claims: what :func:`neuvar.report.gather` found.
        figures: the folder with the figures of a report, for documents that show them.

    Returns:
        Whether it was changed.

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
    # A link stays one: what it leads to is replaced.
    put({path.resolve(): new.encode()})
    return True


def _sections(text: str, path: Path) -> list[tuple[int, int, str]]:
    """Where the text between each pair of markers begins and ends, and its name."""
    found: list[tuple[int, int, str]] = []
    opened: re.Match[str] | None = None
    for marker in _MARKER.finditer(text):
        kind, name = marker.groups()
        if (kind == "end") != (opened is not None) or (opened and opened[2] != name):
            raise ValueError(f"{path} has a marker without its other half: {marker[0]}")
        if opened is None:
            opened = marker
        else:
            found.append((opened.end(), marker.start(), name))
            opened = None
    if opened is not None:
        raise ValueError(f"{path} has a marker without its other half: {opened[0]}")
    return found


def _content(name: str, claims: Sequence[Claim], path: Path, figures: Path | str | None) -> str:
    if name == "verdicts":
        return summary_markdown(claims)
    known = {claim.experiment.name: claim for claim in claims}
    what, _, rest = name.partition(" ")
    which, _, scale = rest.partition(" ")
    if what not in KNOWN or which not in known or scale not in SCALES:
        raise ValueError(
            f"{path} has an unknown marker {name!r}; known are verdicts, and {', '.join(KNOWN)} "
            f"followed by NAME SCALE, with NAME one of {', '.join(known)} and SCALE one of "
            f"{', '.join(SCALES)}"
        )
    for finding in known[which].findings:
        if finding.scale == scale:
            if what == "verdict":
                return verdict_words(finding.verdict)
            if what == "settings":
                return _settings(finding)
            if what == "figure":
                if figures is None:
                    raise ValueError(f"{path} wants a figure, but it is not said where they are")
                place = relpath(Path(figures) / f"{finding.name}.svg", path.resolve().parent)
                return f"\n![{escape(finding.experiment.title)}]({Path(place).as_posix()})\n"
            return f"\n{table_markdown(finding.table)}\n\n{counts(finding)}\n"
    if what != "results":
        return ""  # it is said once
    at = next(s for s in SCALES if s == scale)
    return f"No results yet: `{command(known[which].experiment, at)}`"


def _settings(finding: Finding) -> str:
    """What was run, by which command and in what time."""
    seconds = sum(float(result.line.get("seconds") or 0) for result in finding.results)
    text = escape(finding.experiment.settings(finding.scale))
    time = f"All runs one after the other: {duration(seconds)}."
    return f"\n{text}\n\n```sh\n{finding.command}\n```\n\n{time}\n"
