"""A classifier at perturbed weights: its outputs, draw by draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.special import entr

from neuvar import _validate
from neuvar._batches import (
    TARGET_KEYS,
    DataPasses,
    Feed,
    Generators,
    check_iterable,
    feed_batch,
    length,
    to_device,
)
from neuvar.batchnorm import norms_with_statistics, reestimate_batchnorm
from neuvar.measures.conversion import check_probabilities
from neuvar.measures.perturbed import PREDICTIONS, PerturbedModel
from neuvar.noise import Slot, Term, add_noise, standard_noise, whole_slot
from neuvar.optim.layout import is_sharded, local, relative_size, reshard
from neuvar.prediction.blocks import Block, Blocks, can_hold, count_rows, tensors_in
from neuvar.prediction.uncertainty import Sample, Summary, summarize

DRAWS_AT_ONCE = 32
"""How many perturbed models to evaluate in one vectorized call."""

LARGEST_ROUNDING = 0.03
"""Largest relative difference that counts as rounding, in half precision."""


def feed_inputs(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Outputs of a batch that may have no targets, and its targets or None."""
    if isinstance(batch, Tensor):
        return model(batch), None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return model(*batch), None
    if isinstance(batch, Mapping) and not any(key in batch for key in TARGET_KEYS):
        return model(**batch), None
    return feed_batch(model, batch)


class NoiseSpec(NamedTuple):
    """Scale and family of the noise of a parameter, and what b is relative to."""

    b: float
    noise: str
    relative_to: str | None = None


class NoisyClassifier(PerturbedModel):
    """A classifier to run at perturbed weights."""

    terms: dict[Tensor, NoiseSpec]
    targets: Tensor | None
    statistics: list[list[dict[str, Tensor]]] | None = None
    logits_sum_to_one: bool | None = None
    """Whether the first outputs look like probabilities, although they are read as logits."""

    def __init__(
        self,
        model: nn.Module,
        *,
        signs: tuple[int, ...],
        logits: bool,
        dropout: bool,
        vectorize: bool | None,
        feed: Feed | None,
        **weights: Any,
    ) -> None:
        super().__init__(model, stream=PREDICTIONS, **weights)
        self.logits = _validate.boolean("logits", logits)
        self.dropout = _validate.boolean("dropout", dropout)
        self.vectorize = None if vectorize is None else _validate.boolean("vectorize", vectorize)
        self.signs, self.feed = signs, feed or feed_inputs

    def _begin(self) -> None:
        for p, spec in self.terms.items():
            self.sizes[p] = relative_size(p, self._clean_weights[p], spec.relative_to)
        self.dropout_layers = list(filter(_has_dropout, self.model.modules()))
        if self.dropout and not self.dropout_layers:
            raise ValueError(
                "dropout=True needs a model with dropout modules, such as nn.Dropout, or nn.LSTM "
                "with dropout; dropout computed by torch.nn.functional cannot be switched on"
            )
        self._switch_dropout(on=self.dropout)
        self.norms = norms_with_statistics(self.model)

    def _switch_dropout(self, *, on: bool) -> None:
        for layer in self.dropout_layers:
            layer.training = on

    def reestimate(self, batches: Any, count: int) -> None:
        """Gather the statistics of batch normalization at each draw."""
        check_statistics_batches(batches)
        if not self.norms:
            return
        self.statistics = []
        device = next(iter(self.slots)).device
        for number in range(1, count + 1):
            for sign in self.signs:
                self.perturb(number, sign)
                with self._seeded(number, sign, batches):
                    moved = (to_device(batch, device) for batch in batches)
                    reestimate_batchnorm(self.model, moved, feed=self.feed)
                buffers = [norm.named_buffers(recurse=False) for norm in self.norms]
                self.statistics.append([{n: b.clone() for n, b in own} for own in buffers])

    def perturb(self, number: int, sign: int) -> None:
        """Set weights and statistics of batch normalization to those of a draw."""
        for p in self.terms:
            self._noisy(p, number, sign, out=local(p.data))
        reshard(self.slots)
        index = (number - 1) * len(self.signs) + self.signs.index(sign)
        if self.statistics is not None and index < len(self.statistics):
            for norm, buffers in zip(self.norms, self.statistics[index], strict=True):
                for name, buffer in buffers.items():
                    getattr(norm, name).copy_(buffer)

    def _noisy(self, p: Tensor, number: int, sign: int, out: Tensor) -> Tensor:
        clean, spec = self._clean_weights[p], self.terms[p]
        draw = self.draw._replace(number=number, sign=sign, noise=spec.noise)
        return add_noise(clean, Term(self.slots[p], draw, spec.b), out=out, size=self.sizes[p])

    def run(
        self, batches: DataPasses, count: int, progress: Callable[[float], None] | None
    ) -> Iterator[tuple[Summary, Tensor | None]]:
        """Summary and targets of each block of rows."""
        total, examples = length(batches.batches), 0

        def report(block: Block, share: float) -> None:
            if progress is not None and total:
                progress(((1 - share) * block.begin + share * block.end) / total)

        with batches.one_pass() as stream:
            blocks = Blocks(stream)
            for block in blocks:
                for summary, targets in self._summaries(blocks, block, count, report):
                    self._check_finite(summary[0]["probabilities"], examples)
                    examples += len(summary[0]["entropy"])
                    yield summary, targets
        if not examples:
            raise ValueError("data is empty; a prediction needs at least one example")

    def _summaries(
        self, blocks: Blocks, block: Block, count: int, report: Callable[[Block, float], None]
    ) -> Iterator[tuple[Summary, Tensor | None]]:
        """Summary and targets of a block, or of its parts if all draws of it are too large."""
        outputs = self._outputs(block.batches, count)
        first = next(outputs)
        rows, values = first.shape[2], count * first[0, 0].numel()
        blocks.set_room(values // max(1, rows))
        if rows > blocks.room and blocks.splits is not False:
            parts = blocks.split(block)
            blocks.splits = bool(parts) and self._rows_are_independent(block, parts[0], first)
            if blocks.splits:
                del first, outputs  # they have all rows
                for part in parts:
                    yield from self._summaries(blocks, part, count, report)
                return
        if can_hold(values):
            outputs = chain([first], outputs)
            samples = list(self._samples(outputs, count, partial(report, block)))
            yield summarize(lambda: samples), self.targets
            return
        del first, outputs
        earlier = iter((0, 1))

        def again() -> Iterator[Sample]:
            passes = next(earlier)
            outputs = self._outputs(block.batches, count)
            return self._samples(outputs, count, lambda s: report(block, (passes + s) / 2))

        yield summarize(again), self.targets

    def _samples(
        self, outputs: Iterable[Tensor], count: int, report: Callable[[float], None]
    ) -> Iterator[Sample]:
        """Probabilities and their entropy of each sample: means over the signs of a draw."""
        finished = 0
        for some in outputs:
            p = self._probabilities(some)
            yield p.mean(1), entr(p).sum(3).mean(1)
            finished += len(p)
            report(finished / count)

    def _rows_are_independent(self, block: Block, part: Block, first: Tensor) -> bool:
        """Whether the rows of a part have the same outputs without the rest of the block."""
        rows, alone = count_rows(block.batches[0]), count_rows(part.batches[0])
        if rows != first.shape[2] or alone is None:
            return False
        if self.dropout:  # the masks depend on the number of rows
            self._switch_dropout(on=False)
            first = self._one_draw(block.batches, 1)
        own = self._one_draw(part.batches, 1)
        self._switch_dropout(on=self.dropout)
        return _agree(own, first[:, :, :alone])

    def _outputs(self, block: list[Any], count: int) -> Iterator[Tensor]:
        """Outputs of all draws, one or more at a time, of shape (draws, signs, n, classes, ...)."""
        first, number = self._one_draw(block, 1), 2
        yield first
        if count > 1 and self._should_vectorize(block, first):
            step = max(1, DRAWS_AT_ONCE // len(self.signs))
            for low in range(1, count + 1, step):
                numbers = range(low, min(low + step, count + 1))
                together = self._at_once(block, numbers)
                if together is None or (low == 1 and not _agree(together[:1], first)):
                    self.vectorize = False
                    break
                yield together[1:] if low == 1 else together
                number = numbers[-1] + 1
        for n in range(number, count + 1):
            yield self._one_draw(block, n)

    def _one_draw(self, block: list[Any], number: int) -> Tensor:
        results, targets = [], []
        for sign in self.signs:
            self.perturb(number, sign)
            with self._seeded(number, sign):
                pairs = [self._fed(batch) for batch in block]
            parts = [checked_outputs(outputs) for outputs, _ in pairs]
            check_same_shape(parts)
            results.append(torch.cat(parts))
            targets = [t for _, t in pairs]
        whole = all(isinstance(t, Tensor) and t.ndim for t in targets)
        known = whole and sum(map(len, targets)) == len(results[0])
        self.targets = torch.cat(targets).cpu() if known else None
        return torch.stack(results).unsqueeze(0)

    def _check_finite(self, probabilities: Tensor, earlier: int) -> None:
        """Refuse outputs such as nan; ``earlier`` examples were checked before."""
        finite = probabilities.isfinite().flatten(1).all(1)
        if not finite.all():
            row = earlier + int(finite.logical_not().nonzero()[0])
            why = "check the data, and try a smaller b" if self.terms else "check the data"
            noise = " under the noise" if self.terms else ""
            raise ValueError(
                f"the model returns values that are not finite{noise}, first for example {row} "
                f"(counted from 0); {why}"
            )

    def _fed(self, batch: Any) -> tuple[Any, Any]:
        """Outputs and targets of a batch; the batch must stay the same for the other draws."""
        tensors = [tensor for tensor in tensors_in(batch) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        pair: Any = self.feed(self.model, batch)
        if [tensor._version for tensor in tensors] != versions:
            raise ValueError(
                "the model changes its inputs in place, so draws would see different data; copy "
                "them in its forward"
            )
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            got = type(pair).__name__
            raise ValueError(f"feed must return a pair (outputs, targets), got {got}")
        return pair[0], pair[1]

    def _seeded(self, number: int, sign: int, data: Any = None) -> AbstractContextManager[None]:
        """Random numbers, as of dropout, that depend on the seed and the draw only."""
        key = np.random.SeedSequence([self.draw.seed, number, sign + 1]).generate_state(1)
        device = next((p.device for p in self.slots), None)
        return Generators(device, data).seeded(int(key[0]))

    def _should_vectorize(self, block: list[Any], outputs: Tensor) -> bool:
        if self.dropout or self.statistics is not None:
            return False
        if self.vectorize is not None:
            return self.vectorize
        large = not can_hold(DRAWS_AT_ONCE * outputs[0, 0].numel())
        return not large and self.calls_dominate(outputs.shape[2] // len(block))

    def _at_once(self, block: list[Any], numbers: range) -> Tensor | None:
        """Outputs of several draws from one vectorized call; None if the model prevents it."""
        noises, weights = self._stacked(numbers), {}
        for p, spec in self.terms.items():
            clean = self._clean_weights[p]
            shift, size = spec.b * noises[p], self.sizes[p]
            shift = shift if size is None else shift * size
            both = [torch.add(clean, shift, alpha=sign).to(clean.dtype) for sign in self.signs]
            weights[p] = torch.stack(both, 1).flatten(0, 1)
        parts = self.evaluate_at_once(weights, block, lambda outputs, targets: outputs)
        if parts is None:
            return None
        outputs: Tensor = torch.cat(parts, 1).unflatten(0, (len(numbers), len(self.signs)))
        return outputs

    def _stacked(self, numbers: range) -> dict[Tensor, Tensor]:
        """Standard draws of each parameter, stacked."""
        if self.draw.sampler != "table" or any(map(is_sharded, self.slots)):
            return {p: self._draws(self.slots[p], p, numbers) for p in self.terms}
        # All parameters lie one after another along the table, so one slot holds the whole draw.
        last, result = max(self.slots.values(), key=lambda slot: slot.start), {}
        whole = whole_slot((last.start + math.prod(last.shape),))
        for noise in {spec.noise for spec in self.terms.values()}:
            params = [p for p, spec in self.terms.items() if spec.noise == noise]
            flat = self._draws(whole, params[0], numbers)
            for p in params:
                start = self.slots[p].start
                result[p] = flat[:, start : start + p.numel()].view(-1, *p.shape)
        return result

    def _draws(self, slot: Slot, p: Tensor, numbers: range) -> Tensor:
        draw, device = self.draw._replace(noise=self.terms[p].noise), local(p).device
        every = [standard_noise(slot, draw._replace(number=n), device) for n in numbers]
        return torch.stack(every)

    def _probabilities(self, outputs: Tensor) -> Tensor:
        """Probabilities in double precision; the classes are along axis 3."""
        if self.logits:
            if self.logits_sum_to_one is None:
                error = float((outputs[0].double().sum(2) - 1).abs().max())
                self.logits_sum_to_one = float(outputs[0].min()) >= 0 and error < 1e-4
            return outputs.double().softmax(3)
        check_probabilities("logits=False needs a model that returns", outputs, dim=3)
        return outputs.double()


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two computations of the same outputs differ by rounding only."""
    if one.shape != other.shape:
        return False
    finite = other.isfinite()  # logits of masked classes are -inf
    if not torch.equal(one[~finite], other[~finite]):
        return False
    one, other = one.masked_fill(~finite, 0), other.masked_fill(~finite, 0)
    tolerance = min(100 * torch.finfo(other.dtype).eps, LARGEST_ROUNDING) * float(other.abs().max())
    return float((one - other).abs().max()) <= tolerance


def check_same_shape(outputs: Sequence[Tensor]) -> None:
    """Refuse batches whose outputs differ in more than the number of examples."""
    shapes = {tuple(part.shape[1:]) for part in outputs}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise ValueError(
            f"the outputs of all batches must have the same shape, got (n, {str(one)[1:-1]}) and "
            f"(n, {str(other)[1:-1]})"
        )


def checked_outputs(outputs: Any) -> Tensor:
    """Refuse outputs that are not one number per class."""
    if (
        not isinstance(outputs, Tensor)
        or not outputs.is_floating_point()
        or outputs.ndim < 2
        or outputs.shape[1] < 2
    ):
        got: Any = type(outputs).__name__
        hint = (
            "if it returns them inside another object, pass a feed(model, batch) that returns them "
            "with the targets"
        )
        if isinstance(outputs, Tensor):
            got = f"{outputs.dtype} of shape {tuple(outputs.shape)}"
            if outputs.shape[1:] in ((), (1,)):
                hint = (
                    "if it returns one logit z of two classes, z of shape (n,), pass a feed(model, "
                    "batch) that returns torch.stack([0 * z, z], 1) and the targets"
                )
        raise ValueError(f"model must return numbers of shape (n, classes, ...), got {got}; {hint}")
    return outputs


def _has_dropout(module: nn.Module) -> bool:
    """Whether a module is one of torch's with dropout whose mode changes only the dropout.

    ``nn.TransformerEncoderLayer`` in evaluation mode may skip the dropout modules inside it.
    """
    if isinstance(module, (_DropoutNd, nn.TransformerEncoderLayer)):
        return True
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


def check_statistics_batches(batches: Any) -> None:
    """Refuse ``batchnorm`` unless it is batches that can be iterated once per draw."""
    accepted = "'keep', or a list or DataLoader of batches"
    check_iterable("batchnorm", batches, accepted)
    if length(batches) == 0:
        raise ValueError(f"batchnorm must be {accepted}, got an empty {type(batches).__name__}")
    parts = batches if isinstance(batches, (tuple, list)) else ()
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors and (isinstance(parts, tuple) or min(t.ndim for t in tensors) < 2):
        raise ValueError(
            f"batchnorm must be {accepted}, got a {type(parts).__name__} of tensors, which reads "
            "as inputs and labels; put one batch into a list, as in batchnorm=[(inputs, labels)]"
        )
