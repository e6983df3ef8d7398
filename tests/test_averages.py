"""Averages of weights are those of the clean weights, without a word to the optimizer."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import neuvar

STEPS = 6
INPUTS = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(32) % 3
KINDS = {"mean": get_swa_multi_avg_fn, "EMA": lambda: get_ema_multi_avg_fn(0.9)}


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def weights_by_hand():
    """θ after each step, from an optimizer that was created from parameters alone."""
    net = make_net()
    optimizer = neuvar.NVRMAdam(net.parameters(), lr=1e-2, b=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(net(INPUTS), LABELS).backward()
        optimizer.step()
        with optimizer.denoised():
            yield [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["after the step", "before the backward pass"])
def test_averages_are_those_of_clean_weights(kind, when):
    net, plain = make_net(), make_net()
    optimizer = neuvar.NVRMAdam(net, lr=1e-2, b=0.1)
    average, expected = (AveragedModel(m, multi_avg_fn=KINDS[kind]()) for m in (net, plain))
    theta = weights_by_hand()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(net(INPUTS), LABELS)
        if when == "before the backward pass":
            average.update_parameters(net)
            expected.update_parameters(plain)
        loss.backward()
        optimizer.step()
        now = next(theta)
        with torch.no_grad():
            for p, value in zip(plain.parameters(), now, strict=True):
                p.copy_(value)
        if when == "after the step":
            average.update_parameters(net)
            expected.update_parameters(plain)
    for own, other in zip(average.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(average.eval()(INPUTS), expected.eval()(INPUTS))
    assert torch.equal(average.train()(INPUTS), expected.train()(INPUTS))
