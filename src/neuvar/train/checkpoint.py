"""Checkpoint files from which an interrupted training resumes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from neuvar._atomic import replacing
from neuvar._validate import boolean
from neuvar.optim.layout import bare
from neuvar.train.passes import Passes

FORMAT = 2
REQUIRED = (
    "model", "optimizer", "scaler", "schedule", "penalty",
    "epoch", "batch", "curves", "sums", "random", "passes", "fingerprint",
)  # fmt: skip


class Checkpoint:
    """A file to which a training is saved from time to time, and from which it resumes.

    The file is replaced atomically, and read with ``weights_only=True``, so nothing in it is ever
    executed.

    It also identifies the training: the options of the optimizer and of :func:`fit`, and hashes of
    the data, their order and the initial weights. The file of another training is refused. You may
    resume with more epochs. Without a fixed seed the initial weights differ each time: set a seed,
    or pass ``strict=False``.

    Args:
        path: the file.
        every: seconds between two saves; 0 saves after each step.
        strict: False also resumes from the file of another training whose tensors have the same
            shapes. Learning rate, b and other options are then those of the file.

    Attributes:
        outer: saved with the training, such as the number of the task in a sequence of trainings.
    """

    def __init__(self, path: str | Path, *, every: float = 60.0, strict: bool = True) -> None:
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds >= 0, got {every!r}")
        self.path = Path(path)
        self.every = every
        self.strict = boolean("strict", strict)
        self.outer: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
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
        """Read the file, once, and set ``outer``; returns whether the file exists."""
        if self._was_read:
            return self._saved is not None
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
        self.outer, self._saved = content["outer"], content["fit"]
        return True

    def take(self) -> dict[str, Any] | None:
        """The saved training, the first time; None later and if there is none."""
        self.read()
        saved, self._saved = self._saved, None
        return saved

    def give_back(self, saved: dict[str, Any]) -> None:
        """Keep a saved training that was refused for the next :meth:`take`."""
        self._saved = saved

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def check_state(training: Any, state: dict[str, Any]) -> None:
    """Refuse a saved state that does not fit a training, before anything is changed."""
    if missing := [name for name in REQUIRED if name not in state]:
        raise ValueError(f"the checkpoint has no {missing[0]!r}: it is not one of a training")
    shapes, saved = _shapes(bare(training.model).state_dict()), _shapes(state["model"])
    if shapes != saved:
        name = next(n for n in (*shapes, *saved) if shapes.get(n) != saved.get(n))
        raise ValueError(f"the checkpoint is of another model: {name!r} differs")
    for name in ("schedule", "penalty", "b_schedule"):
        if (getattr(training, name) is None) != (state.get(name) is None):
            has = "without" if state.get(name) is None else "with"
            raise ValueError(f"the checkpoint is of a training {has} a {name}")
    if training.scaler.is_enabled() != bool(state["scaler"]):
        raise ValueError("the checkpoint is of another precision: only fp16 has a scaler")
    for name, present, known in (
        ("optimizer", optimizer_name(training.optimizer), state.get("kind")),
        ("number of batches", training.count, state.get("batches")),
        ("accumulate", training.accumulate, state.get("accumulate")),
    ):
        if known is not None and known != present:
            raise ValueError(f"the checkpoint has another {name}: {known}, not {present}")
    if isinstance(training.batches, Passes) != (state["passes"] is not None):
        raise ValueError("the checkpoint has another kind of batches")
    if state["epoch"] > training.epochs:
        raise ValueError(f"the checkpoint has {state['epoch']} epochs, more than {training.epochs}")


def optimizer_name(optimizer: Optimizer) -> str:
    """Class names of an optimizer and of the one inside it."""
    inner = getattr(optimizer, "inner", None)
    own = type(optimizer).__name__
    return own if inner is None else f"{own} around {type(inner).__name__}"


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(x.shape) if isinstance(x, Tensor) else None for n, x in state.items()}


def random_state(device: torch.device) -> list[Tensor]:
    """States of torch's global generators."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Set torch's global generators to saved states."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
