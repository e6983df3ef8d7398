"""torch.compile of the model and of the step, with the real compiler."""

from __future__ import annotations

import pytest
import torch

import neuvar
from neuvar import NVRMAdam
from tests.toy import batch, clean, network, same, train, weights

pytestmark = [
    pytest.mark.compile,
    # The compiler's own modules use what torch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def test_a_compiled_model_trains_and_evaluates():
    model, other = network(), network()
    optimizer = NVRMAdam(model.parameters(), lr=0.01, b=0.05)
    plain = NVRMAdam(other.parameters(), lr=0.01, b=0.05)
    neuvar.guard(model, optimizer)
    compiled = torch.compile(model)
    train(compiled, optimizer, range(10))
    train(other, plain, range(10))
    for a, b in zip(clean(model, optimizer), clean(other, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    x, _ = batch(0)
    compiled.eval()
    with plain.denoised():
        torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)
    compiled.train()
    torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_a_compiled_step_follows_the_plain_one(mode):
    torch._dynamo.reset()
    model, other = network(), network()
    optimizer = NVRMAdam(model.parameters(), lr=0.01, b=0.05, mode=mode)
    plain = NVRMAdam(other.parameters(), lr=0.01, b=0.05, mode=mode)
    step = torch.compile(optimizer.step)
    for k in range(10):
        x, y = batch(k)
        for net, act, opt in ((model, step, optimizer), (other, plain.step, plain)):
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            act()
        assert optimizer.param_groups[0]["drawn"] == plain.param_groups[0]["drawn"]
        for a, b in zip(weights(model), weights(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not same(weights(model), clean(model, optimizer))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
