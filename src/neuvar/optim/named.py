"""NVRM around SGD, Adam and AdamW, with the arguments of torch's optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuvar.optim.nvrm import NVRM

OWN = ("model", "b", "std", "noise", "seed", "mode", "sampler", "ranks", "relative_to")
"""Arguments of NVRM; the others are those of the inner optimizer."""


class _Named(NVRM):
    """NVRM around an optimizer of torch, which uses fused kernels by default."""

    def __init__(self, kind: type[Optimizer], arguments: dict[str, Any]) -> None:
        options = {key: v for key, v in arguments.items() if key not in ("self", "__class__")}
        own = {key: options.pop(key) for key in OWN}
        if isinstance(params := options["params"], nn.Module):
            if own["model"] not in (None, params):
                raise ValueError("model must be the same module as the first argument")
            own["model"], options["params"] = params, params.parameters()
        elif isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
            got = "a class" if isinstance(params, type) else f"a {type(params).__name__}"
            raise ValueError(
                f"params must be a model, its parameters or parameter groups, got {got}"
            )
        super().__init__(kind(**options), **own)
        self._picks_fused = options["fused"] is None and not options["foreach"]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_picks_fused": self._picks_fused}


class NVRMSGD(_Named):
    """SGD with neural variability: the arguments of ``torch.optim.SGD`` and of :class:`NVRM`.

    Args:
        params: the model, or parameters or parameter groups (then give ``model``, too).
        lr: learning rate.
        momentum: momentum factor.
        dampening: dampening of the momentum.
        weight_decay: this times the clean weights is added to the gradient.
        nesterov: whether to use Nesterov momentum.
        model: see :class:`NVRM`, as for all arguments up to ``relative_to``.
        b: scale of the noise, or "auto".
        std: standard deviation of the noise, in place of ``b``.
        noise: family of the noise.
        seed: seed of the noise.
        mode: how clean weights are restored.
        sampler: where noise comes from.
        ranks: which noise each process has.
        relative_to: what b is relative to; absolute noise by default.
        maximize: maximize the loss.
        foreach: use torch's multi-tensor implementation.
        fused: use torch's fused kernel; by default where one exists.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMSGD(model, lr=0.1, momentum=0.9, b=0.05, seed=1)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        model: nn.Module | None = None,
        b: float | str | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
        relative_to: str | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(torch.optim.SGD, locals())


class NVRMAdam(_Named):
    """Adam with neural variability: the arguments of ``torch.optim.Adam`` and of :class:`NVRM`.

    Args:
        params: the model, or parameters or parameter groups (then give ``model``, too).
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: this times the clean weights is added to the gradient.
        amsgrad: whether to use AMSGrad.
        model: see :class:`NVRM`, as for all arguments up to ``relative_to``.
        b: scale of the noise, or "auto".
        std: standard deviation of the noise, in place of ``b``.
        noise: family of the noise.
        seed: seed of the noise.
        mode: how clean weights are restored.
        sampler: where noise comes from.
        ranks: which noise each process has.
        relative_to: what b is relative to; absolute noise by default.
        maximize: maximize the loss.
        foreach: use torch's multi-tensor implementation.
        capturable: safe to capture in a CUDA graph.
        fused: use torch's fused kernel; by default where one exists.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMAdam(model, lr=1e-3, b=0.03, noise="laplace")
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        model: nn.Module | None = None,
        b: float | str | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
        relative_to: str | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(torch.optim.Adam, locals())


class NVRMAdamW(_Named):
    """AdamW with neural variability: as :class:`NVRMAdam`, with decoupled weight decay.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMAdamW(model, lr=1e-3, weight_decay=0.1, b=0.03)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        model: nn.Module | None = None,
        b: float | str | None = None,
        std: float | None = None,
        noise: str = "gaussian",
        seed: int = 0,
        mode: str = "exact",
        sampler: str = "table",
        ranks: str = "shared",
        relative_to: str | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(torch.optim.AdamW, locals())
