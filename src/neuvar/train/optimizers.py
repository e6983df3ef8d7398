"""Optimizers by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from neuvar._validate import one_of, returned
from neuvar.baselines import PSGD, SAM, SGLD
from neuvar.noise import scale
from neuvar.optim import NVRM

Builder = Callable[..., Optimizer]


def _plain(inner: Builder, params: Any, *, model: Any, seed: int, **options: Any) -> Optimizer:
    return inner(params, **options)


def _nvrm(inner: Builder, params: Any, *, model: Any, seed: int, **options: Any) -> Optimizer:
    noise = {"b": options.pop("b", 0.0), "noise": options.pop("noise", "gaussian")}
    return NVRM(inner(params, **options), model=model, seed=seed, **noise)


def _sam(inner: Builder, params: Any, *, model: Any, seed: int, **options: Any) -> Optimizer:
    rho = options.pop("rho", 0.0)
    return SAM(inner(params, **options), rho=rho)


def _psgd(params: Any, *, model: Any, seed: int, b: Any = 0.0, **options: Any) -> Optimizer:
    return PSGD(params, b=scale("b", b), seed=seed, **options)


def _sgld(params: Any, *, model: Any, seed: int, b: Any = 0.0, **options: Any) -> Optimizer:
    return SGLD(params, temperature=scale("b", b) ** 2 / 2, seed=seed, **options)


PLAIN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OPTIMIZERS: dict[str, Builder] = {
    **{name: partial(_plain, inner) for name, inner in PLAIN.items()},
    **{f"nvrm-{name}": partial(_nvrm, inner) for name, inner in PLAIN.items()},
    **{f"sam-{name}": partial(_sam, inner) for name, inner in PLAIN.items()},
    "psgd": _psgd,
    "sgld": _sgld,
}
"""Builders by name, called as ``builder(params, model=..., seed=..., lr=..., weight_decay=...)``;
you may add your own.

``model`` is None if only parameters were given. ``momentum``, ``b``, ``noise`` and ``rho`` are
passed only if the caller of :func:`make_optimizer` gives them.
"""


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
    r"""Make an optimizer by its name. An option that it does not have is an error.

    Args:
        name: one of :data:`OPTIMIZERS`.
        params: a model, whose weights are then clean except in training passes, or parameters.
        lr: learning rate.
        momentum: of SGD, also inside NVRM or SAM, and of PSGD and SGLD.
        weight_decay: added to the gradient; decoupled for AdamW.
        b: scale of the noise of NVRM, or "auto", and of PSGD; for SGLD the square root of twice the
            temperature.
        noise: noise family, for NVRM and PSGD.
        rho: radius of SAM.
        seed: seed of the noise.

    >>> model = nn.Linear(4, 2)
    >>> type(make_optimizer("nvrm-adam", model, lr=1e-3, b=0.03)).__name__
    'NVRM'

    Add an optimizer of your own:

    >>> def rmsprop(params, *, model, seed, **options):
    ...     return torch.optim.RMSprop(params, **options)
    >>> OPTIMIZERS["rmsprop"] = rmsprop
    >>> type(make_optimizer("rmsprop", model, lr=1e-3)).__name__
    'RMSprop'
    >>> del OPTIMIZERS["rmsprop"]
    """
    builder = OPTIMIZERS[one_of("optimizer", name, OPTIMIZERS)]
    options: dict[str, Any] = {"momentum": momentum, "b": b, "rho": rho}
    options = {option: value for option, value in options.items() if value}
    if noise != "gaussian":
        options["noise"] = noise
    model = None
    if isinstance(params, nn.Module):
        model, params = params, params.parameters()
    try:
        built = builder(params, model=model, seed=seed, lr=lr, weight_decay=weight_decay, **options)
    except TypeError as error:
        refused = re.search(r"keyword argument '(\w+)'", str(error))
        if refused is None or refused[1] not in options:
            raise
        raise ValueError(
            f'{name} has no {refused[1]}: OPTIMIZERS["{name}"] takes no argument {refused[1]}'
        ) from error
    optimizer: Optimizer
    optimizer = returned(f'OPTIMIZERS["{name}"]', built, Optimizer, "torch.optim.Optimizer")
    return optimizer
