"""What comes before a training of any model on any data: a copy, its layers, tensors, batches."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from neuvar import data as data_
from neuvar._batches import Batches
from neuvar._eval_mode import eval_mode
from neuvar._validate import integer
from neuvar.optim.noisy_parameters import held_clean


def clean_copy(model: nn.Module) -> nn.Module:
    """A copy at clean weights, whichever optimizer has noise on them."""
    with held_clean(model.parameters()):
        return copy.deepcopy(model)


def check_trainable(model: nn.Module) -> None:
    """Refuse a model of which nothing would be trained."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model has nothing to train: it has no parameter with requires_grad=True")


def make_layers(model: nn.Module, run: Callable[[], Any]) -> None:
    """Let layers that are made by their first input see one, by a run of the model."""
    if any(map(is_lazy, model.parameters())):
        with torch.no_grad(), eval_mode(model):
            run()


def no_single(count: int, size: int) -> int:
    """A batch size that leaves no last batch of one example, which batch normalisation refuses."""
    size = integer("batch_size", size, low=1)
    while 1 < size < count and count % size == 1:
        size += 1
    return size


def ready_batches(data: Any, model: nn.Module, batch_size: int, seed: int) -> Batches:
    """Data as batches: a pair or a split in random order, anything else in its own."""
    if isinstance(data, data_.Split):
        data = data_.Batches(data, no_single(len(data.images), batch_size), seed=seed)
    elif pair := as_pair(data, model):
        data = pair
        if all(part.ndim for part in pair) and len(pair[0]) == len(pair[1]):
            order = torch.randperm(len(pair[0]), generator=torch.Generator().manual_seed(seed))
            data = tuple(part[order.to(part.device)] for part in pair)
            batch_size = no_single(len(order), batch_size)
    return Batches(data, batch_size=batch_size, model=model)


def as_pair(data: Any, model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Inputs and targets as tensors that a model and its loss take, if data is a pair of them.

    Floats get the type of the model's weights, and whole numbers of targets become int64. Tensors,
    arrays and lists of nothing but numbers make a pair; a list of two batches does not.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not all(map(_is_numeric, data)):
        return None
    inputs, targets = map(_tensor, data)
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool):
        targets = targets.long()
    elif targets.is_floating_point():
        targets = targets.to(kind)
    return inputs.to(kind) if inputs.is_floating_point() else inputs, targets


def _is_numeric(part: Any) -> bool:
    if not isinstance(part, (tuple, list)):
        return isinstance(part, (Tensor, np.ndarray))
    return all(
        isinstance(item, numbers.Number) or (isinstance(item, (tuple, list)) and _is_numeric(item))
        for item in part
    )


def _tensor(part: Any) -> Tensor:
    if isinstance(part, Tensor):
        return part
    array = np.asarray(part)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"data must be numbers, got an array of {array.dtype}")
    # A copy in the machine's byte order: torch takes no other, and warns where it may not write.
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def first_examples(batches: Iterator[Any], examples: int) -> list[Any]:
    """The first batches, which have about so many examples."""
    found: list[Any] = []
    left = examples
    for batch in batches:
        count = examples_in(batch)
        found.append(_cut(batch, count, left))
        left -= count
        if left <= 0:
            break
    return found


def parts_of(batch: Any) -> list[Any]:
    """What a batch is made of."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return list(parts) if isinstance(batch, (Mapping, tuple, list)) else []


def examples_in(batch: Any) -> int:
    """How many examples a batch has: the length of most of its tensors."""
    lengths = [len(part) for part in parts_of(batch) if isinstance(part, Tensor) and part.ndim]
    return max(set(lengths), key=lengths.count) if lengths else 1


def _cut(batch: Any, count: int, left: int) -> Any:
    """The first examples of a batch of so many."""
    cut = [
        part[:left] if isinstance(part, Tensor) and part.ndim and len(part) == count else part
        for part in parts_of(batch)
    ]
    if isinstance(batch, Mapping):
        return dict(zip(batch, cut, strict=True))
    return tuple(cut) if cut else batch
