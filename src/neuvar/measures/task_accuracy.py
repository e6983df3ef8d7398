"""Forgetting and transfer over a sequence of tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuvar.measures.conversion import as_array, check_fractions

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Average:
    """Mean of n independent values; standard deviation and error are nan for one value."""

    mean: float
    std: float
    stderr: float
    n: int


@dataclass(frozen=True)
class Forgetting:
    """Accuracy of a network on T tasks that it learned in sequence, averaged over trials.

    Attributes:
        average_accuracy: Final mean accuracy over all tasks.
        backward_transfer: Mean change since each task was learned; negative if forgotten.
        forgetting: Mean drop from each task's best accuracy; positive if forgotten.
        first_task: Final accuracy on the first task.
        first_task_curve: Accuracy on the first task after each task.
        seen_tasks_curve: Mean accuracy over the tasks seen so far, after each task.
        forward_transfer: Mean accuracy before each task is learned, minus the baseline; or None.
    """

    average_accuracy: Average
    backward_transfer: Average
    forgetting: Average
    first_task: Average
    first_task_curve: tuple[Average, ...]
    seen_tasks_curve: tuple[Average, ...]
    forward_transfer: Average | None


def forgetting_summary(accuracy: Any, *, baseline: Any = None) -> Forgetting:
    r"""Summarize accuracies :math:`R_{ij}` on task j after learning task i.

    .. math:: \text{backward transfer} = \frac1{T-1} \sum_{j<T} R_{Tj} - R_{jj}

    .. math:: \text{forgetting} = \frac1{T-1} \sum_{j<T} \max_{i<T} R_{ij} - R_{Tj}

    .. math:: \text{forward transfer} = \frac1{T-1} \sum_{j>1} R_{j-1,j} - \beta_j

    The maximum includes known accuracies from before task j was learned.

    References:
        Lopez-Paz & Ranzato 2017, Gradient episodic memory for continual learning (transfer);
        Chaudhry et al. 2018, Riemannian walk for incremental learning (forgetting).

    Args:
        accuracy: Shape (T, T) for one trial or (trials, T, T), at least two tasks, values from 0
            to 1. Accuracies on tasks not yet learned, above the diagonal, may be nan.
        baseline: Accuracies :math:`\beta` of an untrained network, shape (T,), for the forward
            transfer; it needs the accuracies just above the diagonal.

    >>> nan = float("nan")
    >>> result = forgetting_summary([[0.9, nan, nan], [0.7, 0.8, nan], [0.5, 0.9, 0.7]])
    >>> round(result.average_accuracy.mean, 3), round(result.backward_transfer.mean, 3)
    (0.7, -0.15)
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
        forward_transfer=None if baseline is None else _forward_transfer(r, baseline),
    )


def delta_ab(before: Any, after: Any) -> Average:
    r"""How much the loss on task A rose while task B was learned; negative if it fell.

    .. math:: \delta_{AB} = \hat L_A(\theta_B) - \hat L_A(\theta_A)

    ``before`` is the loss on task A at :math:`\theta_A`, ``after`` that at :math:`\theta_B`: one
    number, or one per example in the same order. For one number the error is nan.

    References:
        Xie et al. 2021, Artificial neural variability for deep learning.

    >>> result = delta_ab(before=[0.1, 0.2, 0.3], after=[0.4, 0.6, 0.5])
    >>> round(result.mean, 3), round(result.stderr, 4)
    (0.3, 0.0577)
    """
    first, second = as_array("before", before), as_array("after", after)
    for name, loss in (("before", first), ("after", second)):
        if loss.ndim > 1 or not loss.size:
            raise ValueError(f"{name} must be one loss or one per example, got shape {loss.shape}")
        if not np.isfinite(loss).all():
            raise ValueError(f"{name} must be finite, got {loss[~np.isfinite(loss)][0]}")
    if first.shape != second.shape:
        raise ValueError(
            "before and after must be losses of the same examples, "
            f"got shapes {first.shape} and {second.shape}"
        )
    return _average(np.atleast_1d(second - first))


def _average(values: Array) -> Average:
    n = len(values)
    std = float(values.std(ddof=1)) if n > 1 else math.nan
    return Average(float(values.mean()), std, std / math.sqrt(n), n)


def _accuracies(accuracy: Any) -> Array:
    """Accuracies of shape (trials, T, T)."""
    r = as_array("accuracy", accuracy)
    shape, r = r.shape, r[None] if r.ndim == 2 else r
    if r.ndim != 3 or not len(r) or r.shape[1] != r.shape[2] or r.shape[1] < 2:
        raise ValueError(
            "accuracy must have shape (T, T) or (trials, T, T) with at least two tasks, "
            f"got {shape}"
        )
    missing = np.argwhere(np.isnan(r) & np.tri(r.shape[1], dtype=bool))
    if len(missing):
        trial, i, j = missing[0].tolist()
        raise ValueError(
            "accuracy must be known for every task that has been learned, "
            f"got nan for task {j} after task {i} in trial {trial}"
        )
    check_fractions("accuracy", r[~np.isnan(r)])
    return r


def _forward_transfer(r: Array, baseline: Any) -> Average:
    beta = as_array("baseline", baseline)
    if beta.shape != r.shape[1:2] or np.isnan(beta[1:]).any():
        raise ValueError(
            f"baseline must have shape ({r.shape[1]},), one accuracy per task without nan, got "
            f"{beta.tolist()}"
        )
    check_fractions("baseline", beta[~np.isnan(beta)])
    before = np.diagonal(r, offset=1, axis1=1, axis2=2)
    if np.isnan(before).any():
        raise ValueError(
            "forward transfer needs each task's accuracy just before it is learned, "
            "got nan just above the diagonal of accuracy"
        )
    return _average((before - beta[1:]).mean(axis=1))
