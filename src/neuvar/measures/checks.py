"""Arguments that make sense, or a sentence."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    """Return ``value`` if it is a whole number, not below ``least``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (least is not None and value < least)
    ):
        raise ValueError(
            f"{name} must be a whole number{'' if least is None else f' >= {least}'}, got {value!r}"
        )
    return operator.index(value)


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse what is not among the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def probability(name: str, value: Any) -> float:
    """Return ``value`` if it is a number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")
    return float(value)


def yes_or_no(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
