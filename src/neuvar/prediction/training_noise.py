"""The noise to predict with: as given, or as the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from neuvar import _validate
from neuvar.noise import RELATIVE_TO, Slot, family, scale
from neuvar.optim.nvrm import optimizer_of
from neuvar.optim.wrapper import Wrapper


class Kind(NamedTuple):
    """Scale and family of the noise of a parameter, and what b is relative to."""

    b: float
    noise: str
    relative_to: str | None = None


def noise_terms(
    model: nn.Module,
    slots: Mapping[Tensor, Slot],
    b: float | None,
    noise: str | None,
    relative_to: str | None,
    optimizer: Wrapper | Mapping[str, Any] | None,
) -> dict[Tensor, Kind]:
    """The noise of each parameter that has some: as given, or as the optimizer's."""
    if noise is not None:
        family(noise)
    _validate.one_of("relative_to", relative_to, (None, *RELATIVE_TO))
    if b is not None:
        if optimizer is not None:
            raise ValueError("give either b or optimizer, not both")
        kind = Kind(scale("b", b), noise or "gaussian", relative_to)
        return dict.fromkeys(slots, kind) if kind.b else {}
    if relative_to is not None:
        raise ValueError("relative_to needs b; without it the optimizer says what b is relative to")
    if optimizer is None:
        try:
            optimizer = optimizer_of(model)
        except ValueError:
            raise ValueError(
                "no neuvar optimizer with parameters of this model is alive, so the noise that it "
                "was trained with is unknown; give b, or the optimizer's state dict as optimizer"
            ) from None
    if isinstance(optimizer, Wrapper):
        groups = [(group, group["params"]) for group in optimizer.param_groups]
    else:
        groups = _saved_groups(optimizer, list(model.parameters()))
    terms = {
        p: Kind(scale("b", group["b"]), noise or group["noise"], group.get("relative_to") or None)
        for group, params in groups
        for p in params
        if p in slots and p.requires_grad and group["b"]
    }
    if not terms:
        raise ValueError("the optimizer has no noise now for parameters of this model; give b")
    return terms


def _saved_groups(state: Any, params: list[Tensor]) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Parameter groups of a state dict with their parameters."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or any("drawn" not in group for group in groups):
        raise ValueError("optimizer must be a neuvar optimizer or the state dict of one")
    kinds = {(group["b"], group["noise"], group.get("relative_to")) for group in groups}
    if len(kinds) > 1:
        raise ValueError(
            "the state dict has parameter groups with different noise, and does not say which "
            "parameters they have; load it into an optimizer of the model, and give that"
        )
    if sum(len(group["params"]) for group in groups) > len(params):
        raise ValueError("the state dict is of another model, with more parameters")
    return [(groups[0], params)]


def check_draws(draws: int, antithetic: bool) -> int:
    """Validate the number of draws: even if each comes with both signs."""
    least = 2 if _validate.boolean("antithetic", antithetic) else 1
    if _validate.integer("draws", draws, low=least) % least:
        raise ValueError(f"draws must be even, since they come in pairs, got {draws}")
    return draws
