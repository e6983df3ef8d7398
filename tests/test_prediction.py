"""Averaged predictions against closed forms, and what they leave untouched."""

import copy
import io
import math
import pickle
import signal
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softmax
from torch.utils.data import DataLoader, TensorDataset

import neuvar
from neuvar import NVRM, NVRMSGD, AveragedPredictor, _eval_mode, predict
from neuvar.measures import log_loss, perturbed
from neuvar.noise import FAMILIES, Draw, standard_noise, table, whole_slot
from neuvar.optim import rounding_parameters
from neuvar.prediction import blocks, noisy_classifier
from neuvar.prediction.uncertainty import PARTS, joined
from tests.landscapes import classes, classifier

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


class Link(nn.Module):
    """Linear-Gaussian model of two classes: P(class 1) = link(x·w)."""

    def __init__(self, w, link):
        super().__init__()
        self.w, self.link = nn.Parameter(torch.as_tensor(w, dtype=torch.float64)), link

    def forward(self, x):
        p = self.link(x @ self.w)
        return torch.stack([1 - p, p], 1)


def exact(x, w, b, link):
    """Mean probabilities and the parts of uncertainty, by quadrature over x·w ~ N(x·θ, b²|x|²)."""
    mean, std = x @ np.asarray(w), b * np.linalg.norm(x, axis=1)
    values = torch.as_tensor(mean[:, None] + std[:, None] * NODES)
    p = link(values).numpy()
    entropy = lambda p: torch.special.entr(torch.as_tensor(np.stack([1 - p, p]))).sum(0).numpy()  # noqa: E731
    averaged, expected = p @ WEIGHTS, entropy(p) @ WEIGHTS
    total = entropy(averaged)
    return {
        "probabilities": np.stack([1 - averaged, averaged], 1),
        "entropy": total,
        "expected_entropy": expected,
        "mutual_information": total - expected,
    }


LINKS = {"logistic": torch.sigmoid, "probit": torch.special.ndtr}
X = np.array([[0.3, -1.0, 2.0], [1.5, 0.2, -0.4], [0.0, 0.1, 0.0], [-2.0, 1.0, 1.0]])
W = [0.8, -0.5, 0.4]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("antithetic", [True, False])
def test_linear_gaussian_models(link, antithetic):
    model, b = Link(W, LINKS[link]), 0.6
    found = predict(
        model,
        torch.tensor(X),
        b=b,
        draws=4000,
        antithetic=antithetic,
        logits=False,
        sampler="fresh",
    )
    truth = exact(X, W, b, LINKS[link])
    for name in PARTS:
        error = getattr(found, name) - found.bias[name] - torch.as_tensor(truth[name])
        assert (error.abs() < 4 * found.stderr[name] + 1e-12).all(), name


def test_probit_has_a_closed_form():
    """E Φ(a) = Φ(μ / √(1 + s²)) for a ~ N(μ, s²)."""
    b, normal = 0.6, NormalDist()
    for row in X:
        mean, variance = row @ np.array(W), b**2 * row @ row
        truth = exact(row[None], W, b, torch.special.ndtr)["probabilities"][0, 1]
        assert truth == pytest.approx(normal.cdf(mean / math.sqrt(1 + variance)), abs=1e-9)


def test_intervals_cover_the_exact_values():
    """As often as they say, up to what few draws of a skewed quantity cost."""
    model, b, x = Link(W, torch.sigmoid), 0.6, torch.tensor(X)
    truth = exact(X, W, b, torch.sigmoid)
    inside = {name: [] for name in PARTS}
    for seed in range(300):
        found = predict(model, x, b=b, draws=64, seed=seed, logits=False, antithetic=False)
        for name in PARTS:
            low, high = found.interval(name)
            value = torch.as_tensor(truth[name])
            inside[name].append(((low <= value) & (value <= high)).double())
    for name in PARTS:
        share = torch.stack(inside[name]).mean(0)
        assert (share > 0.88).all(), (name, share)
        assert (share <= 0.99).all(), (name, share)


def test_bias_of_few_draws_is_removed():
    """The entropy of a mean over few draws is too small on average."""
    model, b, x = Link(W, torch.sigmoid), 0.6, torch.tensor(X[:1])
    truth = float(exact(X[:1], W, b, torch.sigmoid)["mutual_information"][0])
    options = {"b": b, "draws": 4, "logits": False, "antithetic": False, "sampler": "fresh"}
    found = [predict(model, x, seed=seed, **options) for seed in range(400)]
    plain = np.array([float(one.mutual_information[0]) for one in found])
    corrected = plain - [float(one.bias["mutual_information"][0]) for one in found]
    for values, is_biased in ((plain, True), (corrected, False)):
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert (abs(values.mean() - truth) > 3 * error) == is_biased


@pytest.mark.parametrize("noise", FAMILIES)
def test_draws_are_those_of_the_family(noise):
    model, x = nn.Linear(3, 2, bias=False), torch.ones(1, 3)
    found = predict(
        model, x, b=0.2, draws=2, noise=noise, sampler="fresh", seed=7, antithetic=False
    )
    slot, outputs = whole_slot((2, 3)), []
    for number in (1, 2):
        draw = Draw(number=number, noise=noise, seed=7, sampler="fresh", rank=-3)
        outputs.append(x @ (model.weight + 0.2 * standard_noise(slot, draw)).T)
    expected = torch.stack(outputs).double().softmax(2).mean(0)
    assert torch.allclose(found.probabilities, expected, atol=1e-7)
    assert found.noise == {"weight": (0.2, noise, None)}


def test_parts_add_up():
    model, (x, _) = classifier(), classes()
    found = predict(model, x, b=0.3)
    assert torch.allclose(found.probabilities.sum(1), torch.ones(60).double())
    assert torch.equal(found.entropy, torch.special.entr(found.probabilities).sum(1))
    assert torch.allclose(found.entropy, found.expected_entropy + found.mutual_information)
    assert (found.mutual_information > 0).all()
    assert torch.equal(found.classes, found.probabilities.argmax(1))
    with pytest.raises(ValueError, match="of must be one of probabilities, entropy"):
        found.interval("variance")


def test_pairs_cancel_the_slope():
    """A model linear in its noise has the same mean under ε and -ε."""

    class Linear(nn.Linear):
        def forward(self, x):
            p = 0.5 + super().forward(x)
            return torch.cat([p, 1 - p], 1)

    model = Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = torch.ones(1, 2, dtype=torch.float64)
    paired, single = (
        predict(model, x, b=0.01, logits=False, antithetic=pairs) for pairs in (True, False)
    )
    assert float((paired.probabilities - 0.5).abs().max()) < 1e-15
    assert float((single.probabilities - 0.5).abs().max()) > 1e-6


def test_interval_of_the_entropy_of_many_classes():
    """It may lie above 1, up to log(10) = 2.3, and its width depends on the confidence."""
    model, x = nn.Linear(3, 10), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    wide, narrow = (predict(model, x, b=0.5, confidence=level) for level in (0.99, 0.5))
    for name in ("entropy", "expected_entropy"):
        low, high = wide.interval(name)
        assert (low > 1).all()
        assert (high <= math.log(10) + 1e-9).all()
        inner_low, inner_high = narrow.interval(name)
        assert (low < inner_low).all()
        assert (inner_high <= high).all()


# --- limits ---


def test_without_noise_it_is_the_plain_prediction():
    model, (x, _) = classifier().eval(), classes()
    found = predict(model, x, b=0)
    assert torch.equal(found.probabilities, softmax(model(x).detach().double(), 1))
    assert not found.mutual_information.any()
    assert not any(error.any() for error in found.stderr.values())
    assert found.noise == {}


def test_one_draw_has_no_error():
    found = predict(nn.Linear(3, 2), torch.ones(1, 3), b=0.1, draws=1, antithetic=False)
    assert found.interval()[0].isneginf().all()
    assert found.interval()[1].isposinf().all()


# --- reproducible ---


def test_same_seed_same_bits():
    model, (x, _) = classifier(), classes()
    one, same, other = (predict(model, x, b=0.2, seed=seed) for seed in (3, 3, 4))
    for name in PARTS:
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert torch.equal(one.stderr[name], same.stderr[name])
    assert not torch.equal(one.probabilities, other.probabilities)


def test_batches_and_blocks_do_not_matter(monkeypatch):
    model, (x, _) = classifier(), classes()
    whole = predict(model, x, b=0.2, vectorize=False)
    parts = predict(model, x, b=0.2, vectorize=False, batch_size=7)
    assert torch.allclose(whole.probabilities, parts.probabilities, atol=1e-6)
    for limit in ("BLOCK", "BLOCK_BYTES"):
        monkeypatch.setattr(blocks, limit, 1)
        small = predict(model, x, b=0.2, vectorize=False, batch_size=7)
        for name in PARTS:
            assert torch.allclose(getattr(parts, name), getattr(small, name), atol=1e-6)


class Sizes:
    """Records the shapes of all draws that are held at once, and of the batches of a model."""

    def __init__(self, monkeypatch, model):
        self.held, self.passes, summarize = [], [], noisy_classifier.summarize
        model.register_forward_hook(lambda _, inputs, __: self.passes.append(len(inputs[0])))

        def recorded(samples):
            seen = []
            result = summarize(lambda: seen.append(samples()) or seen[-1])
            if isinstance(seen[0], list):
                self.held.append(tuple(torch.cat([p for p, _ in seen[0]]).shape))
            return result

        monkeypatch.setattr(noisy_classifier, "summarize", recorded)


@pytest.mark.parametrize("labelled", [True, False])
def test_large_batches_are_split_by_rows(monkeypatch, labelled):
    """With 10 pairs of draws and 3 classes a row has 30 probabilities, so 600 are 20 rows."""
    model, (x, y) = classifier(), classes(50)
    options = {"b": 0.2, "draws": 20, "vectorize": False}
    whole, shares = predict(model, (x, y), **options), []
    sizes = Sizes(monkeypatch, model)
    monkeypatch.setattr(blocks, "BLOCK", 600)
    data = [(x, y), (x, y)] if labelled else [x, x, x]
    found = predict(model, data, **options, progress=shares.append)
    assert sizes.held == [(10, n, 3) for _ in data for n in (17, 17, 16)]
    assert sizes.passes.count(50) == 2  # only one draw of the first batch, to see its outputs
    assert torch.allclose(found.probabilities[50:100], whole.probabilities, atol=1e-6)
    assert torch.allclose(found.stderr["entropy"][:50], whole.stderr["entropy"], atol=1e-6)
    assert not labelled or torch.equal(found.targets, torch.cat([y, y]))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert torch.equal(found.probabilities, predict(model, data, **options).probabilities)


def test_small_batches_are_joined(monkeypatch):
    model, (x, y) = classifier(), classes(60)
    options = {"b": 0.2, "draws": 20, "vectorize": False, "batch_size": 7}
    for limit, size, rows in (
        ("BLOCK", 1 << 22, [7, 53]),
        ("BLOCK", 600, [7, 14, 14, 14, 11]),
        ("BLOCK_BYTES", 2 * 7 * (5 * 4 + 8), [7, 14, 14, 14, 11]),
        ("BLOCK_BYTES", 1, [7] * 8 + [4]),
    ):
        with monkeypatch.context() as patch:
            sizes = Sizes(patch, model)
            patch.setattr(blocks, limit, size)
            predict(model, (x, y), **options)
            assert [shape[1] for shape in sizes.held] == rows, (limit, size)


class MeanOfRows(nn.Linear):
    def forward(self, x):
        return super().forward(x) - super().forward(x).mean(0)


class LastAxis(nn.Linear):
    """Its rows are the second axis of the input, which is as long as the first."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1).mean(1))


@pytest.mark.parametrize(
    ("model", "data", "dropout"),
    [
        (MeanOfRows(5, 3), torch.randn(40, 5), False),
        (LastAxis(5, 3), torch.randn(40, 40, 5), False),
        (nn.Sequential(LastAxis(5, 3), nn.Dropout(0.1)), torch.randn(40, 40, 5), True),
        (nn.Linear(5, 3), [(torch.randn(40, 5), "a name")], False),
    ],
)
def test_batches_that_cannot_be_split_are_kept_whole(monkeypatch, model, data, dropout):
    options = {"b": 0.2, "draws": 20, "vectorize": False, "dropout": dropout}
    whole = predict(model, data, **options)
    monkeypatch.setattr(blocks, "BLOCK", 600)
    sizes, shares = Sizes(monkeypatch, model), []
    again = predict(model, data, **options, progress=shares.append)
    assert sizes.held == []  # two passes over the draws instead
    assert shares == sorted(shares)
    assert shares[-1] == 1
    for name in PARTS:
        assert torch.equal(getattr(again, name), getattr(whole, name))
        assert torch.equal(again.stderr[name], whole.stderr[name])


def test_draws_of_one_large_row_are_not_held(monkeypatch):
    model, x = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 6, 6)
    options = {"b": 0.2, "draws": 10, "batch_size": 1}
    whole = predict(model, x, **options)
    monkeypatch.setattr(blocks, "BLOCK", 4 * 36)
    sizes = Sizes(monkeypatch, model)
    found = predict(model, x, **options, vectorize=True)
    assert sizes.held == []
    for name in PARTS:
        assert torch.allclose(getattr(found, name), getattr(whole, name), atol=1e-6)
        assert torch.allclose(found.stderr[name], whole.stderr[name], atol=1e-6)


def test_dropout_in_split_batches(monkeypatch):
    model, (x, _) = classifier(), classes(60)
    monkeypatch.setattr(blocks, "BLOCK", 600)
    sizes = Sizes(monkeypatch, model)
    found = predict(model, x, b=0, draws=20, antithetic=False, dropout=True)
    assert max(shape[1] for shape in sizes.held) == 10
    assert found.mutual_information.max() > 0.01


@pytest.mark.parametrize(
    ("width", "rows", "at_once"), [(8, 20, True), (8, 5000, False), (300, 60, False)]
)
def test_draws_are_batched_for_small_networks_and_batches(monkeypatch, width, rows, at_once):
    model, x = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3)), torch.randn(rows, 5)
    calls, original = [], noisy_classifier.NoisyClassifier._at_once

    def recorded(self, block, numbers):
        calls.append(numbers)
        return original(self, block, numbers)

    monkeypatch.setattr(noisy_classifier.NoisyClassifier, "_at_once", recorded)
    predict(model, x, b=0.1, batch_size=rows)
    assert bool(calls) == at_once
    calls.clear()
    predict(model, x, b=0.1, batch_size=rows, vectorize=not at_once)
    assert bool(calls) != at_once


@pytest.mark.parametrize("antithetic", [True, False])
def test_draws_at_once_or_one_by_one(antithetic):
    model, (x, _) = classifier(), classes()
    options = {"b": 0.2, "draws": 40, "antithetic": antithetic, "batch_size": 25}
    one, together = (predict(model, x, vectorize=v, **options) for v in (False, True))
    for name in PARTS:
        assert torch.allclose(getattr(one, name), getattr(together, name), atol=1e-6)
    assert not torch.equal(one.probabilities, together.probabilities)  # it was really another way


def test_a_model_that_cannot_be_vectorized():
    class Branching(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out if float(out.sum()) > 0 else 2 * out

    model, x = Branching(3, 2), torch.randn(4, 3)
    one, together = (predict(model, x, b=0.2, vectorize=v) for v in (False, True))
    assert torch.equal(one.probabilities, together.probabilities)


def test_a_model_that_reads_its_weights_elsewhere_is_not_vectorized():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.alias = [self.linear.weight]

        def forward(self, x):
            return x @ self.alias[0].T

    model, x = Elsewhere(), torch.randn(4, 3)
    one, together = (predict(model, x, b=0.2, vectorize=v) for v in (False, True))
    assert torch.equal(one.probabilities, together.probabilities)
    assert one.mutual_information.min() > 0


# --- untouched ---


def snapshot(model):
    generator = torch.get_rng_state()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    return state, [m.training for m in model.modules()], generator


def unchanged(model, before):
    state, modes, generator = snapshot(model)
    same = all(torch.equal(state[k], v) for k, v in before[0].items())
    return same and modes == before[1] and torch.equal(generator, before[2])


@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"vectorize": True}])
def test_model_and_generators_are_as_before(options):
    model, (x, _) = classifier().train(), classes()
    model[4].eval()
    before = snapshot(model)
    predict(model, x, b=0.3, **options)
    assert unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 7])
def test_model_is_as_before_after_an_error(error, call):
    model, (x, _) = classifier().train(), classes()
    before, calls = snapshot(model), []

    def feed(model, batch):
        calls.append(1)
        if len(calls) == call:
            raise error
        return model(batch[0]), None

    with pytest.raises(error):
        predict(model, x, b=0.3, feed=feed, vectorize=False)
    assert unchanged(model, before)


def test_weights_survive_ctrl_c_at_any_time(monkeypatch):
    """Real signals while noise is added or removed, in a forward pass, and on the way out."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(4, 8)
    before = [p.detach().clone() for p in model.parameters()]
    calls, strike = [], [0]

    def interrupted(function):
        def call(*args, **kwargs):
            calls.append(1)
            result = function(*args, **kwargs)
            if len(calls) == strike[0]:
                signal.raise_signal(signal.SIGINT)
            return result

        return call

    for place, names in (
        (noisy_classifier, ("add_noise", "reshard", "local", "summarize")),
        (perturbed, ("reshard", "local", "relative_size")),
        (_eval_mode, ("_restorer", "_overrides_train")),
    ):
        for name in names:
            monkeypatch.setattr(place, name, interrupted(getattr(place, name)))
    model.register_forward_hook(interrupted(lambda *_: None))
    predict(model, x, b=0.3, draws=4, vectorize=False)
    total = len(calls)
    assert total > 40
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for k in range(1, total + 1):
            calls.clear()
            strike[0] = k
            with pytest.raises(KeyboardInterrupt):
                predict(model, x, b=0.3, draws=4, vectorize=False)
            assert all(map(torch.equal, model.parameters(), before)), k
    finally:
        signal.signal(signal.SIGINT, old)


def test_a_pending_backward_is_still_right():
    model, (x, y) = classifier(), classes()
    loss = cross_entropy(model.eval()(x), y)
    plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    predict(model, x, b=0.5)
    assert all(map(torch.equal, plain, torch.autograd.grad(loss, list(model.parameters()))))


# --- the noise of the training ---


def test_noise_is_the_optimizers():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)), torch.randn(6, 3)
    model[2].weight.requires_grad_(False)
    groups = [
        {"params": model[0].parameters(), "b": 0.2, "noise": "uniform"},
        {"params": model[1].parameters()},
        {"params": [model[2].weight]},
        {"params": [model[2].bias], "b": 0.0},
    ]
    optimizer = NVRM(torch.optim.SGD(groups, lr=0.1), model=model, b=0.1)
    found = predict(model, x)
    assert found.noise == {
        "0.weight": (0.2, "uniform", None),
        "0.bias": (0.2, "uniform", None),
        "1.weight": (0.1, "gaussian", None),
        "1.bias": (0.1, "gaussian", None),
    }
    again = predict(model, x, optimizer=optimizer)
    assert torch.equal(found.probabilities, again.probabilities)
    assert predict(model, x, noise="laplace").noise["0.bias"] == (0.2, "laplace", None)
    with pytest.raises(ValueError, match="groups with different noise"):
        predict(model, x, optimizer=optimizer.state_dict())


def test_families_by_group_in_every_way_to_predict():
    """Batched over draws, one by one, and in the module."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3)
    groups = [
        {"params": model[0].parameters(), "b": 0.2, "noise": "uniform"},
        {"params": model[1].parameters(), "b": 0.4, "noise": "laplace", "relative_to": "filter"},
    ]
    optimizer = NVRM(torch.optim.SGD(groups, lr=0.1), model=model, b=0.1)
    passes = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    slow = predict(model, x, draws=8, vectorize=False).probabilities
    assert len(passes) == 8
    fast = predict(model, x, draws=8, vectorize=True).probabilities
    assert len(passes) == 8 + 2 + 1  # the first two draws one by one, to compare
    hook.remove()
    assert torch.allclose(slow, fast, atol=1e-6)
    with torch.no_grad():
        outputs = AveragedPredictor(model, optimizer=optimizer, draws=8)(x)
    assert torch.allclose(outputs.exp().double(), slow, atol=1e-6)
    for family in ("uniform", "laplace"):
        other = predict(model, x, draws=8, noise=family).probabilities
        assert not torch.allclose(other, slow, atol=1e-3)


@pytest.mark.parametrize("different", [{"b": 0.2}, {"noise": "laplace"}, {"relative_to": "tensor"}])
def test_checkpoint_with_different_groups_is_refused(different):
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], **different}]
    state = NVRM(torch.optim.SGD(groups, lr=0.1), model=model, b=0.1).state_dict()
    with pytest.raises(ValueError, match="groups with different noise"):
        predict(model, torch.ones(1, 3), optimizer=state)


def test_noise_from_a_checkpoint():
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    state = NVRMSGD(copy.deepcopy(model), lr=0.1, b=0.25, noise="laplace").state_dict()
    found = predict(model, x, optimizer=state)
    assert found.noise == {"weight": (0.25, "laplace", None), "bias": (0.25, "laplace", None)}
    with pytest.raises(ValueError, match="neuvar optimizer or the state dict of one"):
        predict(model, x, optimizer=torch.optim.SGD(model.parameters()).state_dict())
    big = NVRMSGD(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), lr=0.1, b=0.1).state_dict()
    with pytest.raises(ValueError, match="has 4 parameters and the model 2"):
        predict(model, x, optimizer=big)


def test_noise_from_the_file_of_a_training(tmp_path):
    model, (x, y) = nn.Linear(5, 3), classes()
    optimizer = NVRMSGD(model, lr=0.1, b=0.2, noise="uniform", relative_to="filter")
    neuvar.train.fit(model, [(x, y)], optimizer, epochs=2, checkpoint=tmp_path / "training.pt")
    expected = predict(model, x)
    saved = torch.load(tmp_path / "training.pt", weights_only=True)["fit"]
    again = nn.Linear(5, 3)
    again.load_state_dict(saved["model"])
    found = predict(again, x, optimizer=saved["optimizer"])
    assert found.noise == expected.noise
    assert torch.equal(found.probabilities, expected.probabilities)


def test_checkpoint_of_some_parameters_only():
    """It does not say which, so no noise would be right."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3)
    state = NVRMSGD(model[1].parameters(), lr=0.1, b=0.2).state_dict()
    with pytest.raises(ValueError, match=r"has 2 parameters and the model 4.* load it into"):
        predict(model, x, optimizer=state)
    model[0].requires_grad_(False)  # now all others are trained
    assert list(predict(model, x, optimizer=state).noise) == ["1.weight", "1.bias"]


def test_checkpoint_with_names():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3)
    named = dict(model.named_parameters())
    groups = [
        {"params": [("1.bias", named["1.bias"])], "b": 0.2},
        {"params": [("0.weight", named["0.weight"])], "b": 0.1, "noise": "laplace"},
    ]
    state = NVRMSGD(groups, lr=0.1, b=0.0).state_dict()
    expected = {"0.weight": (0.1, "laplace", None), "1.bias": (0.2, "gaussian", None)}
    assert predict(model, x, optimizer=state).noise == expected
    with pytest.raises(ValueError, match=r"a parameter '1\.bias', which the model lacks"):
        predict(nn.Linear(3, 2), x, optimizer=state)


def test_checkpoint_of_training_for_rounding():
    model, (x, _) = classifier(), classes()
    optimizer = NVRMSGD(rounding_parameters(model, bits=3), model=model, lr=0.1, b=0)
    state = optimizer.state_dict()
    found = predict(model, x, optimizer=state)
    assert found.noise == predict(model, x, optimizer=optimizer).noise
    assert list(found.noise) == ["0.weight", "4.weight"]
    with pytest.raises(ValueError, match="rounding_parameters for another model"):
        predict(nn.Linear(5, 3), x, optimizer=state)


def test_noise_that_nobody_knows():
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"no NVRM optimizer .* give b"):
        predict(model, x)
    optimizer = NVRMSGD(model, lr=0.1, b=0.0)
    with pytest.raises(ValueError, match="has no noise now"):
        predict(model, x)
    with pytest.raises(ValueError, match="either b or optimizer"):
        predict(model, x, b=0.1, optimizer=optimizer)


@pytest.mark.parametrize("known", [True, False])
def test_it_predicts_around_the_clean_weights(known):
    """Whether the optimizer perturbs forward passes, or the weights at rest."""
    model, (x, y) = classifier(), classes()
    given = {"params": model} if known else {"params": model.parameters()}
    optimizer = NVRMSGD(**given, lr=0.1, b=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    noisy = [p.detach().clone() for p in model.parameters()]
    found = predict(model, x)
    assert all(map(torch.equal, model.parameters(), noisy))
    with optimizer.denoised():
        clean = copy.deepcopy(model)
    assert torch.equal(found.probabilities, predict(clean, x, b=0.1).probabilities)


def test_only_some_parameters():
    model, x = nn.Linear(3, 2), torch.zeros(2, 3)
    found = predict(model, x, b=0.3, parameters=["weight"])
    assert not found.mutual_information.any()  # the input is 0, so the weights do not matter
    assert predict(model, x, b=0.3, parameters=[model.bias]).mutual_information.all()


@pytest.mark.parametrize("relative_to", ["tensor", "filter"])
def test_relative_noise(relative_to):
    model, x = nn.Linear(3, 2, bias=False), torch.randn(5, 3)
    found = predict(model, x, b=0.3, relative_to=relative_to, draws=2, antithetic=False)
    size = model.weight.detach().square()
    size = size.mean(1, keepdim=True).sqrt() if relative_to == "filter" else size.mean().sqrt()
    outputs = []
    for number in (1, 2):
        draw = Draw(number=number, seed=0, sampler="table", rank=-3)
        z = standard_noise(whole_slot((2, 3)), draw)
        outputs.append(x @ (model.weight.detach() + 0.3 * size * z).T)
    expected = torch.stack(outputs).double().softmax(2).mean(0)
    assert torch.allclose(found.probabilities, expected, atol=1e-6)


@pytest.mark.parametrize("relative_to", ["tensor", "filter", "weight"])
def test_relative_noise_of_the_optimizer(relative_to):
    model, (x, _) = classifier().eval(), classes()
    optimizer = NVRMSGD(model, lr=0.1, b=0.3, relative_to=relative_to)
    found = predict(model, x)
    assert found.noise["0.weight"] == (0.3, "gaussian", relative_to)
    assert torch.equal(found.probabilities, predict(model, x, optimizer=optimizer).probabilities)
    del optimizer
    given = {"b": 0.3, "relative_to": relative_to}
    assert torch.equal(found.probabilities, predict(model, x, **given).probabilities)
    with torch.no_grad():
        outputs = AveragedPredictor(model, **given)(x)
    assert torch.allclose(outputs.exp().double(), found.probabilities, atol=1e-6)
    one = predict(model, x, **given, vectorize=False).probabilities
    assert torch.allclose(one, found.probabilities, atol=1e-6)


def test_relative_to_needs_b():
    model = nn.Linear(5, 3)
    optimizer = NVRMSGD(model, lr=0.1, b=0.3)
    with pytest.raises(ValueError, match="relative_to needs b"):
        predict(model, classes()[0], relative_to="tensor")
    del optimizer


# --- batch normalization and dropout ---


def test_batchnorm_statistics_are_kept_or_reestimated():
    model, (x, _) = classifier(), classes(200)
    kept = predict(model, x, b=0.5, draws=4)
    again = predict(model, x, b=0.5, draws=4, batchnorm=[x])
    assert not torch.allclose(kept.probabilities, again.probabilities, atol=1e-3)
    outputs = []
    for number in (1, 2):
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            start = 0
            for index, p in enumerate(moved.parameters()):
                slot = whole_slot(tuple(p.shape), number=index, start=start)
                draw = Draw(number=number, seed=0, sampler="table", rank=-3)
                p.data += sign * 0.5 * standard_noise(slot, draw)
                start += p.numel()
            neuvar.reestimate_batchnorm(moved, [x])
            outputs.append(moved.eval()(x).detach().double().softmax(1))
    assert torch.allclose(again.probabilities, torch.stack(outputs).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("batchnorm", "message"),
    [
        ("reestimate", "batchnorm must be 'keep', or a list or DataLoader of batches, got str"),
        (classes()[0], "batchnorm must be 'keep', or a list or DataLoader of batches, got Tensor"),
        (None, "batchnorm must be 'keep', or a list or DataLoader of batches, got NoneType"),
        (classes(), "got a tuple of tensors, which reads as inputs and labels"),
        (list(classes()), "got a list of tensors, which reads as inputs and labels"),
        ([], "got an empty list"),
        (iter([]), "batchnorm is a list_iterator, which can be iterated only once"),
    ],
)
def test_batchnorm_needs_batches(batchnorm, message):
    with pytest.raises(ValueError, match=message):
        predict(classifier(), classes()[0], b=0.1, batchnorm=batchnorm)


def test_batchnorm_takes_batches_of_any_form():
    model, (x, y) = classifier(), classes()
    options = {"b": 0.1, "draws": 4}
    expected = predict(model, x, batchnorm=[x[:30], x[30:]], **options).probabilities
    for batches in (
        [(x[:30], y[:30]), (x[30:], y[30:])],
        DataLoader(TensorDataset(x, y), batch_size=30),
    ):
        found = predict(model, x, batchnorm=batches, **options).probabilities
        assert torch.allclose(found, expected, atol=1e-6)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, a, b):
        return self.linear(self.norm(a) + b)


def test_batchnorm_batches_have_the_form_of_the_data():
    model, (x, y) = TwoInputs(), classes()
    expected = predict(model, [(x, x, y)], b=0.1, batchnorm=[(x, x, y)])
    assert not torch.equal(expected.probabilities, predict(model, [(x, x, y)], b=0.1).probabilities)
    named = {"a": x, "b": x, "labels": y}

    def feed(model, batch):
        return model(batch["own"], batch["own"]), batch["targets"]

    own = {"own": x, "targets": y}
    for batch, options in ((named, {}), (own, {"feed": feed})):
        found = predict(model, [batch], b=0.1, batchnorm=[batch], **options)
        assert torch.equal(found.probabilities, expected.probabilities)
        assert torch.equal(found.targets, y)


def test_a_model_that_changes_its_inputs_is_refused():
    class Doubles(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    x = classes()[0]
    for data in (x.clone(), [(x.clone(),)], [{"x": x.clone()}]):
        with pytest.raises(ValueError, match="changes its inputs in place"):
            predict(Doubles(5, 3), data, b=0.1)


def test_a_feed_must_return_a_pair():
    for rows in (2, 60):  # two rows would unpack
        with pytest.raises(ValueError, match=r"feed must return a pair .*, got Tensor"):
            predict(nn.Linear(5, 3), [torch.ones(rows, 5)], b=0.1, feed=lambda m, x: m(x))


def test_monte_carlo_dropout():
    model, (x, _) = classifier(), classes()
    one, same, other = (
        predict(model, x, b=0, dropout=True, draws=50, antithetic=False, seed=seed)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.probabilities, same.probabilities)
    assert not torch.equal(one.probabilities, other.probabilities)
    assert one.mutual_information.max() > 0.01
    pooled = (one.stderr["probabilities"] ** 2 + other.stderr["probabilities"] ** 2).sqrt()
    assert ((one.probabilities - other.probabilities).abs() < 5 * pooled + 1e-9).all()
    torch.manual_seed(123)  # the result does not depend on the global generator
    assert torch.equal(
        one.probabilities,
        predict(model, x, b=0, dropout=True, draws=50, antithetic=False).probabilities,
    )
    with pytest.raises(ValueError, match="dropout modules"):
        predict(nn.Linear(5, 3), x, b=0.1, dropout=True)


class Last(nn.Module):
    """Classes from the last step of a sequence model."""

    def __init__(self, sequence):
        super().__init__()
        self.sequence, self.head = sequence, nn.Linear(4, 3)

    def forward(self, x):
        attention = isinstance(self.sequence, nn.MultiheadAttention)
        outputs = self.sequence(x, x, x) if attention else self.sequence(x)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.head(outputs[:, -1])


def sequence_model(kind, dropout):
    torch.manual_seed(0)
    if kind in (nn.LSTM, nn.GRU, nn.RNN):
        return Last(kind(4, 4, 2, batch_first=True, dropout=dropout))
    if kind is nn.MultiheadAttention:
        return Last(kind(4, 2, batch_first=True, dropout=dropout))
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    return Last(layer if kind is nn.TransformerEncoderLayer else kind(layer, 2))


SEQUENCE_KINDS = [
    nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention, nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
]  # fmt: skip


@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
def test_monte_carlo_dropout_in_torchs_own_modules(kind):
    """As a pass in training mode, in which nothing but dropout is random."""
    model, x = sequence_model(kind, 0.5), torch.randn(3, 6, 4)
    options = {"b": 0, "antithetic": False}
    assert not predict(model, x, **options).mutual_information.any()
    before = snapshot(model)
    found = predict(model, x, dropout=True, draws=400, **options)
    assert unchanged(model, before)
    assert (found.mutual_information > 1e-5).all()
    with torch.no_grad():
        passes = torch.stack([model.train()(x).double().softmax(1) for _ in range(400)])
    error = (passes.var(0) / 400 + found.stderr["probabilities"] ** 2).sqrt()
    assert ((found.probabilities - passes.mean(0)).abs() < 5 * error).all()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_modules_that_could_have_dropout_but_have_none(kind):
    model = sequence_model(kind, 0.0)
    with pytest.raises(ValueError, match="dropout modules"):
        predict(model, torch.randn(3, 6, 4), b=0, dropout=True)


# --- data ---


class Named(nn.Linear):
    def forward(self, features):
        return super().forward(features)


def test_forms_of_data():
    model, (x, y) = Named(5, 3), classes()
    expected = predict(model, x, b=0.2)
    assert expected.targets is None
    labelled = {
        "pair": (x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=60),
        "list": [(x[:30], y[:30]), (x[30:], y[30:])],
        "dicts": [{"features": x, "labels": y}],
    }
    for name, data in labelled.items():
        found = predict(model, data, b=0.2)
        assert torch.allclose(found.probabilities, expected.probabilities, atol=1e-6), name
        assert torch.equal(found.targets, y), name
    for data in (
        DataLoader(x, batch_size=60),
        [(x,)],
        [{"features": x}],
        [x[:30], x[30:40], x[40:]],
    ):
        found = predict(model, data, b=0.2)
        assert torch.allclose(found.probabilities, expected.probabilities, atol=1e-6)
        assert found.targets is None


def test_data_that_are_shuffled_are_read_once():
    model, (x, y) = nn.Linear(5, 3), classes()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    found = predict(model, loader, b=0.2, vectorize=False)
    assert torch.equal(torch.get_rng_state(), state)
    order = torch.cat([labels for _, labels in loader])
    assert torch.equal(found.targets, order)


def test_maps_of_classes():
    model, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 5, 6)
    found = predict(model, (x, torch.zeros(2, 5, 6, dtype=torch.int64)), b=0.1)
    assert found.probabilities.shape == (2, 4, 5, 6)
    assert found.entropy.shape == found.mutual_information.shape == (2, 5, 6)
    assert torch.allclose(found.probabilities.sum(1), torch.ones(2, 5, 6).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precision(dtype):
    model, (x, _) = nn.Linear(5, 3), classes()
    expected = predict(model, x, b=0.2)
    found = predict(model.to(dtype), x.to(dtype), b=0.2)
    assert found.probabilities.dtype == torch.float64
    assert torch.allclose(found.probabilities, expected.probabilities, atol=0.01)


def test_progress():
    model, (x, y) = nn.Linear(5, 3), classes()
    shares = []
    predict(model, (x, y), b=0.2, batch_size=16, draws=8, vectorize=False, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len(shares) >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b": -1}, "b must be a finite number"),
        ({"draws": 3}, "draws must be even"),
        ({"draws": 0}, "draws must be an integer >= 2"),
        ({"draws": 0, "antithetic": False}, "draws must be an integer >= 1"),
        ({"noise": "cauchy"}, "noise must be one of"),
        ({"sampler": "dice"}, "sampler must be one of"),
        ({"relative_to": "model"}, "relative_to must be one of"),
        ({"seed": -1}, "seed must be an integer"),
        ({"batch_size": 0}, "batch_size must be an integer"),
        ({"confidence": 1}, "confidence must be"),
        ({"parameters": ["bais"]}, "parameters must be parameters of the model"),
        ({"logits": False}, "logits=False needs a model that returns probabilities"),
        ({"vectorize": 1}, "vectorize must be True or False"),
        ({"dropout": "on"}, "dropout must be True or False"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        predict(nn.Linear(5, 3), classes()[0], **{"b": 0.1, **options})


def test_bad_models_and_data():
    x = classes()[0]
    with pytest.raises(ValueError, match="model must be a torch module"):
        predict(abs, x, b=0.1)
    with pytest.raises(
        ValueError, match=r"shape \(n, classes, ...\), got torch.float32 of shape \(60, 1\)"
    ):
        predict(nn.Linear(5, 1), x, b=0.1)
    for empty in ([], x[:0], (x[:0], torch.zeros(0)), [x[:0]], [(x[:0],), (x[:0],)]):
        with pytest.raises(ValueError, match="data is empty"):
            predict(nn.Linear(5, 3), empty, b=0.1)
    for option in (True, False):  # among others, an empty batch does no harm
        found = predict(nn.Linear(5, 3), [x[:0], x, x[:0]], b=0.1, vectorize=option)
        assert len(found.probabilities) == len(x)
    with pytest.raises(ValueError, match="list of two batches, which reads as inputs and their"):
        predict(nn.Linear(5, 3), [x[:25], x[25:50]], b=0.1)
    assert len(predict(nn.Linear(5, 3), [(x[:25],), (x[25:50],)], b=0.1).probabilities) == 50
    with pytest.raises(ValueError, match="not finite"):
        predict(nn.Linear(5, 3), x * math.inf, b=0.1)
    with pytest.raises(ValueError, match="single examples"):
        predict(nn.Linear(5, 3), TensorDataset(x), b=0.1)
    with pytest.raises(ValueError, match="got dict; put one batch into a list"):
        predict(nn.Linear(5, 3), {"x": x}, b=0.1)
    labels = [0] * len(x)
    for targets in (labels, np.array(labels)):
        with pytest.raises(ValueError, match=r"pair of tensors, got Tensor and .*as_tensor"):
            predict(nn.Linear(5, 3), (x, targets), b=0.1)


def test_two_batches_for_a_feed_may_be_anything():
    def feed(model, batch):
        return model(torch.as_tensor(batch, dtype=torch.float32)), None

    rows = [[0.0, 1.0], [2.0, 3.0]]
    for data in ([rows, rows], [np.array(rows), np.array(rows)], (torch.tensor(rows), rows)):
        found = predict(nn.Linear(2, 3), data, b=0.1, feed=feed)
        assert found.probabilities.shape == (4, 3)


def test_values_that_are_not_finite_are_found():
    model, x = nn.Linear(5, 3), classes()[0].clone()
    x[41, 2] = math.nan
    for size in (7, 60):
        with pytest.raises(ValueError, match="not finite under the noise, first for example 41 "):
            predict(model, x, b=0.1, batch_size=size)
    with pytest.raises(ValueError, match=r"not finite, first for example 41 .*; check the data$"):
        predict(model, x, b=0)


@pytest.mark.parametrize("flatten", [False, True])
def test_one_logit_of_two_classes(flatten):
    model, (x, y) = nn.Linear(5, 1), classes()
    if flatten:
        model = nn.Sequential(model, nn.Flatten(0))
    with pytest.raises(ValueError, match=r"one logit z of two classes, .*feed"):
        predict(model, x, b=0.1)

    def feed(model, batch):
        z = model(batch[0]).flatten()
        return torch.stack([0 * z, z], 1), batch[1]

    found = predict(model, (x, y), b=0, feed=feed)
    plain = torch.sigmoid(model(x).detach().double().flatten())
    assert torch.allclose(found.probabilities[:, 1], plain)


def test_probabilities_that_are_read_as_logits():
    model, (x, _) = nn.Sequential(nn.Linear(5, 3), nn.Softmax(1)), classes()
    with pytest.warns(UserWarning, match=r"seems to return probabilities.*logits=False"):
        predict(model, x, b=0.1)
    predict(model, x, b=0.1, logits=False)


class Masked(nn.Linear):
    """Its last class is impossible."""

    def forward(self, x):
        ruled_out = torch.arange(self.out_features) == self.out_features - 1
        return super().forward(x).masked_fill(ruled_out, -math.inf)


def test_classes_that_are_masked(monkeypatch):
    model, (x, _) = Masked(5, 3), classes()
    whole = predict(model, x, b=0.1, vectorize=False)
    assert not whole.probabilities[:, 2].any()
    together, original = [], noisy_classifier.NoisyClassifier._at_once
    monkeypatch.setattr(
        noisy_classifier.NoisyClassifier,
        "_at_once",
        lambda self, block, numbers: together.append(numbers) or original(self, block, numbers),
    )
    draws = 2 * noisy_classifier.DRAWS_AT_ONCE
    for vectorize in (True, False):
        one = predict(model, x, b=0.1, draws=draws, vectorize=vectorize)
        assert one.probabilities.isfinite().all()
    assert len(together) == 2  # the first call was not given up
    monkeypatch.setattr(blocks, "BLOCK", 20 * 16 * 3)
    sizes = Sizes(monkeypatch, model)
    parts = predict(model, x, b=0.1, vectorize=False)
    assert [shape[1] for shape in sizes.held] == [20, 20, 20]
    assert torch.allclose(parts.probabilities, whole.probabilities, atol=1e-6)


@pytest.mark.parametrize("logits", [True, False])
def test_gradients_of_the_module_where_a_class_is_impossible(logits):
    model, (x, y) = Masked(5, 3), classes()
    y = y.clamp(max=1)
    net = model if logits else nn.Sequential(model, nn.Softmax(1))
    outputs = AveragedPredictor(net, b=0.1, draws=4, logits=logits).eval()(x)
    assert outputs[:, 2].isneginf().all()
    assert torch.allclose(outputs[:, :2].exp().sum(1), torch.ones(60))
    cross_entropy(outputs, y).backward()
    gradient, model.weight.grad = model.weight.grad, None
    assert gradient.isfinite().all()
    kept = AveragedPredictor(Masked(5, 3), b=0, draws=2)
    kept.model.load_state_dict(model.state_dict())
    plain = cross_entropy(model(x), y)
    plain.backward()
    assert torch.allclose(cross_entropy(kept(x), y), plain)
    assert (gradient - model.weight.grad).abs().max() < 0.1 * model.weight.grad.abs().max()


def test_large_results_are_not_held_twice():
    """The bias of a mean is 0, which takes no memory; parts are released when they are joined."""
    found = predict(nn.Linear(5, 3), classes()[0], b=0.1, batch_size=7)
    for name in ("probabilities", "expected_entropy"):
        bias = found.bias[name]
        assert bias.shape == getattr(found, name).shape
        assert not bias.any()
        assert bias.untyped_storage().nbytes() == 8
    parts = [{name: torch.ones(2, 3) for name in PARTS} for _ in range(4)]
    assert joined(parts)["entropy"].shape == (8, 3)
    assert not any(parts)


# --- the module ---


def test_module_predicts_the_same():
    model, (x, y) = classifier().eval(), classes()
    optimizer = NVRMSGD(model, lr=0.1, b=0.2)
    predictor = AveragedPredictor(model, seed=3).eval()
    before = snapshot(model)
    outputs = predictor(x)
    expected = predict(model, x, seed=3)
    assert torch.allclose(outputs.exp().double(), expected.probabilities, atol=1e-6)
    assert unchanged(model, before)
    cross_entropy(outputs, y).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert optimizer.param_groups[0]["b"] == 0.2
    assert "draws=32" in repr(predictor)


def test_module_takes_probabilities_and_other_arguments():
    model = Link(W, torch.sigmoid)
    predictor = AveragedPredictor(model, b=0.3, draws=6, logits=False, antithetic=False)
    expected = predict(model, torch.tensor(X), b=0.3, draws=6, logits=False, antithetic=False)
    assert torch.allclose(predictor(x=torch.tensor(X)).exp(), expected.probabilities)
    with pytest.raises(ValueError, match="model must be a torch module"):
        AveragedPredictor(abs, b=0.1)


def trained_from_parameters(steps=3):
    """A model whose weights carry the noise of its optimizer."""
    model, (x, y) = classifier().eval(), classes()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer, x


@pytest.mark.parametrize("parameters", [None, ["0.weight"]])
def test_module_starts_from_the_clean_weights(parameters):
    model, optimizer, x = trained_from_parameters()
    optimizer.zero_grad()
    predictor = AveragedPredictor(model, draws=4, parameters=parameters).eval()
    noisy = [p.detach().clone() for p in model.parameters()]
    outputs = predictor(x)
    expected = predict(model, x, draws=4, parameters=parameters).probabilities
    assert torch.allclose(outputs.exp().double(), expected, atol=1e-6)
    outputs.square().sum().backward()
    assert all(map(torch.equal, model.parameters(), noisy))
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.eval()
    optimizer.zero_grad()
    again = predictor(x)
    again.square().sum().backward()
    assert torch.equal(again, outputs)
    for own, p in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(own, p.grad)


def test_module_is_not_exported_with_noise_on_its_weights():
    model, optimizer, x = trained_from_parameters()
    predictor = AveragedPredictor(model, draws=2).eval()
    with pytest.raises(ValueError, match=r"torch\.export would store it"):
        torch.export.export(predictor, (x,))
    optimizer.eval()
    exported = torch.export.export(predictor, (x,)).module()
    expected = predict(model, x, draws=2).probabilities
    assert torch.allclose(exported(x).exp().double(), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_module_averages_in_single_precision(dtype):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 100).to(dtype), classes()[0].to(dtype)
    outputs = AveragedPredictor(model, b=0.1).eval()(x)
    assert outputs.dtype == torch.float32
    assert torch.allclose(outputs.exp().sum(1), torch.ones(60), atol=1e-5)
    expected = predict(model, x, b=0.1).probabilities
    assert torch.allclose(outputs.exp().double(), expected, atol=1e-3)


def test_module_refuses_other_outputs_as_predict_does():
    class Wrapped(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    model, x = Wrapped(5, 3), classes()[0]
    for call in (lambda: predict(model, x, b=0.1), lambda: AveragedPredictor(model, b=0.1)(x)):
        with pytest.raises(ValueError, match=r"numbers of shape \(n, classes, ...\), got dict"):
            call()


def test_module_is_saved_copied_and_moved():
    model, (x, _) = classifier().eval(), classes()
    predictor = AveragedPredictor(model, b=0.2, draws=4).eval()
    fresh = AveragedPredictor(classifier(seed=1), b=0.2, draws=4).eval()
    fresh.load_state_dict(predictor.state_dict())
    for other in (fresh, copy.deepcopy(predictor)):
        assert torch.equal(other(x), predictor(x))
    wide = copy.deepcopy(predictor).double()(x.double())
    assert torch.allclose(wide.float(), predictor(x), atol=1e-5)


def test_module_is_evaluated_like_any_other():
    model, (x, y) = classifier().eval(), classes()
    predictor = AveragedPredictor(model, b=0.2, draws=4)
    found = neuvar.train.evaluate(predictor, [(x[:40], y[:40]), (x[40:], y[40:])])
    expected = predict(model, (x, y), b=0.2, draws=4)
    loss = log_loss(expected.probabilities, y, logits=False)
    assert found.loss == pytest.approx(loss.mean, abs=1e-6)
    assert torch.equal(found.predictions, expected.classes)


def test_tied_weights_get_the_same_noise():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(4, 3)
    with torch.no_grad():
        outputs = AveragedPredictor(model, b=0.3)(x)
    expected = predict(model, x, b=0.3).probabilities
    assert torch.allclose(outputs.exp().double(), expected, atol=1e-6)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("pickled", [True, False])
def test_module_goes_through_export_and_back(with_optimizer, pickled):
    model, (x, _) = classifier().eval(), classes()
    optimizer = NVRMSGD(model, lr=0.1, b=0.2) if with_optimizer else None
    table.cache_clear()  # as in a new process: the table must not be made inside of the export
    predictor = AveragedPredictor(model, b=0.2, draws=4).eval()
    if pickled:
        predictor = pickle.loads(pickle.dumps(predictor))
        table.cache_clear()
        predictor = pickle.loads(pickle.dumps(predictor))
    size = {0: torch.export.Dim("n", min=2)}
    exported = torch.export.export(predictor, (x,), dynamic_shapes=((size,),))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    back = torch.export.load(file).module()
    with torch.no_grad():
        assert torch.equal(back(x), predictor(x))
        expected = predict(model, x, b=0.2, draws=4).probabilities
        assert torch.allclose(back(x).exp().double(), expected, atol=1e-6)
        assert torch.allclose(back(x[:9]), predictor(x[:9]), atol=1e-6)
    del optimizer


def test_two_optimizers_of_two_halves_give_all_their_noise():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    first = NVRMSGD(model[0].parameters(), lr=0.1, b=0.1)
    second = NVRMSGD(model[2].parameters(), lr=0.1, b=0.2)
    noise = predict(model, torch.ones(2, 4)).noise
    assert {name: spec.b for name, spec in noise.items()} == {
        "0.weight": 0.1, "0.bias": 0.1, "2.weight": 0.2, "2.bias": 0.2
    }  # fmt: skip
    assert list(predict(model, torch.ones(2, 4), optimizer=first).noise) == ["0.weight", "0.bias"]
    second.param_groups[0]["b"] = 0.0
    assert list(predict(model, torch.ones(2, 4)).noise) == ["0.weight", "0.bias"]


def test_a_model_may_be_frozen_after_training():
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    before = predict(model, x)
    model.requires_grad_(False)
    state = optimizer.state_dict()
    for after in (predict(model, x), predict(model, x, optimizer=state)):
        assert torch.equal(after.probabilities, before.probabilities)


def test_the_optimizer_of_another_model():
    other = NVRMSGD(nn.Linear(4, 3), lr=0.1, b=0.1)
    with pytest.raises(ValueError, match="the optimizer has none of the parameters to perturb"):
        predict(nn.Linear(4, 3), torch.ones(2, 4), optimizer=other)


class AlwaysDrops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(nn.functional.dropout(x, 0.5, training=True))


def test_the_same_seed_gives_the_same_bits_with_random_models_and_loaders():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    norm = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(x), batch_size=16, shuffle=True)
    for model, options in ((AlwaysDrops(), {}), (norm, {"batchnorm": loader})):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(predict(model, x, b=0.1, draws=4, seed=3, **options).probabilities)
            assert torch.initial_seed() == seed
        assert torch.equal(*found)


def test_data_are_read_once_so_a_generator_is_enough():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    whole = predict(model, x, b=0.1)
    parts = predict(model, ((part,) for part in x.split(2)), b=0.1)
    assert torch.allclose(whole.probabilities, parts.probabilities)


def test_outputs_of_different_lengths_are_refused():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)

        def forward(self, x):
            return self.embedding(x).transpose(1, 2)

    data = [(torch.zeros(2, n).long(),) for n in (4, 6)]
    with pytest.raises(ValueError, match=r"the same shape, got \(n, 3, 4\) and \(n, 3, 6\)"):
        predict(Tokens(), data, b=0.1)


def test_rows_that_depend_on_each_other_in_half_precision(monkeypatch):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 16), norm, nn.ReLU(), nn.Linear(16, 3)).bfloat16()
    x = torch.randn(900, 4).sort(0).values.bfloat16()
    options = {"b": 0.05, "draws": 20, "vectorize": False}
    whole = predict(model, [(x,)], **options)
    monkeypatch.setattr("neuvar.prediction.blocks.BLOCK", 1000)
    parts = predict(model, [(x,)], **options)
    assert torch.equal(parts.probabilities, whole.probabilities)


def test_an_averaged_predictor_checks_probabilities():
    predictor = AveragedPredictor(nn.Linear(4, 3), b=0.1, logits=False)
    with pytest.raises(ValueError, match="logits=False needs a model that returns"):
        predictor(torch.ones(2, 4))


def test_a_prediction_is_printed_in_one_line():
    found = predict(nn.Linear(4, 3), torch.zeros(6, 4), b=0.1, draws=8)
    text = f"6 examples, 8 draws; on average: entropy {float(found.entropy.mean()):.3g}, "
    assert str(found).startswith(text + "expected entropy ")
