"""Forgetting: what becomes of earlier tasks when later ones are learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Average:
    """Mean of n independent values, of trials or of examples, with its error.

    Attributes:
        mean: The mean.
        std: Standard deviation of the values; nan if there is only one.
        stderr: Standard error of the mean; nan if there is only one value.
        n: How many values.
    """

    mean: float
    std: float
    stderr: float
    n: int


@dataclass(frozen=True)
class Forgetting:
    """How well a network that learned T tasks one after another still does them.

    Every quantity is an average over trials.

    Attributes:
        average_accuracy: Mean accuracy over all tasks in the end.
        backward_transfer: Mean change since each task was learned; negative if it was forgotten.
        forgetting: Mean fall since each task's best time; positive if it was forgotten.
        first_task: Accuracy on the first task in the end.
        first_task_curve: Accuracy on the first task, after each task.
        seen_tasks_curve: Mean accuracy over the tasks seen so far, after each task.
        forward_transfer: Mean lead over the baseline before each task is learned, or None.
    """

    average_accuracy: Average
    backward_transfer: Average
    forgetting: Average
    first_task: Average
    first_task_curve: tuple[Average, ...]
    seen_tasks_curve: tuple[Average, ...]
    forward_transfer: Average | None


def forgetting(accuracy: Any, *, baseline: Any = None) -> Forgetting:
    r"""Summarise a matrix of accuracies R, with :math:`R_{ij}` on task j after learning task i.

    .. math:: \text{backward transfer} = \frac1{T-1} \sum_{j<T} R_{Tj} - R_{jj}

    .. math:: \text{forgetting} = \frac1{T-1} \sum_{j<T} \max_{i<T} R_{ij} - R_{Tj}

    .. math:: \text{forward transfer} = \frac1{T-1} \sum_{j>1} R_{j-1,j} - \beta_j

    The maximum is over all times before the end for which there is an accuracy, those before task
    j was learned included, as in the definition of Chaudhry et al.

    Args:
        accuracy: shape (T, T) for one trial or (trials, T, T), at least two tasks, values between
            0 and 1. Accuracies on tasks not yet learned, above the diagonal, may be nan.
        baseline: accuracies :math:`\beta` of an untrained network, shape (T,); the first is not
            used. Asks for the forward transfer, which needs the accuracies just above the diagonal.

    References:
        Lopez-Paz & Ranzato 2017, Gradient episodic memory for continual learning (transfer);
        Chaudhry et al. 2018, Riemannian walk for incremental learning (forgetting).

    >>> nan = float("nan")
    >>> found = forgetting([[0.9, nan, nan], [0.7, 0.8, nan], [0.5, 0.9, 0.7]])
    >>> round(found.average_accuracy.mean, 3), round(found.backward_transfer.mean, 3)
    (0.7, -0.15)
    >>> round(found.forgetting.mean, 3), found.first_task.mean
    (0.15, 0.5)
    >>> [round(point.mean, 3) for point in found.seen_tasks_curve]
    [0.9, 0.75, 0.7]
    """
    r = _accuracies(accuracy)
    tasks = r.shape[1]
    learned, last = np.diagonal(r, axis1=1, axis2=2), r[:, -1]
    best = np.nanmax(r[:, :-1, :-1], axis=1)
    return Forgetting(
        average_accuracy=_average(last.mean(axis=1)),
        backward_transfer=_average((last - learned)[:, :-1].mean(axis=1)),
        forgetting=_average((best - last[:, :-1]).mean(axis=1)),
        first_task=_average(last[:, 0]),
        first_task_curve=tuple(_average(r[:, i, 0]) for i in range(tasks)),
        seen_tasks_curve=tuple(_average(r[:, i, : i + 1].mean(axis=1)) for i in range(tasks)),
        forward_transfer=None if baseline is None else _forward(r, baseline),
    )


def delta_ab(before: Any, after: Any) -> Average:
    r"""How much the loss on task A rose while task B was learned.

    .. math:: \delta_{AB} = \hat L_A(\theta_B) - \hat L_A(\theta_A)

    It is signed: negative if learning B helped A.

    Args:
        before: loss on task A at :math:`\theta_A`: one number, or one for each example.
        after: loss on task A at :math:`\theta_B`, of the same examples in the same order.

    Returns:
        The mean difference. From losses of examples its error is that of their differences; from
        two numbers nothing is known about the error, which is then nan.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning.

    >>> found = delta_ab(before=[0.1, 0.2, 0.3], after=[0.4, 0.6, 0.5])
    >>> round(found.mean, 3), round(found.stderr, 4)
    (0.3, 0.0577)
    >>> round(delta_ab(0.25, 0.75).mean, 3)
    0.5
    """
    losses = [_array("before", before), _array("after", after)]
    for name, loss in zip(("before", "after"), losses, strict=True):
        if loss.ndim > 1 or not loss.size:
            raise ValueError(
                f"{name} must be one loss or a loss for each example, got shape {loss.shape}"
            )
        if not np.isfinite(loss).all():
            raise ValueError(f"{name} must be finite, got {loss[~np.isfinite(loss)][0]}")
    if losses[0].shape != losses[1].shape:
        raise ValueError(
            "before and after must be losses of the same examples, "
            f"got shapes {losses[0].shape} and {losses[1].shape}"
        )
    return _average(np.atleast_1d(losses[1] - losses[0]))


def _average(values: Array) -> Average:
    n = len(values)
    std = float(values.std(ddof=1)) if n > 1 else math.nan
    return Average(float(values.mean()), std, std / math.sqrt(n), n)


def _array(name: str, values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers, got {values!r}") from None


def _accuracies(accuracy: Any) -> Array:
    """Accuracies of shape (trials, T, T), or a sentence which says why they are none."""
    given = _array("accuracy", accuracy)
    r = given[None] if given.ndim == 2 else given
    if r.ndim != 3 or not len(r) or r.shape[1] != r.shape[2] or r.shape[1] < 2:
        raise ValueError(
            "accuracy must have shape (T, T) or (trials, T, T) with at least two tasks, "
            f"got {given.shape}"
        )
    missing = np.argwhere(np.isnan(r) & np.tri(r.shape[1], dtype=bool))
    if len(missing):
        trial, i, j = missing[0].tolist()
        raise ValueError(
            "accuracy must be known for every task that has been learned, "
            f"got nan for task {j} after task {i} in trial {trial}"
        )
    _refuse_outside("accuracy", r)
    return r


def _refuse_outside(name: str, values: Array) -> None:
    outside = values[(values < 0) | (values > 1)]
    if outside.size:
        raise ValueError(f"{name} must be between 0 and 1, got {outside[0]}")


def _forward(r: Array, baseline: Any) -> Average:
    known = _array("baseline", baseline)
    if known.shape != r.shape[1:2] or np.isnan(known[1:]).any():
        raise ValueError(
            f"baseline must have shape ({r.shape[1]},), one accuracy a task without nan, got "
            f"{known.tolist()}"
        )
    _refuse_outside("baseline", known)
    ahead = np.diagonal(r, offset=1, axis1=1, axis2=2)
    if np.isnan(ahead).any():
        raise ValueError(
            "accuracy must hold each task's accuracy just before it is learned to give a forward "
            "transfer, got nan just above the diagonal"
        )
    return _average((ahead - known[1:]).mean(axis=1))
