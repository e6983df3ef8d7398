"""Schedules of the noise scale b."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neuvar import noise as noise_
from neuvar._validate import integer
from neuvar.optim.wrapper import Wrapper

Rule = Callable[[int], float]
"""Maps the number of steps to a factor of the initial b."""


class _Rule:
    """Base of the rules of this module, whose fields are saved in the state dict."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_count = name in ("steps", "every")
            checked = integer(name, value, low=1) if is_count else noise_.scale(name, value)
            object.__setattr__(self, name, checked)


@dataclass(frozen=True)
class Constant(_Rule):
    """Constant factor 1."""

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Linear(_Rule):
    r"""Linear change over T = ``steps`` from a = ``start`` to z = ``end``; a warm-up by default.

    .. math:: f(t) = a + (z - a) \min(t / T, 1)
    """

    steps: int
    start: float = 0.0
    end: float = 1.0

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Cosine(_Rule):
    r"""Change over T = ``steps`` from a = ``start`` to z = ``end`` along half a cosine.

    .. math:: f(t) = z + \tfrac12 (a - z) \left(1 + \cos(\pi \min(t / T, 1))\right)
    """

    steps: int
    start: float = 1.0
    end: float = 0.0

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Step(_Rule):
    r"""Multiply by γ = ``factor`` every k steps: :math:`f(t) = \gamma^{\lfloor t / k \rfloor}`."""

    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


class BSchedule:
    """Schedule b, as torch's schedulers do with the learning rate.

    The b of each group is its initial b, stored as ``initial_b``, times the factor of the rule.
    Call :meth:`step` once per batch or once per epoch; it takes effect at the optimizer's next
    step.

    Args:
        optimizer: a neuvar optimizer.
        rule: :class:`Constant`, :class:`Linear`, :class:`Cosine`, :class:`Step`, or any function
            from the number of calls so far to a factor. Your own function is not saved in the
            state dict; give it again when you resume.

    >>> import torch
    >>> from neuvar import NVRMSGD
    >>> optimizer = NVRMSGD(torch.nn.Linear(4, 2).parameters(), lr=0.1, b=0.04)
    >>> schedule = BSchedule(optimizer, Linear(4))
    >>> values = []
    >>> for _ in range(5):
    ...     values.append(optimizer.param_groups[0]["b"])
    ...     schedule.step()
    >>> values
    [0.0, 0.01, 0.02, 0.03, 0.04]
    """

    def __init__(self, optimizer: Wrapper, rule: Rule) -> None:
        if not isinstance(optimizer, Wrapper):
            raise ValueError(f"optimizer must be one of neuvar's, got {type(optimizer).__name__}")
        if any("auto" in group for group in optimizer.param_groups):
            raise ValueError("optimizer must have a number for b, got b='auto'")
        if not callable(rule):
            raise ValueError(f"rule must be a function of the number of steps, got {rule!r}")
        self.optimizer, self.rule = optimizer, rule
        self._go_to(0)

    def step(self) -> None:
        """Set b for the next step."""
        self._go_to(self.steps + 1)

    def _go_to(self, step: int) -> None:
        factor = noise_.scale("the factor of a rule", self.rule(step))
        self.steps = step
        for group in self.optimizer.param_groups:
            group["b"] = group.setdefault("initial_b", group["b"]) * factor

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the rule if it is one of this module."""
        known = isinstance(self.rule, _Rule)
        rule = {"name": type(self.rule).__name__, **vars(self.rule)} if known else None
        return {"steps": self.steps, "rule": rule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state of the same rule; load the optimizer's state first."""
        if state.keys() != {"steps", "rule"}:
            raise ValueError(
                f"the state dict must have the keys rule and steps, got {sorted(state)}"
            )
        own = self.state_dict()["rule"]
        if state["rule"] != own:
            raise ValueError(f"the state dict has the rule {state['rule']}, not {own}")
        self._go_to(integer("steps", state["steps"], low=0))
