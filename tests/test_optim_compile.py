"""torch.compile of the model and of the step, with the real compiler.

Compiled code chooses its own instructions. So these tests compute in double precision, where the
rounding of a few steps is far below the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuvar import NVRMAdam
from tests.toy import batch, clean, network, train, weights

pytestmark = [
    pytest.mark.compile,
    # The compiler's own modules use what torch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    # It looks at .grad of every tensor, and hides the warning unless it is an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Whole(nn.Module):
    """A class of one's own, whose forward pass is compiled as one graph."""

    def __init__(self):
        super().__init__()
        self.body = network(dtype=torch.float64)

    def forward(self, x):
        return self.body(x)


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("order", "fullgraph"),
    [("compiled first", False), ("compiled first", True), ("optimizer first", False)],
)
def test_a_compiled_model_trains_and_evaluates(order, fullgraph):
    torch._dynamo.reset()
    model, other = Whole(), Whole()
    plain = NVRMAdam(other.parameters(), lr=0.01, b=0.05)
    if order == "compiled first":
        compiled = torch.compile(model, fullgraph=fullgraph)
        optimizer = NVRMAdam(compiled, lr=0.01, b=0.05)
    else:
        optimizer = NVRMAdam(model, lr=0.01, b=0.05)
        compiled = torch.compile(model)
    counters = torch._dynamo.utils.counters["stats"]
    train(compiled, optimizer, range(3))
    graphs = counters["unique_graphs"]
    assert graphs > 0
    train(compiled, optimizer, range(3, 10))
    assert counters["unique_graphs"] == graphs  # a new draw of noise compiles nothing anew
    train(other, plain, range(10))
    close(weights(model), clean(other, plain))
    x, _ = batch(0, torch.float64)
    close(compiled(x), other(x))
    compiled.eval()
    with plain.denoised():
        close(compiled(x), other(x))


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("known", [True, False])
def test_a_compiled_step_follows_the_plain_one(mode, known):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, other = network(dtype=torch.float64), network(dtype=torch.float64)
    optimizer, plain = (
        NVRMAdam(net if known else net.parameters(), lr=0.01, b=0.05, mode=mode, fused=False)
        for net in (model, other)
    )
    step = torch.compile(optimizer.step)
    for k in range(10):
        x, y = batch(k, torch.float64)
        for net, act, opt in ((model, step, optimizer), (other, plain.step, plain)):
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            act()
        assert optimizer.param_groups[0]["drawn"] == plain.param_groups[0]["drawn"]
        # The compiled step has its bias corrections in single precision: 1e-7 of a step of 0.01.
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
