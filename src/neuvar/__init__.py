"""Artificial neural variability for PyTorch: train with perturbed weights, keep clean ones."""

from neuvar.guard import guard, reestimate_batchnorm
from neuvar.noise import b_from_std, std_from_b
from neuvar.optim import (
    NVRM,
    NVRMSGD,
    PSGD,
    SGLD,
    AntiPGD,
    NVRMAdam,
    NVRMAdamW,
    SmoothOut,
    split_parameters,
)

__all__ = [
    "NVRM",
    "NVRMSGD",
    "PSGD",
    "SGLD",
    "AntiPGD",
    "NVRMAdam",
    "NVRMAdamW",
    "SmoothOut",
    "b_from_std",
    "guard",
    "reestimate_batchnorm",
    "split_parameters",
    "std_from_b",
]
