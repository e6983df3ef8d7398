"""Rounded, damaged and noisy weights, against what is known of them."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD, NVRMAdam, predict
from neuvar.measures import analog_noise, bit_flips, quantized_copy, rounding, stored_weights
from neuvar.measures.stored_weights import flip_bits
from neuvar.optim import round_weights, rounding_parameters, update_rounding_noise
from tests.landscapes import classes, classifier


def weights(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class OneWeight(nn.Module):
    """Right on class 0 where the weight is above the input, on class 1 elsewhere."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[float(w)]]))

    def forward(self, x):
        gap = self.w[0] - x
        return torch.cat([gap, -gap], 1)


# --- rounding ---


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounded_weights(bits, by):
    w = weights(6, 3, 5)
    largest = w.abs().amax((1, 2), keepdim=True) if by == "row" else w.abs().max()
    step = largest / (2 ** (bits - 1) - 1)
    rounded = round_weights(w, bits, by=by)
    assert ((rounded - w).abs() <= step / 2 + 1e-6).all()
    levels = (rounded / step).round()
    assert torch.allclose(rounded, levels * step)
    assert levels.abs().max() == 2 ** (bits - 1) - 1
    assert torch.allclose(round_weights(rounded, bits, by=by), rounded)
    assert len(levels.unique()) <= 2**bits - 1


def test_rounded_weights_by_hand():
    w = torch.tensor([[0.1, -0.9, 0.5], [8.0, 3.0, -5.0]])
    assert torch.allclose(round_weights(w, 2), torch.tensor([[0.0, 0, 0], [8, 0, -8]]))
    by_row = torch.tensor([[0.0, -0.9, 0.9], [8, 0, -8]])
    assert torch.allclose(round_weights(w, 2, by="row"), by_row)
    assert not round_weights(torch.zeros(2, 3), 4, by="row").any()
    assert round_weights(torch.zeros(0, 3), 4).shape == (0, 3)


def test_accuracy_of_rounded_models():
    model, data = classifier(), classes()
    before = copy.deepcopy(model.state_dict())
    found = rounding(model, data, bits=[8, 4, 2], batch_size=17)
    assert found.parameters == ("0.weight", "4.weight")
    for by in ("tensor", "row"):
        for bits in (8, 4, 2):
            own = copy.deepcopy(model).eval()
            for name in found.parameters:
                p = own.get_parameter(name)
                p.data.copy_(round_weights(p, bits, by=by))
            right = (own(data[0]).argmax(1) == data[1]).sum()
            assert found.accuracies[by][bits].count == int(right)
    clean = (model.eval()(data[0]).argmax(1) == data[1]).sum()
    assert (found.clean.count, found.clean.of) == (int(clean), 60)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "full precision" in str(found)


def test_rounding_that_matters():
    """0.6 beside 1 becomes 1 with two bits, and then it is on the other side of 0.7."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.6], [0.0, 0.0]]))
    x = torch.tensor([[-0.7, 1.0]])  # -0.7 + 0.6 < 0 but -0.7 + 1 > 0
    found = rounding(model, (x, torch.tensor([1])), bits=[2, 8], by="tensor")
    assert (found.accuracies["tensor"][2].value, found.accuracies["tensor"][8].value) == (0, 1)
    assert found.kernels == {}


def test_only_some_parameters_are_rounded():
    model, data = classifier(), classes()
    assert rounding(model, data, bits=[2], parameters=["0.bias"]).parameters == ("0.bias",)


def test_model_is_as_before_after_an_error():
    model, (x, y) = classifier().train(), classes()
    before, calls = copy.deepcopy(model.state_dict()), []

    def feed(model, batch):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return model(batch[0]), batch[1]

    with pytest.raises(KeyboardInterrupt):
        rounding(model, (x, y), bits=[2], feed=feed)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": [1]}, "bits must be an integer from 2 to 16"),
        ({"bits": 1}, "bits must be an integer from 2 to 16"),
        ({"bits": "8"}, "bits must be an integer from 2 to 16, got '8'"),
        ({"bits": []}, "bits must have at least one value"),
        ({"by": "column"}, "by must be one of tensor, row"),
        ({"kernels": 8}, "kernels must be True or False"),
        ({"parameters": []}, "no parameters"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        rounding(classifier(), classes(), **options)


@pytest.mark.parametrize("function", [rounding, bit_flips, analog_noise])
def test_help_lists_every_option_with_its_default(function):
    parameters = inspect.signature(function).parameters
    assert (parameters["batch_size"].default, parameters["confidence"].default) == (1024, 0.95)
    assert "options" not in parameters


def test_one_value_is_as_good_as_a_list():
    model, data = classifier(), classes()
    assert rounding(model, data, bits=3) == rounding(model, data, bits=[3])
    one, many = (bit_flips(model, data, rates=rates, draws=2) for rates in (0.1, [0.1]))
    assert one == many
    one, many = (analog_noise(model, data, scales=scales, draws=2) for scales in (0.1, [0.1]))
    assert one == many


def test_empty_data():
    with pytest.raises(ValueError, match="data is empty"):
        rounding(classifier(), (torch.zeros(0, 5), torch.zeros(0).long()))


def test_options_of_other_measures_are_refused():
    with pytest.raises(TypeError, match="seed"):
        rounding(classifier(), classes(), seed=1)
    with pytest.raises(TypeError, match="sampler"):
        bit_flips(classifier(), classes(), rates=[0.1], sampler="table")


def test_targets_must_be_classes():
    with pytest.raises(ValueError, match="returns logits"):
        rounding(nn.Linear(5, 3), (torch.ones(2, 5), torch.ones(2, 3)))


# --- torch's kernels ---


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_copies_are_close(bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10, bias=False))
    x = torch.randn(30, 5, 10)
    with torch.no_grad():
        plain, rounded = model(x), quantized_copy(model, bits=bits)(x)
    error = float((rounded - plain).norm() / plain.norm())
    assert 1e-4 < error < (0.02 if bits == 8 else 0.15)
    assert type(model[1]) is nn.Linear


def test_four_bits_exactly():
    """Weights on the 16 levels of each group are not changed; groups end at the edge of a row."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(70, 5)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-7, 9, (5, 70), generator=generator) / 4)
        layer.weight[:, ::32], layer.weight[:, 1::32] = -7 / 4, 2.0
        layer.weight[:, 64:] = 0  # in the last group zeros from padding set the range
    x = torch.randn(2, 3, 70, generator=generator)
    with torch.no_grad():
        assert torch.allclose(quantized_copy(layer, bits=4)(x), layer(x), atol=1e-4)


def test_kernels_are_measured():
    model, data = classifier(), classes()
    found = rounding(model, data, bits=[8], kernels=True)
    for bits, own in found.kernels.items():
        outputs = quantized_copy(model.eval(), bits=bits)(data[0])
        assert own.count == int((outputs.argmax(1) == data[1]).sum())
    assert list(found.kernels) == [8, 4]
    assert "torch kernels" in str(found)


def test_kernels_get_batches_on_the_cpu(monkeypatch):
    """The copy is on the CPU, wherever the model is."""
    moved, move = [], stored_weights.to_device

    def recorded(batch, device):
        moved.append(device.type)
        return move(batch, device)

    monkeypatch.setattr(stored_weights, "to_device", recorded)
    rounding(classifier(), classes(), bits=8, by="row", batch_size=30)
    assert moved == []
    rounding(classifier(), classes(), bits=8, by="row", batch_size=30, kernels=True)
    assert moved == ["cpu"] * 4  # two copies, two batches


def test_kernels_leave_other_layers_alone():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2))
    for bits in (8, 4):
        copied = quantized_copy(model, bits=bits)
        assert torch.equal(copied[0].weight, model[0].weight)
        assert type(copied[2]) is not nn.Linear


def test_bad_models_for_kernels():
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        quantized_copy(nn.Conv2d(1, 1, 1), bits=8)
    with pytest.raises(ValueError, match="single precision"):
        quantized_copy(nn.Linear(2, 2).double(), bits=8)
    with pytest.raises(ValueError, match="bits must be one of 8, 4"):
        quantized_copy(nn.Linear(2, 2), bits=3)


# --- bit flips ---


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_share_of_flipped_bits(bits):
    w = weights(40, 50)
    generator = np.random.default_rng(0)
    damaged = flip_bits(w, 0.1, generator, bits=bits)
    changed = (damaged != flip_bits(w, 0, generator, bits=bits)).double().mean()
    assert float(changed) == pytest.approx(1 - 0.9**bits, rel=0.15)
    step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    levels = damaged / step
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert levels.round().min() >= -(2 ** (bits - 1))
    assert levels.round().max() <= 2 ** (bits - 1) - 1


def test_no_flips_is_rounding_and_all_flips_are_the_complement():
    w, generator = weights(4, 5), np.random.default_rng(0)
    assert torch.allclose(flip_bits(w, 0, generator), round_weights(w, 8, by="row"))
    step = w.abs().amax(1, keepdim=True) / 127
    # Flipping all bits of q in two's complement gives -q - 1.
    inverted = flip_bits(w, 1, generator)
    assert torch.allclose(inverted, -round_weights(w, 8, by="row") - step, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flips_of_floating_point_numbers(dtype):
    w, generator = weights(30, 40).to(dtype), np.random.default_rng(0)
    assert torch.equal(flip_bits(w, 0, generator, bits=None), w)
    back = flip_bits(flip_bits(w, 1, generator, bits=None), 1, generator, bits=None)
    assert torch.equal(back, w)
    width = 8 * w.element_size()
    changed = (flip_bits(w, 0.01, generator, bits=None) != w).double().mean()
    assert float(changed) == pytest.approx(1 - 0.99**width, rel=0.25)


def test_accuracy_under_bit_flips():
    model, data = classifier(), classes()
    before = copy.deepcopy(model.state_dict())
    found = bit_flips(model, data, rates=[0, 0.3], draws=8, seed=1)
    assert found.accuracies[0].stderr == 0
    assert found.accuracies[1].mean < found.accuracies[0].mean
    assert (found.levels, found.draws, found.clean.of) == ((0, 0.3), 8, 60)
    assert found == bit_flips(model, data, rates=[0, 0.3], draws=8, seed=1)
    other = bit_flips(model, data, rates=[0, 0.3], draws=8, seed=2)
    assert other.accuracies[1] != found.accuracies[1]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "bit flips in 8-bit weights" in str(found)


def damaged_weights(**options):
    """The weights of two equal layers, as each evaluation of bit_flips sees them."""
    model, seen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), []
    model[1].load_state_dict(model[0].state_dict())

    def feed(model, batch):
        seen.append([layer.weight.detach().clone() for layer in model])
        return model(batch[0]), batch[1]

    data = torch.ones(2, 6), torch.zeros(2).long()
    bit_flips(model, data, **{"draws": 2, **options}, feed=feed)
    return model[0].weight.detach(), seen[1:]  # the first is without faults


def test_flips_differ_between_layers_and_draws():
    clean, (one, other) = damaged_weights(rates=0.2)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], clean)


@pytest.mark.parametrize("by", ["row", "tensor"])
@pytest.mark.parametrize("bits", [4, 8])
def test_stored_integers_share_a_step_by_row_or_by_tensor(by, bits):
    clean, seen = damaged_weights(rates=0, by=by, bits=bits)
    for own in seen:
        assert torch.allclose(own[0], round_weights(clean, bits, by=by))


def test_outputs_that_are_not_numbers_count_as_wrong():
    def feed(model, batch):
        scores = model(batch[0])
        scores[::2, 0] = math.nan  # argmax takes it for the largest
        return scores, torch.zeros_like(batch[1])

    model, data = nn.Linear(5, 3), classes()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([100.0, 0, 0]))
    assert rounding(model, data, bits=[8], feed=feed).clean.value == 0.5
    found = bit_flips(model, data, rates=[0.2], bits=None, draws=8)  # weights become huge, or nan
    assert 0 <= found.accuracies[0].mean < 0.7


# --- analog noise ---


@pytest.mark.parametrize("kind", ["multiplicative", "additive"])
def test_analog_noise_exactly(kind):
    """One weight w = 2 is right on x = 1 while w(1 + σz) > 1: with probability Φ(1 / 2σ)."""
    data, sigma = (torch.ones(1, 1), torch.tensor([0])), 0.4
    found = analog_noise(OneWeight(2), data, scales=[0, sigma], kind=kind, draws=2000)
    truth = 0.5 * math.erfc(-1 / (2 * sigma) / math.sqrt(2))
    assert found.accuracies[0].mean == 1
    assert abs(found.accuracies[1].mean - truth) < 4 * found.accuracies[1].stderr
    assert found.kind.startswith(kind)


def test_additive_noise_is_relative_to_the_largest_weight_of_each_tensor():
    model, seen = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 2)), []
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0

    def feed(model, batch):
        seen.append([layer.weight.detach().clone() for layer in model])
        return model(batch[0]), batch[1]

    data = torch.ones(2, 40), torch.zeros(2).long()
    analog_noise(model, data, scales=0.1, kind="additive", draws=2, feed=feed)
    for own in seen[1:]:
        for layer, moved in zip(model, own, strict=True):
            clean = layer.weight.detach()
            expected = 0.1 * float(clean.abs().max())
            assert float((moved - clean).std()) == pytest.approx(expected, rel=0.25)


def test_multiplicative_noise_spares_small_weights():
    model, (x, y) = classifier(), classes()
    with torch.no_grad():
        model[0].weight.mul_(0)
    options = {"scales": [0.5], "parameters": ["0.weight"], "draws": 4}
    multiplied = analog_noise(model, (x, y), **options)
    assert multiplied.accuracies[0].stderr == 0
    assert multiplied.accuracies[0].mean == multiplied.clean.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": [-1]}, "scales must be a finite number"),
        ({"scales": []}, "scales must have at least one value"),
        ({"kind": "chaotic"}, "kind must be one of"),
        ({"draws": 1}, "draws must be an integer >= 2"),
    ],
)
def test_bad_noise(options, message):
    with pytest.raises(ValueError, match=message):
        analog_noise(classifier(), classes(), **{"scales": [0.1], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": [1.5]}, "rates must be a finite number >= 0 and <= 1"),
        ({"rates": 1.5}, "rates must be a finite number >= 0 and <= 1"),
        ({"rates": []}, "rates must have at least one value"),
        ({"bits": 9}, "bits must be an integer from 2 to 8"),
        ({"by": "column"}, "by must be one of"),
        ({"seed": -1}, "seed must be an integer"),
    ],
)
def test_bad_flips(options, message):
    with pytest.raises(ValueError, match=message):
        bit_flips(classifier(), classes(), **{"rates": [0.1], **options})


def test_plots_are_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    model, data = classifier(), classes()
    result = rounding(model, data, bits=[8, 4, 2], kernels=True)
    ax = result.plot(label="mine")
    assert ax.xaxis_inverted()
    assert result.plot(ax) is ax
    assert [text.get_text() for text in ax.get_legend().get_texts()][:2] == [
        "mine, tensor",
        "mine, row",
    ]
    ax = bit_flips(model, data, rates=[1e-4, 1e-2], draws=3).plot(label="flips")
    assert ax.get_xscale() == "log"
    assert analog_noise(model, data, scales=[0, 0.1], draws=3).plot(ax) is ax
    pyplot.close("all")


# --- training for rounding ---


def test_groups_have_half_a_step_of_uniform_noise():
    model = classifier()
    groups = rounding_parameters(model, bits=4)
    assert [len(group["params"]) for group in groups] == [1, 1, 4]
    for group, layer in zip(groups, (model[0], model[4]), strict=False):
        largest = float(layer.weight.detach().abs().max())
        assert group["b"] == pytest.approx(largest / 7 / 2)
        assert group["noise"] == "uniform"
    assert groups[2]["b"] == 0


@pytest.mark.parametrize("known", [True, False])
def test_training_with_the_noise_of_rounding(known):
    model, (x, y) = classifier(), classes()
    given = {"model": model} if known else {}
    optimizer = NVRMAdam(rounding_parameters(model, bits=3), **given, lr=0.05, b=0)
    for _ in range(10):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    before = [group["b"] for group in optimizer.param_groups]
    update_rounding_noise(optimizer)
    after = [group["b"] for group in optimizer.param_groups]
    assert before != after
    assert after[-1] == 0
    with optimizer.denoised():
        largest = [float(model[k].weight.detach().abs().max()) for k in (0, 4)]
    assert after[:2] == pytest.approx([value / 3 / 2 for value in largest])
    other = classifier()
    given = {"model": other} if known else {}
    other.load_state_dict(model.state_dict())
    again = NVRMAdam(rounding_parameters(other, bits=3), **given, lr=0.05, b=0)
    again.load_state_dict(optimizer.state_dict())
    assert [group.get("rounding_bits") for group in again.param_groups] == [3, 3, None]
    assert predict(model, x).noise["0.weight"] == (after[0], "uniform", None)  # by default


def test_bad_presets():
    with pytest.raises(ValueError, match="model must be a torch module, got list"):
        rounding_parameters([torch.ones(2, 2)], bits=4)
    with pytest.raises(ValueError, match="bits must be an integer from 2 to 16"):
        rounding_parameters(classifier(), bits=1)
    with pytest.raises(ValueError, match="no parameter of two or more dimensions"):
        rounding_parameters(nn.BatchNorm1d(3), bits=4)
    with pytest.raises(ValueError, match="groups of rounding_parameters"):
        update_rounding_noise(NVRMSGD(nn.Linear(2, 2), lr=0.1, b=0.1))
    with pytest.raises(ValueError, match="one of neuvar's"):
        update_rounding_noise(torch.optim.SGD(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [8, 7, 4, 2])
def test_without_flips_weights_are_rounded_in_every_dtype(dtype, bits):
    """In bfloat16 the quotient of the largest weight may round up to a number that does not fit."""
    for seed in range(20):
        w = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        stored = flip_bits(w, 0.0, np.random.default_rng(0), bits=bits)
        exact = w.float() if dtype.itemsize < 4 else w
        rounded = round_weights(exact, bits, by="row").to(dtype)
        assert torch.equal(stored, rounded)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x).relu())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_with_two_names_is_quantized_once(bits):
    copied = quantized_copy(TwoNames(), bits=bits)
    assert copied.a is copied.b
    assert type(copied.a) is not nn.Linear
    assert copied(torch.ones(2, 32)).shape == (2, 32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformers_are_quantized(bits):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 32)
    with torch.no_grad():
        outputs, exact = quantized_copy(model, bits=bits)(x), model(x)
    assert 0 < (outputs - exact).abs().max() < 1


@pytest.mark.parametrize("by", [[], 5, None])
def test_by_is_checked(by):
    with pytest.raises(ValueError, match=r"by must (have at least|be) one"):
        rounding(nn.Linear(2, 2), (torch.ones(4, 2), torch.zeros(4).long()), by=by)


def test_intervals_of_accuracies_are_accuracies():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.randn(40, 2)
    found = analog_noise(model, (x, model(x).argmax(1)), scales=[0.3], draws=4)
    low, high = found.accuracies[0].interval
    assert 0 <= low <= high <= 1
