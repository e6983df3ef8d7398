"""Shares of labels against counts by hand, and plateaus against curves whose truth is known."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

from neuvar.measures.estimate import Proportion
from neuvar.measures.memorization import Plateau, label_memorization, plateau_noise_rate

# --- proportions ---


@pytest.mark.parametrize(
    ("count", "of"), [(0, 1), (1, 1), (0, 20), (20, 20), (8, 20), (1, 10**7), (49_999, 50_000)]
)
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999, 1 - 1e-9])
def test_interval_is_wilsons(count, of, confidence):
    expected = stats.binomtest(count, of).proportion_ci(confidence, method="wilson")
    # scipy loses digits to cancellation near 0 and 1.
    found = Proportion(count, of, confidence).interval
    assert found == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)


@given(st.integers(1, 10**9), st.data())
def test_interval_holds_the_share_and_is_symmetric(of, data):
    count = data.draw(st.integers(0, of))
    low, high = Proportion(count, of).interval
    other_low, other_high = Proportion(of - count, of).interval
    assert 0 <= low <= count / of <= high <= 1
    assert (low, high) == pytest.approx((1 - other_high, 1 - other_low), abs=1e-12)
    assert (low == 0) == (count == 0)
    assert (high == 1) == (count == of)


@pytest.mark.parametrize("confidence", [1e-300, 0.5, 0.95, math.nextafter(1, 0)])
def test_interval_ends_exactly_where_none_or_all_count(confidence):
    assert Proportion(0, 7, confidence).interval[0] == 0
    assert Proportion(7, 7, confidence).interval[1] == 1
    assert Proportion(0, 7, confidence).interval[1] == pytest.approx(
        1 - Proportion(7, 7, confidence).interval[0]
    )


def test_proportion_value_and_standard_error():
    found = Proportion(count=3, of=4)
    assert found.value == 0.75
    assert found.stderr == math.sqrt(0.75 * 0.25 / 4)
    assert Proportion(0, 4).stderr == Proportion(4, 4).stderr == 0


def test_proportion_of_nothing_says_nothing():
    nothing = Proportion(0, 0)
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.stderr)
    assert nothing.interval == (0, 1)


def test_proportion_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Proportion(1, 2).count = 2


@pytest.mark.parametrize(
    ("count", "of", "sentence"),
    [
        (-1, 3, "count must be an integer >= 0, got -1"),
        (1.0, 3, "count must be an integer >= 0, got 1.0"),
        (True, 3, "count must be an integer >= 0, got True"),
        (1, "3", "of must be an integer >= 0, got '3'"),
        (4, 3, "count must be at most of = 3, got 4"),
    ],
)
def test_proportion_refuses(count, of, sentence):
    with pytest.raises(ValueError, match=sentence):
        Proportion(count, of)


@pytest.mark.parametrize("confidence", [0, 1, 0.0, 1.0, 95, -0.1, math.nan, "0.95", None, True])
def test_interval_refuses_what_is_no_confidence(confidence):
    with pytest.raises(ValueError, match="confidence must be a finite number > 0 and < 1, got"):
        Proportion(0, 0, confidence)


# --- memorization ---

CLEAN = [0, 0, 1, 1, 2, 2, 0, 1, 2, 0]
NOISY = [0, 0, 1, 1, 2, 2, 1, 2, 0, 1]  # the last four are wrong
GUESS = [0, 0, 1, 2, 2, 0, 1, 1, 1, 2]  # four of six learned; memorized, corrected, other, other


def counts(found):
    return {name: (p["count"], p["of"]) for name, p in dataclasses.asdict(found).items()}


def test_memorization_by_hand():
    assert counts(label_memorization(GUESS, clean=CLEAN, noisy=NOISY)) == {
        "clean_learned": (4, 6),
        "noisy_memorized": (1, 4),
        "noisy_corrected": (1, 4),
        "other": (2, 4),
        "noise_rate": (4, 10),
        "train_accuracy": (5, 10),
    }


@pytest.mark.parametrize(
    ("guess", "learned", "memorized", "corrected"),
    [(NOISY, 1, 1, 0), (CLEAN, 1, 0, 1), ([3] * 10, 0, 0, 0)],
)
def test_memorization_in_the_limits(guess, learned, memorized, corrected):
    found = label_memorization(guess, clean=CLEAN, noisy=NOISY)
    assert found.clean_learned.value == learned
    assert found.noisy_memorized.value == memorized
    assert found.noisy_corrected.value == corrected
    assert found.other.value == 1 - memorized - corrected


def test_without_wrong_labels_their_shares_are_nan():
    found = label_memorization(GUESS, clean=CLEAN, noisy=CLEAN)
    assert found.noise_rate == Proportion(0, 10)
    assert found.noisy_memorized == found.noisy_corrected == found.other == Proportion(0, 0)
    assert found.clean_learned == found.train_accuracy


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40))
def test_shares_of_wrong_labels_sum_to_one_exactly(rows):
    guess, clean, noisy = map(list, zip(*rows, strict=True))
    found = label_memorization(guess, clean=clean, noisy=noisy)
    parts = (found.noisy_memorized, found.noisy_corrected, found.other)
    if found.noise_rate.count:
        assert sum(Fraction(p.count, p.of) for p in parts) == 1
    learned = found.clean_learned.count + found.noisy_memorized.count
    assert learned == found.train_accuracy.count
    assert found.clean_learned.of + found.other.of == len(rows)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, "numpy", "list"]
)
def test_logits_count_as_their_largest(dtype):
    logits = torch.full((10, 4), -1.0)
    logits[range(10), GUESS] = 2.0
    logits[0, 3] = -math.inf
    if dtype == "numpy":
        logits = logits.numpy()
        logits.flags.writeable = False
    else:
        logits = logits.tolist() if dtype == "list" else logits.to(dtype).requires_grad_()
    found = label_memorization(logits, clean=CLEAN, noisy=NOISY)
    assert found == label_memorization(GUESS, clean=CLEAN, noisy=NOISY)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.uint16])
def test_labels_of_any_integer_type(dtype):
    clean, noisy, guess = (torch.tensor(x).to(dtype) for x in (CLEAN, NOISY, GUESS))
    found = label_memorization(guess, clean=clean, noisy=noisy.numpy())
    assert found == label_memorization(GUESS, clean=CLEAN, noisy=NOISY)


def test_equal_logits_count_as_the_first():
    found = label_memorization(torch.zeros(2, 3), clean=[0, 1], noisy=[0, 1])
    assert found.train_accuracy == Proportion(1, 2)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"clean": [0, 1]}, "same length, got 3, 2 and 3"),
        ({"predictions": [0, 1]}, "same length, got 2, 3 and 3"),
        ({"noisy": [0.0, 1.0, 2.0]}, r"noisy must be integer class labels, got torch.float64"),
        ({"clean": [True, False, True]}, r"clean must be integer class labels, got torch.bool"),
        ({"clean": [0, 1, -1]}, "clean must be class labels >= 0, got -1"),
        ({"predictions": [0, 1, -100]}, "predictions must be class labels >= 0, got -100"),
        (
            {"predictions": [0.0, 1.0, 2.0]},
            "predictions must be integer class labels, got torch.float64",
        ),
        ({"predictions": [0.0, math.nan, 2.0]}, "predictions must be integer class labels"),
        ({"predictions": [[0.1, math.nan, 1]] * 3}, "predictions must not be nan, got 3 nan"),
        ({"predictions": [[1, 0, 0]] * 3}, "floating-point .* got torch.int64 of \\(3, 3\\)"),
        ({"predictions": [[0.5]] * 3}, "two classes, got torch.float64 of \\(3, 1\\)"),
        ({"predictions": [[0.5, 0.5]] * 3}, "clean must be below the 2 classes .* got 2"),
        ({"noisy": [[0], [1], [2]]}, "noisy must have shape \\(n,\\) .* got \\(3, 1\\)"),
        ({"predictions": torch.zeros(3, 2, 2)}, "shape \\(n,\\) or \\(n, classes\\), got"),
        ({"predictions": [], "clean": [], "noisy": []}, "at least one example, got \\(0,\\)"),
        ({"clean": None}, "clean must be a tensor, an array or a list of numbers, got NoneType"),
        ({"clean": "012"}, "clean must be a tensor, an array or a list of numbers, got str"),
    ],
)
def test_memorization_refuses(changed, sentence):
    good = {"predictions": [0, 1, 2], "clean": [0, 1, 2], "noisy": [0, 2, 1]}
    label_memorization(**good)
    with pytest.raises(ValueError, match=sentence):
        label_memorization(**{**good, **changed})


def test_noisy_alone_may_have_too_large_a_class():
    with pytest.raises(ValueError, match="noisy must be below the 2 classes"):
        label_memorization([[0.5, 0.5]] * 2, clean=[0, 1], noisy=[0, 2])


# --- plateaus ---


def approach(generator, *, epochs, wrong, time, spread=0.001, autocorrelation=0.3):
    """A curve that nears 1 - wrong exponentially, with first-order autoregressive noise."""
    e = generator.normal(size=epochs) * spread
    for t in range(1, epochs):
        e[t] = autocorrelation * e[t - 1] + math.sqrt(1 - autocorrelation**2) * e[t]
    return np.clip(1 - wrong - 0.5 * np.exp(-np.arange(epochs) / time) + e, 0, 1)


@pytest.mark.parametrize("height", [0.0, 0.6, 1.0])
def test_constant_curve_is_a_plateau_without_error(height):
    found = plateau_noise_rate([height] * 12)
    assert found.reached
    assert found.window == 10
    assert found.noise_rate == pytest.approx(1 - height, abs=1e-12)
    assert found.height == 1 - found.noise_rate
    assert (found.stderr, found.drift, found.drift_stderr) == pytest.approx((0, 0, 0), abs=1e-12)
    assert found.interval == pytest.approx((1 - height, 1 - height), abs=1e-12)


@pytest.mark.parametrize("correct", [0, 600, 1000])
def test_constant_curve_has_the_binomial_error_of_its_examples(correct):
    found = plateau_noise_rate([correct / 1000] * 40, n=1000, confidence=0.9)
    expected = Proportion(1000 - correct, 1000, confidence=0.9)
    assert found.stderr == pytest.approx(expected.stderr)
    assert found.interval == pytest.approx(expected.interval, abs=1e-12)


def test_line_by_hand():
    """White residuals of alternating sign: r < 0 is taken as 0, so errors are the textbook ones."""
    t = np.arange(20)
    y = 0.5 + 0.001 * t + 0.002 * (-1.0) ** t
    found = plateau_noise_rate(y, window=20, tolerance=0.5)
    line = stats.linregress(t, y)
    assert found.reached
    assert found.height == pytest.approx(y.mean())
    assert found.drift == pytest.approx(19 * line.slope)
    assert found.drift_stderr == pytest.approx(19 * line.stderr)
    residuals = y - line.intercept - line.slope * t
    assert found.epoch_stderr == pytest.approx(math.sqrt(residuals @ residuals / 18 / 20))
    assert found.degrees == 18
    reach = stats.t.ppf(0.975, 18) * found.epoch_stderr
    expected = (1 - y.mean() - reach, 1 - y.mean() + reach)
    assert found.interval == pytest.approx(expected, rel=1e-4)


def test_autocorrelation_makes_the_error_larger():
    """Slow waves: the same spread as alternating epochs, but few independent ones."""
    t = np.arange(40)
    fast, slow = (0.6 + 0.01 * np.cos(2 * np.pi * t / period) for period in (2, 20))
    quick, sluggish = plateau_noise_rate(fast, window=40), plateau_noise_rate(slow, window=40)
    residuals = slow - slow.mean()
    r = (40 * (residuals[1:] @ residuals[:-1]) / (residuals @ residuals) + 2) / 36
    assert r > 0.95  # more than is believed
    effective = 40 * 0.05 / 1.95
    assert quick.epoch_stderr == pytest.approx(0.01 / math.sqrt(38), rel=0.01)
    # One effective epoch is the least that a spread can be from.
    assert effective < 3
    assert sluggish.epoch_stderr == pytest.approx(0.01 / math.sqrt(2), rel=0.02)
    assert sluggish.degrees == 3


def test_effective_number_of_epochs():
    """The error against the formula, for a series whose autocorrelation is moderate."""
    y = 0.6 + 0.01 * np.resize([1, 1, 1, -1, -1, -1], 40)
    found = plateau_noise_rate(y, window=40)
    t = np.arange(40) - 19.5
    e = y - y.mean() - (t @ y) / (t @ t) * t
    r = (40 * (e[1:] @ e[:-1]) / (e @ e) + 2) / 36
    assert 0.05 < r < 0.5
    effective = 40 * (1 - r) / (1 + r)
    variance = (e @ e) / 40 * effective / (effective - 2)
    assert found.epoch_stderr == pytest.approx(math.sqrt(variance / effective))
    assert found.degrees == pytest.approx(effective - 2)


@pytest.mark.parametrize("drift", [-0.03, 0.03])
def test_drift_beyond_the_tolerance_is_no_plateau(drift):
    curve = np.linspace(0.6, 0.6 + drift, 20)
    assert not plateau_noise_rate(curve, window=20).reached
    assert not plateau_noise_rate(curve, window=20, tolerance=0.0299).reached
    assert plateau_noise_rate(curve, window=20, tolerance=0.0301).reached
    assert plateau_noise_rate(curve, window=20).drift == pytest.approx(drift)


def test_curve_that_goes_on_memorizing_has_no_plateau():
    curve = 0.6 + 0.36 * np.arange(40) / 40
    assert not plateau_noise_rate(curve, n=10_000).reached
    generator = np.random.default_rng(0)
    assert not plateau_noise_rate(np.clip(curve + generator.normal(size=40) * 0.02, 0, 1)).reached


def test_curve_that_is_too_noisy_to_tell_has_no_plateau():
    """Not to see a drift is not to see that there is none."""
    generator = np.random.default_rng(0)
    found = plateau_noise_rate(0.6 + 0.02 * generator.normal(size=40))
    assert not found.reached
    assert found.drift_stderr > 0.01


def test_only_the_window_matters():
    generator = np.random.default_rng(0)
    tail = 0.6 + 0.001 * generator.normal(size=25)
    found = plateau_noise_rate([*generator.random(75), *tail])
    assert found.window == 25
    assert found == plateau_noise_rate(tail, window=25)
    assert found != plateau_noise_rate(tail, window=24)


def test_accepts_tensors_and_float32():
    curve = torch.linspace(0.6, 0.601, 20, dtype=torch.float32)
    assert plateau_noise_rate(curve) == plateau_noise_rate(curve.double().tolist())


def test_a_false_plateau_is_rare():
    """The curve drifts by exactly the tolerance: at most 5 % may pass, less three errors."""
    generator = np.random.default_rng(3)
    passed = 0
    for _ in range(1000):
        noise = generator.normal(size=40) * 0.002
        curve = 0.6 + np.linspace(0, 0.01, 40) + noise
        passed += plateau_noise_rate(curve, window=40).reached
    assert 0.01 < passed / 1000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize(
    ("epochs", "autocorrelation", "least", "least_without_n"),
    [(300, 0.3, 0.95, 0.94), (100, 0.3, 0.95, 0.93), (100, 0.6, 0.94, 0.90), (40, 0.3, 0.95, 0.91)],
)
def test_coverage_of_the_interval(epochs, autocorrelation, least, least_without_n):
    """Of the rate with n, of the share that is wrong without; n is such that both parts matter.

    Short windows with autocorrelated epochs cover less than 95 %: the bounds say how much, up to
    three standard errors.
    """
    generator = np.random.default_rng(7)
    trials, n, rate, held, held_without_n, reached = 600, 100_000, 0.4, 0, 0, 0
    for _ in range(trials):
        wrong = generator.binomial(n, rate) / n
        curve = approach(
            generator,
            epochs=epochs,
            wrong=wrong,
            time=epochs / 20,
            autocorrelation=autocorrelation,
        )
        with_n, without = plateau_noise_rate(curve, n=n), plateau_noise_rate(curve)
        reached += with_n.reached
        held += with_n.interval[0] <= rate <= with_n.interval[1]
        held_without_n += without.interval[0] <= wrong <= without.interval[1]
    slack = 3 * math.sqrt(0.95 * 0.05 / trials)
    assert reached / trials > 0.9
    assert least - slack < held / trials < 0.97 + slack
    assert least_without_n - slack < held_without_n / trials < 0.97 + slack


def test_interval_stays_between_0_and_1():
    found = Plateau(True, 0.99, 0.0, 0.0, 0.1, 3.0, 10, None)
    assert found.interval[0] == 0
    assert dataclasses.replace(found, height=0.01).interval[1] == 1


GOOD = [0.5] * 12


@pytest.mark.parametrize(
    ("curve", "options", "sentence"),
    [
        (GOOD[:9], {}, "at least 10 epochs, got shape \\(9,\\)"),
        ([], {}, "at least 10 epochs, got shape \\(0,\\)"),
        ([GOOD], {}, "at least 10 epochs, got shape \\(1, 12\\)"),
        ([*GOOD, 60.0], {}, "train_accuracy must be between 0 and 1, got 60.0"),
        ([*GOOD, -0.1], {}, "train_accuracy must be between 0 and 1, got -0.1"),
        ([*GOOD, math.nan], {}, "train_accuracy must be between 0 and 1, got nan"),
        ("0.5", {}, "train_accuracy must be a tensor, an array or a list of numbers, got str"),
        (GOOD, {"n": 0}, "n must be an integer >= 1, got 0"),
        (GOOD, {"n": 100.0}, "n must be an integer >= 1, got 100.0"),
        (GOOD, {"window": 9}, "window must be an integer >= 10, got 9"),
        (GOOD, {"window": 13}, "window must be at most the number of epochs, 12, got 13"),
        (GOOD, {"window": 10.0}, "window must be an integer >= 10, got 10.0"),
        (GOOD, {"tolerance": 0.0}, "tolerance must be a finite number > 0 and < 1, got 0.0"),
        (GOOD, {"tolerance": 1}, "tolerance must be a finite number > 0 and < 1, got 1"),
        (GOOD, {"tolerance": math.nan}, "tolerance must be a finite number > 0 and < 1, got nan"),
        (GOOD, {"tolerance": None}, "tolerance must be a finite number > 0 and < 1, got None"),
    ],
)
def test_plateau_refuses(curve, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plateau_noise_rate(curve, **options)
