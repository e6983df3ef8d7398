"""Schedules of b: closed forms, and resuming to the bit."""

import io
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from neuvar import NVRM, NVRMSGD
from neuvar.schedule import BSchedule, Constant, Cosine, Linear, Step


def optimizer_with(*scales):
    groups = [{"params": torch.nn.Linear(3, 2).parameters(), "b": b} for b in scales]
    return NVRMSGD(groups, lr=0.1, b=0.5)


def scales(optimizer):
    return [group["b"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Constant(), [1, 1, 1, 1, 1]),
        (Linear(2), [0, 0.5, 1, 1, 1]),
        (Linear(4, start=1, end=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (Cosine(4), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        (Cosine(2, start=1, end=3), [1, 2, 3, 3, 3]),
        (Step(2, factor=0.5), [1, 1, 0.5, 0.5, 0.25]),
        (lambda step: 1 / (1 + step), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
    ],
)
def test_closed_forms_for_every_group(rule, expected):
    optimizer = optimizer_with(0.02, 0.1)
    schedule = BSchedule(optimizer, rule)
    for factor in expected:
        assert scales(optimizer) == pytest.approx([0.02 * factor, 0.1 * factor], abs=1e-15)
        schedule.step()


def test_a_group_that_comes_later_follows():
    optimizer = optimizer_with(0.02)
    schedule = BSchedule(optimizer, Step(1, factor=0.5))
    schedule.step()
    optimizer.add_param_group({"params": torch.nn.Linear(3, 2).parameters(), "b": 0.4})
    schedule.step()
    assert scales(optimizer) == pytest.approx([0.005, 0.1])


def train(state=None, *, stop=9):
    """Nine steps, or some of them: returns the clean weights, and what is needed to go on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), b=0.3, seed=1)
    schedule = BSchedule(optimizer, Cosine(7, end=0.1))
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "rate": rate}
    if state is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    x, y = torch.randn(12, 5, generator=torch.Generator().manual_seed(2)), torch.arange(12) % 3
    for _ in range(schedule.steps, stop):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        rate.step()
    state = {name: part.state_dict() for name, part in parts.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with optimizer.denoised():
        return model.weight.detach().clone(), torch.load(file, weights_only=True), scales(optimizer)


@pytest.mark.parametrize("stop", range(9))
def test_resumed_to_the_bit(stop):
    whole, _, last = train()
    resumed, _, again = train(train(stop=stop)[1])
    assert torch.equal(whole, resumed)
    assert last == again


def test_noise_has_the_scale_of_its_time():
    model = torch.nn.Linear(400, 300, bias=False)
    optimizer = NVRMSGD(model.parameters(), lr=1e-30, b=0.5)
    schedule = BSchedule(optimizer, Linear(4, start=1, end=0))
    for expected in (0.5, 0.375, 0.25, 0.125, 0.0):
        model(torch.ones(1, 400)).sum().backward()
        optimizer.step()
        noisy = model.weight.detach().clone()
        with optimizer.denoised():
            noise = noisy - model.weight
        assert noise.std().item() == pytest.approx(expected, rel=0.02, abs=1e-9)
        schedule.step()


def test_factors_of_numpy_are_saved_as_plain_numbers():
    schedule = BSchedule(optimizer_with(0.02), Linear(10, start=np.float64(0.1)))
    saved = io.BytesIO()
    torch.save(schedule.state_dict(), saved)
    saved.seek(0)
    schedule.load_state_dict(torch.load(saved, weights_only=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0), "steps must be an integer >= 1, got 0"),
        (lambda: Linear(2.0), "steps must be"),
        (lambda: Linear(3, start=-1), "start must be a finite number >= 0"),
        (lambda: Cosine(3, end=math.inf), "end must be a finite number >= 0"),
        (lambda: Step(True), "every must be"),
        (lambda: Step(2, factor=-0.1), "factor must be"),
    ],
)
def test_rules_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_input_changes_nothing():
    optimizer = optimizer_with(0.02)
    with pytest.raises(ValueError, match="one of neuvar's, got SGD"):
        BSchedule(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), Constant())
    with pytest.raises(ValueError, match="rule must be a function"):
        BSchedule(optimizer, 0.1)
    schedule = BSchedule(optimizer, lambda step: 1.0 if step < 2 else math.nan)
    schedule.step()
    with pytest.raises(ValueError, match="finite number >= 0, got nan"):
        schedule.step()
    assert schedule.steps == 1
    assert scales(optimizer) == [0.02]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"steps": 1}, "keys rule and steps"),
        ({"steps": 1, "rule": {"name": "Step", "every": 2, "factor": 0.1}}, "rule"),
        ({"steps": 1, "rule": None}, "rule"),
        ({"steps": -1, "rule": {"name": "Cosine", "steps": 3, "start": 1.0, "end": 0.0}}, "steps"),
    ],
)
def test_states_of_others_are_refused(state, message):
    optimizer = optimizer_with(0.02)
    schedule = BSchedule(optimizer, Cosine(3))
    schedule.step()
    before = scales(optimizer)
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict(state)
    assert schedule.steps == 1
    assert scales(optimizer) == before
