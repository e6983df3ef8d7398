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
    from neuvar.prediction import AveragedPredictor, predict
    from neuvar.train import find_b
else:
    __getattr__, __dir__ = _attach(
        __name__,
        baselines="baselines",
        batchnorm="reestimate_batchnorm",
        bounds="bounds",
        cleaning="IndexedDataset LabelObserver cleaning find_label_issues",
        continual="continual",
        data="data",
        labels="labels",
        measures="largest_b measures neural_variability variability_curve",
        models="models",
        noise="b_from_std std_from_b",
        optim="NVRM NVRMSGD NVRMAdam NVRMAdamW optim optimizer_of split_parameters",
        prediction="AveragedPredictor predict",
        schedule="schedule",
        train="find_b train",
    )

__all__ = [
    "NVRM",
    "NVRMSGD",
    "AveragedPredictor",
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
    "predict",
    "reestimate_batchnorm",
    "schedule",
    "split_parameters",
    "std_from_b",
    "train",
    "variability_curve",
]
