"""A model whose weights are moved by noise and restored to the bit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from neuvar import _validate
from neuvar._batches import Feed
from neuvar._eval_mode import clean_eval_mode
from neuvar.noise import RELATIVE_TO, SAMPLERS, Draw, Slot, family, standard_noise
from neuvar.optim.layout import check_parameters, local, relative_size, reshard, slots

Parameters = Iterable[Tensor] | Iterable[str]
"""Parameters of a model, as tensors or by name."""

MEASURES, BOUNDS, PREDICTIONS = -1, -2, -3
"""Noise streams of measures, bounds and predictions; optimizers use streams from 0."""

SMALL_WORK = 20_000
"""Vectorize if examples × weights per tensor is at most this: call overhead dominates."""


class PerturbedModel:
    """A model to evaluate at perturbed weights.

    Inside ``with`` the model is in evaluation mode and free of an optimizer's noise; afterwards
    weights, modes, buffers, gradients and generators are as before. Subclasses set ``feed``.
    """

    feed: Feed

    def __init__(
        self,
        model: nn.Module,
        *,
        noise: str = "gaussian",
        relative_to: str | None = None,
        parameters: Parameters | None = None,
        seed: int = 0,
        sampler: str = "fresh",
        stream: int = MEASURES,
    ) -> None:
        self.slots = select_parameters(model, parameters)
        _validate.one_of("relative_to", relative_to, (None, *RELATIVE_TO))
        _validate.one_of("sampler", sampler, SAMPLERS)
        family(noise)
        self.model, self.relative_to = model, relative_to
        # A separate stream: an optimizer with the same seed may have trained with the same noise.
        self.draw = Draw(noise=noise, seed=_validate.seed(seed), sampler=sampler, rank=stream)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(clean_eval_mode(self.model))
            self._clean_weights = {p: local(p).clone() for p in self.slots}
            # Writing to .data is invisible to autograd: a backward pass may still be pending.
            weights = [local(p.data) for p in self.slots]
            # One call of a C function, which no signal interrupts.
            self._restore: Callable[[], None] = functools.partial(
                torch._foreach_copy_, weights, list(self._clean_weights.values())
            )
            stack.callback(reshard, self.slots)
            stack.callback(self._restore)
            self.sizes = {
                p: relative_size(p, w, self.relative_to) for p, w in self._clean_weights.items()
            }
            self._begin()
            self._stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Called at the clean weights when the block begins."""

    def __exit__(self, *error: object) -> None:
        try:
            self._restore()
        finally:
            self._stack.close()

    def noise(self, number: int, *, signs_only: bool = False) -> dict[Tensor, Tensor]:
        """Noise of all weights at b = 1 in draw ``number``, or only its signs."""
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
        if shift is None:
            self._restore()
        else:
            for p, clean in self._clean_weights.items():
                torch.add(clean, shift[p], alpha=factor, out=local(p.data))
        reshard(self._clean_weights)

    def calls_dominate(self, examples: int) -> bool:
        """Whether call overhead exceeds arithmetic, so that several models at once are faster."""
        weights = sum(p.numel() for p in self.slots)
        return examples * weights <= SMALL_WORK * len(self.slots)

    def evaluate_at_once(
        self,
        weights: Mapping[Tensor, Tensor],
        batches: Iterable[Any],
        read: Callable[[Any, Any], Any],
    ) -> list[Any] | None:
        """Result of ``read(outputs, targets)`` for each batch, at several weights in one call.

        ``weights`` has the values of each parameter along a first axis, which the results have too.
        None if the model or ``read`` cannot be vectorized.
        """
        fed = _FedModel(self.model, self.feed)
        names: dict[Tensor, str] = {p: name for name, p in fed.named_parameters()}
        named = {names[p]: values for p, values in weights.items()}

        def run(weights: dict[str, Tensor], batch: Any) -> Any:
            return read(*functional_call(fed, weights, (batch,)))

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be slow
                return [vmap(lambda w, x=x: run(w, x))(named) for x in batches]
        except Exception:  # noqa: BLE001 - one-by-one evaluation raises a real error again
            return None


class _FedModel(nn.Module):
    """Module whose forward pass feeds a whole batch and returns outputs and targets."""

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        super().__init__()
        self.model, self.feed = model, feed

    def forward(self, batch: Any) -> tuple[Any, Any]:
        return self.feed(self.model, batch)


def check_draws(draws: int, antithetic: bool, *, samples: int) -> tuple[int, ...]:
    """Signs with which to use each draw of noise; refuses fewer than ``samples`` samples."""
    signs = (1, -1) if _validate.boolean("antithetic", antithetic) else (1,)
    if _validate.integer("draws", draws, low=samples * len(signs)) % len(signs):
        raise ValueError(f"draws must be even, since they come in pairs, got {draws}")
    return signs


def select_parameters(model: nn.Module, parameters: Parameters | None) -> dict[Tensor, Slot]:
    """Slots of the parameters to perturb, the same whichever others are selected."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    all_slots = slots(list(named.values()))
    items: Iterable[Any] = all_slots if parameters is None else parameters
    wanted = set()
    for item in [items] if isinstance(items, (str, Tensor)) else items:
        p = named.get(item) if isinstance(item, str) else item
        if not isinstance(p, Tensor) or p not in all_slots:
            got = repr(item) if isinstance(item, str) else type(item).__name__
            raise ValueError(f"parameters must be parameters of the model or names, got {got}")
        wanted.add(p)
    if not wanted:
        raise ValueError("there are no parameters to perturb")
    selected = {p: slot for p, slot in all_slots.items() if p in wanted}
    try:
        check_parameters(list(selected))
    except ValueError as error:
        raise ValueError(f"{error}; select others with parameters=...") from None
    return selected
