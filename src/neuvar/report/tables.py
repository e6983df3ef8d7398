"""The report in Markdown: tables, verdicts, the whole of it with pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from neuvar.experiments.findings import Table, Verdict
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.origin import facts, mishaps
from neuvar.report.words import SCALES, VERDICTS, caption, number, printable

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def escape(text: str) -> str:
    r"""A text as Markdown that shows just that text, in one line.

    >>> escape("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    line = " ".join(printable(text).split())
    safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", safe)


def table_markdown(table: Table) -> str:
    """A table in Markdown, with columns of numbers, but for the first, to the right.

    >>> from neuvar.experiments.findings import Cell
    >>> print(table_markdown(Table(("method", "test"), (("SGD", Cell((0.5, 0.7))),))))
    | method | test |
    | --- | ---: |
    | SGD | 60.0 ± 14.1 % |
    """
    rows = [[escape(str(cell)) for cell in row] for row in table.rows]
    sides = ["---:" if i and numeric(table, i) else "---" for i in range(len(table.columns))]
    return "\n".join(map(_row, [list(map(escape, table.columns)), sides, *rows]))


def numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers, but for cells without any."""
    cells = [row[column] for row in table.rows]
    there = [cell for cell in cells if str(cell) not in ("", "–")]
    return bool(there) and all(number(cell) is not None for cell in there)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict_words(verdict: Verdict) -> str:
    """The verdict and what decided, in one line."""
    sign, words = VERDICTS[verdict.outcome]
    return f"{sign} **{words}**: {escape(verdict.because)}"


def counts(finding: Finding) -> str:
    """Number of trials and of runs, in a sentence."""
    return (
        f"Mean ± standard deviation, n = {finding.n} trials a setting; "
        f"{finding.tally}, {finding.scale} scale."
    )


def summary_markdown(claims: Sequence[Claim], *, linked: bool = False) -> str:
    """All claims and their verdicts as one table.

    Args:
        claims: what :func:`neuvar.report.gather` found.
        linked: whether titles lead to the places of :func:`report_markdown`.
    """
    rows = [["no.", "claim", "verdict", "scale", "n", "runs"], ["---"] * 4 + ["---:", "---"]]
    for claim in claims:
        title = escape(claim.experiment.title)
        first = escape(claim.experiment.number)
        if not claim.findings:
            said = " ".join(VERDICTS[""])
            rows.append([first, _link(title, claim.experiment.name, linked), said, "–", "–", "–"])
        for finding in claim.findings:
            said = " ".join(VERDICTS[finding.verdict.outcome])
            where = _link(title, finding.name, linked)
            rows.append([first, where, said, finding.scale, finding.n, finding.tally])
    return "\n".join(map(_row, rows))


def _link(title: str, name: str, linked: bool) -> str:
    return f"[{title}](#{name})" if linked else title


def report_markdown(claims: Sequence[Claim]) -> str:
    """The whole report; its pictures lie in ``figures`` beside it."""
    parts = ["# Results", summary_markdown(claims, linked=True)]
    for claim in claims:
        e = claim.experiment
        parts += [f'<a id="{e.name}"></a>\n\n## {escape(e.number)}. {escape(e.title)}']
        parts += [f"> {escape(e.sentence)}\n>\n> {escape(e.source)}"]
        if not claim.findings:
            parts.append(f"No results yet: `{command(e, 'cpu')}`")
        for finding in claim.findings:
            parts += _finding(finding)
    return "\n\n".join(parts) + "\n"


def _finding(finding: Finding) -> list[str]:
    e = finding.experiment
    parts = [
        f'<a id="{finding.name}"></a>\n\n### {SCALES[finding.scale]}',
        verdict_words(finding.verdict),
    ]
    if finding.panels:
        parts += [
            f"![{escape(e.title)}, {finding.scale} scale](figures/{finding.name}.svg)",
            caption(finding.panels),
        ]
    parts += [table_markdown(finding.table), counts(finding)]
    if finding.diverged:
        lost = mishaps(finding.diverged, finding.results)
        parts += ["Diverged:", "\n".join(f"- {escape(a)}: {escape(b)}" for a, b in lost)]
    parts += [escape(e.settings(finding.scale)), f"```sh\n{finding.command}\n```"]
    said = [f"{name}: {value}" for name, value in facts(finding.results)]
    parts.append(escape("; ".join(said)) + ".")
    return parts
