"""An optimizer that knows its model: noise in training passes, clean weights at any other time."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import neuvar
from neuvar import NVRM, NVRMSGD, NVRMAdam, NVRMAdamW
from neuvar.noise import Draw, standard_noise, whole_slot
from neuvar.optim import forward
from tests.toy import backward, batch, clean, network, same, train, weights

modes = pytest.mark.parametrize("mode", ["exact", "replay"])
# The compiler looks at .grad of every tensor, and hides the warning unless it is an error.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
WRAPS = {"parallel": nn.DataParallel, "compiled": lambda m: torch.compile(m, backend="eager")}


def known(mode="exact", steps=3, **options):
    """A network and an optimizer created with it, which has noise after some steps."""
    model = network()
    optimizer = NVRMSGD(model, lr=0.1, momentum=0.9, mode=mode, **({"b": 0.1} | options))
    train(model, optimizer, range(steps))
    return model, optimizer


def noisy_twin(model, optimizer):
    """A copy of the model with the noise on record added to its weights."""
    twin, start = copy.deepcopy(model), 0
    (group,) = optimizer.param_groups
    draw = Draw(*group["drawn"])
    with torch.no_grad():
        for index, p in enumerate(twin.parameters()):
            slot = whole_slot(tuple(p.shape), number=index, start=start)
            if draw.number:
                torch.add(p, standard_noise(slot, draw), alpha=draw.sign * group["b"], out=p)
            p.grad = None
            start += p.numel()
    return twin


def by_hand(model, optimizer, step):
    """Gradients of a step at the clean weights plus the noise on record."""
    twin = noisy_twin(model, optimizer)
    backward(twin, step)
    return [p.grad for p in twin.parameters()]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


class Mixed(nn.Module):
    """Layers whose weights autograd keeps by reference, some used in two places."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, tokens):
        x = self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.lstm(self.norm(x) * self.scale)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.inner(x)
        return x.mean(1) @ self.words.weight.T  # a weight of a part, outside of its forward pass


def mixed(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Mixed().double()
    return model, NVRMAdam(model, lr=0.01, **({"b": 0.1} | options))


def tokens(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (4, 5), generator=generator)


def mixed_loss(model, step=0):
    x = tokens(step)
    return cross_entropy(model(x), x[:, 0])


def mixed_step(model, optimizer, step):
    optimizer.zero_grad()
    mixed_loss(model, step).backward()
    optimizer.step()


# The update.


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_perturbed_weights(mode, dtype):
    if mode == "replay" and dtype is torch.bfloat16:
        dtype = torch.float64
    model = network(dtype=dtype)
    optimizer = NVRMSGD(model, lr=0.1, b=0.1, mode=mode)
    for step in range(4):
        expected = by_hand(model, optimizer, step)
        before = weights(model)
        optimizer.zero_grad()
        backward(model, step)
        assert same(gradients(model), expected)
        if step == 0:  # the first one is taken at the initial weights
            plain = network(dtype=dtype)
            backward(plain, 0)
            assert same(gradients(plain), expected)
        optimizer.step()
        if dtype is not torch.bfloat16:
            moved = [p - 0.1 * g for p, g in zip(before, expected, strict=True)]
            torch.testing.assert_close(weights(model), moved, rtol=1e-6, atol=1e-6)
    assert {p.dtype for p in model.parameters()} == {dtype}


@modes
@pytest.mark.parametrize("named", [NVRMSGD, NVRMAdam, NVRMAdamW])
@pytest.mark.parametrize("sampler", ["table", "fresh"])
def test_both_ways_to_make_an_optimizer_train_alike(mode, named, sampler):
    options = {"lr": 0.01, "weight_decay": 0.1, "b": 0.1, "mode": mode, "sampler": sampler}
    model, other = network(), network()
    optimizer, second = named(model, **options), named(other.parameters(), **options)
    train(model, optimizer, range(10))
    train(other, second, range(10))
    if mode == "exact":
        assert same(weights(model), clean(other, second))
        assert not same(weights(model), weights(other))
    torch.testing.assert_close(weights(model), clean(other, second), rtol=1e-5, atol=1e-5)


def test_no_noise_is_the_inner_optimizer_to_the_bit():
    (model, _), plain = mixed(b=0.0), mixed(b=0.0)[0]
    optimizer = NVRMAdam(model, lr=0.01, b=0.0)
    inner = torch.optim.Adam(plain.parameters(), lr=0.01, fused=True)
    for step in range(5):
        mixed_step(model, optimizer, step)
        mixed_step(plain, inner, step)
    assert same(weights(model), weights(plain))


def test_layers_that_autograd_keeps_by_reference():
    model, optimizer = mixed()
    other, _ = mixed()
    second = NVRMAdam(other.parameters(), lr=0.01, b=0.1)
    for step in range(5):
        mixed_step(model, optimizer, step)
        mixed_step(other, second, step)
    assert same(weights(model), clean(other, second))


def test_noise_that_wraps_around_the_table(monkeypatch):
    monkeypatch.setattr(neuvar.noise, "TABLE_SIZE", 64)
    options = {"lr": 0.1, "b": 0.1}
    model, other = network(), network()
    optimizer, second = NVRMSGD(model, **options), NVRMSGD(other.parameters(), **options)
    train(model, optimizer, range(8))
    train(other, second, range(8))
    assert same(weights(model), clean(other, second))


@modes
def test_micro_batches_share_the_noise_of_a_step(mode):
    model, optimizer = known(mode)
    expected = [sum(g) for g in zip(*(by_hand(model, optimizer, k) for k in range(3)), strict=True)]
    optimizer.zero_grad()
    for step in range(3):
        backward(model, step)
    torch.testing.assert_close(gradients(model), expected)


def test_noise_is_made_once_for_a_step():
    model, _optimizer = known()
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
    for _ in range(2):
        backward(model, 0)
    assert len(set(seen)) == 1


def test_the_memory_of_perturbed_weights_is_used_again():
    model, optimizer = known()
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
    train(model, optimizer, range(3))
    assert len(set(seen)) == 1


def test_a_pending_backward_keeps_its_noise_when_new_noise_is_drawn():
    model, optimizer = known()
    optimizer.zero_grad()
    expected = by_hand(model, optimizer, 0)
    inputs, targets = batch(0)
    loss = (model(inputs) - targets).square().mean()
    optimizer.resample()
    model(inputs)  # writes the new noise
    loss.backward()
    assert same(gradients(model), expected)


def test_transforms_of_torch_func_see_the_noise():
    model, optimizer = known()
    inputs, _ = batch(0)
    twin = noisy_twin(model, optimizer)
    outputs = torch.func.vmap(lambda x: model(x[None])[0])(inputs)
    torch.testing.assert_close(outputs, twin(inputs))
    slope = torch.func.grad(lambda x: model(x).sum())(inputs)
    torch.testing.assert_close(slope, torch.func.grad(lambda x: twin(x).sum())(inputs))
    optimizer.zero_grad()
    backward(model, 0)
    assert same(gradients(model), by_hand(model, optimizer, 0))


def test_antithetic_parts_of_a_batch():
    model, optimizer = known()
    optimizer.zero_grad()
    plus = by_hand(model, optimizer, 0)
    backward(model, 0)
    optimizer.resample(antithetic=True)
    minus = by_hand(model, optimizer, 0)
    backward(model, 0)
    torch.testing.assert_close(gradients(model), [a + b for a, b in zip(plus, minus, strict=True)])
    assert not same(plus, minus)


# Clean at rest.


def state(model):
    return [value.clone() for value in model.state_dict().values()]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"neuvar" not in file.getvalue()
    file.seek(0)
    return weights(torch.load(file, weights_only=False))


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return weights(average.module)


LOOKS = {
    "parameters": weights,
    "state_dict": state,
    "state_dict of a part": lambda model: [*state(model[0]), *state(model[2])],
    "deepcopy": lambda model: weights(copy.deepcopy(model)),
    "deepcopy of a part": lambda model: [*weights(copy.deepcopy(model[0])), *weights(model[2])],
    "pickle": saved,
    "pickle of a part": lambda model: [*saved(model[0]), *saved(model[2])],
    "average": averaged,
    "new optimizer": lambda model: [
        p.detach().clone() for p in NVRMSGD(model, lr=0.1, b=0.1).param_groups[0]["params"]
    ],
}
IN_PLACE = ("state_dict", "state_dict of a part")


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("moment", ["rest", "after forward", "after backward", "after eval"])
def test_everybody_sees_clean_weights(look, moment):
    model, optimizer = known()
    theta = weights(model)
    if moment != "rest":
        loss = (model(batch(3)[0]) - batch(3)[1]).square().mean()
        if moment == "after backward":
            loss.backward()
        if moment == "after eval":
            model.eval()(batch(4)[0])
            model.train()
    assert same(LOOKS[look](model), theta)
    assert optimizer.has_noise


@pytest.mark.parametrize("moment", ["rest", "after forward"])
@pytest.mark.parametrize("look", IN_PLACE)
def test_in_place_noise_is_not_in_state_dicts(look, moment):
    model, optimizer = known("replay")
    theta = weights(model)
    if moment != "rest":
        model(batch(3)[0])
        assert not same(weights(model), theta)
    torch.testing.assert_close(LOOKS[look](model), theta, rtol=1e-6, atol=1e-6)
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()
    assert not model._state_dict_hooks


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps, AveragedModel])
def test_models_with_noise_in_place_cannot_be_copied_until_the_step(copying):
    model, optimizer = known("replay")
    copying(model)
    (model(batch(3)[0]) - batch(3)[1]).square().mean().backward()
    with pytest.raises(RuntimeError, match="between a training pass and step"):
        copying(model)
    with optimizer.denoised():
        copying(model)
    optimizer.step()
    copying(model)


@modes
@pytest.mark.parametrize("between", ["eval", "no_grad", "state_dict", "deepcopy", "average", "all"])
def test_what_is_looked_at_in_the_midst_of_a_step_changes_no_gradient(mode, between):
    model, optimizer = mixed(mode=mode)
    twin, other = mixed(mode=mode)
    for step in range(3):
        mixed_step(model, optimizer, step)
        mixed_step(twin, other, step)
    theta = weights(model)
    optimizer.zero_grad()
    loss = mixed_loss(model, 3)
    if between in ("eval", "all"):
        found = model.eval()(tokens(5))
        model.train()
        expected = copy.deepcopy(twin).eval()(tokens(5))
        torch.testing.assert_close(found, expected)
        if mode == "exact":
            assert torch.equal(found, expected)
    if between in ("no_grad", "all"):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(6)), twin(tokens(6)))
    if between in ("state_dict", "all"):
        torch.testing.assert_close(state(model), theta)
    refused = pytest.raises(RuntimeError, match="copied") if mode == "replay" else nullcontext()
    if between in ("deepcopy", "all"):
        with refused:
            copy.deepcopy(model)
    if between in ("average", "all"):
        with refused:
            averaged(model)
    loss.backward()
    optimizer.step()
    mixed_step(twin, other, 3)
    assert same(weights(model), weights(twin))


def test_casts_that_autocast_keeps_are_not_taken_for_clean_weights():
    model, optimizer = known()
    x, y = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = copy.deepcopy(model).eval()(x)
        loss = (model(x) - y).square().mean()
        assert torch.equal(model.eval()(x), expected)
        model.train()
    loss.backward()
    optimizer.step()


MAKERS = {
    "trace": lambda model, x: torch.jit.trace(model.eval(), x),
    "trace in training mode": lambda model, x: torch.jit.trace(model.train(), x),
    "script": lambda model, x: torch.jit.script(model),
    "export": lambda model, x: torch.export.export(model.eval(), (x,)).module(),
    "export in training mode": lambda model, x: torch.export.export(model, (x,)).module(),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_exported_modules_are_clean_and_stay_so(kind):
    model, optimizer = known()
    x, _ = batch(0)
    expected = copy.deepcopy(model).eval()(x)
    made = MAKERS[kind](model, x)
    model.train()
    model(x).sum().backward()
    with torch.no_grad():  # what fx makes shares the model's layers
        torch.testing.assert_close(made(x), expected)
    assert optimizer.has_noise


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_recurrent_layers_have_clean_weights():
    model = nn.Sequential(nn.LSTM(5, 4))
    optimizer = NVRMSGD(model, lr=0.1, b=0.3)
    x = torch.ones(3, 2, 5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x)[0].sum().backward()
        optimizer.step()
    model(x)
    assert torch.equal(torch.jit.script(model)(x)[0], copy.deepcopy(model).eval()(x)[0])
    assert all(any(w is p for p in model.parameters()) for w in model[0]._flat_weights)


def test_fake_tensors_leave_nothing_behind():
    model, optimizer = known()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(2, 5))
    expected = by_hand(model, optimizer, 3)
    optimizer.zero_grad()
    backward(model, 3)
    assert same(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_and_lazy_modules_are_refused():
    with pytest.raises(ValueError, match="model has scripted parts"):
        NVRMSGD(nn.Sequential(torch.jit.script(network())), lr=0.1, b=0.1)
    with pytest.raises(ValueError, match="parameter 0 is not initialized; run the model once"):
        NVRMSGD(nn.Sequential(nn.LazyLinear(3)), lr=0.1, b=0.1)


def test_copies_are_free_of_the_optimizer():
    model, optimizer = known()
    keys = [list(module.__dict__) for module in network().modules()]
    for twin in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert list(twin.__dict__) == keys[0]
    assert [list(module.__dict__) for module in copy.deepcopy(model).modules()] == keys
    ref = weakref.ref(copy.deepcopy(model))
    assert ref() is None  # no cycle keeps a copy alive
    twin = copy.deepcopy(model)
    before = twin(batch(0)[0])
    train(model, optimizer, range(3))
    assert torch.equal(twin(batch(0)[0]), before)


def test_a_model_and_its_optimizer_are_copied_together():
    model, optimizer = known()
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, other, range(3, 6))
    assert same(weights(model), weights(twin))
    expected = by_hand(twin, other, 0)
    other.zero_grad()
    backward(twin, 0)
    assert same(gradients(twin), expected)
    optimizer.eval()
    model, optimizer = copy.deepcopy((model, optimizer))
    assert not is_noisy(model, optimizer)


def test_a_model_that_holds_its_optimizer_is_copied():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.optimizer = NVRMSGD(self, lr=0.1, b=0.1)

        def forward(self, x):
            return self.net(x)

    agent = Agent()
    train(agent, agent.optimizer, range(3))
    twin = copy.deepcopy(agent)
    train(agent, agent.optimizer, range(3, 6))
    train(twin, twin.optimizer, range(3, 6))
    assert same(weights(agent), weights(twin))
    assert is_noisy(twin.net, twin.optimizer)


# When noise is on.


def is_noisy(model, optimizer, call=None):
    """Whether a pass of the model sees noise; it leaves no gradients."""
    x, _ = batch(0)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    return not torch.equal((call or model)(x), expected)


def test_modes():
    model, optimizer = known()
    assert is_noisy(model, optimizer)
    with torch.no_grad():
        assert not is_noisy(model, optimizer)
    with torch.inference_mode():
        assert not is_noisy(model, optimizer)
    assert not is_noisy(model.eval(), optimizer)
    model[2].train()  # a head that is trained on top of layers in evaluation mode
    assert is_noisy(model, optimizer)
    model.eval()
    model[1].train()  # as for dropout that stays on at test time
    assert not is_noisy(model, optimizer)
    model.train()
    with optimizer.denoised():
        assert not is_noisy(model, optimizer)
        with optimizer.perturbed():
            assert not is_noisy(model, optimizer)
    optimizer.eval()
    assert not is_noisy(model, optimizer)
    optimizer.train()
    assert is_noisy(model, optimizer)
    with optimizer.perturbed(), torch.no_grad():
        assert is_noisy(model.eval(), optimizer)
    assert not is_noisy(model, optimizer)


@modes
def test_perturbed_shows_the_noise_of_the_next_gradient(mode):
    model, optimizer = known(mode)
    theta, (x, _) = weights(model), batch(0)
    twin = noisy_twin(model, optimizer)
    with torch.no_grad(), optimizer.perturbed():
        assert torch.equal(model.eval()(x), twin(x))
    torch.testing.assert_close(weights(model), theta, rtol=1e-6, atol=1e-6)


@modes
def test_parts_are_called_directly(mode):
    model, optimizer = known(mode)
    expected = by_hand(model, optimizer, 4)
    optimizer.zero_grad()
    x, y = batch(4)
    (model[2](model[1](model[0](x))) - y).square().mean().backward()
    assert same(gradients(model), expected)


@pytest.mark.parametrize("own", [True, False])
def test_functional_call(own):
    model, optimizer = known()
    expected = by_hand(model, optimizer, 4)
    optimizer.zero_grad()
    params = dict(model.named_parameters())
    if not own:  # tensors of somebody else's carry no noise
        params = {name: p.detach().clone() for name, p in params.items()}
    x, y = batch(4)
    (torch.func.functional_call(model, params, x) - y).square().mean().backward() if own else None
    if own:
        assert same(gradients(model), expected)
    else:
        found = torch.func.functional_call(model, params, x)
        assert torch.equal(found, copy.deepcopy(model)(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outermost", "sequential"])
@pytest.mark.parametrize("between", ["nothing", "eval", "zero_grad", "another"])
def test_gradient_checkpointing(reentrant, where, between):
    """Layers run again in the backward pass see the noise that they saw in the forward pass."""

    class Checkpointed(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.body, self.on = network(), on

        def forward(self, x):
            if self.on and where == "inside":
                return checkpoint(self.body, x, use_reentrant=reentrant)
            if self.on and where == "sequential":
                return checkpoint_sequential(self.body, 2, x, use_reentrant=reentrant)
            return self.body(x)

    found = []
    for on in (False, True):
        model = Checkpointed(on)
        optimizer = NVRMSGD(model, lr=0.1, b=0.1)
        for step in range(4):
            x, y = batch(step)
            x.requires_grad_()
            model.zero_grad()
            outermost = on and where == "outermost"
            scores = checkpoint(model, x, use_reentrant=reentrant) if outermost else model(x)
            loss = (scores - y).square().mean()
            if between == "eval":
                model.eval()
            elif between == "zero_grad":
                optimizer.zero_grad()
            elif between == "another":
                other = NVRMSGD(model, lr=0.1, b=0.1, seed=5)
            loss.backward()
            if between == "another":
                del other
            model.train()
            optimizer.step()
        found.append(weights(model))
    assert same(*found)


def test_parametrized_and_normalized_weights():
    parametrizations = torch.nn.utils.parametrizations
    for wrap in (parametrizations.weight_norm, parametrizations.orthogonal):
        found = []
        for with_model in (True, False):
            model = network()
            torch.manual_seed(0)
            model[0] = wrap(model[0])
            params = model if with_model else model.parameters()
            optimizer = NVRMSGD(params, lr=0.1, b=0.05)
            train(model, optimizer, range(4))
            with optimizer.denoised():
                found.append(weights(model))
        assert same(*found)


@modes
def test_frozen_weights_carry_no_noise(mode):
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = NVRMSGD(model, lr=0.1, b=0.1, mode=mode)
    train(model, optimizer, range(2))
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight is frozen))
    frozen = model[0].weight
    backward(model, 2)
    assert seen == [True]


def test_weights_frozen_in_the_midst_lose_their_noise_at_once():
    model, optimizer = known()
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    x, _ = batch(0)
    assert torch.equal(model[0](x), copy.deepcopy(model[0])(x))
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()


def test_groups_of_a_known_model():
    model = network()
    groups = [{"params": model[0].parameters(), "b": 0.0}, {"params": model[2].parameters()}]
    optimizer = NVRMSGD(groups, lr=0.1, b=0.1, model=model)
    train(model, optimizer, range(2))
    x, _ = batch(0)
    assert torch.equal(model[0](x), copy.deepcopy(model[0])(x))
    hidden = torch.ones(2, 7)
    assert not torch.equal(model[2](hidden), copy.deepcopy(model[2])(hidden))
    head = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter of shape \(2, 3\) that is not in model"):
        optimizer.add_param_group({"params": head.parameters()})
    assert len(optimizer.param_groups) == 2
    model.append(head)
    optimizer.add_param_group({"params": head.parameters()})
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert not torch.equal(head(torch.ones(1, 3)), copy.deepcopy(head)(torch.ones(1, 3)))


@compiles
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("given", ["inner", "wrapped"])
def test_wrapped_models(wrap, given):
    torch._dynamo.reset()
    model, other = network(), network()
    wrapped = WRAPS[wrap](model)
    optimizer = NVRMSGD(model if given == "inner" else wrapped, lr=0.1, b=0.1)
    second = NVRMSGD(other, lr=0.1, b=0.1)
    train(wrapped, optimizer, range(4))
    train(other, second, range(4))
    assert same(weights(model), weights(other))


@compiles
@pytest.mark.parametrize("first", [True, False])
def test_a_model_compiled_in_place(first):
    torch._dynamo.reset()
    model, other = network(), network()
    if first:
        model.compile(backend="eager")
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    if not first:
        model.compile(backend="eager")
    train(model, optimizer, range(4))
    train(other, NVRMSGD(other, lr=0.1, b=0.1), range(4))
    assert same(weights(model), weights(other))
    assert copy.deepcopy(model)(torch.ones(1, 5)).shape == (1, 3)


# Interruptions.


@modes
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "evaluation"])
def test_interruptions(mode, error, when):
    model, optimizer = known(mode)
    theta = weights(model)

    def fail(*_):
        raise error

    if when == "backward":
        scores = model(batch(3)[0])
        scores.register_hook(fail)
        with pytest.raises(error):
            scores.sum().backward()
    else:
        if when == "evaluation":
            model(batch(3)[0])
            model.eval()
        handle = model[2].register_forward_hook(fail)
        with pytest.raises(error):
            model(batch(3)[0])
        handle.remove()
        model.train()
    torch.testing.assert_close(state(model), theta, rtol=1e-6, atol=1e-6)
    if mode == "exact":
        assert same(weights(model), theta)
        assert same(weights(copy.deepcopy(model)), theta)
    twin, other = known(mode)
    train(model, optimizer, [3])
    train(twin, other, [3])
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-6, atol=1e-6)
    if mode == "exact":
        assert same(weights(model), weights(twin))


def test_skipped_steps_keep_the_noise():
    model, optimizer = known()
    twin, other = known()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step, broken in ((3, True), (4, False)):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = (model(x) - y).square().mean() * (torch.inf if broken else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    train(twin, other, [4])
    torch.testing.assert_close(weights(model), weights(twin))


def test_gradients_dropped_without_a_step():
    model, optimizer = known()
    twin, other = known()
    backward(model, 9)
    optimizer.zero_grad()
    train(model, optimizer, [3])
    train(twin, other, [3])
    assert same(weights(model), weights(twin))


def test_weights_may_be_written_at_any_time():
    model, optimizer = known()
    optimizer.zero_grad()
    backward(model, 3)
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    expected = by_hand(model, optimizer, 4)
    model.zero_grad()
    backward(model, 4)
    assert same(gradients(model), expected)
    optimizer.step()
    model.load_state_dict(network(3).state_dict())
    assert same(weights(model), weights(network(3)))


def test_writes_that_leave_no_trace_count_after_the_gradients_are_zeroed():
    model, optimizer = known()
    backward(model, 3)
    for p in model.parameters():
        p.data.fill_(0.25)
    optimizer.zero_grad()
    expected = by_hand(model, optimizer, 4)
    backward(model, 4)
    assert same(gradients(model), expected)
    model[0].weight.data = torch.zeros(7, 5)  # other memory is noticed at once
    expected = by_hand(model, optimizer, 4)
    model.zero_grad()
    backward(model, 4)
    assert same(gradients(model), expected)


def test_a_parameter_that_forward_replaces_stays_replaced():
    class Once(nn.Linear):
        def forward(self, x):
            self.weight = nn.Parameter(torch.zeros(3, 5))
            return super().forward(x)

    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, [0])
    model[1].__class__ = Once
    model(torch.ones(1, 5))
    assert torch.equal(model[1].weight, torch.zeros(3, 5))


@pytest.mark.parametrize("how", ["in place", "rebound"])
def test_a_write_inside_of_forward_is_refused(how):
    class Clamped(nn.Linear):
        def forward(self, x):
            if how == "in place":
                with torch.no_grad():
                    self.weight.clamp_(-0.01, 0.01)
            else:
                self.weight.data = self.weight.data.clamp(-0.01, 0.01)
            return super().forward(x)

    model = nn.Sequential(Clamped(5, 3))
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, [0])
    with pytest.raises(RuntimeError, match=r"forward\(\) wrote to the parameter 'weight'"):
        backward(model, 1)
    assert isinstance(model[0].weight, nn.Parameter)


# Several optimizers, and the end of one.


def test_an_optimizer_that_goes_out_of_scope_leaves_nothing_behind():
    model = network()
    keys = [list(module.__dict__) for module in model.modules()]

    def run():
        optimizer = NVRMSGD(model, lr=0.1, b=0.1)
        train(model, optimizer, range(3))
        return weakref.ref(optimizer)

    ref = run()
    gc.collect()
    assert ref() is None
    assert [list(module.__dict__) for module in model.modules()] == keys
    assert torch.equal(model(batch(0)[0]), copy.deepcopy(model)(batch(0)[0]))


@modes
def test_noise_in_place_ends_with_its_optimizer(mode):
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1, mode=mode)
    train(model, optimizer, range(3))
    theta, noisy = clean(model, optimizer), weights(model)
    del optimizer
    gc.collect()
    assert not same(weights(model), noisy)
    torch.testing.assert_close(weights(model), theta, rtol=1e-6, atol=1e-6)
    if mode == "exact":
        assert same(weights(model), theta)


def inside_vmap(collect):
    torch.func.vmap(lambda x: (collect(), x)[1])(torch.ones(2))


def inside_fake_tensors(collect):
    with FakeTensorMode():  # as while torch.compile traces
        collect()


@modes
@pytest.mark.parametrize(
    "inside", [inside_vmap, inside_fake_tensors, torch.inference_mode()(lambda collect: collect())]
)
def test_noise_in_place_ends_wherever_garbage_is_collected(mode, inside):
    model = network()
    optimizers = [NVRMSGD(model.parameters(), lr=0.1, b=0.1, mode=mode)]
    train(model, optimizers[0], range(3))
    theta = clean(model, optimizers[0])

    def collect():
        optimizers.clear()
        gc.collect()

    inside(collect)
    torch.testing.assert_close(weights(model), theta, rtol=1e-6, atol=1e-6)


def test_weights_that_were_changed_are_left_alone_at_the_end():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    train(model, optimizer, range(3))
    theta = clean(model, optimizer)
    model[0].weight.data.fill_(0.5)
    with torch.no_grad():
        model[2].weight.fill_(0.25)
    del optimizer
    gc.collect()
    assert torch.equal(model[0].weight, torch.full((7, 5), 0.5))
    assert torch.equal(model[2].weight, torch.full((3, 7), 0.25))
    assert torch.equal(model[0].bias, theta[1])


@pytest.mark.parametrize("first_knows", [True, False])
@pytest.mark.parametrize("second_knows", [True, False])
def test_two_optimizers_made_up_front_for_the_same_weights(first_knows, second_knows):
    """The second one goes on from the clean weights of the first, at once and later."""
    model = network()
    first, second = (
        NVRMSGD(model if knows else model.parameters(), lr=0.1, b=0.1, seed=seed)
        for seed, knows in enumerate((first_knows, second_knows))
    )
    train(model, first, range(3))
    theta = clean(model, first)
    optimizer_of_second_task(model, second, theta)
    assert isinstance(model[0].weight, nn.Parameter)
    train(model, first, range(3))


def optimizer_of_second_task(model, second, theta):
    second.zero_grad()
    backward(model, 5)
    grads = gradients(model)
    second.step()
    expected = [p - 0.1 * g for p, g in zip(theta, grads, strict=True)]
    torch.testing.assert_close(clean(model, second), expected, rtol=1e-6, atol=1e-6)


def test_an_added_group_leaves_its_former_optimizer():
    model = network()
    former = NVRMSGD(model[2].parameters(), lr=0.1, b=0.1)
    train(model, former, range(2))
    theta = clean(model, former)
    optimizer = NVRMSGD(model[0].parameters(), lr=0.1, b=0.1, model=model)
    assert not same(weights(model), theta)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert same(weights(model), theta)


def test_the_noise_is_that_of_the_optimizer_in_use():
    model = network()
    first, second = (NVRMSGD(model, lr=0.1, b=0.1, seed=seed) for seed in (1, 2))
    train(model, first, range(3))
    second.zero_grad()
    assert not is_noisy(model, second)  # its first gradient is taken at clean weights
    train(model, second, range(3))
    expected = by_hand(model, second, 4)
    second.zero_grad()
    backward(model, 4)
    assert same(gradients(model), expected)
    first.zero_grad()
    expected = by_hand(model, first, 4)
    backward(model, 4)
    assert same(gradients(model), expected)


def test_noise_ends_where_another_optimizer_takes_over():
    model, optimizer = known()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, plain, [4])
    assert not is_noisy(model, optimizer)
    for use in (optimizer.zero_grad, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        train(model, plain, [5])
        assert not is_noisy(model, optimizer)
        use()
        assert is_noisy(model, optimizer)


def test_two_optimizers_for_two_halves():
    model = network()
    optimizers = [
        NVRMSGD(part.parameters(), lr=0.1, b=0.1, seed=k, model=model)
        for k, part in enumerate((model[0], model[2]))
    ]
    other = network()
    seconds = [
        NVRMSGD(part.parameters(), lr=0.1, b=0.1, seed=k)
        for k, part in enumerate((other[0], other[2]))
    ]
    for step in range(4):
        for net, pair in ((model, optimizers), (other, seconds)):
            for optimizer in pair:
                optimizer.zero_grad()
            backward(net, step)
            for optimizer in pair:
                optimizer.step()
    with seconds[0].denoised(), seconds[1].denoised():
        assert same(weights(model), weights(other))
    del optimizers[0]
    gc.collect()
    assert not torch.equal(model[2](torch.ones(1, 7)), copy.deepcopy(model[2])(torch.ones(1, 7)))


def test_an_optimizer_for_a_part_is_heeded_when_the_whole_is_called():
    model = network()
    whole = NVRMSGD(model[0].parameters(), lr=0.1, b=0.1, seed=1, model=model)
    part = NVRMSGD(model[2], lr=0.1, b=0.1, seed=2)
    other = network()
    seconds = [
        NVRMSGD(other[k].parameters(), lr=0.1, b=0.1, seed=seed) for k, seed in ((0, 1), (2, 2))
    ]
    for step in range(3):
        for net, pair in ((model, (whole, part)), (other, seconds)):
            net.zero_grad()
            backward(net, step)
            for optimizer in pair:
                optimizer.step()
    with seconds[0].denoised(), seconds[1].denoised():
        assert same(weights(model), weights(other))


def test_an_interruption_while_noise_is_made_leaves_parameters_in_place(monkeypatch):
    model, optimizer = known()
    real, calls = forward.add_noise, []

    def interrupted(clean, term, *, out, size):
        calls.append(out)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(clean, term, out=out, size=size)

    monkeypatch.setattr(forward, "add_noise", interrupted)
    theta = weights(model)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0)[0])
    assert same(state(model), theta)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert is_noisy(model, optimizer)


def test_an_interruption_before_an_evaluation_in_the_midst_of_a_step(monkeypatch):
    model, optimizer = known("replay")
    backward(model, 3)
    noisy, real, calls = weights(model), optimizer._weights.peek, []

    def interrupted(p):
        calls.append(p)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(p)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(optimizer._weights, "peek", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0)[0])
    assert same(weights(model), noisy)
    with optimizer.denoised():
        expected = model(batch(0)[0])
    backward(model, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)[0]), expected)
    optimizer.step()


def test_an_inner_optimizer_with_an_optimizer_inside():
    class Twice(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.05)

        def step(self, closure=None):
            self.base.step()
            self.base.step()

    model = network()
    optimizer = NVRM(Twice(model.parameters()), model=model, b=0.1)
    train(model, optimizer, range(2))
    assert is_noisy(model, optimizer)


def test_an_optimizer_around_ours_keeps_the_noise_on():
    class Around(torch.optim.Optimizer):
        def __init__(self, base):
            self.base = base
            super().__init__(base.param_groups, {})

        def step(self, closure=None):
            return self.base.step(closure)

    model, optimizer = known()
    train(model, Around(optimizer), range(2))
    assert is_noisy(model, optimizer)


def test_after_a_write_that_was_refused_the_next_pass_has_the_noise():
    class Rebound(nn.Linear):
        def forward(self, x):
            if getattr(self, "rebinds", False):
                self.weight.data = torch.zeros_like(self.weight)
            return super().forward(x)

    model = nn.Sequential(Rebound(5, 3))
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    expected = by_hand(model, optimizer, 2)
    model[0].rebinds = True
    with pytest.raises(RuntimeError, match="wrote to the parameter"):
        model(batch(2)[0])
    model[0].rebinds = False
    model.zero_grad()
    backward(model, 2)
    assert same(gradients(model), expected)


@pytest.mark.parametrize("inside", ["transform", "inference mode"])
def test_after_an_unusual_pass_the_next_one_has_its_gradients(inside):
    """The two share their perturbed tensors."""
    model, optimizer = known()
    optimizer.zero_grad()
    expected = by_hand(model, optimizer, 3)
    if inside == "transform":
        torch.func.grad(lambda x: model(x).sum())(batch(3)[0])
    else:
        with torch.inference_mode(), torch.enable_grad():
            model(batch(3)[0])
    backward(model, 3)
    assert same(gradients(model), expected)


def test_a_module_may_have_a_child_that_is_none():
    model = network()
    model.register_module("missing", None)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    assert is_noisy(model, optimizer, model)


def test_all_parameters_are_back_if_one_of_two_optimizers_complains():
    class Clamped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(5, 5), Clamped(5, 3))
    pair = [NVRMSGD(part, lr=0.1, b=0.1) for part in model]
    backward(model, 0)
    for optimizer in pair:
        optimizer.step()
    with pytest.raises(RuntimeError, match="wrote to the parameter"):
        backward(model, 1)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all("_call_impl" in module.__dict__ for module in model)


def test_layers_compiled_one_by_one_stay_compiled():
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    model = nn.Sequential(Layer(5, 5), Layer(5, 3))
    for layer in model:
        layer.compile(backend=backend)
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(3))
    assert len(seen) >= 2
    assert is_noisy(model, optimizer)


test_layers_compiled_one_by_one_stay_compiled = compiles(
    test_layers_compiled_one_by_one_stay_compiled
)


def test_a_step_without_gradients_keeps_the_noise_on():
    model, optimizer = known()
    model.zero_grad()
    optimizer.step()
    assert is_noisy(model, optimizer)


def test_a_parametrized_weight_is_clean_at_rest():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight, copy.deepcopy(model)[0].weight)
    assert is_noisy(model, optimizer)


def test_a_weight_parametrized_by_others_is_clean_at_rest():
    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Parameter(torch.ones(n)) for n in ((3, 1), (1, 5)))

        def forward(self, weight):
            return weight + self.left @ self.right

    model = nn.Sequential(nn.Linear(5, 3))
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", LowRank())
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight, copy.deepcopy(model)[0].weight)
    assert is_noisy(model, optimizer)


@modes
def test_the_gradient_of_an_evaluation_in_the_midst_of_a_step(mode):
    """It is that of the clean weights; where noise is in place it is refused."""
    model, optimizer = known(mode)
    twin = copy.deepcopy(model)
    backward(model, 3)
    model.eval()
    x = torch.ones(2, 5, requires_grad=True)
    scores = model(x).sum()
    if mode == "replay":
        with pytest.raises(RuntimeError, match="make the evaluation pass after step"):
            scores.backward()
        return
    scores.backward()
    y = torch.ones(2, 5, requires_grad=True)
    twin(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert optimizer.has_noise


def test_inputs_that_need_gradients_are_no_reason_for_noise():
    model, optimizer = known()
    x = torch.ones(2, 5, requires_grad=True)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert torch.equal(model(x), copy.deepcopy(model)(x))
    with torch.inference_mode(), optimizer.perturbed():
        assert not torch.equal(model(x), copy.deepcopy(model)(x))
    backward(model, 3)


def test_interrupts_at_every_line_of_a_pass_leave_parameters_in_place():
    """Ctrl-C at each line of our own code, one after the other."""
    model, optimizer = known()
    theta, x = weights(model), batch(0)[0]
    for moment in range(10_000):
        count = itertools.count()

        def interrupt(frame, event, argument, count=count, moment=moment):
            if not frame.f_code.co_filename.endswith("optim/forward.py"):
                return None
            if event == "line" and next(count) == moment:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            model(x)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        optimizer.zero_grad()
        model(x)
        assert all(isinstance(p, nn.Parameter) for p in model.parameters()), moment
        assert same(weights(model), theta)
    assert 30 < moment < 5000
    assert is_noisy(model, optimizer)


@modes
def test_a_step_without_a_forward_pass_of_the_model_is_noticed(mode):
    model, optimizer = known(mode)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    sentence = r"no forward pass in training mode; call model.train\(\)"
    with pytest.warns(UserWarning, match=sentence) as found:
        optimizer.step()
    assert found[0].filename == __file__


def test_a_state_keeps_the_shape_of_a_buffer_that_shares_memory_with_a_parameter():
    model = network()
    model.register_buffer("row", model[0].weight.data[0])
    optimizer = NVRMSGD(model, lr=0.1, b=0.1, mode="replay")
    train(model, optimizer, range(2))
    model(batch(0)[0])  # puts the noise on
    assert model.state_dict()["row"].shape == (5,)


def test_an_evaluation_pass_inside_of_an_evaluation_pass_sees_clean_weights():
    class Calls(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.hidden = [other]  # not a submodule

        def forward(self, x):
            return self.hidden[0](self.first(x))

    second = network()
    both = nn.ModuleList([Calls(second), second])
    optimizer = NVRMSGD(both, lr=0.1, b=0.1, mode="replay")
    train(both[0], optimizer, range(2))
    x, y = batch(0)
    with torch.no_grad():
        expected = both.eval()[0](x)
    optimizer.zero_grad()
    loss = (both.train()[0](x) - y).square().mean()
    noisy = weights(both)
    with torch.no_grad():
        torch.testing.assert_close(both.eval()[0](x), expected)
    assert same(weights(both), noisy)
    loss.backward()


def test_the_optimizer_of_a_model_is_found_through_it():
    model, optimizer = known()
    assert neuvar.optimizer_of(model) is optimizer
    assert neuvar.optimizer_of(model[0]) is optimizer
    later = NVRMSGD(model.parameters(), lr=0.1, b=0.1)
    assert neuvar.optimizer_of(model) is later
    with pytest.raises(ValueError, match="no NVRM optimizer"):
        neuvar.optimizer_of(network())


def test_passes_in_another_thread():
    model, optimizer = known()
    expected = by_hand(model, optimizer, 3)
    optimizer.zero_grad()
    thread = threading.Thread(target=backward, args=(model, 3))
    thread.start()
    thread.join()
    assert same(gradients(model), expected)


@pytest.mark.parametrize("threads", [False, True])
def test_another_model_is_trained_in_the_midst_of_a_pass(threads):
    """In another thread, or inside of forward()."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), network()

        def forward(self, x):
            x = self.first(x)
            if threads:
                thread = threading.Thread(target=known)
                thread.start()
                thread.join()
            else:
                known()
            return self.last(x)

    model = Outer()
    optimizer = NVRMSGD(model, lr=0.1, b=0.1)
    train(model, optimizer, range(2))
    expected = by_hand(model, optimizer, 2)
    model.zero_grad()
    backward(model, 2)
    assert same(gradients(model), expected)
    assert not forward._OPEN.frames


def test_an_optimizer_may_be_made_while_another_thread_steps():
    """A step looks at all optimizers."""
    kept = known()
    found = iter(forward.alive(forward.OWNERS))
    next(found)
    kept += known()
    list(found)
    assert kept[3]._weights in forward.alive(forward.OWNERS)


# Checkpoints.


@modes
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("moment", ["rest", "in the midst of a step"])
def test_resume(mode, order, moment):
    model, optimizer = mixed(mode=mode)
    for step in range(3):
        mixed_step(model, optimizer, step)
    optimizer.zero_grad()
    if moment != "rest":
        mixed_loss(model, 3).backward()
    file = io.BytesIO()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    assert not any("clean" in key for entry in states[1]["state"].values() for key in entry)
    twin, other = mixed(mode=mode)
    for name, p in twin.named_parameters():
        torch.nn.init.constant_(p, len(name))
    if order == "model first":
        twin.load_state_dict(states[0])
    other.load_state_dict(states[1])
    if order != "model first":
        twin.load_state_dict(states[0])
    for p, g in zip(twin.parameters(), grads, strict=True):
        p.grad = g
    for net, opt in ((model, optimizer), (twin, other)):
        for step in range(4, 7):
            mixed_loss(net, step).backward()
            opt.step()
            opt.zero_grad()
    torch.testing.assert_close(weights(twin), weights(model), rtol=1e-6, atol=1e-6)
    if mode == "exact" or moment == "rest":
        assert same(weights(twin), weights(model))


def test_states_of_the_two_ways_are_told_apart():
    _model, optimizer = known()
    other = network()
    alone = NVRMSGD(other.parameters(), lr=0.1, momentum=0.9, b=0.1)
    train(other, alone, range(3))
    with pytest.raises(
        ValueError, match="created from parameters alone; create this one in the same"
    ):
        optimizer.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="created from parameters alone, as this one is"):
        alone.load_state_dict(optimizer.state_dict())


def test_loading_its_own_state_changes_nothing():
    model, optimizer = known()
    twin, other = known()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, [3])
    train(twin, other, [3])
    assert same(weights(model), weights(twin))


# Arguments.


def test_bad_input_gets_a_sentence():
    model, other = network(), network()
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got str"):
        NVRM(torch.optim.SGD(model.parameters(), lr=0.1), model="net", b=0.1)
    with pytest.raises(ValueError, match=r"group 0 has a parameter of shape \(7, 5\)"):
        NVRM(torch.optim.SGD(model.parameters(), lr=0.1), model=other, b=0.1)
    with pytest.raises(ValueError, match="the same module as the first argument"):
        NVRMSGD(model, lr=0.1, b=0.1, model=other)
    with pytest.raises(ValueError, match='or b="auto"'):
        NVRMSGD(model, lr=0.1)
    assert all("_call_impl" not in module.__dict__ for module in model.modules())
    NVRMSGD(model, lr=0.1, b=0.1, model=model)


# Fused kernels.


def test_named_optimizers_use_fused_kernels_where_they_can():
    model, optimizer = known()
    assert optimizer.param_groups[0]["fused"]
    assert not NVRMSGD(network(), lr=0.1, b=0.1, foreach=True).param_groups[0]["fused"]
    slow = NVRMAdam(model, b=0.1, fused=False)
    train(model, slow, [0])
    assert slow.param_groups[0]["fused"] is False
    table = nn.Embedding(5, 2, sparse=True)
    sparse = NVRMSGD(table, lr=0.1, b=0.1)
    for _ in range(2):
        sparse.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        sparse.step()
    assert not sparse.param_groups[0]["fused"]


def test_weights_that_join_late_have_a_momentum_of_their_own():
    found = []
    for fused in (None, False):
        model = network()
        optimizer = NVRMSGD(model, lr=0.1, momentum=0.9, b=0.1, fused=fused)
        model[0].requires_grad_(False)
        train(model, optimizer, range(2))
        model[0].requires_grad_(True)
        train(model, optimizer, range(2, 5))
        found.append(weights(model))
    torch.testing.assert_close(*found)


def test_nothing_of_the_global_generator_is_used():
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = network()
    torch.manual_seed(5)
    train(model, NVRMSGD(model, lr=0.1, b=0.1), range(3))
    assert torch.equal(torch.rand(3), expected)
