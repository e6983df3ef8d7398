"""Write the files of a report, and insert results into documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path

from neuvar._atomic import write_files
from neuvar.experiments.experiment import SCALES
from neuvar.experiments.findings import Panel, Verdict
from neuvar.pages import escape_markdown as escape
from neuvar.report.documents import (
    report_markdown,
    report_page,
    summary_markdown,
    table_markdown,
    total_time,
    verdict_markdown,
)
from neuvar.report.figures import KINDS, pictures
from neuvar.report.gather import Claim

INSERTED = ("results", "verdict", "settings", "figure")
"""What a document may show of one claim at one scale."""
_MARKER = re.compile(r"<!-- (?:begin|end) .+? -->")
_SECTION = re.compile(
    rf"(<!-- begin ([^<>]+?) -->)(?:(?!{_MARKER.pattern}).)*(<!-- end \2 -->)", re.DOTALL
)


@dataclass(frozen=True)
class Report:
    """The files of a report.

    Attributes:
        page: the HTML page.
        markdown: the same in Markdown.
        figures: SVG and PNG files.
        claims: what they show.
    """

    page: Path
    markdown: Path
    figures: tuple[Path, ...]
    claims: tuple[Claim, ...]


def write(claims: Sequence[Claim], out: Path | str) -> Report:
    """Write the figures, the Markdown and the HTML page of claims.

    The same results give the same bytes. Files are replaced when all of them are complete. Outdated
    figures of these claims are removed.

    Args:
        claims: from :func:`gather_claims`.
        out: the folder to write to.

    >>> import tempfile
    >>> from neuvar.report import gather_claims, load
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = write(gather_claims(load([Path("results/cpu.jsonl")]), []), folder.name)
    >>> sorted(path.name for path in Path(folder.name).iterdir())
    ['index.html', 'report.md']
    >>> folder.cleanup()
    """
    out = Path(out)
    findings = [finding for claim in claims for finding in claim.findings]
    figures: dict[str, Sequence[Panel] | Verdict]
    figures = {finding.name: finding.panels for finding in findings if finding.panels}
    if overview := [panel for finding in findings for panel in finding.panels if panel.overview]:
        figures["overview"] = overview
    figures |= {
        f"{finding.name}-verdict": finding.verdict
        for finding in findings
        if finding.verdict and finding.verdict.cases
    }
    files = {
        out / "figures" / f"{name}.{kind}": content
        for name, shown in figures.items()
        for kind, content in pictures(
            shown, ["svg"] if isinstance(shown, Verdict) else KINDS
        ).items()
    }
    texts = {"report.md": report_markdown(claims), "index.html": report_page(claims)}
    write_files(files | {out / name: text.encode() for name, text in texts.items()})
    names = {f"{claim.experiment.name}-{scale}" for claim in claims for scale in SCALES}
    names |= {f"{name}-verdict" for name in names} | {"overview"}
    for name in names - figures.keys():
        for kind in KINDS:
            (out / "figures" / f"{name}.{kind}").unlink(missing_ok=True)
    return Report(out / "index.html", out / "report.md", tuple(files), tuple(claims))


def insert(path: Path | str, claims: Sequence[Claim], *, figures: Path | str | None = None) -> bool:
    """Update the text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a document.

    So no number is copied by hand. NAME is ``verdicts`` for the table of all claims, or one of
    these for one claim and scale: ``results robustness cpu`` (the table), ``verdict robustness
    cpu``, ``settings robustness cpu`` (with command and time), ``figure robustness cpu``.

    Args:
        path: the document, in Markdown; it is replaced only if something changes.
        claims: from :func:`neuvar.report.gather_claims`.
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
    """The text for a marker."""
    if name == "verdicts":
        return summary_markdown(claims)
    known = {claim.experiment.name: claim for claim in claims}
    what, which, scale = [*name.split(" ", 2), "", ""][:3]
    if what not in INSERTED or which not in known or scale not in SCALES:
        raise ValueError(
            f"{path} has an unknown marker {name!r}; known are verdicts, and "
            f"{', '.join(INSERTED)} followed by NAME SCALE, with NAME one of {', '.join(known)} "
            f"and SCALE one of {', '.join(SCALES)}"
        )
    e = known[which].experiment
    finding = next((f for f in known[which].findings if f.scale == scale), None)
    if finding is None:
        return f"No results yet: `{e.command(scale)}`" if what == "results" else ""
    if what == "results":
        return f"\n{table_markdown(finding.table)}\n\n{finding.counts}, {scale} scale.\n"
    if what == "verdict":
        folder = Path(relpath(figures, path.resolve().parent)).as_posix() if figures else ""
        return verdict_markdown(finding, folder)
    if what == "settings":
        time = total_time(result.line for result in finding.results)
        text = f"{escape(e.settings(scale))}\n\n```sh\n{finding.command}\n```"
        return f"\n{text}\n\nTime for all runs in sequence: {time}.\n"
    if figures is None:
        raise ValueError(f"{path} has a figure marker, but figures is not given")
    file = Path(relpath(Path(figures) / f"{finding.name}.svg", path.resolve().parent))
    return f"\n![{escape(e.title)}]({file.as_posix()})\n"
