"""skorch: evaluation, checkpoints, grid search and resumed runs, compared to the bit.

The reference is a loop written by hand, with an optimizer created from parameters alone.
"""

import pickle
from functools import partial

import accelerate
import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV, KFold
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, GradientNormClipping, LoadInitState
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from skorch.hf import AccelerateMixin
from torch import nn
from torch.nn.functional import cross_entropy, softmax

import neuvar
from neuvar.cleaning import judge_labels
from neuvar.integrations.skorch import NVRMNet

X = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
Y = (X[:, 0] > 0) + (X[:, 1] > 0).astype(np.int64)
VALID_X, VALID_Y = X[40:], Y[40:]
EPOCHS, BATCH = 6, 8


class Module(nn.Module):
    def __init__(self, last=nn.Identity):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3), last())

    def forward(self, x):
        return self.layers(x)


class Net(NVRMNet, NeuralNetClassifier):
    pass


class Record(Callback):
    """Keeps the predictions after each epoch."""

    def on_train_begin(self, net, **kwargs):
        self.probabilities = []

    def on_epoch_end(self, net, **kwargs):
        self.probabilities.append(net.predict_proba(X))


def make_net(kind=Net, *, b=0.05, **options):
    defaults = {
        "criterion": nn.CrossEntropyLoss,
        "optimizer": neuvar.NVRMAdam,
        "optimizer__b": b,
        "lr": 0.05,
        "max_epochs": EPOCHS,
        "batch_size": BATCH,
        "train_split": predefined_split(Dataset(VALID_X, VALID_Y)),
        "verbose": 0,
    }
    return kind(Module, **(defaults | options))


def train_by_hand(x=X[:40], y=Y[:40], *, b=0.05, parts=1, clip=None, precision=None, epochs=EPOCHS):
    """Train without a framework; returns the clean weights and probabilities after each epoch."""
    model = Module()
    optimizer = neuvar.NVRMAdam(model.parameters(), lr=0.05, b=b)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is not None)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    weights, probabilities, scales = [], [], []
    for _ in range(epochs):
        for first in range(0, len(x), BATCH * parts):
            optimizer.zero_grad()
            for part in range(first, min(first + BATCH * parts, len(x)), BATCH):
                with autocast:
                    scores = model(inputs[part : part + BATCH]).float()
                loss = cross_entropy(scores, labels[part : part + BATCH]) / parts
                optimizer.report_loss(loss)
                loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        with optimizer.denoised(), torch.no_grad(), autocast:
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            probabilities.append(softmax(model(torch.from_numpy(X)).float(), -1).numpy())
        scales.append(optimizer.param_groups[0]["b"])
    return weights, probabilities, scales


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


class Accumulating(Net):
    """Gradient accumulation as in the documentation of skorch."""

    parts = 5

    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / self.parts

    def train_step(self, batch, **fit_params):
        done = len(self.history[-1, "batches"])
        step = self.train_step_single(batch, **fit_params)
        if done % self.parts == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class Accelerated(AccelerateMixin, Net):
    pass


def bfloat16():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16")


CASES = {
    "plain": (Net, dict, {}),
    "clipping": (Net, lambda: {"callbacks": [("clip", GradientNormClipping(0.1))]}, {"clip": 0.1}),
    "accumulation": (Accumulating, dict, {"parts": 5}),
    "bf16": (Accelerated, lambda: {"accelerator": bfloat16()}, {"precision": "bf16"}),
}


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("case", CASES)
def test_every_evaluation_is_clean(tmp_path, case, b):
    kind, options, by_hand = CASES[case]
    weights, probabilities, scales = train_by_hand(b=b, **by_hand)
    options, record = options(), Record()
    callbacks = [("record", record), *options.pop("callbacks", [])]
    net = make_net(kind, b=b, callbacks=callbacks, **options).fit(X[:40], Y[:40])
    assert_same(net.module_.state_dict(), weights[-1])
    found = dict(net.callbacks_)["record"].probabilities
    assert all(np.array_equal(a, b) for a, b in zip(found, probabilities, strict=True))
    assert net.history[:, "b"] == scales
    if b == "auto":
        assert len(set(scales)) > 1
    net.save_params(f_params=tmp_path / "weights.pt")
    assert_same(torch.load(tmp_path / "weights.pt", weights_only=True), weights[-1])


def test_checkpoint_loads_the_best_weights_clean(tmp_path):
    weights, probabilities, _ = train_by_hand(b=0.3, epochs=8)
    losses = [
        cross_entropy(torch.from_numpy(np.log(p[40:])), torch.from_numpy(VALID_Y)).item()
        for p in probabilities
    ]
    best = int(np.argmin(losses))
    assert 0 < best < 7
    checkpoint = Checkpoint(dirname=tmp_path, load_best=True)
    net = make_net(b=0.3, max_epochs=8, callbacks=[checkpoint]).fit(X[:40], Y[:40])
    assert np.allclose(net.history[:, "valid_loss"], losses[: best + 1])  # up to the best
    assert_same(net.module_.state_dict(), weights[best])
    assert np.array_equal(net.predict_proba(X), probabilities[best])
    assert_same(torch.load(tmp_path / "params.pt", weights_only=True), weights[best])


@pytest.mark.parametrize("b", [0.05, "auto"])
def test_load_init_state_continues_to_the_bit(tmp_path, b):
    whole = make_net(b=b).fit(X[:40], Y[:40])
    for epochs in (1, EPOCHS - 1):
        checkpoint = Checkpoint(dirname=tmp_path, monitor=None)
        callbacks = [LoadInitState(checkpoint), checkpoint]
        net = make_net(b=b, max_epochs=epochs, callbacks=callbacks).fit(X[:40], Y[:40])
    assert len(net.history) == EPOCHS
    assert_same(net.module_.state_dict(), whole.module_.state_dict())
    assert net.history[-1, "train_loss"] == whole.history[-1, "train_loss"]
    assert net.optimizer_.param_groups[0]["drawn"] == whole.optimizer_.param_groups[0]["drawn"]


def test_grid_search_scores_clean_weights():
    scales, folds = [0.0, 0.1, 0.5], KFold(3)
    net = make_net(train_split=False)
    grid = {"optimizer__b": scales}
    search = GridSearchCV(net, grid, cv=folds, scoring="accuracy", refit=True).fit(X, Y)
    for index, b in enumerate(scales):
        for fold, (train, test) in enumerate(folds.split(X)):
            _, probabilities, _ = train_by_hand(X[train], Y[train], b=b)
            expected = (probabilities[-1][test].argmax(1) == Y[test]).mean()
            assert search.cv_results_[f"split{fold}_test_score"][index] == expected
    _, probabilities, _ = train_by_hand(X, Y, b=search.best_params_["optimizer__b"])
    assert np.array_equal(search.predict_proba(X), probabilities[-1])


def test_pickled_net_is_clean_and_trains_on():
    net = make_net().fit(X[:40], Y[:40])
    copy = pickle.loads(pickle.dumps(net))
    assert np.array_equal(copy.predict_proba(X), net.predict_proba(X))
    net.partial_fit(X[:40], Y[:40])
    copy.partial_fit(X[:40], Y[:40])
    assert_same(copy.module_.state_dict(), net.module_.state_dict())


def test_b_may_change_between_fits():
    net = make_net().fit(X[:40], Y[:40])
    net.set_params(optimizer__b=0.01)
    net.partial_fit(X[:40], Y[:40])
    assert net.history[-1, "b"] == 0.01


def test_a_criterion_with_weights_gets_noise_too():
    class Scaled(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, scores, labels):
            return super().forward(scores * self.scale, labels)

    net = make_net(criterion=Scaled).fit(X[:40], Y[:40])
    assert net.criterion_.scale in net.optimizer_._weights.eps


def test_other_optimizers_work_as_usual():
    nets = [
        kind(Module, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, verbose=0)
        for kind in (Net, NeuralNetClassifier)
    ]
    ours, theirs = [net.fit(X, Y).predict_proba(X) for net in nets]
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_observer_finds_the_same_issues_as_judge_labels(criterion):
    labels = np.where(np.arange(len(Y)) % 8 == 0, (Y + 1) % 3, Y)
    observer, seen = neuvar.LabelObserver(len(X), 3), np.zeros((len(X), 3), dtype=np.float32)

    class Watch(Callback):
        def on_batch_end(self, net, batch, training, y_pred=None, **kwargs):
            if training:
                p = y_pred if criterion is nn.NLLLoss else softmax(y_pred, -1)
                rows = [np.flatnonzero((row == X).all(1))[0] for row in batch[0][0].numpy()]
                seen[rows] += p.detach().numpy()

    net = make_net(
        criterion=criterion,
        observer=observer,
        train_split=ValidSplit(3, stratified=True),
        iterator_train__shuffle=True,
        callbacks=[Watch()],
        max_epochs=10,
        module__last=nn.Identity if criterion is nn.CrossEntropyLoss else partial(nn.Softmax, -1),
    )
    net.fit(X, labels)
    trained = np.flatnonzero(seen.sum(1) > 0)
    assert len(trained) == 40
    p = seen[trained] / seen[trained].sum(1, keepdims=True)
    expected = judge_labels(p, labels[trained], history=True)
    issues = observer.label_issues()
    assert np.array_equal(np.setdiff1d(np.arange(len(X)), issues.unseen), trained)
    assert np.allclose(issues.probabilities[trained], expected.probabilities)
    assert np.array_equal(issues.flagged[trained], expected.flagged)
    assert expected.flagged.any()
