"""The scale b of the noise over time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from neuvar import noise as noise_
from neuvar.optim.wrapper import Wrapper

Rule = Callable[[int], float]
"""From the number of steps that were taken to a factor of the initial b."""


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _as_scales(rule: object, *names: str) -> None:
    """Check factors of a rule, and keep them as plain numbers whatever type they came in."""
    for name in names:
        object.__setattr__(rule, name, noise_.scale(name, getattr(rule, name)))


@dataclass(frozen=True)
class Constant:
    """Stay: 1 at every step."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear:
    r"""Go from one factor to another along a line, then stay.

    .. math:: f(t) = a + (z - a) \min(t / T, 1)

    A warm-up of b goes from 0 to 1, the default.

    Attributes:
        steps: T, after which it stays.
        start: a, the factor at the beginning.
        end: z, the factor at the end.
    """

    steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        _check("steps", self.steps, 1)
        _as_scales(self, "start", "end")

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Cosine:
    r"""Go from one factor to another along half a cosine, then stay.

    .. math:: f(t) = z + \tfrac12 (a - z) \left(1 + \cos(\pi \min(t / T, 1))\right)

    Attributes:
        steps: T, after which it stays.
        start: a, the factor at the beginning.
        end: z, the factor at the end.
    """

    steps: int
    start: float = 1.0
    end: float = 0.0

    def __post_init__(self) -> None:
        _check("steps", self.steps, 1)
        _as_scales(self, "start", "end")

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Step:
    r"""Multiply by a factor now and then: :math:`f(t) = \gamma^{\lfloor t / k \rfloor}`.

    Attributes:
        every: k, steps between two changes.
        factor: γ.
    """

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check("every", self.every, 1)
        _as_scales(self, "factor")

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


RULES: tuple[type, ...] = (Constant, Linear, Cosine, Step)


class BSchedule:
    """Change b as training goes on, as learning-rate schedulers change the learning rate.

    Each group's b is its initial b times the factor of the rule. Call :meth:`step` once for every
    batch, or once for every epoch: the rule counts these calls. The initial b stands in the group
    as ``initial_b``, as torch's schedulers keep ``initial_lr``, and so goes into the optimizer's
    state dict; schedules of the learning rate do not interfere.

    The noise that is on the weights stays until the optimizer's next step; what is drawn then has
    the new scale.

    Args:
        optimizer: one of ours.
        rule: :class:`Constant`, :class:`Linear`, :class:`Cosine`, :class:`Step`, or any function
            from the number of calls so far to a factor. A function of your own is not saved; give
            the same one again when you resume.

    >>> import torch
    >>> from neuvar import NVRMSGD
    >>> optimizer = NVRMSGD(torch.nn.Linear(4, 2).parameters(), lr=0.1, b=0.04)
    >>> schedule = BSchedule(optimizer, Linear(4))
    >>> found = []
    >>> for _ in range(5):
    ...     found.append(optimizer.param_groups[0]["b"])
    ...     schedule.step()
    >>> found
    [0.0, 0.01, 0.02, 0.03, 0.04]
    """

    def __init__(self, optimizer: Wrapper, rule: Rule) -> None:
        if not isinstance(optimizer, Wrapper):
            raise ValueError(f"optimizer must be one of neuvar's, got {type(optimizer).__name__}")
        if any("auto" in group for group in optimizer.param_groups):
            raise ValueError("optimizer must have a number for b, but its b sets itself")
        if not callable(rule):
            raise ValueError(f"rule must be a function of the number of steps, got {rule!r}")
        self.optimizer, self.rule, self.steps = optimizer, rule, 0
        self._set(self._factor(0))

    def step(self) -> None:
        """Go on by one step of the rule."""
        factor = self._factor(self.steps + 1)
        self.steps += 1
        self._set(factor)

    def _factor(self, step: int) -> float:
        return noise_.scale("the factor of a rule", self.rule(step))

    def _set(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["b"] = group.setdefault("initial_b", group["b"]) * factor

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and the rule if it is one of ours: plain numbers and words."""
        known = type(self.rule) in RULES
        rule = {"name": type(self.rule).__name__, **asdict(self.rule)} if known else None  # type: ignore[call-overload]
        return {"steps": self.steps, "rule": rule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; a state of another rule is refused.

        Load the optimizer's state before, as with torch's schedulers.
        """
        if state.keys() != {"steps", "rule"}:
            raise ValueError(
                f"the state dict must have the keys rule and steps, got {sorted(state)}"
            )
        own = self.state_dict()["rule"]
        if state["rule"] != own:
            raise ValueError(f"the state dict is that of the rule {state['rule']}, not of {own}")
        _check("steps", state["steps"], 0)
        factor = self._factor(state["steps"])
        self.steps = state["steps"]
        self._set(factor)
