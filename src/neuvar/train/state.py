"""What a training's checkpoint holds beside weights, and whether it is one of this training."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar.optim.layout import bare
from neuvar.train.passes import Passes

PARTS = ("model", "optimizer", "scaler", "schedule", "penalty")
COUNTS = ("epoch", "batch", "curves", "sums", "random", "passes", "fingerprint")


class Training(Protocol):
    """What is compared with a checkpoint."""

    model: nn.Module
    optimizer: Optimizer
    batches: Any
    count: int | None
    accumulate: int
    epochs: int
    scaler: Any
    schedule: Any
    penalty: Any


def refuse_another(own: Training, state: dict[str, Any]) -> None:
    """Refuse what another training saved, before anything is changed."""
    if missing := [name for name in (*PARTS, *COUNTS) if name not in state]:
        raise ValueError(f"the checkpoint has no {missing[0]!r}: it is not one of a training")
    shapes, saved = _shapes(bare(own.model).state_dict()), _shapes(state["model"])
    if shapes != saved:
        name = next(n for n in (*shapes, *saved) if shapes.get(n) != saved.get(n))
        raise ValueError(f"the checkpoint was made with another model: {name!r} is not the same")
    for name, part in (("schedule", own.schedule), ("penalty", own.penalty)):
        if (part is None) != (state[name] is None):
            has = "with" if part is None else "without"
            raise ValueError(f"the checkpoint was made {has} a {name}")
    if own.scaler.is_enabled() != bool(state["scaler"]):
        raise ValueError("the checkpoint was made with another precision: fp16 needs a scaler")
    for name, present, known in (
        ("optimizer", kind_of(own.optimizer), state.get("kind")),
        ("number of batches", own.count, state.get("batches")),
        ("accumulate", own.accumulate, state.get("accumulate")),
    ):
        if known is not None and known != present:
            raise ValueError(f"the checkpoint was made with another {name}: {known}, not {present}")
    if isinstance(own.batches, Passes) != (state["passes"] is not None):
        raise ValueError("the checkpoint was made with another kind of batches")
    if state["epoch"] > own.epochs:
        raise ValueError(f"the checkpoint has {state['epoch']} epochs, more than {own.epochs}")


def kind_of(optimizer: Optimizer) -> str:
    """Names of an optimizer and of the one inside it."""
    inner = getattr(optimizer, "inner", None)
    own = type(optimizer).__name__
    return own if inner is None else f"{own} around {type(inner).__name__}"


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(x.shape) if isinstance(x, Tensor) else None for n, x in state.items()}


def random_state(device: torch.device) -> list[Tensor]:
    """States of torch's own generators, which dropout draws from."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    """Set torch's own generators to saved states."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
