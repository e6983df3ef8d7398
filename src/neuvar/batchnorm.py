"""Statistics of batch normalization at the clean weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar._eval_mode import eval_mode
from neuvar.optim.noisy_parameters import held_clean


def reestimate_batchnorm(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    feed: Callable[[nn.Module, Any], Any] | None = None,
) -> int:
    """Compute the statistics of batch normalization at the clean weights.

    Training computes them at perturbed weights. This function replaces them by means over
    ``batches``. All other modules run in evaluation mode. After an error, the old statistics are
    restored.

    Args:
        model: any module; no-op without batch normalization.
        batches: tensors, tuples or lists whose first item is the input, or dicts of keyword
            arguments.
        feed: called as ``feed(model, batch)`` instead, for batches of another form.

    Returns:
        The number of batches.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    >>> reestimate_batchnorm(model, torch.randn(5, 16, 4))
    5
    """
    norms = norms_with_statistics(model)
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms]
    before = [{name: b.clone() for name, b in norm.named_buffers(recurse=False)} for norm in norms]
    seen = 0
    try:
        with torch.no_grad(), held_clean(model.parameters()), eval_mode(model):
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches
            for batch in batches:
                (feed or _feed)(model, batch)
                seen += 1
        if not seen:
            raise ValueError("batches is empty; batch normalization needs at least one")
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in buffers.items():
                getattr(norm, name).copy_(buffer)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return seen


def norms_with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """The batch normalization layers of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def _feed(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and batch:
        return model(batch[0])
    raise ValueError(
        f"a batch must be a tensor, a tuple or a dict, got {type(batch).__name__}; "
        "for others pass feed(model, batch)"
    )
