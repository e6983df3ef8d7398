"""Average predictions over weight noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuvar import _validate
from neuvar._batches import Batches, Feed
from neuvar.measures.perturbed import PREDICTIONS, Parameters
from neuvar.optim.wrapper import Wrapper
from neuvar.prediction.noisy_classifier import NoisyClassifier, feed_inputs
from neuvar.prediction.training_noise import check_draws, noise_terms
from neuvar.prediction.uncertainty import PARTS, Prediction


def predict(
    model: nn.Module,
    data: Any,
    *,
    b: float | None = None,
    draws: int = 32,
    noise: str | None = None,
    optimizer: Wrapper | Mapping[str, Any] | None = None,
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
        vectorize: Evaluate several perturbed models at once; if faster by default, which it is for
            small networks and batches.
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
    draws = check_draws(draws, antithetic)
    _validate.probability("confidence", confidence)
    for name, flag in (("dropout", dropout), ("logits", logits)):
        _validate.boolean(name, flag)
    if vectorize is not None:
        _validate.boolean("vectorize", vectorize)
    unlabelled = isinstance(data, Tensor)
    if unlabelled and data.ndim:
        data = (data, torch.zeros(len(data), dtype=torch.int64))
    noisy = NoisyClassifier(
        model,
        parameters=parameters,
        seed=seed,
        sampler=sampler,
        stream=PREDICTIONS,
    )
    noisy.terms = noise_terms(model, noisy.slots, b, noise, relative_to, optimizer)
    noisy.signs = (1, -1) if antithetic else (1,)
    noisy.logits, noisy.dropout, noisy.vectorize = logits, dropout, vectorize
    noisy.feed = feed or feed_inputs
    batches = Batches(data, batch_size=batch_size, model=model)
    count = draws // len(noisy.signs) if noisy.terms or dropout else 1
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
    known = {names[p]: own for p, own in noisy.terms.items()}
    return Prediction(
        **value, targets=labels, draws=draws, noise=known, stderr=stderr, bias=bias,
        samples=draws // len(noisy.signs), confidence=confidence,
    )  # fmt: skip
