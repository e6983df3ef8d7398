"""The loss of a model at perturbed weights."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import DataPasses, Feed, batch_length, feed_batch
from neuvar.batchnorm import norms_with_statistics, reestimate_batchnorm
from neuvar.measures.loss_and_accuracy import (
    Loss,
    LossAndAccuracy,
    batch_accuracy,
    batch_weights,
    count_examples,
    counted_targets,
    half_to_float,
    scalar,
    weighted_mean,
)
from neuvar.measures.perturbed import MEASURES, Parameters, PerturbedModel

DRAWS_AT_ONCE = 16
"""How many perturbed models to evaluate in one vectorized call."""

F = TypeVar("F", bound=Callable[..., Any])


class DataOptions(TypedDict, total=False):
    """Options that select weights, and say how to read the data."""

    relative_to: str | None
    parameters: Parameters | None
    seed: int
    feed: Feed | None
    batch_size: int


class Options(DataOptions, total=False):
    """Options of the measures that perturb weights."""

    noise: str
    sampler: str
    batchnorm: str
    vectorize: bool | None


def lists_options(options: type, taken_by: Callable[..., Any]) -> Callable[[F], F]:
    """Make ``help()`` list a function's ``**options``, with the defaults of ``taken_by``.

    Type checkers and editors know them from ``Unpack``.
    """

    def decorate(function: F) -> F:
        signature, taken = inspect.signature(function), inspect.signature(taken_by).parameters
        *own, _ = signature.parameters.values()
        shared = [
            taken[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name in options.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return function

    return decorate


class Landscape(PerturbedModel):
    """A model, a loss and data, to evaluate at perturbed weights."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        noise: str = "gaussian",
        relative_to: str | None = None,
        parameters: Parameters | None = None,
        seed: int = 0,
        sampler: str = "fresh",
        batchnorm: str = "keep",
        feed: Feed | None = None,
        batch_size: int = 1024,
        vectorize: bool | None = None,
        stream: int = MEASURES,
    ) -> None:
        super().__init__(
            model,
            noise=noise,
            relative_to=relative_to,
            parameters=parameters,
            seed=seed,
            sampler=sampler,
            stream=stream,
        )
        if not callable(loss):
            raise ValueError(
                "loss, the second argument, must be a function of outputs and targets, got a "
                f"{type(loss).__name__}"
            )
        options = (
            loss.keywords if isinstance(loss, functools.partial) else getattr(loss, "__dict__", {})
        )
        if options.get("reduction") == "sum":
            raise ValueError(
                "loss has reduction='sum', so its value depends on the batch size; use 'mean'"
            )
        _validate.one_of("batchnorm", batchnorm, ("keep", "reestimate"))
        if vectorize is not None:
            _validate.boolean("vectorize", vectorize)
        self.loss, self.feed, self.vectorize = loss, feed or feed_batch, vectorize
        self.batches = DataPasses(data, batch_size=batch_size, model=model)
        self.batchnorm = batchnorm if norms_with_statistics(model) else "absent"
        self.examples = 0

    def _begin(self) -> None:
        clean = self.clean = self.evaluate()
        if not math.isfinite(clean.loss):
            raise ValueError(f"the loss at the model's own weights is {clean.loss}")
        if not self.batches.is_pair:  # a loader may give other data in each pass
            again = self.evaluate().loss
            if abs(again - clean.loss) > 1e-4 * abs(clean.loss) + 1e3 * self.rounding:
                raise ValueError(
                    "data must be the same in every pass, but the loss at the same weights was "
                    f"{clean.loss:.6g} and then {again:.6g}"
                )

    @torch.no_grad()
    def evaluate(self) -> LossAndAccuracy:
        """Loss and accuracy over all data at the current weights."""
        if self.batchnorm == "reestimate":
            with self.batches.one_pass() as batches:
                reestimate_batchnorm(self.model, batches, feed=self.feed)
        sizes, values, weights, first = [], [], [], not self.examples
        with self.batches.one_pass() as batches:
            for batch in batches:
                outputs, targets = self.feed(self.model, batch)
                sizes.append(batch_length(outputs, targets))
                if first:  # only in the first pass: it synchronizes with the device
                    self.examples += count_examples(self.loss, outputs, targets)
                values.append(self._loss_and_accuracy(outputs, targets))
                weights.append(batch_weights(self.loss, outputs, targets))
        self.batches.check_count(sum(sizes))
        if not self.examples:
            raise ValueError("data has no target that counts: the loss ignores all of them")
        self.largest_batch, self.precision = max(sizes), torch.finfo(values[0][0].dtype).eps
        self.weights = torch.stack(weights).cpu()
        return self._means(values)[0]

    def _loss_and_accuracy(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        loss = scalar(self.loss(half_to_float(outputs), targets))
        return loss, batch_accuracy(outputs, targets, counted_targets(self.loss, outputs, targets))

    def _means(self, values: Sequence[tuple[Tensor, Tensor]]) -> list[LossAndAccuracy]:
        """Means over all batches, for each model."""
        columns = zip(zip(*values, strict=True), self.weights.unbind(1), strict=True)
        means = (weighted_mean(column, weights).view(-1).tolist() for column, weights in columns)
        return list(map(LossAndAccuracy, *means))

    @property
    def rounding(self) -> float:
        """Rounding error of a loss."""
        return self.precision * abs(self.clean.loss)

    def evaluate_noisy(
        self, b: float, numbers: Sequence[int], signs: Sequence[int]
    ) -> list[LossAndAccuracy]:
        """Loss and accuracy at noise of scale b for each draw, averaged over the signs."""
        if b == 0 or not numbers:
            return [self.clean] * len(numbers)
        first = self._one_draw(b, numbers[0], signs)
        results: list[list[LossAndAccuracy]] = []
        if len(numbers) > 1 and self._should_vectorize():
            step = max(1, DRAWS_AT_ONCE // len(signs))
            for low in range(0, len(numbers), step):
                part = self._at_once(b, numbers[low : low + step], signs)
                if not part or not (results or self._agree(part[0], first)):
                    self.vectorize = False
                    break
                results += part
        results = results or [first]
        results += [self._one_draw(b, number, signs) for number in numbers[len(results) :]]
        return [LossAndAccuracy(*mean) for mean in np.mean(results, axis=1).tolist()]

    def _one_draw(self, b: float, number: int, signs: Sequence[int]) -> list[LossAndAccuracy]:
        noise, results = self.noise(number), []
        for sign in signs:
            self.move(noise, sign * b)
            results.append(self.evaluate())
        self.move(None)
        return results

    def _should_vectorize(self) -> bool:
        """Whether to evaluate several perturbed models at once."""
        if self.batchnorm == "reestimate":
            return False
        return self.calls_dominate(self.largest_batch) if self.vectorize is None else self.vectorize

    def _agree(self, vectorized: list[LossAndAccuracy], single: list[LossAndAccuracy]) -> bool:
        """Whether both results agree, with an effect of the noise that is larger than rounding."""
        # Sign by sign: in their mean the effect of small noise almost cancels.
        for one, other in zip(vectorized, single, strict=True):
            effect = abs(other.loss - self.clean.loss)
            allowed = 1e-3 * effect + 10 * self.rounding
            if not 100 * self.rounding < effect < math.inf or abs(one.loss - other.loss) > allowed:
                return False
        return True

    @torch.no_grad()
    def _at_once(
        self, b: float, numbers: Sequence[int], signs: Sequence[int]
    ) -> list[list[LossAndAccuracy]]:
        """Results of one vectorized evaluation; empty if model or loss cannot be vectorized."""
        noises, weights = [self.noise(number) for number in numbers], {}
        for p, clean in self._clean_weights.items():
            shift = b * torch.stack([sign * noise[p] for noise in noises for sign in signs])
            weights[p] = (clean + shift).to(clean.dtype)
        with self.batches.one_pass() as batches:
            values = self.evaluate_at_once(weights, batches, self._loss_and_accuracy)
        # If the data have changed, evaluate() raises an error.
        if values is None or len(values) != len(self.weights):
            return []
        means = self._means(values)
        return [means[k : k + len(signs)] for k in range(0, len(means), len(signs))]
