"""Neural variable optimizers by name, with the inner optimizer's own arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from neuvar.optim.nvrm import NVRM

_OWN = inspect.signature(NVRM).parameters.keys() - {"inner"}


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part arguments into those of NVRM and those of the inner optimizer."""
    own = {key: value for key, value in arguments.items() if key in _OWN}
    return own, {key: value for key, value in arguments.items() if key not in _OWN}


class NVRMSGD(NVRM):
    """SGD with neural variability: ``torch.optim.SGD``'s arguments and those of :class:`NVRM`.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMSGD(model.parameters(), lr=0.1, momentum=0.9, b=0.05, seed=1)
    """

    def __init__(self, params: Any, lr: float = 1e-3, **arguments: Any) -> None:
        own, inner = _split(arguments)
        super().__init__(torch.optim.SGD(params, lr, **inner), **own)


class NVRMAdam(NVRM):
    """Adam with neural variability: ``torch.optim.Adam``'s arguments and those of :class:`NVRM`.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMAdam(model.parameters(), lr=1e-3, b=0.03, noise="laplace")
    """

    def __init__(self, params: Any, lr: float = 1e-3, **arguments: Any) -> None:
        own, inner = _split(arguments)
        super().__init__(torch.optim.Adam(params, lr, **inner), **own)


class NVRMAdamW(NVRM):
    """AdamW with neural variability: ``torch.optim.AdamW``'s arguments and those of :class:`NVRM`.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = NVRMAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, b=0.03)
    """

    def __init__(self, params: Any, lr: float = 1e-3, **arguments: Any) -> None:
        own, inner = _split(arguments)
        super().__init__(torch.optim.AdamW(params, lr, **inner), **own)


class SmoothOut(NVRMSGD):
    """SmoothOut (Wen et al., 2018): NVRM-SGD with uniform noise."""

    def __init__(self, params: Any, lr: float = 1e-3, **arguments: Any) -> None:
        super().__init__(params, lr, noise="uniform", **arguments)


class AntiPGD(NVRMSGD):
    """Anti-PGD (Orvieto et al., 2022): anticorrelated noise, which is NVRM-SGD's update."""
