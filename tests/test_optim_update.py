"""The update is the paper's, and the clean weights are exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import mse_loss

from neuvar import NVRM, NVRMSGD, NVRMAdam, NVRMAdamW
from tests.toy import backward, batch, clean, epsilon, network, same, train, weights

F64 = torch.float64


def naive_nvrm_sgd(model, noise, *, lr, momentum):
    """Algorithm 1, written out: the noise moves by its change, and is subtracted at the end."""
    params = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in params]
    before = [torch.zeros_like(p) for p in params]
    for step, eps in enumerate(noise):
        x, y = batch(step, F64)
        gradients = torch.autograd.grad(mse_loss(model(x), y), params)
        with torch.no_grad():
            for p, g, v, new, old in zip(params, gradients, velocity, eps, before, strict=True):
                v.mul_(momentum).add_(g)
                p -= lr * v
                p += new - old
        before = eps
    with torch.no_grad():
        for p, eps in zip(params, before, strict=True):
            p -= eps
    return weights(model)


def naive_nvrm_adam(model, noise, *, lr, betas=(0.9, 0.999), tiny=1e-8):
    """Adam with the coloured lines of Algorithm 1 added, written out."""
    params = list(model.parameters())
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    before = [torch.zeros_like(p) for p in params]
    for step, eps in enumerate(noise):
        x, y = batch(step, F64)
        gradients = torch.autograd.grad(mse_loss(model(x), y), params)
        with torch.no_grad():
            for k, (p, g) in enumerate(zip(params, gradients, strict=True)):
                first[k] = betas[0] * first[k] + (1 - betas[0]) * g
                second[k] = betas[1] * second[k] + (1 - betas[1]) * g * g
                m = first[k] / (1 - betas[0] ** (step + 1))
                v = second[k] / (1 - betas[1] ** (step + 1))
                p -= lr * m / (v.sqrt() + tiny)
                p += eps[k] - before[k]
        before = eps
    with torch.no_grad():
        for p, eps in zip(params, before, strict=True):
            p -= eps
    return weights(model)


def recorded(model, optimizer, steps):
    """Train, and return the noise of every step and the clean weights at the end."""
    noise = []
    for step in range(steps):
        train(model, optimizer, [step])
        noise.append(epsilon(model, optimizer))
    return noise, clean(model, optimizer)


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("sampler", ["table", "fresh"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_follows_the_paper(mode, sampler, momentum):
    model = network(dtype=F64)
    reference = copy.deepcopy(model)
    optimizer = NVRMSGD(
        model.parameters(), lr=0.05, momentum=momentum, b=0.1, mode=mode, sampler=sampler
    )
    noise, found = recorded(model, optimizer, 200)
    expected = naive_nvrm_sgd(reference, noise, lr=0.05, momentum=momentum)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("family", ["gaussian", "laplace", "uniform"])
def test_adam_follows_the_paper(mode, family):
    model = network(dtype=F64)
    reference = copy.deepcopy(model)
    optimizer = NVRMAdam(model.parameters(), lr=1e-2, b=0.1, mode=mode, noise=family)
    noise, found = recorded(model, optimizer, 200)
    expected = naive_nvrm_adam(reference, noise, lr=1e-2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_acts_on_the_clean_weights(decoupled):
    model = network(dtype=F64)
    rate, decay = 0.1, 0.3
    if decoupled:
        optimizer = NVRMAdamW(model.parameters(), lr=rate, weight_decay=decay, b=0.2)
    else:
        optimizer = NVRMSGD(model.parameters(), lr=rate, weight_decay=decay, b=0.2)
    train(model, optimizer, range(3))
    before = clean(model, optimizer)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if decoupled:
        for state in optimizer.inner.state.values():
            state["exp_avg"].zero_()
    optimizer.step()
    for old, new in zip(before, clean(model, optimizer), strict=True):
        torch.testing.assert_close(new, old * (1 - rate * decay), rtol=0, atol=1e-15)


INNER = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam, for-loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
}
inner = pytest.mark.parametrize("name", INNER)


@inner
@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_without_noise_it_is_the_inner_optimizer(name, mode):
    plain, model = network(), network()
    train(plain, INNER[name](plain.parameters()), range(60))
    train(model, NVRM(INNER[name](model.parameters()), b=0, mode=mode), range(60))
    assert same(weights(model), weights(plain))


def follow(name, steps, dtype=torch.float32, **options):
    """Train beside a shadow: a plain copy that is given the same gradients."""
    model = network(dtype=dtype)
    shadow = copy.deepcopy(model)
    optimizer = NVRM(INNER[name](model.parameters()), b=0.05, **options)
    other = INNER[name](shadow.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        other.step()
        yield model, optimizer, shadow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_weights_equal_a_shadow_to_the_bit(dtype):
    for model, optimizer, shadow in follow("Adam", 1000, dtype):
        assert same([optimizer.clean_copy(p) for p in model.parameters()], weights(shadow))
    assert same(clean(model, optimizer), weights(shadow))
    assert not same(weights(model), weights(shadow))


@inner
@pytest.mark.parametrize("sampler", ["table", "fresh"])
def test_every_inner_optimizer_updates_the_clean_weights(name, sampler):
    for model, optimizer, shadow in follow(name, 30, sampler=sampler):
        assert same(clean(model, optimizer), weights(shadow))
    for p, q, eps in zip(
        model.parameters(), weights(shadow), epsilon(model, optimizer), strict=True
    ):
        torch.testing.assert_close(p.detach(), q + eps)


def test_replay_drifts_by_at_most_a_unit_in_the_last_place_a_step():
    """The documented bound, over 1000 steps with a rate too small to hide behind."""
    steps, lr = 1000, 1e-12
    model = network()
    start = weights(model)
    optimizer = NVRMSGD(model.parameters(), lr=lr, b=0.05, mode="replay")
    largest = [torch.zeros_like(p) for p in start]
    for step in range(steps):
        train(model, optimizer, [step])
        sizes = [p.abs() + e.abs() for p, e in zip(start, epsilon(model, optimizer), strict=True)]
        largest = [torch.maximum(a, b) for a, b in zip(largest, sizes, strict=True)]
    for old, new, size in zip(start, clean(model, optimizer), largest, strict=True):
        unit = size * 2**-23
        assert ((new - old).abs() <= steps * unit).all()
        # The errors are as often up as down, so that they grow like the root of the steps.
        assert ((new - old).abs() / unit).mean() < 2 * steps**0.5
        assert not torch.equal(new, old)


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_looking_does_not_change_training(mode):
    models = network(), network()
    optimizers = [NVRMAdam(m.parameters(), lr=0.01, b=0.05, mode=mode) for m in models]
    for step in range(100):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, [step])
        with optimizers[1].denoised(), optimizers[1].denoised():
            pass
        assert same(*map(weights, models))
