r"""Probability that a label is wrong, by Bayes' rule from the predicted probabilities.

An example x of true class k can get a given label g in two ways. Labels are flipped from class to
class at fixed rates T[k, g]; then even the most confident predictions contradict some labels. Or
the example is hard, and annotators err like the network; then labels follow the predictions. With
the belief q in each true class and the predicted distribution η of the given label,

.. math:: P(k \mid x, g) \propto q_k(x) \, (T_{kg} + ε \, η_g(x)).

T, ε and the powers of the probabilities are estimated from predictions and labels. The constants
were set once, on the data named in docs/cleaning.md, and are the same for all data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuvar.measures.estimate import normal_quantile, wilson

Array = NDArray[Any]

CHUNK, CHUNK_NUMBERS = 10_000, 250_000
"""Largest number of examples, and of probabilities, processed at once: copies stay small."""
SMOOTHING = 0.01
"""Share of uniform probabilities that is mixed in, so that no class is impossible."""
RANK_SMOOTHING = 1e-6
"""The same for the ranking, where differences of very small probabilities matter."""
CONFIDENT = 0.2
"""T is counted from this share of the predictions of each class, the most confident ones."""
SHARPNESS = 1.3
"""Exponent of the belief in the true class, relative to the predicted distribution of labels."""
HISTORY_SHARPNESS = 3.0
"""The same for a mean over training, which is flatter because it includes early epochs."""
HARD = 1.2
"""ε if confident predictions contradict no label."""
PRIOR_COUNTS = tuple(4.0**k for k in range(9))
"""Candidates for the strength of the shrinkage of T, as a number of pseudo-counts."""
TOLERANCE = 1.92
"""The weakest shrinkage is chosen whose log-likelihood is within this distance of the best."""
CLASS_WEIGHT = 0.35
"""Weight of the mean probability of the labels of a class."""
FLIP_SHARE = 0.25
"""Below this share of flips, the ranking gradually uses square roots of the probabilities."""
MISFIT = 0.05
"""Smallest probability that a prediction is wrong, however confident it is.

It is larger for a weak network, which contradicts many labels with low confidence. A mean over
training counts as weak only if it contradicts almost no label with high confidence.
"""
SURE = 0.9
"""The lower end of the noise rate counts labels that are wrong with at least this probability."""
GROUPS, GROUP_SIZE = 10, 100
"""Largest number, and smallest size, of groups of examples of similar confidence."""
FLIPS_CONFIDENCE = 0.95
"""Confidence level of the interval for the rate of flips."""
SAMPLE, SAMPLE_NUMBERS = 10_000, 2_000_000
"""Largest number of examples, and of probabilities, from which the exponent is estimated."""


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """How labels become wrong, as estimated from predictions and labels.

    Attributes:
        transition: T, the rate of each given label (column) for each predicted class (row) among
            the most confident predictions; shape (classes, classes).
        contradicted: share of labels that are not the predicted class.
        flip_share: rate of contradicted labels among the most confident predictions, divided by
            the rate among all; at most 1. It is near 1 if labels are flipped from class to class,
            and near 0 if labels are wrong where examples are hard.
        exponent: most likely exponent of the probabilities, given the labels and T.
        least_flips: lower end of the interval for the rate of contradicted labels among the most
            confident predictions.
        clearest: indices of the labels that the most confident predictions contradict.
    """

    transition: Array
    contradicted: float
    flip_share: float
    exponent: float
    least_flips: float
    clearest: Array


@dataclass(frozen=True, eq=False)
class Posterior:
    """The result of Bayes' rule for each label.

    Attributes:
        wrong: probability that the label is wrong.
        flagged: whether the label is more likely wrong than right. For a weak network, ``wrong`` is
            lowered but ``flagged`` is not.
        other: most probable class other than the given label.
        other_probability: its probability, lowered where it may be a mistake of the network.
        quality: score for the ranking, from 0 to 1; the lower, the more likely the label is wrong.
        certain: share of labels that are wrong even if the network errs on every unclear example; a
            lower bound of the noise rate.
    """

    wrong: Array
    flagged: Array
    other: Array
    other_probability: Array
    quality: Array
    certain: float


def chunks(p: Array) -> Iterator[slice]:
    """Slices of the rows of an array of probabilities, small enough to be copied."""
    n, classes = p.shape
    size = min(CHUNK, max(1, CHUNK_NUMBERS // classes))
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def fit_noise_model(p: Array, y: Array) -> NoiseModel:
    """Estimate how labels become wrong."""
    n, classes = p.shape
    predicted = p.argmax(1)
    confident = _most_confident(predicted, p.max(1), classes)
    counts = count_pairs(predicted[confident], y[confident], classes)
    contradicted = predicted != y
    rate = float(contradicted.mean())
    share = min(1.0, float(contradicted[confident].mean()) / rate) if rate else 0.0
    transition = _shrunk_rates(counts)
    count = min(n, SAMPLE, max(1000, SAMPLE_NUMBERS // classes))
    sample = np.random.default_rng(0).permutation(n)[:count] if count < n else np.arange(n)
    exponent = _fit_exponent(p[sample], y[sample], transition)
    flips, z = float(contradicted[confident].mean()), normal_quantile(FLIPS_CONFIDENCE)
    least, _ = wilson(flips, float(len(confident)), z)
    return NoiseModel(transition, rate, share, exponent, least, confident[contradicted[confident]])


def count_pairs(rows: Array, columns: Array, classes: int) -> Array:
    """Matrix of the number of times that each pair of classes occurs."""
    return np.bincount(rows * classes + columns, minlength=classes**2).reshape(classes, classes)


def _most_confident(predicted: Array, confidence: Array, classes: int) -> Array:
    """Indices of the most confident predictions of each class, at least one of each."""
    order = np.lexsort((-confidence, predicted))
    counts = np.bincount(predicted, minlength=classes)
    starts = np.cumsum(counts) - counts
    stops = starts + np.ceil(CONFIDENT * counts).astype(np.int64)
    return np.concatenate([order[a:b] for a, b in zip(starts, stops, strict=True)])


def _shrunk_rates(counts: Array) -> Array:
    """Rates of each row, shrunk towards one common rate of flips to any other class.

    With many classes, a pair of them has few counts. The strength of the shrinkage is chosen by
    leave-one-out likelihood.
    """
    classes = len(counts)
    counts = counts + 1 / classes  # each pair is possible
    totals = counts.sum(1)
    flips = 1 - np.trace(counts) / totals.sum()
    common = np.full((classes, classes), flips / (classes - 1))
    np.fill_diagonal(common, 1 - flips)
    cells = np.nonzero(counts >= 1)
    seen, expected, of = counts[cells], common[cells], totals[cells[0]]
    fits = [
        float((seen * np.log((seen - 1 + prior * expected) / (of - 1 + prior))).sum())
        for prior in PRIOR_COUNTS
    ]
    candidates = zip(PRIOR_COUNTS, fits, strict=True)
    prior = next(prior for prior, fit in candidates if fit >= max(fits) - TOLERANCE)
    rates: Array = (counts + prior * common) / (totals[:, None] + prior)
    return rates


def _fit_exponent(p: Array, y: Array, transition: Array) -> float:
    """Power of the probabilities that makes the labels most likely, by golden-section search.

    Its logarithm has a standard normal prior, which matters only for very few examples.
    """
    logs, flips = _smooth_log(p), transition.T[y]

    def loss(log_exponent: float) -> float:
        likelihood = (_power(logs, np.exp(log_exponent)) * flips).sum(1)
        return -float(np.log(likelihood).sum()) + log_exponent**2 / 2

    low, high, ratio = np.log(0.1), np.log(20.0), (np.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 0.01:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return float(np.exp((low + high) / 2))


def _smooth_log(p: Array, share: float = SMOOTHING) -> Array:
    logs: Array = np.log((1 - share) * p.astype(np.float64) + share / p.shape[1])
    return logs


def _power(logs: Array, exponent: float) -> Array:
    """Probabilities raised to a power, with rows that sum to 1."""
    z = exponent * logs
    z -= z.max(1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(1, keepdims=True)
    return z


def label_posterior(p: Array, y: Array, model: NoiseModel, *, history: bool = False) -> Posterior:
    """Apply Bayes' rule to each label.

    Args:
        p: predicted probabilities, shape (n, classes).
        y: class index of each label.
        model: how labels become wrong.
        history: whether p is a mean over training on these labels.
    """
    n, classes = p.shape
    power = float(np.sqrt(model.exponent))  # the most likely exponent is too extreme
    eps = HARD * (1 - model.flip_share)
    unexplained = 1 - min(1.0, model.flip_share / (FLIP_SHARE if history else 1.0))
    trust = 1 - MISFIT - unexplained * model.contradicted
    own, own_soft, log_odds, doubt, other_probability = (np.empty(n) for _ in range(5))
    other, certain = np.empty(n, dtype=np.int64), 0
    for part in chunks(p):
        logs, given = _smooth_log(p[part]), y[part]
        rows, flips = np.arange(len(given)), model.transition.T[given]
        own[part] = _power(logs, power)[rows, given]
        likelihood = flips + eps * own[part, None]
        sharp = _smooth_log(p[part], RANK_SMOOTHING)
        own_soft[part] = _power(sharp, 0.5)[rows, given]
        doubt[part], *_ = _against(_power(sharp, SHARPNESS * power) * likelihood, given)
        sharpness = HISTORY_SHARPNESS if history else SHARPNESS
        belief = _power(logs, sharpness * power) * likelihood
        log_odds[part], other[part], other_probability[part] = _against(belief, given)
        by_flips, *_ = _against(_power(logs, model.exponent) * flips, given)
        certain += int((trust * _sigmoid(by_flips) > SURE * (1 - MISFIT)).sum())
    shifts = CLASS_WEIGHT * _typical_log_odds(own, y, classes)
    soft_shifts = _typical_log_odds(own_soft, y, classes)
    weight = min(1.0, model.flip_share / FLIP_SHARE) ** 2
    flagged, wrong, quality = np.empty(n, dtype=bool), log_odds, doubt  # reuses their memory
    for part in chunks(p):
        shift, soft_own = shifts[y[part]], own_soft[part]
        soft = np.log1p(-soft_own) - np.log(soft_own) + soft_shifts[y[part]]
        quality[part] = _sigmoid(-weight * (doubt[part] + shift) - (1 - weight) * soft)
        chance = _sigmoid(log_odds[part] + shift)
        flagged[part], wrong[part] = (1 - MISFIT) * chance > 0.5, trust * chance
    other_probability *= trust
    _limit_probability(other_probability, p, y, model)
    return Posterior(wrong, flagged, other, other_probability, quality, certain / n)


def _limit_probability(probability: Array, p: Array, y: Array, model: NoiseModel) -> None:
    """Lower the probabilities of suggestions that may be mistakes of the network, in place.

    Flips are equally frequent at any confidence. In a group of examples whose labels are
    contradicted more than twice as often, most contradictions may be mistakes: halve the
    probabilities. The median over the most confident contradictions is an upper limit, because
    higher probabilities may be selected by chance.
    """
    contradicted = p.argmax(1) != y
    order = np.argsort(-p.max(1), kind="stable")
    for group in np.array_split(order, max(1, min(GROUPS, len(p) // GROUP_SIZE))):
        if contradicted[group].mean() > 2 * model.least_flips:
            probability[group] *= 0.5
    if len(model.clearest):
        limit = np.median(probability[model.clearest])
        np.minimum(probability, limit, out=probability)


def _against(belief: Array, given: Array) -> tuple[Array, Array, Array]:
    """Log odds against the given labels, the most probable other class and its probability."""
    rows = np.arange(len(given))
    total, right = belief.sum(1), belief[rows, given].copy()
    belief[rows, given] = 0
    wrong, other = belief.sum(1), belief.argmax(1)
    return np.log(wrong) - np.log(right), other, belief[rows, other] / total


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    probability: Array = np.where(x >= 0, 1, e) / (1 + e)
    return probability


def _typical_log_odds(own: Array, y: Array, classes: int) -> Array:
    """Log odds of the mean probability of the labels of each class."""
    counts, sums = (np.bincount(y, weights, minlength=classes) for weights in (None, own))
    mean = (sums / np.maximum(counts, 1)).clip(0.01, 0.99)
    typical: Array = np.log(mean / (1 - mean))
    return typical
