"""Labels that a model has no class for get one sentence, before anything changes."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD, neural_variability
from neuvar.continual import EWC, MAS, SI, diagonal_fisher
from neuvar.measures import generalization_gap, hessian_trace, keskar_sharpness
from neuvar.train import evaluate, find_b
from tests.landscapes import classes
from tests.toy import same
from tests.trainings import network, state

WORDS = r"data has the label {}, but the model has 3 classes: labels must be from 0 to 2"


def wrong(label, n=600):
    """Data of which one label, far behind, is wrong."""
    x, y = classes(n)
    y[-3] = label
    return x, y


def batched(data):
    return list(zip(*(part.split(250) for part in data), strict=True))


LABELS = pytest.mark.parametrize("label", [3, -1, -100, 255])


class TestPenalties:
    @LABELS
    @pytest.mark.parametrize("fisher", ["empirical", "squared_batch_mean"])
    @pytest.mark.parametrize("form", [tuple, batched])
    @pytest.mark.parametrize("convolutions", [True, False])
    def test_ewc(self, label, fisher, form, convolutions):
        model, penalty = network(), EWC(2.0, fisher=fisher)
        if convolutions:
            model = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten())
        penalty.after_task(model, classes(20))
        before, held, mode = state(model), penalty.state_dict(), model.training
        with pytest.raises(ValueError, match=WORDS.format(label)):
            penalty.after_task(model, form(wrong(label)))
        assert same(state(model), before)
        assert model.training == mode
        assert all(p.grad is None for p in model.parameters())
        now = penalty.state_dict()
        assert penalty.tasks == 1
        for name, importance in held["importance"].items():
            assert torch.equal(now["importance"][name], importance)

    def test_under_noise(self):
        """The noise on the weights is the same as before."""
        model = network()
        opt = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
        cross_entropy(model(classes(20)[0]), classes(20)[1]).backward()
        opt.step()
        before = state(model)
        with pytest.raises(ValueError, match=WORDS.format(7)):
            EWC(1.0, fisher="empirical").after_task(model, wrong(7))
        assert same(state(model), before)

    @pytest.mark.parametrize("kind", ["exact", "sampled"])
    def test_those_that_do_not_use_labels(self, kind):
        model, (x, y) = network(), wrong(7)
        ours, theirs = (diagonal_fisher(model, data, kind=kind) for data in ((x, y), x))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        MAS(1.0).after_task(model, (x, y))
        penalty = SI(1.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(x).square().mean() + penalty(model)).backward()
        opt.step()
        penalty.after_step(model)
        penalty.after_task(model, (x, y))
        assert penalty.tasks == 1


LOSSES = {
    "function": cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "partial": functools.partial(cross_entropy, label_smoothing=0.1),
    "weights": nn.CrossEntropyLoss(torch.ones(3)),
}


class TestMeasures:
    @pytest.mark.parametrize("label", [3, -1, 255])
    @pytest.mark.parametrize("loss", LOSSES)
    def test_variability(self, label, loss):
        with pytest.raises(ValueError, match=WORDS.format(label)):
            neural_variability(network(), LOSSES[loss], wrong(label), b=0.1, batch_size=250)

    def test_in_a_sequence(self):
        model = nn.Sequential(nn.Linear(5, 12), nn.Unflatten(1, (3, 4)))
        x, y = classes(40)
        y = y[:, None].repeat(1, 4)
        y[30, 2], y[3] = 5, -100
        with pytest.raises(ValueError, match=WORDS.format(5)):
            neural_variability(model, cross_entropy, (x, y), b=0.1)

    def test_others(self):
        model, data = network(), wrong(4)
        before = state(model)
        for run in (
            lambda: hessian_trace(model, cross_entropy, data),
            lambda: keskar_sharpness(model, cross_entropy, data),
            lambda: generalization_gap(model, cross_entropy, classes(20), data),
            lambda: find_b(model, cross_entropy, (data[0][-50:], data[1][-50:])),
            lambda: evaluate(model, batched(data)),
        ):
            with pytest.raises(ValueError, match=WORDS.format(4)):
                run()
            assert same(state(model), before)
