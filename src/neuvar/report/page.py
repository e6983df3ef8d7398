"""The report as one HTML page without external files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from neuvar.experiments.experiment import Experiment
from neuvar.experiments.findings import Cell, Table
from neuvar.pages import fill
from neuvar.report.figures import inline, swatch
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.markdown import number, numeric
from neuvar.report.plot import caption, styles
from neuvar.report.text import (
    SCALE_TITLES,
    VERDICTS,
    diverged_runs,
    printable,
    provenance,
    total_time,
)

# Verdicts differ in shape as well as in colour.
SHAPES = {
    "true": '<circle cx="8" cy="8" r="7"/><path d="M4.6 8.3l2.3 2.4 4.5-5"/>',
    "false": '<rect x="1.5" y="1.5" width="13" height="13"/><path d="M5 5l6 6M11 5l-6 6"/>',
    "undecided": '<path d="M8 .8L15.2 8 8 15.2.8 8z"/>'
    '<path d="M6.2 6.4a1.8 1.8 0 1 1 2.6 1.7q-.8.4-.8 1.2M8 11v.3"/>',
    "": '<circle cx="8" cy="8" r="7" stroke-dasharray="2.2 2.2"/>',
}
SUMMARY_HEADS = (
    '<th scope="col" data-sortable>No.</th><th scope="col" data-sortable>Claim</th>'
    '<th scope="col" data-sortable>Verdict</th><th scope="col" data-sortable>Scale</th>'
    '<th scope="col" data-sortable data-number class="number">n</th>'
    '<th scope="col" data-sortable>Runs</th>'
)


LEAD = """<p class="lead">The paper claims that such networks are more robust to weight noise,
memorize fewer wrong labels and forget less. This page compares each claim with our measurements,
whether they agree or not.</p>"""
SOURCE = (
    "The claims are from Z. Xie et al., “Artificial Neural Variability for Deep Learning”, Neural "
    "Computation, 2021. "
)


def page(claims: Sequence[Claim]) -> str:
    """All claims as a page. All text is escaped, and the page may load nothing."""
    around = [None, *(claim.experiment for claim in claims), None]
    sections = [_claim(c, around[i], around[i + 2]) for i, c in enumerate(claims)]
    of_paper = any(claim.experiment.source for claim in claims)
    filled = fill(
        "neuvar.report",
        lead=LEAD if of_paper else "",
        source=SOURCE if of_paper else "",
        origin=_origin(claims),
        filters=_filters(claims),
        summary=_summary(claims),
        claims="\n".join(sections),
    )
    return printable(filled)


def _origin(claims: Sequence[Claim]) -> str:
    """Number of runs, time and dates; a run that several claims share counts once."""
    lines = {
        (finding.scale, result.run.key): result.line
        for claim in claims
        for finding in claim.findings
        for result in finding.results
    }
    if not lines:
        return '<p class="quiet">There are no results yet.</p>'
    days = sorted({str(line["when"])[:10] for line in lines.values() if line.get("when")})
    when = f", {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    runs = f"{len(lines):,} runs" if len(lines) > 1 else "1 run"
    time = total_time(lines.values())
    return f'<p class="quiet">{runs}, {time} of computing time{escape(when)}.</p>'


def _filters(claims: Sequence[Claim]) -> str:
    rows = [row for claim in claims for row in claim.rows()]
    counted = Counter(outcome for _, outcome, *_ in rows)
    buttons = "".join(
        f'<button type="button" class="chipbutton" value="{outcome or "none"}" '
        f'aria-pressed="false">{_chip(outcome)} {counted[outcome]}</button>'
        for outcome in VERDICTS
        if counted[outcome]
    )
    scales = sorted({finding.scale for claim in claims for finding in claim.findings})
    options = "".join(f'<option value="{scale}">{scale}</option>' for scale in scales)
    return f"""<div class="filters" role="search" hidden>
<fieldset class="verdicts"><legend class="label">Verdict</legend><button type="button"
class="chipbutton" value="" aria-pressed="true">All {len(rows)}</button>{buttons}</fieldset>
<label><span class="label">Scale</span><select id="scale">
<option value="">All scales</option>{options}</select></label>
<label><span class="label">Search claims</span>
<input type="search" id="search" placeholder="Search claims" autocomplete="off"></label>
</div>
<p id="shown" role="status"></p>"""


def _summary(claims: Sequence[Claim]) -> str:
    order = list(VERDICTS)
    rows = [
        f'<tr data-claim="claim-{escape(claim.experiment.name)}" '
        f'data-verdict="{outcome or "none"}" data-scale="{scale}">'
        f'<td data-sort="{i:04}">{escape(claim.experiment.number)}</td>'
        f'<th scope="row"><a href="#{escape(name)}">{escape(claim.experiment.title)}</a></th>'
        f'<td data-sort="{order.index(outcome)}">{_chip(outcome)}</td><td>{scale}</td>'
        f'<td class="number" data-sort="{n.rpartition("–")[2]}">{n}</td><td>{tally}</td></tr>'
        for i, claim in enumerate(claims)
        for name, outcome, scale, n, tally in claim.rows()
    ]
    return _scrolling("All claims", SUMMARY_HEADS, "".join(rows))


def _scrolling(label: str, heads: str, rows: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _chip(outcome: str) -> str:
    """A verdict as a sign and words."""
    return (
        f'<span class="chip {outcome or "none"}"><svg viewBox="0 0 16 16" aria-hidden="true" '
        f'fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round">'
        f"{SHAPES[outcome]}</svg>{VERDICTS[outcome][1]}</span>"
    )


def _claim(claim: Claim, before: Experiment | None, after: Experiment | None) -> str:
    """A claim with its findings, and links to its neighbours."""
    e = claim.experiment
    name = escape(f"claim-{e.name}")
    findings = "\n".join(_finding(finding, name) for finding in claim.findings) or (
        f'<div class="finding" data-claim="{name}" data-verdict="none" data-scale="">'
        f"<header><h3>No results yet</h3>{_chip('')}</header>"
        f"<p>To run this experiment:</p>{_command(command(e, 'cpu'))}</div>"
    )
    previous, following = (
        f'<a href="#claim-{escape(other.name)}" rel="{kind}">{left}{escape(other.title)}{right}</a>'
        if other is not None
        else "<span></span>"
        for other, kind, left, right in ((before, "prev", "← ", ""), (after, "next", "", " →"))
    )
    return f"""<section class="claim" id="{name}" aria-labelledby="{name}-title">
<header><span class="no">Claim {escape(e.number)}</span>
<h2 id="{name}-title">{escape(e.title)}{_anchor(name, e.title)}</h2>
<blockquote>{escape(e.sentence)}</blockquote><p class="source">{escape(e.source)}</p></header>
{findings}
<nav class="next" aria-label="From {escape(e.title)}">{previous}<a href="#summary">All claims</a>{
        following
    }</nav>
</section>"""


def _anchor(name: str, title: str) -> str:
    return f'<a class="anchor" href="#{name}" aria-label="Link to {escape(title)}">#</a>'


def _finding(finding: Finding, claim: str) -> str:
    name, title, verdict = escape(finding.name), finding.experiment.title, finding.verdict
    cases = "".join(f"<li>{_unbroken(case)}</li>" for case in verdict.cases)
    if cases:
        cases = _details(f"Comparisons ({len(verdict.cases)})", f"<ul>{cases}</ul>")
    lost = ""
    if finding.diverged:
        pairs = diverged_runs(finding.diverged, finding.results)
        lost = _details(
            f"Runs that diverged ({len(finding.diverged)})", f"<dl>{_pairs(pairs)}</dl>"
        )
    warn = " warn" if finding.recorded < finding.planned or finding.diverged else ""
    files = ""
    if finding.panels:
        file = escape(f"figures/{finding.name}")
        links = f'<a href="{file}.svg">SVG</a>, <a href="{file}.png">PNG</a>'
        files = f"<dt>Figure for print</dt><dd>{links}, in the folder of this page</dd>"
    settings = escape(finding.experiment.settings(finding.scale))
    settings = _details("Settings", f'<p class="settings">{settings}</p>') if settings else ""
    return f"""<article class="finding" id="{name}" aria-labelledby="{name}-title"
data-claim="{claim}" data-verdict="{verdict.outcome}" data-scale="{finding.scale}">
<header><h3 id="{name}-title">{SCALE_TITLES[finding.scale]}{
        _anchor(name, f"{title}, {finding.scale} scale")
    }</h3>{_chip(verdict.outcome)}</header>
<p class="because">{_unbroken(verdict.because)}</p>
{cases}
{_figure(finding)}
{_table(finding.table, f"{title}, {finding.scale} scale")}
<p class="quiet{warn}">Mean ± standard deviation, n&nbsp;=&nbsp;{finding.n} trials per setting; {
        finding.tally
    }.</p>
{_command(finding.command)}
{lost}
{settings}
{_details("Origin of the numbers", f"<dl>{_pairs(provenance(finding.results))}{files}</dl>")}
</article>"""


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)


def _figure(finding: Finding) -> str:
    panels, name = finding.panels, finding.name
    if not panels:
        return ""
    entries = "".join(
        f'<li><button type="button" value="{i}" aria-pressed="false">'
        f"{swatch(look, f'{name}-swatch-{i}')}<span>{escape(label)}</span></button></li>"
        for i, ((label, _), look) in enumerate(styles(panels).items())
    )
    drawn = "".join(
        f'<div class="panel"><p>{escape(panel.title)}</p>{svg}</div>'
        for panel, svg in zip(panels, inline(panels, name), strict=True)
    )
    columns = {1: "one", 2: "two", 4: "two"}.get(len(panels), "three")
    return f"""<figure aria-label="{escape(finding.experiment.title)}">
<ul class="legend" aria-label="Lines; press one to see it alone">{entries}</ul>
<div class="panels {columns}">{drawn}</div>
<figcaption>{escape(caption(panels))}</figcaption></figure>"""


def _unbroken(text: str) -> str:
    """Keep numbers on one line with their names and units."""
    return escape(text).replace(" = ", "&nbsp;=&nbsp;").replace(" %", "&nbsp;%")


def _table(table: Table, label: str) -> str:
    numbers = [numeric(table, i) for i in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col" data-sortable{" data-number" if is_number else ""}'
        f"{' class=number' if is_number and i else ''}>{escape(column)}</th>"
        for i, (column, is_number) in enumerate(zip(table.columns, numbers, strict=True))
    )
    rows = "".join(
        f"<tr>{''.join(map(_cell, row, numbers, range(len(row))))}</tr>" for row in table.rows
    )
    return _scrolling(label, heads, rows)


def _cell(cell: str | Cell, is_number: bool, column: int) -> str:
    tag = 'th scope="row"' if column == 0 else "td"
    value = number(cell)
    kind = "number" if is_number and column else "short" if len(str(cell)) <= 32 else ""
    attributes = f' class="{kind}"' if kind else ""
    if is_number and value is not None:
        attributes += f' data-sort="{value!r}"'
    if isinstance(cell, Cell) and cell.trials:
        factor = 100 if cell.percent else 1
        each = ", ".join(f"{factor * trial:.4g}" for trial in cell.trials)
        attributes += f' title="n = {len(cell.trials)}: {each}"'
    return f"<{tag}{attributes}>{escape(str(cell))}</{tag.partition(' ')[0]}>"


def _command(words: str) -> str:
    return (
        f'<div class="command"><code>{escape(words)}</code>'
        '<button type="button" class="copy" hidden>Copy</button></div>'
    )
