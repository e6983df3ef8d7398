"""The report in Markdown, and as one HTML page without external files (template: page.html)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from neuvar.experiments.findings import Cell, Result, Table, Verdict
from neuvar.experiments.run_spec import NOT_IN_KEY, as_dict
from neuvar.pages import escape_markdown as escape
from neuvar.pages import head, printable
from neuvar.report.figures import caption, forest_caption, page_figure, page_forest, styles
from neuvar.report.gather import Claim, Finding

VERDICTS = {
    "true": ("✓", "holds"),
    "false": ("✗", "does not hold"),
    "undecided": ("?", "undecided"),
    "preliminary-true": ("(✓)", "preliminary: holds so far"),
    "preliminary-false": ("(✗)", "preliminary: does not hold so far"),
    "preliminary-undecided": ("(?)", "preliminary: undecided so far"),
    "numbers": ("–", "numbers only"),
    "": ("–", "not run"),
}
"""A sign and words for each status of a finding; "" is a claim without results."""

SCALE_TITLES = {
    "paper": "Paper scale: the paper's own settings",
    "cpu": "CPU scale: the same claim, smaller",
    "smoke": "Smoke scale: a quick test of the code",
}


def number(cell: str | Cell) -> float | None:
    """The value by which a cell of a table is sorted, if it is a number.

    >>> number("40 %"), number("0.05"), number("SGD"), number(Cell((0.5, 0.7)))
    (40.0, 0.05, None, 0.6)
    """
    if isinstance(cell, Cell):
        value = cell.mean
    else:
        try:
            value = float(cell.strip().removesuffix("%").replace("−", "-").replace(",", ""))
        except ValueError:
            return None
    return value if math.isfinite(value) else None


def numeric_columns(table: Table) -> list[bool]:
    """Whether each column of a table holds only numbers and empty cells."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    known = [[cell for cell in cells if str(cell) not in ("", "–")] for cells in columns]
    return [bool(cells) and all(number(cell) is not None for cell in cells) for cells in known]


def comparisons(verdict: Verdict) -> Table:
    """The numbers of a verdict: a row for each case."""
    rows = []
    for case in verdict.cases:
        size, between = case.numbers
        word = case.word if case.judged else f"{case.word}, not judged"
        trials, lost = str(len(case.differences)), str(case.lost)
        rows.append((case.name, size or "–", between or "–", trials, lost, word))
    columns = ("comparison", "difference", "95 % interval", "n", "diverged", "result")
    return Table(columns, tuple(rows))


def total_time(lines: Iterable[dict[str, Any]]) -> str:
    """The computing time of recorded lines, in a suitable unit.

    >>> [total_time([{"seconds": s}]) for s in (42, 150, 5400, 400000)]
    ['42 s', '2.5 min', '1.5 h', '4.6 days']
    """
    times = (line.get("seconds") for line in lines)
    seconds = sum(float(time) for time in times if isinstance(time, int | float))
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def dates(lines: Iterable[dict[str, Any]]) -> str:
    """The first and the last day of recorded lines; empty if no line has a date."""
    days = sorted(str(line["when"])[:10] for line in lines if line.get("when"))
    return " to ".join(dict.fromkeys(days[:1] + days[-1:]))


def provenance(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Time, dates, machines, versions and commits of results, as pairs of name and values."""
    lines = [result.line for result in results]
    values: dict[str, set[str]] = {}
    for line in lines:
        run, commit = line.get("run") or {}, str(line.get("commit") or "")
        versions = line.get("versions")
        facts = {
            "Machine": line.get("machine"),
            "Device": line.get("device"),
            "Threads": line.get("threads"),
            **dict.fromkeys(["neuvar", "torch", "python", "numpy"]),
            **(dict(sorted(versions.items())) if isinstance(versions, dict) else {}),
            # "+" marks sources that differ from the commit.
            "Commit": commit[:12] + "+" * commit.endswith("+"),
            **{name.replace("_", " ").capitalize(): run.get(name) for name in NOT_IN_KEY},
        }
        for name, value in facts.items():
            values.setdefault(name, set()).add(_words(value))
    pairs = {"Time": total_time(lines), "Dates": dates(lines)}
    pairs |= {name: "; ".join(sorted(words - {""})) for name, words in values.items()}
    return [(name, words) for name, words in pairs.items() if words]


def diverged_runs(diverged: Iterable[Result], results: Sequence[Result]) -> list[tuple[str, str]]:
    """Runs that diverged, as pairs: the settings that differ among the results, and the reason."""
    runs = [as_dict(result.run) for result in results]
    names = dict.fromkeys(name for run in runs for name in run)
    differing = [name for name in names if len({str(run.get(name)) for run in runs}) > 1]
    pairs = []
    for result in diverged:
        run = as_dict(result.run)
        settings = ", ".join(f"{name} = {_words(run[name])}" for name in differing if name in run)
        reason = str(result.line.get("reason") or "diverged")
        pairs.append((settings or f"seed = {run['seed']}", reason))
    return pairs


def _words(value: Any) -> str:
    """A recorded value as text; empty for None and False."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(value[name])}" for name in sorted(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


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
    """The verdict and the reason; with ``figures``, the folder of figures, also its figure."""
    sign, words = VERDICTS[finding.status]
    text = f"{sign} **{words}**: {escape(finding.because)}"
    if not figures or not finding.verdict or not finding.verdict.cases:
        return text
    title = escape(f"{finding.experiment.title}: comparisons")
    return f"{text}\n\n![{title}]({figures}/{finding.name}-verdict.svg)\n"


def summary_markdown(claims: Sequence[Claim], *, linked: bool = False) -> str:
    """All claims and their verdicts as one table.

    Args:
        claims: from :func:`neuvar.report.gather_claims`.
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
            parts.append(f"No results yet: `{e.command('cpu')}`")
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


def report_page(claims: Sequence[Claim]) -> str:
    """All claims as a page. All text is escaped, and the page may load nothing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        *(caption, comparisons, dates, diverged_runs, forest_caption, number, numeric_columns),
        *(page_figure, page_forest, provenance, styles, total_time),
    ):
        environment.globals[function.__name__] = function
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
