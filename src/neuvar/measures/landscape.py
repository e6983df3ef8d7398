"""The loss around a model's weights, which are put back to the bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from neuvar import _validate
from neuvar._batches import Batches, Feed, batch_length, feed_batch
from neuvar._validate import boolean, one_of
from neuvar.batchnorm import reestimate_batchnorm
from neuvar.measures.eval_mode import clean_eval_mode
from neuvar.measures.reading import (
    Reading,
    agree,
    at_least_single,
    average,
    counted,
    examples_in,
    hit_rate,
    scalar,
    weighted_mean,
    weights_of,
)
from neuvar.noise import SAMPLERS, Draw, Slot, family, standard_noise
from neuvar.optim.layout import check_parameters, local, reshard, slots

Loss = Callable[[Any, Any], Tensor]
"""Called as ``loss(outputs, targets)``; returns the mean over the batch."""

Shift = Mapping[Tensor, Tensor]
"""What is added to each parameter."""

SMALL_WORK = 20_000
"""Examples times weights for each tensor of weights, below which calls cost more than numbers."""

MEASURES, BOUNDS = -1, -2
"""Streams of noise that are nobody else's; those of optimizers are numbered from 0."""

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
        stream: int = MEASURES,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module, got {type(model).__name__}")
        if not callable(loss):
            raise ValueError(f"loss must be a function of outputs and targets, got {loss!r}")
        one_of("relative_to", relative_to, (None, "tensor", "filter"))
        one_of("batchnorm", batchnorm, ("keep", "reestimate"))
        one_of("sampler", sampler, tuple(SAMPLERS))
        seed = _validate.seed(seed)
        if vectorize is not None:
            boolean("vectorize", vectorize)
        self.model, self.loss, self.feed = model, loss, feed or feed_batch
        self.std, self.relative_to, self.vectorize = family(noise).std, relative_to, vectorize
        # A stream of its own: an optimizer with the same seed has trained with the others.
        self.kind = Draw(noise=noise, seed=seed, sampler=sampler, rank=stream)
        self.slots = _chosen(model, parameters)
        self.batches = Batches(data, batch_size=batch_size, model=model)
        has_norms = any(
            isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules()
        )
        self.batchnorm = batchnorm if has_norms else "absent"
        self.examples = 0
        self._open = ExitStack()
        self._centre: dict[Tensor, Tensor] = {}

    def __enter__(self) -> Landscape:
        with ExitStack() as stack:
            stack.enter_context(clean_eval_mode(self.model))
            # Also where a loss is differentiated, the weights themselves are only read.
            self._centre = {p: local(p).clone() for p in self.slots}
            stack.callback(self.move, None)
            self.scale = {p: self._relative(c) for p, c in self._centre.items()}
            self.clean = self.read()
            if not math.isfinite(self.clean.loss):
                raise ValueError(f"the loss at the model's own weights is {self.clean.loss}")
            self._refuse_changing_data()
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
            z = z.sign() if signs_only else z
            found[p] = z if self.relative_to is None else z * self.scale[p]
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
        sizes, losses, hits, weights, known = [], [], [], [], self.examples
        with self.batches.one_pass() as batches:
            for batch in batches:
                outputs, targets = self.feed(self.model, batch)
                sizes.append(batch_length(outputs, targets))
                if not known:  # in the first pass alone: it makes a device wait
                    self.examples += examples_in(self.loss, outputs, targets)
                losses.append(scalar(self.loss(at_least_single(outputs), targets)))
                hits.append(hit_rate(outputs, targets, counted(self.loss, outputs, targets)))
                weights.append(weights_of(self.loss, outputs, targets))
        self.batches.check_count(sum(sizes))
        if not self.examples:
            raise ValueError("data has no target that counts: the loss leaves all of them out")
        self.batch_sizes, self.precision = sizes, torch.finfo(losses[0].dtype).eps
        self.weights = torch.stack(weights).cpu()
        return Reading(*_means(losses, hits, self.weights))

    @property
    def rounding(self) -> float:
        """By how much arithmetic may be off in a loss."""
        return self.precision * abs(self.clean.loss)

    def _refuse_changing_data(self) -> None:
        """Look twice at data that come from somewhere else: persistent workers, for example."""
        if self.batches.is_pair:
            return
        again = self.read().loss
        if abs(again - self.clean.loss) > 1e-4 * abs(self.clean.loss) + 1e3 * self.rounding:
            raise ValueError(
                "data must be the same in every pass, but the loss at the same weights was "
                f"{self.clean.loss:.6g} and then {again:.6g}"
            )

    def readings(self, b: float, numbers: Iterable[int], signs: Sequence[int]) -> list[Reading]:
        """Mean reading over the given signs of each draw of noise."""
        numbers = list(numbers)
        if b == 0:
            return [self.clean] * len(numbers)
        first = [self._one_by_one(b, number, signs) for number in numbers[:1]]
        found = first
        if len(numbers) > 1 and self._calls_dominate():
            step = max(1, DRAWS_AT_ONCE // len(signs))
            together: list[list[Reading]] = []
            for low in range(0, len(numbers), step):
                part = self._together(b, numbers[low : low + step], signs)
                if part is None or not (together or self._same(part[0], first[0])):
                    self.vectorize = False  # it was computed both ways, and they differ
                    break
                together += part
            found = together or first
        found += [self._one_by_one(b, n, signs) for n in numbers[len(found) :]]
        return [average(pair) for pair in found]

    def _same(self, together: list[Reading], alone: list[Reading]) -> bool:
        # Sign by sign: in their mean the effect of small noise all but cancels.
        pairs = zip(together, alone, strict=True)
        return all(agree(one, other, self.clean, self.rounding) for one, other in pairs)

    def _one_by_one(self, b: float, number: int, signs: Sequence[int]) -> list[Reading]:
        direction, found = self.direction(number), []
        for sign in signs:
            self.move(direction, sign * b)
            found.append(self.read())
        self.move(None)
        return found

    def _calls_dominate(self) -> bool:
        """Whether evaluating several perturbed models at once is faster than one by one."""
        if self.vectorize is not None or self.batchnorm == "reestimate":
            return bool(self.vectorize) and self.batchnorm != "reestimate"
        weights = sum(p.numel() for p in self.slots)
        return max(self.batch_sizes) * weights <= SMALL_WORK * len(self.slots)

    @torch.no_grad()
    def _together(
        self, b: float, numbers: list[int], signs: Sequence[int]
    ) -> list[list[Reading]] | None:
        """Readings from one batched evaluation, or None if the model or the loss refuses it."""
        directions = [self.direction(number) for number in numbers]
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        weights = {}
        for p, centre in self._centre.items():
            noise = b * torch.stack([direction[p] for direction in directions])
            noise = torch.stack([sign * noise for sign in signs], dim=1).flatten(0, 1)
            weights[names[p]] = (centre + noise).to(centre.dtype)
        losses, hits = [], []

        def run(model_weights: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            def call(*inputs: Any, **named: Any) -> Any:
                return functional_call(self.model, model_weights, inputs, named)

            outputs, targets = self.feed(_Called(call), batch)
            loss = scalar(self.loss(at_least_single(outputs), targets))
            return loss, hit_rate(outputs, targets, counted(self.loss, outputs, targets))

        try:
            with self.batches.one_pass() as batches, warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be slow
                for batch in batches:
                    found = vmap(lambda w, batch=batch: run(w, batch))(weights)
                    losses.append(found[0])
                    hits.append(found[1])
        except Exception:  # noqa: BLE001 - one by one, what is wrong for good comes to light again
            return None
        if len(losses) != len(self.weights):  # data that change, which reading them finds
            return None
        part = [
            Reading(*_means([x[k] for x in losses], [x[k] for x in hits], self.weights))
            for k in range(len(numbers) * len(signs))
        ]
        s = len(signs)
        return [part[k : k + s] for k in range(0, len(part), s)]


def _means(losses: list[Tensor], hits: list[Tensor], weights: Tensor) -> tuple[float, float]:
    """Loss and accuracy over all batches."""
    return weighted_mean(losses, weights[:, 0]), weighted_mean(hits, weights[:, 1])


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
        wanted = list(dict.fromkeys(wanted))
    if not wanted:
        raise ValueError("there are no parameters to perturb")
    try:
        check_parameters(wanted)
    except ValueError as error:
        raise ValueError(f"{error}; choose others by parameters=...") from None
    return {p: every[p] for p in every if p in set(wanted)}
