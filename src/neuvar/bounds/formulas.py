"""Formulas of KL divergences and bounds.

Losses lie in [0, ``ceiling``]; the bounds do not hold for other losses. ``failure`` is the
probability, over the draw of the training data, that a bound does not hold. "The paper" is Xie et
al. 2021, Artificial Neural Variability for Deep Learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Required, TypedDict, Unpack

from neuvar._validate import integer, number, probability
from neuvar.measures.estimate import bisect
from neuvar.measures.landscape import lists_options


def gaussian_kl(*, count: int, squared_distance: float, b: float, sigma: float) -> float:
    r"""KL divergence of noisy weights from a Gaussian prior, in nats.

    .. math::

        KL(N(\theta, b^2 I)\,\|\,N(\theta_0, \sigma^2 I)) =
        N\left[\log\frac{\sigma}{b} + \frac{b^2}{2\sigma^2} - \frac12\right]
        + \frac{\|\theta - \theta_0\|^2}{2\sigma^2}

    ``count`` is the number N of weights, ``squared_distance`` is :math:`\|\theta - \theta_0\|^2`.

    >>> gaussian_kl(count=10, squared_distance=2.0, b=1.0, sigma=1.0)
    1.0
    """
    count = integer("count", count, low=1)
    b, sigma = number("b", b, above=0), number("sigma", sigma, above=0)
    distance, ratio = number("squared_distance", squared_distance, low=0), b / sigma
    return count * ((ratio**2 - 1) / 2 - math.log(ratio)) + distance / (2 * sigma**2)


def prior_sigma(weight_decay: float, *, examples: int | None) -> float:
    r"""Standard deviation of the Gaussian prior that corresponds to a weight decay.

    The mean loss over m examples plus :math:`\frac{\lambda}{2}\|\theta\|^2` is, times m, the
    negative log-posterior under a prior of variance :math:`\sigma^2 = 1/(m\lambda)`. The paper has
    :math:`1/\lambda`, as for a loss that is a sum: pass ``examples=None``.

    >>> round(prior_sigma(1e-4, examples=50_000), 3), prior_sigma(1e-4, examples=None)
    (0.447, 100.0)
    """
    m = 1 if examples is None else integer("examples", examples, low=1)
    return 1 / math.sqrt(number("weight_decay", weight_decay, above=0) * m)


def binary_kl(q: float, p: float) -> float:
    """KL divergence of a Bernoulli distribution with mean q from one with mean p, in nats.

    >>> round(binary_kl(0.5, 0.25), 4)
    0.1438
    """
    total = 0.0
    q, p = number("q", q, low=0, high=1), number("p", p, low=0, high=1)
    for x, y in ((q, p), (1 - q, 1 - p)):
        if x > 0:
            total += x * (math.log(x) - math.log(y)) if y > 0 else math.inf
    return max(total, 0.0)


def inverse_kl(q: float, divergence: float) -> float:
    r"""Largest p with :math:`kl(q\,\|\,p) \le` ``divergence``.

    >>> round(binary_kl(0.1, inverse_kl(0.1, 0.3)), 12)
    0.3
    """
    q = number("q", q, low=0, high=1)
    if not divergence >= 0:
        raise ValueError(f"divergence must be >= 0, got {divergence!r}")
    if divergence == 0:
        return q
    # Rounded up, so that an upper bound stays one.
    return bisect(lambda p: binary_kl(q, p) <= divergence, q, 1.0)


def monte_carlo_risk(mean: float, *, draws: int, failure: float, ceiling: float = 1.0) -> float:
    r"""Upper bound on a mean risk from independent draws.

    .. math:: kl^{-1}\!\left(\bar L\;\Big|\;\tfrac{1}{n} \ln\tfrac{1}{\Delta}\right)

    ``mean`` is the mean risk over n = ``draws`` independent draws; an antithetic pair counts once.

    References:
        Langford and Caruana 2001, (Not) bounding the true error.

    >>> round(monte_carlo_risk(0.02, draws=1000, failure=0.01), 4)
    0.0365
    """
    draws = integer("draws", draws, low=1)
    ceiling, mean = _ceiling_and_risk(ceiling, mean)
    divergence = math.log(1 / probability("failure", failure)) / draws
    return ceiling * inverse_kl(mean / ceiling, divergence)


def _ceiling_and_risk(ceiling: float, risk: float) -> tuple[float, float]:
    ceiling = number("ceiling", ceiling, above=0)
    risk = min(risk, ceiling) if risk <= ceiling * (1 + 1e-9) else risk  # rounding of a sum
    if not 0 <= risk <= ceiling:
        raise ValueError(
            f"risk must be between 0 and the ceiling of the loss, {ceiling:g}, got {risk!r}; "
            "clamp a loss without a ceiling"
        )
    return ceiling, float(risk)


@dataclass(frozen=True)
class Bound:
    """An upper bound on a risk, or on a gap between risks.

    Attributes:
        value: The bound, in units of the loss: ``risk`` plus ``complexity``.
        risk: The measured risk.
        ceiling: Highest value of the loss.
        kl: KL divergence of the posterior from the prior, in nats.
        examples: Size m of the training set.
        failure: Probability that the bound does not hold; 0 for a bound in expectation.
    """

    value: float
    risk: float
    ceiling: float
    kl: float
    examples: int
    failure: float

    @property
    def vacuous(self) -> bool:
        """Whether the bound is useless, because it is not below the ceiling."""
        return self.value >= self.ceiling

    @property
    def complexity(self) -> float:
        """What the bound adds to the measured risk."""
        return self.value - self.risk

    def __str__(self) -> str:
        verdict = "vacuous" if self.vacuous else f"of at most {self.ceiling:g}"
        return f"{self.value:.4g} ({verdict}) = {self.risk:.4g} + {self.complexity:.4g}"


class McAllesterOptions(TypedDict, total=False):
    """Keyword arguments of :func:`mcallester_bound`."""

    examples: Required[int]
    failure: float
    choices: int
    ceiling: float


def mcallester_bound(
    risk: float,
    kl: float,
    *,
    examples: int,
    failure: float = 0.05,
    choices: int = 1,
    ceiling: float = 1.0,
) -> Bound:
    r"""McAllester's bound, lemma 1 of the paper.

    .. math:: L(Q) \le \hat L(Q) + 4\sqrt{\frac{KL + \ln(2m/\Delta)}{m}}

    It holds for all posteriors Q at once, so Q, and with it b, may depend on the data. The prior
    may not, except for a choice among ``choices`` priors that were fixed before.

    References:
        McAllester 1999, PAC-Bayesian model averaging; as in Neyshabur et al. 2017, equation 7.

    Args:
        risk: Mean loss over the posterior on the training data.
        kl: KL divergence of the posterior from the prior, in nats.
        examples: Size m of the training set.
        failure: Δ, the probability that the bound does not hold.
        choices: Number of priors (values of σ) from which the best was chosen.
        ceiling: Highest value of the loss.

    >>> mcallester_bound(0.1, kl=50.0, examples=60_000).vacuous
    False
    """
    kl, examples = number("kl", kl, low=0), integer("examples", examples, low=1)
    share = probability("failure", failure) / integer("choices", choices, low=1)
    ceiling, risk = _ceiling_and_risk(ceiling, risk)
    complexity = 4 * ceiling * math.sqrt((kl + math.log(2 * examples / share)) / examples)
    return Bound(risk + complexity, risk, ceiling, kl, examples, failure)


@lists_options(McAllesterOptions, mcallester_bound)
def variability_bound(
    risk: float, delta: float, kl: float, **options: Unpack[McAllesterOptions]
) -> Bound:
    r"""Theorem 1 of the paper: a bound for a model with (b, δ)-neural variability.

    .. math:: L(Q_{nv}) \le \hat L(\theta) + \delta + 4\sqrt{\frac{KL + \ln(2m/\Delta)}{m}}

    ``risk`` is the loss at the clean weights, ``delta`` the δ at the b of ``kl``; see
    :func:`mcallester_bound` for the others. For real networks the square root is far above 1.

    >>> bound = variability_bound(0.0, 0.01, kl=1e6, examples=60_000)
    >>> round(bound.value, 2), bound.vacuous
    (16.34, True)
    """
    lemma = mcallester_bound(risk, kl, **options)
    return replace(lemma, value=lemma.value + number("delta", delta, low=0))


def seeger_bound(
    risk: float,
    kl: float,
    *,
    examples: int,
    failure: float = 0.05,
    choices: int = 1,
    ceiling: float = 1.0,
) -> Bound:
    r"""Seeger's bound in Maurer's form: tighter than McAllester's, never above the ceiling.

    .. math:: kl(\hat L(Q)\,\|\,L(Q)) \le \frac{KL + \ln(2\sqrt m/\Delta)}{m}

    The arguments are as for :func:`mcallester_bound`, with at least 8 examples.

    References:
        Seeger 2002, PAC-Bayesian generalisation error bounds for Gaussian process classification;
        Maurer 2004, A note on the PAC-Bayesian theorem.

    >>> round(seeger_bound(0.05, kl=2000.0, examples=60_000).value, 3)
    0.127
    """
    kl, examples = number("kl", kl, low=0), integer("examples", examples, low=8)
    share = probability("failure", failure) / integer("choices", choices, low=1)
    ceiling, risk = _ceiling_and_risk(ceiling, risk)
    divergence = (kl + math.log(2 * math.sqrt(examples) / share)) / examples
    value = ceiling * inverse_kl(risk / ceiling, divergence)
    return Bound(value, risk, ceiling, kl, examples, failure)


def information_bound(
    information: float, delta: float, *, examples: int, sub_gaussian: float
) -> Bound:
    r"""Mutual-information bound on the generalization gap, in expectation over training sets.

    .. math::

        E\left[L(\theta + \epsilon) - L(\theta, S)\right] \le
        \sqrt{\frac{2\sigma^2}{m}\,I(\theta + \epsilon; S)} + \delta

    ``information`` is :math:`I(\theta + \epsilon; S)` in nats, ``examples`` is m. The loss is
    σ-sub-Gaussian with σ = ``sub_gaussian``: half of its range, if it is bounded.

    References:
        Xu and Raginsky 2017, Information-theoretic analysis of generalization capability of
        learning algorithms; Xie et al. 2021, appendix B.

    >>> round(information_bound(600.0, 0.01, examples=60_000, sub_gaussian=0.5).value, 4)
    0.0807
    """
    information, delta = number("information", information, low=0), number("delta", delta, low=0)
    examples = integer("examples", examples, low=1)
    width = number("sub_gaussian", sub_gaussian, above=0)
    value = width * math.sqrt(2 * information / examples) + delta
    # A gap between losses is at most their range.
    return Bound(value, delta, 2 * width, information, examples, 0.0)


@lists_options(McAllesterOptions, mcallester_bound)
def forgetting_bound(
    risk: float, delta_ab: float, kl: float, **options: Unpack[McAllesterOptions]
) -> Bound:
    r"""Bound on the risk at task A after training on task B, section 2.3 of the paper.

    .. math::

        L_A(Q_B) \le \hat L_A(Q_A) + \delta_{AB} + 4\sqrt{\frac{KL(Q_B\|P) + \ln(2m/\Delta)}{m}}

    ``risk`` is the training loss of task A after task A, ``delta_ab`` its rise through task B,
    ``kl`` the KL divergence after task B; see :func:`mcallester_bound` for the others.

    >>> bound = forgetting_bound(0.02, 0.3, kl=100.0, examples=60_000)
    >>> round(bound.risk, 2), bound.vacuous
    (0.32, False)
    """
    return mcallester_bound(risk + number("delta_ab", delta_ab), kl, **options)


def forgetting_information_bound(
    information: float, *, examples: int, failure: float = 0.05, ceiling: float = 1.0
) -> Bound:
    r"""The paper's :func:`forgetting_bound` in expectation, section 2.3, last equation.

    .. math::

        \sqrt{E_S\left[(L_A(Q_B) - \hat L_A(Q_A) - \delta_{AB})^2\right]} <
        4\sqrt{\frac{I(\theta_B; S) + \ln(2m/\Delta)}{m}}

    Use it only to compare with the paper: taking the expectation of a bound that holds only with
    probability 1 − Δ is not rigorous. By the data processing inequality,
    :math:`I(\theta_A; S)` may replace :math:`I(\theta_B; S)`.

    >>> round(forgetting_information_bound(600.0, examples=60_000).value, 3)
    0.405
    """
    information = number("information", information, low=0)
    return mcallester_bound(0.0, information, examples=examples, failure=failure, ceiling=ceiling)
