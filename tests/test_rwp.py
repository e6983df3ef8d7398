"""RWP, m-RWP and ARWP against their formulas, and as optimizers among others."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuvar
from neuvar.baselines import ARWP, RWP
from neuvar.noise import Draw, standard_noise
from neuvar.optim.layout import slots
from neuvar.optim.noisy_parameters import as_trained
from neuvar.optim.rwp import filter_squares
from neuvar.schedule import BSchedule, Linear

GAMMA, ETA, BETA = 0.3, 2.0, 0.7
INNERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
METHODS = {
    "rwp": lambda inner, model: RWP(inner, model=model, gamma=GAMMA, seed=3),
    "m-rwp": lambda inner, model: RWP(inner, model=model, gamma=GAMMA, mix=0.3, seed=3),
    "arwp": lambda inner, model: ARWP(inner, model=model, gamma=GAMMA, eta=ETA, beta=BETA, seed=3),
    "m-arwp": lambda inner, model: ARWP(
        inner, model=model, gamma=GAMMA, eta=ETA, beta=BETA, mix=0.3, seed=3
    ),
}


def network(dtype=torch.float64, seed=0):
    """A convolution, batch normalization and a layer with a bias."""
    layers = nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)
    model = nn.Sequential(*layers).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def backward(model, number, factor=1.0):
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    x, y = x.to(model[0].weight.dtype), y.to(model[0].weight.dtype)
    (factor * (model(x) - y).square().mean()).backward()


def train(model, optimizer, steps):
    """Mixed gradients have another batch for the clean one, as in the paper."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        if optimizer.param_groups[0]["mix"] < 1:
            with optimizer.clean_gradient():
                backward(model, 500 + step)
        optimizer.step()


def same(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def filters(p):
    """The filters of a tensor; a vector is one."""
    return list(p) if p.ndim > 1 else [p]


def naive_epsilon(params, number, v):
    """The definition of the noise, one filter after another."""
    draw, result = Draw(number=number, seed=3), []
    for k, (p, slot) in enumerate(slots(params).items()):
        z, w = standard_noise(slot, draw).double(), p.detach()
        eps = [
            GAMMA * f.square().sum().sqrt() * e for f, e in zip(filters(w), filters(z), strict=True)
        ]
        eps = torch.stack(eps).view(p.shape)
        if v is not None:
            for index in range(len(p)):
                eps[index] = eps[index] / math.sqrt(1 + ETA * float(v[k][index]))
        result.append(eps)
    return result


def by_formula(model, inner, steps, *, mix=1.0, adaptive=False):
    """λ ∇L(θ + ε) + (1 − λ) ∇L(θ), with autograd and torch alone; returns v."""
    params = list(model.parameters())
    v = [[0.0] * len(p) for p in params]
    for step in steps:
        clean = weights(model)
        eps = naive_epsilon(params, step, v if adaptive else None)
        with torch.no_grad():
            for p, e in zip(params, eps, strict=True):
                p.add_(e if step else 0)  # the first gradient is taken without noise
        model.zero_grad()
        backward(model, step)
        noisy = gradients(model)
        with torch.no_grad():
            for p, w in zip(params, clean, strict=True):
                p.copy_(w)
        if mix < 1:
            model.zero_grad()
            backward(model, 500 + step)
        for k, (p, g) in enumerate(zip(params, noisy, strict=True)):
            v[k] = [BETA * a + float(x.square().sum()) for a, x in zip(v[k], g, strict=True)]
            p.grad = mix * g + (1 - mix) * p.grad
        inner.step()
    return v


class TestFormula:
    @pytest.mark.parametrize("inner", INNERS)
    @pytest.mark.parametrize("method", METHODS)
    def test_several_steps_in_float64(self, method, inner):
        ours, theirs = network(), network()
        optimizer = METHODS[method](INNERS[inner](ours.parameters()), ours)
        train(ours, optimizer, range(5))
        mix, adaptive = 0.3 if method.startswith("m-") else 1.0, "arwp" in method
        plain = INNERS[inner](theirs.parameters())
        v = by_formula(theirs, plain, range(5), mix=mix, adaptive=adaptive)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        if adaptive:
            for k, state in optimizer.state_dict()["state"].items():
                expected = torch.tensor(v[k], dtype=torch.float64)
                torch.testing.assert_close(state["nvrm_v"].flatten(), expected, rtol=1e-11, atol=0)

    def test_standard_deviation_is_gamma_times_the_norm_of_the_filter(self):
        """Norms 1, 2 and 3 of filters with 40,000 weights: an error of 0.0035 of the deviation."""
        model = nn.Linear(40_000, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0], [2.0], [3.0]]) / 200)
        optimizer = RWP(torch.optim.SGD(model.parameters(), lr=1e-30), model=model, gamma=0.01)
        model(torch.ones(1, 40_000)).sum().backward()
        optimizer.step()
        eps = (as_trained(model.weight) - model.weight).detach()
        for deviation, norm in zip(eps.std(1).tolist(), (1, 2, 3), strict=True):
            assert deviation == pytest.approx(0.01 * norm, rel=4 * 0.0036)

    def test_defaults_are_those_of_the_paper(self):
        model = network()
        group = ARWP(torch.optim.SGD(model.parameters(), lr=0.1), model=model).param_groups[0]
        assert [group[k] for k in ("b", "mix", "eta", "beta")] == [0.01, 1.0, 0.1, 0.99]
        assert (group["noise"], group["relative_to"]) == ("gaussian", "filter")

    def test_large_gradients_mean_less_noise(self):
        """v of a quadratic ½ (c · w)²: the filter with a hundred times the gradient gets less."""
        model = nn.Linear(50, 2, bias=False).double()
        nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-30)
        optimizer = ARWP(sgd, model=model, gamma=0.1, eta=1.0)
        (
            model(torch.ones(1, 50, dtype=torch.float64)) * torch.tensor([1.0, 100.0])
        ).sum().backward()
        optimizer.step()
        factor = optimizer.state_dict()["state"][0]["nvrm_factor"].flatten()
        expected = torch.tensor([1 + 50, 1 + 50 * 1e4], dtype=torch.float64).rsqrt()
        torch.testing.assert_close(factor, expected)

    def test_squares_of_filters(self):
        g = torch.randn(4, 2, 3, 3)
        assert filter_squares(g).shape == (4, 1, 1, 1)
        assert float(filter_squares(g)[2]) == pytest.approx(float(g[2].square().sum()))
        assert [tuple(filter_squares(torch.ones(s)).shape) for s in ((), (3,), (0, 2))] == [
            (), (3,), (0, 1),
        ]  # fmt: skip
        assert filter_squares(torch.full((1, 4), 300.0).half()).item() == 4 * 300.0**2
        sparse = torch.eye(3).to_sparse()
        assert torch.equal(filter_squares(sparse), torch.ones(3, 1))


class TestLimits:
    @pytest.mark.parametrize("inner", INNERS)
    @pytest.mark.parametrize("kind", [RWP, ARWP])
    def test_without_noise_it_is_the_inner_optimizer(self, kind, inner):
        ours, theirs = network(torch.float32), network(torch.float32)
        optimizer = kind(INNERS[inner](ours.parameters()), model=ours, gamma=0)
        plain = INNERS[inner](theirs.parameters())
        train(ours, optimizer, range(5))
        for step in range(5):
            plain.zero_grad()
            backward(theirs, step)
            plain.step()
        assert same(ours, theirs)

    @pytest.mark.parametrize("kind", [RWP, ARWP])
    def test_with_mix_0_it_is_the_inner_optimizer(self, kind):
        ours, theirs = network(torch.float32), network(torch.float32)
        train(
            ours, kind(INNERS["sgd"](ours.parameters()), model=ours, gamma=GAMMA, mix=0), range(5)
        )
        plain = INNERS["sgd"](theirs.parameters())
        for step in range(5):
            plain.zero_grad()
            backward(theirs, 500 + step)
            plain.step()
        assert same(ours, theirs)

    def test_without_adaptation_arwp_is_rwp(self):
        ours, theirs = network(torch.float32), network(torch.float32)
        options = {"gamma": GAMMA, "mix": 0.5}
        first = ARWP(INNERS["sgd"](ours.parameters()), model=ours, eta=0, **options)
        second = RWP(INNERS["sgd"](theirs.parameters()), model=theirs, **options)
        train(ours, first, range(5))
        train(theirs, second, range(5))
        assert same(ours, theirs)

    @pytest.mark.parametrize("method", METHODS)
    def test_scale_of_a_normalized_layer_does_not_matter(self, method):
        """Noise relative to the weights is the same after the layer is multiplied by ten."""
        relative = []
        for factor in (1.0, 10.0):
            model = network()
            optimizer = METHODS[method](torch.optim.SGD(model.parameters(), lr=1e-30), model)
            train(model, optimizer, range(1))
            p = model[0].weight
            with torch.no_grad():
                p.mul_(factor)
            noisy = as_trained(p).detach()
            relative.append((noisy - p.detach()) / p.detach())
        torch.testing.assert_close(*relative, rtol=1e-9, atol=1e-12)
        assert relative[0].abs().max() > 0.1


class TestResume:
    @pytest.mark.parametrize("stop", range(5))
    @pytest.mark.parametrize("method", METHODS)
    def test_resumed_run_equals_an_uninterrupted_one(self, method, stop):
        model = network(torch.float32)
        optimizer = METHODS[method](INNERS["adam"](model.parameters()), model)
        train(model, optimizer, range(stop))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        train(model, optimizer, range(stop, 6))

        file.seek(0)
        state, own = torch.load(file, weights_only=True)
        other = network(torch.float32, seed=9)
        resumed = type(optimizer)(torch.optim.Adam(other.parameters(), lr=1.0), model=other)
        resumed.load_state_dict(own)  # what is loaded counts
        other.load_state_dict(state)
        train(other, resumed, range(stop, 6))
        assert same(model, other)

    def test_noise_of_a_checkpoint_is_that_of_its_last_draw(self):
        """Another eta for the next draw may be set before the checkpoint is written."""
        runs = []
        for reload in (False, True):
            model = network()
            optimizer = METHODS["arwp"](INNERS["sgd"](model.parameters()), model)
            train(model, optimizer, range(2))
            optimizer.param_groups[0]["eta"] = np.float64(100.0)
            if reload:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = ARWP(INNERS["sgd"](model.parameters()), model=model)
                optimizer.load_state_dict(saved)
            train(model, optimizer, range(2, 5))
            assert type(optimizer.param_groups[0]["eta"]) is float
            runs.append(model)
        assert same(*runs)

    @pytest.mark.parametrize("method", METHODS)
    def test_copies_train_alike(self, method):
        model = network(torch.float32)
        optimizer = METHODS[method](INNERS["sgd"](model.parameters()), model)
        train(model, optimizer, range(2))
        copies = [
            copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
        ]  # fmt: skip
        train(model, optimizer, range(2, 4))
        for other, its in copies:
            train(other, its, range(2, 4))
            assert same(model, other)

    def test_global_generator_is_not_used(self):
        model = network()
        state = torch.get_rng_state()
        train(model, METHODS["m-arwp"](INNERS["sgd"](model.parameters()), model), range(3))
        assert torch.equal(torch.get_rng_state(), state)

    def test_other_optimizers_states_are_refused(self):
        model = network()
        adaptive = METHODS["arwp"](INNERS["sgd"](model.parameters()), model)
        train(model, adaptive, range(1))
        rwp = RWP(INNERS["sgd"](model.parameters()), model=model)
        with pytest.raises(ValueError, match=r"not one of RWP: .* must have mix, got mix, eta"):
            rwp.load_state_dict(adaptive.state_dict())
        with pytest.raises(ValueError, match=r"not one of ARWP: .* mix, eta, beta, got mix$"):
            adaptive.load_state_dict(rwp.state_dict())
        nvrm = neuvar.NVRMSGD(model, lr=0.1, b=0.1)
        with pytest.raises(ValueError, match="got none"):
            rwp.load_state_dict(nvrm.state_dict())
        state = adaptive.state_dict()
        state["state"][0]["nvrm_v"] = torch.ones(5)
        with pytest.raises(ValueError, match=r"'nvrm_v' must be a tensor of shape \(3, 1, 1, 1\)"):
            adaptive.load_state_dict(state)


class TestMixing:
    def mixed(self, method="m-rwp"):
        model = network()
        optimizer = METHODS[method](INNERS["sgd"](model.parameters()), model)
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        return model, optimizer

    @pytest.mark.parametrize("method", ["m-rwp", "m-arwp"])
    def test_parts_of_a_batch(self, method):
        """Several passes for each gradient give what one pass gives."""
        runs = []
        for parts in (1, 2):
            model, optimizer = self.mixed(method)
            for _ in range(parts):
                backward(model, 1, 1 / parts)
            with optimizer.clean_gradient():
                for _ in range(parts):
                    backward(model, 2, 1 / parts)
            optimizer.step()
            runs.append(model)
        for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("method", ["arwp", "m-arwp"])
    def test_gradient_scaler_does_not_change_v(self, method):
        states = []
        for factor in (1.0, 1024.0):
            model, optimizer = self.mixed(method)
            backward(model, 1, factor)
            if method == "m-arwp":
                with optimizer.clean_gradient():
                    backward(model, 2, factor)
            for p in model.parameters():
                p.grad /= factor
            optimizer.step()
            states.append(optimizer.state_dict()["state"])
        for k, state in states[0].items():
            torch.testing.assert_close(state["nvrm_v"], states[1][k]["nvrm_v"], rtol=1e-12, atol=0)

    def test_gradient_checkpointing_repeats_clean_passes_clean(self):
        results = []
        for repeat in (False, True):
            model, optimizer = self.mixed()
            x = torch.ones(2, 2, 4, 4, dtype=torch.float64)

            def passes(x, model=model, repeat=repeat):
                for layer in model:
                    x = checkpoint(layer, x, use_reentrant=False) if repeat else layer(x)
                return x.square().sum()

            passes(x).backward()
            with optimizer.clean_gradient():
                passes(x).backward()
            results.append(gradients(model))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    def test_groups_may_mix_differently(self):
        model, other = network(), network()
        params = list(model.parameters())
        groups = [{"params": params[:2], "mix": 0.25}, {"params": params[2:]}]
        inner = torch.optim.SGD(groups, lr=0.1)
        optimizer = RWP(inner, model=model, gamma=0, mix=0.5)
        backward(model, 1)
        with optimizer.clean_gradient():
            backward(model, 2)
        found = gradients(model)
        parts = []
        for number in (1, 2):
            other.zero_grad()
            backward(other, number)
            parts.append(gradients(other))
        for k, (g, noisy, clean) in enumerate(zip(found, *parts, strict=True)):
            mix = 0.25 if k < 2 else 0.5
            torch.testing.assert_close(g, mix * noisy + (1 - mix) * clean, rtol=1e-12, atol=1e-14)
        optimizer.param_groups[1]["mix"] = 1
        with pytest.raises(ValueError, match=r"below 1 in all groups or 1 in all, got \[0.25, 1\]"):
            optimizer.step()

    def test_step_needs_the_clean_gradient(self):
        model, optimizer = self.mixed()
        backward(model, 1)
        before = weights(model)
        with pytest.raises(RuntimeError, match=r"mix=0.3 needs a clean gradient"):
            optimizer.step()
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
        with optimizer.clean_gradient():
            backward(model, 2)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"mix=0.3 needs a clean gradient"):
            optimizer.step()

    def test_clean_gradient_comes_second_and_once(self):
        model, optimizer = self.mixed()
        with pytest.raises(RuntimeError, match="found no gradient"), optimizer.clean_gradient():
            pass
        backward(model, 1)
        with optimizer.clean_gradient():
            backward(model, 2)
        with pytest.raises(RuntimeError, match="already used"), optimizer.clean_gradient():
            pass
        backward(model, 3)
        with pytest.raises(RuntimeError, match="noisy pass after clean_gradient"):
            optimizer.step()

    def test_zero_grad_inside_is_refused_and_gradients_are_dropped(self):
        model, optimizer = self.mixed()
        backward(model, 1)
        with pytest.raises(RuntimeError, match="drops the gradient"), optimizer.clean_gradient():
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        train(model, optimizer, range(1, 3))

    def test_without_mixing_there_is_no_clean_gradient(self):
        model = network()
        optimizer = METHODS["rwp"](INNERS["sgd"](model.parameters()), model)
        backward(model, 1)
        with pytest.raises(RuntimeError, match="mix=1 uses no"), optimizer.clean_gradient():
            pass

    def test_closure(self):
        model, optimizer = self.mixed()
        other, plain = self.mixed()

        def closure():
            backward(model, 1)
            with optimizer.clean_gradient():
                backward(model, 501)

        optimizer.step(closure)
        train(other, plain, range(1, 2))
        assert same(model, other)


def test_gamma_follows_a_schedule():
    """v is kept while gamma is 0, also in a checkpoint."""
    model = network()
    optimizer = METHODS["arwp"](INNERS["sgd"](model.parameters()), model)
    schedule = BSchedule(optimizer, Linear(4))
    train(model, optimizer, range(1))
    assert "nvrm_v" in optimizer.state_dict()["state"][0]
    assert not optimizer.has_noise
    for _ in range(4):
        schedule.step()
    train(model, optimizer, range(1, 2))
    assert optimizer._weights.eps[model[0].weight].b == pytest.approx(GAMMA * math.sqrt(18))


def test_prediction_asks_for_b():
    model = network()
    optimizer = METHODS["arwp"](INNERS["sgd"](model.parameters()), model)
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match="RWP and ARWP has no single b"):
        neuvar.predict(model, torch.zeros(4, 2, 4, 4, dtype=torch.float64), draws=2)


@pytest.mark.parametrize("mix", [1, 0.5])
def test_fit_takes_one_gradient_per_step(mix):
    model = network()
    batches = [(torch.ones(4, 2, 4, 4, dtype=torch.float64), torch.arange(4))] * 3
    optimizer = ARWP(INNERS["sgd"](model.parameters()), model=model, mix=mix)
    if mix == 1:
        assert neuvar.train.fit(model, batches, optimizer, epochs=2).finished
        assert optimizer.has_noise
    else:
        with pytest.raises(RuntimeError, match=r"mix=0\.5 needs a clean gradient"):
            neuvar.train.fit(model, batches, optimizer, epochs=2)


def test_added_groups_and_lr_0():
    model = network()
    optimizer = METHODS["m-arwp"](torch.optim.SGD(model[0].parameters(), lr=0.0), model)
    backward(model, 0)
    optimizer.step()  # changes nothing, so it needs no clean gradient
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.1, "eta": 5.0})
    assert [group["eta"] for group in optimizer.param_groups] == [ETA, 5.0]
    train(model, optimizer, range(2))
    assert torch.isfinite(model[3].weight).all()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"gamma": -1}, "gamma must be a finite number >= 0, got -1"),
        ({"gamma": "auto"}, "gamma must be a finite number >= 0, got 'auto'"),
        ({"mix": 1.5}, "mix must be a finite number >= 0 and <= 1, got 1.5"),
        ({"mix": True}, "mix must be a finite number >= 0 and <= 1, got True"),
        ({"eta": math.inf}, "eta must be a finite number >= 0, got inf"),
        ({"beta": -0.1}, "beta must be a finite number >= 0 and <= 1, got -0.1"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"model": None}, "relative_to needs the model"),
    ],
)
def test_bad_arguments_get_a_sentence(how, sentence):
    model = network()
    with pytest.raises(ValueError, match=sentence):
        ARWP(torch.optim.SGD(model.parameters(), lr=0.1), **{"model": model} | how)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"gamma": 0.1}, "set gamma of a group as its 'b', got gamma=0.1"),
        ({"std": 0.1}, "set gamma of a group as its 'b', got std=0.1"),
        ({"relative_to": None}, "relative_to must be 'filter' in ARWP, got None"),
        ({"mix": 2}, "mix must be a finite number >= 0 and <= 1, got 2"),
        ({"eta": -1}, "eta must be a finite number >= 0, got -1"),
        ({"beta": 2}, "beta must be a finite number >= 0 and <= 1, got 2"),
        ({"b": "auto"}, "needs a number|b must be a finite number"),
    ],
)
def test_bad_options_of_groups_get_a_sentence(option, sentence):
    model = network()
    with pytest.raises(ValueError, match=sentence):
        ARWP(torch.optim.SGD([{"params": model.parameters()} | option], lr=0.1), model=model)
    optimizer = ARWP(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model)
    with pytest.raises(ValueError, match=sentence):
        optimizer.add_param_group({"params": model[3].parameters()} | option)
    backward(model, 0)
    optimizer.param_groups[0].update(option)
    before = weights(model)
    with pytest.raises(ValueError, match=sentence):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before, strict=True))
