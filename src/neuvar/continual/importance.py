"""Importance of weights: Fisher information and sensitivity of the outputs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Data, inputs_and_labels
from neuvar._eval_mode import clean_eval_mode
from neuvar.continual.per_sample import (
    Method,
    Problem,
    Scores,
    by_loop,
    choose_method,
    stateless,
)
from neuvar.measures.loss_and_accuracy import check_classes
from neuvar.optim.layout import bare

SQUARED_BATCH = 256
"""Number of samples in each mean gradient of "squared_batch_mean"."""


def _log_probabilities(outputs: Tensor) -> Tensor:
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "model must return logits of shape (n, classes) for at least two classes, "
            f"got outputs of shape {tuple(outputs.shape)}"
        )
    return outputs.log_softmax(1)


def _own_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """Scores whose squared gradients sum to the expectation over the model's own labels."""
    logs = _log_probabilities(outputs)
    return logs.detach().exp().sqrt() * logs


def _given_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    return _log_probabilities(outputs).gather(1, labels[:, None])


def _squared_norm(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.flatten(1).square().sum(1, keepdim=True)


FISHERS: dict[str, Scores] = {
    "exact": _own_labels,
    "sampled": _given_labels,
    "empirical": _given_labels,
    "squared_batch_mean": _given_labels,
}


def diagonal_fisher(
    model: nn.Module, data: Data, *, kind: str = "exact", seed: int = 0, **arguments: Any
) -> dict[str, Tensor]:
    r"""Diagonal of the Fisher information of a classifier's weights.

    .. math:: F_i = \frac1n \sum_x \sum_y p_\theta(y|x) \left(
              \frac{\partial \log p_\theta(y|x)}{\partial \theta_i} \right)^2

    from per-sample gradients, squared and then averaged. The model returns logits. It is evaluated
    at clean weights in evaluation mode; afterwards weights, noise, gradients, buffers, modes and
    torch's global generators are as before.

    References:
        Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, 2017. Kunstner,
        Balles, Hennig: Limitations of the Empirical Fisher Approximation, 2019.

    Args:
        model: any network whose samples do not affect each other in evaluation mode. Where nearly
            all trained weights are in linear layers, each used once, a faster method is used.
        data: inputs with labels, as a pair of tensors or an iterable of such pairs; for "exact"
            and "sampled" inputs are enough.
        kind: "exact" is the formula; "sampled" draws one label per input from the model in place of
            the sum over y; "empirical" uses the labels of the data. "squared_batch_mean", for
            comparison only, squares the mean gradient of 256 samples: it is common in public code,
            far too small, and not the Fisher information.
        seed: seed of the labels for "sampled".
        **arguments: for the model's forward pass, such as the head to use.

    Returns:
        A tensor for each trained parameter, by its name.

    >>> model = nn.Linear(4, 3)
    >>> fisher = diagonal_fisher(model, torch.ones(8, 4))
    >>> fisher["weight"].shape, bool((fisher["weight"] >= 0).all())
    (torch.Size([3, 4]), True)
    """
    _validate.one_of("kind", kind, FISHERS)
    seed = _validate.seed(seed)
    return _mean_power(model, data, FISHERS[kind], 2, arguments, kind=kind, seed=seed)


def output_sensitivity(model: nn.Module, data: Data, **arguments: Any) -> dict[str, Tensor]:
    r"""Sensitivity of the squared norm of a network's output to each weight.

    .. math:: \Omega_i = \frac1n \sum_x \left|
              \frac{\partial \|f_\theta(x)\|^2}{\partial \theta_i} \right|

    from per-sample gradients; labels are not used. Arguments and result are as for
    :func:`diagonal_fisher`.

    References:
        Aljundi et al.: Memory Aware Synapses: Learning what (not) to forget, 2018.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> output_sensitivity(model, torch.tensor([[1.0, 2.0], [1.0, -2.0]]))["weight"]
    tensor([[4., 8.]])
    """
    return _mean_power(model, data, _squared_norm, 1, arguments)


def _mean_power(
    model: nn.Module,
    data: Data,
    scores: Scores,
    power: int,
    arguments: dict[str, Any],
    *,
    kind: str = "",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Mean over samples of a power of the gradients of all scores."""
    network, generator = bare(model), torch.Generator().manual_seed(seed)
    needs_labels = kind in ("empirical", "squared_batch_mean")
    batch_mean = kind == "squared_batch_mean"
    method: Method | None = partial(by_loop, size=SQUARED_BATCH) if batch_mean else None
    totals: dict[str, Tensor] = {}
    count, classes = 0, 0
    with torch.enable_grad(), clean_eval_mode(network):
        weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        if not weights:
            raise ValueError("model has no trained parameter: all have requires_grad=False")
        device = next(iter(weights.values())).device
        problem = Problem(stateless(network, arguments), scores, power, network)
        for inputs, labels in inputs_and_labels(data, device, needs_labels=needs_labels):
            if needs_labels:
                classes = classes or _probabilities(problem, weights, inputs[:1]).shape[1]
                check_classes(labels, classes)
            if kind == "sampled":
                chances = [_probabilities(problem, weights, x) for x in inputs.split(1024)]
                drawn = torch.multinomial(torch.cat(chances), 1, generator=generator)[:, 0]
                labels = drawn.to(device)  # noqa: PLW2901
            if method is None:
                method = choose_method(problem, weights, inputs, labels)
            for name, term in method(problem, weights, inputs, labels).items():
                totals[name] = totals[name] + term if name in totals else term
            count += math.ceil(len(inputs) / SQUARED_BATCH) if batch_mean else len(inputs)
    if not count:
        raise ValueError("data is empty; at least one sample is needed")
    return {name: total / count for name, total in totals.items()}


@torch.no_grad()
def _probabilities(problem: Problem, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    return _log_probabilities(problem.forward(weights, inputs)).exp().cpu()
