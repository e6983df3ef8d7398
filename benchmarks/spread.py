"""How all tables of results show several trials, and the differences between two methods."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from neuvar.measures.estimate import student_quantile

FEW = 5
"""With fewer trials a result is preliminary."""
BySeed = dict[int, float]
Choice = Callable[..., tuple[str, BySeed]]
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


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and both ends of its 95 % interval (Student's t)."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = student_quantile(0.975, len(differences) - 1) * error
    return mean, mean - half, mean + half


def difference(differences: Sequence[float], digits: int, *, factor: float = 1) -> str:
    """Mean and 95 % interval of paired differences; the mean alone of one, and a dash of none.

    An end of the interval that would be rounded to 0 gets up to two more digits, to show its side.

    >>> difference([0.01, 0.02, 0.03], 1, factor=100)
    '+2.0 (-0.5 to +4.5)'
    >>> difference([0.1, 0.2, 0.32], 0)
    '+0 (-0.1 to +0.5)'
    """
    if not differences:
        return "–"
    mean, *ends = (factor * value for value in interval(differences))
    if len(differences) < 2:
        return f"{mean:+z.{digits}f}"
    enough = [n for n in range(digits, digits + 2) if all(round(end, n) for end in ends if end)]
    low, high = (f"{end:+z.{min([*enough, digits + 2])}f}" for end in ends)
    return f"{mean:+z.{digits}f} ({low} to {high})"


def best(candidates: Mapping[str, BySeed], choose: Choice = max) -> tuple[str, BySeed]:
    """The candidate with the highest mean (or the lowest), over the seeds that all have.

    A candidate that has just been started waits until it has half as many trials as the others, or
    three of five.

    >>> half = {"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {0: 0.4, 1: 0.8}, "started": {0: 0.9}}
    >>> best(half)[0]
    'b'
    """
    most = min(FEW, max(map(len, candidates.values())))
    ready = {name: values for name, values in candidates.items() if 2 * len(values) >= most}
    seeds = set.intersection(*(set(values) for values in ready.values()))

    def mean(item: tuple[str, BySeed]) -> float:
        return statistics.fmean(item[1][seed] for seed in seeds or item[1])

    return choose(ready.items(), key=mean)


def unbroken(text: str) -> str:
    """Text that stays on one line of a table."""
    return text.replace(" ", NO_BREAK)
