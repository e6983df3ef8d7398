"""Argument validation: what is accepted, and the sentence for what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from neuvar import _validate


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_integers_of_any_library_are_accepted(value: Any) -> None:
    assert _validate.integer("n", value, low=1, high=3) == 3


@pytest.mark.parametrize(
    ("limits", "value", "sentence"),
    [
        ({}, 1.5, "n must be an integer, got 1.5"),
        ({}, True, "n must be an integer, got True"),
        ({"low": 1}, 0, "n must be an integer >= 1, got 0"),
        ({"high": 9}, 10, "n must be an integer <= 9, got 10"),
        ({"low": 1, "high": 9}, "3", "n must be an integer from 1 to 9, got '3'"),
    ],
)
def test_integer(limits: dict[str, int], value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        _validate.integer("n", value, **limits)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("limits", "value", "sentence"),
    [
        ({}, "1", "x must be a finite number, got '1'"),
        ({}, float("inf"), "x must be a finite number, got inf"),
        ({"low": 0}, -1, "x must be a finite number >= 0, got -1"),
        ({"above": 0}, 0, "x must be a finite number > 0, got 0"),
        ({"low": 0, "below": 1}, 1.0, "x must be a finite number >= 0 and < 1, got 1.0"),
        ({"high": 1}, None, "x must be a finite number <= 1, got None"),
    ],
)
def test_number(limits: dict[str, float], value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        _validate.number("x", value, **limits)
    assert str(error.value) == sentence


def test_the_other_checks() -> None:
    assert _validate.seed(2**32 - 1) == 2**32 - 1
    assert _validate.probability("p", 0.5) == 0.5
    assert _validate.boolean("flip", True) is True
    assert _validate.one_of("mode", "a", ["a", "b"]) == "a"
    with pytest.raises(ValueError, match="seed must be an integer from 0 to 4294967295, got -1"):
        _validate.seed(-1)
    with pytest.raises(ValueError, match="p must be a finite number > 0 and < 1, got 1"):
        _validate.probability("p", 1)
    with pytest.raises(ValueError, match="flip must be True or False, got 1"):
        _validate.boolean("flip", 1)
    with pytest.raises(ValueError, match="mode must be one of a, b, got 'c'"):
        _validate.one_of("mode", "c", ["a", "b"])
