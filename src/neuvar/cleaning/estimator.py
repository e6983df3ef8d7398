"""A classifier for scikit-learn that is not taken in by wrong labels, and says which they are."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from neuvar.cleaning.inputs import Examples
from neuvar.cleaning.inputs.labels import plain_labels, read_labels
from neuvar.cleaning.issues import Array
from neuvar.cleaning.judging import judge_labels
from neuvar.cleaning.networks import network_for
from neuvar.cleaning.training import train_once

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

AT_ONCE = 4096
"""Examples whose classes are predicted at once."""

Maker = Callable[[int, int, int], nn.Module]


class NVRMClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Train with neural variability on features, and find wrong labels on the way.

    The network is trained once, as by :func:`neuvar.find_label_issues`. Features are standardised;
    X has two dimensions, so images are flattened first. What it finds can be handed to cleanlab:
    ``label_issues_.labels`` and ``.probabilities`` are its ``labels`` and ``pred_probs``, and
    ``label_quality_`` are its label quality scores by the method "normalized_margin".

    Args:
        model: None for a fully connected network; or ``model(features, classes, seed)`` that makes
            one; or a network that gives one score for each class, of which a copy is trained.
        b: scale of the noise, or "auto".
        epochs: how often all examples are seen.
        batch_size: examples in a batch.
        lr: learning rate of SGD at the beginning.
        momentum: of SGD.
        weight_decay: of SGD.
        random_state: seed of weights, order and noise, below 2**32; or a generator of numpy's that
            it is drawn from; or None for another one in each fit.
        device: where to train; predictions are made on the CPU.
        precision: "float32", or "bf16" or "fp16" with automatic mixed precision.
        progress: called with the share of the training that is done.

    Attributes:
        classes_: the labels that occur, sorted.
        n_features_in_: number of features.
        feature_names_in_: their names, if X had any.
        scaler_: what standardises features.
        model_: the trained network, at clean weights, on the CPU.
        label_issues_: :class:`neuvar.cleaning.LabelIssues` of the examples that ``fit`` saw, with
            the number of each class in ``classes_`` for a label.
        probabilities_: those of ``label_issues_``: of each class for each of these examples,
            gathered during the training.
        label_quality_: that of ``label_issues_``: the lower, the more likely a label is wrong.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 200)
    >>> X = rng.normal(size=(200, 5)) + 3 * y[:, None]
    >>> given = np.where(np.arange(200) < 10, 1 - y, y)
    >>> classifier = NVRMClassifier(b=0.03, epochs=10).fit(X, given)
    >>> sorted(classifier.label_issues_.ranked[:10].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> float(classifier.score(X, y)) > 0.95
    True
    """

    def __init__(
        self,
        model: nn.Module | Maker | None = None,
        *,
        b: float | str = "auto",
        epochs: int = 30,
        batch_size: int = 128,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        random_state: Any = 0,
        device: torch.device | str = "cpu",
        precision: str = "float32",
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
        self.progress = progress

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - the name that scikit-learn has for it
        """Train on features of shape (n, features) and a label for each example."""
        if isinstance(y, (list, tuple)):
            y = plain_labels(y)  # numpy would take what is missing among text for text
        X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        if y.dtype.kind != "O":
            check_classification_targets(y)
        numbers, names = read_labels(y)
        seed = _seed(self.random_state)
        with np.errstate(all="ignore"):  # what is too large is refused when it is standardised
            scaler = StandardScaler().fit(X)
        examples = Examples(_standardised(scaler, X, torch.float32), numbers, names)
        run = train_once(
            _network(self.model, examples, seed),
            examples,
            b=self.b,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            seed=seed,
            device=self.device,
            precision=self.precision,
            progress=self.progress,
        )
        self.classes_ = y[np.unique(numbers, return_index=True)[1]]
        self.scaler_ = scaler
        self.model_ = run.model.cpu().eval().requires_grad_(False)
        if self.model is None:
            # In float32, a prediction depends in its last digits on what is predicted along with
            # it. Networks of others may not work in float64.
            self.model_ = self.model_.double()
        found = judge_labels(run.probabilities, examples.labels, names=examples.names)
        self.label_issues_ = replace(found, b=run.b, values=self.classes_)
        self.probabilities_ = self.label_issues_.probabilities
        self.label_quality_ = self.label_issues_.quality
        return self

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Probability of each class, in the order of ``classes_``, for each example."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        dtype = next(self.model_.parameters()).dtype
        with torch.no_grad():
            parts = _standardised(self.scaler_, X, dtype).split(AT_ONCE)
            return torch.cat([softmax(self.model_(part).double(), 1) for part in parts]).numpy()

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable class of each example."""
        probabilities = self.predict_proba(X)
        found: Array = self.classes_[probabilities.argmax(1)]
        return found


def _standardised(scaler: Any, features: Array, dtype: torch.dtype) -> Tensor:
    """Features with mean 0 and deviation 1, if they have any."""
    with np.errstate(all="ignore"):
        found = torch.from_numpy(scaler.transform(features)).to(dtype)
    if not found.isfinite().all():
        raise ValueError(
            f"X has values that are too large to be standardised, up to {np.abs(features).max():g}"
        )
    return found


def _network(model: object, examples: Examples, seed: int) -> nn.Module:
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


def _seed(random_state: Any) -> int:
    """A seed from what scikit-learn takes for one; the global generator is left alone."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(1 << 32, dtype=np.int64))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(1 << 32))
    whole = hasattr(random_state, "__index__") and not isinstance(random_state, (bool, np.bool_))
    if not whole or not 0 <= operator.index(random_state) < 1 << 32:
        raise ValueError(
            "random_state must be a whole number from 0 to 2**32 - 1, a generator of numpy's or "
            f"None, got {random_state!r}"
        )
    return operator.index(random_state)
