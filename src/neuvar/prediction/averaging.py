"""Predictions averaged over weight noise: a function, and a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from neuvar import _validate
from neuvar._batches import Batches, Feed
from neuvar.measures.landscape import lists_options
from neuvar.measures.perturbed import PREDICTIONS, Parameters, check_draws, select_parameters
from neuvar.noise import RELATIVE_TO, Draw, Slot, Term, family, scale, standard_noise, whole_slot
from neuvar.optim.layout import relative_size
from neuvar.optim.nvrm import optimizer_of
from neuvar.optim.wrapper import Wrapper
from neuvar.prediction.noisy_classifier import NoiseSpec, NoisyClassifier
from neuvar.prediction.uncertainty import PARTS, Prediction

TrainedWith = Wrapper | Mapping[str, Any] | None
"""A neuvar optimizer or its state dict."""


class NoiseOptions(TypedDict, total=False):
    """Which noise to predict with; see :func:`predict`."""

    b: float | None
    noise: str | None
    optimizer: TrainedWith
    relative_to: str | None


def noise_terms(
    model: nn.Module,
    slots: Mapping[Tensor, Slot],
    b: float | None = None,
    noise: str | None = None,
    optimizer: TrainedWith = None,
    relative_to: str | None = None,
) -> dict[Tensor, NoiseSpec]:
    """The noise of each parameter that has some: as in the arguments, or the optimizer's."""
    if noise is not None:
        family(noise)
    _validate.one_of("relative_to", relative_to, (None, *RELATIVE_TO))
    if b is not None:
        if optimizer is not None:
            raise ValueError("give either b or optimizer, not both")
        spec = NoiseSpec(scale("b", b), noise or "gaussian", relative_to)
        return dict.fromkeys(slots, spec) if spec.b else {}
    if relative_to is not None:
        raise ValueError("relative_to needs b; without it the optimizer says what b is relative to")
    if optimizer is None:
        try:
            optimizer = optimizer_of(model)
        except ValueError:
            raise ValueError(
                "no neuvar optimizer with parameters of this model is alive, so the noise that it "
                "was trained with is unknown; give b, or the optimizer's state dict as optimizer"
            ) from None
    if isinstance(optimizer, Wrapper):
        groups = [(group, group["params"]) for group in optimizer.param_groups]
    else:
        groups = _saved_groups(optimizer, list(model.parameters()))
    if any("mix" in group for group, _ in groups):
        raise ValueError("the noise of RWP and ARWP has no single b; give b and relative_to")
    terms = {
        p: NoiseSpec(scale("b", group["b"]), noise or group["noise"], group.get("relative_to"))
        for group, params in groups
        for p in params
        if p in slots and p.requires_grad and group["b"]
    }
    if not terms:
        raise ValueError("the optimizer has no noise now for parameters of this model; give b")
    return terms


def _saved_groups(state: Any, params: list[Tensor]) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Parameter groups of a state dict with their parameters."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not groups or any("drawn" not in group for group in groups):
        raise ValueError("optimizer must be a neuvar optimizer or the state dict of one")
    kinds = {(group["b"], group["noise"], group.get("relative_to")) for group in groups}
    if len(kinds) > 1:
        raise ValueError(
            "the state dict has parameter groups with different noise, and does not say which "
            "parameters they have; load it into an optimizer of the model, and give that"
        )
    if sum(len(group["params"]) for group in groups) > len(params):
        raise ValueError("the state dict is of another model, with more parameters")
    return [(groups[0], params)]


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
    modes, buffers and the global generators are restored, also after an error or Ctrl-C. Memory is
    bounded for any number of draws: two copies of the weights, the result, and blocks of the data.

    References:
        Depeweg et al. 2018, Decomposition of uncertainty in Bayesian deep learning;
        Gal & Ghahramani 2016, Dropout as a Bayesian approximation (``dropout=True``).

    Args:
        model: Any classifier.
        data: A tensor of inputs, a pair of tensors (inputs, targets), a ``DataLoader``, or an
            iterable of batches: tensors, tuples whose last of several items is the target, or
            dicts, with or without a key such as ``"labels"``.
        b: Scale of the noise on all ``parameters``. By default that of the optimizer, which may
            differ between parameter groups.
        draws: Number of perturbed models, K; even if ``antithetic``.
        noise: ``"gaussian"``, ``"laplace"`` or ``"uniform"``; by default the optimizer's family,
            or ``"gaussian"`` if ``b`` is given.
        optimizer: Where to take the noise from: a neuvar optimizer or its state dict, as in a
            checkpoint. By default ``neuvar.optimizer_of(model)``.
        parameters: Which to perturb, as tensors or by name; all by default.
        relative_to: With ``b``, whether it is relative to the root mean square of each
            ``"tensor"`` or ``"filter"``, or to each ``"weight"``.
        antithetic: Use each draw as ε and −ε, which cancels the odd part of their effect.
        seed: Of all draws.
        sampler: ``"table"`` or ``"fresh"``, as in the optimizers.
        batchnorm: ``"keep"`` its statistics, or batches on which to re-estimate them at each draw:
            training data as :func:`neuvar.reestimate_batchnorm` takes them.
        dropout: Leave dropout layers on (Monte Carlo dropout); with ``b=0`` without weight noise.
        logits: Whether the model returns logits or probabilities, of shape (n, classes, ...).
        feed: ``feed(model, batch)`` returns outputs and targets of other batches.
        batch_size: Of tensors.
        vectorize: Evaluate several perturbed models at once. By default if it is faster: for small
            networks and batches.
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
    unlabelled = isinstance(data, Tensor)
    if unlabelled and data.ndim:
        data = (data, torch.zeros(len(data), dtype=torch.int64))
    noisy = NoisyClassifier(
        model, signs=signs, logits=logits, dropout=dropout, vectorize=vectorize, feed=feed,
        parameters=parameters, seed=seed, sampler=sampler,
    )  # fmt: skip
    noisy.terms = noise_terms(model, noisy.slots, b, noise, optimizer, relative_to)
    batches = Batches(data, batch_size=batch_size, model=model)
    samples = draws // len(signs)
    count = samples if noisy.terms or dropout else 1
    with noisy, torch.no_grad():
        if not isinstance(batchnorm, str):
            noisy.reestimate(batchnorm, count)
        else:
            _validate.one_of("batchnorm", batchnorm, ("keep",))
        blocks = list(noisy.run(batches, count, progress))
    parts, targets = zip(*blocks, strict=True)
    labels = None if unlabelled or any(t is None for t in targets) else torch.cat(targets)
    value, stderr, bias = (
        {name: torch.cat([part[kind][name] for part in parts]) for name in PARTS}
        for kind in range(3)
    )
    if not value["probabilities"].isfinite().all():
        raise ValueError("the model returns values that are not finite under the noise")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    specs = {names[p]: spec for p, spec in noisy.terms.items()}
    return Prediction(
        **value, targets=labels, draws=draws, noise=specs, stderr=stderr, bias=bias,
        samples=samples, confidence=confidence,
    )  # fmt: skip


class AveragedPredictor(nn.Module):
    r"""A model whose outputs are averaged over weight noise: log-probabilities, of any input.

    .. math:: \log \frac1K \sum_{k=1}^K \mathrm{softmax} f(x; \theta + \epsilon_k)

    They can be used as logits: ``cross_entropy``, ``argmax`` and ``softmax`` give what the mean
    probabilities give. The draws are those of :func:`predict` with the same seed, the same for
    every input. The module shares the model, whose weights it does not change; gradients flow to
    them. It goes through ``torch.export``, with one table of noise of 16 MiB for any number of
    draws. Call ``eval()`` before you use it.

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
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module, got {type(model).__name__}")
        self.model = model
        self.signs = check_draws(draws, antithetic, samples=1)
        self.draws = draws
        self.logits = _validate.boolean("logits", logits)
        self.seed = _validate.seed(seed)
        slots = select_parameters(model, parameters)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        draw = Draw(seed=self.seed, sampler="table", rank=PREDICTIONS)
        self.terms = {}
        for p, spec in noise_terms(model, slots, **options).items():
            own = draw._replace(noise=spec.noise, relative_to=spec.relative_to or "")
            self.terms[names[p]] = Term(slots[p], own, spec.b)
        self._make_tables()

    def _make_tables(self) -> None:
        """Make the tables of noise before ``torch.export``: inside it they would have no values."""
        devices = {p.device for p in self.model.parameters()} - {torch.device("meta")}
        for term in self.terms.values():
            for device in devices:
                standard_noise(whole_slot((1,)), term.draw, device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._make_tables()  # the device may be another one
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_tables()  # the process may be another one

    def extra_repr(self) -> str:
        return f"draws={self.draws}, antithetic={len(self.signs) == 2}, seed={self.seed}"

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Logarithm of the mean probabilities."""
        total: Tensor | None = None
        for number in range(1, self.draws // len(self.signs) + 1):
            for sign in self.signs:
                outputs = functional_call(self.model, self._weights(number, sign), inputs, options)
                logs = outputs.log_softmax(1) if self.logits else outputs.log()
                total = logs if total is None else torch.logaddexp(total, logs)
        assert total is not None
        return total - math.log(self.draws)

    def _weights(self, number: int, sign: int) -> dict[str, Tensor]:
        """Perturbed weights by name."""
        weights = {}
        for name, p in self.model.named_parameters():
            if (term := self.terms.get(name)) is not None:
                draw = term.draw._replace(number=number)
                z = standard_noise(term.slot, draw, p.device)
                size = relative_size(p, p.detach(), draw.relative_to)
                z = z if size is None else z * size
                weights[name] = torch.add(p, z.to(p.dtype), alpha=sign * term.b)
        return weights
