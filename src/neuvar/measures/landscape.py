"""The loss at weights around a model's own, which are restored to the bit."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar import _validate
from neuvar._batches import Batches, Feed, batch_length, feed_batch
from neuvar._eval_mode import clean_eval_mode
from neuvar.batchnorm import reestimate_batchnorm
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
from neuvar.noise import RELATIVE_TO, SAMPLERS, Draw, Slot, family, standard_noise
from neuvar.optim.layout import check_parameters, local, relative_size, reshard, slots

Parameters = Iterable[Tensor] | Iterable[str]
"""Parameters of a model, as tensors or by name."""

SMALL_WORK = 20_000
"""Vectorize if examples × weights per tensor is at most this: call overhead dominates."""

MEASURES, BOUNDS = -1, -2
"""Noise streams of measures and bounds; optimizers use streams from 0."""

DRAWS_AT_ONCE = 16
"""How many perturbed models to evaluate in one vectorized call."""

F = TypeVar("F", bound=Callable[..., Any])


class DataOptions(TypedDict, total=False):
    """Which weights, and how to read the data."""

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
    """Make ``help()`` list a function's ``**options``, with the defaults of who takes them.

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


class Landscape:
    """A model, a loss and data, to evaluate at perturbed weights.

    Inside ``with`` the model is in evaluation mode and free of an optimizer's noise; afterwards
    weights, modes, buffers, gradients and generators are as before.
    """

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
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module, got {type(model).__name__}")
        if not callable(loss):
            raise ValueError(f"loss must be a function of outputs and targets, got {loss!r}")
        _validate.one_of("relative_to", relative_to, (None, *RELATIVE_TO))
        _validate.one_of("batchnorm", batchnorm, ("keep", "reestimate"))
        _validate.one_of("sampler", sampler, SAMPLERS)
        family(noise)
        if vectorize is not None:
            _validate.boolean("vectorize", vectorize)
        self.model, self.loss, self.feed = model, loss, feed or feed_batch
        self.relative_to, self.vectorize = relative_to, vectorize
        # A stream of its own: an optimizer with the same seed may have trained with the others.
        self.draw = Draw(noise=noise, seed=_validate.seed(seed), sampler=sampler, rank=stream)
        self.slots = _select(model, parameters)
        self.batches = Batches(data, batch_size=batch_size, model=model)
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self.batchnorm = batchnorm if any(m.track_running_stats for m in norms) else "absent"
        self.examples = 0

    def __enter__(self) -> Landscape:
        with ExitStack() as stack:
            stack.enter_context(clean_eval_mode(self.model))
            self._clean_weights = {p: local(p).clone() for p in self.slots}
            stack.callback(self.move, None)
            self.sizes = {
                p: relative_size(p, w, self.relative_to) for p, w in self._clean_weights.items()
            }
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
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def noise(self, number: int, *, signs_only: bool = False) -> dict[Tensor, Tensor]:
        """Draw number ``number`` of noise for all weights at b = 1, or only its signs."""
        draw, result = self.draw._replace(number=number), {}
        for p, slot in self.slots.items():
            weights, size = self._clean_weights[p], self.sizes[p]
            z = standard_noise(slot, draw, weights.device)
            z = z.to(torch.promote_types(weights.dtype, torch.float32))
            z = z.sign() if signs_only else z
            result[p] = z if size is None else z * size
        return result

    @torch.no_grad()
    def move(self, shift: Mapping[Tensor, Tensor] | None, factor: float = 1.0) -> None:
        """Set the weights to the clean ones plus ``factor * shift``; None restores them."""
        for p, clean in self._clean_weights.items():
            # Writing to .data is invisible to autograd: a backward pass may still be pending.
            weights = local(p.data)
            if shift is None:
                weights.copy_(clean)
            else:
                torch.add(clean, shift[p], alpha=factor, out=weights)
        reshard(self._clean_weights)

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
        return self._mean(values)

    def _loss_and_accuracy(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        loss = scalar(self.loss(half_to_float(outputs), targets))
        return loss, batch_accuracy(outputs, targets, counted_targets(self.loss, outputs, targets))

    def _mean(self, values: Sequence[tuple[Tensor, Tensor]]) -> LossAndAccuracy:
        """Mean over all batches."""
        losses, accuracies = map(list, zip(*values, strict=True))
        loss = weighted_mean(losses, self.weights[:, 0])
        return LossAndAccuracy(loss, weighted_mean(accuracies, self.weights[:, 1]))

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
        """Whether to evaluate several perturbed models at once, because that is faster."""
        if self.vectorize is not None or self.batchnorm == "reestimate":
            return bool(self.vectorize) and self.batchnorm != "reestimate"
        weights = sum(p.numel() for p in self.slots)
        return self.largest_batch * weights <= SMALL_WORK * len(self.slots)

    def _agree(self, vectorized: list[LossAndAccuracy], single: list[LossAndAccuracy]) -> bool:
        """Whether both show the same effect of the noise, larger than rounding."""
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
        """Results of one vectorized evaluation; empty if the model or the loss prevents it."""
        noises, fed = [self.noise(number) for number in numbers], _Fed(self.model, self.feed)
        names: dict[Tensor, str] = {p: name for name, p in fed.named_parameters()}
        weights = {}
        for p, clean in self._clean_weights.items():
            shift = b * torch.stack([sign * noise[p] for noise in noises for sign in signs])
            weights[names[p]] = (clean + shift).to(clean.dtype)

        def run(weights: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            return self._loss_and_accuracy(*functional_call(fed, weights, (batch,)))

        try:
            with self.batches.one_pass() as batches, warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be slow
                values = [vmap(lambda w, x=x: run(w, x))(weights) for x in batches]
        except Exception:  # noqa: BLE001 - a real error appears again in the evaluation one by one
            return []
        if len(values) != len(self.weights):  # the data changed; evaluate() reports it
            return []
        models = range(len(numbers) * len(signs))
        means = [self._mean([(loss[k], hits[k]) for loss, hits in values]) for k in models]
        return [means[k : k + len(signs)] for k in models[:: len(signs)]]


class _Fed(nn.Module):
    """A model that takes whole batches, and returns outputs and targets."""

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        super().__init__()
        self.model, self.feed = model, feed

    def forward(self, batch: Any) -> tuple[Any, Any]:
        return self.feed(self.model, batch)


def _select(model: nn.Module, parameters: Parameters | None) -> dict[Tensor, Slot]:
    """Slots of the parameters to perturb; the noise of one does not depend on the others."""
    named = dict(model.named_parameters())
    every = slots(list(named.values()))
    items: Iterable[Any] = every if parameters is None else parameters
    wanted = set()
    for item in [items] if isinstance(items, (str, Tensor)) else items:
        p = named.get(item) if isinstance(item, str) else item
        if not isinstance(p, Tensor) or p not in every:
            got = repr(item) if isinstance(item, str) else type(item).__name__
            raise ValueError(f"parameters must be of the model or their names, got {got}")
        wanted.add(p)
    if not wanted:
        raise ValueError("there are no parameters to perturb")
    selected = {p: slot for p, slot in every.items() if p in wanted}
    try:
        check_parameters(list(selected))
    except ValueError as error:
        raise ValueError(f"{error}; select others with parameters=...") from None
    return selected
