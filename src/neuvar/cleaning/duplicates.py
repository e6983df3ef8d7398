"""Find examples that are equal or nearly equal, and compare their labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import number
from neuvar.cleaning.examples import read_examples
from neuvar.cleaning.posterior import Array

NEIGHBOURS = 10
FEWEST = 4
"""Fewest neighbours needed to find near copies; below it only equal examples are reported."""
ROWS, COLUMNS = 1024, 4096
"""Size of the blocks in which the distance matrix is computed."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Groups of examples that are equal or nearly equal.

    Attributes:
        groups: indices of the examples of each group, sorted.
        labels: class index of each label, int64, shape (n,).
        names: name of each class.
    """

    groups: tuple[Array, ...]
    labels: Array = field(repr=False)
    names: tuple[str, ...]

    @property
    def conflicts(self) -> tuple[Array, ...]:
        """The groups whose labels differ."""
        return tuple(g for g in self.groups if len(np.unique(self.labels[g])) > 1)

    @property
    def conflicting(self) -> Array:
        """Indices of the examples in groups whose labels differ, sorted."""
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *self.conflicts]))

    def __str__(self) -> str:
        if not self.groups:
            return f"No two of {len(self.labels)} examples are duplicates"
        return (
            f"{sum(map(len, self.groups))} of {len(self.labels)} examples are in "
            f"{len(self.groups)} group{'s' * (len(self.groups) != 1)} of duplicates; the labels of "
            f"{len(self.conflicts)} group{'s' * (len(self.conflicts) != 1)} differ"
        )


def find_duplicates(
    data: Any, *, false_alarms: float = 0.01, names: Sequence[str] | None = None
) -> Duplicates:
    r"""Find examples that are equal or nearly equal, such as copies with another compression.

    Let :math:`d_1 \le \dots \le d_k` be the distances of an example to its k = 10 nearest
    neighbours. If examples are spread evenly around it in m dimensions, the fraction of volume
    :math:`(d_1 / d_k)^m` is below v with the probability

    .. math:: P = 1 - (1 - v)^{k - 1}.

    An example is a duplicate if P is below ``false_alarms`` / n. The dimension m of the data is
    estimated from the same distances (Levina and Bickel, 2004), so nothing needs tuning.

    Distances are Euclidean. Inputs are not scaled: bring features to a similar scale, or pass
    embeddings. A shifted or mirrored image is a duplicate only if its embedding is nearly the same.
    More than ten copies of an example are found only if they are equal. All n² distances are
    computed, in blocks to save memory.

    Args:
        data: as for :func:`~neuvar.find_label_issues`.
        false_alarms: expected number of false positives in data without duplicates.
        names: name of each class; by default those of the data.

    >>> x = np.random.default_rng(0).normal(size=(500, 20))
    >>> x[7] = x[3] + 0.01
    >>> labels = np.arange(500) % 2
    >>> labels[7] = 0
    >>> duplicates = find_duplicates((x, labels))
    >>> duplicates.groups, duplicates.conflicting
    ((array([3, 7]),), array([3, 7]))
    """
    false_alarms = number("false_alarms", false_alarms, above=0)
    examples = read_examples(data, names=names)
    rows = examples.inputs.flatten(1)
    seen: dict[bytes, int] = {}
    hashes = (hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in rows)
    # For each example, the index of the first equal example.
    first = np.array([seen.setdefault(key, index) for index, key in enumerate(hashes)])
    kept = np.unique(first)
    leaders = np.arange(len(rows))
    leaders[kept] = kept[_near(rows, kept, false_alarms)]
    return Duplicates(_groups(leaders[first]), examples.labels, examples.names)


def _near(rows: Tensor, kept: Array, false_alarms: float) -> Array:
    """For each kept example, the position of the first one in its group."""
    leader = np.arange(len(kept))
    k = min(NEIGHBOURS, len(kept) - 1)
    if k < FEWEST:
        return leader
    distances, neighbours = nearest(rows, kept, k)
    ratios = distances / distances[:, -1:]
    with np.errstate(divide="ignore"):
        logs = -np.log(ratios)
    dimension = 1 / np.median(logs[:, :-1].mean(1))
    # Solve P = false_alarms / n for the fraction of volume v.
    v = -np.expm1(np.log1p(-min(false_alarms / len(kept), 1.0)) / (k - 1))
    for i, j in zip(*np.nonzero(logs > -np.log(v) / dimension), strict=True):
        one, other = _root(leader, int(i)), _root(leader, int(neighbours[i, j]))
        leader[max(one, other)] = min(one, other)
    return np.array([_root(leader, i) for i in range(len(leader))])


def _root(leader: Array, i: int) -> int:
    """The first example in the group of example i."""
    while leader[i] != i:
        i = int(leader[i])
    return i


def _groups(leaders: Array) -> tuple[Array, ...]:
    order = np.argsort(leaders, kind="stable")
    starts = np.flatnonzero(np.diff(leaders[order])) + 1
    return tuple(group for group in np.split(order, starts) if len(group) > 1)


def nearest(rows: Tensor, kept: Array, k: int) -> tuple[Array, Array]:
    """Distances to the k nearest of the kept rows, ascending, and their positions in ``kept``."""
    n, index = len(kept), torch.from_numpy(kept)
    centre = rows[index[:COLUMNS]].float().mean(0)

    def block(start: int, size: int) -> Tensor:
        # Centring reduces the rounding errors of the product below.
        return rows[index[start : start + size]].float() - centre

    distances, neighbours = np.empty((n, k)), np.empty((n, k), dtype=np.int64)
    for start in range(0, n, ROWS):
        own = block(start, ROWS)
        best, places = torch.full((len(own), 0), torch.inf), torch.zeros(len(own), 0).long()
        for begin in range(0, n, COLUMNS):
            others = block(begin, COLUMNS)
            # Squared distances minus the squared norms of the own rows.
            squared = torch.addmm(others.square().sum(1), own, others.T, alpha=-2.0)
            diagonal = torch.arange(len(own))
            inside = (diagonal + start - begin >= 0) & (diagonal + start - begin < len(others))
            squared[diagonal[inside], diagonal[inside] + start - begin] = torch.inf
            values, columns = squared.topk(min(k, len(others)), largest=False)
            best, places = torch.cat([best, values], 1), torch.cat([places, columns + begin], 1)
            best, order = best.topk(min(k, best.shape[1]), largest=False)
            places = places.gather(1, order)
        part = slice(start, start + len(own))
        own = rows[index[part]].double()
        differences = (own - rows[index[places[:, j]]].double() for j in range(k))
        exact, order = torch.stack([x.norm(dim=1) for x in differences], 1).sort(1)
        distances[part], neighbours[part] = exact.numpy(), places.gather(1, order).numpy()
    return distances, neighbours
