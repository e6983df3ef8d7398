"""Importance of weights: Fisher information and sensitivity of the outputs.

A network has one or more scores for each example. The methods below compute the gradient of each
score of each example with respect to the weights, raise its magnitudes to a power, and sum them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.functional import linear

from neuvar import _validate
from neuvar._batches import Data, inputs_and_labels
from neuvar._eval_mode import clean_eval_mode
from neuvar.measures.loss_and_accuracy import check_classes
from neuvar.optim.layout import bare

Weights = dict[str, Tensor]

SQUARED_BATCH = 256
"""Number of examples in each mean gradient of "squared_batch_mean"."""

MEMORY = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Bytes of gradients to compute together; on a CPU they should fit into its cache."""

MIN_LINEAR_SHARE = 0.9
""":func:`by_layers` is faster if linear layers have at least this share of the weights.

With two convolutions it took up to 1.2 times as long at a share of 0.7, half as long at 0.94."""

COMPARED = 8
"""Number of examples, evenly spaced, on which :func:`by_layers` is checked."""


def _log_probabilities(outputs: Tensor) -> Tensor:
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise ValueError(
            "model must return logits of shape (n, classes) for at least two classes, "
            f"got outputs of shape {tuple(outputs.shape)}"
        )
    return outputs.log_softmax(1)


def _scores_of_all_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """Scores √p·log p: the sum of their squared gradients is the mean over y drawn from p."""
    logs = _log_probabilities(outputs)
    return logs.detach().exp().sqrt() * logs


def _scores_of_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    return _log_probabilities(outputs).gather(1, labels[:, None])


def _squared_norm(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.flatten(1).square().sum(1, keepdim=True)


Scores = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and labels to scores, with one row per example."""

FISHERS: dict[str, Scores] = {
    "exact": _scores_of_all_labels,
    "sampled": _scores_of_labels,
    "empirical": _scores_of_labels,
    "squared_batch_mean": _scores_of_labels,
}


def diagonal_fisher(
    model: nn.Module, data: Data, *, kind: str = "exact", seed: int = 0, **arguments: Any
) -> Weights:
    r"""Diagonal of the Fisher information of a classifier's weights.

    .. math:: F_i = \frac1n \sum_x \sum_y p_\theta(y|x) \left(
              \frac{\partial \log p_\theta(y|x)}{\partial \theta_i} \right)^2

    The model returns logits. It is evaluated at clean weights in evaluation mode; afterwards
    weights, noise, gradients, buffers, modes and torch's global generators are as before.

    References:
        Kirkpatrick et al. 2017, Overcoming catastrophic forgetting in neural networks;
        Kunstner et al. 2019, Limitations of the empirical Fisher approximation.

    Args:
        model: any network whose examples do not affect each other in evaluation mode. Where nearly
            all trained weights are in linear layers, each used once, a faster method is used.
        data: inputs with labels, as a pair of tensors or an iterable of such pairs; for "exact"
            and "sampled" inputs are enough.
        kind: "exact" is the formula; "sampled" draws one label per input from the model instead of
            the sum over y; "empirical" uses the labels of the data. "squared_batch_mean", for
            comparison only, squares the mean gradient of 256 examples: it is common in public code,
            but far too small, and not the Fisher information.
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
    problem = Problem(bare(model), arguments, FISHERS[kind], 2)
    return _mean_power(problem, data, kind, _validate.seed(seed))


def output_sensitivity(model: nn.Module, data: Data, **arguments: Any) -> Weights:
    r"""Sensitivity of the squared norm of a network's output to each weight.

    .. math:: \Omega_i = \frac1n \sum_x \left|
              \frac{\partial \|f_\theta(x)\|^2}{\partial \theta_i} \right|

    Labels are not used. Arguments and result are as for :func:`diagonal_fisher`.

    References:
        Aljundi et al. 2018, Memory aware synapses: learning what (not) to forget.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> output_sensitivity(model, torch.tensor([[1.0, 2.0], [1.0, -2.0]]))["weight"]
    tensor([[4., 8.]])
    """
    return _mean_power(Problem(bare(model), arguments, _squared_norm, 1), data)


@dataclass(eq=False)
class Problem:
    """A network with arguments of its forward pass, its scores, and the power of their gradients.

    The power is 1 for magnitudes, 2 for squares.
    """

    network: nn.Module
    arguments: dict[str, Any]
    score: Scores
    power: int

    @cached_property
    def _fixed(self) -> Weights:
        buffers = {name: b.detach().clone() for name, b in self.network.named_buffers()}
        return buffers | {name: p.detach() for name, p in self.network.named_parameters()}

    def outputs(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Outputs with these weights in place of the network's own, which are not changed."""
        tensors = self._fixed | weights
        out: Tensor = functional_call(self.network, tensors, (inputs,), self.arguments)
        return out

    def scores(self, weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
        """Scores of each example, one row per example."""
        return self.score(self.outputs(weights, inputs), labels)


Method = Callable[[Problem, Weights, Tensor, Tensor], Weights]
"""Computes sums over examples for some weights, from inputs and labels."""


def _mean_power(problem: Problem, data: Data, kind: str = "", seed: int = 0) -> Weights:
    """Mean over examples of a power of the gradients of all scores."""
    network, generator = problem.network, torch.Generator().manual_seed(seed)
    needs_labels = kind in ("empirical", "squared_batch_mean")
    batch_mean = kind == "squared_batch_mean"
    method: Method | None = partial(by_loop, size=SQUARED_BATCH) if batch_mean else None
    totals: Weights = {}
    count, classes = 0, 0
    with torch.enable_grad(), clean_eval_mode(network):
        weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        if not weights:
            raise ValueError("model has no trained parameter: all have requires_grad=False")
        device = next(iter(weights.values())).device

        def probabilities(inputs: Tensor) -> Tensor:
            with torch.no_grad():
                return _log_probabilities(problem.outputs(weights, inputs)).exp().cpu()

        for inputs, labels in inputs_and_labels(data, device, needs_labels=needs_labels):
            if needs_labels:
                classes = classes or probabilities(inputs[:1]).shape[1]
                check_classes(labels, classes)
            if kind == "sampled":
                chances = torch.cat([probabilities(x) for x in inputs.split(1024)])
                labels = torch.multinomial(chances, 1, generator=generator)[:, 0].to(device)  # noqa: PLW2901
            method = method or choose_method(problem, weights, inputs, labels)
            for name, term in method(problem, weights, inputs, labels).items():
                totals[name] = totals[name] + term if name in totals else term
            count += math.ceil(len(inputs) / SQUARED_BATCH) if batch_mean else len(inputs)
    if not count:
        raise ValueError("data is empty; at least one example is needed")
    return {name: total / count for name, total in totals.items()}


def choose_method(problem: Problem, weights: Weights, inputs: Tensor, labels: Tensor) -> Method:
    """The fastest method that is correct for this network.

    :func:`by_layers` itself detects weights that are shared, or used outside of their layer. This
    function also compares its results with another method, to detect examples that affect each
    other.
    """
    where = torch.linspace(0, len(inputs) - 1, min(COMPARED, len(inputs))).round().long()
    x, y = inputs[where.to(inputs.device)], labels[where.to(labels.device)]
    general: Method = by_vmap
    try:
        expected = by_vmap(problem, weights, x, y)
    except (RuntimeError, NotImplementedError):
        general, expected = by_loop, by_loop(problem, weights, x, y)
    in_layers = _names(_linear_layers(problem.network, weights))
    count = sum(w.numel() for name, w in weights.items() if name in in_layers)
    if count < MIN_LINEAR_SHARE * sum(w.numel() for w in weights.values()):
        return general
    try:
        sums = layer_sums(problem, weights, x, y)
    except RuntimeError:
        return general
    agree = all(_agree(total, expected[name]) for name, total in sums.items())
    return partial(by_layers, rest=general) if agree else general


def _agree(sums: Tensor, expected: Tensor) -> bool:
    """Whether two sums are equal up to rounding, and not all 0."""
    largest = expected.abs().max()
    return bool((largest > 0) & ((sums - expected).abs().max() <= 1e-3 * largest))


def _chunk_size(bytes_each: int, inputs: Tensor) -> int:
    return max(1, MEMORY.get(inputs.device.type, MEMORY["cpu"]) // max(1, bytes_each))


def _zeros(weights: Weights) -> Weights:
    """Sums to start with, in float32 or wider."""
    return {
        name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
        for name, w in weights.items()
    }


def _power_(gradient: Tensor, power: int) -> Tensor:
    return gradient.square_() if power == 2 else gradient.abs_()


def by_vmap(problem: Problem, weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """Gradients of many examples at once, in chunks that fit into memory."""
    with torch.no_grad():
        columns = problem.scores(weights, inputs[:1], labels[:1]).shape[1]
    size = sum(w.nbytes for w in weights.values())
    width = min(columns, _chunk_size(size, inputs))
    count = _chunk_size(size * width, inputs)
    totals = _zeros(weights)
    for part in torch.arange(columns, device=inputs.device).split(width):

        def one(weights: Weights, x: Tensor, y: Tensor, part: Tensor = part) -> Tensor:
            return problem.scores(weights, x[None], y[None])[0, part]

        jacobians = vmap(jacrev(one), in_dims=(None, 0, 0))
        for x, y in zip(inputs.split(count), labels.split(count), strict=True):
            for name, gradient in jacobians(weights, x, y).items():
                terms = _power_(gradient, problem.power)
                totals[name] += terms.sum((0, 1), dtype=totals[name].dtype)
    return totals


def by_loop(
    problem: Problem, weights: Weights, inputs: Tensor, labels: Tensor, size: int = 1
) -> Weights:
    """One gradient at a time, of single examples or of the mean over ``size`` examples."""
    totals = _zeros(weights)
    for x, y in zip(inputs.split(size), labels.split(size), strict=True):
        trained = {name: w.detach().requires_grad_() for name, w in weights.items()}
        for score in problem.scores(trained, x, y).mean(0):
            gradients = torch.autograd.grad(
                score, list(trained.values()), retain_graph=True, materialize_grads=True
            )
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total.add_(_power_(gradient.to(total.dtype), problem.power))
    return totals


def by_layers(
    problem: Problem, weights: Weights, inputs: Tensor, labels: Tensor, rest: Method = by_vmap
) -> Weights:
    r"""A fast method for linear layers; ``rest`` computes the other weights.

    A layer's gradient for one example is an outer product, :math:`\delta a^T`, of the gradient with
    respect to its output and of its input. So the sum over examples is one matrix product,
    :math:`(|\delta|^q)^T |a|^q`, and per-example gradients are never formed.
    """
    layers = _linear_layers(problem.network, weights)
    in_layers = {n: w for n, w in weights.items() if n in _names(layers)}
    others = {name: w for name, w in weights.items() if name not in in_layers}
    totals = rest(problem, others, inputs, labels) if others else {}
    totals |= _zeros(in_layers)
    widths = sum(layer.out_features + layer.in_features for layer in layers.values())
    count = _chunk_size(16 * widths, inputs)  # values, gradients, powers and sums in float32
    for x, y in zip(inputs.split(count), labels.split(count), strict=True):
        try:
            terms = layer_sums(problem, in_layers, x, y)
        except RuntimeError:  # these examples use a weight more than once
            terms = rest(problem, in_layers, x, y)
        for name, term in terms.items():
            totals[name] += term
    return {name: totals[name] for name in weights}


def layer_sums(problem: Problem, weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """Sums for the linear layers that these examples use, from one forward pass."""
    layers = _linear_layers(problem.network, weights)
    trained = {n: weights[n].detach().requires_grad_() for n in _names(layers) if n in weights}
    with _recorded(layers) as records:
        scores = problem.scores(trained, inputs, labels)
    elsewhere = torch.autograd.grad(
        scores.sum(), list(trained.values()), retain_graph=True, allow_unused=True
    )
    for name, gradient in zip(trained, elsewhere, strict=True):
        if gradient is not None:
            raise RuntimeError(f"parameter {name!r} is used outside of its layer")
    outputs = [output for _, output in records.values()]
    slopes = [torch.zeros_like(output) for output in outputs]
    for score in scores.unbind(1):
        # Examples are independent, so the gradient of the sum has each example's own gradient.
        gradients = torch.autograd.grad(
            score.sum(), outputs, retain_graph=True, materialize_grads=True
        )
        for slope, gradient in zip(slopes, gradients, strict=True):
            slope.add_(_power_(gradient, problem.power))
    totals: Weights = {}
    for (name, (input_, _)), slope in zip(records.items(), slopes, strict=True):
        weight_sum = slope.T @ _power_(input_.clone(), problem.power)
        sums = dict(zip(_names([name]), (weight_sum, slope.sum(0)), strict=True))
        totals |= {leaf: total for leaf, total in sums.items() if leaf in trained}
    return totals


def _names(layers: Iterable[str]) -> list[str]:
    """Parameter names of layers."""
    return [f"{name}.{leaf}".lstrip(".") for name in layers for leaf in ("weight", "bias")]


def _linear_layers(network: nn.Module, weights: Weights) -> dict[str, nn.Linear]:
    """Linear layers by name that have some of the weights."""
    return {
        name: m
        for name, m in network.named_modules()
        if type(m) is nn.Linear
        and "forward" not in vars(m)  # else the layer was changed
        and weights.keys() & set(_names([name]))
    }


@contextmanager
def _recorded(layers: dict[str, nn.Linear]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Record the input and output of each layer in one forward pass.

    During the pass, the layers compute with detached weights. So the autograd graph contains only
    uses of the weights outside of their layers.
    """
    records: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(name: str, layer: nn.Linear, *inputs: Tensor, **others: Tensor) -> Tensor:
        if name in records or others or len(inputs) != 1 or inputs[0].dim() != 2:
            raise RuntimeError(f"layer {name!r} is used twice, or not with one row per example")
        detached = {leaf: w.detach() for leaf, w in layer.named_parameters()}
        output = linear(inputs[0], detached["weight"], detached.get("bias")).requires_grad_()
        records[name] = inputs[0].detach(), output
        return output.clone()  # so that an in-place activation does not change the record

    try:
        for name, layer in layers.items():
            vars(layer)["forward"] = partial(forward, name, layer)
        yield records
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)
