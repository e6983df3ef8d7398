"""Render the results as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from torch import Tensor

from neuvar.cleaning.encoding import TEXT_WORDS
from neuvar.cleaning.examples import has_channels_last
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.readers import Source
from neuvar.cleaning.summary import Cleaning
from neuvar.pages import head, printable

SCRIPTS = ("page.js", "decisions.js", "cards.js", "map.js")
LEADS = {
    "rho": "A network trained with SAM memorizes few wrong labels. These are the labels it "
    "disagrees with. It can be wrong: review each label and decide.",
    "b": "A network trained with weight noise memorizes few wrong labels. These are the labels it "
    "disagrees with. It can be wrong: review each label and decide.",
    "linear": "Each label was predicted by a linear model that had not seen it. These are the "
    "labels it disagrees with. It can be wrong: review each label and decide.",
    "observed": "These are the labels that your network disagreed with while it was trained. It "
    "can be wrong: review each label and decide.",
    "": "These are the labels that the given probabilities disagree with. They can be wrong: "
    "review each label and decide.",
}
"""First paragraph of the page, by a setting that only this source of the probabilities has."""
MAX_DATA = 4_500_000
"""Characters of data in a page."""
MIN_PICTURES = 2_000_000
"""The part of them that is reserved for pictures."""
MIN_SHARE = 0.0005
"""Smaller elements of the transition matrix are left out."""
MAX_ELEMENTS = 22_500
"""Largest number of elements; the smallest ones are left out."""
MAX_SIDE = 96
"""Largest side of a picture, in pixels."""
MIN_SIDE = 12
"""Pictures are not shrunk below this side, in pixels."""
MAX_NUMBERS = 8
"""Examples with more features are shown as bars."""
MAX_BARS = 64
MAX_CELLS = 12
"""Largest number of columns of a table that are shown for an example."""
MAX_VALUE = 300
"""Longer cells are cut, in characters."""
MAX_TEXT = 1000
"""The same for columns of text."""
PICTURE = 9_000
"""With many examples, each picture may take this many characters."""
MAX_PICTURES = 16_000_000
"""Largest number of characters of all pictures together."""


def render_page(cleaning: Cleaning, *, top: int, folder: str) -> str:
    """The page with ``top`` examples, flagged ones first. It escapes all text of the data."""
    details = cleaning.details.items()
    n, rate = len(cleaning.issues), cleaning.issues.noise_rate
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        head=head("neuvar.cleaning", SCRIPTS),
        name=escape(printable(cleaning.source.name)),
        findings=escape(str(cleaning)),
        lead=LEADS[next((key for key in LEADS if key in cleaning.settings), "")],
        labels=f"{n:,}",
        classes=f"{len(cleaning.issues.names):,}",
        flagged=f"{cleaning.flagged:,}",
        share=f"{100 * cleaning.flagged / n:.1f}",
        rate=f"{100 * rate.value:.1f}",
        confidence=f"{100 * rate.confidence:.3g}",
        interval=f"{100 * rate.low:.1f} – {100 * rate.high:.1f}",
        settings="".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in details),
        command=escape(printable(cleaning.command)),
        data=embed(page_data(cleaning, top=top, folder=folder)),
    )


def embed(data: Any) -> str:
    r"""JSON that is safe inside a script element.

    >>> print(embed({"name": "</script>&"}))
    {"name":"\u003c/script\u003e\u0026"}
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def page_data(cleaning: Cleaning, *, top: int, folder: str) -> dict[str, Any]:
    """The data that the page's script uses."""
    source, issues = cleaning.source, cleaning.issues
    others = issues.ranked[~issues.flagged[issues.ranked]]
    others = others[~np.isin(others, issues.unseen)]
    shown = np.concatenate([issues.worst, others])[:top]
    words = ["neuvar", "clean", *cleaning.data_arguments, "--decisions", "decisions.csv"]
    labels = {
        "given": issues.labels.tolist(),
        "files": list(source.examples.files) or None,
    }
    t, pairs = issues.transition, issues.pairs
    shares = np.nan_to_num(t.matrix, nan=-1.0)
    least = max(MIN_SHARE, float(np.sort(shares, axis=None)[-MAX_ELEMENTS:][0]))
    data: dict[str, Any] = {
        "key": source.sha256[:16],
        "n": len(issues),
        "flagged": cleaning.flagged,
        "id_column": source.id_column,
        "names": list(issues.names),
        "command": shlex.join([*words, "--out", folder]),
        "cards": {
            "index": shown.tolist(),
            "flagged": min(top, cleaning.flagged),
            "id": [source.ids[i] for i in shown] if source.examples.files else None,
            "given": issues.labels[shown].tolist(),
            "suggested": issues.suggested[shown].tolist(),
            "quality": [float(f"{q:.4g}") for q in issues.quality[shown]],
            "wrong": [float(f"{p:.4g}") for p in issues.error_probability[shown]],
        },
        "pairs": [[int(i), int(j), int(pairs[i, j])] for i, j in np.argwhere(pairs)],
        "least": least,
        "transition": [
            [int(i), int(j), *(round(float(x[i, j]), 4) for x in (t.matrix, t.low, t.high))]
            for i, j in np.argwhere(shares >= least)
        ],
        # Without these, the page has no download of all labels.
        "labels": labels if len(embed(labels)) <= MAX_DATA - MIN_PICTURES else None,
    }
    room = max(MAX_DATA - len(embed(data)), MIN_PICTURES, min(PICTURE * len(shown), MAX_PICTURES))
    return data | _inputs(cleaning, shown, room)


def _inputs(cleaning: Cleaning, shown: Array, room: int) -> dict[str, Any]:
    inputs = cleaning.source.examples.inputs
    if is_images(inputs):
        return {"pictures": pictures(inputs, shown, room=room)}
    source, width = cleaning.source, inputs[0].numel()
    if source.cells:
        return _cells(source, shown)
    if width > MAX_NUMBERS and len(source.columns) != width:
        return {"bars": bars(inputs, shown)}
    columns = source.columns or tuple(f"feature {i}" for i in range(width))
    features: Any = inputs.flatten(1).double().cpu().numpy()
    rows = [[_short(value) for value in row] for row in features[shown].tolist()]
    unusual = np.abs(features[shown] - features.mean(0)) > 3 * features.std(0)
    return _table(columns, rows, unusual)


def _short(value: float) -> float:
    """Integers, such as years, as they are; other numbers to four digits."""
    whole = value.is_integer() and abs(value) < 10**7
    return value if whole else float(f"{value:.4g}")


def _cells(source: Source, shown: Array) -> dict[str, Any]:
    """The cells of a table that is not plain numbers."""
    texts = {k for k, cells in enumerate(source.cells) if is_text(cells)}
    unusual = np.stack([unusual_cells(cells)[shown] for cells in source.cells], 1)

    def cell(text: str, limit: int) -> str:
        return printable(text if len(text) <= limit else f"{text[:limit]}…")

    limits = [MAX_TEXT if k in texts else MAX_VALUE for k in range(len(source.cells))]
    rows = [
        [cell(cells[i], limit) for cells, limit in zip(source.cells, limits, strict=True)]
        for i in shown
    ]
    return _table(source.columns, rows, unusual, sorted(texts))


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], unusual: Array, texts: Sequence[int] = ()
) -> dict[str, Any]:
    """Column names, values of examples, their unusual values, and the columns of text.

    With more than ``MAX_CELLS`` columns, each example shows its texts and unusual values first,
    then other columns from the left.
    """
    marked = [np.flatnonzero(mask).tolist() for mask in unusual]
    some = [
        sorted(list(dict.fromkeys([*texts, *marks, *range(len(columns))]))[:MAX_CELLS])
        for marks in marked
    ]
    return {
        "columns": [printable(name) for name in columns],
        "numbers": [[row[k] for k in which] for row, which in zip(rows, some, strict=True)],
        "unusual": marked,
        "texts": list(texts),
        "which": some if len(columns) > MAX_CELLS else None,
    }


def is_text(cells: Sequence[str]) -> bool:
    """Whether the cells of a column are sentences, by their mean number of words.

    >>> is_text(["a film to forget", ""]), is_text(["New York", "Rome"])
    (True, False)
    """
    known = [cell for cell in cells if cell]
    return sum(len(cell.split()) for cell in known) >= TEXT_WORDS * max(len(known), 1)


def unusual_cells(cells: Sequence[str]) -> Array:
    """Mask of unusual cells: numbers more than 3 standard deviations from the mean, rare values.

    A value is rare if fewer than 1 % of the rows have it.

    >>> unusual_cells(["red"] * 150 + ["pink"])[-2:].tolist()
    [False, True]
    >>> unusual_cells(["1", "2"] * 50 + ["90", ""])[-3:].tolist()
    [False, True, False]
    """
    known = [cell for cell in cells if cell]
    try:
        numbers = np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        counts = Counter(known)
        if len(counts) > len(known) / 5:  # every value is rare, as in text
            return np.zeros(len(cells), dtype=bool)
        return np.array([bool(cell) and counts[cell] < len(cells) / 100 for cell in cells])
    if not known:
        return np.zeros(len(cells), dtype=bool)
    unusual: Array = np.abs(numbers - np.nanmean(numbers)) > 3 * np.nanstd(numbers)
    return unusual


def is_images(inputs: Tensor) -> bool:
    """Whether inputs have a height and a width."""
    return inputs.ndim in (3, 4)


def pictures(inputs: Tensor, shown: Array, *, room: int) -> list[str]:
    """The shown images as data URIs of PNG files, shrunk to ``room`` characters in total.

    Float images share one brightness range.
    """
    from PIL import Image

    pixels = _to_bytes(inputs[np.asarray(shown)].cpu().numpy())
    images, side = [Image.fromarray(one) for one in pixels], max(pixels.shape[1:3])
    step = -(-side // MAX_SIDE)
    while True:
        uris = []
        for image in images:
            file = io.BytesIO()
            image.reduce(step).save(file, "PNG", optimize=True)
            uris.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
        if sum(map(len, uris)) <= room or side // (2 * step) < MIN_SIDE:
            return uris
        step *= 2


def _to_bytes(images: Array) -> Array:
    """Images in uint8, (n, h, w) or (n, h, w, 3); other numbers of channels become gray."""
    if images.dtype != np.uint8 and images.size:
        low, high = float(images.min()), float(images.max())
        images = ((images - low) * (255 / (high - low or 1.0))).round().astype(np.uint8)
    if images.ndim == 4:
        if not has_channels_last(images.shape):
            images = images.transpose(0, 2, 3, 1)
        if images.shape[3] != 3:
            images = images.mean(3).round().astype(np.uint8)
    return np.ascontiguousarray(images)


def bars(inputs: Tensor, shown: Array) -> list[list[int]]:
    """Features as at most 64 bars between -100 and 100.

    A full bar is three standard deviations from the mean over all examples. With more than 64
    features, neighbouring ones are averaged.
    """
    features: Any = inputs.flatten(1).double().cpu().numpy()
    spread = features.std(0)
    offset = features[shown] - features.mean(0)
    score = np.divide(offset, spread, out=np.zeros_like(offset), where=spread > 0)
    edges = np.unique(np.linspace(0, score.shape[1], MAX_BARS + 1).astype(int)[:-1])
    mean = np.add.reduceat(score, edges, 1) / np.diff([*edges, score.shape[1]])
    heights: list[list[int]] = (100 * (mean / 3).clip(-1, 1)).round().astype(int).tolist()
    return heights
