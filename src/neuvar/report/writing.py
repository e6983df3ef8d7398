"""Write the whole report: figures, Markdown, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.report.figures import pictures
from neuvar.report.files import put
from neuvar.report.gather import Claim, Lines, gather, load
from neuvar.report.page import page
from neuvar.report.tables import report_markdown


@dataclass(frozen=True)
class Report:
    """What :func:`write` wrote.

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
    """Turn results into figures, tables and a page; nothing is trained.

    The same results give the same bytes. Files are replaced when all of them are complete; figures
    of these claims that an earlier report drew and this one does not are removed.

    Args:
        results: recorded lines by scale and key, or results files called after their scales.
        out: the folder to write to.
        experiments: the claims, in the order of the report; None for all of the paper's.
        scales: which scales to show; none for paper and cpu, or smoke if it is all there is.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> report = write([Path("results/cpu.jsonl")], folder.name, experiments=[])
    >>> sorted(path.name for path in Path(folder.name).iterdir())
    ['index.html', 'report.md']
    >>> folder.cleanup()
    """
    lines = results if isinstance(results, Mapping) else load(results)
    claims = gather(lines, EXPERIMENTS.values() if experiments is None else experiments, scales)
    out = Path(out)
    possible = {
        out / "figures" / f"{claim.experiment.name}-{scale}.{kind}"
        for claim in claims
        for scale in SCALES
        for kind in ("svg", "png")
    }
    figures = {
        out / "figures" / f"{finding.name}.{kind}": drawn
        for claim in claims
        for finding in claim.findings
        if finding.panels
        for kind, drawn in pictures(finding.panels).items()
    }
    texts = {"report.md": report_markdown(claims), "index.html": page(claims)}
    put(figures | {out / name: text.encode() for name, text in texts.items()})
    for stale in possible - figures.keys():
        stale.unlink(missing_ok=True)
    return Report(out / "index.html", out / "report.md", tuple(figures), claims)
