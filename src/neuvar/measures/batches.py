"""Data that can be gone through again and again, always the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuvar.measures.checks import whole_number

Feed = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Runs a model on a batch and returns its outputs and the targets."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Under which keys the targets of a batch that is a dict are looked for."""


class Batches:
    """Data in any of the accepted forms, as batches on the model's device.

    Every pass sees the same batches: random numbers that a loader or its dataset draws from a
    global generator, or from the loader's own, come out the same each time, and all generators
    are left as found.
    """

    def __init__(self, data: Any, *, batch_size: int, model: nn.Module) -> None:
        self.batches = _reiterable(data, whole_number("batch_size", batch_size, least=1))
        self.device = next((p.device for p in model.parameters()), None)
        self.is_pair = isinstance(self.batches, _Slices)
        self._generators = Generators(self.device, None if self.is_pair else data)
        self._examples: int | None = None
        self._versions = self.batches.versions() if isinstance(self.batches, _Slices) else None

    @contextmanager
    def one_pass(self) -> Iterator[Iterator[Any]]:
        """Go through the data once."""
        with self._generators.from_the_start():
            yield (b if self.device is None else to_device(b, self.device) for b in self.batches)
        if isinstance(self.batches, _Slices) and self.batches.versions() != self._versions:
            raise ValueError("the model writes to its inputs, so that no two passes see the same")

    def saw(self, examples: int) -> None:
        """Refuse data that is empty, or of which a later pass shows more or less than the first."""
        if self._examples is None:
            self._examples = examples
        if not self._examples:
            raise ValueError("data is empty; a measurement needs at least one example")
        if examples != self._examples:
            raise ValueError(
                f"data must be the same in every pass, but one pass gave {self._examples} examples "
                f"and a later one {examples}"
            )


def _reiterable(data: Any, batch_size: int) -> Iterable[Any]:
    """Whatever data is, as something that can be gone through many times."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(map(torch.is_tensor, data)):
        inputs, targets = data
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise ValueError(
                "inputs and targets must have the same length, "
                f"got shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        return _Slices(inputs, targets, batch_size)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError("data is a Dataset of single examples; put it into a DataLoader")
    if isinstance(data, (Tensor, Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise ValueError(
            "data must be a pair of tensors, a DataLoader or another iterable of batches, "
            f"got {type(data).__name__}"
        )
    if isinstance(data, Iterator):
        raise ValueError(
            f"data is a {type(data).__name__}, which can be gone through only once, but every draw "
            "must see the same data; give a list of batches or a DataLoader"
        )
    return data


class _Slices:
    """A pair of tensors, cut into batches without copying."""

    def __init__(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(
            self.inputs.split(self.batch_size), self.targets.split(self.batch_size), strict=True
        )

    def versions(self) -> tuple[int, ...]:
        """Changes whenever somebody writes to the tensors."""
        pair = (self.inputs, self.targets)
        return tuple(t._version for t in pair if not t.is_inference())


class Generators:
    """The generators that data or a model may draw from: their states now, to be had again.

    Torch's own always; with data, also NumPy's and Python's and those of a loader.
    """

    def __init__(self, device: torch.device | None, data: Any = None) -> None:
        self.accelerator = device if device is not None and device.type != "cpu" else None
        self.of_data = data is not None
        batches = getattr(data, "batch_sampler", None)
        parts = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
        found = [getattr(part, "generator", None) for part in parts]
        self.own = [g for g in found if isinstance(g, torch.Generator)]
        self.found = self._read()

    def _read(self) -> tuple[Any, ...]:
        return (
            torch.get_rng_state(),
            torch.get_device_module(self.accelerator).get_rng_state(self.accelerator)
            if self.accelerator is not None
            else None,
            [generator.get_state() for generator in self.own],
            # What others draw from NumPy's global generator is kept, not used.
            np.random.get_state() if self.of_data else None,  # noqa: NPY002
            random.getstate() if self.of_data else None,
        )

    def restore(self) -> None:
        """Set all generators back to how they were found."""
        self._write(self.found)

    def _write(self, state: tuple[Any, ...]) -> None:
        torch.set_rng_state(state[0])
        if self.accelerator is not None:
            torch.get_device_module(self.accelerator).set_rng_state(state[1], self.accelerator)
        for generator, own in zip(self.own, state[2], strict=True):
            generator.set_state(own)
        if self.of_data:
            np.random.set_state(state[3])  # noqa: NPY002
            random.setstate(state[4])

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Let what is drawn depend on a seed alone, and leave all generators as they were found."""
        try:
            torch.default_generator.manual_seed(seed)
            if self.accelerator is not None:
                torch.get_device_module(self.accelerator).manual_seed(seed)
            for generator in self.own:
                generator.manual_seed(seed)
            if self.of_data:
                np.random.seed(seed % 2**32)  # noqa: NPY002
                random.seed(seed)
            yield
        finally:
            self.restore()

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Draw what would have been drawn first, and leave no trace of it."""
        before = self._read()
        self.restore()
        try:
            yield
        finally:
            self._write(before)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on a device; it is itself if they are there already."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (dict, tuple, list)) and not hasattr(batch, "to"):
        items = batch.values() if isinstance(batch, dict) else batch
        moved = [to_device(item, device) for item in items]
        if all(new is old for new, old in zip(moved, items, strict=True)):
            return batch
        if isinstance(batch, dict):
            return dict(zip(batch, moved, strict=True))
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch.to(device) if hasattr(batch, "to") and device.type != "cpu" else batch


def feed_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Outputs and targets for a batch of one of the usual forms.

    Of a tuple or list the last item is the target and the others go to the model one by one. Of a
    dict the item under one of ``TARGET_KEYS`` is the target and the others are keyword arguments.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return model(*batch[:-1]), batch[-1]
    if isinstance(batch, Mapping):
        keys = [key for key in TARGET_KEYS if key in batch]
        if len(keys) == 1:
            inputs = {key: value for key, value in batch.items() if key != keys[0]}
            return model(**inputs), batch[keys[0]]
        raise ValueError(
            f"a batch that is a dict must have its targets under one of {', '.join(TARGET_KEYS)}, "
            f"got the keys {', '.join(map(str, batch))}; for others give feed(model, batch)"
        )
    raise ValueError(
        "a batch must be a tuple of inputs and targets or a dict, got "
        f"{type(batch).__name__}; for others give feed(model, batch)"
    )


def batch_length(outputs: Any, targets: Any) -> int:
    """How many examples a batch has."""
    for found in (targets, outputs):
        if isinstance(found, Tensor) and found.ndim:
            return len(found)
    raise ValueError(
        "neither the targets nor the outputs are a tensor with one row for each example, so a "
        "batch cannot be weighted; give feed(model, batch) that returns such"
    )
