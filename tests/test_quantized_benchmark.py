"""The benchmark of quantization: training, quantizers and tables."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import moved_weights
import neuvar
import quantized

DATA = torch.rand(40, 784, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10


def line(method, seed, clean, rounded, real):
    simulated = {f"{by}, {bits} bits": rounded for by in ("tensor", "row") for bits in (8, 4, 3, 2)}
    last = {"clean": clean, "simulated": simulated}
    last["real"] = dict.fromkeys(quantized.QUANTIZERS, real)
    return {"run": {"method": method, "seed": seed}, "last": last}


@pytest.mark.parametrize("name", quantized.METHODS)
def test_every_training_gives_plain_linear_layers(name, monkeypatch):
    for module in (quantized, moved_weights):
        monkeypatch.setattr(module, "EPOCHS", 2)
    model = quantized.train(*quantized.METHODS[name], DATA, 0, width=32)
    assert [type(layer) for layer in model] == 2 * [nn.Linear, nn.ReLU] + [nn.Linear]
    assert not model.training
    start = moved_weights.network({}, 0, width=32)
    assert not torch.equal(model[0].weight, start[0].weight)


def test_rounding_noise_follows_the_weights(monkeypatch):
    monkeypatch.setattr(quantized, "EPOCHS", 2)
    updates, update = [], neuvar.optim.update_rounding_noise

    def watched(optimizer):
        before = optimizer.param_groups[0]["b"]
        update(optimizer)
        updates.append((before, optimizer.param_groups[0]["b"]))

    monkeypatch.setattr(neuvar.optim, "update_rounding_noise", watched)
    quantized.train_with_rounding_noise(3, DATA, 0, width=8)
    assert len(updates) == 2
    assert all(before != after for before, after in updates)


def test_tables():
    lines = [line("Adam", seed, 0.96, 0.94, 0.95 + 0.001 * seed) for seed in range(3)]
    lines += [line("rounding in training, 2 bits", 0, 0.9, 0.1, 0.9)]
    lines += [{"run": {"method": "dropout 0.5", "seed": 0}, "last": {}}]
    text = "\n".join(quantized.table(lines))
    assert "| Adam | 3 | 96.0 ± 0.0 | -0.90 (-1.15 to -0.65) |" in text
    assert "| torchao, 4 bits | 4 bits, by row | 3 | +1.10 | +1.20 | 1 | +80.00 | +80.00 |" in text
    assert "| rounding in training, 2 bits | 1 | 90.0 | 10.0 |" in text
    assert "| dropout" not in text


class TestTorchao:
    @pytest.fixture(autouse=True)
    def torchao(self):
        pytest.importorskip("torchao")

    @pytest.mark.parametrize("name", quantized.QUANTIZERS)
    def test_a_copy_is_quantized(self, name):
        model = moved_weights.network({}, 0, width=32)
        before = [p.clone() for p in model.parameters()]
        with torch.no_grad():
            outputs, own = model(DATA[0]), quantized.quantized(model, name)(DATA[0])
        bits = quantized.QUANTIZERS[name][1]
        assert not torch.equal(own, outputs)
        assert (own - outputs).std() / outputs.std() < {8: 0.05, 4: 0.3, 3: 0.6, 2: 0.9}[bits]
        assert all(map(torch.equal, before, model.parameters()))

    @pytest.mark.parametrize("bits", [4, 3, 2])
    def test_its_steps_are_smaller_than_ours_and_one_level_is_more(self, bits):
        layer = moved_weights.network({}, 0, width=32)[0]
        own = quantized.quantized(nn.Sequential(layer), f"torchao, {bits} bits")[0]
        step = layer.weight.detach().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        levels = own.weight.dequantize() / step
        assert torch.allclose(levels, levels.round(), atol=1e-3)
        assert levels.min() > low - 0.1
        assert levels.max() < high + 0.1
        assert ((own.weight.dequantize() - layer.weight).abs() / step).max() < 0.501
