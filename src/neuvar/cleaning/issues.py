"""What is known about the labels of a data set: which are wrong, how many, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class NoiseRate:
    """The share of wrong labels, as it was estimated.

    Attributes:
        value: the estimate.
        low: lower end of its interval.
        high: upper end of its interval.
        confidence: the probability that the interval is meant to have. It is that of sampling
            examples; how often the network itself is mistaken is not in it.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, eq=False)
class Transition:
    """How true classes turn into given labels, as it was estimated.

    Attributes:
        matrix: probability of each given label (column) for each true class (row), float64; a
            class that no example belongs to has a row of nan.
        low: lower ends of the intervals of its elements.
        high: upper ends.
        confidence: the probability that each interval is meant to have.
    """

    matrix: Array
    low: Array
    high: Array
    confidence: float = 0.95


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """What a network says about the labels of a data set.

    Attributes:
        labels: the label of each example as a class number from 0, as in cleanlab, int64, shape
            (n,).
        probabilities: of each class for each example, float32 or float64, shape (n, classes).
        quality: between 0 and 1 for each example, as in cleanlab: the lower, the more likely the
            label is wrong.
        suggested: the number of the most probable class of each example, int64; its label if none
            is more probable.
        flagged: whether the label is taken to be wrong, bool.
        noise_rate: the share of wrong labels, with its uncertainty.
        transition: how true classes turn into given labels, with its uncertainty.
        names: the name of each class.
        values: the label of each class as it was given: a number, text or another object.
        files: for images from a folder, the path of each below it; otherwise empty.
        b: scale of the noise at the end of the training; None if nothing was trained.
    """

    labels: Array
    probabilities: Array = field(repr=False)
    quality: Array
    suggested: Array
    flagged: Array
    noise_rate: NoiseRate
    transition: Transition = field(repr=False)
    names: tuple[str, ...]
    values: Array
    files: tuple[str, ...] = field(default=(), repr=False)
    b: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ranked(self) -> Array:
        """Numbers of all examples, the most suspicious first; equal ones in their order."""
        return np.argsort(self.quality, kind="stable")

    @property
    def worst(self) -> Array:
        """Numbers of the flagged examples, the most suspicious first."""
        ranked = self.ranked
        return ranked[self.flagged[ranked]]

    @property
    def cleaned(self) -> Array:
        """The labels as they were given, with flagged ones replaced by what is suggested."""
        found: Array = self.values[np.where(self.flagged, self.suggested, self.labels)]
        return found

    @property
    def pairs(self) -> Array:
        """How many flagged examples have each given label (row) and suggested one (column)."""
        found = np.zeros((len(self.names), len(self.names)), dtype=np.int64)
        np.add.at(found, (self.labels[self.flagged], self.suggested[self.flagged]), 1)
        return found

    def __str__(self) -> str:
        return (
            f"{int(self.flagged.sum())} of {len(self)} labels are flagged; about "
            f"{self.noise_rate} of all labels are wrong"
        )
