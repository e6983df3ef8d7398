"""Batches of a training, the same on every machine: logits of examples, some labels wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

EXAMPLES, CLASSES, EPOCHS, BATCH = 60, 3, 4, 15

Batch = tuple[Tensor, Tensor, Tensor]


def labels() -> Tensor:
    """Labels of which each tenth is wrong."""
    true = torch.arange(EXAMPLES) % CLASSES
    return torch.where(torch.arange(EXAMPLES) % 10 == 0, (true + 1) % CLASSES, true)


def batches(epochs: int = EPOCHS) -> Iterator[Batch]:
    """Indices, logits and labels of all batches; logits favour the true class more and more."""
    generator, true = torch.Generator().manual_seed(0), torch.arange(EXAMPLES) % CLASSES
    for epoch in range(epochs):
        for indices in torch.randperm(EXAMPLES, generator=generator).split(BATCH):
            logits = torch.randn(len(indices), CLASSES, generator=generator)
            logits[torch.arange(len(indices)), true[indices]] += 1 + epoch
            yield indices, logits, labels()[indices]


def mean_probabilities(seen: Iterator[Batch]) -> Tensor:
    """The mean over what was seen of each example, by hand, in double precision."""
    rows: dict[int, list[Tensor]] = {}
    for indices, logits, _ in seen:
        for i, z in zip(indices.tolist(), logits.double(), strict=True):
            rows.setdefault(i, []).append(z.exp() / z.exp().sum())
    return torch.stack([torch.stack(rows[i]).mean(0) for i in sorted(rows)])
