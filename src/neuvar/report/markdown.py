"""The report in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neuvar.experiments.findings import Table
from neuvar.pages import escape_markdown as escape
from neuvar.report.figures import caption, forest_caption
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.text import (
    SCALE_TITLES,
    VERDICTS,
    comparisons,
    diverged_runs,
    numeric_columns,
    provenance,
)


def _lines(rows: Iterable[Iterable[str]]) -> str:
    """Rows of cells as the lines of a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table_markdown(table: Table) -> str:
    """A table in Markdown; columns of numbers, except the first, are aligned to the right.

    >>> from neuvar.experiments.findings import Cell
    >>> print(table_markdown(Table(("method", "test"), (("SGD", Cell((0.5, 0.7))),))))
    | method | test |
    | --- | ---: |
    | SGD | 60.0 ± 14.1 % |
    """
    sides = ["---:" if i and right else "---" for i, right in enumerate(numeric_columns(table))]
    rows = [[escape(str(cell)) for cell in row] for row in table.rows]
    return _lines([map(escape, table.columns), sides, *rows])


def verdict_markdown(finding: Finding, figures: str = "") -> str:
    """The verdict and the reason, with the figure of its comparisons if their folder is given."""
    sign, words = VERDICTS[finding.status]
    text = f"{sign} **{words}**: {escape(finding.because)}"
    if not figures or not finding.verdict or not finding.verdict.cases:
        return text
    title = escape(f"{finding.experiment.title}: comparisons")
    return f"{text}\n\n![{title}]({figures}/{finding.name}-verdict.svg)\n"


def summary_markdown(claims: Sequence[Claim], *, linked: bool = False) -> str:
    """All claims and their verdicts as one table.

    Args:
        claims: from :func:`neuvar.report.gather`.
        linked: whether titles link to the sections of :func:`report_markdown`.
    """
    rows = [["no.", "claim", "verdict", "scale", "n", "runs"], ["---"] * 4 + ["---:", "---"]]
    for claim in claims:
        e = claim.experiment
        for name, status, *others in claim.rows():
            title = f"[{escape(e.title)}](#{name})" if linked else escape(e.title)
            rows.append([escape(e.number), title, " ".join(VERDICTS[status]), *others])
    return _lines(rows)


def report_markdown(claims: Sequence[Claim]) -> str:
    """The whole report; its figures are in ``figures`` beside it."""
    parts = ["# Results", summary_markdown(claims, linked=True)]
    for claim in claims:
        e = claim.experiment
        number_and_title = ". ".join(escape(text) for text in (e.number, e.title) if text)
        quoted = "\n>\n".join(f"> {escape(text)}" for text in (e.sentence, e.source) if text)
        parts += [f'<a id="claim-{e.name}"></a>\n\n## {number_and_title}', quoted]
        if not claim.findings:
            parts.append(f"No results yet: `{command(e, 'cpu')}`")
        for finding in claim.findings:
            parts += _finding(finding)
    return "\n\n".join(part for part in parts if part) + "\n"


def _finding(finding: Finding) -> list[str]:
    title, scale = escape(finding.experiment.title), finding.scale
    parts = [
        f'<a id="{finding.name}"></a>\n\n### {SCALE_TITLES[scale]}',
        verdict_markdown(finding, "figures").rstrip(),
    ]
    if finding.verdict and finding.verdict.cases:
        parts += [forest_caption(finding.verdict), table_markdown(comparisons(finding.verdict))]
    if finding.panels:
        parts.append(f"![{title}, {scale} scale](figures/{finding.name}.svg)")
        parts.append(caption(finding.panels))
    parts += [table_markdown(finding.table), f"{finding.counts}, {scale} scale."]
    if finding.broken:
        parts += ["Left out:", "\n".join(f"- {escape(sentence)}" for sentence in finding.broken)]
    if finding.diverged:
        lost = diverged_runs(finding.diverged, finding.results)
        parts += ["Diverged:", "\n".join(f"- {escape(a)}: {escape(b)}" for a, b in lost)]
    origin = "; ".join(f"{name}: {value}" for name, value in provenance(finding.results))
    settings = escape(finding.experiment.settings(scale))
    return [*parts, settings, f"```sh\n{finding.command}\n```", f"{escape(origin)}."]
