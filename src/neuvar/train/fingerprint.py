"""What identifies a training: its options, its data and its initial weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import filterfalse
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR
from torch.utils.data import ConcatDataset, DataLoader, Subset

from neuvar._batches import Generators, loader_generators
from neuvar.data.batches import HASHED_ROWS, digest
from neuvar.noise import Draw
from neuvar.optim.layout import bare, local
from neuvar.optim.noisy_parameters import clean_copy
from neuvar.train.passes import Passes

Fingerprint = dict[str, Any]
"""Names with plain values; a value that begins with # is a hash."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that do not change its results."""

CHANGING = ("last_epoch", "base_lrs", "T_cur", "T_i", "verbose", "training", "tasks")
"""Attributes of schedules, losses and penalties that change during training."""

_TRAINED: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""Hashes of a model's weights before and after its training in this process."""


def options_fingerprint(optimizer: Optimizer, parts: Mapping[str, Any]) -> Fingerprint:
    """Options of an optimizer and of other parts of a training, as they are when it begins."""
    groups = optimizer.param_groups
    options: Fingerprint = {}
    for number, group in enumerate(groups):
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        options |= {name + where: value for name, value in _group_options(group).items()}
    for name, part in parts.items():
        for key, value in _describe(part).items():
            options[f"{key} of the {name}" if key else name] = value
    return options


def _group_options(group: dict[str, Any]) -> Fingerprint:
    """Options of a parameter group; for lr and b the initial ones."""
    hidden = ("params", "lr", "b", "drawn", "auto", "initial_lr", "initial_b", *IMPLEMENTATION)
    options = {key: value for key, value in group.items() if key not in hidden}
    options |= {"number of parameters": len(group["params"])}
    for key in ("lr", "b"):
        if key in group:
            options[key] = group.get(f"initial_{key}", group[key])
    if "auto" in group:
        options["b"] = "auto"
    if "drawn" in group:
        draw = Draw(*group["drawn"])
        options |= {"seed of the noise": draw.seed, "sampler": draw.sampler}
    return _plain_values(options)


def _describe(thing: Any) -> Fingerprint:
    """The name of a function or class, under "", and its plain options."""
    if thing is None:
        return {"": None}
    if isinstance(thing, functools.partial):
        tensors = {key: v for key, v in thing.keywords.items() if isinstance(v, Tensor)}
        hashes = {key: digest([v]) for key, v in tensors.items()}
        return _describe(thing.func) | _plain_attributes(thing.keywords) | hashes
    options = {"": getattr(thing, "__name__", type(thing).__name__)}
    options |= _plain_attributes(getattr(thing, "__dict__", {}))
    if isinstance(thing, nn.Module):
        options["buffers"] = digest(thing.buffers())
    if isinstance(thing, (SequentialLR, ChainedScheduler)):
        options["milestones"] = list(getattr(thing, "_milestones", []))
        for number, part in enumerate(thing._schedulers):
            described = _describe(part).items()
            options |= {f"{key or 'kind'} of part {number}": value for key, value in described}
    return options


def _plain_attributes(attributes: Mapping[str, Any]) -> Fingerprint:
    """Plain attributes of an object. Tensors, such as a penalty's latest value, may change."""
    return _plain_values(
        {
            key: value
            for key, value in attributes.items()
            if key[:1] != "_" and key not in CHANGING and not isinstance(value, Tensor)
        }
    )


def _plain_values(options: Mapping[str, Any]) -> Fingerprint:
    """The options that are plain values."""
    plain = {}
    for key, value in options.items():
        with suppress(TypeError):
            plain[key] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    """A value that a checkpoint can save and load; raises a TypeError if there is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value)  # NumPy's float64 is a float, but cannot be saved
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError


def data_fingerprint(batches: Any, device: torch.device) -> Fingerprint:
    """What identifies the batches; the states of all generators are kept."""
    if isinstance(batches, Passes):
        return _loader_fingerprint(batches.batches)
    if callable(own := getattr(batches, "fingerprint", None)):
        return dict(own())
    # Batch k of epoch e is always the same, so one batch identifies order and data.
    with Generators(device, batches).rewound():
        batch = next(iter(batches.epoch(0)))
    return {"first batch": digest(part for part in batch if isinstance(part, Tensor))}


def _loader_fingerprint(batches: Any) -> Fingerprint:
    kind: Fingerprint = {"kind of batches": type(batches).__name__}
    if isinstance(batches, (tuple, list)):
        parts = [part for batch in batches for part in batch if isinstance(part, Tensor)]
        return kind | {"data": digest(parts)}
    if not isinstance(batches, DataLoader):
        return kind
    sampler: Any = batches if batches.batch_sampler is None else batches.batch_sampler
    return kind | {
        "batch_size": getattr(sampler, "batch_size", None),
        "drop_last": getattr(sampler, "drop_last", None),
        "sampler of the batches": type(batches.sampler).__name__,
        "seeds of the batches": [g.initial_seed() for g in loader_generators(batches)],
        "data": digest(_contents(batches.dataset)),
    }


def _contents(dataset: Any) -> Iterator[Tensor | NDArray[Any]]:
    """Tensors, arrays and lists of integers that are attributes of a dataset."""
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices)
        yield from _contents(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _contents(part)
    else:
        for value in getattr(dataset, "__dict__", {}).values():
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                yield np.asarray(value)
                continue
            several = isinstance(value, (tuple, list))
            for part in value[:: max(1, len(value) // HASHED_ROWS)] if several else [value]:
                numeric = isinstance(part, np.ndarray) and part.dtype.kind in "biufc"
                if isinstance(part, Tensor) or numeric:
                    yield part


def initial_weights(model: nn.Module) -> str:
    """Hash of the weights with which the training of a model began.

    These are the present weights, unless :func:`fit` trained the model in this process and nothing
    changed it since: then the earlier training continues, for example after Ctrl-C in a notebook,
    or with the next of several tasks.
    """
    now = _weights(model)
    before, after = _TRAINED.get(bare(model), (now, now))
    return before if after == now else now


def record_trained(model: nn.Module, before: str) -> None:
    """Record that training from these initial weights led to the present ones."""
    _TRAINED[bare(model)] = before, _weights(model)


def _weights(model: nn.Module) -> str:
    made = filterfalse(is_lazy, bare(model).parameters())
    return digest(local(clean_copy(p)) for p in made)


def check_same(saved: Fingerprint, own: Fingerprint) -> None:
    """Refuse the checkpoint of another training, and name the differences."""
    wrong = []
    for name in own | saved:
        known, present = saved.get(name), own.get(name)
        if known != present:
            hashed = any(isinstance(v, str) and v.startswith("#") for v in (known, present))
            wrong.append(f"other {name}" if hashed else f"{name} {known!r}, not {present!r}")
    if wrong:
        raise ValueError(
            f"the checkpoint is of another training: {'; '.join(wrong)}. Remove the file or use "
            "another path; Checkpoint(path, strict=False) resumes from it anyway"
        )
