"""Write the whole report: figures, Markdown and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuvar._atomic import write_files
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.report.figures import KINDS, pictures
from neuvar.report.gather import Claim, Lines, gather, load
from neuvar.report.markdown import report_markdown
from neuvar.report.page import page


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


def write(
    results: Mapping[Scale, Lines] | Iterable[Path],
    out: Path | str,
    *,
    experiments: Iterable[Experiment] | None = None,
    scales: Sequence[Scale] = (),
) -> Report:
    """Turn results into figures, tables and a page. Nothing is trained.

    Args:
        results: recorded lines by scale and key, or results files named after their scales.
        out: the folder to write to.
        experiments: the claims, in the order of the report; by default all of the paper's.
        scales: which scales to show; by default paper and cpu, or smoke if there is nothing else.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = write([Path("results/cpu.jsonl")], folder.name, experiments=[])
    >>> sorted(path.name for path in Path(folder.name).iterdir())
    ['index.html', 'report.md']
    >>> folder.cleanup()
    """
    lines = results if isinstance(results, Mapping) else load(results)
    chosen = EXPERIMENTS.values() if experiments is None else experiments
    return write_claims(gather(lines, chosen, scales), out)


def write_claims(claims: Sequence[Claim], out: Path | str) -> Report:
    """Write the report of claims that :func:`gather` returned.

    The same results give the same bytes. Files are replaced when all of them are complete. Figures
    of these claims that an earlier report drew and this one does not are removed.
    """
    out = Path(out)
    findings = [finding for claim in claims for finding in claim.findings]
    figures = {finding.name: finding.panels for finding in findings if finding.panels}
    overview = [panel for panels in figures.values() for panel in panels if panel.overview]
    if overview:
        figures["overview"] = tuple(overview)
    names = {f"{claim.experiment.name}-{scale}" for claim in claims for scale in SCALES}
    files = {
        out / "figures" / f"{name}.{kind}": content
        for name, panels in figures.items()
        for kind, content in pictures(panels).items()
    }
    texts = {"report.md": report_markdown(claims), "index.html": page(claims)}
    write_files(files | {out / name: text.encode() for name, text in texts.items()})
    for name in names | {"overview"}:
        for kind in KINDS:
            if name not in figures:
                (out / "figures" / f"{name}.{kind}").unlink(missing_ok=True)
    return Report(out / "index.html", out / "report.md", tuple(files), tuple(claims))
