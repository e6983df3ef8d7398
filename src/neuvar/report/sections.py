"""One claim on the page: the sentence, the verdict, the figure, the numbers, how to get them."""

from __future__ import annotations

from html import escape

from neuvar.experiments.experiment import Experiment
from neuvar.experiments.findings import Cell, Table
from neuvar.report.gather import Claim, Finding, command
from neuvar.report.inline import inline, swatch
from neuvar.report.origin import facts, mishaps
from neuvar.report.style import styles
from neuvar.report.tables import numeric
from neuvar.report.words import SCALES, VERDICTS, caption, number

# A shape of its own for each verdict: none has to be told by its colour.
SHAPES = {
    "true": '<circle cx="8" cy="8" r="7"/><path d="M4.6 8.3l2.3 2.4 4.5-5"/>',
    "false": '<rect x="1.5" y="1.5" width="13" height="13"/><path d="M5 5l6 6M11 5l-6 6"/>',
    "undecided": '<path d="M8 .8L15.2 8 8 15.2.8 8z"/>'
    '<path d="M6.2 6.4a1.8 1.8 0 1 1 2.6 1.7q-.8.4-.8 1.2M8 11v.3"/>',
    "": '<circle cx="8" cy="8" r="7" stroke-dasharray="2.2 2.2"/>',
}


def chip(outcome: str) -> str:
    """A verdict as a sign and words."""
    return (
        f'<span class="chip {outcome or "none"}"><svg viewBox="0 0 16 16" aria-hidden="true" '
        f'fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round">'
        f"{SHAPES[outcome]}</svg>{VERDICTS[outcome][1]}</span>"
    )


def claim_section(claim: Claim, before: Experiment | None, after: Experiment | None) -> str:
    """A claim with all that was found for it, and links to its neighbours."""
    e = claim.experiment
    name = escape(f"claim-{e.name}")
    if claim.findings:
        found = "\n".join(_finding(finding, name) for finding in claim.findings)
    else:
        found = (
            f'<div class="finding" data-claim="{name}" data-verdict="none" data-scale="">'
            f"<header><h3>No results yet</h3>{chip('')}</header>"
            f"<p>Nothing has been recorded for this claim. This runs it:</p>"
            f"{_command(command(e, 'cpu'))}</div>"
        )
    links = [
        f'<a href="#claim-{escape(other.name)}" {kind}>{sign[0]}{escape(other.title)}{sign[1]}</a>'
        if other is not None
        else "<span></span>"
        for other, kind, sign in (
            (before, 'rel="prev"', ("← ", "")),
            (after, 'rel="next"', ("", " →")),
        )
    ]
    links.insert(1, '<a href="#summary">All claims</a>')
    return f"""<section class="claim" id="{name}" aria-labelledby="{name}-title">
<header><span class="no">Claim {escape(e.number)}</span>
<h2 id="{name}-title">{escape(e.title)}{_anchor(name, e.title)}</h2>
<blockquote>{escape(e.sentence)}</blockquote><p class="source">{escape(e.source)}</p></header>
{found}
<nav class="next" aria-label="From {escape(e.title)}">{"".join(links)}</nav>
</section>"""


def _anchor(name: str, title: str) -> str:
    return f'<a class="anchor" href="#{name}" aria-label="Link to {escape(title)}">#</a>'


def _finding(finding: Finding, claim: str) -> str:
    name, title = escape(finding.name), finding.experiment.title
    lost = ""
    if finding.diverged:
        items = "".join(
            f"<dt>{escape(what)}</dt><dd>{escape(why)}</dd>"
            for what, why in mishaps(finding.diverged, finding.results)
        )
        lost = (
            f"<details><summary>Runs that diverged ({len(finding.diverged)})</summary>"
            f"<dl>{items}</dl></details>"
        )
    partial = finding.recorded < finding.planned or finding.diverged
    return f"""<article class="finding" id="{name}" aria-labelledby="{name}-title"
data-claim="{claim}" data-verdict="{finding.verdict.outcome}" data-scale="{finding.scale}">
<header><h3 id="{name}-title">{SCALES[finding.scale]}{
        _anchor(name, f"{title}, {finding.scale} scale")
    }</h3>{chip(finding.verdict.outcome)}</header>
<p class="because">{_unbroken(finding.verdict.because)}</p>
{_figure(finding)}
{_table(finding.table, f"{title}, {finding.scale} scale")}
<p class="{"quiet warn" if partial else "quiet"}">Mean ± standard deviation, n&nbsp;=&nbsp;{
        finding.n
    } trials a setting; {finding.tally}.</p>
{_command(finding.command)}
{lost}
<details><summary>Settings</summary><p class="settings">{
        escape(finding.experiment.settings(finding.scale))
    }</p></details>
<details><summary>Where the numbers come from</summary><dl>{_facts(finding)}</dl></details>
</article>"""


def _facts(finding: Finding) -> str:
    pairs = facts(finding.results)
    said = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    if finding.panels:
        file = escape(f"figures/{finding.name}")
        said += (
            "<dt>Figure for print</dt><dd>"
            f'<a href="{file}.svg">SVG</a>, <a href="{file}.png">PNG</a>, in the folder beside '
            "this page</dd>"
        )
    return said


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
        f'<div class="panel"><p>{_whole_words(panel.title)}</p>{svg}</div>'
        for panel, svg in zip(panels, inline(panels, name), strict=True)
    )
    columns = {1: "one", 2: "two", 4: "two"}.get(len(panels), "three")
    return f"""<figure aria-label="{escape(finding.experiment.title)}">
<ul class="legend" aria-label="Lines; press one to see it alone">{entries}</ul>
<div class="panels {columns}">{drawn}</div>
<figcaption>{escape(caption(panels))}</figcaption></figure>"""


def _unbroken(text: str) -> str:
    """A text in which numbers stay with what belongs to them."""
    return escape(text).replace(" = ", "&nbsp;=&nbsp;").replace(" %", "&nbsp;%")


def _whole_words(text: str) -> str:
    """A text in which names such as CIFAR-10 are not broken at their hyphens."""
    return " ".join(
        f'<span class="short">{escape(word)}</span>'
        if "-" in word and len(word) <= 24
        else escape(word)
        for word in text.split(" ")
    )


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
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


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
