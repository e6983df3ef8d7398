"""How much a trained network's answers depend on each of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neuvar._batches import Data, inputs_and_labels
from neuvar.continual.per_sample import Question, Scores, best_way, stateless, zeros
from neuvar.measures.eval_mode import clean_eval_mode
from neuvar.measures.reading import refuse_unknown_class
from neuvar.optim.layout import bare

SQUARED_BATCH = 256
"""How many samples "squared_batch_mean" averages over before it squares."""


def _logs(outputs: Tensor) -> Tensor:
    """Logarithms of the probabilities of all classes."""
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "model must give the logits of at least two classes in a row for each sample, "
            f"got outputs of shape {tuple(outputs.shape)}"
        )
    return outputs.log_softmax(1)


def _own_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """Scores whose squared gradients sum to the expectation over the model's own labels."""
    logs = _logs(outputs)
    return logs.detach().exp().sqrt() * logs


def _given_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    return _logs(outputs).gather(1, labels[:, None])


def _squared_norm(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.flatten(1).square().sum(1, keepdim=True)


FISHERS: dict[str, Scores] = {
    "exact": _own_labels,
    "sampled": _given_labels,
    "empirical": _given_labels,
    "squared_batch_mean": _given_labels,
}


def check_fisher(name: str, value: str) -> None:
    """Refuse a kind of Fisher that does not exist."""
    if value not in FISHERS:
        raise ValueError(f"{name} must be one of {', '.join(FISHERS)}, got {value!r}")


def check_seed(seed: object) -> None:
    """Refuse what cannot seed the draw of labels."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an int >= 0, got {seed!r}")


def diagonal_fisher(
    model: nn.Module, data: Data, *, kind: str = "exact", seed: int = 0, **arguments: Any
) -> dict[str, Tensor]:
    r"""Diagonal of the Fisher information of a classifier's weights.

    .. math:: F_i = \frac1n \sum_x \sum_y p_\theta(y|x) \left(
              \frac{\partial \log p_\theta(y|x)}{\partial \theta_i} \right)^2

    from the gradients of single samples, squared and then averaged. The model gives logits. It is
    looked at with clean weights in evaluation mode and left as found: weights and their noise,
    gradients, buffers, modes and torch's global generators.

    References:
        Kirkpatrick et al.: Overcoming catastrophic forgetting in neural networks, 2017. Kunstner,
        Balles, Hennig: Limitations of the Empirical Fisher Approximation, 2019.

    Args:
        model: any network that treats each sample by itself in evaluation mode; where nearly all
            trained weights are in linear layers, each used once, their gradients for single
            samples are never formed, which is much faster.
        data: inputs with labels, as a pair of tensors or an iterable of such pairs; for "exact"
            and "sampled" inputs alone are enough.
        kind: "exact" is the formula; "sampled" takes, in place of the sum over y, one label for
            each input, drawn from the model; "empirical" takes the given label.
            "squared_batch_mean", for comparison only, squares the mean gradient of 256 samples
            with their given labels: it is found in much code, is far too small, and is not the
            Fisher information.
        seed: seed of the labels that "sampled" draws.
        **arguments: for the model's forward pass, such as the head to use.

    Returns:
        A tensor for each trained parameter, by its name.

    >>> model = nn.Linear(4, 3)
    >>> fisher = diagonal_fisher(model, torch.ones(8, 4))
    >>> fisher["weight"].shape, bool((fisher["weight"] >= 0).all())
    (torch.Size([3, 4]), True)
    """
    check_fisher("kind", kind)
    check_seed(seed)
    if kind == "squared_batch_mean":
        return _squared_batch_mean(model, data, arguments)
    draw = torch.Generator().manual_seed(seed) if kind == "sampled" else None
    needs_labels = kind == "empirical"
    return _mean_power(model, data, FISHERS[kind], 2, arguments, draw, needs_labels=needs_labels)


def output_sensitivity(model: nn.Module, data: Data, **arguments: Any) -> dict[str, Tensor]:
    r"""How much the squared norm of a network's output depends on each weight.

    .. math:: \Omega_i = \frac1n \sum_x \left|
              \frac{\partial \|f_\theta(x)\|^2}{\partial \theta_i} \right|

    from the gradients of single inputs; labels are not used. The model is looked at as by
    :func:`diagonal_fisher`.

    References:
        Aljundi et al.: Memory Aware Synapses: Learning what (not) to forget, 2018.

    Args:
        model: any network.
        data: inputs, alone or with labels, as for :func:`diagonal_fisher`.
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
    """Mean over samples of a power of the gradients of all scores, at rest."""
    network = bare(model)
    totals: dict[str, Tensor] = {}
    samples, classes, way = 0, 0, None
    with torch.enable_grad(), clean_eval_mode(network):
        weights = _trained(network)
        device = next(iter(weights.values())).device
        question = Question(stateless(network, arguments), scores, power, network)
        for inputs, labels in inputs_and_labels(data, device, needs_labels=needs_labels):
            if needs_labels:
                classes = classes or _classes(question, weights, inputs)
                refuse_unknown_class(labels, classes)
            if draw is not None:
                labels = _drawn(question, weights, inputs, draw)  # noqa: PLW2901
            if way is None:
                way = best_way(question, weights, inputs, labels)
            for name, term in way(question, weights, inputs, labels).items():
                totals[name] = totals[name] + term if name in totals else term
            samples += len(inputs)
    _check_not_empty(samples)
    return {name: total / samples for name, total in totals.items()}


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
            for x, y in _split(inputs, labels, SQUARED_BATCH):
                logs = _logs(forward(live, x))
                refuse_unknown_class(y, logs.shape[1])
                score = logs.gather(1, y[:, None]).mean()
                found = torch.autograd.grad(score, list(live.values()), materialize_grads=True)
                for total, gradient in zip(totals.values(), found, strict=True):
                    total.add_(gradient.to(total.dtype).square())
                parts += 1
    _check_not_empty(parts)
    return {name: total / parts for name, total in totals.items()}


def _split(inputs: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(inputs.split(size), labels.split(size), strict=True)


def _check_not_empty(count: int) -> None:
    if not count:
        raise ValueError("data is empty; at least one sample is needed")


def _trained(network: nn.Module) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("model has no parameter that is trained: all have requires_grad=False")
    return found


def _classes(question: Question, weights: dict[str, Tensor], inputs: Tensor) -> int:
    with torch.no_grad():
        return _logs(question.forward(weights, inputs[:1])).shape[1]


def _drawn(
    question: Question, weights: dict[str, Tensor], inputs: Tensor, draw: torch.Generator
) -> Tensor:
    """One label for each input, drawn from what the model says."""
    with torch.no_grad():
        parts = [_logs(question.forward(weights, x)).exp().cpu() for x in inputs.split(1024)]
    return torch.multinomial(torch.cat(parts), 1, generator=draw)[:, 0].to(inputs.device)
