"""Divergences, their inverse, and what follows from them about a mean of draws."""

from __future__ import annotations

import math

from neuvar._validate import integer, probability
from neuvar.noise import scale


def gaussian_kl(*, count: int, squared_distance: float, b: float, sigma: float) -> float:
    r"""Divergence of the noisy weights from a Gaussian prior, in nats.

    .. math::

        KL(N(\theta, b^2 I)\,\|\,N(\theta_0, \sigma^2 I)) =
        N\left[\log\frac{\sigma}{b} + \frac{b^2}{2\sigma^2} - \frac12\right]
        + \frac{\|\theta - \theta_0\|^2}{2\sigma^2}

    It decreases in b up to b = σ, where it is smallest.

    Args:
        count: Number N of weights.
        squared_distance: Squared norm of the weights, or of their distance from the prior's
            centre.
        b: Scale of the noise.
        sigma: Deviation of the prior.

    >>> gaussian_kl(count=10, squared_distance=2.0, b=1.0, sigma=1.0)
    1.0
    """
    integer("count", count, low=1)
    b, sigma = positive("b", b), positive("sigma", sigma)
    distance = scale("squared_distance", squared_distance)
    ratio = b / sigma
    each = (ratio**2 - 1) / 2 - math.log(ratio)
    return count * each + distance / (2 * sigma**2)


def prior_sigma(weight_decay: float, *, examples: int | None) -> float:
    r"""Deviation of the Gaussian prior that a weight decay stands for.

    A loss that is a mean over m examples plus :math:`\frac{\lambda}{2}\|\theta\|^2` is, times m,
    the negative log-posterior under a prior of variance :math:`\sigma^2 = 1/(m\lambda)`. The paper
    says :math:`1/\lambda`, as for a loss that is a sum; give ``examples=None`` for it.

    >>> round(prior_sigma(1e-4, examples=50_000), 3), prior_sigma(1e-4, examples=None)
    (0.447, 100.0)
    """
    if examples is not None:
        integer("examples", examples, low=1)
    return 1 / math.sqrt(positive("weight_decay", weight_decay) * (examples or 1))


def binary_kl(q: float, p: float) -> float:
    """Divergence of a coin with probability q from one with probability p, in nats.

    >>> round(binary_kl(0.5, 0.25), 4)
    0.1438
    """
    if not (0 <= q <= 1 and 0 <= p <= 1):
        raise ValueError(f"q and p must be between 0 and 1, got {q!r} and {p!r}")
    total = 0.0
    for x, y in ((q, p), (1 - q, 1 - p)):
        if x > 0:
            total += x * (math.log(x) - math.log(y)) if y > 0 else math.inf
    return max(total, 0.0)


def inverse_kl(q: float, divergence: float) -> float:
    r"""Largest p with :math:`kl(q\,\|\,p) \le` ``divergence``.

    >>> round(binary_kl(0.1, inverse_kl(0.1, 0.3)), 12)
    0.3
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be between 0 and 1, got {q!r}")
    if not divergence >= 0:
        raise ValueError(f"divergence must be >= 0, got {divergence!r}")
    if divergence == 0:
        return float(q)
    low, high = q, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high  # the side on which the bound is still one
        if binary_kl(q, middle) > divergence:
            high = middle
        else:
            low = middle


def monte_carlo_risk(mean: float, *, draws: int, failure: float, ceiling: float = 1.0) -> float:
    r"""Upper bound on a mean risk of which independent draws are known.

    .. math:: kl^{-1}\!\left(\bar L\;\Big|\;\tfrac{1}{n} \ln\tfrac{1}{\Delta}\right)

    References:
        Langford and Caruana: (Not) bounding the true error, NeurIPS 2001.

    Args:
        mean: Mean of the risk over the draws.
        draws: How many independent draws; a pair of antithetic ones counts once.
        failure: Probability that the bound does not hold.
        ceiling: Highest value of the loss.

    >>> round(monte_carlo_risk(0.02, draws=1000, failure=0.01), 4)
    0.0365
    """
    integer("draws", draws, low=1)
    ceiling, mean = bounded_risk(mean, ceiling)
    return ceiling * inverse_kl(
        mean / ceiling, math.log(1 / probability("failure", failure)) / draws
    )


def bounded_risk(risk: float, ceiling: float) -> tuple[float, float]:
    """Ceiling and risk as floats, if the one is a ceiling of the other."""
    ceiling = positive("ceiling", ceiling)
    risk = min(risk, ceiling) if risk <= ceiling * (1 + 1e-9) else risk  # rounding of a sum
    if not 0 <= risk <= ceiling:
        raise ValueError(
            f"risk must be between 0 and the ceiling of the loss, {ceiling:g}, got {risk!r}; "
            "clamp a loss that has no ceiling"
        )
    return ceiling, float(risk)


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a finite number above 0."""
    if not scale(name, value) > 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}")
    return float(value)
