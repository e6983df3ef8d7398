"""The noise to predict with: that of the arguments, or that of the training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor, nn

from neuvar import _validate
from neuvar.noise import RELATIVE_TO, Slot, family, scale
from neuvar.optim.nvrm import optimizers_of
from neuvar.optim.wrapper import Wrapper
from neuvar.prediction.noisy_classifier import NoiseSpec

TrainedWith = Wrapper | Mapping[str, Any] | None
"""A neuvar optimizer or its state dict."""

Groups = list[tuple[Mapping[str, Any], list[Tensor]]]
"""Options of parameter groups, and their parameters."""


class NoiseOptions(TypedDict, total=False):
    """Which noise to predict with; see :func:`predict`."""

    b: float | None
    noise: str | None
    optimizer: TrainedWith
    relative_to: str | None


def noise_terms(
    model: nn.Module,
    slots: Mapping[Tensor, Slot],
    b: float | None = None,
    noise: str | None = None,
    optimizer: TrainedWith = None,
    relative_to: str | None = None,
) -> dict[Tensor, NoiseSpec]:
    """The noise of each parameter that has some: as in the arguments, or the optimizer's."""
    if noise is not None:
        family(noise)
    _validate.one_of("relative_to", relative_to, (None, *RELATIVE_TO))
    if b is not None:
        if optimizer is not None:
            raise ValueError("give either b or optimizer, not both")
        spec = NoiseSpec(scale("b", b), noise or "gaussian", relative_to)
        return dict.fromkeys(slots, spec) if spec.b else {}
    if relative_to is not None:
        raise ValueError("relative_to needs b; without it the optimizer says what b is relative to")
    if optimizer is None or isinstance(optimizer, Wrapper):
        optimizers: Sequence[Wrapper] = [optimizer] if optimizer else optimizers_of(model)
        groups: Groups = [(group, group["params"]) for o in optimizers for group in o.param_groups]
        if not optimizers:
            raise ValueError(
                "no NVRM optimizer with parameters of this model exists any more, so the noise of "
                "the training is unknown; give b, or the optimizer's state dict as optimizer"
            )
    else:
        groups = _saved_groups(optimizer, model)
    if any("mix" in group for group, _ in groups):
        raise ValueError("the noise of RWP and ARWP has no single b; give b and relative_to")
    specs = {
        p: NoiseSpec(scale("b", group["b"]), noise or group["noise"], group.get("relative_to"))
        for group, params in groups
        for p in params
        if p in slots
    }
    if not specs:
        raise ValueError("the optimizer has none of the parameters to perturb; give b")
    # If all are frozen, they were frozen after training.
    trained = {p: spec for p, spec in specs.items() if p.requires_grad} or specs
    terms = {p: spec for p, spec in trained.items() if spec.b}
    if not terms:
        raise ValueError("the optimizer has no noise now for parameters of this model; give b")
    return terms


def _saved_groups(state: Any, model: nn.Module) -> Groups:
    """Parameter groups of a state dict with their parameters."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or any("drawn" not in group for group in groups):
        raise ValueError("optimizer must be a neuvar optimizer or the state dict of one")
    if all("param_names" in group for group in groups):
        return _named_groups(groups, model)
    if any("rounding_bits" in group for group in groups):
        return _rounding_groups(groups, model)
    if len({(group["b"], group["noise"], group.get("relative_to")) for group in groups}) > 1:
        raise ValueError(
            "the state dict has parameter groups with different noise, and does not say which "
            "parameters they have; load it into an optimizer of the model, and give that"
        )
    params: list[Tensor] = list(model.parameters())
    saved = sum(len(group["params"]) for group in groups)
    if saved not in (len(params), sum(p.requires_grad for p in params)):
        raise ValueError(
            f"the state dict has {saved} parameters and the model {len(params)}, and it does not "
            "say which they are; load it into an optimizer of the model, and give that"
        )
    return [(groups[0], params)]


def _named_groups(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> Groups:
    """Groups of an optimizer that was created from named parameters."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    unknown = [name for group in groups for name in group["param_names"] if name not in named]
    if unknown:
        raise ValueError(f"the state dict has a parameter {unknown[0]!r}, which the model lacks")
    return [(group, [named[name] for name in group["param_names"]]) for group in groups]


def _rounding_groups(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> Groups:
    """Groups of ``rounding_parameters``: each tensor of two or more dimensions, then the others."""
    params = sorted(model.parameters(), key=lambda p: p.ndim < 2)
    sizes = [len(group["params"]) for group in groups]
    rounded = sum(p.ndim > 1 for p in params)
    others = [len(params) - rounded] if rounded < len(params) else []
    if sizes != [1] * rounded + others:
        raise ValueError(
            "the state dict has parameter groups of rounding_parameters for another model; load it "
            "into an optimizer of the model, and give that"
        )
    parts = iter(params)
    return [(g, list(itertools.islice(parts, n))) for g, n in zip(groups, sizes, strict=True)]
