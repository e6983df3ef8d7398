"""Sums, over samples, of a power of each sample's own gradient.

A score is a number that a network gives a sample; there may be several, the columns of a matrix
with a row for each sample. Each way below takes the gradients of all scores of all samples by all
weights, raises their magnitudes to a power, and returns the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

Weights = dict[str, Tensor]
Scores = Callable[[Tensor, Tensor], Tensor]
"""From outputs and labels, a row a sample, to scores."""

MEMORY = {"cpu": 1 << 25, "cuda": 1 << 29}
"""Bytes that the gradients of the samples treated together may take, if one at all fits in.

A CPU is fastest when they stay near its caches.
"""

WORTHWHILE = 0.9
"""Part of the weights that linear layers must have for their fast way, a pass of its own, to pay.

Behind two convolutions it took up to 1.2 times as long with 70 % of the weights, half with 94 %.
"""

COMPARED = 8
"""How many samples, evenly spaced, the fast way is compared with the general one for."""


@dataclass(frozen=True)
class Question:
    """What is asked of a network.

    Attributes:
        forward: outputs for weights and inputs, without a trace on the network.
        scores: what to take the gradient of.
        power: 1 for magnitudes, 2 for squares.
        network: the network itself, for those who look at its layers.
    """

    forward: Callable[[Weights, Tensor], Tensor]
    scores: Scores
    power: int
    network: nn.Module

    def columns(self, weights: Weights, inputs: Tensor, labels: Tensor) -> int:
        """How many scores a sample has."""
        with torch.no_grad():
            found = self.scores(self.forward(weights, inputs[:1]), labels[:1])
        return found.shape[1]


Way = Callable[[Question, Weights, Tensor, Tensor], Weights]


def _at_a_time(bytes_each: int, inputs: Tensor) -> int:
    return max(1, MEMORY.get(inputs.device.type, MEMORY["cpu"]) // max(1, bytes_each))


def zeros(weights: Weights) -> Weights:
    """Sums to begin with; half precision would lose small terms."""
    return {
        name: torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
        for name, w in weights.items()
    }


def by_vmap(question: Question, weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """The general way: gradients of many samples at once, in chunks that fit into memory."""
    columns = question.columns(weights, inputs, labels)
    size = sum(w.nbytes for w in weights.values())
    width = min(columns, _at_a_time(size, inputs))
    count = _at_a_time(size * width, inputs)
    totals = zeros(weights)
    for part in torch.arange(columns, device=inputs.device).split(width):

        def one(weights: Weights, x: Tensor, y: Tensor, part: Tensor = part) -> Tensor:
            return question.scores(question.forward(weights, x[None]), y[None])[0, part]

        jacobians = vmap(jacrev(one), in_dims=(None, 0, 0))
        for x, y in zip(inputs.split(count), labels.split(count), strict=True):
            for name, gradient in jacobians(weights, x, y).items():
                terms = _power_(gradient, question.power)
                totals[name] += terms.sum((0, 1), dtype=totals[name].dtype)
    return totals


def _power_(gradient: Tensor, power: int) -> Tensor:
    return gradient.square_() if power == 2 else gradient.abs_()


def by_loop(question: Question, weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """One gradient after another, for networks that vmap cannot do."""
    totals = zeros(weights)
    for x, y in zip(inputs.split(1), labels.split(1), strict=True):
        live = {name: w.detach().requires_grad_() for name, w in weights.items()}
        for score in question.scores(question.forward(live, x), y)[0]:
            gradients = torch.autograd.grad(
                score, list(live.values()), retain_graph=True, materialize_grads=True
            )
            for total, gradient in zip(totals.values(), gradients, strict=True):
                total.add_(_power_(gradient, question.power))
    return totals


def by_layers(
    question: Question, weights: Weights, inputs: Tensor, labels: Tensor, rest: Way = by_vmap
) -> Weights:
    r"""The fast way for the weights of linear layers; another way does the rest.

    A layer's gradient for one sample is the outer product of the gradient by its output and its
    input, :math:`\delta a^T`, and a power of a product is the product of the powers. So the sum
    over samples is one matrix product, :math:`(|\delta|^q)^T |a|^q`, and no gradient of a single
    sample is ever formed.
    """
    layers = _linear_layers(question.network, weights)
    live = {n: w for n, w in weights.items() if n in _names(layers)}
    others = {name: w for name, w in weights.items() if name not in live}
    totals = rest(question, others, inputs, labels) if others else {}
    totals |= zeros(live)
    widths = sum(layer.out_features + layer.in_features for layer in layers.values())
    count = _at_a_time(16 * widths, inputs)  # values, gradients, powers and sums of floats
    for x, y in zip(inputs.split(count), labels.split(count), strict=True):
        try:
            terms = layer_sums(question, live, x, y)
        except RuntimeError:  # these samples go through the network on another way
            terms = rest(question, live, x, y)
        for name, term in terms.items():
            totals[name] += term
    return {name: totals[name] for name in weights}


def layer_sums(question: Question, weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """Sums for the linear layers that these samples pass through, from one pass forward."""
    layers = _linear_layers(question.network, weights)
    live = {n: weights[n].detach().requires_grad_() for n in _names(layers) if n in weights}
    with _watched(layers) as seen:
        scores = question.scores(question.forward(live, inputs), labels)
    _check_used_once(scores, live, seen)
    totals: Weights = {}
    for name, slopes in _slopes(scores, seen, question.power).items():
        entered = _power_(seen[name][0].clone(), question.power)
        sums = dict(zip(_names([name]), (slopes.T @ entered, slopes.sum(0)), strict=True))
        totals |= {leaf: total for leaf, total in sums.items() if leaf in live}
    return totals


def _check_used_once(scores: Tensor, live: Weights, seen: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse weights that reach the scores in another way than once, through their own layer."""
    ends = {leaf: left.grad_fn for name, (_, left) in seen.items() for leaf in _names([name])}
    users = _users(scores)
    for node in list(users):
        leaf = next((n for n, w in live.items() if getattr(node, "variable", None) is w), None)
        if leaf is None:
            continue
        while node is not ends.get(leaf) and len(users.get(node, ())) == 1:
            (node,) = users[node]  # noqa: PLW2901
        if node is not ends.get(leaf):
            raise RuntimeError(f"parameter {leaf!r} is used outside of its layer")


def _users(scores: Tensor) -> dict[Any, list[Any]]:
    """Which steps of a computation use the result of each, once for every use."""
    users: dict[Any, list[Any]] = {}
    waiting = [scores.grad_fn]
    while waiting:
        user = waiting.pop()
        for used, _ in user.next_functions if user is not None else ():
            if used is not None and used not in users:
                waiting.append(used)
            users.setdefault(used, []).append(user)
    users.pop(None, None)
    return users


def _names(layers: Iterable[str]) -> list[str]:
    """Names of the weights and biases of layers."""
    return [f"{name}.{leaf}".lstrip(".") for name in layers for leaf in ("weight", "bias")]


def _linear_layers(network: nn.Module, weights: Weights) -> dict[str, nn.Linear]:
    """Linear layers by name, if they have some of the weights."""
    found = {name: m for name, m in network.named_modules() if type(m) is nn.Linear}
    return {name: m for name, m in found.items() if weights.keys() & set(_names([name]))}


def _slopes(scores: Tensor, seen: dict[str, tuple[Tensor, Tensor]], power: int) -> Weights:
    """Powers of the gradients of all scores by each layer's outputs, summed over scores."""
    outputs = [left for _, left in seen.values()]
    sums = [torch.zeros_like(output) for output in outputs]
    for score in scores.unbind(1):
        # Samples do not touch each other, so the gradient of their sum holds each one's own.
        gradients = torch.autograd.grad(
            score.sum(), outputs, retain_graph=True, materialize_grads=True
        )
        for total, gradient in zip(sums, gradients, strict=True):
            total.add_(_power_(gradient, power))
    return dict(zip(seen, sums, strict=True))


@contextmanager
def _watched(layers: dict[str, nn.Linear]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Note what enters and what leaves each layer in one pass forward."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, layer: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> Tensor:
        if name in seen or len(entered) != 1 or entered[0].dim() != 2:
            raise RuntimeError(f"layer {name!r} is used twice, or not on one row a sample")
        seen[name] = entered[0].detach(), left
        return left.clone()  # an activation in place shall not change what was noted

    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def best_way(question: Question, weights: Weights, inputs: Tensor, labels: Tensor) -> Way:
    """The way that is likely fastest and right.

    The fast way looks at the computation of all samples, and leaves those where a weight is shared
    or used outside of its layer to the general way. What it cannot see there, such as samples that
    touch each other, a comparison with the general way for some samples finds.
    """
    where = torch.linspace(0, len(inputs) - 1, min(COMPARED, len(inputs))).round().long()
    x, y = inputs[where.to(inputs.device)], labels[where.to(labels.device)]
    general: Way = by_vmap
    try:
        expected = by_vmap(question, weights, x, y)
    except (RuntimeError, NotImplementedError):
        general, expected = by_loop, by_loop(question, weights, x, y)
    owned = _names(_linear_layers(question.network, weights))
    held = sum(w.numel() for name, w in weights.items() if name in owned)
    if held < WORTHWHILE * sum(w.numel() for w in weights.values()):
        return general
    try:
        found = layer_sums(question, weights, x, y)
    except RuntimeError:
        return general
    agree = all(_agree(total, expected[name]) for name, total in found.items())
    return partial(by_layers, rest=general) if agree else general


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two sums differ by no more than rounding can explain; zeros say nothing."""
    largest = expected.abs().max()
    return bool((largest > 0) & ((found - expected).abs().max() <= 1e-3 * largest))


def stateless(network: nn.Module, arguments: dict[str, Any]) -> Callable[[Weights, Tensor], Tensor]:
    """The network as a function of weights, some or all, and inputs; it is not written to."""
    fixed = {name: p.detach() for name, p in network.named_parameters()}
    fixed |= {name: b.detach().clone() for name, b in network.named_buffers()}

    def forward(weights: Weights, inputs: Tensor) -> Tensor:
        out: Tensor = functional_call(network, {**fixed, **weights}, (inputs,), arguments)
        return out

    return forward
