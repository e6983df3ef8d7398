"""Data in blocks whose draws fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

BLOCK = 1 << 22
"""Largest number of probabilities, over all draws, that are held at once."""

BLOCK_BYTES = 1 << 28
"""Largest size of the inputs that are held at once."""


class Block(NamedTuple):
    """Batches to evaluate together, and their position in the data, counted in batches."""

    batches: list[Any]
    begin: float
    end: float


class Blocks:
    """Joins small batches and splits large ones, so that blocks have at most ``room`` rows.

    Attributes:
        room: Largest number of rows; the first block shows how many values a row has.
        splits: Whether batches may be split by rows; None if not known yet.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.room = 1
        self.splits: bool | None = None

    def set_room(self, values: int) -> None:
        """Choose the number of rows for this many values per row, over all draws."""
        self.room = max(1, BLOCK // max(1, values))

    def __iter__(self) -> Iterator[Block]:
        block, rows, size = Block([], 0, 0), 0, 0
        for number, batch in enumerate(self.batches):
            whole = Block([batch], number, number + 1)
            for part in (self.splits and self.split(whole)) or [whole]:
                tensors = list(tensors_in(part.batches))
                more = max((len(t) for t in tensors if t.ndim), default=1)
                bytes_ = sum(t.nbytes for t in tensors)
                if block.batches and (rows + more > self.room or size + bytes_ > BLOCK_BYTES):
                    yield block
                    block, rows, size = Block([], part.begin, part.begin), 0, 0
                if more:  # else the batch is empty
                    block.batches.extend(part.batches)
                block, rows, size = block._replace(end=part.end), rows + more, size + bytes_
                if rows >= self.room:
                    yield block
                    block, rows, size = Block([], part.end, part.end), 0, 0
        if block.batches:
            yield block

    def split(self, block: Block) -> list[Block]:
        """Parts of about equal size of a block with one batch; none if it cannot be split."""
        rows = count_rows(block.batches[0]) if len(block.batches) == 1 else None
        if rows is None or rows <= self.room:
            return []
        leaves, form = tree_flatten(block.batches[0])
        step = math.ceil(rows / math.ceil(rows / self.room))
        parts = []
        for low in range(0, rows, step):
            high = min(low + step, rows)
            batch = tree_unflatten([leaf[low:high] for leaf in leaves], form)
            width = block.end - block.begin
            ends = (block.begin + width * (low / rows), block.begin + width * (high / rows))
            parts.append(Block([batch], *ends))
        return parts


def can_hold(values: int) -> bool:
    """Whether this many values are few enough to be held at once."""
    return values <= BLOCK


def count_rows(batch: Any) -> int | None:
    """Number of rows of a batch whose tensors all have the same number; None for others."""
    leaves = tree_flatten(batch)[0]
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return None
    lengths = {len(leaf) for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors in a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, Mapping)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(item)
