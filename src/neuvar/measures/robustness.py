"""Accuracy on corrupted and on adversarial inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import LABEL_TYPES, DataPasses, describe
from neuvar._eval_mode import clean_eval_mode
from neuvar.measures.conversion import several
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.image_corruptions import CORRUPTIONS, SEVERITIES, as_images, corrupt_images
from neuvar.measures.loss_and_accuracy import check_classes

Transform = Callable[[Tensor], Tensor]
"""Turns images into the inputs of a model, or inputs into scores."""


@dataclass(frozen=True)
class CorruptionAccuracy:
    """Accuracy on corrupted images.

    Attributes:
        clean: Accuracy on the original images.
        accuracies: Accuracy by kind of corruption, at each of ``severities``.
        severities: The severities.
        mean: Mean accuracy over all kinds and severities; its error is over images.
    """

    clean: Proportion
    accuracies: dict[str, tuple[Proportion, ...]] = field(repr=False)
    severities: tuple[int, ...]
    mean: Estimate

    def __str__(self) -> str:
        return f"clean {self.clean.value:.4g}, mean over corruptions {self.mean}"


def corruption_accuracy(
    model: nn.Module,
    data: Any,
    *,
    kinds: str | Iterable[str] | None = None,
    severities: int | Iterable[int] = SEVERITIES,
    transform: Transform | None = None,
    seed: int = 0,
    batch_size: int = 1024,
    confidence: float = 0.95,
) -> CorruptionAccuracy:
    """Accuracy on images with noise, blur, changed contrast, shifts and other corruptions.

    The corruptions are like those of MNIST-C and CIFAR-10-C, but not the same: see
    :mod:`neuvar.measures.image_corruptions`. All kinds are applied to the same images.

    References:
        Hendrycks & Dietterich 2019, Benchmarking neural network robustness to common corruptions;
        Mu & Gilmer 2019, MNIST-C.

    Args:
        model: A classifier; with :class:`neuvar.AveragedPredictor` predictions are averaged.
        data: A pair of tensors (images, labels), or an iterable of such pairs. Images are bytes or
            numbers from 0 to 1.
        kinds: One or more names in ``CORRUPTIONS``; all by default, but ``"saturate"`` only for
            images with colours.
        severities: One or more numbers from 1 to 5.
        transform: Turns corrupted images into inputs of the model, for example normalizes or
            flattens them.
        seed: Of random corruptions.
        batch_size: Of a pair of tensors.
        confidence: Confidence level of the intervals.

    >>> images, labels = torch.rand(8, 1, 6, 6), torch.arange(8) % 2
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    >>> result = corruption_accuracy(model, (images, labels), kinds=["contrast", "rotate"])
    >>> list(result.accuracies), result.clean.of
    (['contrast', 'rotate'], 8)
    """
    _validate.probability("confidence", confidence)
    names = list(CORRUPTIONS) if kinds is None else several("kinds", kinds)
    for name in names:
        _validate.one_of("kinds", name, CORRUPTIONS)
    given = several("severities", severities)
    levels = tuple(_validate.integer("severities", s, low=1, high=5) for s in given)
    seed = _validate.seed(seed)
    hits: list[Tensor] = []
    with _evaluation(model, data, batch_size, transform) as (run, batches):
        for index, (images, labels) in enumerate(batches):
            x = as_images(images)
            if index == 0:
                if kinds is None and (x.ndim == 3 or x.shape[1] == 1):
                    names.remove("saturate")
                cases = list(itertools.product(names, levels))
            key = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
            versions = (corrupt_images(x, *case, seed=key) for case in cases)
            correct = [_is_correct(run, v, labels) for v in itertools.chain([x], versions)]
            hits.append(torch.stack(correct).cpu())
    clean, *others = torch.cat(hits, 1)
    shares = [Proportion(int(case.sum()), len(case), confidence) for case in others]
    step = len(levels)
    return CorruptionAccuracy(
        clean=Proportion(int(clean.sum()), len(clean), confidence),
        accuracies={name: tuple(shares[k * step : (k + 1) * step]) for k, name in enumerate(names)},
        severities=levels,
        mean=Estimate.of(torch.stack(others).double().mean(0).numpy(), confidence, within=(0, 1)),
    )


@dataclass(frozen=True)
class AdversarialAccuracy:
    """Accuracy on adversarial inputs, which were changed to mislead the model.

    Attributes:
        clean: Accuracy on the original inputs.
        attacked: Accuracy after the attack. A stronger attack may find a lower one.
        epsilon: Largest change of an input.
        norm: How changes are measured.
        steps: Steps of the attack.
    """

    clean: Proportion
    attacked: Proportion
    epsilon: float
    norm: str
    steps: int

    def __str__(self) -> str:
        low, high = self.attacked.interval
        return (
            f"clean {self.clean.value:.4g}, attacked with ε = {self.epsilon:g} "
            f"({self.norm} norm, {self.steps} steps) {self.attacked.value:.4g} "
            f"[{low:.4g}, {high:.4g}]"
        )


def adversarial_accuracy(
    model: nn.Module,
    data: Any,
    *,
    epsilon: float,
    norm: str | float = "inf",
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    clip: tuple[float, float] | None = (0.0, 1.0),
    transform: Transform | None = None,
    seed: int = 0,
    batch_size: int = 256,
    confidence: float = 0.95,
) -> AdversarialAccuracy:
    r"""Accuracy under projected gradient descent (PGD) on the inputs.

    .. math:: x \leftarrow \Pi_{\|x - x_0\| \le \epsilon}\big(x + \alpha\,\mathrm{sign}\,\nabla_x
              (\max_{c \ne y} f_c - f_y)\big)

    The attack maximizes the margin of the scores. Unlike the cross entropy it does not saturate, so
    large scores cannot hide the gradient. A prediction counts as correct if it is correct without
    the attack and after every restart.

    References:
        Madry et al. 2018, Towards deep learning models resistant to adversarial attacks;
        Croce & Hein 2020, Reliable evaluation of adversarial robustness.

    Args:
        model: A classifier; with :class:`neuvar.AveragedPredictor` the averaged prediction is
            attacked.
        data: A pair of tensors (inputs, labels), or an iterable of such pairs.
        epsilon: Largest change of an input, in its units.
        norm: ``"inf"`` for the largest change of a value, ``"2"`` for the Euclidean length; numbers
            are accepted as well.
        steps: Steps of the attack.
        step_size: Length α of a step; 2.5 ε / steps by default.
        restarts: Number of attacks on each input, each from a random point in the ball. With
            ``norm="2"`` the first one starts at the input itself; for a linear model with two
            classes this finds the worst case.
        clip: Smallest and largest valid value of an input; None for no limits. Inputs of the data
            must lie inside.
        transform: Turns inputs of the data into inputs of the model, differentiably.
        seed: Of the starting points.
        batch_size: Of a pair of tensors.
        confidence: Confidence level of the intervals.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    >>> data = torch.tensor([[0.1, 0.0], [0.3, 0.0]]), torch.tensor([1, 1])
    >>> adversarial_accuracy(model, data, epsilon=0.2, clip=None).attacked.value
    0.5
    """
    _validate.probability("confidence", confidence)
    epsilon = _validate.number("epsilon", epsilon, low=0)
    kind = _validate.one_of("norm", f"{norm:g}" if norm in (2, math.inf) else norm, ("inf", "2"))
    steps = _validate.integer("steps", steps, low=1)
    restarts = _validate.integer("restarts", restarts, low=1)
    size = 2.5 * epsilon / steps if step_size is None else step_size
    _validate.number("step_size", size, low=0)
    if clip is not None and (np.shape(clip) != (2,) or not clip[0] < clip[1]):
        raise ValueError(f"clip must be an increasing pair of numbers or None, got {clip!r}")
    ball = Ball(epsilon, kind, clip)
    generator = torch.Generator().manual_seed(_validate.seed(seed))
    counts = np.zeros(3, int)
    with _evaluation(model, data, batch_size, transform) as (run, batches):
        for inputs, labels in batches:
            ball.check_valid(inputs)
            clean = robust = _is_correct(run, inputs, labels)
            for attack in range(restarts):
                x = inputs
                if attack or kind == "inf":
                    x = ball.project(inputs + ball.random(inputs, generator), inputs)
                for _ in range(steps):
                    x = ball.project(x + size * ball.step(_margin_gradient(run, x, labels)), inputs)
                robust = robust & _is_correct(run, x, labels)
            counts += [int(clean.sum()), int(robust.sum()), len(labels)]
    before, after = (Proportion(int(k), int(counts[2]), confidence) for k in counts[:2])
    return AdversarialAccuracy(before, after, epsilon, kind, steps)


@dataclass(frozen=True)
class Ball:
    """All valid inputs within epsilon of an input."""

    epsilon: float
    norm: str
    clip: tuple[float, float] | None

    def check_valid(self, inputs: Tensor) -> None:
        """Refuse integers, and inputs that clipping would move, perhaps by more than epsilon."""
        if not inputs.is_floating_point():
            raise ValueError(
                f"inputs must be floating-point numbers, got {inputs.dtype}; scale them before, as "
                "in images / 255"
            )
        if self.clip is None or not inputs.numel():
            return
        (low, high), least, most = self.clip, float(inputs.min()), float(inputs.max())
        slack = 1e-6 * (high - low)  # for rounding, as after resizing images
        if not (least >= low - slack and most <= high + slack):
            raise ValueError(
                f"inputs must lie within clip={self.clip!r}, got {least:.4g} to {most:.4g}; if "
                "they are normalized, pass them unnormalized and normalize in transform=..., or "
                "set clip to their limits, or clip=None"
            )

    def project(self, x: Tensor, centre: Tensor) -> Tensor:
        """Project on the ball, then clip to valid inputs."""
        change = x - centre
        if self.norm == "inf":
            change = change.clamp(-self.epsilon, self.epsilon)
        else:
            change = change * (self.epsilon / _lengths(change)).clamp(max=1)
        return centre + change if self.clip is None else (centre + change).clamp(*self.clip)

    def step(self, gradient: Tensor) -> Tensor:
        """The steepest direction of length 1 in this norm."""
        return gradient.sign() if self.norm == "inf" else gradient / _lengths(gradient)

    def random(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random changes inside the ball."""
        if self.norm == "inf":
            return self.epsilon * (2 * torch.rand(x.shape, generator=generator) - 1).to(x)
        change = torch.randn(x.shape, generator=generator).to(x)
        share = torch.rand(len(x), *[1] * (x.ndim - 1), generator=generator).to(x)
        return self.epsilon * share * change / _lengths(change)


def _lengths(x: Tensor) -> Tensor:
    """Euclidean length of each row; above 0, for divisions."""
    length: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)
    return length.clamp(min=torch.finfo(x.dtype).tiny)


def _margin_gradient(run: Transform, x: Tensor, labels: Tensor) -> Tensor:
    """Gradient, in the inputs, of the best wrong score minus the score of the label."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        x, index = x.detach().clone().requires_grad_(), labels.clone()[:, None]
        scores = run(x)
        best_wrong = scores.scatter(1, index, -torch.inf).amax(1)
        margin = (best_wrong - scores.gather(1, index).squeeze(1)).sum()
        gradient = None
        if margin.requires_grad:
            (gradient,) = torch.autograd.grad(margin, x, allow_unused=True)
    if gradient is None:
        raise ValueError("scores have no gradient in the inputs; is transform differentiable?")
    return gradient.nan_to_num()  # nan inputs would not be an attack


@contextmanager
def _evaluation(
    model: nn.Module, data: Any, batch_size: int, transform: Transform | None
) -> Iterator[tuple[Transform, Iterator[tuple[Tensor, Tensor]]]]:
    """Function from inputs to scores, without noise; and the batches as pairs (inputs, labels)."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {type(model).__name__}")
    batches = DataPasses(data, batch_size=batch_size, model=model)
    with clean_eval_mode(model), batches.one_pass() as stream:
        yield model if transform is None else lambda x: model(transform(x)), _pairs(stream)


def _pairs(stream: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of each batch; refuses other batches, and empty data."""
    examples = 0
    for batch in stream:
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not is_pair or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(f"data must have batches (inputs, labels), got {describe(batch)}")
        inputs, labels = batch
        if labels.ndim != 1 or labels.dtype not in LABEL_TYPES or len(labels) != len(inputs):
            raise ValueError(
                f"labels must be one integer per input, got {labels.dtype} of {tuple(labels.shape)}"
            )
        examples += len(labels)
        yield inputs.detach(), labels.long()
    if not examples:
        raise ValueError("data is empty; a measurement needs at least one example")


@torch.no_grad()
def _is_correct(run: Callable[[Tensor], Any], x: Tensor, labels: Tensor) -> Tensor:
    """Whether each prediction is correct; those from nan scores are not."""
    scores = run(x)
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(labels):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"model must return scores of shape ({len(labels)}, classes), got {got}")
    check_classes(labels, scores.shape[1])
    # argmax takes nan for the largest score.
    return (scores.argmax(1) == labels) & ~scores.isnan().any(1)
