"""A guarded model shows clean weights wherever it is not being trained."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import neuvar
from neuvar import NVRMSGD, reestimate_batchnorm
from tests.toy import clean, network, same, train, weights

modes = pytest.mark.parametrize("mode", ["exact", "replay"])


def guarded(mode="exact", steps=3):
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, momentum=0.9, b=0.1, mode=mode)
    handle = neuvar.guard(model, optimizer)
    train(model, optimizer, range(steps))
    return model, optimizer, handle


@modes
def test_evaluation_is_clean_and_training_is_not(mode):
    model, optimizer, _ = guarded(mode)
    noisy, theta = weights(model), clean(model, optimizer)
    x = torch.ones(2, 5)
    expected = torch.func.functional_call(
        model, dict(zip(dict(model.named_parameters()), theta, strict=True)), x
    )
    assert not torch.equal(model(x), expected)
    model.eval()
    assert torch.equal(model(x), expected)
    assert torch.equal(model[2](model[1](model[0](x))), expected)  # parts of it, too
    model.eval()
    optimizer.train()  # a trainer that calls both changes nothing
    assert same(weights(model), theta)
    model.train()
    model.train()
    assert same(weights(model), noisy)


@pytest.mark.parametrize("set_mode", ["whole", "wrapped", "attribute", "compiled"])
def test_whoever_changes_the_mode(set_mode):
    model, optimizer, _ = guarded()
    noisy, theta = weights(model), clean(model, optimizer)
    outer = {
        "whole": model,
        "wrapped": nn.Sequential(model),
        "attribute": model,
        "compiled": torch.compile(model, backend="eager"),
    }[set_mode]
    for training, expected in ((False, theta), (True, noisy), (False, theta)):
        if set_mode == "attribute":
            model.training = training  # as Lightning restores modes
        else:
            outer.train(training)
        assert model.training == training
        assert same(weights(model), expected)


def test_gradients_in_evaluation_mode_are_those_of_the_clean_weights():
    model, _, _ = guarded()
    model.eval()
    x = torch.ones(2, 5, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


@modes
def test_state_dicts_are_clean_copies_at_any_moment(mode):
    model, optimizer, _ = guarded(mode)
    theta = clean(model, optimizer)
    noisy = weights(model)
    for outer, prefix in ((model, ""), (nn.Sequential(model), "0.")):
        state = outer.state_dict()
        assert list(state) == [prefix + name for name, _ in model.named_parameters()]
        assert same(state.values(), theta)
    assert same(model[2].state_dict().values(), theta[2:])
    assert same(weights(model), noisy)
    model.eval()
    state = model.state_dict()
    model.train()
    train(model, optimizer, range(2))
    assert same(state.values(), theta)  # a copy, not the live weights
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight


@modes
def test_loading_sets_the_clean_weights(mode):
    model, optimizer, _ = guarded(mode)
    eps = [a - b for a, b in zip(weights(model), clean(model, optimizer), strict=True)]
    wanted = network(7).state_dict()
    model.load_state_dict(wanted)
    for p, w, e in zip(model.parameters(), wanted.values(), eps, strict=True):
        torch.testing.assert_close(p.detach(), w + e)
    for found, w in zip(model.state_dict().values(), wanted.values(), strict=True):
        torch.testing.assert_close(found, w, rtol=0, atol=0 if mode == "exact" else 1e-6)
    part = nn.Linear(7, 3).state_dict()
    model[2].load_state_dict(part)
    torch.testing.assert_close(model.state_dict()["2.weight"], part["weight"], rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(wanted, assign=True)
    train(model, optimizer, range(2))


@modes
def test_checkpoints_of_a_guarded_model_resume_to_the_bit(mode):
    model, optimizer, _ = guarded(mode, steps=5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    train(model, optimizer, range(5, 10))
    other, resumed, _ = guarded(mode, steps=1)
    state = torch.load(file, weights_only=True)
    # Adding the present noise and subtracting it again would round, and be refused, in replay mode.
    with resumed.denoised() if mode == "replay" else nullcontext():
        other.load_state_dict(state["model"])
        resumed.load_state_dict(state["optimizer"])
    train(other, resumed, range(5, 10))
    assert same(weights(other), weights(model))
    assert same(other.state_dict().values(), model.state_dict().values())


@modes
def test_copies_are_clean_and_free(mode):
    model, optimizer, _ = guarded(mode)
    theta, noisy = clean(model, optimizer), weights(model)
    twin = copy.deepcopy(model)
    assert type(twin) is nn.Sequential
    assert same(weights(twin), theta)
    twin.eval()
    twin.load_state_dict(network(3).state_dict())
    assert same(weights(model), noisy)
    with pytest.raises(RuntimeError, match="weights carry noise"):
        pickle.dumps(model)
    with optimizer.denoised():
        text = pickle.dumps(model)
    loaded = pickle.loads(text)
    assert type(loaded) is nn.Sequential
    assert same(weights(loaded), theta)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_a_guarded_model_and_its_optimizer_can_be_copied_together():
    model, optimizer, _ = guarded()
    for order in ((model, optimizer), (optimizer, model)):
        twins = copy.deepcopy(order)
        twin, other = sorted(twins, key=lambda t: isinstance(t, torch.optim.Optimizer))
        assert same(weights(twin), weights(model))
        assert same(clean(twin, other), clean(model, optimizer))


def test_a_guard_can_be_removed():
    model, _, handle = guarded()
    noisy = weights(model)
    model.eval()
    handle.remove()
    handle.remove()
    assert type(model) is nn.Sequential
    assert same(weights(model), noisy)
    assert same(model.state_dict().values(), noisy)
    assert not model.training
    assert not model._state_dict_hooks
    assert not model._load_state_dict_pre_hooks
    model.train()


def test_a_model_in_evaluation_mode_is_cleaned_at_once():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    theta = clean(model, optimizer)
    model.eval()
    neuvar.guard(model, optimizer)
    assert same(weights(model), theta)


def test_bad_input_gets_a_sentence():
    model, optimizer, _ = guarded()
    for arguments, sentence in (
        ((model, optimizer), "guarded already, for an optimizer that still trains it"),
        ((network(), optimizer), "trains none of the model's parameters"),
        ((network(), torch.optim.SGD(network().parameters())), "must be one of neuvar's, got SGD"),
    ):
        with pytest.raises(ValueError, match=sentence):
            neuvar.guard(*arguments)


def test_modules_that_join_later_are_clean_in_the_whole_state():
    model, optimizer, _ = guarded()
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[3].parameters()})
    train(model, optimizer, range(2))
    for name, value in model.state_dict().items():
        assert torch.equal(value, optimizer.clean_copy(model.get_parameter(name))), name


@pytest.mark.parametrize("whole_first", [True, False])
def test_two_optimizers_for_parts_of_a_model(whole_first):
    model = network()
    first = NVRMSGD(model[0].parameters(), lr=0.1, b=0.1)
    second = NVRMSGD(model[2].parameters(), lr=0.1, b=0.1, seed=1)
    pairs = [(model, first), (model[2], second)]
    for pair in pairs if whole_first else reversed(pairs):
        neuvar.guard(*pair)
    for optimizer in (first, second) * 2:
        train(model, optimizer, [0])
    expected = [o.clean_copy(p) for o in (first, second) for p in o.param_groups[0]["params"]]
    assert same(model.state_dict().values(), expected)
    model.eval()
    assert same(weights(model), expected)


def test_names_do_not_matter_and_others_are_not_copied():
    tied, frozen = nn.Linear(5, 5), nn.Linear(5, 5)
    model = nn.ModuleDict({"a": tied, "b": tied, "c": frozen})
    model["a"].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update(renamed=state.pop(prefix + "weight"))
    )
    optimizer = NVRMSGD(tied.parameters(), lr=0.1, b=0.1)
    neuvar.guard(model, optimizer)
    optimizer.resample()
    state = model.state_dict()
    assert torch.equal(state["renamed"], optimizer.clean_copy(tied.weight))
    assert state["a.bias"] is state["b.bias"]
    assert state["c.weight"].data_ptr() == frozen.weight.data_ptr()


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_models_are_guarded_within(wrap):
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    handle = neuvar.guard(wrap(model), optimizer)
    train(model, optimizer, range(2))
    theta = clean(model, optimizer)
    assert same(model.state_dict().values(), theta)
    model.eval()
    assert same(weights(model), theta)
    handle.remove()
    assert type(model) is nn.Sequential


def test_a_new_optimizer_takes_over():
    """As for the next task: the former one leaves the weights clean, its guard is replaced."""
    model, optimizer, _ = guarded()
    with pytest.raises(ValueError, match="carries the noise of another optimizer; call eval"):
        NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    optimizer.eval()
    theta = weights(model)
    second = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    neuvar.guard(model, second)
    assert same(weights(model), theta)
    train(model, second, range(2))
    assert not same(weights(model), clean(model, second))
    assert same(model.state_dict().values(), clean(model, second))


def test_a_load_that_fails_half_way_does_not_hold_for_ever():
    model, optimizer, _ = guarded()

    def fail(*_):
        raise OSError

    handle = model[2].register_load_state_dict_pre_hook(fail)
    with pytest.raises(OSError):
        model.load_state_dict(network(3).state_dict())
    handle.remove()
    model.train()
    train(model, optimizer, range(2))


def test_nothing_is_kept_alive():
    model, optimizer, handle = guarded()
    gone = weakref.ref(model)
    gc.disable()
    del model, optimizer, handle
    assert gone() is None
    gc.enable()


def test_a_baseline_can_be_guarded_too():
    model = network()
    optimizer = neuvar.PSGD(model.parameters(), lr=0.1, b=0.1)
    neuvar.guard(model, optimizer)
    train(model, optimizer, range(2))
    before = weights(model)
    model.eval()
    assert same(weights(model), before)
    assert same(model.state_dict().values(), before)
    model.train()
    train(model, optimizer, range(2))


def test_own_ways_to_be_copied_are_respected():
    class Locked(nn.Linear):
        def __getstate__(self):
            return {k: v for k, v in self.__dict__.items() if k != "lock"}

    model = Locked(5, 3)
    model.lock = threading.Lock()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    neuvar.guard(model, optimizer)
    optimizer.resample()
    twin = copy.deepcopy(model)
    assert type(twin) is Locked
    assert torch.equal(twin.weight, optimizer.clean_copy(model.weight))


# Batch normalisation.


def normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5), nn.BatchNorm1d(3)
    )


class Keywords(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, pixels, mask=None):
        return self.body(pixels)


FEEDS = {
    "tensor": lambda x: (x, None),
    "tuple": lambda x: ((x, "label"), None),
    "list": lambda x: ([x], None),
    "dict": lambda x: ({"pixels": x, "mask": None}, None),
    "function": lambda x: ({"deep": [x]}, lambda model, batch: model(batch["deep"][0])),
}


@pytest.mark.parametrize("shape", FEEDS)
def test_statistics_are_means_over_batches_at_the_clean_weights(shape):
    model = Keywords(normed())
    optimizer = NVRMSGD(model.parameters(), lr=0.01, b=0.5)
    data = torch.randn(6, 16, 4)
    for x in data:
        model(x).square().sum().backward()
        optimizer.step()
    noisy = weights(model)
    model.body[2].eval()  # a mode of its own
    fed = [FEEDS[shape](x) for x in data]
    batches = (batch for batch, _ in fed)
    assert reestimate_batchnorm(model, batches, optimizer=optimizer, feed=fed[0][1]) == 6
    assert same(weights(model), noisy)
    with optimizer.denoised(), torch.no_grad():
        hidden = model.body[0](data)
    norm = model.body[1]
    torch.testing.assert_close(norm.running_mean, hidden.mean((0, 1)))
    torch.testing.assert_close(norm.running_var, hidden.var(1).mean(0))
    assert (norm.momentum, model.body[3].momentum) == (0.3, 0.1)
    assert [m.training for m in model.body] == [True, True, False, True]


def test_statistics_survive_a_failure():
    model = normed()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for batches in ([torch.randn(8, 4), "text"], [], [torch.randn(8, 5)]):
        with pytest.raises((ValueError, RuntimeError)):
            reestimate_batchnorm(model, batches)
        assert same(model.state_dict().values(), before.values())
        assert model[1].momentum == 0.3
        assert model.training
    assert reestimate_batchnorm(nn.Linear(2, 2), [torch.ones(1, 2)]) == 0
    with pytest.raises(ValueError, match="optimizer must be one of neuvar's, got SGD"):
        reestimate_batchnorm(model, [], optimizer=torch.optim.SGD(model.parameters()))


def test_momentum_goes_on_as_before():
    model = normed()
    reestimate_batchnorm(model, torch.randn(5, 16, 4))
    reestimate_batchnorm(model, torch.randn(5, 16, 4))
    before = model[1].running_mean.clone()
    x = torch.randn(16, 4)
    model(x)
    expected = 0.7 * before + 0.3 * model[0](x).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected.detach())
