"""Importance of weights: Fisher information and sensitivity of the outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Data, inputs_and_labels
from neuvar._eval_mode import clean_eval_mode
from neuvar.continual.per_sample import Problem, Scores, choose_method, stateless, zeros
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
    if kind == "squared_batch_mean":
        return _squared_batch_mean(model, data, arguments)
    draw = torch.Generator().manual_seed(seed) if kind == "sampled" else None
    needs_labels = kind == "empirical"
    return _mean_power(model, data, FISHERS[kind], 2, arguments, draw, needs_labels=needs_labels)


def output_sensitivity(model: nn.Module, data: Data, **arguments: Any) -> dict[str, Tensor]:
    r"""Sensitivity of the squared norm of a network's output to each weight.

    .. math:: \Omega_i = \frac1n \sum_x \left|
              \frac{\partial \|f_\theta(x)\|^2}{\partial \theta_i} \right|

    from per-sample gradients; labels are not used. The model is evaluated as in
    :func:`diagonal_fisher`.

    References:
        Aljundi et al.: Memory Aware Synapses: Learning what (not) to forget, 2018.

    Args:
        model: any network.
        data: inputs, with or without labels, as for :func:`diagonal_fisher`.
        **arguments: for the model's forward pass.

    Returns:
        A tensor for each trained parameter, by its name.

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
    draw: torch.Generator | None = None,
    *,
    needs_labels: bool = False,
) -> dict[str, Tensor]:
    """Mean over samples of a power of the gradients of all scores."""
    network = bare(model)
    totals: dict[str, Tensor] = {}
    samples, classes, method = 0, 0, None
    with torch.enable_grad(), clean_eval_mode(network):
        weights = _trained(network)
        device = next(iter(weights.values())).device
        problem = Problem(stateless(network, arguments), scores, power, network)
        for inputs, labels in inputs_and_labels(data, device, needs_labels=needs_labels):
            if needs_labels:
                classes = classes or _classes(problem, weights, inputs)
                check_classes(labels, classes)
            if draw is not None:
                labels = _drawn(problem, weights, inputs, draw)  # noqa: PLW2901
            if method is None:
                method = choose_method(problem, weights, inputs, labels)
            for name, term in method(problem, weights, inputs, labels).items():
                totals[name] = totals[name] + term if name in totals else term
            samples += len(inputs)
    return _mean(totals, samples)


def _squared_batch_mean(
    model: nn.Module, data: Data, arguments: dict[str, Any]
) -> dict[str, Tensor]:
    network, parts = bare(model), 0
    with torch.enable_grad(), clean_eval_mode(network):
        weights = _trained(network)
        device = next(iter(weights.values())).device
        live = {name: w.requires_grad_() for name, w in weights.items()}
        totals = zeros(weights)
        forward = stateless(network, arguments)
        for inputs, labels in inputs_and_labels(data, device, needs_labels=True):
            pairs = zip(inputs.split(SQUARED_BATCH), labels.split(SQUARED_BATCH), strict=True)
            for x, y in pairs:
                logs = _log_probabilities(forward(live, x))
                check_classes(y, logs.shape[1])
                score = logs.gather(1, y[:, None]).mean()
                grads = torch.autograd.grad(score, list(live.values()), materialize_grads=True)
                for total, gradient in zip(totals.values(), grads, strict=True):
                    total.add_(gradient.to(total.dtype).square())
                parts += 1
    return _mean(totals, parts)


def _mean(totals: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    if not count:
        raise ValueError("data is empty; at least one sample is needed")
    return {name: total / count for name, total in totals.items()}


def _trained(network: nn.Module) -> dict[str, Tensor]:
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    if not weights:
        raise ValueError("model has no trained parameter: all have requires_grad=False")
    return weights


def _classes(problem: Problem, weights: dict[str, Tensor], inputs: Tensor) -> int:
    with torch.no_grad():
        return _log_probabilities(problem.forward(weights, inputs[:1])).shape[1]


def _drawn(
    problem: Problem, weights: dict[str, Tensor], inputs: Tensor, draw: torch.Generator
) -> Tensor:
    """One label for each input, drawn from the model's probabilities."""
    with torch.no_grad():
        parts = [
            _log_probabilities(problem.forward(weights, x)).exp().cpu() for x in inputs.split(1024)
        ]
    return torch.multinomial(torch.cat(parts), 1, generator=draw)[:, 0].to(inputs.device)
