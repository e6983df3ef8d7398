"""Means over data whose targets do not all count: the division into batches does not matter."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss, relu

from neuvar import bounds, neural_variability
from neuvar.measures import (
    curvature_check,
    generalization_gap,
    hessian_trace,
    keskar_sharpness,
    variability_curve,
)
from neuvar.measures.loss_and_accuracy import batch_weights, counted_targets
from neuvar.train import evaluate
from tests.landscapes import classes

WEIGHT = torch.tensor([0.5, 3.0, 1.0])
SIZES = (1000, 20, 7, 1)


class Words(nn.Module):
    """Scores of three classes at each of four places, along the second or the last axis."""

    def __init__(self, *, last=False):
        super().__init__()
        self.layer, self.last = nn.Linear(5, 12), last

    def forward(self, x):
        scores = self.layer(x).view(-1, 4, 3)
        return scores if self.last else scores.transpose(1, 2)


def one_each(ignored, n=40):
    """A target for each example; most of the last ones do not count."""
    x, y = classes(n)
    y[25:38] = ignored
    return x, y


def sequences(ignored, n=40):
    """Four targets for each example, of which fewer and fewer count; none of the last ones."""
    x, y = classes(4 * n)
    y = y.view(n, 4)
    y[torch.arange(4) > 3 - torch.arange(n)[:, None] // 8] = ignored
    return x[:n], y


def own(outputs, targets):
    """A loss that nobody knows from outside, for scores along the last axis."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def masked(outputs, targets):
    """A mean whose gradient is nan, as its value is, where nothing counts."""
    mask = targets >= 0
    each = cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def told(outputs, targets):
    """A loss that says which target it leaves out."""
    return cross_entropy(outputs, targets, ignore_index=2)


told.ignore_index = 2


def hinge(outputs, targets):
    """All targets count, also those below 0."""
    return relu(1 - outputs[:, 0] * targets).mean()


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def words(*, last=False):
    torch.manual_seed(0)
    return Words(last=last)


CASES = {
    "default": (flat, cross_entropy, one_each(-100)),
    "module": (flat, nn.CrossEntropyLoss(ignore_index=0), one_each(0)),
    "partial": (flat, partial(cross_entropy, ignore_index=1), one_each(1)),
    "weights": (flat, nn.CrossEntropyLoss(WEIGHT), one_each(-100)),
    "weights and smoothing": (
        flat, partial(cross_entropy, weight=WEIGHT, label_smoothing=0.2), one_each(-100),
    ),
    "likelihood": (
        lambda: nn.Sequential(flat(), nn.LogSoftmax(1)), nn.NLLLoss(ignore_index=2), one_each(2),
    ),
    "sequences": (words, cross_entropy, sequences(-100)),
    "sequences and weights": (
        words, nn.CrossEntropyLoss(WEIGHT, ignore_index=0), sequences(0)
    ),
    "own": (lambda: words(last=True), own, sequences(-1)),
    "own and masked": (flat, masked, one_each(-100)),
    "own and told": (flat, told, one_each(2)),
    "negative labels": (
        lambda: nn.Sequential(flat(), nn.Linear(3, 1)), hinge, (classes(40)[0], classes(40)[1] - 1),
    ),
}  # fmt: skip


def assert_same(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
class TestBatchSize:
    @pytest.mark.parametrize("vectorize", [True, False])
    def test_variability(self, case, vectorize):
        make, loss, data = CASES[case]
        model = make()
        with torch.no_grad():
            whole = float(loss(model(data[0]), data[1]))
        numbers = []
        for size in SIZES:
            found = neural_variability(
                model, loss, data, b=0.3, draws=8, batch_size=size, vectorize=vectorize
            )
            accuracy = found.accuracy.mean if found.accuracy else 0.0
            rate = found.clean_accuracy if found.accuracy else 0.0
            numbers.append((found.clean, found.difference, accuracy, rate))
            assert found.clean == pytest.approx(whole, rel=1e-5)
        for other in numbers[1:]:
            assert_same(other, numbers[0])

    def test_derivatives(self, case):
        make, loss, data = CASES[case]
        model, numbers = make(), []
        for size in SIZES:
            trace = hessian_trace(model, loss, data, probes=3, batch_size=size).mean
            sharp = keskar_sharpness(model, loss, data, epsilon=0.01, steps=3, batch_size=size)
            check = curvature_check(model, loss, data, b=0.1, draws=4, batch_size=size)
            numbers.append((trace, sharp.value, check.predicted.mean))
        for other in numbers[1:]:
            assert_same(other, numbers[0])


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("own", "negative labels")])
def test_evaluation(case):
    make, loss, (x, y) = CASES[case]
    model, numbers = make(), []
    for size in SIZES:
        found = evaluate(model, zip(x.split(size), y.split(size), strict=True), loss=loss)
        numbers.append((found.loss, found.accuracy))
        assert found.examples == 40
    for other in numbers[1:]:
        assert_same(other, numbers[0])


def test_other_measures_that_read_a_loss():
    model, data = flat(), one_each(-100)
    curves = [
        variability_curve(model, cross_entropy, data, b=[0.1, 0.2], draws=4, batch_size=size)
        for size in SIZES
    ]
    for curve in curves[1:]:
        assert_same([p.difference for p in curve.points], [p.difference for p in curves[0].points])
    test = classes(20, seed=1)
    gaps = [
        generalization_gap(model, cross_entropy, data, test, batch_size=size).train_loss
        for size in SIZES
    ]
    assert_same(gaps, gaps[:1] * len(SIZES))


def test_accuracy_is_that_of_the_targets_that_count():
    model, (x, y) = flat(), one_each(0)
    loss = nn.CrossEntropyLoss(ignore_index=0)
    with torch.no_grad():
        right = (model(x).argmax(1) == y)[y != 0].double().mean().item()
    assert neural_variability(model, loss, (x, y), b=0.1, draws=4).clean_accuracy == right
    assert evaluate(model, [(x, y)], loss=loss).accuracy == right


def test_as_if_ignored_targets_were_not_there():
    model, (x, y) = flat(), one_each(-100)
    kept = x[y >= 0], y[y >= 0]
    ours, theirs = (
        neural_variability(model, cross_entropy, data, b=0.2, draws=8) for data in ((x, y), kept)
    )
    assert_same(ours.difference, theirs.difference)
    assert ours.accuracy.mean == pytest.approx(theirs.accuracy.mean)
    first, second = (
        bounds.pac_bayes(model, data, b=0.1, sigma=0.1, draws=4, centre=model).bound
        for data in ((x, y), kept)
    )
    assert first.value == pytest.approx(second.value)


@pytest.mark.parametrize("loss", [cross_entropy, told])
def test_nothing_that_counts(loss):
    x, y = classes(8)
    y[:] = -100 if loss is cross_entropy else 2
    with pytest.raises(ValueError, match="data has no target that counts"):
        neural_variability(flat(), loss, (x, y), b=0.1, draws=4)
    with pytest.raises(ValueError, match="the loss ignores all labels in batches"):
        evaluate(flat(), [(x, y)], loss=loss)


def test_what_counts():
    outputs, targets = torch.zeros(4, 3), torch.tensor([0, -100, 2, -1])
    assert counted_targets(nll_loss, outputs, targets).tolist() == [True, False, True, True]
    assert counted_targets(own, outputs, targets).tolist() == [True, False, True, False]
    assert counted_targets(own, outputs[:, :1], targets).tolist() == [True, False, True, True]
    assert counted_targets(partial(partial(cross_entropy, ignore_index=0), ignore_index=2), outputs,
                   targets).tolist() == [True, True, False, True]  # fmt: skip
    for no_classes in (targets.float(), targets > 0, "words"):
        assert counted_targets(cross_entropy, outputs, no_classes) is None
    assert batch_weights(cross_entropy, outputs, torch.rand(4, 3)).tolist() == [4, 4]
    weighted = nn.CrossEntropyLoss(WEIGHT)
    assert batch_weights(weighted, outputs[:3], targets[:3]).tolist() == [1.5, 2]

    class Without(nn.CrossEntropyLoss):
        """A loss that leaves nothing out."""

    without = Without()
    without.ignore_index = None
    assert counted_targets(without, outputs, targets).tolist() == [True] * 4
