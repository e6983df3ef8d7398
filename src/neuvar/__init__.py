"""Artificial neural variability for PyTorch: train with perturbed weights, keep clean ones."""

from neuvar import bounds, cleaning, continual, data, labels, measures, models, schedule, train
from neuvar.cleaning import find_label_issues
from neuvar.guard import guard, reestimate_batchnorm
from neuvar.measures import largest_b, neural_variability, variability_curve
from neuvar.noise import b_from_std, std_from_b
from neuvar.optim import (
    NVRM,
    NVRMSGD,
    PSGD,
    SAM,
    SGLD,
    AntiPGD,
    NVRMAdam,
    NVRMAdamW,
    SmoothOut,
    split_parameters,
)
from neuvar.train import find_b

__all__ = [
    "NVRM",
    "NVRMSGD",
    "PSGD",
    "SAM",
    "SGLD",
    "AntiPGD",
    "NVRMAdam",
    "NVRMAdamW",
    "SmoothOut",
    "b_from_std",
    "bounds",
    "cleaning",
    "continual",
    "data",
    "find_b",
    "find_label_issues",
    "guard",
    "labels",
    "largest_b",
    "measures",
    "models",
    "neural_variability",
    "reestimate_batchnorm",
    "schedule",
    "split_parameters",
    "std_from_b",
    "train",
    "variability_curve",
]
