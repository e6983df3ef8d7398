"""Batches of data: accepted forms, devices, feeding a model, and random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from neuvar._validate import integer

Feed = Callable[[nn.Module, Any], tuple[Any, Any]]
"""Runs a model on a batch and returns its outputs and the targets."""

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys under which a batch that is a dict may hold its targets."""

LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Batch = Tensor | tuple[Tensor, Tensor] | list[Tensor]
Data = Batch | Iterable[Batch]
"""Inputs, or inputs with labels: one batch, or an iterable of batches such as a DataLoader.

Two tensors in a tuple or a list are always inputs and their labels, never two batches.
"""


class DataPasses:
    """Data in any accepted form as batches on the model's device, the same in every pass.

    Loaders and datasets draw the same random numbers in every pass, and all generators keep
    their state.
    """

    def __init__(
        self, data: Any, *, batch_size: int, model: nn.Module, many_times: bool = True
    ) -> None:
        batch_size = integer("batch_size", batch_size, low=1)
        _refuse_arrays(data)
        self.is_pair = _is_pair(data)
        self.batches = data
        if not self.is_pair:
            forms = "a pair of tensors, a DataLoader or another iterable of batches"
            check_iterable("data", data, forms, many_times=many_times)
        elif any(part.ndim == 0 for part in data) or len(data[0]) != len(data[1]):
            raise ValueError(
                "inputs and targets must have the same length, "
                f"got shapes {tuple(data[0].shape)} and {tuple(data[1].shape)}"
            )
        else:  # views, not copies
            self.batches = list(zip(*(part.split(batch_size) for part in data), strict=True))
        self.device = next((p.device for p in model.parameters()), None)
        self._generators = Generators(self.device, None if self.is_pair else data)
        self._examples: int | None = None
        # The version of a tensor changes whenever it is written to.
        self._tensors = [part for part in data if not part.is_inference()] if self.is_pair else []
        self._versions = [part._version for part in self._tensors]

    @contextmanager
    def one_pass(self) -> Iterator[Iterator[Any]]:
        """Iterate over the data once."""
        with self._generators.rewound():
            yield (b if self.device is None else to_device(b, self.device) for b in self.batches)
        if [part._version for part in self._tensors] != self._versions:
            raise ValueError("the model changes its inputs in place, so passes see different data")

    def check_count(self, examples: int) -> None:
        """Refuse empty data, and a number of examples that differs from the first pass."""
        if self._examples is None:
            self._examples = examples
        if not self._examples:
            raise ValueError("data is empty; a measurement needs at least one example")
        if examples != self._examples:
            raise ValueError(
                f"data must be the same in every pass, but one pass gave {self._examples} examples "
                f"and a later one {examples}"
            )


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(map(torch.is_tensor, data))


def _refuse_arrays(data: Any) -> None:
    """Refuse a tensor beside an array or a list of numbers, which would read as two batches."""
    if not isinstance(data, (tuple, list)) or len(data) != 2 or _is_pair(data):
        return
    if any(map(torch.is_tensor, data)):
        (other,) = (part for part in data if not torch.is_tensor(part))
        first = other[0] if isinstance(other, (tuple, list)) and other else other
        if isinstance(first, (int, float)) or hasattr(other, "__array__"):
            names = " and ".join(type(part).__name__ for part in data)
            raise ValueError(
                f"data must be a pair of tensors, got {names}; convert them with torch.as_tensor"
            )


def refuse_two_batches(data: Any) -> None:
    """Refuse a list of two tensors that are probably two batches of inputs."""
    if isinstance(data, list) and _is_pair(data) and min(part.ndim for part in data) > 1:
        raise ValueError(
            "data must not be a list of two batches, which reads as inputs and their targets: pass "
            "one tensor of inputs, or an iterator over the batches; for targets of more than one "
            "dimension pass a tuple (inputs, targets)"
        )


def length(batches: Any) -> int | None:
    """Number of batches, or None if unknown, as for an ``IterableDataset``."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def check_iterable(name: str, data: Any, accepted: str, *, many_times: bool = True) -> None:
    """Refuse data that is not an iterable of batches, or that can be iterated only once."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(f"{name} is a Dataset of single examples; put it into a DataLoader")
    single = isinstance(data, (Tensor, Mapping, str, bytes)) or hasattr(data, "dtype")
    if single or not isinstance(data, Iterable):
        hint = "; put one batch into a list" if isinstance(data, Mapping) else ""
        raise ValueError(f"{name} must be {accepted}, got {type(data).__name__}{hint}")
    if many_times and isinstance(data, Iterator):
        raise ValueError(
            f"{name} is a {type(data).__name__}, which can be iterated only once, but every pass "
            "needs the same data; pass a list of batches or a DataLoader"
        )


def inputs_and_labels(
    data: Data, device: torch.device, *, needs_labels: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of each batch on a device; missing labels become 0 if not needed."""
    refuse_two_batches(data)
    pair = isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], Tensor)
    one_batch = pair or isinstance(data, Tensor)
    if not one_batch:
        forms = "a tensor of inputs, a pair of tensors (inputs, labels) or an iterable of these"
        check_iterable("data", data, forms, many_times=False)
    for batch in [data] if one_batch else data:
        inputs, labels = _split(batch)
        if needs_labels and labels is None:
            raise ValueError("data has inputs only, but labels are needed")
        if labels is None:
            labels = torch.zeros(len(inputs), dtype=torch.int64)
        if needs_labels and len(inputs) and (labels.ndim != 1 or labels.dtype not in LABEL_TYPES):
            raise ValueError(
                "data must have integer labels of shape (n,), got "
                f"{labels.dtype} of shape {tuple(labels.shape)}"
            )
        if len(labels) != len(inputs):
            raise ValueError(f"data has {len(inputs)} inputs but {len(labels)} labels in a batch")
        if len(inputs):
            yield inputs.to(device), labels.to(device, torch.int64)


def _split(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Inputs of a batch, and its labels if it has any."""
    parts: Any = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(batch, Tensor) and not _is_pair(batch):
        raise ValueError(
            "data must have batches that are a tensor of inputs or a pair of tensors (inputs, "
            f"labels), got {describe(batch)}"
        )
    if not all(part.ndim for part in parts):
        raise ValueError("data must have one row per example, got a tensor with 0 dimensions")
    return parts[0], parts[1] if len(parts) == 2 else None


def describe(batch: Any) -> str:
    """The type of a batch, and of its parts, for an error message."""
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        return f"{kind} with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"{kind} of {', '.join(type(part).__name__ for part in batch[:4]) or 'nothing'}"
    return kind


def loader_generators(data: Any) -> list[torch.Generator]:
    """Generators of a DataLoader and its samplers."""
    batches = getattr(data, "batch_sampler", None)
    parts = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = [getattr(part, "generator", None) for part in parts]
    return [g for g in generators if isinstance(g, torch.Generator)]


class Generators:
    """The generators that a model or data may draw from; saves their states when it is created.

    Always torch's global ones; with data, also NumPy's, Python's and those of the loader.
    """

    def __init__(self, device: torch.device | None, data: Any = None) -> None:
        self.accelerator = device if device is not None and device.type != "cpu" else None
        self.has_data = data is not None
        self.of_loader = loader_generators(data)
        self.saved = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The current states, as plain numbers and tensors."""
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        if self.accelerator is not None:
            module = torch.get_device_module(self.accelerator)
            state["accelerator"] = module.get_rng_state(self.accelerator)
        if self.has_data:
            # Datasets may draw from NumPy's global generator; we only save its state.
            _, words, *others = np.random.get_state(legacy=True)  # noqa: NPY002
            state["numpy"] = [torch.from_numpy(np.asarray(words, np.int64)), *others]
            state["python"] = random.getstate()
            state["loader"] = [generator.get_state() for generator in self.of_loader]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to states of :meth:`state_dict`."""
        torch.set_rng_state(state["torch"])
        if self.accelerator is not None and "accelerator" in state:
            module = torch.get_device_module(self.accelerator)
            module.set_rng_state(state["accelerator"], self.accelerator)
        if self.has_data:
            words, *others = state["numpy"]
            np.random.set_state(("MT19937", words.numpy().astype(np.uint32), *others))  # noqa: NPY002
            random.setstate(state["python"])
            for generator, own in zip(self.of_loader, state["loader"], strict=True):
                generator.set_state(own)

    def restore(self) -> None:
        """Set all generators to their saved states."""
        self.load_state_dict(self.saved)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed all generators inside the block, then restore the saved states."""
        try:
            torch.default_generator.manual_seed(seed)
            if self.accelerator is not None:
                torch.get_device_module(self.accelerator).manual_seed(seed)
            for generator in self.of_loader:
                generator.manual_seed(seed)
            if self.has_data:
                np.random.seed(seed % 2**32)  # noqa: NPY002
                random.seed(seed)
            yield
        finally:
            self.restore()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Use the saved states inside the block, then return to the states before it."""
        before = self.state_dict()
        self.restore()
        try:
            yield
        finally:
            self.load_state_dict(before)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device; the same object if they are there already."""
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
    """Outputs and targets of a batch that is a tuple, a list or a dict.

    The last item of a tuple or list is the target; the others are the model's arguments. In a dict
    the item under one of ``TARGET_KEYS`` is the target; the others are keyword arguments.
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
            f"got the keys {', '.join(map(str, batch))}; for others pass feed(model, batch)"
        )
    raise ValueError(
        "a batch must be a tuple of inputs and targets or a dict, got "
        f"{type(batch).__name__}; for others pass feed(model, batch)"
    )


def batch_length(outputs: Any, targets: Any) -> int:
    """Number of examples in a batch."""
    for rows in (targets, outputs):
        if isinstance(rows, Tensor) and rows.ndim:
            return len(rows)
    raise ValueError(
        "neither the targets nor the outputs are a tensor with one row per example, so the number "
        "of examples is unknown; pass a feed(model, batch) that returns such a tensor"
    )
