"""The report as one HTML page without external files; ``page.html`` is its template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from neuvar.pages import head, printable
from neuvar.report.figures import caption, forest_caption, page_figure, page_forest, styles
from neuvar.report.gather import Claim, command
from neuvar.report.text import (
    SCALE_TITLES,
    VERDICTS,
    comparisons,
    dates,
    diverged_runs,
    number,
    numeric_columns,
    provenance,
    total_time,
)

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(caption, command, comparisons, dates, diverged_runs, forest_caption, number),
    *(numeric_columns, page_figure, page_forest, provenance, styles, total_time),
)
"""What the template calls."""


def page(claims: Sequence[Claim]) -> str:
    """All claims as a page. All text is escaped, and the page may load nothing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {function.__name__: function for function in FUNCTIONS}
    findings = [finding for claim in claims for finding in claim.findings]
    # A run that several claims share counts once.
    lines = {(f.scale, result.run.key): result.line for f in findings for result in f.results}
    text = environment.get_template("page.html").render(
        head=head("neuvar.report"),
        claims=claims,
        of_paper=any(claim.experiment.source for claim in claims),
        lines=list(lines.values()),
        statuses=[status for claim in claims for _, status, *_ in claim.rows()],
        scales=sorted({finding.scale for finding in findings}),
        verdicts=VERDICTS,
        scale_titles=SCALE_TITLES,
    )
    return printable(text)
