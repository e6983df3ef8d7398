"""Held-out probabilities of any scikit-learn classifier, by cross-validation."""

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

    If a class has one example, the copy that predicts it has not seen the class and gives it 0.
    """
    try:
        from sklearn.base import clone  # type: ignore[import-untyped]
        from sklearn.model_selection import StratifiedKFold  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError('estimators need scikit-learn: pip install "neuvar[sklearn]"') from error
    if not hasattr(estimator, "predict_proba"):
        raise ValueError(
            f"model must have predict_proba, {type(estimator).__name__} has none; wrap it, for "
            "example in sklearn.calibration.CalibratedClassifierCV"
        )
    features, n = _as_rows(inputs), len(labels)
    if _length(features) != n:
        raise ValueError(
            f"inputs and labels must have the same length, got {_length(features)} and {n}"
        )
    p = np.zeros((n, classes))
    folds = StratifiedKFold(min(FOLDS, n), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        try:
            parts = list(folds.split(np.zeros(n), labels))
        except ValueError:
            raise ValueError(
                f"a class must have at least {FOLDS} examples for cross-validation, the largest "
                f"has {np.bincount(labels).max()}"
            ) from None
    for rest, part in parts:
        fitted = clone(estimator).fit(_take(features, rest), labels[rest])
        p[np.ix_(part, fitted.classes_)] = fitted.predict_proba(_take(features, part))
    return p


def _as_rows(inputs: Any) -> Any:
    """Inputs that can be indexed by arrays; tensors become arrays of shape (n, features)."""
    if isinstance(inputs, Tensor):
        return inputs.detach().cpu().flatten(1).numpy()
    if isinstance(inputs, (list, tuple)):
        text = all(isinstance(value, str) for value in inputs)
        return np.array(inputs, dtype=object) if text else np.asarray(inputs)
    return inputs


def _length(features: Any) -> int:
    return int(features.shape[0]) if hasattr(features, "shape") else len(features)


def _take(features: Any, rows: Array) -> Any:
    return features.iloc[rows] if hasattr(features, "iloc") else features[rows]
