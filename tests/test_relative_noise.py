"""Noise whose scale is relative to the weights: exact, clean at rest, resumable."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar import NVRM, NVRMSGD
from neuvar.noise import (
    FAMILIES,
    RELATIVE_TO,
    Draw,
    Term,
    add_noise,
    standard_noise,
    whole_slot,
)
from neuvar.optim.layout import relative_size, slots

B = 0.3


def network(*, double: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 4),
    )
    return nn.Sequential(*layers).to(torch.float64 if double else torch.float32)


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(8) % 4


def train(model, optimizer, steps):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        loss.backward()
        optimizer.step()


def expected_size(w: torch.Tensor, relative_to: str) -> torch.Tensor:
    """The definition, written out."""
    if relative_to == "weight":
        return w
    if relative_to == "tensor" or w.ndim == 1:
        return w.square().mean().sqrt()
    return torch.stack([row.square().mean().sqrt() for row in w]).view(-1, *[1] * (w.ndim - 1))


def naive_noise(params, number, relative_to, noise="gaussian", seed=0, sampler="table"):
    draw = Draw(number=number, noise=noise, seed=seed, sampler=sampler)
    return [
        B * standard_noise(slot, draw).to(p.dtype) * expected_size(p.detach(), relative_to)
        for p, slot in slots(params).items()
    ]


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_the_size_is_that_of_the_definition(relative_to):
    for shape in ((7,), (5, 3), (4, 2, 3, 3), (1, 6), (3, 0), (0,)):
        w = torch.randn(shape, dtype=torch.float64)
        size = relative_size(w, w, relative_to)
        if w.numel():
            torch.testing.assert_close(size, expected_size(w, relative_to), rtol=1e-12, atol=0)
        assert (size * w).shape == w.shape
    half = torch.randn(5, 3).bfloat16()
    if relative_to != "weight":
        assert relative_size(half, half, relative_to).dtype == torch.float32


def test_absolute_noise_has_no_size():
    w = torch.ones(3)
    assert relative_size(w, w, None) is None
    assert relative_size(w, w, "") is None


@pytest.mark.parametrize("sampler", ["table", "fresh"])
@pytest.mark.parametrize("noise", FAMILIES)
@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_training_equals_a_loop_written_by_hand(relative_to, noise, sampler):
    model = network()
    options = {"noise": noise, "sampler": sampler, "seed": 5}
    optimizer = NVRMSGD(model, lr=0.1, momentum=0.9, b=B, relative_to=relative_to, **options)
    train(model, optimizer, range(4))

    other = network()
    params = list(other.parameters())
    inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(step)
        clean = [p.detach().clone() for p in params]
        if step:  # the first gradient is taken without noise
            with torch.no_grad():
                for p, eps in zip(
                    params, naive_noise(params, step, relative_to, **options), strict=True
                ):
                    p.add_(eps)
        inner.zero_grad()
        cross_entropy(other(x), y).backward()
        with torch.no_grad():
            for p, w in zip(params, clean, strict=True):
                p.copy_(w)
        inner.step()
    for p, q in zip(model.parameters(), params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("entries", [5, 17, 64, 1000])
@pytest.mark.parametrize("shape", [(9,), (7, 6), (3, 2, 5, 5), (1, 40), (40, 1)])
@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_noise_that_wraps_around_the_table(monkeypatch, relative_to, shape, entries):
    """Pieces of the noise begin and end inside of filters."""
    monkeypatch.setattr(neuvar.noise, "TABLE_SIZE", entries)
    w = torch.randn(shape, dtype=torch.float64)
    for number in range(1, 6):
        for start in (0, 3):
            draw = Draw(number=number, relative_to=relative_to)
            term = Term(whole_slot(shape, start=start), draw, B)
            size = relative_size(w, w, relative_to)
            noisy = add_noise(w, term, out=torch.empty_like(w), size=size)
            z = standard_noise(term.slot, draw).double()
            expected = w + B * z * expected_size(w, relative_to)
            torch.testing.assert_close(noisy, expected, rtol=1e-12, atol=1e-14)
            turned = torch.empty(shape[::-1], dtype=w.dtype).permute(*reversed(range(w.ndim)))
            other = add_noise(w, term, out=turned, size=size)  # not contiguous
            torch.testing.assert_close(other, expected, rtol=1e-12, atol=1e-14)


def noisy_outputs(factor, relative_to):
    """Outputs in a training pass, after the first layer was multiplied by a factor."""
    model = network()
    optimizer = NVRMSGD(model, lr=1e-30, b=B, relative_to=relative_to)
    train(model, optimizer, range(1))
    with torch.no_grad():
        model[0].weight.mul_(factor)
    return model(batch()[0]).detach()


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_a_batch_normalized_layer_ten_times_as_large_is_the_same(relative_to):
    """Its outputs do not depend on its scale, and neither do they under relative noise."""
    outputs = [noisy_outputs(factor, relative_to) for factor in (1.0, 10.0)]
    clean = network().train()(batch()[0]).detach()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)  # BatchNorm's eps
    assert not torch.allclose(outputs[0], clean, atol=0.05)


def test_absolute_noise_does_not_scale():
    outputs = [noisy_outputs(factor, None) for factor in (1.0, 10.0)]
    assert not torch.allclose(*outputs, atol=0.05)


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_the_model_is_clean_at_rest(relative_to):
    model = network()
    optimizer = NVRMSGD(model, lr=0.1, b=B, relative_to=relative_to)
    train(model, optimizer, range(3))
    before = copy.deepcopy(model.state_dict())
    x, y = batch(3)
    cross_entropy(model(x), y).backward()
    after = model.state_dict()
    assert all(
        torch.equal(before[k], after[k]) for k in before if "running" not in k and "num" not in k
    )
    noisy, clean = model(x), model.eval()(x)
    with optimizer.denoised():
        same = model.train()(x)
    assert not torch.allclose(noisy, same)
    assert clean.isfinite().all()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_a_resumed_run_equals_an_uninterrupted_one(relative_to, model_first):
    model = network(double=False)
    optimizer = NVRMSGD(model, lr=0.1, momentum=0.9, b=B, relative_to=relative_to)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(3, 6))

    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = network(double=False)
    resumed = NVRMSGD(other, lr=0.5, b=0.01)  # what is loaded counts
    loads = [lambda: other.load_state_dict(weights), lambda: resumed.load_state_dict(state)]
    for load in loads if model_first else loads[::-1]:
        load()
    assert resumed.param_groups[0]["relative_to"] == relative_to
    train(other, resumed, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_noise_of_a_checkpoint_is_that_of_its_last_draw():
    """Another value for the next draw may be set before the checkpoint is written."""
    model = network(double=False)
    optimizer = NVRMSGD(model, lr=0.1, b=B, relative_to="filter")
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["relative_to"] = None
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    other = network(double=False)
    resumed = NVRMSGD(other, lr=0.1, b=B)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    x = batch()[0].float()
    with torch.no_grad(), optimizer.perturbed(), resumed.perturbed():
        assert torch.equal(model.eval()(x), other.eval()(x))
    train(model.train(), optimizer, range(2, 4))
    assert optimizer.param_groups[0]["drawn"][-1] == ""


def test_a_group_may_have_its_own():
    model = network()
    params = list(model.parameters())
    groups = [{"params": params[:1], "relative_to": "filter"}, {"params": params[1:]}]
    optimizer = NVRM(torch.optim.SGD(groups, lr=1e-30), model=model, b=B)
    train(model, optimizer, range(1))
    relative, absolute = naive_noise(params, 1, "filter"), naive_noise(params, 1, "tensor")
    x = batch()[0]
    with optimizer.perturbed(), torch.no_grad():
        out = model.eval()(x)
    expected = network().eval()
    expected.load_state_dict(model.state_dict())
    draw = Draw(number=1)
    with torch.no_grad():
        for index, (p, slot) in enumerate(slots(list(expected.parameters())).items()):
            p.add_(relative[0] if index == 0 else B * standard_noise(slot, draw))
        torch.testing.assert_close(out, expected(x), rtol=1e-6, atol=1e-6)
    assert absolute[0].shape == relative[0].shape


def test_it_may_be_changed_between_steps():
    model = network()
    optimizer = NVRMSGD(model, lr=0.1, b=B)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["drawn"][-1] == ""
    optimizer.param_groups[0]["relative_to"] = "tensor"
    train(model, optimizer, range(2, 3))
    assert optimizer.param_groups[0]["drawn"][-1] == "tensor"
    optimizer.param_groups[0]["relative_to"] = "row"
    x, y = batch(3)
    cross_entropy(model(x), y).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="relative_to must be one of"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"relative_to": "row"}, "relative_to must be one of None, tensor, filter, weight"),
        ({"relative_to": "filter", "mode": "replay"}, "needs mode='exact'"),
        ({"relative_to": "filter", "b": "auto"}, "needs a number for b"),
    ],
)
def test_what_cannot_be_is_refused(how, word):
    with pytest.raises(ValueError, match=word):
        NVRMSGD(network(), lr=0.1, **{"b": B} | how)


def test_it_needs_the_model():
    with pytest.raises(ValueError, match="relative_to needs the model"):
        NVRMSGD(network().parameters(), lr=0.1, b=B, relative_to="filter")
    model = network()
    optimizer = NVRMSGD(model, lr=0.1, b=B, relative_to="filter")
    train(model, optimizer, range(2))
    plain = NVRMSGD(network().parameters(), lr=0.1, b=B)
    with pytest.raises(ValueError, match="relative_to needs the model"):
        plain.load_state_dict(optimizer.state_dict())
    plain.param_groups[0]["relative_to"] = "filter"
    plain.param_groups[0]["params"][0].grad = torch.ones_like(plain.param_groups[0]["params"][0])
    with pytest.raises(ValueError, match="relative_to needs the model"):
        plain.step()


def test_states_without_the_field_are_loaded():
    model = network()
    optimizer = NVRMSGD(model, lr=0.1, b=B)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["drawn"] = group["drawn"][:-1]
        del group["relative_to"]
    other = network()
    resumed = NVRMSGD(other, lr=0.1, b=B)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_the_rise_of_the_loss_is_estimated_with_the_noise_as_it_is(relative_to):
    model = network()
    optimizer = NVRMSGD(model, lr=1e-30, b=B, relative_to=relative_to)
    train(model, optimizer, range(1))
    params = list(model.parameters())
    eps = naive_noise(params, 1, relative_to)
    x, y = batch(1)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    expected = 0.5 * sum(float((e * p.grad).sum()) for e, p in zip(eps, params, strict=True))
    assert optimizer.noise_metrics()["delta"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_half_precision(relative_to):
    torch.manual_seed(0)
    model = nn.Linear(300, 200).bfloat16()
    optimizer = NVRMSGD(model, lr=1e-30, b=B, relative_to=relative_to)
    model(torch.ones(2, 300, dtype=torch.bfloat16)).float().mean().backward()
    optimizer.step()
    x = torch.eye(300, dtype=torch.bfloat16)
    with optimizer.perturbed(), torch.no_grad():
        noisy = (model(x) - model(torch.zeros_like(x))).T
    weight = model.weight.detach().float()
    ratio = (noisy - weight).square().mean().sqrt() / weight.square().mean().sqrt()
    assert abs(float(ratio) / B - 1) < 0.05  # 60,000 draws; a deviation of 0.003


@pytest.mark.parametrize("relative_to", RELATIVE_TO)
def test_measures_use_the_same_noise(relative_to):
    """A quadratic loss: its mean rise is the mean square of the noise."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    x, y = torch.eye(3), model(torch.eye(3)).detach()
    found = neuvar.neural_variability(
        model, nn.functional.mse_loss, (x, y), b=0.1, draws=256, relative_to=relative_to
    )
    w = model.weight.detach()
    truth = float((0.1 * expected_size(w, relative_to) * torch.ones_like(w)).square().mean())
    low, high = found.interval
    assert low - 0.3 * truth < truth < high + 0.3 * truth
