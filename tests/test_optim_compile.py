"""torch.compile of the model and of the step, with the real compiler.

Compiled code chooses its own instructions, and so rounds in its own way. These tests train by SGD,
which does not amplify that as Adam does: after ten steps it is near 1e-7, far below the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuvar import NVRMSGD
from tests.toy import batch, clean, network, train, weights

pytestmark = [
    pytest.mark.compile,
    # The compiler's own modules use what torch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    # It looks at .grad of every tensor, and hides the warning unless it is an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


OPTIONS = {"lr": 0.05, "momentum": 0.5, "b": 0.05}


class Whole(nn.Module):
    """A class of one's own, whose forward pass is compiled as one graph."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return self.body(x)


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("order", "fullgraph"),
    [("compiled first", False), ("compiled first", True), ("optimizer first", False)],
)
def test_a_compiled_model_trains_and_evaluates(order, fullgraph):
    torch._dynamo.reset()
    model, other = Whole(), Whole()
    plain = NVRMSGD(other.parameters(), **OPTIONS)
    if order == "compiled first":
        compiled = torch.compile(model, fullgraph=fullgraph)
        optimizer = NVRMSGD(compiled, **OPTIONS)
    else:
        optimizer = NVRMSGD(model, **OPTIONS)
        compiled = torch.compile(model)
    counters = torch._dynamo.utils.counters["stats"]
    train(compiled, optimizer, range(3))
    graphs = counters["unique_graphs"]
    assert graphs > 0
    train(compiled, optimizer, range(3, 10))
    assert counters["unique_graphs"] == graphs  # a new draw of noise compiles nothing anew
    train(other, plain, range(10))
    close(weights(model), clean(other, plain))
    x, _ = batch(0)
    close(compiled(x), other(x))
    compiled.eval()
    with plain.denoised():
        close(compiled(x), other(x))


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("known", [True, False])
def test_a_compiled_step_follows_the_plain_one(mode, known):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, other = network(), network()
    optimizer, plain = (
        NVRMSGD(net if known else net.parameters(), **OPTIONS, mode=mode, fused=False)
        for net in (model, other)
    )
    step = torch.compile(optimizer.step)
    for k in range(10):
        x, y = batch(k)
        for net, act, opt in ((model, step, optimizer), (other, plain.step, plain)):
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            act()
        assert optimizer.param_groups[0]["drawn"] == plain.param_groups[0]["drawn"]
        close(weights(model), weights(other))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
