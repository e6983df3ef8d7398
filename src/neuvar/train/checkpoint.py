"""Checkpoint files, and fingerprints that tell whether a checkpoint belongs to a training."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR
from torch.utils.data import ConcatDataset, DataLoader, Subset

from neuvar._atomic import replacing
from neuvar._batches import Generators, loader_generators
from neuvar._validate import boolean
from neuvar.data.batches import HASHED_ROWS, digest
from neuvar.noise import Draw
from neuvar.optim.layout import bare, local
from neuvar.optim.noisy_parameters import clean_copy

FORMAT = 3

Fingerprint = dict[str, Any]
"""What identifies a training: plain values by name. A value that begins with # is a hash."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that do not change its results."""

CHANGING = ("last_epoch", "base_lrs", "T_cur", "T_i", "verbose", "training", "tasks")
"""Attributes of schedules, losses and penalties that change during training."""


class Checkpoint:
    """A file that a training is saved to from time to time and at its end, and resumes from.

    The file is replaced atomically. It is read with ``weights_only=True``, so nothing in it is
    executed. After the training it holds the clean weights:
    ``model.load_state_dict(torch.load(path)["fit"]["model"])``.

    The file of another training is refused: one with other options of the optimizer or of
    :func:`fit`, other data, another order or other initial weights. You may resume with more
    epochs. Without a fixed seed the initial weights differ each time: set a seed, or pass
    ``strict=False``.

    Args:
        path: the file.
        every: seconds between two saves; 0 saves after each step, ``math.inf`` only at the end.
        strict: False also resumes from the file of another training whose tensors have the same
            shapes. Learning rate, b and other options are then those of the file.

    Attributes:
        outer: saved with the training, such as the number of the task in a sequence of trainings.
        saved: the state that :meth:`read` has read, until a training has resumed from it.
    """

    def __init__(self, path: str | Path, *, every: float = 60.0, strict: bool = True) -> None:
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds >= 0, got {every!r}")
        self.path = Path(path)
        self.every = every
        self.strict = boolean("strict", strict)
        self.outer: dict[str, Any] = {}
        self.saved: dict[str, Any] | None = None
        self._was_read = False
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._last >= self.every

    def write(self, fit: dict[str, Any]) -> None:
        """Replace the file. If this fails, the old file stays."""
        with replacing(self.path) as file:
            torch.save({"format": FORMAT, "outer": self.outer, "fit": fit}, file)
        self._last = time.monotonic()

    def read(self) -> bool:
        """Read the file, once; returns whether there is a state to resume from."""
        if self._was_read:
            return self.saved is not None
        self._was_read = True
        if not self.path.exists():
            return False
        try:
            content = torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise ValueError(
                f"{self.path} is not a readable checkpoint; remove it to start again"
            ) from error
        known = isinstance(content, dict) and content.get("format") == FORMAT
        if not known or not all(isinstance(content.get(n), dict) for n in ("outer", "fit")):
            raise ValueError(f"{self.path} is not a checkpoint of this version of neuvar's fit()")
        self.outer, self.saved = content["outer"], content["fit"]
        return True


def check_state(saved: dict[str, Any], own: dict[str, Any], *, epochs: int, strict: bool) -> None:
    """Refuse the saved state of another training; ``own`` is the state of this one."""
    if missing := [name for name in ("model", "optimizer", *own) if name not in saved]:
        raise ValueError(f"the checkpoint has no {missing[0]!r}: it is not one of a training")
    shapes, saved_shapes = (
        {name: getattr(x, "shape", None) for name, x in state["model"].items()}
        for state in (own, saved)
    )
    for name in shapes | saved_shapes:
        if shapes.get(name, "absent") != saved_shapes.get(name, "absent"):
            raise ValueError(f"the checkpoint is of another model: {name!r} differs")
    for name in ("schedule", "penalty", "b_schedule"):
        if (own[name] is None) != (saved[name] is None):
            with_or_without, this = ("without", "one") if saved[name] is None else ("with", "none")
            raise ValueError(
                f"the checkpoint was saved {with_or_without} a {name}; this run has {this}"
            )
    if bool(own["scaler"]) != bool(saved["scaler"]):
        raise ValueError("the checkpoint is of another precision: only fp16 has a scaler")
    for name, known in saved["kind"].items():
        if known is not None and known != own["kind"][name]:
            present = own["kind"][name]
            raise ValueError(f"the checkpoint has another {name}: {known}, not {present}")
    if saved["epoch"] > epochs:
        raise ValueError(
            f"the checkpoint has {saved['epoch']} epochs, more than {epochs}. "
            "Remove the file or use another path"
        )
    if strict:
        _check_same(saved["fingerprint"], own["fingerprint"])


def _check_same(saved: Fingerprint, own: Fingerprint) -> None:
    """Refuse a different fingerprint, and name all differences."""
    differences = []
    for name in own | saved:
        known, present = saved.get(name), own.get(name)
        if known != present:
            hashed = any(isinstance(v, str) and v.startswith("#") for v in (known, present))
            differences.append(f"other {name}" if hashed else f"{name} {known!r}, not {present!r}")
    if differences:
        raise ValueError(
            f"the checkpoint is of another training: {'; '.join(differences)}. Remove the file or "
            "use another path; Checkpoint(path, strict=False) resumes from it anyway"
        )


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of the clean weights of a model."""
    initialized = filterfalse(is_lazy, bare(model).parameters())
    return digest(local(clean_copy(p)) for p in initialized)


def options_fingerprint(optimizer: Optimizer, parts: Mapping[str, Any]) -> Fingerprint:
    """Options of an optimizer and of other parts of a training, at its beginning."""
    options: Fingerprint = {}
    excluded = ("params", "lr", "b", "drawn", "auto", "initial_lr", "initial_b", *IMPLEMENTATION)
    for number, group in enumerate(optimizer.param_groups):
        own = {key: value for key, value in group.items() if key not in excluded}
        own["number of parameters"] = len(group["params"])
        for key in ("lr", "b"):
            if key in group:
                own[key] = group.get(f"initial_{key}", group[key])
        if "auto" in group:
            own["b"] = "auto"
        if "drawn" in group:
            draw = Draw(*group["drawn"])
            own |= {"seed of the noise": draw.seed, "sampler": draw.sampler}
        where = f" of parameter group {number}" if len(optimizer.param_groups) > 1 else ""
        options |= {name + where: value for name, value in _plain(own).items()}
    for name, part in parts.items():
        for key, value in _describe(part).items():
            options[f"{key} of the {name}" if key else name] = value
    return options


def _describe(thing: Any) -> Fingerprint:
    """The plain options of a function or an object; under "" the name of it or of its class."""
    if thing is None:
        return {"": None}
    is_partial = isinstance(thing, functools.partial)
    attributes = thing.keywords if is_partial else getattr(thing, "__dict__", {})
    options = {
        key: value
        for key, value in attributes.items()
        # Tensors, such as a penalty's latest value, may change.
        if key[:1] != "_" and key not in CHANGING and not isinstance(value, Tensor)
    }
    if is_partial:
        hashes = {key: digest([v]) for key, v in attributes.items() if isinstance(v, Tensor)}
        return _describe(thing.func) | _plain(options) | hashes
    description = {"": getattr(thing, "__name__", type(thing).__name__)} | _plain(options)
    if isinstance(thing, nn.Module):
        description["buffers"] = digest(thing.buffers())
    if isinstance(thing, (SequentialLR, ChainedScheduler)):
        description["milestones"] = list(getattr(thing, "_milestones", []))
        for number, part in enumerate(thing._schedulers):
            for key, value in _describe(part).items():
                description[f"{key or 'kind'} of part {number}"] = value
    return description


def _plain(options: Mapping[str, Any]) -> Fingerprint:
    """The options that JSON can hold, as JSON returns them; scalar tensors become numbers."""
    plain = {}
    for key, value in options.items():
        with suppress(TypeError, ValueError, RuntimeError, AttributeError):
            plain[key] = json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    return plain


def data_fingerprint(batches: Any, device: torch.device) -> Fingerprint:
    """What identifies the batches. Afterwards all generators are in the same state as before."""
    if callable(own := getattr(batches, "fingerprint", None)):
        return dict(own())
    if callable(epoch := getattr(batches, "epoch", None)):
        # Epoch 0 always begins with the same batch, which identifies order and data.
        with Generators(device, batches).rewound():
            batch = next(iter(epoch(0)))
        return {"first batch": digest(part for part in batch if isinstance(part, Tensor))}
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
