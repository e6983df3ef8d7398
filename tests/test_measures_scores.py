"""Log loss, Brier score, selective accuracy and the area under the ROC curve, by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.metrics import log_loss as sklearn_log_loss
from torch.nn.functional import cross_entropy, one_hot

from neuvar.measures import brier_score, log_loss, ood_auroc, selective_accuracy


def scores(n=400, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).flatten()
    return logits, labels


# --- proper scores ---


def test_log_loss_is_the_cross_entropy():
    logits, labels = scores()
    found = log_loss(logits, labels, logits=True)
    assert found.mean == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-12)
    assert found.mean == pytest.approx(sklearn_log_loss(labels, logits.softmax(1)), rel=1e-12)
    assert found.samples == 400
    each = cross_entropy(logits, labels, reduction="none")
    assert found.stderr == pytest.approx(each.std().item() / 20, rel=1e-12)
    assert log_loss(logits.softmax(1), labels, logits=False).mean == pytest.approx(found.mean)


def test_log_loss_of_large_logits_is_finite():
    """Their probabilities are 0 and 1 in double precision."""
    found = log_loss(torch.tensor([[5000.0, 0.0], [0.0, 1000.0]]), [1, 1], logits=True)
    assert found.mean == pytest.approx(2500)
    impossible = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert log_loss(impossible, [1, 0], logits=True).mean == math.inf


def test_brier_score_is_the_squared_distance():
    logits, labels = scores()
    p = logits.softmax(1)
    expected = (p - one_hot(labels, 5)).square().sum(1).mean()
    assert brier_score(logits, labels, logits=True).mean == pytest.approx(expected.item())
    two = torch.stack([1 - p[:, 0], p[:, 0]], 1)
    binary = (labels == 0).long()
    ours = brier_score(two, binary, logits=False).mean
    assert ours == pytest.approx(2 * brier_score_loss(binary, p[:, 0]))


def test_scores_by_hand():
    p = [[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]]
    assert log_loss(p, [0, 2], logits=False).mean == pytest.approx(-math.log(0.35) / 2)
    assert brier_score(p, [0, 2], logits=False).mean == pytest.approx((0.14 + 0.5) / 2)
    assert log_loss(p, [0, 0], logits=False).mean == math.inf
    assert brier_score(p, [0, 0], logits=False).mean == pytest.approx((0.14 + 1.5) / 2)


@pytest.mark.parametrize("score", [log_loss, brier_score])
def test_score_intervals_cover(score):
    """Of labels drawn from the predicted probabilities."""
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    entropy, brier = torch.special.entr(p).sum(), 1 - p.square().sum()
    truth = (entropy if score is log_loss else brier).item()
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        labels = torch.multinomial(p, 300, replacement=True, generator=generator)
        low, high = score(p.expand(300, 3), labels, logits=False).interval
        inside += low <= truth <= high
    assert 0.92 <= inside / 400 <= 0.98


@pytest.mark.parametrize("measure", [log_loss, brier_score, selective_accuracy])
def test_bad_arguments_of_scores(measure):
    logits, labels = scores(10)
    with pytest.raises(ValueError, match="labels must be 10 class labels below 5"):
        measure(logits, labels + 3, logits=True)
    with pytest.raises(ValueError, match="outputs must be probabilities"):
        measure(logits, labels, logits=False)
    with pytest.raises(ValueError, match="logits must be True or False"):
        measure(logits, labels, logits=None)
    with pytest.raises(ValueError, match="confidence must be"):
        measure(logits, labels, logits=True, confidence=2)


# --- selective accuracy ---


def selective(sure, right, **options):
    sure = np.asarray(sure, float)
    outputs = np.column_stack([sure, 1 - sure])
    labels = np.where(np.asarray(right, bool), 0, 1)
    return selective_accuracy(outputs, labels, logits=False, **{"resamples": 200, **options})


def test_selective_accuracy_by_hand():
    found = selective([0.6, 0.9, 0.7, 0.8], [0, 1, 1, 0])
    assert found.thresholds.tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert found.coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert found.accuracy.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 2 / 4])
    assert found.area == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert (found.at(0.75).count, found.at(0.75).of) == (2, 3)
    assert (found.at(0.51).count, found.at(0.51).of) == (2, 3)
    assert found.at(1).value == 0.5
    assert found.n == 4


def test_confidence_of_selective_accuracy():
    """Of the area, and of the accuracy at a coverage: Wilson's interval of 30 of 40."""
    sure, right = np.linspace(0.55, 0.99, 80), [0] * 10 + [1] * 30 + [0] * 10 + [1] * 30
    wide, narrow = (selective(sure, right, confidence=level) for level in (0.95, 0.5))
    low, high = wide.at(0.5).interval
    assert (wide.at(0.5).count, wide.at(0.5).of) == (30, 40)
    assert (low, high) == pytest.approx((0.5981, 0.8581), abs=1e-4)
    assert low < narrow.at(0.5).interval[0] < narrow.at(0.5).interval[1] < high
    assert wide.interval[0] < narrow.interval[0] < narrow.interval[1] < wide.interval[1]


def test_coverage_is_not_rounded_up():
    found = selective(np.linspace(0.55, 0.99, 10), [1] * 10)
    assert [found.at(k / 10).of for k in range(1, 11)] == list(range(1, 11))


def test_ties_are_kept_together():
    found = selective([0.9, 0.8, 0.8, 0.8, 0.6], [1, 1, 0, 0, 1])
    assert found.kept.tolist() == [1, 4, 5]
    assert found.right.tolist() == [1, 2, 3]
    assert found.area == pytest.approx((1 * 1 + 3 * 2 / 4 + 1 * 3 / 5) / 5)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 0.6, 0.9]), st.booleans()), min_size=2),
    st.randoms(use_true_random=False),
)
def test_order_of_examples_does_not_matter(rows, random):
    one, other = (
        selective(*zip(*r, strict=True), resamples=100)
        for r in (rows, random.sample(rows, len(rows)))
    )
    assert one.area == pytest.approx(other.area)
    assert one.right.tolist() == other.right.tolist()


def test_other_scores_and_limits():
    right = np.array([1, 0, 1, 0, 1])
    best = selective([0.6] * 5, right, score=right)
    worst = selective([0.6] * 5, right, score=-right)
    none = selective([0.6] * 5, right)
    assert worst.area < none.area == 0.6 < best.area
    assert best.at(0.5).value == 1
    assert selective([0.6, 0.7], [1, 1]).interval == (1, 1)
    with pytest.raises(ValueError, match="score must be 5 finite numbers"):
        selective([0.6] * 5, right, score=[1, 2])
    with pytest.raises(ValueError, match="coverage must be"):
        none.at(0)


def test_area_interval_covers():
    """Of a score that is uniform, with an accuracy of 0.5 + s/2: the area is 1 - 1/4."""
    generator, inside = np.random.default_rng(0), 0
    # The surest share c has a mean accuracy of 1 - c/4; its mean over c is 7/8.
    for seed in range(200):
        s = generator.random(400)
        right = generator.random(400) < 0.5 + s / 2
        found = selective(np.full(400, 0.6), right, score=s, seed=seed)
        inside += found.interval[0] <= 7 / 8 <= found.interval[1]
    assert 0.9 <= inside / 200 <= 0.99


def test_plots_are_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = selective(np.linspace(0.5, 1, 100), np.arange(100) % 3 > 0)
    ax = found.plot(label="mine")
    assert ax.get_xlabel().startswith("coverage")
    assert found.plot(ax) is ax
    assert len(ax.lines) == 2
    pyplot.close("all")


# --- area under the ROC curve ---


def test_area_against_all_pairs():
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 8, 30), generator.integers(3, 11, 40)
    pairs = [(x < y) + (x == y) / 2 for x, y in itertools.product(a, b)]
    found = ood_auroc(a, b)
    assert found.value == pytest.approx(np.mean(pairs))
    truth = [0] * 30 + [1] * 40
    assert found.value == pytest.approx(roc_auc_score(truth, np.concatenate([a, b])))
    assert ood_auroc(b, a).value == pytest.approx(1 - found.value)
    assert (found.inside, found.outside) == (30, 40)


def test_delong_by_hand():
    a, b = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0])
    # 3 is above 2 of 3, 5 above all; 1 and 2 are below both, 4 below 1 of 2.
    v10, v01 = np.array([2 / 3, 1]), np.array([1, 1, 0.5])
    variance = v10.var(ddof=1) / 2 + v01.var(ddof=1) / 3
    assert ood_auroc(a, b).stderr == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_area_interval_covers_normal_scores(shift):
    generator, inside = np.random.default_rng(0), 0
    truth = 0.5 * math.erfc(-shift / 2)
    for _ in range(400):
        found = ood_auroc(generator.normal(size=60), generator.normal(shift, size=80))
        inside += found.interval[0] <= truth <= found.interval[1]
    assert 0.92 <= inside / 400 <= 0.985


def test_separated_scores_have_an_interval():
    found = ood_auroc(np.arange(50), np.arange(50, 90))
    assert (found.value, found.stderr) == (1, 0)
    assert 0.9 < found.interval[0] < 1
    assert found.interval[1] == 1
    reverse = ood_auroc(np.arange(50, 90), np.arange(50))
    assert reverse.interval == pytest.approx((0, 1 - found.interval[0]))
    assert str(found).startswith("1 [")


def test_bad_scores():
    for bad in ([1.0], [[1.0, 2.0]], [1.0, math.nan], "words"):
        with pytest.raises(ValueError, match="outside must be"):
            ood_auroc([0.0, 1.0], bad)
