"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neuvar.baselines import PSGD, SAM, SGLD
from neuvar.noise import scale
from neuvar.optim import NVRM

INNER: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
OPTIMIZERS = (
    *INNER,
    *(f"nvrm-{name}" for name in INNER),
    *(f"sam-{name}" for name in INNER),
    "psgd",
    "sgld",
)
"""Names that :func:`make_optimizer` knows."""


def make_optimizer(
    name: str,
    params: nn.Module | Iterable[nn.Parameter],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    b: float | str = 0.0,
    noise: str = "gaussian",
    rho: float = 0.0,
    seed: int = 0,
) -> Optimizer:
    r"""Make an optimizer that is known by its name.

    Args:
        name: "sgd", "adam" or "adamw"; one of these after "nvrm-" or "sam-"; "psgd" or "sgld".
        params: what it trains: a model, which then holds clean weights at any time, or parameters.
        lr: learning rate.
        momentum: of SGD, plain or inside another, and of PSGD and SGLD.
        weight_decay: in the gradient, for AdamW apart from it.
        b: scale of the noise of NVRM, or "auto", and of PSGD; for SGLD the square root of twice the
            temperature.
        noise: its family, for NVRM and PSGD.
        rho: radius of SAM.
        seed: of the noise.

    >>> model = nn.Linear(4, 2)
    >>> type(make_optimizer("nvrm-adam", model, lr=1e-3, b=0.03)).__name__
    'NVRM'
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    kind, _, inner = name.rpartition("-")
    _refuse_unused(name, momentum=momentum, b=b, rho=rho, noise=noise)
    model = params if isinstance(params, nn.Module) else None
    params = params.parameters() if isinstance(params, nn.Module) else params
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if inner in ("sgd", "psgd", "sgld"):
        settings["momentum"] = momentum
    if inner == "psgd":
        return PSGD(params, b=scale("b", b), noise=noise, seed=seed, **settings)
    if inner == "sgld":
        return SGLD(params, temperature=scale("b", b) ** 2 / 2, seed=seed, **settings)
    plain = INNER[inner](params, **settings)
    if kind == "nvrm":
        return NVRM(plain, model=model, b=b, noise=noise, seed=seed)
    return SAM(plain, rho=rho) if kind == "sam" else plain


def _refuse_unused(name: str, *, momentum: float, b: float | str, rho: float, noise: str) -> None:
    """An option that would be ignored is a mistake of whoever gave it."""
    noisy = name.startswith("nvrm-") or name in ("psgd", "sgld")
    for option, value, used in (
        ("momentum", momentum, name.endswith(("sgd", "sgld"))),
        ("b", b, noisy),
        ("noise", noise != "gaussian", noisy and name != "sgld"),
        ("rho", rho, name.startswith("sam-")),
    ):
        if value and not used:
            raise ValueError(f"{name} has no {option}; leave it out")
