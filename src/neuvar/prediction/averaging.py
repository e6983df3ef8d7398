"""Predictions averaged over weight noise: a function, and a module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from neuvar import _validate
from neuvar._batches import DataPasses, Feed, refuse_two_batches
from neuvar.measures.conversion import check_probabilities
from neuvar.measures.landscape import lists_options
from neuvar.measures.loss_and_accuracy import half_to_float
from neuvar.measures.perturbed import PREDICTIONS, Parameters, check_draws, select_parameters
from neuvar.noise import Draw, Term, standard_noise, whole_slot
from neuvar.optim.forward import noise_owners, not_compiled
from neuvar.optim.layout import relative_size
from neuvar.optim.noisy_parameters import NoisyParameters
from neuvar.prediction.noisy_classifier import (
    NoisyClassifier,
    check_same_shape,
    checked_outputs,
)
from neuvar.prediction.trained_noise import NoiseOptions, TrainedWith, noise_terms
from neuvar.prediction.uncertainty import Prediction, joined


def predict(
    model: nn.Module,
    data: Any,
    *,
    b: float | None = None,
    draws: int = 32,
    noise: str | None = None,
    optimizer: TrainedWith = None,
    parameters: Parameters | None = None,
    relative_to: str | None = None,
    antithetic: bool = True,
    seed: int = 0,
    sampler: str = "table",
    batchnorm: Any = "keep",
    dropout: bool = False,
    logits: bool = True,
    feed: Feed | None = None,
    batch_size: int = 1024,
    vectorize: bool | None = None,
    confidence: float = 0.95,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    r"""Average the predicted probabilities over weight noise.

    .. math:: \bar p(x) = \frac1K \sum_{k=1}^K \mathrm{softmax} f(x; \theta + \epsilon_k)

    By default the noise is that of the optimizer that trained the model. The same seed gives the
    same bits. The data are read once. The model is evaluated in evaluation mode; its weights,
    modes, buffers and the global generators are restored, also after an error or Ctrl-C.

    The memory does not grow with the number of draws: two copies of the weights, twice the result,
    and about 200 MB for a block of data. Large batches are split by rows. If a batch cannot be
    split, or one row has too many outputs, as in segmentation, each draw is evaluated twice. A
    batch can be split if it has only tensors with one row per example, and the outputs of a row do
    not depend on the other rows.

    References:
        Depeweg et al. 2018, Decomposition of uncertainty in Bayesian deep learning;
        Gal & Ghahramani 2016, Dropout as a Bayesian approximation (``dropout=True``).

    Args:
        model: Any classifier.
        data: A tensor of inputs, a pair of tensors (inputs, targets), a ``DataLoader``, or an
            iterable of batches: tensors, tuples whose last of several items is the target, or
            dicts, with or without a key such as ``"labels"``. A list of two tensors reads as
            inputs and targets, never as two batches.
        b: Scale of the noise on all ``parameters``. By default that of the optimizer, which may
            differ between parameter groups.
        draws: Number of perturbed models, K; even if ``antithetic``.
        noise: ``"gaussian"``, ``"laplace"`` or ``"uniform"``; by default the optimizer's family,
            or ``"gaussian"`` if ``b`` is given.
        optimizer: Where to take the noise from: a neuvar optimizer or its state dict, as in a
            checkpoint. By default, each parameter has the noise of the optimizer that trained it
            last, if this optimizer still exists. A state dict has no names of parameters, unless
            the optimizer was created from named ones. Without names, it must have all parameters of
            the model, or all trained ones, with the same noise for all or with the groups of
            :func:`neuvar.optim.rounding_parameters`.
        parameters: Which to perturb, as tensors or by name; all by default.
        relative_to: With ``b``, whether it is relative to the root mean square of each
            ``"tensor"`` or ``"filter"``, or to each ``"weight"``.
        antithetic: Use each draw as ε and −ε, which cancels the odd part of their effect.
        seed: Of all draws.
        sampler: ``"table"`` or ``"fresh"``, as in the optimizers.
        batchnorm: ``"keep"`` its statistics, or batches on which to re-estimate them at each draw:
            a list or ``DataLoader`` of training batches, of the same form as those of ``data``.
        dropout: Leave dropout on (Monte Carlo dropout); with ``b=0`` without weight noise. This
            means torch's dropout layers, and dropout in its recurrent layers, attention and
            transformers. Dropout that a module computes with ``torch.nn.functional`` stays off.
        logits: Whether the model returns logits or probabilities, of shape (n, classes, ...).
        feed: ``feed(model, batch)`` returns outputs and targets of other batches.
        batch_size: Of tensors.
        vectorize: Evaluate up to 32 perturbed models at once, with as many copies of the weights.
            By default if it is faster: for small networks and batches.
        confidence: Confidence level of :meth:`Prediction.interval`.
        progress: Called with the finished fraction, if the number of batches is known.

    >>> from neuvar import NVRMSGD
    >>> model = nn.Linear(4, 3)
    >>> optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    >>> prediction = predict(model, torch.ones(5, 4))
    >>> prediction.probabilities.shape, prediction.draws
    (torch.Size([5, 3]), 32)
    >>> bool((prediction.mutual_information > 0).all())
    True
    """
    signs = check_draws(draws, antithetic, samples=1)
    _validate.probability("confidence", confidence)
    refuse_two_batches(data)
    unlabelled = isinstance(data, Tensor)
    if unlabelled and data.ndim:
        data = (data, torch.zeros(len(data), dtype=torch.int64))
    noisy = NoisyClassifier(
        model, signs=signs, logits=logits, dropout=dropout, vectorize=vectorize, feed=feed,
        parameters=parameters, seed=seed, sampler=sampler,
    )  # fmt: skip
    noisy.terms = noise_terms(model, noisy.slots, b, noise, optimizer, relative_to)
    batches = DataPasses(data, batch_size=batch_size, model=model, many_times=False)
    samples = draws // len(signs)
    count = samples if noisy.terms or dropout else 1
    with noisy, torch.no_grad():
        if not (isinstance(batchnorm, str) and batchnorm == "keep"):
            noisy.reestimate(batchnorm, count)
        blocks = list(noisy.run(batches, count, progress))
    parts, targets = zip(*blocks, strict=True)
    labels = None if unlabelled or any(t is None for t in targets) else torch.cat(targets)
    check_same_shape([part[0]["probabilities"] for part in parts])
    value, stderr, bias = (joined([part[kind] for part in parts]) for kind in range(3))
    if noisy.logits_sum_to_one:
        message = "the model seems to return probabilities, which were read as logits: pass "
        warnings.warn(f"{message}logits=False", stacklevel=2)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    specs = {names[p]: spec for p, spec in noisy.terms.items()}
    return Prediction(
        **value, targets=labels, draws=draws, noise=specs, stderr=stderr, bias=bias,
        samples=samples, confidence=confidence,
    )  # fmt: skip


def _log(p: Tensor) -> Tensor:
    """Logarithm, with -inf and a gradient of 0 at 0."""
    zero = p == 0
    return p.masked_fill(zero, 1).log().masked_fill(zero, -math.inf)


class AveragedPredictor(nn.Module):
    r"""A model that averages its predictions over weight noise, and returns log-probabilities.

    .. math:: \log \frac1K \sum_{k=1}^K \mathrm{softmax} f(x; \theta + \epsilon_k)

    You can use the outputs as logits: ``cross_entropy``, ``argmax`` and ``softmax`` give the same
    as for the mean probabilities. The draws are those of :func:`predict` with the same seed, and
    the same for every input. The module holds the model itself, not a copy, and does not change its
    weights; gradients flow to them. Like :func:`predict`, it starts from the clean weights, even if
    an optimizer that was created from parameters has noise on them. The statistics of batch
    normalization are kept: to re-estimate them for each draw, use :func:`predict`. Outputs of half
    precision are averaged and returned in single precision. ``torch.export`` supports the module
    with ``strict=False``, its default; the export contains a noise table of 16 MiB, whatever the
    number of draws. Call ``eval()`` before you use it.

    Args:
        model: Any classifier.
        draws: Number of perturbed models; each forward pass costs that many.
        parameters: Which to perturb, as tensors or by name; all by default.
        antithetic: Use each draw as ε and −ε.
        seed: Of all draws.
        logits: Whether the model returns logits or probabilities.
        options: ``b``, ``noise``, ``optimizer`` and ``relative_to``, as for :func:`predict`: the
            noise of the optimizer that trained the model by default.

    >>> model = nn.Linear(4, 3)
    >>> predictor = AveragedPredictor(model, b=0.1).eval()
    >>> outputs = predictor(torch.ones(5, 4))
    >>> torch.allclose(outputs.exp().sum(1), torch.ones(5))
    True
    """

    @lists_options(NoiseOptions, predict)
    def __init__(
        self,
        model: nn.Module,
        *,
        draws: int = 32,
        parameters: Parameters | None = None,
        antithetic: bool = True,
        seed: int = 0,
        logits: bool = True,
        **options: Unpack[NoiseOptions],
    ) -> None:
        super().__init__()
        slots = select_parameters(model, parameters)
        self.model = model
        self.signs = check_draws(draws, antithetic, samples=1)
        self.draws = draws
        self.logits = _validate.boolean("logits", logits)
        self.seed = _validate.seed(seed)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        draw = Draw(seed=self.seed, sampler="table", rank=PREDICTIONS)
        self.terms = {}
        for p, spec in noise_terms(model, slots, **options).items():
            own = draw._replace(noise=spec.noise, relative_to=spec.relative_to or "")
            self.terms[names[p]] = Term(slots[p], own, spec.b)
        self._prepare_export()

    def _prepare_export(self) -> None:
        """Keep the parameters and make the noise tables, which ``torch.export`` cannot compute."""
        self._live = list(self.model.parameters())
        devices = {p.device for p in self.model.parameters()} - {torch.device("meta")}
        for term in self.terms.values():
            for device in devices:
                standard_noise(whole_slot((1,)), term.draw, device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._prepare_export()  # the device may be another one
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare_export()  # the process may be another one

    def extra_repr(self) -> str:
        return f"draws={self.draws}, antithetic={len(self.signs) == 2}, seed={self.seed}"

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Logarithm of the mean probabilities."""
        total: Tensor | None = None
        clean = self._clean_weights()
        for number in range(1, self.draws // len(self.signs) + 1):
            for sign in self.signs:
                weights = self._weights(clean, number, sign)
                outputs = functional_call(self.model, weights, inputs, options)
                values = half_to_float(checked_outputs(outputs))
                if not (self.logits or torch.compiler.is_compiling()):
                    check_probabilities("logits=False needs a model that returns", values, dim=1)
                terms = values.log_softmax(1) if self.logits else values
                total = terms if total is None else self._add(total, terms)
        assert total is not None
        return (total if self.logits else _log(total)) - math.log(self.draws)

    def _add(self, total: Tensor, terms: Tensor) -> Tensor:
        """Add probabilities, or their logarithms: then the result is the logarithm of the sum."""
        if not self.logits:
            return total + terms
        # Where both are -inf, as for a class that is masked, the gradient would be nan.
        masked = torch.maximum(total, terms).isneginf()
        both = torch.logaddexp(total.masked_fill(masked, 0), terms.masked_fill(masked, 0))
        return both.masked_fill(masked, -math.inf)

    @not_compiled()
    def _clean_weights(self) -> dict[str, Tensor]:
        """Clean weights, by name, of parameters that an optimizer has perturbed in place."""
        params = self._live if torch.compiler.is_compiling() else list(self.model.parameters())
        owners = [owner for owner in noise_owners(params) if isinstance(owner, NoisyParameters)]
        noisy = {p: owner for owner in reversed(owners) for p in owner.carried}
        if not torch.compiler.is_compiling():
            # The second term is 0; it lets gradients flow to the parameter.
            return {
                name: noisy[p].peek(p) + (p - p.detach())
                for name, p in self.model.named_parameters()
                if p in noisy
            }
        if not noisy.keys().isdisjoint(params):
            raise ValueError(
                "the weights have the noise of an optimizer that was created from parameters, and "
                "torch.export would store it; call optimizer.eval() before"
            )
        return {}

    def _weights(self, clean: dict[str, Tensor], number: int, sign: int) -> dict[str, Tensor]:
        """Perturbed weights by name; ``clean`` replaces parameters that have noise in place."""
        weights = dict(clean)
        for name, own in self.model.named_parameters():
            if (term := self.terms.get(name)) is not None:
                p, draw = clean.get(name, own), term.draw._replace(number=number)
                z = standard_noise(term.slot, draw, p.device)
                size = relative_size(p, p.detach(), draw.relative_to)
                z = z if size is None else z * size
                weights[name] = torch.add(p, z.to(p.dtype), alpha=sign * term.b)
        return weights
