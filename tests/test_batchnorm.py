"""Statistics of batch normalization are estimated at the clean weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuvar import NVRMSGD, reestimate_batchnorm
from tests.toy import same, weights


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
@pytest.mark.parametrize("known", [True, False])
def test_statistics_are_means_over_batches_at_the_clean_weights(shape, known):
    model = Keywords(normed())
    optimizer = NVRMSGD(model if known else model.parameters(), lr=0.01, b=0.5)
    data = torch.randn(6, 16, 4)
    for x in data:
        model(x).square().sum().backward()
        optimizer.step()
    noisy = weights(model)
    model.body[2].eval()  # a mode of its own
    fed = [FEEDS[shape](x) for x in data]
    batches = (batch for batch, _ in fed)
    assert reestimate_batchnorm(model, batches, feed=fed[0][1]) == 6
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


def test_momentum_goes_on_as_before():
    model = normed()
    reestimate_batchnorm(model, torch.randn(5, 16, 4))
    reestimate_batchnorm(model, torch.randn(5, 16, 4))
    before = model[1].running_mean.clone()
    x = torch.randn(16, 4)
    model(x)
    expected = 0.7 * before + 0.3 * model[0](x).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected.detach())
