"""Artificial neural variability for PyTorch: train with perturbed weights, keep clean ones."""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar import (
        baselines,
        bounds,
        cleaning,
        continual,
        data,
        labels,
        measures,
        models,
        optim,
        schedule,
        train,
    )
    from neuvar.batchnorm import reestimate_batchnorm
    from neuvar.cleaning import IndexedDataset, LabelObserver, find_label_issues
    from neuvar.measures import largest_b, neural_variability, variability_curve
    from neuvar.noise import b_from_std, std_from_b
    from neuvar.optim import (
        NVRM,
        NVRMSGD,
        NVRMAdam,
        NVRMAdamW,
        optimizer_of,
        split_parameters,
    )
    from neuvar.train import find_b
else:
    __getattr__, __dir__ = _attach(
        __name__,
        {
            "IndexedDataset": "cleaning",
            "LabelObserver": "cleaning",
            "NVRM": "optim",
            "NVRMSGD": "optim",
            "NVRMAdam": "optim",
            "NVRMAdamW": "optim",
            "b_from_std": "noise",
            "baselines": "baselines",
            "bounds": "bounds",
            "cleaning": "cleaning",
            "continual": "continual",
            "data": "data",
            "find_b": "train",
            "find_label_issues": "cleaning",
            "labels": "labels",
            "largest_b": "measures",
            "measures": "measures",
            "models": "models",
            "neural_variability": "measures",
            "optim": "optim",
            "optimizer_of": "optim",
            "reestimate_batchnorm": "batchnorm",
            "schedule": "schedule",
            "split_parameters": "optim",
            "std_from_b": "noise",
            "train": "train",
            "variability_curve": "measures",
        },
    )

__all__ = [
    "NVRM",
    "NVRMSGD",
    "IndexedDataset",
    "LabelObserver",
    "NVRMAdam",
    "NVRMAdamW",
    "b_from_std",
    "baselines",
    "bounds",
    "cleaning",
    "continual",
    "data",
    "find_b",
    "find_label_issues",
    "labels",
    "largest_b",
    "measures",
    "models",
    "neural_variability",
    "optim",
    "optimizer_of",
    "reestimate_batchnorm",
    "schedule",
    "split_parameters",
    "std_from_b",
    "train",
    "variability_curve",
]
