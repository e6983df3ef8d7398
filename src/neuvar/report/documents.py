"""Insert results into documents between markers, so that no number is copied by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from neuvar._atomic import write_files
from neuvar.experiments.experiment import SCALES
from neuvar.report.gather import Claim, command
from neuvar.report.markdown import (
    counts,
    escape,
    summary_markdown,
    table_markdown,
    verdict_markdown,
)
from neuvar.report.text import total_time

KNOWN = ("results", "verdict", "settings", "figure")
_MARKER = re.compile(r"<!-- (?:begin|end) .+? -->")
_SECTION = re.compile(
    rf"(<!-- begin ([^<>]+?) -->)(?:(?!{_MARKER.pattern}).)*(<!-- end \2 -->)", re.DOTALL
)


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
    if lone := _MARKER.search(_SECTION.sub("", text)):
        raise ValueError(f"{path} has a marker without its other half: {lone[0]}")

    def updated(section: re.Match[str]) -> str:
        return f"{section[1]}\n{_content(section[2], claims, path, figures)}\n{section[3]}"

    new = _SECTION.sub(updated, text)
    if "\r\n" in old:
        new = new.replace("\n", "\r\n")
    if new == old:
        return False
    write_files({path.resolve(): new.encode()})  # a link stays a link
    return True


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
        text = escape(finding.experiment.settings(scale))
        time = total_time(result.line for result in finding.results)
        return (
            f"\n{text}\n\n```sh\n{finding.command}\n```\n\nTime for all runs in sequence: {time}.\n"
        )
    if what == "figure":
        if figures is None:
            raise ValueError(f"{path} has a figure marker, but figures is not given")
        file = Path(relpath(Path(figures) / f"{finding.name}.svg", path.resolve().parent))
        return f"\n![{escape(finding.experiment.title)}]({file.as_posix()})\n"
    return f"\n{table_markdown(finding.table)}\n\n{counts(finding)}\n"
