"""Mistakes in a user's own network, data, optimizer, label noise or noise family are named."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from neuvar import NVRMSGD
from neuvar.continual import PENALTIES, STREAMS
from neuvar.data import LOADERS, Split, mnist_excerpt
from neuvar.experiments import Tasks, Training, run_one
from neuvar.labels import KINDS, symmetric
from neuvar.models import NETWORKS
from neuvar.noise import FAMILIES, Family, family
from neuvar.train import OPTIMIZERS

SMALL = {"data": "mnist-excerpt", "images": 20, "test_images": 10, "width": 4}


class Pair(nn.Module):
    """Returns its scores and its input."""

    def forward(self, x):
        return x.flatten(1)[:, :10], x


def linear(outputs):
    return lambda **options: nn.Sequential(nn.Flatten(), nn.Linear(784, outputs))


def data(**changes):
    return lambda: replace(mnist_excerpt(), **changes)


def images(count, *shape):
    return Split(torch.zeros(count, *shape, dtype=torch.uint8), torch.arange(count) % 10)


@pytest.mark.parametrize(
    ("table", "function", "run", "sentence"),
    [
        (NETWORKS, lambda **options: None, {"model": "own"},
         'NETWORKS["own"] must return a torch.nn.Module, got None'),
        (NETWORKS, linear(9), {"model": "own"},
         'the network of NETWORKS["own"] must return 10 scores for each image, '
         "got the shape (1, 9) for one image"),
        (NETWORKS, lambda **options: Pair(), {"model": "own"},
         'the network of NETWORKS["own"] must return a tensor, got tuple'),
        (LOADERS, lambda: (1, 2), {"data": "own"},
         'LOADERS["own"] must return a neuvar.data.Dataset, got tuple'),
        (LOADERS, data(classes=9), {"data": "own"},
         'LOADERS["own"] must return labels from 0 to 8 for classes=9, got 9'),
        (LOADERS, data(test=images(10, 8, 8)), {"data": "own"},
         'LOADERS["own"] must return training and test images of one shape, '
         "got (28, 28) and (8, 8)"),
        (OPTIMIZERS, lambda params, **options: None, {"optimizer": "own"},
         'OPTIMIZERS["own"] must return a torch.optim.Optimizer, got None'),
        (OPTIMIZERS, lambda params, *, model, seed, b=0.0, lr, weight_decay: None,
         {"optimizer": "own", "b": 0.1, "noise": "laplace"},
         'own has no noise: OPTIMIZERS["own"] takes no argument noise'),
        (KINDS, lambda labels, rate, **options: labels, {"label_noise": "own", "noise_rate": 0.1},
         'KINDS["own"] must return a neuvar.labels.NoisyLabels, got Tensor'),
        (KINDS, lambda labels, rate, **options: symmetric(labels[1:], rate, **options),
         {"label_noise": "own", "noise_rate": 0.1},
         'KINDS["own"] must return a label for each of 20, got 19'),
    ],
)  # fmt: skip
def test_a_wrong_return_value_names_the_function(monkeypatch, table, function, run, sentence):
    monkeypatch.setitem(table, "own", function)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        run_one(Training(**(SMALL | run)))


@pytest.mark.parametrize(
    ("table", "run", "sentence"),
    [
        (STREAMS, {"stream": "own"}, 'STREAMS["own"] must return a neuvar.continual.Stream, got'),
        (PENALTIES, {"penalty": "own"}, 'PENALTIES["own"] must return a neuvar.continual.Penalty'),
    ],
)
def test_so_do_those_for_tasks(monkeypatch, table, run, sentence):
    monkeypatch.setitem(table, "own", lambda *arguments, **options: None)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        run_one(Tasks(**(SMALL | {"tasks": 2} | run)))


def test_the_check_of_the_scores_draws_nothing(monkeypatch):
    """A network that is random in evaluation mode too leaves the global generator as it was."""
    states = []

    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(784, 10)

        def forward(self, x):
            states.append((self.training, torch.get_rng_state()))
            return self.inner(x.flatten(1)) + torch.rand(10)

    monkeypatch.setitem(NETWORKS, "own", lambda **options: Random())
    run_one(Training(**SMALL, model="own"))
    (mode, checked), (_, first) = states[:2]
    assert not mode
    assert torch.equal(checked, first)


GOOD = {
    "std": 1.0,
    "quantile": torch.special.ndtri,
    "fill_": lambda out, generator: out.normal_(generator=generator),
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"std": math.nan}, 'std of FAMILIES["own"] must be a finite number > 0, got nan'),
        ({"quantile": lambda p: None}, "must return one value for each level, got NoneType"),
        ({"quantile": lambda p: p[:3]}, "must return one value for each level, got shape (3,)"),
        ({"quantile": lambda p: (p - 2).log()}, "must be finite and increasing"),
        ({"quantile": lambda p: -torch.special.ndtri(p)}, "must be finite and increasing"),
        ({"quantile": lambda p: torch.special.ndtri(p) + 5}, "have mean 0 and the family's std 1,"),
        ({"std": 7.0}, "must have mean 0 and the family's std 7, got mean "),
        ({"std": math.sqrt(2)}, "must have mean 0 and the family's std 1.414, got mean "),
        ({"fill_": lambda out, generator: torch.rand(3)}, "must overwrite its first argument"),
    ],
)
def test_a_wrong_family_of_noise_is_named(monkeypatch, changes, sentence):
    monkeypatch.setitem(FAMILIES, "own", Family(**(GOOD | changes)))
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        NVRMSGD(nn.Linear(2, 2), lr=0.1, b=0.1, noise="own")
    assert 'FAMILIES["own"]' in str(error.value)


def test_a_function_is_no_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "own", torch.special.ndtri)
    with pytest.raises(ValueError, match=r'^FAMILIES\["own"\] must be a Family, got builtin_func'):
        family("own")


@pytest.mark.parametrize(
    ("std", "quantile"),
    [(math.pi / math.sqrt(3), torch.logit), (1.0, lambda p: (p - 0.5).sign())],
    ids=["heavy tails", "two values"],
)
def test_a_family_is_checked_once(monkeypatch, std, quantile):
    calls = []
    own = Family(std, lambda p: calls.append(0) or quantile(p), GOOD["fill_"])
    monkeypatch.setitem(FAMILIES, "own", own)
    assert family("own") is family("own") is own
    assert len(calls) == 1
