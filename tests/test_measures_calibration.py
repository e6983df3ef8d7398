"""The calibration error against bins by hand, closed forms and calibrated models."""

from __future__ import annotations

import builtins
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuvar.measures.calibration import Calibration, calibration_error


def outputs(confidence, classes=3):
    """Probabilities whose largest is that of class 0."""
    confidence = np.asarray(confidence, dtype=np.float64)
    rest = np.repeat((1 - confidence)[:, None] / (classes - 1), classes - 1, axis=1)
    return np.column_stack([confidence, rest])


def measure(sure, correct, **options):
    """Calibration error from confidences and whether the predictions are right."""
    labels = np.where(np.asarray(correct, dtype=bool), 0, 1)
    return calibration_error(
        outputs(sure), labels, **{"logits": False, "resamples": 200, **options}
    )


def simulate(generator, n, overconfidence=0.0):
    """Confidences in (0.4, 1) and outcomes of a model that is overconfident by a constant."""
    confidence = generator.uniform(0.5, 0.98, n)
    return confidence, generator.random(n) < confidence - overconfidence


def table(found):
    return [(round(b.confidence, 9), round(b.accuracy, 9), b.count) for b in found.bins]


# --- closed forms ---


def test_bins_by_hand():
    confidence = [0.55, 0.45, 0.95, 0.85]
    correct = [1, 0, 0, 1]
    found = measure(confidence, correct, bins=2)
    # 0.45 and 0.55: 0.5 against 0.5; 0.85 and 0.95: 0.9 against 0.5.
    assert table(found) == [(0.5, 0.5, 2), (0.9, 0.5, 2)]
    assert found.value == pytest.approx(0.5 * 0 + 0.5 * 0.4)
    assert found.maximum == pytest.approx(0.4)
    assert found.n == 4


def test_bins_of_unequal_count_by_hand():
    found = measure([0.4, 0.8, 0.9, 0.7], [1, 1, 0, 1], bins=2, scheme="equal-width")
    # (0, 0.5]: 0.4 against 1; (0.5, 1]: 0.8 against 2/3.
    assert table(found) == [(0.4, 1.0, 1), (0.8, round(2 / 3, 9), 3)]
    assert found.value == pytest.approx(0.25 * 0.6 + 0.75 * (0.8 - 2 / 3))
    assert found.maximum == pytest.approx(0.6)


def test_constant_overconfidence():
    """All say c, a share a is right: the error is c - a in one bin, and its deviation binomial."""
    n, c, a = 1000, 0.9, 0.7
    found = measure([c] * n, np.arange(n) < a * n, resamples=2000)
    assert table(found) == [(c, a, n)]
    assert (found.value, found.maximum) == pytest.approx((c - a, c - a))
    assert found.stderr == pytest.approx(math.sqrt(a * (1 - a) / n), rel=0.06)
    # The mean absolute deviation of a normal variable is sqrt(2/pi) of its standard deviation.
    floor = math.sqrt(2 / math.pi * c * (1 - c) / n)
    assert found.floor == pytest.approx(floor, rel=0.06)
    assert found.bias_reduced == pytest.approx(c - a, abs=0.002)
    low, high = found.interval
    assert (low, high) == pytest.approx((0.2 - 0.0284, 0.2 + 0.0284), abs=0.004)
    assert found.floor_interval[1] == pytest.approx(2.24 * math.sqrt(c * (1 - c) / n), rel=0.1)


def test_one_bin_is_the_difference_of_means():
    generator = np.random.default_rng(0)
    confidence, correct = simulate(generator, 300, 0.1)
    for scheme in ("equal-mass", "equal-width"):
        found = measure(confidence, correct, bins=1, scheme=scheme)
        assert found.value == pytest.approx(abs(confidence.mean() - correct.mean()))
        assert len(found.bins) == 1


def test_as_many_bins_as_examples_is_the_mean_distance():
    confidence, correct = simulate(np.random.default_rng(0), 50)
    for bins in (50, 1000):
        found = measure(confidence, correct, bins=bins)
        assert len(found.bins) == 50
        assert found.value == pytest.approx(np.abs(confidence - correct).mean())


def test_perfect_and_certain():
    found = measure([1.0] * 20, [1] * 20)
    assert (found.value, found.maximum, found.stderr, found.floor) == (0, 0, 0, 0)
    assert found.interval == (0, 0)
    wrong = measure([1.0] * 20, [0] * 20)
    assert wrong.value == 1
    assert wrong.interval == (1, 1)


# --- bins ---


def test_equal_mass_and_equal_width():
    confidence = np.linspace(0.5, 1, 101)[1:] ** 0.25
    mass = measure(confidence, [1] * 100, bins=10)
    assert [b.count for b in mass.bins] == [10] * 10
    width = measure(confidence, [1] * 100, bins=10, scheme="equal-width")
    inside = [((confidence > k / 10) & (confidence <= (k + 1) / 10)).sum() for k in range(10)]
    assert [b.count for b in width.bins] == [count for count in inside if count]
    assert mass.scheme == "equal-mass"
    assert width.scheme == "equal-width"


@pytest.mark.parametrize("n", [7, 100, 101, 113])
def test_equal_mass_bins_differ_by_one_example_at_most(n):
    counts = [b.count for b in measure(np.linspace(0.5, 0.9, n), [1] * n, bins=7).bins]
    assert len(counts) == 7
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1


def test_edges_belong_to_the_bin_below():
    confidence = [0.6, 0.7, 0.700001, 0.8, 1.0]
    found = measure(confidence, [1] * 5, bins=10, scheme="equal-width")
    assert [b.count for b in found.bins] == [1, 1, 2, 1]


def test_ties_share_a_bin():
    confidence = [0.5] + [0.7] * 7 + [0.9, 0.95]
    found = measure(confidence, [1] * 10, bins=5)
    # The ties lie around the middle; what is left of the other bins is not empty.
    assert table(found) == [(0.5, 1.0, 1), (0.7, 1.0, 7), (0.925, 1.0, 2)]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 0.6, 0.7, 0.9]), st.booleans()), min_size=2),
    st.randoms(use_true_random=False),
    st.sampled_from(["equal-mass", "equal-width"]),
)
def test_order_of_examples_does_not_matter(rows, random, scheme):
    shuffled = random.sample(rows, len(rows))
    first, second = (
        measure(*zip(*r, strict=True), bins=3, scheme=scheme, resamples=100)
        for r in (rows, shuffled)
    )
    assert first.value == pytest.approx(second.value, abs=1e-12)
    assert table(first) == table(second)
    assert first.calibrated == pytest.approx(second.calibrated, abs=1e-12)


# --- the predicted class ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_softmaxed(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(200, 5, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(5, (200,), generator=generator)
    one = calibration_error(logits, labels, logits=True, resamples=100)
    other = calibration_error(logits.double().softmax(1), labels, logits=False, resamples=100)
    assert one == other
    # A constant in each row, however large, changes nothing.
    far = calibration_error(logits.double() + 1e6, labels, logits=True, resamples=100)
    assert far.value == pytest.approx(one.value, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounded_probabilities_are_accepted(dtype):
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(200, 100, generator=generator).softmax(1).to(dtype)
    calibration_error(probabilities, torch.arange(200) % 100, logits=False, resamples=100)


def test_class_that_is_ruled_out():
    logits = torch.tensor([[0.0, 0.0, -math.inf], [1.0, -math.inf, -math.inf]])
    found = calibration_error(logits, [1, 0], logits=True, bins=2, resamples=100)
    # Of two equal classes the first is predicted, which is wrong here.
    assert table(found) == [(0.5, 0.0, 1), (1.0, 1.0, 1)]


def test_lists_and_read_only_arrays():
    probabilities = outputs([0.5, 0.8, 0.9])
    probabilities.flags.writeable = False
    found = calibration_error(probabilities, [0, 0, 1], logits=False, resamples=100)
    assert found == calibration_error(
        probabilities.tolist(), np.array([0, 0, 1], dtype=np.uint8), logits=False, resamples=100
    )


# --- statistics ---


def test_calibrated_model_is_within_its_floor():
    """Over repetitions the value has the floor's distribution: its mean and its tails."""
    generator = np.random.default_rng(1)
    values, floors, inside = [], [], 0
    for seed in range(200):
        data = simulate(generator, 400)
        found = measure(*data, seed=seed, resamples=100, confidence=0.9)
        values.append(found.value)
        floors.append(found.floor)
        low, high = found.floor_interval
        inside += low <= found.value <= high
    error = np.std(values, ddof=1) / math.sqrt(200)
    assert np.mean(values) == pytest.approx(np.mean(floors), abs=4 * error)
    assert np.mean(values) > 0.02  # far above the truth, which is 0
    assert inside / 200 == pytest.approx(0.9, abs=3 * math.sqrt(0.09 / 200) + 0.02)


def test_bias_reduced_value_is_nearer_the_truth():
    generator = np.random.default_rng(2)
    for overconfidence in (0.0, 0.04, 0.08):
        found = [
            measure(*simulate(generator, 800, overconfidence), seed=seed, resamples=100)
            for seed in range(60)
        ]
        plain = np.mean([f.value for f in found]) - overconfidence
        reduced = np.mean([f.bias_reduced for f in found]) - overconfidence
        assert plain > 0.002
        assert abs(reduced) < 0.75 * plain


@pytest.mark.parametrize(
    ("overconfidence", "least"), [(0.0, 0.95), (0.02, 0.92), (0.05, 0.94), (0.15, 0.93)]
)
def test_coverage_of_the_interval(overconfidence, least):
    """Not quite 95 % where the gaps are about as large as their errors."""
    generator, trials, held = np.random.default_rng(3), 150, 0
    for seed in range(trials):
        found = measure(*simulate(generator, 800, overconfidence), seed=seed)
        low, high = found.interval
        held += low <= overconfidence <= high
    assert held / trials > least - 3 * math.sqrt(0.05 * 0.95 / trials)


def test_standard_error_is_the_spread_over_samples():
    generator = np.random.default_rng(4)
    found = [measure(*simulate(generator, 1000, 0.15), seed=s, resamples=100) for s in range(150)]
    spread = np.std([f.value for f in found], ddof=1)
    assert np.mean([f.stderr for f in found]) == pytest.approx(spread, rel=0.2)


def test_bars_hold_the_bins_of_a_calibrated_model():
    generator = np.random.default_rng(5)
    inside = [
        bin_.expected[0] <= bin_.accuracy <= bin_.expected[1]
        for seed in range(40)
        for bin_ in measure(*simulate(generator, 3000), seed=seed).bins
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.03)


def test_seed_decides_and_the_global_generators_are_left_alone():
    data = simulate(np.random.default_rng(0), 100)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = measure(*data, seed=3)
    assert first == measure(*data, seed=3)
    assert first.resampled != measure(*data, seed=4).resampled
    assert first.value == measure(*data, seed=4).value
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert len(first.resampled) == len(first.calibrated) == 200


def test_interval_is_made_of_what_was_drawn():
    """Spread about the value, less the bias below; 0 where a calibrated model could show it."""
    draws = tuple(np.linspace(0.2, 0.4, 101))
    calibrated = tuple(np.linspace(0, 0.2, 101))
    found = Calibration(0.25, 0.5, 10, (), "equal-mass", draws, calibrated, confidence=0.9)
    assert found.interval == pytest.approx((0.25 - 0.05 - 0.09, 0.25 + 0.09))
    assert found.bias_reduced == pytest.approx(2 * 0.25 - 0.3)
    assert found.floor == pytest.approx(0.1)
    assert found.floor_interval == pytest.approx((0.01, 0.19))
    assert dataclasses.replace(found, value=0.18).interval == pytest.approx((0, 0.27))
    assert dataclasses.replace(found, value=0.191).interval == pytest.approx((0, 0.281))
    assert dataclasses.replace(found, value=0.2).interval == pytest.approx((0.01, 0.29))


# --- refusals ---

GOOD = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"outputs": GOOD[:, 0]}, r"got torch.float32 of \(3,\)"),
        ({"outputs": GOOD[:, :1]}, r"two classes, got torch.float32 of \(3, 1\)"),
        ({"outputs": GOOD[:1], "labels": [0]}, r"two examples .* got torch.float32 of \(1, 2\)"),
        ({"outputs": GOOD.long()}, "outputs must be floating-point numbers .* got torch.int64"),
        ({"outputs": "no"}, "outputs must be a tensor, an array or a list of numbers, got str"),
        ({"outputs": 4 * GOOD}, "sum that is off by 3; for logits use logits=True"),
        ({"outputs": GOOD - 0.5}, "smallest value of -0.4 and a sum that is off by 1"),
        ({"outputs": [[1.5, -0.5]] * 3}, "smallest value of -0.5"),
        ({"outputs": [[math.nan, 0.5]] * 3}, "probabilities >= 0 whose rows sum to 1, got a"),
        ({"outputs": [[math.nan, 0.5]] * 3, "logits": True}, "nan, .* got 3 of 3 rows"),
        ({"outputs": [[math.inf, 0.5]] + [[0.0, 0.0]] * 2, "logits": True}, "got 1 of 3 rows"),
        ({"outputs": [[-math.inf] * 2] * 3, "logits": True}, "got 3 of 3 rows"),
        ({"labels": [0, 1]}, r"labels must be 3 class labels below 2, .* got 2 up to 1"),
        ({"labels": [0, 1, 2]}, r"labels must be 3 class labels below 2, .* got 3 up to 2"),
        ({"labels": [0, 1, -1]}, "labels must be class labels >= 0, got -1"),
        ({"labels": [0.0, 1.0, 1.0]}, "labels must be integer class labels"),
        ({"logits": None}, "logits must be True or False, got None"),
        ({"bins": 0}, "bins must be an integer >= 1, got 0"),
        ({"bins": 2.0}, "bins must be an integer >= 1, got 2.0"),
        ({"resamples": 99}, "resamples must be an integer >= 100, got 99"),
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
        ({"seed": None}, "seed must be an integer from 0 to 4294967295, got None"),
        ({"scheme": "quantile"}, "scheme must be one of equal-mass, equal-width, got 'quantile'"),
    ],
)
def test_refusals(changed, sentence):
    good = {"outputs": GOOD, "labels": [0, 1, 1], "logits": False, "resamples": 100}
    calibration_error(**good)
    with pytest.raises(ValueError, match=sentence):
        calibration_error(**{**good, **changed})


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, None])
def test_intervals_refuse_what_is_no_confidence(confidence):
    found = measure([0.5, 0.8], [1, 0])
    for make in (lambda **c: measure([0.5, 0.8], [1, 0], **c), partial(dataclasses.replace, found)):
        with pytest.raises(ValueError, match="confidence must be a finite number > 0 and < 1, got"):
            make(confidence=confidence)


def test_logits_or_probabilities_must_be_said():
    with pytest.raises(TypeError, match="logits"):
        calibration_error(GOOD, [0, 1, 1])


# --- the diagram ---


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")
    matplotlib.use(before)


def points(ax):
    """Where the bins are drawn, in order of confidence, each with its label."""
    from matplotlib.collections import PathCollection

    drawn = [c for c in ax.collections if isinstance(c, PathCollection)]
    return sorted((*map(float, xy), c.get_label()) for c in drawn for xy in c.get_offsets())


def test_plot_shows_every_bin_and_which_are_off(pyplot, tmp_path):
    found = measure(*simulate(np.random.default_rng(0), 2000, 0.1))
    ax = found.plot()
    assert [p[:2] for p in points(ax)] == [(b.confidence, b.accuracy) for b in found.bins]
    for (_, y, label), bin_ in zip(points(ax), found.bins, strict=True):
        inside = bin_.expected[0] <= y <= bin_.expected[1]
        assert label == ("bin within its bar" if inside else "bin outside its bar")
    assert ax.get_xlabel() == "confidence"
    assert ax.get_ylabel() == "accuracy"
    title = ax.get_title(loc="left")
    assert f"calibration error {found.value:.3f}" in title
    assert "n = 2,000, 15 bins" in title
    ax.figure.savefig(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").stat().st_size > 10_000


def test_plot_on_given_axes_makes_no_figure(pyplot):
    figure, axes = pyplot.subplots(1, 2)
    found = measure([0.6, 0.8, 0.9], [1, 0, 1])
    assert found.plot(axes[1]) is axes[1]
    assert pyplot.get_fignums() == [figure.number]
    assert not axes[0].has_data()


@pytest.mark.parametrize(
    ("confidence", "correct"), [([1.0] * 5, [1] * 5), ([1.0] * 5, [0] * 5), ([0.5] * 4, [1] * 4)]
)
def test_plot_of_a_single_bin(pyplot, confidence, correct):
    ax = measure(confidence, correct).plot()
    (x, y, _), (left, right), (bottom, top) = points(ax)[0], ax.get_xlim(), ax.get_ylim()
    assert left < x < right
    assert bottom < y < top
    assert ", 1 bin" in ax.get_title(loc="left")
    assert "bins" not in ax.get_title(loc="left")


def test_plot_says_what_is_missing(monkeypatch):
    original = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *arguments, **options)

    found = measure([0.6, 0.8], [1, 0])
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib, which is not installed"):
        found.plot()
