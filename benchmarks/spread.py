"""How all tables of results show several trials: mean ± standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

NO_BREAK = "\N{NO-BREAK SPACE}"


def spread(values: Iterable[float], digits: int, *, factor: float = 1, unit: str = "") -> str:
    """Mean ± standard deviation; the mean alone of one value, and a dash of none.

    The mean is taken first and then scaled, as in the tables of ``neuvar report``: the last digit
    may depend on the order.

    >>> spread([0.5, 0.75], 1, factor=100, unit=" %")
    '62.5 ± 17.7 %'
    """
    numbers = list(values)
    if not numbers:
        return "–"
    text = f"{factor * statistics.fmean(numbers):.{digits}f}"
    if len(numbers) > 1:
        text += f" ± {factor * statistics.stdev(numbers):.{digits}f}"
    return text + unit


def unbroken(text: str) -> str:
    """Text that stays on one line of a table."""
    return text.replace(" ", NO_BREAK)
