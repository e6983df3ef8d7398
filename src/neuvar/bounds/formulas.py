"""Bounds as pure functions of numbers.

Losses lie in [0, ``ceiling``]: none of these bounds holds for a loss without one. ``failure`` is
the probability, over the draw of the training data, that a bound does not hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuvar._validate import integer, probability
from neuvar.bounds.divergence import bounded_risk, inverse_kl, positive
from neuvar.noise import scale


@dataclass(frozen=True)
class Bound:
    """An upper bound on a risk, or on a gap between risks.

    Attributes:
        value: The bound, in units of the loss.
        vacuous: Whether it says nothing, because no loss can be higher.
        risk: What was measured and enters the bound.
        complexity: What the bound adds to it.
        ceiling: Highest value of the loss.
        kl: Divergence of the posterior from the prior, in nats; nan where none enters.
        examples: Size m of the training set.
        failure: Probability that the bound does not hold; 0 for a bound in expectation.
    """

    value: float
    vacuous: bool
    risk: float
    complexity: float
    ceiling: float
    kl: float
    examples: int
    failure: float

    def __str__(self) -> str:
        verdict = "vacuous" if self.vacuous else f"of at most {self.ceiling:g}"
        return f"{self.value:.4g} ({verdict}) = {self.risk:.4g} + {self.complexity:.4g}"


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

    It holds for all posteriors Q at once, so Q, and with it b, may be chosen by the data. The prior
    may not: if it is the best of several that were fixed beforehand, say how many.

    References:
        McAllester: PAC-Bayesian model averaging, COLT 1999; in the form of Neyshabur et al. 2017,
        equation 7.

    Args:
        risk: Mean loss over the posterior on the training data.
        kl: Divergence of posterior from prior, in nats.
        examples: Size m of the training set.
        failure: Δ.
        choices: Among how many priors (values of σ) the best was chosen; each has to fail with
            probability ``failure / choices`` only.
        ceiling: Highest value of the loss.

    >>> mcallester_bound(0.1, kl=50.0, examples=60_000).vacuous
    False
    """
    kl, failure = _divergence(kl), probability("failure", failure)
    integer("examples", examples, low=1)
    share = failure / integer("choices", choices, low=1)
    ceiling, risk = bounded_risk(risk, ceiling)
    complexity = 4 * ceiling * math.sqrt((kl + math.log(2 * examples / share)) / examples)
    return _bound(risk + complexity, risk, ceiling, kl, examples, failure)


def variability_bound(
    risk: float,
    delta: float,
    kl: float,
    *,
    examples: int,
    failure: float = 0.05,
    choices: int = 1,
    ceiling: float = 1.0,
) -> Bound:
    r"""Theorem 1 of the paper: a bound for a model with (b, δ)-neural variability.

    .. math:: L(Q_{nv}) \le \hat L(\theta) + \delta + 4\sqrt{\frac{KL + \ln(2m/\Delta)}{m}}

    For given δ it decreases in b as long as b < σ, because KL does. On networks of any size the
    square root alone is far above 1: the theorem explains, it does not certify.

    References:
        Xie et al. 2021, theorem 1.

    Args:
        risk: Loss at the clean weights on the training data.
        delta: δ of the model at the b that ``kl`` is for.
        kl: Divergence of the noisy weights from the prior, in nats.
        examples: Size m of the training set.
        failure: Δ.
        choices: Among how many priors the best was chosen.
        ceiling: Highest value of the loss.

    >>> variability_bound(0.0, 0.01, kl=1e6, examples=60_000)  # doctest: +ELLIPSIS
    Bound(value=16.34..., vacuous=True, ...)
    """
    found = mcallester_bound(
        risk, kl, examples=examples, failure=failure, choices=choices, ceiling=ceiling
    )
    value = found.value + scale("delta", delta)
    return _bound(value, found.risk, ceiling, found.kl, examples, failure)


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

    References:
        Seeger: PAC-Bayesian generalisation error bounds for Gaussian process classification, JMLR
        2002. Maurer: A note on the PAC-Bayesian theorem, 2004.

    Args:
        risk: Mean loss over the posterior on the training data.
        kl: Divergence of posterior from prior, in nats.
        examples: Size m of the training set, at least 8.
        failure: Δ.
        choices: Among how many priors the best was chosen.
        ceiling: Highest value of the loss.

    >>> round(seeger_bound(0.05, kl=2000.0, examples=60_000).value, 3)
    0.127
    """
    kl, failure = _divergence(kl), probability("failure", failure)
    integer("examples", examples, low=8)
    share = failure / integer("choices", choices, low=1)
    ceiling, risk = bounded_risk(risk, ceiling)
    divergence = (kl + math.log(2 * math.sqrt(examples) / share)) / examples
    value = ceiling * inverse_kl(risk / ceiling, divergence)
    return _bound(value, risk, ceiling, kl, examples, failure)


def information_bound(
    information: float, delta: float, *, examples: int, sub_gaussian: float
) -> Bound:
    r"""The mutual-information theorem: a bound on the expected generalization gap.

    .. math::

        E\left[L(\theta + \epsilon) - L(\theta, S)\right] \le
        \sqrt{\frac{2\sigma^2}{m}\,I(\theta + \epsilon; S)} + \delta

    It holds in expectation over training sets and is no statement about one model.

    References:
        Xu and Raginsky: Information-theoretic analysis of generalization capability of learning
        algorithms, NeurIPS 2017. Xie et al. 2021, appendix B.

    Args:
        information: Mutual information of noisy weights and training data, in nats.
        delta: δ of the model.
        examples: Size m of the training set.
        sub_gaussian: σ for which the loss is σ-sub-Gaussian; half of its range for a bounded loss.

    >>> round(information_bound(600.0, 0.01, examples=60_000, sub_gaussian=0.5).value, 4)
    0.0807
    """
    information = _divergence(information, "information")
    integer("examples", examples, low=1)
    width = positive("sub_gaussian", sub_gaussian)
    delta = scale("delta", delta)
    value = width * math.sqrt(2 * information / examples) + delta
    # A gap between losses with that range cannot be larger than the range.
    return _bound(value, delta, 2 * width, information, examples, 0.0)


def forgetting_bound(
    risk: float,
    delta_ab: float,
    kl: float,
    *,
    examples: int,
    failure: float = 0.05,
    choices: int = 1,
    ceiling: float = 1.0,
) -> Bound:
    r"""Bound on the risk at task A after training on task B.

    .. math::

        L_A(Q_B) \le \hat L_A(Q_A) + \delta_{AB} + 4\sqrt{\frac{KL(Q_B\|P) + \ln(2m/\Delta)}{m}}

    with :math:`\delta_{AB} = \hat L_A(Q_B) - \hat L_A(Q_A)`, the forgetting on the training data.

    References:
        Xie et al. 2021, section 2.3.

    Args:
        risk: Loss on task A's training data after task A.
        delta_ab: By how much it rose through task B; negative if it fell.
        kl: Divergence of the weights after task B from the prior, in nats.
        examples: Size m of task A's training set.
        failure: Δ.
        choices: Among how many priors the best was chosen.
        ceiling: Highest value of the loss.

    >>> bound = forgetting_bound(0.02, 0.3, kl=100.0, examples=60_000)
    >>> round(bound.risk, 2), bound.vacuous
    (0.32, False)
    """
    if not math.isfinite(delta_ab):
        raise ValueError(f"delta_ab must be a finite number, got {delta_ab!r}")
    return mcallester_bound(
        risk + delta_ab, kl, examples=examples, failure=failure, choices=choices, ceiling=ceiling
    )


def forgetting_information_bound(
    information: float, *, examples: int, failure: float = 0.05, ceiling: float = 1.0
) -> Bound:
    r"""The same in expectation: root mean square of what forgetting leaves unexplained.

    .. math::

        \sqrt{E_S\left[(L_A(Q_B) - \hat L_A(Q_A) - \delta_{AB})^2\right]} <
        4\sqrt{\frac{I(\theta_B; S) + \ln(2m/\Delta)}{m}}

    By data processing :math:`I(\theta_A; S)` may stand for :math:`I(\theta_B; S)`. The paper takes
    the expectation of a bound that holds with probability 1 − Δ only; as a statement in
    expectation it is therefore not exact, and it is given here for comparison with the paper.

    References:
        Xie et al. 2021, section 2.3, last equation.

    Args:
        information: Mutual information of weights and task A's training data, in nats.
        examples: Size m of task A's training set.
        failure: Δ.
        ceiling: Highest value of the loss.

    >>> round(forgetting_information_bound(600.0, examples=60_000).value, 3)
    0.405
    """
    information = _divergence(information, "information")
    return mcallester_bound(0.0, information, examples=examples, failure=failure, ceiling=ceiling)


def _bound(
    value: float, risk: float, ceiling: float, kl: float, examples: int, failure: float
) -> Bound:
    return Bound(
        value=value,
        vacuous=value >= ceiling,
        risk=risk,
        complexity=value - risk,
        ceiling=ceiling,
        kl=kl,
        examples=examples,
        failure=failure,
    )


def _divergence(value: float, name: str = "kl") -> float:
    """A number of nats, which may be large but not negative."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return float(value)
