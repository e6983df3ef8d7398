"""Predict held-out probabilities by cross-validation of any scikit-learn classifier."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from torch import Tensor

from neuvar.cleaning.posterior import Array

FOLDS = 5


def is_estimator(model: Any) -> bool:
    """Whether a model has the interface of a scikit-learn estimator."""
    return hasattr(model, "fit") and hasattr(model, "get_params") and not hasattr(model, "forward")


def cross_validate(estimator: Any, inputs: Any, labels: Array, classes: int, seed: int) -> Array:
    """Held-out probabilities: a copy of the estimator, fitted on four folds, predicts the fifth.

    If a class has one example, its own probability of this class is 0.
    """
    try:
        from sklearn.model_selection import (  # type: ignore[import-untyped]
            StratifiedKFold,
            cross_val_predict,
        )
    except ImportError as error:
        raise ImportError('estimators need scikit-learn: pip install "neuvar[sklearn]"') from error
    if not hasattr(estimator, "predict_proba"):
        raise ValueError(
            f"model must have predict_proba, {type(estimator).__name__} has none; wrap it, for "
            "example in sklearn.calibration.CalibratedClassifierCV"
        )
    if isinstance(inputs, Tensor):
        inputs = inputs.detach().cpu().flatten(1).numpy()
    elif isinstance(inputs, (list, tuple)):
        text = all(isinstance(value, str) for value in inputs)
        inputs = np.array(inputs, dtype=object) if text else np.asarray(inputs)
    count, n = inputs.shape[0] if hasattr(inputs, "shape") else len(inputs), len(labels)
    if count != n:
        raise ValueError(f"inputs and labels must have the same length, got {count} and {n}")
    folds = StratifiedKFold(min(FOLDS, n), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        try:
            parts = list(folds.split(np.zeros(n), labels))
        except ValueError:
            raise ValueError(
                f"at least one class must have {FOLDS} examples for cross-validation, the largest "
                f"has {np.bincount(labels).max()}"
            ) from None
    p = np.zeros((n, classes))
    with warnings.catch_warnings():
        # The model of one fold has not seen a class with one example.
        warnings.filterwarnings("ignore", "Number of classes in training fold", RuntimeWarning)
        p[:, np.unique(labels)] = cross_val_predict(
            estimator, inputs, labels, cv=parts, method="predict_proba"
        )
    return p
