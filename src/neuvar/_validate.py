"""Argument validation: each check returns the value, or raises a ValueError that names it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def integer(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """An integer from ``low`` to ``high``, both included; booleans are refused.

    >>> integer("draws", 8, low=1)
    8
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if number is None or not least <= number <= most:
        if low is not None and high is not None:
            limits = f" from {low} to {high}"
        else:
            limits = f" >= {low}" if low is not None else f" <= {high}" if high is not None else ""
        raise ValueError(f"{name} must be an integer{limits}, got {value!r}")
    return number


def sizes(name: str, values: Any, *, at_least: int = 1) -> tuple[int, ...]:
    """A tuple of ``at_least`` or more integers >= 1."""
    items = tuple(values) if isinstance(values, Iterable) else ()
    if len(items) < at_least:
        raise ValueError(f"{name} must be {at_least} or more integers, got {values!r}")
    return tuple(integer(name, item, low=1) for item in items)


def seed(value: Any, name: str = "seed") -> int:
    """A seed: an integer from 0 to 2**32 - 1."""
    return integer(name, value, low=0, high=2**32 - 1)


def number(
    name: str,
    value: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """A finite number within limits: ``low`` and ``high`` included, ``above`` and ``below`` not.

    >>> number("rate", 0.4, low=0, below=1)
    0.4
    """
    try:
        result = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        result = math.nan
    inside = (
        math.isfinite(result)
        and (low is None or result >= low)
        and (high is None or result <= high)
        and (above is None or result > above)
        and (below is None or result < below)
    )
    if not inside:
        signs = ((">=", low), (">", above), ("<=", high), ("<", below))
        limits = " and ".join(f"{sign} {limit:g}" for sign, limit in signs if limit is not None)
        wanted = f"a finite number {limits}".rstrip()
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return result


def probability(name: str, value: Any) -> float:
    """A number strictly between 0 and 1."""
    return number(name, value, above=0, below=1)


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """One of the allowed values; the error suggests the most similar one."""
    allowed = list(allowed)
    if value not in allowed:
        near = get_close_matches(str(value), map(str, allowed), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(map(str, allowed))
        raise ValueError(f"{name} must be one of {known}, got {value!r}{hint}")
    return value


def returned(function: str, value: Any, kind: type, words: str) -> Any:
    """What a user's function returned; ``words`` name the type that it must have.

    >>> returned('NETWORKS["mine"]', None, dict, "dict")
    Traceback (most recent call last):
    ValueError: NETWORKS["mine"] must return a dict, got None
    """
    if not isinstance(value, kind):
        got = None if value is None else type(value).__name__
        raise ValueError(f"{function} must return a {words}, got {got}")
    return value
