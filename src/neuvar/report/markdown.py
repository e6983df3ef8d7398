"""The report in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from neuvar.experiments.findings import Cell, Table, Verdict
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.plot import caption
from neuvar.report.text import SCALE_TITLES, VERDICTS, diverged_runs, printable, provenance

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def escape(text: str) -> str:
    r"""Escape a text for Markdown, in one line.

    >>> escape("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    line = " ".join(printable(text).split())
    safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", safe)


def number(cell: str | Cell) -> float | None:
    """The value by which a cell of a table is sorted, if it is a number.

    >>> number("40 %"), number("0.05"), number("SGD"), number(Cell((0.5, 0.7)))
    (40.0, 0.05, None, 0.6)
    """
    try:
        text = "" if isinstance(cell, Cell) else cell.strip().removesuffix("%")
        value = (
            cell.mean if isinstance(cell, Cell) else float(text.replace("−", "-").replace(",", ""))
        )
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numeric(table: Table, column: int) -> bool:
    """Whether a column holds only numbers and empty cells."""
    cells = [row[column] for row in table.rows if str(row[column]) not in ("", "–")]
    return bool(cells) and all(number(cell) is not None for cell in cells)


def table_markdown(table: Table) -> str:
    """A table in Markdown; columns of numbers, except the first, are aligned to the right.

    >>> print(table_markdown(Table(("method", "test"), (("SGD", Cell((0.5, 0.7))),))))
    | method | test |
    | --- | ---: |
    | SGD | 60.0 ± 14.1 % |
    """
    rows = [[escape(str(cell)) for cell in row] for row in table.rows]
    sides = ["---:" if i and numeric(table, i) else "---" for i in range(len(table.columns))]
    return "\n".join(map(_row, [list(map(escape, table.columns)), sides, *rows]))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict_markdown(verdict: Verdict) -> str:
    """The verdict, the reason, and the comparisons as a list."""
    sign, words = VERDICTS[verdict.outcome]
    cases = "".join(f"\n- {escape(case)}" for case in verdict.cases)
    return f"{sign} **{words}**: {escape(verdict.because)}\n{cases}".rstrip()


def counts(finding: Finding) -> str:
    """The number of trials and of runs, in a sentence."""
    return (
        f"Mean ± standard deviation, n = {finding.n} trials per setting; "
        f"{finding.tally}, {finding.scale} scale."
    )


def summary_markdown(claims: Sequence[Claim], *, linked: bool = False) -> str:
    """All claims and their verdicts as one table.

    Args:
        claims: from :func:`neuvar.report.gather`.
        linked: whether titles link to the sections of :func:`report_markdown`.
    """
    rows = [["no.", "claim", "verdict", "scale", "n", "runs"], ["---"] * 4 + ["---:", "---"]]
    for claim in claims:
        e = claim.experiment
        for name, outcome, *others in claim.rows():
            title = f"[{escape(e.title)}](#{name})" if linked else escape(e.title)
            rows.append([escape(e.number), title, " ".join(VERDICTS[outcome]), *others])
    return "\n".join(map(_row, rows))


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
    return "\n\n".join(parts) + "\n"


def _finding(finding: Finding) -> list[str]:
    e = finding.experiment
    parts = [
        f'<a id="{finding.name}"></a>\n\n### {SCALE_TITLES[finding.scale]}',
        verdict_markdown(finding.verdict),
    ]
    if finding.panels:
        parts += [
            f"![{escape(e.title)}, {finding.scale} scale](figures/{finding.name}.svg)",
            caption(finding.panels),
        ]
    parts += [table_markdown(finding.table), counts(finding)]
    if finding.diverged:
        lost = diverged_runs(finding.diverged, finding.results)
        parts += ["Diverged:", "\n".join(f"- {escape(a)}: {escape(b)}" for a, b in lost)]
    if settings := escape(e.settings(finding.scale)):
        parts.append(settings)
    parts += [f"```sh\n{finding.command}\n```"]
    pairs = [f"{name}: {value}" for name, value in provenance(finding.results)]
    parts.append(escape("; ".join(pairs)) + ".")
    return parts
