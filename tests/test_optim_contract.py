"""NVRM is a real optimizer with good manners: groups, schedulers, hooks, odd parameters, errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from neuvar import NVRM, NVRMSGD, NVRMAdam, NVRMAdamW, noise, split_parameters
from neuvar.baselines import AntiPGD, SmoothOut
from neuvar.noise import Draw
from neuvar.optim import noisy_parameters
from neuvar.optim.wrapper import is_real_step
from tests.toy import backward, clean, epsilon, network, same, train, weights

modes = pytest.mark.parametrize("mode", ["exact", "replay"])


def fresh(mode="exact", **options):
    """A network and its optimizer after three steps, so that it carries noise."""
    model = network()
    optimizer = NVRMAdam(model.parameters(), lr=0.01, mode=mode, **({"b": 0.05} | options))
    train(model, optimizer, range(3))
    return model, optimizer


# A real optimizer.


def test_is_an_optimizer_and_shares_the_groups():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = NVRM(inner, b=0.05)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    assert optimizer.param_groups[0]["b"] == 0.05
    assert optimizer.param_groups[0]["noise"] == "gaussian"


def test_schedulers_change_the_inner_rate():
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for step in range(9):
        train(model, optimizer, [step])
        scheduler.step()
        assert optimizer.inner.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_hooks_run():
    model, optimizer = fresh()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before save"))
    optimizer.register_state_dict_post_hook(lambda _, s: seen.append("after save"))
    optimizer.register_load_state_dict_pre_hook(lambda _, s: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    train(model, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [
        f"{when} {what}" for what in ("step", "save", "load") for when in ("before", "after")
    ]


def test_state_is_kept_apart_from_the_inner_optimizers():
    model, optimizer = fresh()
    assert {key for state in optimizer.inner.state.values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    p = next(model.parameters())
    assert optimizer.state[p].keys() > optimizer.inner.state[p].keys()
    assert len(optimizer.state) == 4
    optimizer.state[p] = dict(optimizer.state[p], step=torch.tensor(7.0))
    assert optimizer.inner.state[p]["step"] == 7
    assert optimizer.inner.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.state[p]["exp_avg"] = torch.zeros(7, 5, dtype=torch.float64)  # as to move it
    assert optimizer.inner.state[p]["exp_avg"].dtype == torch.float64
    del optimizer.state[p]
    assert p not in optimizer.inner.state
    assert p not in optimizer.state


@modes
def test_added_groups_join_at_the_next_draw(mode):
    model, optimizer = fresh(mode)
    head = nn.Linear(3, 2)
    before = weights(head)
    theirs = weights(model)
    optimizer.add_param_group({"params": head.parameters(), "b": 0.5, "lr": 0.1})
    assert same(weights(head), before)
    assert same(weights(model), theirs)
    assert optimizer.param_groups[1]["lr"] == 0.1
    head(model(torch.ones(4, 5))).sum().backward()
    optimizer.step()
    assert not same(weights(head), clean(head, optimizer))
    with optimizer.denoised():
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_named_parameters_are_taken():
    model = network()
    optimizer = NVRMSGD(model.named_parameters(), lr=0.1, b=0.05)
    train(model, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]


def test_a_closure_is_called_once_at_the_perturbed_weights():
    model, optimizer = fresh()
    other, twin = fresh()
    calls = []

    def closure():
        calls.append(weights(model))
        optimizer.zero_grad()
        return backward(model, 3)

    noisy = weights(model)
    loss = optimizer.step(closure)
    assert len(calls) == 1
    assert same(calls[0], noisy)
    train(other, twin, [3])
    assert same(weights(model), weights(other))
    assert loss == pytest.approx(backward(other, 3).item(), abs=10)


@pytest.mark.parametrize("name", ["NVRMSGD", "NVRMAdam", "NVRMAdamW"])
def test_named_optimizers_are_the_wrapped_ones(name):
    named = {"NVRMSGD": NVRMSGD, "NVRMAdam": NVRMAdam, "NVRMAdamW": NVRMAdamW}[name]
    inner = getattr(torch.optim, name.removeprefix("NVRM"))
    first, second = network(), network()
    options = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = named(first.parameters(), **options, b=0.05, seed=3)
    train(first, optimizer, range(5))
    wrapped = NVRM(inner(second.parameters(), **options, fused=True), b=0.05, seed=3)
    train(second, wrapped, range(5))
    assert same(weights(first), weights(second))


def test_presets():
    model = network()
    smooth = SmoothOut(model.parameters(), lr=0.1, b=0.1)
    train(model, smooth, range(2))
    assert all(e.abs().max() <= 0.1 for e in epsilon(model, smooth))
    assert Draw(*smooth.param_groups[0]["drawn"]).noise == "uniform"
    first, second = network(), network()
    train(first, AntiPGD(first.parameters(), lr=0.1, b=0.1), range(4))
    train(second, NVRMSGD(second.parameters(), lr=0.1, b=0.1), range(4))
    assert same(weights(first), weights(second))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'noise'"):
        SmoothOut(network().parameters(), lr=0.1, b=0.1, noise="gaussian")


# Noise by group.


def test_groups_have_their_own_noise():
    model = network()
    first, second = model[0].parameters(), model[2].parameters()
    groups = [{"params": first, "b": 0.0}, {"params": second, "b": 0.3, "noise": "uniform"}]
    optimizer = NVRMSGD(groups, lr=0.1, b=0.05)
    train(model, optimizer, range(2))
    noisy = weights(model)
    for k, (a, c) in enumerate(zip(noisy, clean(model, optimizer), strict=True)):
        assert torch.equal(a, c) == (k < 2)
        assert (a - c).abs().max() <= 0.3 + 1e-6


@modes
def test_b_may_be_changed_and_the_old_noise_still_comes_off(mode):
    model, optimizer = fresh(mode)
    before = clean(model, optimizer)
    optimizer.param_groups[0].update(b=7.0, noise="laplace")
    assert same(clean(model, optimizer), before)
    train(model, optimizer, [3])
    assert epsilon(model, optimizer)[0].abs().max() > 1
    optimizer.param_groups[0]["b"] = 0
    train(model, optimizer, [4])
    assert same(weights(model), clean(model, optimizer))


def test_a_standard_deviation_may_be_asked_for():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, std=0.1, noise="laplace")
    assert optimizer.param_groups[0]["b"] == pytest.approx(0.1 / math.sqrt(2))
    groups = [{"params": model.parameters(), "std": 0.2, "noise": "uniform"}]
    optimizer = NVRMSGD(groups, lr=0.1, b=0.1)
    assert optimizer.param_groups[0]["b"] == pytest.approx(0.2 * math.sqrt(3))
    assert "std" not in optimizer.param_groups[0]


def test_split_parameters():
    tied = nn.Linear(4, 4)
    model = nn.Sequential(tied, nn.BatchNorm1d(4), nn.GroupNorm(2, 4), tied, nn.LSTM(4, 3))
    quiet = {id(p) for p in split_parameters(model)[1]["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in quiet) == ("bias" in name or name[0] in "12"), name
    groups = split_parameters(model, biases=True, norms=True)
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len(list(model.parameters()))
    assert split_parameters(nn.BatchNorm1d(3))[0]["b"] == 0.0
    NVRMSGD(split_parameters(model), lr=0.1, b=0.1)


def test_numpy_scalars_and_tensors_are_taken_and_stay_out_of_checkpoints():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=np.float64(0.1), seed=np.int64(3))
    train(model, optimizer, [0])
    optimizer.param_groups[0]["b"] = torch.tensor(0.2)
    train(model, optimizer, [1])
    assert type(optimizer.param_groups[0]["b"]) is float
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_parameters_without_noise_cost_no_memory():
    model = network()
    groups = [{"params": model[0].parameters(), "b": 0.0}, {"params": model[2].parameters()}]
    optimizer = NVRMSGD(groups, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()["state"]
    assert ["nvrm_clean" in state[k] for k in range(4)] == [False, False, True, True]
    assert len(optimizer._weights.mode._buffers) == 2
    optimizer.param_groups[1]["b"] = 0
    optimizer.resample()
    assert not optimizer._weights.mode._buffers


def test_a_parameter_may_be_replaced_in_its_group():
    model, optimizer = fresh()
    optimizer.eval()
    model[0].weight = nn.Parameter(torch.zeros(7, 5))
    optimizer.param_groups[0]["params"][0] = model[0].weight
    optimizer.train()
    train(model, optimizer, range(2))
    assert not same(weights(model), clean(model, optimizer))


def test_types_may_change_while_denoised():
    model, optimizer = fresh()
    with optimizer.denoised():
        model.double()
        for state in optimizer.inner.state.values():
            state.update(exp_avg=state["exp_avg"].double(), exp_avg_sq=state["exp_avg_sq"].double())
    train(model, optimizer, range(2))
    assert {optimizer.clean_copy(p).dtype for p in model.parameters()} == {torch.float64}
    assert not same(weights(model), clean(model, optimizer))


def test_an_optimizer_without_rate_steps():
    p = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([p], lr=0.1)
    optimizer = NVRM(inner, b=0.1)
    optimizer.param_groups[0]["lr"] = None
    p.grad = torch.ones(3)
    assert is_real_step(optimizer.param_groups)


def test_a_step_without_gradients_does_not_disturb_autograd():
    model, optimizer = fresh()
    optimizer.zero_grad()
    loss = model(torch.ones(2, 5)).sum()
    optimizer.step()
    loss.backward()


def test_not_a_number_can_be_saved_and_loaded():
    model, optimizer = fresh()
    with torch.no_grad(), optimizer.denoised():
        model[0].weight[0, 0] = math.nan
    optimizer.load_state_dict(optimizer.state_dict())


# Parameters of every kind.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    model = network(dtype=dtype)
    optimizer = NVRMSGD(model.parameters(), lr=0.01, b=0.05)
    train(model, optimizer, range(3))
    noisy = weights(model)
    assert not same(noisy, clean(model, optimizer))
    assert same(noisy, weights(model))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_sparse_gradients():
    table = nn.Embedding(10, 4, sparse=True)
    shadow = copy.deepcopy(table)
    optimizer = NVRM(torch.optim.SparseAdam(list(table.parameters())), b=0.1)
    other = torch.optim.SparseAdam(list(shadow.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        table(torch.tensor([step, 7])).square().sum().backward()
        shadow.weight.grad = table.weight.grad.clone()
        optimizer.step()
        other.step()
    assert table.weight.grad.is_sparse
    assert same(clean(table, optimizer), weights(shadow))


@modes
def test_memory_formats_see_the_same_noise(mode):
    noisy = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(8, 8, 3)
        with torch.no_grad():
            model.weight.copy_(torch.arange(576.0).view(8, 8, 3, 3) / 576)
            model.bias.zero_()
        model = model.to(memory_format=layout)
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1, mode=mode)
        for sampler in ("table", "fresh"):
            record = Draw(*optimizer.param_groups[0]["drawn"])._replace(sampler=sampler)
            optimizer.param_groups[0]["drawn"] = tuple(record)
            optimizer.resample()
            noisy.append(model.weight.detach().clone(memory_format=torch.contiguous_format))
            assert model.weight.is_contiguous(memory_format=layout)
        model(torch.ones(2, 8, 5, 5)).sum().backward()
        optimizer.step()
    assert torch.equal(noisy[0], noisy[2])
    assert torch.equal(noisy[1], noisy[3])
    assert not torch.equal(noisy[0], noisy[1])


def test_tied_weights_are_perturbed_once():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    optimizer = NVRMSGD(model.parameters(), lr=0.0001, b=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    ((draw, z),) = [(Draw(*g["drawn"]), g) for g in optimizer.param_groups]
    with optimizer.denoised():
        base = layer.weight.detach().clone()
    expected = 0.1 * noise.standard_noise(noise.whole_slot((4, 4)), draw)
    torch.testing.assert_close(layer.weight.detach() - base, expected)
    assert model[0].weight is model[2].weight
    assert z["b"] == 0.1


@modes
def test_parameters_without_gradient_carry_noise_and_keep_their_weights(mode):
    model = network()
    unused = nn.Parameter(torch.ones(3))
    optimizer = NVRMSGD([*model.parameters(), unused], lr=0.1, b=0.1, mode=mode)
    train(model, optimizer, range(3))
    assert not torch.equal(unused, torch.ones(3))
    with optimizer.denoised():
        torch.testing.assert_close(unused.detach(), torch.ones(3), rtol=0, atol=1e-6)


@modes
def test_frozen_parameters_are_left_alone(mode):
    model = network()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1, mode=mode)
    train(model, optimizer, range(3))
    assert torch.equal(model[0].weight, before)
    assert same(weights(model)[:1], clean(model, optimizer)[:1])
    theta = clean(model, optimizer)[1]
    assert not torch.equal(model[0].bias, theta)
    model[0].bias.requires_grad_(False)  # frozen while it carries noise
    train(model, optimizer, [3])
    torch.testing.assert_close(model[0].bias.detach(), theta)
    if mode == "exact":
        assert torch.equal(model[0].bias, theta)
    model[0].bias.requires_grad_(True)
    train(model, optimizer, [4])
    assert not same(weights(model)[1:2], clean(model, optimizer)[1:2])


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_for_accelerators_gives_the_same_weights(mode, dtype, monkeypatch):
    if mode == "replay" and dtype is torch.bfloat16:
        dtype = torch.float64
    models = network(dtype=dtype), network(dtype=dtype)
    optimizers = [NVRMSGD(m.parameters(), lr=0.1, b=0.1, mode=mode) for m in models]
    train(models[0], optimizers[0], range(5))
    with monkeypatch.context() as patch:
        patch.setattr(noisy_parameters, "ONE_BY_ONE", ())
        train(models[1], optimizers[1], range(5))
        assert same(clean(models[1], optimizers[1]), clean(models[0], optimizers[0]))
    assert same(weights(models[1]), weights(models[0]))


def test_empty_and_scalar_parameters():
    parameters = [nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))]
    for sampler in ("table", "fresh"):
        optimizer = NVRMSGD(parameters, lr=0.1, b=0.1, sampler=sampler)
        parameters[1].square().backward()
        optimizer.step()
        optimizer.eval()
        assert parameters[1].item() < 1


def test_a_model_moved_while_perturbed_goes_on():
    model, optimizer = fresh()
    noisy = weights(model)
    for p in model.parameters():
        p.data = p.data.clone()  # what Module.to does
    before = [optimizer.clean_copy(p) for p in model.parameters()]
    assert same(clean(model, optimizer), before)
    assert same(weights(model), noisy)


# Denoising.


@modes
def test_denoised_restores_the_very_same_noise(mode):
    model, optimizer = fresh(mode)
    noisy = weights(model)

    def fail_inside():
        with optimizer.denoised():
            assert not same(weights(model), noisy)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert same(weights(model), noisy)
    optimizer.eval()
    theta = weights(model)
    optimizer.eval()
    with optimizer.denoised():
        assert same(weights(model), theta)
    assert same(weights(model), theta)
    optimizer.train()
    optimizer.train()
    assert same(weights(model), noisy)


@modes
def test_edits_inside_denoised_are_kept_to_the_bit(mode):
    model, optimizer = fresh(mode)
    wanted = [torch.full_like(p, k + 0.125) for k, p in enumerate(model.parameters())]
    with torch.no_grad(), optimizer.denoised():
        for p, value in zip(model.parameters(), wanted, strict=True):
            p.data.copy_(value)
    assert not same(weights(model), wanted)
    if mode == "exact":
        assert same(clean(model, optimizer), wanted)
    for found, value in zip(clean(model, optimizer), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)


@modes
@pytest.mark.parametrize("touch", ["step", "denoised", "eval", "state_dict", "resample"])
def test_edits_of_noisy_weights_are_refused_by_whatever_comes_next(mode, touch):
    model, optimizer = fresh(mode)
    theta = clean(model, optimizer)
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)
    edited = weights(model)
    act = {
        "step": optimizer.step,
        "denoised": lambda: optimizer.denoised().__enter__(),
        "eval": optimizer.eval,
        "state_dict": optimizer.state_dict,
        "resample": optimizer.resample,
    }[touch]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 2 of shape \(3, 7\) was changed while"):
            act()
        assert same(weights(model), edited)
    optimizer.accept_weights()
    expected = [*theta[:2], edited[2], theta[3]]
    for found, value in zip(clean(model, optimizer), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)


def test_edits_through_data_are_seen_when_the_noise_comes_off_and_soon_in_training():
    for act in ("denoised", "state_dict"):
        model, optimizer = fresh()
        model[0].weight.data.clamp_(-0.1, 0.1)
        with pytest.raises(RuntimeError, match="parameter 0 of shape"):
            optimizer.state_dict() if act == "state_dict" else optimizer.eval()
    model = network()
    optimizer = NVRMAdam(model.parameters(), lr=0.01, b=0.05)
    train(model, optimizer, [0])
    model[0].weight.data.clamp_(-0.1, 0.1)  # the habit of every step is caught at the second
    with pytest.raises(RuntimeError, match="parameter 0 of shape"):
        train(model, optimizer, [1])
    optimizer.accept_weights([model[0].weight])
    assert optimizer.clean_copy(model[0].weight).abs().max() <= 0.1


@modes
@pytest.mark.parametrize("when", ["release", "hold", "step", "resample"])
def test_an_interruption_while_noise_is_written(mode, when, monkeypatch):
    """Exact mode goes on as if nothing were; replay mode says that it cannot."""
    model, optimizer = fresh(mode)
    theta = clean(model, optimizer)
    real, calls = noisy_parameters.add_noise, []

    def interrupted(base, term, **where):
        calls.append(term)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(base, term, **where)

    real_copy, copies = torch.Tensor.copy_, []

    def interrupted_copy(self, other, *rest):
        copies.append(other)
        if len(copies) == 2:
            raise KeyboardInterrupt
        return real_copy(self, other, *rest)

    if when == "release":
        optimizer.eval()
    optimizer.zero_grad()
    backward(model, 3)
    act = {
        "release": optimizer.train,
        "hold": optimizer.eval,
        "step": optimizer.step,
        "resample": optimizer.resample,
    }[when]
    with monkeypatch.context() as patch:
        if when == "hold" and mode == "exact":
            patch.setattr(torch.Tensor, "copy_", interrupted_copy)
        else:
            patch.setattr(noisy_parameters, "add_noise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            act()
    if mode == "replay":
        for call in (optimizer.eval, optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="an earlier call was interrupted"):
                call()
        return
    if when == "step":
        theta = [optimizer.clean_copy(p) for p in model.parameters()]
        assert optimizer.inner.state[model[0].weight]["step"] == 4
    optimizer.train()
    assert same(clean(model, optimizer), theta)
    train(model, optimizer, range(4, 6))


def test_an_inner_optimizer_may_replace_the_data_of_parameters():
    class Rebinding(torch.optim.Optimizer):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data = p.data - self.param_groups[0]["lr"] * p.grad

    p = nn.Parameter(torch.zeros(3))
    optimizer = NVRM(Rebinding([p], {"lr": 0.1}), b=0.1)
    for _ in range(5):
        p.grad = torch.ones(3)
        optimizer.step()
    torch.testing.assert_close(optimizer.clean_copy(p), torch.full((3,), -0.5))


def test_a_write_that_changes_nothing_is_no_edit():
    model, optimizer = fresh()
    theta = clean(model, optimizer)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    assert same(clean(model, optimizer), theta)


@modes
def test_no_step_while_denoised(mode):
    model, optimizer = fresh(mode)
    optimizer.eval()
    theta = weights(model)
    optimizer.zero_grad()
    backward(model, 0)
    with pytest.raises(RuntimeError, match="step\\(\\) was called after eval"):
        optimizer.step()
    assert same(weights(model), theta)
    optimizer.train()
    optimizer.step()


@modes
def test_a_failing_inner_step_leaves_noise_and_weights_in_order(mode, monkeypatch):
    model, optimizer = fresh(mode)
    noisy, theta = weights(model), clean(model, optimizer)
    optimizer.zero_grad()
    backward(model, 3)

    def fail():
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.inner, "step", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert same(weights(model), noisy)
    assert same(clean(model, optimizer), theta)
    optimizer.step()


# Resampling.


@modes
def test_resample_draws_without_moving_the_clean_weights(mode):
    model, optimizer = fresh(mode)
    theta, first = clean(model, optimizer), epsilon(model, optimizer)
    optimizer.resample()
    second = epsilon(model, optimizer)
    assert not same(first, second)
    for p, t, e in zip(model.parameters(), theta, second, strict=True):
        torch.testing.assert_close(p.detach(), t + e)
    optimizer.resample(antithetic=True)
    for p, t, e in zip(model.parameters(), theta, second, strict=True):
        torch.testing.assert_close(p.detach(), t - e)
    assert Draw(*optimizer.param_groups[0]["drawn"]).sign == -1
    optimizer.eval()
    optimizer.resample()
    assert Draw(*optimizer.param_groups[0]["drawn"]).sign == 1
    for p, t in zip(model.parameters(), theta, strict=True):
        torch.testing.assert_close(p.detach(), t, rtol=0, atol=1e-6)
    optimizer.train()
    assert not same(weights(model), clean(model, optimizer))


def test_resample_before_the_first_step():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    before = weights(model)
    optimizer.resample(antithetic=True)
    assert same(weights(model), before)
    optimizer.resample()
    assert not same(weights(model), before)
    assert same(clean(model, optimizer), before)


# Its randomness is its own.


@modes
def test_the_global_generator_is_never_touched(mode):
    for sampler in ("table", "fresh"):
        model = network()
        state = torch.get_rng_state()
        optimizer = NVRMAdam(model.parameters(), b=0.05, mode=mode, sampler=sampler)
        train(model, optimizer, range(3))
        optimizer.resample()
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(torch.get_rng_state(), state)


def test_seeds_differ_and_repeat():
    runs = [weights(fresh(seed=seed)[0]) for seed in (0, 0, 1, 2**32 - 1)]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])
    assert not same(runs[2], runs[3])


# Steps that are none.


@modes
def test_a_step_without_gradients_changes_nothing(mode):
    model, optimizer = fresh(mode)
    noisy, record = weights(model), optimizer.param_groups[0]["drawn"]
    optimizer.zero_grad()
    optimizer.step()
    assert same(weights(model), noisy)
    assert optimizer.param_groups[0]["drawn"] == record


@modes
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_step_with_rate_zero_changes_no_weight_and_draws_nothing(mode, rate):
    """As distributed checkpointing does to have state allocated, before training or within."""
    for steps in (0, 3):
        model = network()
        optimizer = NVRMAdam(model.parameters(), lr=0.01, b=0.05, mode=mode)
        train(model, optimizer, range(steps))
        before, record = weights(model), optimizer.param_groups[0]["drawn"]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert same(weights(model), before)
        assert optimizer.param_groups[0]["drawn"] == record


@modes
def test_a_scaler_that_skips_a_step_keeps_the_noise(mode):
    model, optimizer = fresh(mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    noisy, record = weights(model), optimizer.param_groups[0]["drawn"]
    for overflow in (True, False):
        optimizer.zero_grad()
        x = torch.ones(2, 5)
        scaler.scale(model(x).mean()).backward()
        if overflow:
            model[0].bias.grad[0] = math.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert same(weights(model), noisy) == overflow
        assert (optimizer.param_groups[0]["drawn"] == record) == overflow


@modes
def test_gradients_that_are_not_finite_stay_out_of_the_book_keeping(mode):
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.05, mode=mode)
    train(model, optimizer, range(3))
    backward(model, 3)
    model[0].bias.grad[1] = math.nan
    optimizer.step()
    with torch.no_grad(), optimizer.denoised():
        assert model[0].bias.isnan().sum() == 1
        model[0].bias.nan_to_num_()
    train(model, optimizer, range(2))
    assert all(p.isfinite().all() for p in model.parameters())


# Copies.


@modes
def test_deep_copies_go_on_alike(mode):
    model, optimizer = fresh(mode)
    with optimizer.denoised():
        twin, other = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\)"):
        train(twin, other, [3])
    other.train()
    assert same(weights(twin), weights(model))
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert same(weights(twin), weights(model))


def test_pickles_go_on_alike():
    model, optimizer = fresh()
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert same(weights(twin), weights(model))
    with pytest.raises(RuntimeError, match="in replay mode"):
        pickle.dumps(fresh("replay"))


def test_saving_needs_no_pickled_class():
    _, optimizer = fresh()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(n, (int, str)) for n in state["param_groups"][0]["drawn"])


# Bad input gets a sentence.


def params(*tensors):
    return [nn.Parameter(t) for t in tensors]


BAD = {
    "b must be a finite number >= 0, got -1": {"b": -1},
    "b must be a finite number >= 0, got nan": {"b": math.nan},
    "b must be a finite number >= 0, got inf": {"b": math.inf},
    "b must be \"auto\" or a finite number >= 0, got '1'": {"b": "1"},
    'give either b or std, or b="auto"; got b=None and std=None': {"b": None},
    'give either b or std, or b="auto"; got b=1 and std=2': {"b": 1, "std": 2},
    "std must be a finite number >= 0, got -1": {"b": None, "std": -1},
    "noise must be one of gaussian, laplace, uniform, got 'pink'": {"noise": "pink"},
    "mode must be one of exact, replay, got 'fast'": {"mode": "fast"},
    "sampler must be one of table, fresh, got 'dice'": {"sampler": "dice"},
    "ranks must be one of shared, per_rank, got 'all'": {"ranks": "all"},
    "ranks='per_rank' needs mode='exact'": {"ranks": "per_rank", "mode": "replay"},
    "ranks='per_rank' needs an initialized": {"ranks": "per_rank"},
    "seed must be an integer from 0 to 4294967295, got 1.5": {"seed": 1.5},
    "b must be at most 3.4e\\+38 \\(float32\\), got 1e\\+39": {"b": 1e39},
    "b must be a finite number >= 0, got 1000": {"b": 10**400},
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_arguments(sentence):
    with pytest.raises(ValueError, match=sentence):
        NVRMSGD(network().parameters(), lr=0.1, **({"b": 0.1} | BAD[sentence]))


NOT_PARAMETERS = {
    "got a NoneType": None,
    "got a class": nn.Linear,
    "got a str": "model",
    "got a float": 0.1,
    "got a OrderedDict": network().state_dict(),
}


@pytest.mark.parametrize("sentence", NOT_PARAMETERS)
@pytest.mark.parametrize("kind", [NVRMSGD, NVRMAdam])
def test_the_first_argument_is_checked(kind, sentence):
    with pytest.raises(ValueError, match=f"params must be a model, its parameters .*{sentence}"):
        kind(NOT_PARAMETERS[sentence], lr=0.1, b=0.1)


def test_bad_inner():
    model = network()
    for inner, sentence in {
        "Adam": "inner must be a torch.optim.Optimizer, got str",
        torch.optim.LBFGS(model.parameters()): "LBFGS needs several",
        NVRMSGD(model.parameters(), lr=0.1, b=0.1): "inner is already a NVRMSGD",
        torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True): "differentiable",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            NVRM(inner, b=0.1)


def test_bad_parameters():
    shared = torch.ones(3)
    cases = {
        "dtype torch.complex64": params(torch.ones(2, dtype=torch.complex64)),
        "shares its memory with parameter 0": params(shared, shared),
        "layout torch.sparse_coo": params(torch.eye(2).to_sparse()),
    }
    for sentence, parameters in cases.items():
        with pytest.raises(ValueError, match=sentence):
            NVRMSGD(parameters, lr=0.1, b=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(2,\) has dtype torch.bfloat16"):
        NVRMSGD(params(torch.ones(2, dtype=torch.bfloat16)), lr=0.1, b=0.1, mode="replay")
    model, optimizer = fresh()
    noisy = weights(model)
    for bad in ({"params": [model[0].weight]}, {"params": params(torch.ones(1)), "b": -1}):
        with pytest.raises(ValueError, match=r"parameter|b must be"):
            optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    assert same(weights(model), noisy)


@modes
@pytest.mark.parametrize("change", [{"b": -1}, {"b": math.nan}, {"noise": "pink"}])
def test_bad_changes_of_a_group_are_refused_before_a_weight_moves(mode, change):
    model, optimizer = fresh(mode)
    noisy = weights(model)
    optimizer.param_groups[0].update(change)
    for act in (lambda: train(model, optimizer, [3]), optimizer.resample):
        with pytest.raises(ValueError, match="must be"):
            act()
        assert same(weights(model), noisy)


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = fresh()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, [0])
        scheduler.step()
