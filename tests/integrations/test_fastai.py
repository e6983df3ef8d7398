"""fastai: evaluation, saved weights and resumed runs, compared to the bit.

The reference is a loop written by hand, with an optimizer created from parameters alone.
"""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import combined_cos
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar.integrations.fastai import ReportLoss

# fastai loads files by a name that NumPy has moved.
pytestmark = pytest.mark.filterwarnings("ignore:.*numpy.core:DeprecationWarning")

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0) + (X[:, 1] > 0).long()
BATCH, EPOCHS = 8, 3


class Pairs(list):
    def new_empty(self):  # what export() saves
        return Pairs()


class Record(Callback):
    """Keeps the predictions of each evaluation."""

    def __init__(self):
        self.scores = []

    def after_pred(self):
        if not self.training:
            self.scores.append(self.pred.clone())


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def make_learner(folder, *, b=0.05, cbs=()):
    data = Pairs(zip(X, Y, strict=True))
    loaders = [DataLoader(data, bs=BATCH), DataLoader(data, bs=len(data))]
    model = make_model()
    optimizer = partial(OptimWrapper, opt=partial(neuvar.NVRMAdam, model=model, b=b))
    return Learner(
        DataLoaders(*loaders, device="cpu"),
        model,
        loss_func=cross_entropy,
        opt_func=optimizer,
        lr=0.05,
        wd=0.0,
        path=folder,
        cbs=[Record(), *([ReportLoss()] if b == "auto" else []), *cbs],
    )


def train_by_hand(*, b=0.05, parts=1, clip=None, one_cycle=False):
    """Train without a framework; returns the clean weights and scores after each epoch."""
    model = make_model()
    optimizer = neuvar.NVRMAdam(model.parameters(), lr=0.05, b=b)
    rate = combined_cos(0.25, np.array([0.05]) / 25, np.array([0.05]), np.array([0.05]) / 1e5)
    momentum = combined_cos(0.25, 0.95, 0.85, 0.95)
    weights, scores, done = [], [], 0
    for _ in range(EPOCHS):
        for first in range(0, len(X), BATCH):
            if one_cycle:
                pct = done / (EPOCHS * len(X) / BATCH)
                group = optimizer.param_groups[0]
                group["lr"], group["betas"] = rate(pct)[0], (momentum(pct), group["betas"][1])
            done += 1
            part = slice(first, first + BATCH)
            loss = cross_entropy(model(X[part]), Y[part])
            loss = loss / parts if parts > 1 else loss
            optimizer.report_loss(loss)
            loss.backward()
            if done % parts == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        with optimizer.denoised(), torch.no_grad():
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            scores.append(model(X))
    return weights, scores


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


CASES = {
    "plain": (list, {}),
    "one cycle": (list, {"one_cycle": True}),
    "accumulation": (lambda: [GradientAccumulation(2 * BATCH)], {"parts": 2}),
    "clipping": (lambda: [GradientClip(0.1)], {"clip": 0.1}),
}


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_every_evaluation_is_clean(tmp_path, case, b):
    callbacks, by_hand = CASES[case]
    weights, scores = train_by_hand(b=b, **by_hand)
    learner = make_learner(tmp_path, b=b, cbs=callbacks())
    with learner.no_bar(), learner.no_logging():
        if case == "one cycle":
            learner.fit_one_cycle(EPOCHS)
        else:
            learner.fit(EPOCHS)
    assert_same(learner.model.state_dict(), weights[-1])
    found = learner.record.scores
    assert all(torch.equal(a, b) for a, b in zip(found, scores, strict=True))
    predictions, _ = learner.get_preds(act=nn.Identity())
    assert torch.equal(predictions, scores[-1])
    if b == "auto":
        assert learner.opt.hypers[-1]["b"] > 0.0096  # it has risen


def test_saved_and_exported_models_are_clean(tmp_path):
    weights, scores = train_by_hand()
    learner = make_learner(tmp_path, cbs=[SaveModelCallback(every_epoch=True)])
    with learner.no_bar(), learner.no_logging():
        learner.fit(EPOCHS)
    for epoch in range(EPOCHS):
        state = torch.load(tmp_path / "models" / f"model_{epoch}.pth", weights_only=False)
        assert_same(state, weights[epoch])
    learner.export("learner.pkl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a pickle may run code
        loaded = load_learner(tmp_path / "learner.pkl")
    assert_same(loaded.model.state_dict(), weights[-1])
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(X), scores[-1])


@pytest.mark.parametrize("b", [0.05, "auto"])
def test_loaded_learner_continues_to_the_bit(tmp_path, b):
    weights, _ = train_by_hand(b=b)
    begun = make_learner(tmp_path, b=b)
    with begun.no_bar(), begun.no_logging():
        begun.fit(1)
        begun.save("begun")
    resumed = make_learner(tmp_path, b=b)
    with resumed.no_bar(), resumed.no_logging():
        resumed.load("begun")
        assert_same(resumed.model.state_dict(), weights[0])
        resumed.fit(EPOCHS - 1)
    assert_same(resumed.model.state_dict(), weights[-1])


def test_lr_find_leaves_no_trace(tmp_path):
    weights, _ = train_by_hand()
    learner = make_learner(tmp_path)
    with learner.no_bar(), learner.no_logging():
        learner.lr_find(num_it=8, show_plot=False)
        assert_same(learner.model.state_dict(), make_model().state_dict())
        learner.fit(EPOCHS, lr=0.05)
    assert_same(learner.model.state_dict(), weights[-1])
