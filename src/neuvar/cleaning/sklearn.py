"""A scikit-learn classifier that finds wrong labels while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from neuvar._validate import integer
from neuvar._validate import seed as check_seed
from neuvar.cleaning.class_indices import label_array, read_labels
from neuvar.cleaning.examples import Examples
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.score import judge_labels
from neuvar.cleaning.training import check_logits, network_for, prepare, train_once
from neuvar.prediction import predict

try:
    from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
    from sklearn.utils.multiclass import (  # type: ignore[import-untyped]
        check_classification_targets,
    )
    from sklearn.utils.validation import (  # type: ignore[import-untyped]
        check_is_fitted,
        validate_data,
    )
except ImportError as missing:
    raise ImportError(
        'NVRMClassifier needs scikit-learn 1.6 or newer: pip install "neuvar[sklearn]"'
    ) from missing

CHUNK = 4096
"""Examples in one batch of a prediction."""


class NVRMClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Train a network with weight noise on features, and find wrong labels at the same time.

    The network is trained once, as by :func:`neuvar.find_label_issues` with the same b. Features
    are standardized; X must be two-dimensional, so flatten images first. cleanlab can use the
    results: ``label_issues_.labels`` and ``.probabilities`` are its ``labels`` and ``pred_probs``,
    and ``label_quality_`` has the order of its label quality scores.

    Args:
        model: None for a fully connected network; or a function ``model(features, classes, seed)``
            that makes a network; or a network with one logit per class, which is copied.
        b: noise scale, or "auto"; or None for SAM instead of noise, which ranks labels better.
        epochs: passes over the data; half as many with SAM.
        batch_size: examples per batch.
        lr: initial learning rate of SGD.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        random_state: seed of weights, batch order and noise, an integer below 2**32; or a NumPy
            generator to draw it from; or None for a random seed in each fit.
        device: device to train on; predictions run on the CPU.
        precision: "float32", or "bf16" or "fp16" for automatic mixed precision.
        draws: number of perturbed networks over which :meth:`predict_proba` averages, even; 0
            predicts at the clean weights. The noise scale is that of the end of the training.
        progress: called with the finished fraction of the training.

    Attributes:
        classes_: the labels that occur, sorted.
        n_features_in_: number of features.
        feature_names_in_: their names, if X had any.
        scaler_: the fitted StandardScaler.
        model_: the trained network, at clean weights, on the CPU.
        noisy_parameters_: names of the trained parameters, to which the predictions add noise.
        label_issues_: :class:`neuvar.cleaning.LabelIssues` of the training examples; its labels are
            indices into ``classes_``.
        probabilities_: ``label_issues_.probabilities``, averaged during training.
        label_quality_: ``label_issues_.quality``; the lower, the more likely the label is wrong.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 200)
    >>> X = rng.normal(size=(200, 5)) + 3 * y[:, None]
    >>> noisy = np.where(np.arange(200) < 10, 1 - y, y)
    >>> classifier = NVRMClassifier(b=0.03, epochs=10).fit(X, noisy)
    >>> sorted(classifier.label_issues_.ranked[:10].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> float(classifier.score(X, y)) > 0.95
    True
    """

    def __init__(
        self,
        model: nn.Module | Callable[[int, int, int], nn.Module] | None = None,
        *,
        b: float | str | None = "auto",
        epochs: int = 30,
        batch_size: int = 128,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        random_state: Any = 0,
        device: torch.device | str = "cpu",
        precision: str = "float32",
        draws: int = 32,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.model = model
        self.b = b
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.draws = draws
        self.progress = progress

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on features of shape (n, features) and their labels.

        An example of weight 2 counts as two examples in the loss, and in the means and standard
        deviations of the features. The labels are then judged without weights.
        """
        if isinstance(y, (list, tuple)):
            y = label_array(y)  # numpy would turn a missing label among text into text
        X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        if y.dtype.kind != "O":
            check_classification_targets(y)
        indices, names = read_labels(y)
        weights = None if sample_weight is None else _check_weights(sample_weight, len(y))
        seed = seed_from(self.random_state)
        with np.errstate(all="ignore"):  # _standardize refuses overflow
            scaler = StandardScaler().fit(X, sample_weight=weights)
        examples = Examples(_standardize(scaler, X, torch.float32), indices, names)
        model = _make_network(self.model, examples, seed)
        network, logits = prepare(model, examples.inputs, seed=seed, device=self.device)
        check_logits(logits, len(names))
        options = self.get_params(deep=False)
        if integer("draws", self.draws, low=0) % 2:
            raise ValueError(f"draws must be even, since they come in pairs, got {self.draws}")
        for name in ("model", "random_state", "draws"):
            del options[name]
        run = train_once(network, examples, seed=seed, weights=weights, **options)
        self.classes_ = y[np.unique(indices, return_index=True)[1]]
        self.scaler_ = scaler
        trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
        self.noisy_parameters_ = trained
        self.model_ = run.model.cpu().eval().requires_grad_(False)
        if self.model is None:
            # In float32 the last digits of a prediction depend on the other examples of its batch.
            # A user's network may not support float64.
            self.model_ = self.model_.double()
        issues = judge_labels(run.probabilities, indices, names=names, history=True)
        self.label_issues_ = replace(issues, b=run.b, values=self.classes_)
        self.probabilities_ = self.label_issues_.probabilities
        self.label_quality_ = self.label_issues_.quality
        return self

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probability of each class, in the order of ``classes_``, averaged over weight noise."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        inputs = _standardize(self.scaler_, X, next(self.model_.parameters()).dtype)
        b = (self.label_issues_.b or 0.0) if self.draws else 0.0
        prediction = predict(
            self.model_, inputs, b=b, parameters=self.noisy_parameters_, draws=self.draws or 2,
            batch_size=CHUNK,
        )  # fmt: skip
        return prediction.probabilities.numpy()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable class of each example."""
        best = self.predict_proba(X).argmax(1)  # raises NotFittedError before classes_ is used
        classes: Array = self.classes_[best]
        return classes


def _check_weights(sample_weight: Any, count: int) -> Array:
    try:
        weights = np.asarray(sample_weight, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"sample_weight must be numbers, got {sample_weight!r:.60}") from None
    if weights.shape != (count,):
        raise ValueError(
            f"sample_weight must have one number for each of {count} examples, got the shape "
            f"{weights.shape}"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError("sample_weight must be finite numbers >= 0, not all of them zero")
    return weights


def _standardize(scaler: Any, features: Array, dtype: torch.dtype) -> Tensor:
    with np.errstate(all="ignore"):
        scaled = torch.from_numpy(scaler.transform(features)).to(dtype)
    if not scaled.isfinite().all():
        raise ValueError(
            f"X has values that are too large to be standardized, up to {np.abs(features).max():g}"
        )
    return scaled


def _make_network(model: object, examples: Examples, seed: int) -> nn.Module:
    if model is None:
        return network_for(examples, seed=seed)
    if callable(model) and not isinstance(model, nn.Module):
        model = model(examples.inputs.shape[1], len(examples.names), seed)
    if not isinstance(model, nn.Module):
        raise ValueError(
            "model must be None, a torch.nn.Module or a function model(features, classes, seed) "
            f"that returns one, got {model!r:.100}"
        )
    return model


def seed_from(random_state: Any) -> int:
    """A seed from scikit-learn's random_state; the global generator is not used."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(1 << 32, dtype=np.int64))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(1 << 32))
    return check_seed(random_state, "random_state")
