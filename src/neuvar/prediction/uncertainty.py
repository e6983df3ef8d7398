"""Mean probabilities and the parts of their uncertainty, with their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.special import entr

from neuvar import _validate
from neuvar.measures.estimate import student_quantile

PARTS = ("probabilities", "entropy", "expected_entropy", "mutual_information")

Sample = tuple[Tensor, Tensor]
"""Probabilities of shape (m, n, classes, ...) and their entropies (m, n, ...), of m draws."""

Summary = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Values, standard errors and biases of all parts."""


@dataclass(frozen=True, eq=False)
class Prediction:
    r"""Probabilities averaged over weight noise, and the parts of their uncertainty in nats.

    .. math:: H[\bar p] = \frac1K \sum_k H[p_k] + I, \qquad \bar p = \frac1K \sum_k p_k

    All tensors are on the CPU in double precision, with one row per example.

    Attributes:
        probabilities: Mean probabilities :math:`\bar p`, shape (n, classes, ...).
        entropy: Entropy of the mean, :math:`H[\bar p]`: the total uncertainty.
        expected_entropy: Mean of the entropies: the part that does not come from the weights.
        mutual_information: The difference I of the two: how much the perturbed models disagree.
        targets: The targets of the data; None if a batch has none.
        draws: Number of perturbed models.
        noise: b, family and ``relative_to`` of the noise of each parameter that has some, by name.
        stderr: Standard error of each of the first four, from the finite number of draws.
        bias: Jackknife estimate of the bias of each of the first four.
        samples: Number of independent draws: an antithetic pair is one.
        confidence: Confidence level of :meth:`interval`.
    """

    probabilities: Tensor = field(repr=False)
    entropy: Tensor = field(repr=False)
    expected_entropy: Tensor = field(repr=False)
    mutual_information: Tensor = field(repr=False)
    targets: Tensor | None = field(repr=False)
    draws: int
    noise: Mapping[str, tuple[float, str, str | None]] = field(repr=False)
    stderr: Mapping[str, Tensor] = field(repr=False)
    bias: Mapping[str, Tensor] = field(repr=False)
    samples: int = field(repr=False)
    confidence: float = 0.95

    def __str__(self) -> str:
        means = {name: float(getattr(self, name).mean()) for name in PARTS[1:]}
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in means.items())
        return f"{len(self.probabilities):,} examples, {self.draws} draws; on average: {parts}"

    @property
    def classes(self) -> Tensor:
        """The most probable class of each example."""
        return self.probabilities.argmax(1)

    def interval(self, of: str = "probabilities") -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the interval for one of the first four attributes.

        Each number's interval contains its limit for infinitely many draws with probability
        ``confidence``. The bias of a finite number of draws is removed.
        """
        _validate.one_of("of", of, PARTS)
        centre = getattr(self, of) - self.bias[of]
        if self.samples < 2:
            return torch.full_like(centre, -math.inf), torch.full_like(centre, math.inf)
        half = student_quantile((1 + self.confidence) / 2, self.samples - 1) * self.stderr[of]
        most = 1.0 if of == "probabilities" else math.log(self.probabilities.shape[1])
        return (centre - half).clamp(0, most), (centre + half).clamp(0, most)


def summarize(samples: Callable[[], Iterable[Sample]]) -> Summary:
    """Mean probabilities and uncertainty, by jackknife; ``samples`` are iterated twice.

    References:
        Efron & Stein 1981, The jackknife estimate of variance.
    """
    m, sums = 0, list[Tensor]()
    for some in samples():
        m += len(some[0])
        for k, part in enumerate(some):
            if len(sums) == k:
                sums.append(part.sum(0))
            else:
                sums[k] += part.sum(0)
    mean, expected = (total.div_(m) for total in sums)
    entropy = entr(mean).sum(1)
    # Entropy is concave, so the difference is below 0 by rounding only.
    information = (entropy - expected).clamp_(min=0)
    values = dict(zip(PARTS, (mean, entropy, expected, information), strict=True))
    bias, stderr = ({k: torch.zeros_like(v) for k, v in values.items()} for _ in range(2))
    for p, h in samples() if m > 1 else ():
        rest = (m * mean - p).div_(m - 1).clamp_(min=0)
        entropies, expected_entropies = entr(rest).sum(2), (m * expected - h) / (m - 1)
        without_one = (rest, entropies, expected_entropies, entropies - expected_entropies)
        for name, left_out in zip(PARTS, without_one, strict=True):
            shift = left_out - values[name]
            bias[name] += shift.sum(0)
            stderr[name] += shift.square_().sum(0)
    for name in PARTS:
        variance = (stderr[name] - bias[name].square() / m).clamp_(min=0) * ((m - 1) / m)
        stderr[name] = variance.sqrt_()
        bias[name] *= (m - 1) / m
    for name in ("probabilities", "expected_entropy"):  # means are unbiased
        bias[name] = bias[name].new_zeros(()).expand_as(bias[name])
    return _on_cpu(values), _on_cpu(stderr), _on_cpu(bias)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor of all parts in one; removes them from the parts, so that both need not fit."""
    result = {}
    for name in PARTS:
        tensors = [part.pop(name) for part in parts]
        if any(tensor.stride(0) for tensor in tensors):
            result[name] = torch.cat(tensors)
        else:  # all zeros, held as one number
            rows = sum(map(len, tensors))
            result[name] = tensors[0][:1].expand(rows, *tensors[0].shape[1:])
    return result


def _on_cpu(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in parts.items()}
