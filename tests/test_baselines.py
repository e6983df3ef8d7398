"""The baselines add the noise that their papers say, with the manners of our own optimizers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from neuvar.baselines import PSGD, SGLD
from neuvar.noise import Draw, standard_noise, whole_slot
from tests.toy import backward, network, same, train, weights


def test_psgd_is_algorithm_2():
    """θ ← θ - η (g + ε), written out, for 100 steps."""
    model = network(dtype=torch.float64)
    expected = weights(model)
    optimizer = PSGD(model.parameters(), lr=0.05, b=0.3, seed=4)
    for step in range(100):
        optimizer.zero_grad()
        backward(model, step)
        start = 0
        for k, p in enumerate(model.parameters()):
            slot = whole_slot(tuple(p.shape), number=k, start=start)
            eps = 0.3 * standard_noise(slot, Draw(step + 1, seed=4)).double()
            expected[k] = expected[k] - 0.05 * (p.grad + eps)
            start += p.numel()
        optimizer.step()
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=0, atol=1e-12)


def test_noise_does_not_enter_gradients_or_momentum():
    model, plain = network(), network()
    optimizer = PSGD(model.parameters(), lr=0.05, momentum=0.9, b=0.3)
    other = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        before = [p.grad.clone() for p in model.parameters()]
        for p, g in zip(plain.parameters(), before, strict=True):
            p.grad = g.clone()
        optimizer.step()
        other.step()
        assert same([p.grad for p in model.parameters()], before)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        a, b = optimizer.inner.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]
        assert torch.equal(a, b)


def test_sgld_samples_a_known_gaussian():
    """On ½ k θ² the chain's variance is 2T / (k (2 - η k)), in closed form."""
    k, lr, temperature, n = 2.0, 0.25, 0.5, 20_000
    theta = nn.Parameter(torch.zeros(n, dtype=torch.float64))
    optimizer = SGLD([theta], lr=lr, temperature=temperature, seed=1)
    for _ in range(60):
        theta.grad = k * theta.detach()
        optimizer.step()
    variance = 2 * temperature / (k * (2 - lr * k))
    assert theta.mean().abs() < 4 * math.sqrt(variance / n)
    assert abs(theta.var() / variance - 1) < 4 * math.sqrt(2 / n)


@pytest.mark.parametrize(
    "make", [lambda p: PSGD(p, 0.1, b=0), lambda p: SGLD(p, 0.1, temperature=0)]
)
def test_without_noise_they_are_sgd(make):
    model, plain = network(), network()
    train(model, make(model.parameters()), range(20))
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), range(20))
    assert same(weights(model), weights(plain))


@pytest.mark.parametrize("sampler", ["table", "fresh"])
def test_resume_is_exact_and_the_global_generator_untouched(sampler):
    model = network()
    state = torch.get_rng_state()
    optimizer = PSGD(model.parameters(), 0.1, momentum=0.9, b=0.2, sampler=sampler)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(5, 9))
    assert torch.equal(torch.get_rng_state(), state)
    other = network(1)
    resumed = PSGD(other.parameters(), 0.5, b=0.7)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, range(5, 9))
    assert same(weights(other), weights(model))


def test_steps_that_are_none_add_nothing():
    model = network()
    optimizer = PSGD(model.parameters(), 0.1, b=0.2)
    before = weights(model)
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert same(weights(model), before)
    optimizer.param_groups[0]["lr"] = 0.1
    model[0].weight.grad = None
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True)]
    assert changed == [False, True, True, True]


def test_one_training_loop_serves_all():
    model = network()
    optimizer = PSGD(model.parameters(), 0.1, b=0.2)
    train(model, optimizer, range(2))
    before = weights(model)
    optimizer.eval()
    with optimizer.denoised():
        assert same(weights(model), before)
    optimizer.train()
    assert same(weights(model), before)


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="b must be a finite number >= 0, got -1"):
        PSGD(network().parameters(), 0.1, b=-1)
    with pytest.raises(ValueError, match="temperature must be a finite number >= 0, got nan"):
        SGLD(network().parameters(), 0.1, temperature=math.nan)
