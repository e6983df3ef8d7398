"""What tells one training from another: its options, its data, and the weights it began with."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
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
"""Names of options with plain values; a value that begins with # is a hash of contents."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, not what."""

CHANGING = ("last_epoch", "base_lrs", "T_cur", "T_i", "verbose", "training", "tasks")
"""What schedules, losses and penalties count as they go on, or take from elsewhere."""

_TRAINED: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()
"""Hashes of the weights that a model's training began and ended with, in this process."""


def options(
    optimizer: Optimizer, *, loss: Any, schedule: Any, penalty: Any, **others: Any
) -> Fingerprint:
    """The options of a training, as they are when it begins."""
    groups = optimizer.param_groups
    found: Fingerprint = {}
    for number, group in enumerate(groups):
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        found |= {name + where: value for name, value in _of_group(group).items()}
    for name, thing in (("loss", loss), ("schedule", schedule), ("penalty", penalty)):
        for key, value in _described(thing).items():
            found[f"{key} of the {name}" if key else name] = value
    return found | others


def _of_group(group: dict[str, Any]) -> Fingerprint:
    """Options of a parameter group; schedules and b="auto" change some of them later."""
    hidden = ("params", "lr", "b", "drawn", "auto", "initial_lr", "initial_b", *IMPLEMENTATION)
    found = {key: value for key, value in group.items() if key not in hidden}
    found |= {"number of parameters": len(group["params"])}
    for key in ("lr", "b"):
        if key in group:
            found[key] = group.get(f"initial_{key}", group[key])
    if "auto" in group:
        found["b"] = "auto"
    if "drawn" in group:
        draw = Draw(*group["drawn"])
        found |= {"seed of the noise": draw.seed, "sampler": draw.sampler}
    return {key: _plain(value) for key, value in found.items() if _is_plain(value)}


def _described(thing: Any) -> Fingerprint:
    """The name of a function or of a kind of object, under "", and the plain options it has."""
    if thing is None:
        return {"": None}
    if isinstance(thing, functools.partial):
        tensors = {key: v for key, v in thing.keywords.items() if isinstance(v, Tensor)}
        hashes = {key: digest([v]) for key, v in tensors.items()}
        return _described(thing.func) | _plain_options(thing.keywords) | hashes
    found = {"": getattr(thing, "__name__", type(thing).__name__)}
    found |= _plain_options(getattr(thing, "__dict__", {}))
    if isinstance(thing, nn.Module):
        found["buffers"] = digest(thing.buffers())
    if isinstance(thing, (SequentialLR, ChainedScheduler)):
        found["milestones"] = list(getattr(thing, "_milestones", []))
        for number, part in enumerate(thing._schedulers):
            found |= {f"{key or 'kind'} of part {number}": v for key, v in _described(part).items()}
    return found


def _plain_options(options: Mapping[str, Any]) -> Fingerprint:
    """Options of an object; a tensor is what it counts, such as the latest value of a penalty."""
    shown = {key: v for key, v in options.items() if key[:1] != "_" and key not in CHANGING}
    return {
        key: _plain(value)
        for key, value in shown.items()
        if _is_plain(value) and not isinstance(value, Tensor)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """A value as a checkpoint gives it back."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else value  # NumPy's cannot be saved


def of_data(batches: Any, device: torch.device) -> Fingerprint:
    """What tells batches from others; nothing is drawn from any generator."""
    if isinstance(batches, Passes):
        return _of_passes(batches.batches)
    if callable(own := getattr(batches, "fingerprint", None)):
        return dict(own())
    # Batch k of epoch e is always the same, so one batch stands for the order and the data.
    with Generators(device, batches).rewound():
        batch = next(iter(batches.epoch(0)))
    return {"first batch": digest(part for part in batch if isinstance(part, Tensor))}


def _of_passes(batches: Any) -> Fingerprint:
    found: Fingerprint = {"kind of batches": type(batches).__name__}
    if isinstance(batches, (tuple, list)):
        parts = [part for batch in batches for part in batch if isinstance(part, Tensor)]
        return found | {"data": digest(parts)}
    if not isinstance(batches, DataLoader):
        return found
    sampler: Any = batches if batches.batch_sampler is None else batches.batch_sampler
    seeds = [generator.initial_seed() for generator in loader_generators(batches)]
    return found | {
        "batch_size": getattr(sampler, "batch_size", None),
        "drop_last": getattr(sampler, "drop_last", None),
        "sampler of the batches": type(batches.sampler).__name__,
        "seeds of the batches": seeds,
        "data": digest(_contents(batches.dataset)),
    }


def _contents(dataset: Any) -> Iterator[Tensor | NDArray[Any]]:
    """Tensors, arrays and lists of whole numbers that a dataset keeps, such as its labels."""
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
                if isinstance(part, Tensor) or _is_numeric(part):
                    yield part


def _is_numeric(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind in "biufc"


def start_of(model: nn.Module) -> str:
    """Hash of the weights that a model's training began with.

    Usually those that it has. But where :func:`fit` has trained it in this process, and its weights
    are those which that left, the training goes on from there: after Ctrl-C in a notebook, or with
    the next of several tasks.
    """
    now = _weights(model)
    began, ended = _TRAINED.get(bare(model), (now, now))
    return began if ended == now else now


def note_end(model: nn.Module, began: str) -> None:
    """Note that a training which began with these weights has left the model as it is."""
    _TRAINED[bare(model)] = began, _weights(model)


def _weights(model: nn.Module) -> str:
    made = filterfalse(is_lazy, bare(model).parameters())
    return digest(local(clean_copy(p)) for p in made)


def refuse_difference(saved: Fingerprint, own: Fingerprint) -> None:
    """Refuse the checkpoint of another training, and say what is not the same."""
    wrong = []
    for name in own | saved:
        known, present = saved.get(name), own.get(name)
        if known != present:
            hashed = any(isinstance(v, str) and v.startswith("#") for v in (known, present))
            wrong.append(f"other {name}" if hashed else f"{name} {known!r}, not {present!r}")
    if wrong:
        raise ValueError(
            f"the checkpoint was made by another training: {'; '.join(wrong)}. Remove the file or "
            "give another path; Checkpoint(path, strict=False) resumes from it all the same"
        )
