"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from neuvar.pages import fill
from neuvar.report.gather import Claim
from neuvar.report.origin import duration
from neuvar.report.sections import chip, claim_section
from neuvar.report.words import VERDICTS, printable


def page(claims: Sequence[Claim]) -> str:
    """All claims as a page; every word of theirs is escaped, and the page may load nothing."""
    around = [None, *(claim.experiment for claim in claims), None]
    sections = [claim_section(c, around[i], around[i + 2]) for i, c in enumerate(claims)]
    filled = fill(
        "neuvar.report",
        origin=_origin(claims),
        filters=_filters(claims),
        summary=_summary(claims),
        claims="\n".join(sections),
    )
    return printable(filled)


def _origin(claims: Sequence[Claim]) -> str:
    """How much lies behind the page; a run that several claims share counts once."""
    lines = {
        (finding.scale, result.run.key): result.line
        for claim in claims
        for finding in claim.findings
        for result in finding.results
    }
    if not lines:
        return '<p class="quiet">There are no results yet.</p>'
    taken = duration(sum(float(line.get("seconds") or 0) for line in lines.values()))
    days = sorted({str(line["when"])[:10] for line in lines.values() if line.get("when")})
    when = f", from {days[0]} to {days[-1]}" if len(days) > 1 else "".join(f", {d}" for d in days)
    runs = f"{len(lines):,} runs" if len(lines) > 1 else "1 run"
    return f'<p class="quiet">{runs}, {taken} of computing{escape(when)}.</p>'


def _rows(claims: Sequence[Claim]) -> list[tuple[Claim, str, str, str, str, str]]:
    """Claim, outcome, scale, place, n and runs of each row of the summary."""
    rows = []
    for claim in claims:
        if not claim.findings:
            rows.append((claim, "", "", f"claim-{claim.experiment.name}", "–", "–"))
        rows += [(claim, f.verdict.outcome, f.scale, f.name, f.n, f.tally) for f in claim.findings]
    return rows


def _filters(claims: Sequence[Claim]) -> str:
    rows = _rows(claims)
    counted = Counter(outcome for _, outcome, *_ in rows)
    buttons = [
        '<button type="button" class="chipbutton" value="" aria-pressed="true">'
        f"All {len(rows)}</button>"
    ]
    buttons += [
        f'<button type="button" class="chipbutton" value="{outcome or "none"}" '
        f'aria-pressed="false">{chip(outcome)} {counted[outcome]}</button>'
        for outcome in VERDICTS
        if counted[outcome]
    ]
    scales = dict.fromkeys(scale for _, _, scale, *_ in rows if scale)
    options = "".join(f'<option value="{scale}">{scale}</option>' for scale in sorted(scales))
    return f"""<div class="filters" role="search" hidden>
<fieldset class="verdicts"><legend class="label">Verdict</legend>{"".join(buttons)}</fieldset>
<label><span class="label">Scale</span><select id="scale">
<option value="">Every scale</option>{options}</select></label>
<label><span class="label">Search in claims</span>
<input type="search" id="search" placeholder="Search in claims" autocomplete="off"></label>
</div>
<p id="shown" role="status"></p>"""


def _summary(claims: Sequence[Claim]) -> str:
    order = list(VERDICTS)
    rows = []
    for place, (claim, outcome, scale, name, n, tally) in enumerate(_rows(claims)):
        e = claim.experiment
        rows.append(
            f'<tr data-claim="claim-{escape(e.name)}" data-verdict="{outcome or "none"}" '
            f'data-scale="{scale}"><td data-sort="{place:04}">{escape(e.number)}</td>'
            f'<th scope="row"><a href="#{escape(name)}">{escape(e.title)}</a></th>'
            f'<td data-sort="{order.index(outcome)}">{chip(outcome)}</td>'
            f"<td>{scale or '–'}</td>"
            f'<td class="number" data-sort="{n.rpartition("–")[2]}">{n}</td>'
            f"<td>{tally}</td></tr>"
        )
    heads = "".join(
        f'<th scope="col" data-sortable{extra}>{name}</th>'
        for name, extra in (
            ("No.", ""),
            ("Claim", ""),
            ("Verdict", ""),
            ("Scale", ""),
            ("n", ' data-number class="number"'),
            ("Runs", ""),
        )
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="All claims">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
