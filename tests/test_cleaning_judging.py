"""From probabilities to judgements: closed forms, limits, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuvar.cleaning import judge_labels
from neuvar.cleaning.posterior import fit_noise_model
from neuvar.measures import Proportion
from neuvar.measures.estimate import normal_quantile, wilson


def sure(classes, count, *, given, true, certainty=1.0):
    """Examples of which a network is equally sure."""
    p = np.full((count, classes), (1 - certainty) / (classes - 1))
    p[:, true] = certainty
    return p, np.full(count, given)


def together(*parts):
    p, y = zip(*parts, strict=True)
    return np.concatenate(p), np.concatenate(y)


def noisy(rng, n=600, classes=4, rate=0.3):
    """A network that is right and sure, and labels of which a share went to the next class."""
    true = rng.integers(classes, size=n)
    wrong = rng.random(n) < rate
    p = np.full((n, classes), 0.02)
    p[np.arange(n), true] = 1 - 0.02 * (classes - 1)
    return p, np.where(wrong, (true + 1) % classes, true), wrong


class TestOneExample:
    def test_flag_suggestion_and_quality(self):
        p = [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.4, 0.4, 0.2]]
        found = judge_labels(p, [0, 2, 1])
        assert found.flagged.tolist() == [False, True, False]  # not one that is only as probable
        assert found.suggested.tolist() == [0, 1, 1]
        assert found.ranked.tolist() == [1, 2, 0]
        assert found.worst.tolist() == [1]
        assert found.sure(0.2).tolist() == [False, True, False]
        assert found.cleaned.tolist() == [0, 2, 1]  # one example of three is no proof
        assert found.pairs.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
        assert len(found) == 3
        assert found.names == ("0", "1", "2")

    @given(st.integers(0, 10_000), st.integers(2, 6), st.booleans())
    def test_what_is_flagged_is_more_likely_wrong_than_right(self, seed, classes, history):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.ones(classes), size=30)
        y = rng.integers(classes, size=30)
        found = judge_labels(p, y, history=history)
        contradicted = p.argmax(1) != y
        assert not found.flagged[~contradicted].any()
        lowest = found.error_probability[found.flagged].min(initial=1)
        assert (found.error_probability[contradicted & ~found.flagged] <= lowest).all()
        assert (found.suggested != y).tolist() == contradicted.tolist()
        for values in (found.quality, found.error_probability, found.suggestion_probability):
            assert ((values >= 0) & (values <= 1)).all()
        assert (found.suggestion_probability <= 0.95).all()
        assert (np.diff(found.quality[found.ranked]) >= 0).all()
        sure = found.sure()
        assert (found.cleaned[sure] == found.suggested[sure]).all()
        assert (found.cleaned[~sure] == y[~sure]).all()
        assert (sure == (found.flagged & (found.suggestion_probability >= 0.9))).all()
        assert found.pairs.sum() == found.flagged.sum()
        assert np.trace(found.pairs) == 0

    def test_quality_is_invariant_under_the_names_of_classes(self):
        rng = np.random.default_rng(3)
        p, y, _ = noisy(rng)
        turned = rng.permutation(4)
        one, other = judge_labels(p, y), judge_labels(p[:, np.argsort(turned)], turned[y])
        assert (one.quality == other.quality).all()
        assert one.noise_rate.value == pytest.approx(other.noise_rate.value)
        matrix = other.transition.matrix[np.ix_(turned, turned)]
        assert matrix == pytest.approx(one.transition.matrix)

    def test_labels_of_one_class_are_ranked_by_their_probability(self):
        p = np.random.default_rng(0).dirichlet([1, 1], size=20)
        found = judge_labels(p, np.zeros(20, dtype=int))
        assert found.ranked.tolist() == np.argsort(p[:, 0]).tolist()

    def test_a_class_that_is_learned_less_well_keeps_its_examples(self):
        """Of 12 examples of the second class, which all seem to be of the first, two are wrong."""
        p = np.array([[0.9, 0.1]] * 100 + [[0.6, 0.4]] * 10 + [[0.9, 0.1]] * 2)
        y = np.array([0] * 100 + [1] * 12)
        found = judge_labels(p, y)
        assert np.flatnonzero(found.flagged).tolist() == [110, 111]
        assert (found.suggested == 0).all()
        assert found.transition.matrix == pytest.approx(np.array([[100 / 102, 2 / 102], [0, 1]]))
        never = judge_labels([[1.0, 0.0], [1.0, 0.0]], [1, 1])  # a probability of nothing at all
        assert never.flagged.all()

    def test_many_examples_are_judged_as_few_are(self, monkeypatch):
        p, y, _ = noisy(np.random.default_rng(4))
        whole = judge_labels(p, y)
        monkeypatch.setattr("neuvar.cleaning.posterior.CHUNK", 7)
        parts = judge_labels(p, y)
        assert (parts.quality == whole.quality).all()
        assert (parts.flagged == whole.flagged).all()

    def test_the_precision_of_probabilities_is_kept_and_they_are_left_alone(self):
        for kind in (np.float32, np.float64):
            p = np.full((2, 3), 1 / 3 + 1e-4, dtype=kind)
            before = p.copy()
            found = judge_labels(p, [0, 1])
            assert found.probabilities.dtype == kind
            assert found.probabilities.sum(1) == pytest.approx(1)
            assert (p == before).all()
        assert judge_labels(np.eye(2, dtype=np.int8), [0, 1]).probabilities.dtype == np.float64


class TestAll:
    def test_a_network_that_knows_counts_the_wrong_labels(self):
        p, y = together(
            sure(3, 70, given=0, true=0),
            sure(3, 30, given=0, true=1),
            sure(3, 50, given=1, true=1),
            sure(3, 50, given=2, true=2),
        )
        found = judge_labels(p, y)
        assert found.noise_rate.value == pytest.approx(30 / 200)
        assert found.transition.matrix == pytest.approx(
            np.array([[1, 0, 0], [30 / 80, 50 / 80, 0], [0, 0, 1]])
        )
        low, high = Proportion(30, 80).interval
        assert found.transition.low[1, 0] == pytest.approx(low)
        assert found.transition.high[1, 0] == pytest.approx(high)
        low, high = Proportion(30, 200).interval
        assert (found.noise_rate.low, found.noise_rate.high) == pytest.approx((low, high))

    def test_all_right(self):
        p, y = together(sure(2, 40, given=0, true=0), sure(2, 40, given=1, true=1))
        found = judge_labels(p, y)
        assert (found.noise_rate.value, found.noise_rate.low) == (0, 0)
        assert 0 < found.noise_rate.high < 0.1
        assert not found.flagged.any()
        assert found.transition.matrix.tolist() == [[1, 0], [0, 1]]
        high = 100 * found.noise_rate.high
        assert str(found) == (
            f"0 of 80 labels are flagged; about 0.0 % [0.0, {high:.1f}] of all labels are wrong"
        )

    def test_intervals_hold_the_truth_as_often_as_they_say(self):
        rng, hits, cells = np.random.default_rng(5), 0, 0
        for _ in range(400):
            p, y, _ = noisy(rng)
            found = judge_labels(p, y, confidence=0.9)
            hits += found.noise_rate.low <= 0.3 <= found.noise_rate.high
            cells += found.transition.low[2, 3] <= 0.3 <= found.transition.high[2, 3]
        sigma = (0.9 * 0.1 / 400) ** 0.5
        assert abs(hits / 400 - 0.9) < 4 * sigma
        assert abs(cells / 400 - 0.9) < 4 * sigma
        assert found.noise_rate.confidence == found.transition.confidence == 0.9

    def test_a_class_without_labels_and_one_without_examples(self):
        p, y = together(
            sure(4, 40, given=0, true=0, certainty=0.97),
            sure(4, 40, given=1, true=1, certainty=0.97),
            sure(4, 10, given=1, true=2, certainty=0.97),
        )
        found = judge_labels(p, y)
        assert found.suggested[-1] == 2
        assert np.isfinite(found.transition.matrix[:3]).all()
        assert np.isnan(found.transition.matrix[3]).all()
        assert np.isnan(found.transition.low[3]).all()
        assert 0 <= found.noise_rate.low <= found.noise_rate.value <= found.noise_rate.high <= 1

    @pytest.mark.parametrize("confidence", [1e-300, 0.5, 0.95, 1 - 1e-12])
    def test_all_intervals_at_once_are_those_of_each(self, confidence):
        of = np.array([[1.0], [7.0], [60.0], [0.0]])
        z = normal_quantile(confidence)
        with np.errstate(all="ignore"):
            share = np.array([[0, 1, 1], [0, 3, 7], [2, 59, 60], [0, 0, 0]]) / of
            low, high = wilson(share, of, z)
        for i, j in np.ndindex(3, 3):
            one = wilson(float(share[i, j]), float(of[i, 0]), z)
            assert all(type(end) is float for end in one)
            assert (low[i, j], high[i, j]) == pytest.approx(one, rel=1e-15, abs=0)
        assert np.isnan([low[3], high[3]]).all()

    def test_many_classes_are_not_gone_through_one_by_one(self, monkeypatch):
        calls = []
        monkeypatch.setattr(
            "neuvar.cleaning.score.wilson", lambda *how: calls.append(how) or wilson(*how)
        )
        y = np.arange(200) % 100
        found = judge_labels(np.eye(100)[y], y)
        assert len(calls) == 2  # the noise rate, and the matrix
        low, high = Proportion(count=2, of=2).interval
        assert (found.transition.low[5, 5], found.transition.high[5, 5]) == (low, high)

    @given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 12))
    def test_rows_are_distributions_inside_their_intervals(self, seed, classes, n):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(classes, 0.3), size=n)
        found = judge_labels(p, rng.integers(classes, size=n))
        matrix = found.transition.matrix
        known = np.isfinite(matrix).all(1)
        assert matrix[known].sum(1) == pytest.approx(1)
        assert np.isnan(matrix[~known]).all()
        assert (found.transition.low[known] <= matrix[known] + 1e-12).all()
        assert (found.transition.high[known] >= matrix[known] - 1e-12).all()
        rate = found.noise_rate
        assert 0 <= rate.low <= rate.value + 1e-12
        assert rate.value <= rate.high + 1e-12 <= 1 + 2e-12


class TestPosterior:
    """Where the true rates are known, so is the probability that a label is wrong."""

    def drawn(self, rng, transition, n=20_000):
        """Calibrated predictions of the true class, and labels that are flipped at fixed rates."""
        classes = len(transition)
        p = rng.dirichlet(np.full(classes, 0.15), size=n)
        true = (p.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=classes - 1)
        flip = transition.cumsum(1)[true] < rng.random((n, 1))
        return p, true, flip.sum(1).clip(max=classes - 1)

    def test_flips_are_found_and_their_probability_is_right(self):
        transition = np.array([[0.8, 0.2, 0.0], [0.0, 0.9, 0.1], [0.3, 0.0, 0.7]])
        p, true, given = self.drawn(np.random.default_rng(1), transition)
        model, found = fit_noise_model(p, given), judge_labels(p, given)
        assert model.transition == pytest.approx(transition, abs=0.05)
        assert model.exponent == pytest.approx(1, rel=0.1)
        assert model.flip_share > 0.5
        wrong, belief = given != true, p * transition.T[given]
        exact = 1 - belief[np.arange(len(p)), given] / belief.sum(1)
        best = 2 * (wrong & (exact > 0.5)).sum() / (wrong.sum() + (exact > 0.5).sum())
        f1 = 2 * (wrong & found.flagged).sum() / (wrong.sum() + found.flagged.sum())
        assert f1 > best - 0.02
        for low, high in ((0.5, 0.7), (0.7, 0.8), (0.8, 1.0)):
            chosen = found.flagged & (found.error_probability >= low)
            chosen &= found.error_probability < high
            assert wrong[chosen].mean() > low - 0.1
        sure = found.sure(0.8)
        assert sure.mean() > 0.05
        assert (found.suggested[sure] == true[sure]).mean() > 0.8
        rate = found.noise_rate
        assert rate.low <= wrong.mean() <= rate.high

    def test_without_flips_the_hard_examples_come_first(self):
        """Labels drawn from the predictions themselves: none is contradicted with confidence."""
        rng = np.random.default_rng(2)
        p = rng.dirichlet(np.full(4, 0.1), size=4000)
        given = (p.cumsum(1) < rng.random((4000, 1))).sum(1).clip(max=3)
        assert fit_noise_model(p, given).flip_share < 0.1
        found = judge_labels(p, given)
        own = p[np.arange(4000), given]
        assert own[found.ranked[:200]].max() < 0.5
        assert found.sure().mean() < 0.01

    def test_a_history_is_taken_to_be_flatter_than_the_belief(self):
        p, y, _ = noisy(np.random.default_rng(4))
        p = 0.5 * p + 0.125
        one, other = judge_labels(p, y), judge_labels(p, y, history=True)
        assert (one.quality == other.quality).all()
        assert (other.error_probability[other.flagged] > one.error_probability[other.flagged]).all()

    @pytest.mark.parametrize("history", [False, True])
    def test_nothing_is_replaced_if_no_confident_prediction_contradicts_a_label(self, history):
        p = np.array([[0.999, 0.001]] * 500 + [[0.001, 0.999]] * 500 + [[0.05, 0.95]] * 150)
        y = np.array([0] * 500 + [1] * 500 + [0] * 150)
        found = judge_labels(p, y, history=history)
        assert found.flagged[-150:].all()
        assert (found.error_probability[-150:] < 0.9).all()
        assert (found.cleaned == y).all()

    def test_very_small_probabilities_are_ranked(self):
        """An overconfident network: right labels at 1e-4, wrong ones at 1e-6, none is 0."""
        y = np.arange(600) % 3
        p = np.full((600, 3), 0.0005)
        p[np.arange(600), y] = 0.999
        p[:20] = [[0.9998, 0.0001, 0.0001], [0.7, 0.3 - 1e-6, 1e-6]] * 10
        y[:20] = 2
        found = judge_labels(p, y)
        assert sorted(found.ranked[:10]) == list(range(1, 20, 2))

    def test_rates_of_many_classes_are_shrunk_and_those_of_few_are_not(self):
        rng = np.random.default_rng(6)
        true = rng.integers(100, size=10_000)
        given = np.where(rng.random(10_000) < 0.3, rng.integers(100, size=10_000), true)
        p = np.full((10_000, 100), 0.001)
        p[np.arange(10_000), true] = 0.901
        transition = fit_noise_model(p, given).transition
        assert transition.sum(1) == pytest.approx(1)
        flips = transition[~np.eye(100, dtype=bool)]
        assert flips.max() < 3 * flips.min()  # counts are from 0 to 2
        p, y, _ = noisy(rng, n=6000)
        transition = fit_noise_model(p, y).transition
        assert transition[0, 1] == pytest.approx(0.3, abs=0.06)
        assert transition[0, 2] < 0.01

    def test_nothing_is_replaced_where_mistakes_outnumber_flips(self):
        """5 % flips everywhere, and a network that is mostly wrong where it is less confident."""
        rng = np.random.default_rng(7)
        true = rng.integers(3, size=3000)
        predicted, top = true.copy(), np.full(3000, 0.995)
        top[:300] = 0.993
        predicted[:300] = np.where(rng.random(300) < 0.6, (true[:300] + 1) % 3, true[:300])
        p = np.repeat((1 - top)[:, None] / 2, 3, axis=1)
        p[np.arange(3000), predicted] = top
        given = np.where(rng.random(3000) < 0.05, (true + 2) % 3, true)
        found = judge_labels(p, given)
        assert found.flagged[:300].mean() > 0.5
        sure = found.sure(0.8)
        assert not sure[:300].any()
        assert sure[300:].mean() > 0.03
        assert (found.suggested == true)[sure].all()

    def test_a_few_suggestions_are_not_more_certain_than_the_clearest_ones(self):
        p, y, _ = noisy(np.random.default_rng(8))
        found = judge_labels(p, y)
        clearest = fit_noise_model(p, y).clearest
        limit = np.median(found.suggestion_probability[clearest])
        assert (found.suggestion_probability <= limit + 1e-12).all()

    def test_a_sample_of_many_examples_is_enough_for_the_exponent(self, monkeypatch):
        transition = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
        p, _, given = self.drawn(np.random.default_rng(3), transition)
        whole = fit_noise_model(p, given)
        monkeypatch.setattr("neuvar.cleaning.posterior.SAMPLE", 2000)
        part = fit_noise_model(p, given)
        assert part.exponent == pytest.approx(whole.exponent, rel=0.2)
        assert (part.transition == whole.transition).all()


class TestWhatItTakes:
    def test_lists_arrays_and_tensors(self):
        p, y = [[0.9, 0.1], [0.3, 0.7]], [1, 1]
        first = judge_labels(p, y)
        for kind in (np.array, torch.tensor):
            again = judge_labels(kind(p), kind(y))
            assert again.quality == pytest.approx(first.quality, abs=1e-7)
        assert judge_labels(
            torch.tensor(p, requires_grad=True), np.array([1.0, 1.0])
        ).labels.dtype == (np.int64)

    def test_what_is_given_is_left_alone(self):
        p, y = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([1, 1])
        found = judge_labels(p, y)
        found.probabilities[0] = 0
        assert p.tolist() == [[0.9, 0.1], [0.3, 0.7]]

    @pytest.mark.parametrize(
        ("p", "y", "word"),
        [
            ([[0.5, 0.5]], [0, 1], "the same length, got 1 and 2"),
            ([[0.5, 0.5]], [2], "labels must be from 0 to 1 .* got 2"),
            ([[0.5, 0.5]], [-1], "labels must be from 0 to 1 .* got -1"),
            ([[0.5, 0.5]], [0.5], "labels must be integers"),
            ([[0.5, 0.5]], ["a"], "labels must be a list of integers"),
            ([[0.5, 0.5]], [[0]], r"labels must have the shape \(n,\) .* got \(1, 1\)"),
            ([[0.5, 0.6]], [0], "row 0 sums to 1.1"),
            ([[1.5, -0.5]], [0], "not negative"),
            ([[np.nan, 1.0]], [0], "finite"),
            ([[1.0]], [0], "at least 2 classes"),
            ([0.5, 0.5], [0], r"got shape \(2,\)"),
            (np.zeros((0, 2)), [], "numbers of shape"),
            ([["a", "b"]], [0], "numbers of shape"),
        ],
    )
    def test_the_rest_gets_a_sentence(self, p, y, word):
        with pytest.raises(ValueError, match=word):
            judge_labels(p, y)

    def test_names(self):
        assert judge_labels([[0.5, 0.5]], [0], names=["cat", "dog"]).names == ("cat", "dog")
        with pytest.raises(ValueError, match="names must have one for each of 2 classes, got 1"):
            judge_labels([[0.5, 0.5]], [0], names=["cat"])
        with pytest.raises(ValueError, match="confidence"):
            judge_labels([[0.5, 0.5]], [0], confidence=1.0)
