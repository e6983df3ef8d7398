"""A module that predicts with the mean over weight noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from neuvar import _validate
from neuvar.measures.perturbed import PREDICTIONS, Parameters, select_parameters
from neuvar.noise import Draw, Term, standard_noise, whole_slot
from neuvar.optim.layout import relative_size
from neuvar.optim.wrapper import Wrapper
from neuvar.prediction.training_noise import check_draws, noise_terms


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
        b: Scale of the noise; by default the optimizer's, as for :func:`predict`. So are the
            arguments up to ``logits``.
        draws: Number of perturbed models; each forward pass costs that many.
        noise: Family of the noise.
        optimizer: Where to take the noise from.
        parameters: Which to perturb.
        relative_to: With ``b``, what it is relative to.
        antithetic: Use each draw as ε and −ε.
        seed: Of all draws.
        logits: Whether the model returns logits or probabilities.

    >>> model = nn.Linear(4, 3)
    >>> predictor = AveragedPredictor(model, b=0.1).eval()
    >>> outputs = predictor(torch.ones(5, 4))
    >>> torch.allclose(outputs.exp().sum(1), torch.ones(5))
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        b: float | None = None,
        draws: int = 32,
        noise: str | None = None,
        optimizer: Wrapper | Mapping[str, Any] | None = None,
        parameters: Parameters | None = None,
        relative_to: str | None = None,
        antithetic: bool = True,
        seed: int = 0,
        logits: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch module, got {type(model).__name__}")
        self.model = model
        self.draws, self.antithetic = check_draws(draws, antithetic), antithetic
        self.logits = _validate.boolean("logits", logits)
        self.seed = _validate.seed(seed)
        slots = select_parameters(model, parameters)
        kinds = noise_terms(model, slots, b, noise, relative_to, optimizer)
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        draw = Draw(seed=self.seed, sampler="table", rank=PREDICTIONS)
        self.terms = {}
        for p, kind in kinds.items():
            own = draw._replace(noise=kind.noise, relative_to=kind.relative_to or "")
            self.terms[names[p]] = Term(slots[p], own, kind.b)

        self._make_tables()

    def _make_tables(self) -> None:
        """Make the tables of noise now: inside of ``torch.export`` they would not hold numbers."""
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
        return f"draws={self.draws}, antithetic={self.antithetic}, seed={self.seed}"

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Logarithm of the mean probabilities."""
        signs = (1, -1) if self.antithetic else (1,)
        total: Tensor | None = None
        for number in range(1, self.draws // len(signs) + 1):
            for sign in signs:
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
