"""Second derivatives and sharpness against closed forms and brute force."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss

from neuvar.measures import (
    curvature_check,
    expected_sharpness,
    generalization_gap,
    hessian_trace,
    keskar_sharpness,
    neural_variability,
)
from neuvar.noise import Draw, standard_noise, whole_slot
from tests.landscapes import Quadratic, as_loss, classes, one_example, quadratic


def smooth_network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def full_hessian(model, loss, x, y):
    """Second derivatives by brute force, over all parameters in one row."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def value(w):
        parts = w.split([shape.numel() for shape in shapes.values()])
        named = {n: v.view(s) for (n, s), v in zip(shapes.items(), parts, strict=True)}
        return loss(functional_call(model, named, (x,)), y)

    return hessian(value, flat)


def test_the_trace_of_logistic_regression():
    x, _ = classes(40)
    x, y = x.double(), torch.arange(40) % 2
    model = nn.Linear(5, 2).double()
    p = model(x).detach().softmax(1)
    # d²/dz² of cross entropy is p(1 - p) for each logit, and each logit is w·x + bias.
    truth = float(((p * (1 - p)).sum(1) * (x.square().sum(1) + 1)).mean())
    found = hessian_trace(model, cross_entropy, (x, y), probes=300, batch_size=16)
    assert abs(found.mean - truth) < 4 * found.stderr
    assert found.stderr < truth / 10


def test_the_trace_of_a_network_by_brute_force():
    x, y = classes(40)
    model, x = smooth_network(), x.double()
    truth = float(full_hessian(model, cross_entropy, x, y).trace())
    found = hessian_trace(model, cross_entropy, (x, y), probes=400)
    assert abs(found.mean - truth) < 4 * found.stderr


def test_the_trace_of_some_parameters_frozen_or_not():
    x, y = classes(40)
    model, x = smooth_network(), x.double()
    model[0].weight.requires_grad_(False)
    block = full_hessian(model, cross_entropy, x, y)[:20, :20]
    found = hessian_trace(model, cross_entropy, (x, y), probes=400, parameters=["0.weight"])
    assert abs(found.mean - float(block.trace())) < 4 * found.stderr
    assert not model[0].weight.requires_grad


def test_the_trace_in_units_of_the_weights():
    x, y = classes(40)
    model, x = smooth_network(), x.double()
    curvatures = full_hessian(model, cross_entropy, x, y).diagonal()
    units = torch.cat([p.detach().square().mean().expand(p.numel()) for p in model.parameters()])
    found = hessian_trace(model, cross_entropy, (x, y), probes=400, relative_to="tensor")
    assert abs(found.mean - float(curvatures @ units)) < 4 * found.stderr


def test_a_linear_loss_has_no_curvature():
    model = nn.Linear(3, 1)
    found = hessian_trace(model, lambda o, t: o.mean(), (torch.ones(2, 3), torch.zeros(2)))
    assert (found.mean, found.stderr) == (0, 0)


@pytest.mark.parametrize("noise", ["gaussian", "laplace", "uniform"])
def test_variability_of_small_noise_is_the_curvature(noise):
    x, y = classes(40)
    model, x = smooth_network(), x.double()
    check = curvature_check(model, cross_entropy, (x, y), b=1e-3, noise=noise, draws=64)
    assert check.ratio == pytest.approx(1, abs=1e-3)
    assert check.interval[0] <= check.ratio <= check.interval[1]
    far = curvature_check(model, cross_entropy, (x, y), b=9.0, noise=noise)
    assert abs(far.ratio - 1) > 0.05
    alone = neural_variability(model, cross_entropy, (x, y), b=9.0, noise=noise)
    assert far.measured == alone


def test_the_prediction_is_half_b_squared_times_the_trace():
    model = quadratic(10)
    check = curvature_check(model, as_loss, one_example(), b=0.1, draws=4000)
    truth = 0.1**2 / 2 * float(model.hessian.trace())
    assert abs(check.predicted.mean - truth) < 4 * check.predicted.stderr
    assert check.ratio == pytest.approx(1, abs=1e-6)
    sharpness = expected_sharpness(model, as_loss, one_example(), sigma=0.1, draws=4000)
    assert sharpness.mean == pytest.approx(check.predicted.mean, rel=1e-6)


def test_what_a_check_cannot_be_made_of_gets_a_sentence():
    with pytest.raises(ValueError, match="b must be a finite number > 0"):
        curvature_check(quadratic(), as_loss, one_example(), b=0)
    with pytest.raises(ValueError, match="batchnorm must be 'keep' here"):
        curvature_check(quadratic(), as_loss, one_example(), b=1, batchnorm="reestimate")
    with pytest.raises(ValueError, match="probes must be an integer >= 2"):
        hessian_trace(quadratic(), as_loss, one_example(), probes=1)


def test_keskar_sharpness_of_a_quadratic_is_at_a_corner():
    curvature = torch.tensor([3.0, 1.0, 0.5]).double()
    w = torch.tensor([0.0, 1.0, -2.0]).double()
    model = Quadratic(curvature.diag(), w.clone())
    width = 0.01 * (w.abs() + 1)
    clean = float(curvature @ w.square()) / 2
    highest = float(curvature @ (w.abs() + width).square()) / 2
    found = keskar_sharpness(model, as_loss, one_example(), epsilon=0.01, starts=4)
    assert found.highest == pytest.approx(highest, rel=1e-9)
    assert found.value == pytest.approx(100 * (highest - clean) / (1 + clean), rel=1e-9)
    assert found.evaluations == 4 * 21


def test_keskar_sharpness_leaves_a_minimum():
    model = Quadratic(torch.eye(4).double(), torch.zeros(4).double())
    found = keskar_sharpness(model, as_loss, one_example(), epsilon=0.1)
    assert found.value == pytest.approx(100 * 4 * 0.1**2 / 2, rel=1e-9)


def test_keskar_sharpness_in_a_random_subspace():
    model = quadratic(6)
    columns = torch.stack(
        [
            standard_noise(whole_slot((6,)), Draw(k, sampler="fresh", seed=3, rank=-1)).double()
            for k in (1, 2)
        ],
        dim=1,
    )
    own = torch.linalg.lstsq(columns, model.w.detach()).solution
    width = 0.05 * (own.abs() + 1)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 2) * width
    heights = [float(w @ model.hessian @ w) / 2 for w in model.w.detach() + corners @ columns.T]
    found = keskar_sharpness(
        model, as_loss, one_example(), epsilon=0.05, subspace=2, seed=3, starts=12
    )
    assert found.highest == pytest.approx(max(heights), rel=1e-6)
    assert found.subspace == 2


def test_more_effort_finds_no_lower_maximum():
    x, y = classes(40)
    model = smooth_network()
    few, many = (
        keskar_sharpness(model, cross_entropy, (x.double(), y), epsilon=0.05, starts=starts)
        for starts in (1, 3)
    )
    assert 0 < few.value <= many.value


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon": -1}, "epsilon must be a finite number"),
        ({"subspace": 0}, "subspace must be an integer >= 1"),
        ({"subspace": 9}, "subspace must be at most the 8 weights"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"starts": 0}, "starts must be an integer >= 1"),
    ],
)
def test_bad_arguments_of_sharpness_get_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        keskar_sharpness(quadratic(8), as_loss, one_example(), **options)


def test_the_generalization_gap_and_its_error():
    model = nn.Linear(5, 3)
    train, test = classes(40), classes(300, seed=1)
    found = generalization_gap(model, cross_entropy, train, test, batch_size=7)
    with torch.no_grad():
        seen = cross_entropy(model(train[0]), train[1])
        new = cross_entropy(model(test[0]), test[1], reduction="none").double()
        right = (model(test[0]).argmax(1) == test[1]).double()
    assert found.train_loss == pytest.approx(float(seen), rel=1e-6)
    assert found.test_loss.mean == pytest.approx(float(new.mean()), rel=1e-6)
    assert found.loss_gap.mean == pytest.approx(float(new.mean() - seen), rel=1e-5)
    assert found.loss_gap.stderr == pytest.approx(float(new.std()) / math.sqrt(300), rel=1e-6)
    assert found.test_accuracy.mean == pytest.approx(float(right.mean()))
    gap = found.accuracy_gap
    assert gap.mean == pytest.approx(found.train_accuracy - float(right.mean()))
    assert gap.interval[0] < gap.mean < gap.interval[1]


def test_a_loss_that_cannot_be_batched_has_a_gap_too():
    def loss(outputs, targets):
        return mse_loss(outputs, targets) if float(outputs.sum()) < 1e9 else outputs.sum()

    model = nn.Linear(2, 1)
    data = torch.randn(20, 2), torch.randn(20, 1)
    found = generalization_gap(model, loss, data, data)
    assert found.loss_gap.mean == pytest.approx(0, abs=1e-6)
    assert found.accuracy_gap is None
    assert found.test_accuracy is None


def test_attention_has_a_trace_and_a_constant_loss_has_none():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
    data = torch.randn(6, 3, 4), torch.arange(6) % 3
    assert hessian_trace(model, cross_entropy, data, probes=4).stderr > 0
    with pytest.raises(ValueError, match="the loss has no derivative"):
        hessian_trace(model, lambda o, t: (o > 0).float().mean(), data)


def test_without_curvature_there_is_no_ratio():
    model = nn.Linear(3, 1)
    check = curvature_check(model, lambda o, t: o.mean(), (torch.ones(2, 3), torch.zeros(2)), b=0.1)
    assert math.isnan(check.ratio)


def test_a_loss_that_overflows_is_infinitely_sharp():
    model = Quadratic(torch.eye(3), torch.ones(3))

    def loss(outputs, targets):
        return torch.where(outputs.mean() < 2, outputs.mean(), torch.inf)

    found = keskar_sharpness(model, loss, one_example(), epsilon=0.5)
    assert found.value == math.inf


def test_a_loss_with_class_weights_has_no_gap():
    model = nn.Linear(5, 3)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    with pytest.raises(ValueError, match="loss must be the mean of the losses of single examples"):
        generalization_gap(model, weighted, classes(40), classes(40))


SUMS = [nn.CrossEntropyLoss(reduction="sum"), functools.partial(cross_entropy, reduction="sum")]


@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_over_the_batch_is_refused(loss):
    with pytest.raises(ValueError, match="loss has reduction='sum'"):
        neural_variability(nn.Linear(5, 3), loss, classes(40), b=0.1)


def test_an_option_that_the_trace_does_not_have_is_refused():
    model = torch.nn.Linear(2, 1)
    data = torch.ones(3, 2), torch.ones(3, 1)
    with pytest.raises(TypeError, match="hessian_trace\\(\\) has no argument 'vectorize'"):
        hessian_trace(model, torch.nn.functional.mse_loss, data, vectorize=True)
