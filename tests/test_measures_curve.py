"""Curves over b and the largest b, against what is known by calculation."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from neuvar import NVRMAdam, largest_b, neural_variability, variability_curve
from neuvar.data import mnist_excerpt
from neuvar.measures.variability import CrossingSearch
from neuvar.models import mlp
from tests.landscapes import Quadratic, as_loss, classes, classifier, one_example, quadratic


def test_a_curve_is_its_points():
    model, data = classifier(), classes()
    curve = variability_curve(
        model, cross_entropy, data, b=[0.2, 0.1], draws=16, seed=3, vectorize=False
    )
    assert curve.b == (0.1, 0.2)
    for point in curve.points:
        alone = neural_variability(
            model, cross_entropy, data, b=point.b, draws=16, seed=3, vectorize=False
        )
        assert point == alone


def test_the_same_draws_at_every_scale():
    """On a quadratic the difference is exactly proportional to b²."""
    model = quadratic(5)
    curve = variability_curve(model, as_loss, one_example(), b=[0.1, 0.2, 0.4], draws=8)
    differences = [point.difference for point in curve.points]
    assert differences == pytest.approx([differences[0] * k for k in (1, 4, 16)], rel=1e-6)


def test_bad_grids_get_a_sentence():
    with pytest.raises(ValueError, match="b must have at least one scale"):
        variability_curve(classifier(), cross_entropy, classes(), b=[])
    with pytest.raises(ValueError, match="b must be a finite number"):
        variability_curve(classifier(), cross_entropy, classes(), b=[0.1, -0.1])


def test_a_plot_shows_the_points_and_their_error():
    pytest.importorskip("matplotlib").use("Agg")
    curve = variability_curve(classifier(), cross_entropy, classes(), b=[0, 0.2, 0.5], draws=16)
    axes = curve.plot(label="first")
    assert curve.plot(axes, label="second") is axes
    assert [line.get_label() for line in axes.lines] == ["first", "second"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [p.perturbed for p in curve.points])
    assert len(axes.collections) == 2
    assert axes.get_ylabel() == "loss"
    accuracy = curve.plot(show="accuracy")
    np.testing.assert_allclose(
        accuracy.lines[0].get_ydata(), [p.accuracy.mean for p in curve.points]
    )
    with pytest.raises(ValueError, match="show must be one of loss, accuracy"):
        curve.plot(show="error")
    regression = variability_curve(quadratic(), as_loss, one_example(), b=[0.1], draws=4)
    with pytest.raises(ValueError, match="no accuracy to show"):
        regression.plot(show="accuracy")


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_b_of_a_quadratic_is_its_difference_read_backwards(seed):
    """The difference is b² times a sample mean, and so are both ends of its interval."""
    model, delta = quadratic(20), 0.05
    found = largest_b(
        model, as_loss, one_example(), delta=delta, draws=16, seed=seed, resolution=1e-3
    )
    at_one = neural_variability(model, as_loss, one_example(), b=1, draws=16, seed=seed)
    assert found.b == pytest.approx(math.sqrt(delta / at_one.difference), rel=1e-3)
    low, high = at_one.interval
    expected = math.sqrt(delta / high), math.sqrt(delta / low)
    assert found.interval == pytest.approx(expected, rel=2e-3)
    assert found.interval[0] < found.b < found.interval[1]


def test_the_difference_at_the_largest_b_is_delta():
    model, data = classifier(), classes()
    found = largest_b(model, cross_entropy, data, delta=0.05, draws=16, vectorize=False)
    there = neural_variability(model, cross_entropy, data, b=found.b, draws=16, vectorize=False)
    assert there.difference == pytest.approx(0.05, rel=0.03)
    assert [v.b for v in found.measured] == sorted(v.b for v in found.measured)
    assert len(found.measured) < 30
    assert str(found).startswith("b = ")


def test_a_smaller_delta_bears_less_noise():
    model, data = classifier(), classes()
    few, many = (largest_b(model, cross_entropy, data, delta=d, draws=16) for d in (0.01, 0.1))
    assert few.b < many.b


def test_a_loss_that_falls_counts_as_well():
    model = Quadratic(-torch.eye(20).double(), torch.zeros(20).double())
    found = largest_b(model, as_loss, one_example(), delta=0.05, draws=64)
    assert found.interval[0] <= math.sqrt(0.1 / 20) <= found.interval[1]


def test_where_no_noise_is_too_much_or_any_is():
    flat = Quadratic(torch.zeros(3, 3), torch.ones(3))
    found = largest_b(flat, as_loss, one_example(), delta=0.1, draws=8)
    assert found.b == found.interval[1] == math.inf
    assert found.interval[0] == 1e3
    steep = Quadratic(1e20 * torch.eye(3).double(), torch.zeros(3).double())
    found = largest_b(steep, as_loss, one_example(), delta=0.1, draws=64)
    assert found.b == found.interval[0] == 0
    assert found.interval[1] == 1e-7


def test_a_loss_that_saturates_and_overflows():
    model = torch.nn.Linear(2, 1)
    data = torch.ones(3, 2), torch.zeros(3, 1)
    found = largest_b(model, lambda o, t: o.square().exp().mean(), data, delta=1.0, draws=64)
    assert 0 < found.interval[0] < found.b < found.interval[1] < math.inf


def test_the_first_crossing_is_found():
    class Wave:
        """Above δ = 1 from b = .03 to .1 and again from b = 1 on."""

        def __init__(self, b):
            self.b, self.delta = b, 2.0 if 0.03 < b < 0.1 or b > 1 else 0.5

    search = CrossingSearch(Wave, 1.0, 0.01, 1e-7, 1e3)
    assert search.crossing(lambda point: point.delta)[1] == pytest.approx(0.03, rel=0.02)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"delta": 0}, "delta must be a finite number > 0"),
        ({"delta": -1}, "delta must be a finite number > 0"),
        ({"resolution": 2}, "resolution must be a finite number >= 1e-06 and <= 1"),
        ({"minimum": 2, "maximum": 1}, "minimum < maximum"),
        ({"draws": 2}, "draws must be an integer >= 4"),
    ],
)
def test_bad_arguments_get_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        largest_b(classifier(), cross_entropy, classes(), **{"delta": 0.1} | options)


@pytest.mark.slow
def test_a_network_trained_with_noise_bears_more_of_it():
    """Real images, one network with NVRM-Adam and one with Adam, from the same start."""
    train = mnist_excerpt().train
    x, y = train.images[:2000].flatten(1) / 255, train.labels[:2000]
    found = {}
    for b in (0.0, 0.1):
        model = mlp((784, 128, 10), seed=0)
        optimizer = NVRMAdam(model.parameters(), lr=1e-3, b=b, seed=0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            for chosen in torch.randperm(len(x), generator=generator).split(100):
                optimizer.zero_grad()
                cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()
        found[b] = largest_b(model, cross_entropy, (x, y), delta=0.1, resolution=0.05)
    assert found[0.0].interval[1] < found[0.1].interval[0]
