"""Neural variability against closed forms, with the coverage that its intervals promise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from neuvar import neural_variability
from neuvar.measures import Estimate, expected_sharpness
from neuvar.measures.estimate import limit, student_quantile
from neuvar.noise import FAMILIES
from tests.landscapes import Quadratic, as_loss, classes, classifier, one_example, quadratic


def repeated(model, b, truth, times, **options):
    """Differences of many repetitions, and how often the interval and the limit hold."""
    found = [
        neural_variability(model, as_loss, one_example(), b=b, seed=seed, **options)
        for seed in range(times)
    ]
    inside = np.mean([v.interval[0] <= truth <= v.interval[1] for v in found])
    above = np.mean([v.upper >= abs(truth) for v in found])
    return np.array([v.difference for v in found]), inside, above


@pytest.mark.parametrize("noise", FAMILIES)
@pytest.mark.parametrize("antithetic", [True, False])
def test_unbiased_on_quadratics(noise, antithetic):
    model, b = quadratic(8), 0.1
    truth = (b * FAMILIES[noise].std) ** 2 / 2 * float(model.hessian.trace())
    options = {"draws": 16, "antithetic": antithetic, "noise": noise}
    found, _, _ = repeated(model, b, truth, 200, **options)
    assert abs(found.mean() - truth) < 4 * found.std(ddof=1) / math.sqrt(len(found))


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [1, 8, 100])
def test_intervals_cover_the_truth_as_often_as_they_say(dimension):
    model, b = quadratic(dimension), 0.1
    truth = b**2 / 2 * float(model.hessian.trace())
    found, inside, above = repeated(model, b, truth, 1000)
    assert abs(found.mean() - truth) < 4 * found.std(ddof=1) / math.sqrt(len(found))
    assert 0.93 <= inside <= 0.97
    assert 0.92 <= above <= 0.97  # .935 to .95 over 20,000 repetitions, by dimension


@pytest.mark.slow
def test_a_tolerance_costs_little_coverage():
    model = quadratic(30)
    truth = 0.1**2 / 2 * float(model.hessian.trace())
    spread = 0.1**2 / 2 * math.sqrt(2 * float((model.hessian @ model.hessian).trace()))
    tolerance = 1.96 * spread / math.sqrt(40)
    _, inside, _ = repeated(model, 0.1, truth, 1000, draws=4000, tolerance=tolerance)
    assert 0.925 <= inside <= 0.97


def test_it_draws_until_the_tolerance_is_met_or_the_budget_spent():
    model = quadratic(30)
    rough, fine = (
        neural_variability(
            model, as_loss, one_example(), b=0.1, draws=512, tolerance=tolerance, vectorize=False
        )
        for tolerance in (1.0, 1e-9)
    )
    assert (rough.stopped, rough.draws) == ("tolerance", 32)
    assert (fine.stopped, fine.draws) == ("budget", 512)
    middle = neural_variability(
        model, as_loss, one_example(), b=0.1, draws=512, tolerance=0.02, vectorize=False
    )
    assert middle.stopped == "tolerance"
    assert 32 < middle.draws < 512
    assert (middle.interval[1] - middle.interval[0]) / 2 <= 0.02


def test_antithetic_pairs_remove_the_slope():
    steep = quadratic(8)
    steep.slope = 100 * torch.ones(8).double()
    paired, single = (
        neural_variability(steep, as_loss, one_example(), b=0.01, draws=64, antithetic=antithetic)
        for antithetic in (True, False)
    )
    assert paired.stderr < single.stderr / 1000


def test_linear_regression_in_uneven_batches():
    x, _ = classes(53)
    model = nn.Linear(5, 2).double()
    x = x.double()
    y = torch.randn(53, 2, generator=torch.Generator().manual_seed(3)).double()
    b = 0.2
    # Each output moves by b·N(0, |x|² + 1), and the loss is the mean over outputs.
    truth = b**2 * (float(x.square().sum(1).mean()) + 1)
    found = neural_variability(model, mse_loss, (x, y), b=b, draws=2000, batch_size=7)
    assert abs(found.difference - truth) < 4 * found.stderr
    assert found.clean == pytest.approx(mse_loss(model(x), y).item(), rel=1e-12)
    assert found.perturbed == found.clean + found.difference
    assert found.delta == abs(found.difference)
    assert found.accuracy is None
    assert math.isnan(found.clean_accuracy)


def test_logistic_regression_against_quadrature():
    model = nn.Linear(1, 2, bias=False).double()
    x, y = torch.tensor([[1.5], [-0.5]]).double(), torch.tensor([0, 1])
    b, nodes = 0.7, np.polynomial.hermite_e.hermegauss(60)
    slope = float((model.weight[0] - model.weight[1]).detach())
    # Only the difference of the two weights matters; its noise has deviation √2·b.
    moved = slope + math.sqrt(2) * b * nodes[0]
    truth = 0.0
    for value, label in zip(x.flatten().tolist(), y.tolist(), strict=True):
        sign = 1 if label == 0 else -1
        risk = np.logaddexp(0, -sign * value * moved) @ nodes[1] / math.sqrt(2 * math.pi)
        truth += (risk - np.logaddexp(0, -sign * value * slope)) / 2
    found = neural_variability(model, cross_entropy, (x, y), b=b, draws=4000)
    assert abs(found.difference - truth) < 4 * found.stderr
    sharpness = expected_sharpness(model, cross_entropy, (x, y), sigma=b, draws=4000)
    assert sharpness.mean == found.difference
    assert sharpness.samples == 2000


def test_a_negative_difference_keeps_its_sign():
    model = Quadratic(-torch.eye(4).double(), torch.zeros(4).double())
    found = neural_variability(model, as_loss, one_example(), b=0.5, draws=400)
    assert found.difference < 0 < found.delta
    assert found.interval[0] <= -0.5 <= found.interval[1] < 0
    assert found.upper > found.delta


def test_no_noise_is_no_difference():
    found = neural_variability(classifier(), cross_entropy, classes(), b=0)
    assert (found.difference, found.stderr, found.interval, found.upper) == (0, 0, (0, 0), 0)


def test_the_seed_fixes_the_draws():
    model, data = classifier(), classes()
    first, again, other = (
        neural_variability(model, cross_entropy, data, b=0.1, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.difference != other.difference


def test_more_draws_extend_the_same_stream():
    model, data = classifier(), classes()
    few = neural_variability(model, cross_entropy, data, b=0.1, draws=32, vectorize=False)
    more = neural_variability(
        model, cross_entropy, data, b=0.1, draws=512, tolerance=1e6, vectorize=False
    )
    assert more.draws == 32
    assert more.difference == few.difference
    looked, at_once = (
        neural_variability(
            model, cross_entropy, data, b=0.1, draws=128, tolerance=tolerance, vectorize=False
        )
        for tolerance in (1e-9, None)
    )
    assert looked.difference == at_once.difference


def test_an_overflowing_loss_is_infinite_not_an_error():
    model = nn.Linear(2, 1)
    data = torch.ones(3, 2), torch.zeros(3, 1)
    found = neural_variability(model, lambda o, t: o.square().exp().mean(), data, b=1e4)
    assert found.difference == found.upper == found.stderr == math.inf
    assert found.interval == (math.inf, math.inf)


def test_accuracy_comes_along():
    found = neural_variability(classifier(), cross_entropy, classes(), b=2.0, draws=200)
    assert 0 < found.accuracy.mean < 1
    assert found.accuracy.samples == 100
    x, y = classes()
    expected = float((classifier().eval()(x).argmax(1) == y).float().mean())
    assert found.clean_accuracy == pytest.approx(expected)


def test_it_prints_what_was_found():
    found = neural_variability(classifier(), cross_entropy, classes(), b=0.1)
    assert str(found).startswith("b = 0.1: loss ")
    assert "64 draws, budget" in str(found)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"b": -1}, "b must be a finite number >= 0"),
        ({"b": math.nan}, "b must be a finite number >= 0"),
        ({"draws": 3}, "draws must be an integer >= 4"),
        ({"draws": 33}, "draws must be even"),
        ({"draws": 8.0}, "draws must be an integer"),
        ({"tolerance": 0}, "tolerance must be a finite number > 0"),
        ({"confidence": 1}, "confidence must be a finite number > 0 and < 1"),
        ({"noise": "cauchy"}, "noise must be one of gaussian"),
        ({"relative_to": "layer"}, "relative_to must be one of None, tensor, filter"),
        ({"batchnorm": "freeze"}, "batchnorm must be one of keep, reestimate"),
        ({"sampler": "other"}, "sampler must be one of"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"parameters": []}, "there are no parameters to perturb"),
        ({"parameters": ["9.weight"]}, "parameters must be parameters of the model"),
        ({"parameters": [torch.zeros(2)]}, "parameters must be parameters of the model"),
    ],
)
def test_bad_arguments_get_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        neural_variability(classifier(), cross_entropy, classes(), **{"b": 0.1} | options)


def test_a_loss_that_is_no_mean_is_refused():
    with pytest.raises(ValueError, match="loss must return the mean over the batch"):
        neural_variability(
            classifier(), lambda o, t: cross_entropy(o, t, reduction="none"), classes(), b=0.1
        )
    with pytest.raises(ValueError, match="the loss at the model's own weights is nan"):
        neural_variability(classifier(), lambda o, t: o.mean() * math.nan, classes(), b=0.1)
    with pytest.raises(ValueError, match="expected sharpness needs Gaussian noise"):
        expected_sharpness(classifier(), cross_entropy, classes(), sigma=0.1, noise="laplace")


def test_student_quantiles_are_scipys():
    for dof in (1, 2, 3, 4, 7, 30, 31, 1000):
        for level in (0.001, 0.025, 0.4, 0.95, 0.9999):
            assert student_quantile(level, dof) == pytest.approx(stats.t.ppf(level, dof), rel=1e-9)


def test_without_skewness_the_interval_is_students():
    x = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = Estimate.of(x)
    low, high = stats.t.interval(0.95, 4, loc=3, scale=stats.sem(x))
    assert found.interval == pytest.approx((low, high))
    assert found.stderr == pytest.approx(stats.sem(x))
    assert str(found) == "3 [1.037, 4.963]"


@pytest.mark.parametrize("level", [0.025, 0.3, 0.95])
def test_a_limit_is_where_halls_transformation_meets_students_quantile(level):
    x = np.array([0.1, 0.2, 0.25, 0.4, 0.5, 1.1, 2.9, 0.3])
    n = len(x)
    t = (x.mean() - limit(x, level)) / stats.sem(x)
    a = stats.skew(x, bias=False) / (3 * math.sqrt(n))
    transformed = t + a * t**2 + a**2 * t**3 / 3 + a / 2
    assert transformed == pytest.approx(stats.t.ppf(1 - level, n - 1), rel=1e-9)


def test_two_samples_have_an_interval_and_one_has_not():
    assert limit([1.0, 2.0], 0.9) > 1.5
    with pytest.raises(ValueError, match="at least 2 samples"):
        limit([1.0], 0.9)
