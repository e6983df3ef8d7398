"""Evaluation: closed forms, and a model and an optimizer that are left unchanged."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar.measures.loss_and_accuracy import half_to_float
from neuvar.train import evaluate, fit
from neuvar.train.evaluation import autocast, device_of
from tests.toy import same
from tests.trainings import Chunks, StoppedError, network, optimizer, state


class Given(nn.Module):
    """A network whose scores are its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, *, turn=0):
        return (x * self.weight).roll(turn, 1)


SCORES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
LABELS = torch.tensor([0, 0, 0])


class TestClosedForms:
    @pytest.mark.parametrize("sizes", [(3,), (1, 2), (2, 1), (1, 1, 1), (2, 0, 1), (0, 3)])
    def test_loss_accuracy_predictions(self, sizes):
        """Means over examples, however they are divided into batches."""
        batches = zip(SCORES.split(sizes), LABELS.split(sizes), strict=True)
        result = evaluate(Given(), batches)
        expected = [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(-3))]
        assert result.loss == pytest.approx(sum(expected) / 3, rel=1e-6)
        assert result.accuracy == 2 / 3
        assert result.predictions.tolist() == [0, 1, 0]
        assert result.examples == 3

    def test_arguments_reach_the_model(self):
        result = evaluate(Given(), [(SCORES, LABELS)], turn=1)
        assert result.predictions.tolist() == [1, 0, 1]

    def test_another_loss(self):
        result = evaluate(Given(), [(SCORES, LABELS)], loss=lambda s, y: s.sum() / len(y))
        assert result.loss == pytest.approx(2.0)

    def test_more_than_two_items_in_a_batch(self):
        assert evaluate(Given(), [(SCORES, LABELS, torch.arange(3))]).examples == 3

    def test_float64_is_kept_and_half_precision_is_not(self):
        x = SCORES.double() + 1e-12
        exact = cross_entropy(x, LABELS).item()
        assert evaluate(Given().double(), [(x, LABELS)]).loss == exact
        assert half_to_float(x) is x
        assert half_to_float(x.bfloat16()).dtype == half_to_float(x.half()).dtype == torch.float32

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_mixed_precision(self, precision):
        model = network()
        batch = (Chunks().inputs, Chunks().labels)
        plain, mixed = evaluate(model, [batch]), evaluate(model, [batch], precision=precision)
        assert mixed.loss == pytest.approx(plain.loss, rel=0.02)
        assert mixed.loss != plain.loss


class TestLeftAsFound:
    def test_modes(self):
        model = network(dropout=True, norm=True)
        model.train()
        model[1].eval()
        seen = []
        model.register_forward_hook(lambda m, *_: seen.append([x.training for x in m.modules()]))
        before, modes = state(model), [m.training for m in model.modules()]
        evaluate(model, Chunks().epoch(0))
        assert [m.training for m in model.modules()] == modes
        assert not any(any(modes) for modes in seen)
        assert same(state(model), before)

    def test_modes_after_an_exception(self):
        model = network(norm=True)
        model.train()
        with pytest.raises(StoppedError):
            evaluate(model, Chunks(stop=2).epoch(0))
        assert all(m.training for m in model.modules())

    def test_no_gradients(self):
        model = network()
        evaluate(model, Chunks().epoch(0))
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("stop", [-1, 2])
    def test_noise_is_taken_off_and_put_back(self, stop):
        model = network()
        opt = optimizer("nvrm-sgd", model)
        fit(model, Chunks(), opt, epochs=1)
        clean = evaluate(model, Chunks().epoch(0)).loss
        opt.train()
        noisy = state(model)
        with opt.perturbed():
            assert evaluate(model, Chunks().epoch(0)).loss != clean
        if stop < 0:
            assert evaluate(model, Chunks().epoch(0)).loss == clean
        else:
            with pytest.raises(StoppedError):
                evaluate(model, Chunks(stop=stop).epoch(0))
        assert same(state(model), noisy)

    @pytest.mark.parametrize("name", ["sgd", "psgd", "sam-sgd"])
    def test_other_optimizers_change_nothing(self, name):
        model = network()
        plain = evaluate(model, Chunks().epoch(0))
        optimizer(name, model)
        assert evaluate(model, Chunks().epoch(0)).loss == plain.loss

    def test_a_known_model_is_clean(self):
        model = network()
        opt = optimizer("nvrm-sgd", model, known=True)
        fit(model, Chunks(), opt, epochs=1)
        clean = evaluate(model, Chunks().epoch(0)).loss
        opt.train()
        assert evaluate(model, Chunks().epoch(0)).loss == clean


class TestBadInput:
    @pytest.mark.parametrize("batches", [[], [(SCORES[:0], LABELS[:0])]])
    def test_no_examples(self, batches):
        with pytest.raises(ValueError, match="batches is empty"):
            evaluate(Given(), batches)

    @pytest.mark.parametrize("batches", [[], [(SCORES, LABELS)]])
    def test_an_unknown_precision(self, batches):
        with pytest.raises(ValueError, match="precision must be one of float32, bf16, fp16, got"):
            evaluate(Given(), batches, precision="fp8")

    def test_a_model_without_parameters(self):
        with pytest.raises(ValueError, match="model has no parameters"):
            evaluate(nn.Identity(), [(SCORES, LABELS)])


def test_autocast_is_for_the_type_of_the_device():
    assert device_of(network().to("meta")).type == "meta"
    with autocast(torch.device("cpu", 0), "bf16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with autocast(torch.device("cpu"), "float32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_a_module_that_overrides_train_is_told_when_its_mode_comes_back():
    """As layers do that merge adapters into their weights for evaluation."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(2, 2))
    evaluate(model, [(SCORES, LABELS)])
    assert model[0].training
    assert not model[0].merged


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ((SCORES, LABELS), "put the tensors into a DataLoader with TensorDataset"),
        (SCORES, "another iterable of batches, got Tensor"),
    ],
)
def test_tensors_in_place_of_batches(batches, sentence):
    with pytest.raises(ValueError, match=sentence):
        evaluate(Given(), batches)
