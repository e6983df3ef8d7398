"""The loss around a model's weights, which are put back to the bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar.guard import reestimate_batchnorm
from neuvar.measures.batches import Batches, Feed, Generators, batch_length, feed_batch
from neuvar.measures.checks import one_of, whole_number
from neuvar.measures.reading import (
    Reading,
    agree,
    average,
    hit_rate,
    scalar,
    weighted_mean,
)
from neuvar.noise import SAMPLERS, Draw, Slot, family, standard_noise
from neuvar.optim.layout import check_parameters, local, reshard, slots
from neuvar.optim.weights import held_clean

Loss = Callable[[Any, Any], Tensor]
"""Called as ``loss(outputs, targets)``; returns the mean over the batch."""

Shift = Mapping[Tensor, Tensor]
"""What is added to each parameter."""

SMALL_WORK = 20_000
"""Examples times weights for each tensor of weights, below which calls cost more than numbers."""

DRAWS_AT_ONCE = 16
"""How many perturbed models are evaluated at once where that is faster."""


class Options(TypedDict, total=False):
    """What is perturbed, how, and how it is evaluated: options common to all measures."""

    noise: str
    relative_to: str | None
    parameters: Iterable[Tensor] | Iterable[str] | None
    seed: int
    sampler: str
    batchnorm: str
    feed: Feed | None
    batch_size: int
    vectorize: bool | None


class Landscape:
    """A model, a loss and data, open for looking at other weights than the model's own.

    Inside ``with`` the model is in evaluation mode and free of an optimizer's noise; afterwards
    weights, modes, buffers, gradients and generators are as they were found.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        noise: str = "gaussian",
        relative_to: str | None = None,
        parameters: Iterable[Tensor] | Iterable[str] | None = None,
        seed: int = 0,
        sampler: str = "fresh",
        batchnorm: str = "keep",
        feed: Feed | None = None,
        batch_size: int = 1024,
        vectorize: bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module, got {type(model).__name__}")
        if not callable(loss):
            raise ValueError(f"loss must be a function of outputs and targets, got {loss!r}")
        one_of("relative_to", relative_to, (None, "tensor", "filter"))
        one_of("batchnorm", batchnorm, ("keep", "reestimate"))
        one_of("sampler", sampler, tuple(SAMPLERS))
        whole_number("seed", seed)
        self.model, self.loss, self.feed = model, loss, feed or feed_batch
        self.std, self.relative_to, self.vectorize = family(noise).std, relative_to, vectorize
        self.kind = Draw(noise=noise, seed=seed, sampler=sampler)
        self.slots = _chosen(model, parameters)
        self.batches = Batches(data, batch_size=batch_size, model=model)
        has_norms = any(
            isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules()
        )
        self.batchnorm = batchnorm if has_norms else "absent"
        self._open = ExitStack()
        self._centre: dict[Tensor, Tensor] = {}

    def __enter__(self) -> Landscape:
        with ExitStack() as stack:
            stack.enter_context(_as_found(self.model))
            # Also where a loss is differentiated, the weights themselves are only read.
            self._centre = {p: local(p).clone() for p in self.slots}
            stack.callback(self.move, None)
            self.scale = {p: self._relative(c) for p, c in self._centre.items()}
            self.clean = self.read()
            if not math.isfinite(self.clean.loss):
                raise ValueError(f"the loss at the model's own weights is {self.clean.loss}")
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _relative(self, weights: Tensor) -> Tensor:
        """What b is multiplied with: 1, or the root mean square of a tensor or of its filters."""
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        if self.relative_to is None:
            return weights.new_ones(())
        if self.relative_to == "filter" and weights.ndim > 1:
            return weights.flatten(1).square().mean(1).sqrt().view(-1, *[1] * (weights.ndim - 1))
        return weights.square().mean().sqrt()

    def direction(self, number: int, *, signs_only: bool = False) -> dict[Tensor, Tensor]:
        """One draw of noise for all weights, at b = 1, or only its signs."""
        draw, found = self.kind._replace(number=number), {}
        for p, slot in self.slots.items():
            z = standard_noise(slot, draw, local(p).device).to(self.scale[p].dtype)
            found[p] = (z.sign() if signs_only else z) * self.scale[p]
        return found

    @torch.no_grad()
    def move(self, shift: Shift | None, factor: float = 1.0) -> None:
        """Set the model's weights to its own plus a shift; None stands for its own."""
        for p, centre in self._centre.items():
            # Writing to .data leaves no trace in autograd: a backward pass may still be to come.
            live = local(p.data)
            if shift is None:
                live.copy_(centre)
            else:
                torch.add(centre, shift[p], alpha=factor, out=live)
        reshard(self._centre)

    @torch.no_grad()
    def read(self) -> Reading:
        """Loss and accuracy over all data at the weights as they stand."""
        if self.batchnorm == "reestimate":
            with self.batches.one_pass() as batches:
                reestimate_batchnorm(self.model, batches, feed=self.feed)
        sizes, losses, hits = [], [], []
        with self.batches.one_pass() as batches:
            for batch in batches:
                outputs, targets = self.feed(self.model, batch)
                sizes.append(batch_length(outputs, targets))
                losses.append(scalar(self.loss(outputs, targets)))
                hits.append(hit_rate(outputs, targets))
        self.batches.saw(sum(sizes))
        self.batch_sizes = sizes
        return Reading(weighted_mean(losses, sizes), weighted_mean(hits, sizes))

    def readings(self, b: float, numbers: Iterable[int], signs: Sequence[int]) -> list[Reading]:
        """Mean reading over the given signs of each draw of noise."""
        numbers = list(numbers)
        if b == 0:
            return [self.clean] * len(numbers)
        found = [self._one_by_one(b, number, signs) for number in numbers[:1]]
        if len(numbers) > 1 and self._calls_dominate():
            step = max(1, DRAWS_AT_ONCE // len(signs))
            together: list[Reading] = []
            for low in range(0, len(numbers), step):
                part = self._together(b, numbers[low : low + step], signs)
                if part is None or not (together or agree(part[0], found[0], self.clean)):
                    break
                together += part
            # The first was computed both ways; the models that cannot be batched differ there.
            found += together[1:]
        return found + [self._one_by_one(b, n, signs) for n in numbers[len(found) :]]

    def _one_by_one(self, b: float, number: int, signs: Sequence[int]) -> Reading:
        direction, found = self.direction(number), []
        for sign in signs:
            self.move(direction, sign * b)
            found.append(self.read())
        self.move(None)
        return average(found)

    def _calls_dominate(self) -> bool:
        """Whether evaluating several perturbed models at once is faster than one by one."""
        if self.vectorize is not None or self.batchnorm == "reestimate":
            return bool(self.vectorize) and self.batchnorm != "reestimate"
        weights = sum(p.numel() for p in self.slots)
        return max(self.batch_sizes) * weights <= SMALL_WORK * len(self.slots)

    @torch.no_grad()
    def _together(self, b: float, numbers: list[int], signs: Sequence[int]) -> list[Reading] | None:
        """Readings from one batched evaluation, or None if the model or the loss refuses it."""
        directions = [self.direction(number) for number in numbers]
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        weights = {
            names[p]: torch.stack([c + sign * b * d[p] for d in directions for sign in signs])
            for p, c in self._centre.items()
        }
        sizes, losses, hits = [], [], []

        def run(model_weights: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            def call(*inputs: Any, **named: Any) -> Any:
                return functional_call(self.model, model_weights, inputs, named)

            outputs, targets = self.feed(_Called(call), batch)
            sizes.append(batch_length(outputs, targets))
            return scalar(self.loss(outputs, targets)), hit_rate(outputs, targets)

        try:
            with self.batches.one_pass() as batches, warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be slow
                for batch in batches:
                    found = vmap(lambda w, batch=batch: run(w, batch))(weights)
                    losses.append(found[0])
                    hits.append(found[1])
        except (RuntimeError, ValueError, TypeError, AttributeError, Warning):
            return None  # one by one, what is wrong for good comes to light again
        part = [
            Reading(
                weighted_mean([x[k] for x in losses], sizes),
                weighted_mean([x[k] for x in hits], sizes),
            )
            for k in range(len(numbers) * len(signs))
        ]
        s = len(signs)
        return [average(part[k : k + s]) for k in range(0, len(part), s)]


class _Called(nn.Module):
    """Stands for the model where only calling it is meant."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)


def _chosen(
    model: nn.Module, parameters: Iterable[Tensor] | Iterable[str] | None
) -> dict[Tensor, Slot]:
    """Places of the parameters to perturb; the noise of one does not depend on the others."""
    named = dict(model.named_parameters())
    every = slots(list(named.values()))
    if parameters is None:
        wanted = list(every)
    else:
        if isinstance(parameters, (str, Tensor)):
            parameters = [parameters]  # type: ignore[assignment]
        wanted = []
        for item in parameters:
            p = named.get(item) if isinstance(item, str) else item
            if not isinstance(p, Tensor) or p not in every:
                what = repr(item) if isinstance(item, str) else type(item).__name__
                raise ValueError(f"parameters must be of the model or their names, got {what}")
            wanted.append(p)
    if not wanted:
        raise ValueError("there are no parameters to perturb")
    check_parameters(wanted)
    return {p: every[p] for p in every if p in set(wanted)}


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and clean weights; then modes, buffers and generators as before."""
    # Evaluation may be random too, in dropout that is always on for example.
    generators = Generators(next((p.device for p in model.parameters()), None))
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with held_clean(model.parameters()):
        try:
            model.eval()
            yield
        finally:
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                buffer.data.copy_(content)
            for module, mode in modes:
                module.training = mode
            generators.restore()
