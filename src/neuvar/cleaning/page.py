"""What was found as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
import shlex
from html import escape
from typing import Any

import numpy as np

from neuvar.cleaning.issues import Array
from neuvar.cleaning.summary import Cleaning, findings, printable
from neuvar.cleaning.thumbnails import MOST_NUMBERS, are_pictures, bars, numbers, pictures
from neuvar.pages import fill

SCRIPTS = ("page.js", "decisions.js", "cards.js", "map.js")
LEADS = {
    True: "A network that is trained with noise on its weights does not learn labels by heart. "
    "Here is where it disagrees with them.",
    False: "Here is where the probabilities of another network disagree with the labels.",
}
"""What is said first, with and without a training of our own."""
ROOM = 4_500_000
"""Characters that the data in a page may take."""
LEAST_FOR_PICTURES = 2_000_000
"""Of these, what is kept for pictures."""
LEAST_SHOWN = 0.0005
"""Elements of the transition matrix below this share are left out of the page."""
MOST_ELEMENTS = 22_500
"""How many of them are kept at most: all of 150 classes."""


def page(cleaning: Cleaning, *, top: int, folder: str) -> str:
    """The page; every word of the data is escaped, and the page may load nothing.

    Args:
        cleaning: what was found.
        top: how many flagged examples are shown.
        folder: where the page will be, for the command that takes decisions back.
    """
    return fill(
        "neuvar.cleaning",
        scripts=SCRIPTS,
        name=escape(printable(cleaning.source.name)),
        findings=escape(findings(cleaning)),
        lead=LEADS["network" in cleaning.settings],
        figures=_figures(cleaning),
        settings=_settings(cleaning),
        command=escape(printable(cleaning.command)),
        data=embedded(page_data(cleaning, top=top, folder=folder)),
    )


def embedded(data: Any) -> str:
    r"""JSON that cannot end the element which it stands in.

    >>> print(embedded({"name": "</script>&"}))
    {"name":"\u003c/script\u003e\u0026"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _figures(cleaning: Cleaning) -> str:
    issues = cleaning.issues
    rate = issues.noise_rate
    interval = f"{100 * rate.low:.1f} – {100 * rate.high:.1f} %"
    said = [
        ("Labels", f"{len(issues):,}", f"in {len(issues.names):,} classes"),
        (
            "Flagged",
            f"{cleaning.flagged:,}",
            f"{100 * cleaning.flagged / len(issues):.1f} % of all",
        ),
        (
            "Estimated share of wrong labels",
            f"{100 * rate.value:.1f} %",
            f"{100 * rate.confidence:.3g} % interval of sampling {interval}",
        ),
    ]
    return "".join(
        f"<div><dt>{escape(what)}</dt><dd><b>{escape(value)}</b>"
        f"<span>{escape(more)}</span></dd></div>"
        for what, value, more in said
    )


def _settings(cleaning: Cleaning) -> str:
    said = [*cleaning.settings.items(), ("seconds", f"{cleaning.seconds:.1f}")]
    return "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(printable(str(value)))}</dd>"
        for name, value in said
    )


def page_data(cleaning: Cleaning, *, top: int, folder: str) -> dict[str, Any]:
    """What the script of the page works with."""
    source, issues = cleaning.source, cleaning.issues
    shown = issues.worst[:top]
    data: dict[str, Any] = {
        "key": source.sha256[:16],
        "n": len(issues),
        "flagged": cleaning.flagged,
        "place": source.place_name,
        "names": list(issues.names),
        "command": _taking_back(cleaning, folder),
        "cards": {
            "index": shown.tolist(),
            "place": [source.places[i] for i in shown] if source.examples.files else None,
            "given": issues.labels[shown].tolist(),
            "suggested": issues.suggested[shown].tolist(),
            "quality": [float(f"{q:.4g}") for q in issues.quality[shown]],
        },
        "pairs": _pairs(cleaning),
        **_transition(cleaning),
        "labels": _labels(cleaning),
    }
    left = ROOM - len(embedded(data))
    return data | _seen(cleaning, shown, max(left, LEAST_FOR_PICTURES))


def _taking_back(cleaning: Cleaning, folder: str) -> str:
    """The command that applies decisions, which needs the data and their labels once more."""
    words = ["neuvar", "clean", *cleaning.again]
    return shlex.join([*words, "--decisions", "decisions.csv", "--out", folder])


def _pairs(cleaning: Cleaning) -> list[list[int]]:
    pairs = cleaning.issues.pairs
    return [[int(i), int(j), int(pairs[i, j])] for i, j in np.argwhere(pairs)]


def _transition(cleaning: Cleaning) -> dict[str, Any]:
    """True class, given label, probability and its interval of all elements but the least."""
    t = cleaning.issues.transition
    known = np.nan_to_num(t.matrix, nan=-1.0)
    least = max(LEAST_SHOWN, float(np.sort(known, axis=None)[-MOST_ELEMENTS:][0]))
    found = [
        [int(i), int(j), *(round(float(x[i, j]), 4) for x in (t.matrix, t.low, t.high))]
        for i, j in np.argwhere(known >= least)
    ]
    return {"least": least, "transition": found}


def _labels(cleaning: Cleaning) -> dict[str, Any] | None:
    """All labels, so that the page can give them out changed; None if they would be too many."""
    issues, source = cleaning.issues, cleaning.source
    flagged = np.flatnonzero(issues.flagged)
    found = {
        "given": issues.labels.tolist(),
        "flagged": flagged.tolist(),
        "suggested": issues.suggested[flagged].tolist(),
        "files": list(source.examples.files) or None,
    }
    return found if len(embedded(found)) <= ROOM - LEAST_FOR_PICTURES else None


def _seen(cleaning: Cleaning, shown: Array, room: int) -> dict[str, Any]:
    """The shown examples as pictures, numbers or bars."""
    source = cleaning.source
    inputs = source.examples.inputs
    if are_pictures(inputs):
        return {"pictures": pictures(inputs, shown, room=room)}
    width = inputs[0].numel()
    if width <= MOST_NUMBERS:
        columns = source.columns or tuple(f"feature {i}" for i in range(width))
        return {"columns": list(columns), "numbers": numbers(inputs, shown)}
    return {"bars": bars(inputs, shown)}
