"""Proper scores of predicted probabilities: the log loss and the Brier score."""

from __future__ import annotations

from typing import Any

from neuvar.measures.conversion import probabilities_and_labels
from neuvar.measures.estimate import Estimate


def log_loss(outputs: Any, labels: Any, *, logits: bool, confidence: float = 0.95) -> Estimate:
    r"""Mean log loss (cross entropy) of predicted probabilities, in nats.

    .. math:: -\frac1n \sum_i \log p_i(y_i)

    The interval is for the mean over new examples. It is infinite if a label has probability 0.

    Args:
        outputs: Logits or probabilities, shape (n, classes).
        labels: True classes, shape (n,).
        logits: Whether ``outputs`` are logits or probabilities.
        confidence: Confidence level of the interval.

    >>> import torch
    >>> round(log_loss(torch.tensor([[0.8, 0.2]] * 4), [0, 0, 0, 1], logits=False).mean, 3)
    0.57
    """
    p, y = probabilities_and_labels(outputs, labels, logits=logits)
    return Estimate.of(-p.gather(1, y[:, None]).log().flatten().numpy(), confidence)


def brier_score(outputs: Any, labels: Any, *, logits: bool, confidence: float = 0.95) -> Estimate:
    r"""Brier score: the squared distance of the probabilities from the truth, from 0 to 2.

    .. math:: \frac1n \sum_i \sum_c \big(p_i(c) - [c = y_i]\big)^2

    This is Brier's own definition, a sum over classes. With two classes it is twice the score of
    one of them. The arguments are as for :func:`log_loss`.

    References:
        Brier 1950, Verification of forecasts expressed in terms of probability.

    >>> import torch
    >>> round(brier_score(torch.tensor([[0.8, 0.2]] * 4), [0, 0, 0, 1], logits=False).mean, 3)
    0.38
    """
    p, y = probabilities_and_labels(outputs, labels, logits=logits)
    own = p.gather(1, y[:, None]).flatten()
    return Estimate.of((p.square().sum(1) - 2 * own + 1).numpy(), confidence)
