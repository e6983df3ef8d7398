"""Accelerate: prepare, accumulate, clip_grad_norm_, save_state and load_state."""

import accelerate
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import neuvar

INPUTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % 3
DATA = TensorDataset(INPUTS, LABELS)
EPOCHS, PARTS = 3, 2


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class Run:
    """Training with Accelerate, by small batches that are accumulated."""

    def __init__(self, *, b, precision="no"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=PARTS
        )
        self.raw = make_model()
        optimizer = neuvar.NVRMAdam(self.raw, lr=1e-2, b=b)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.raw, optimizer, DataLoader(DATA, batch_size=8), schedule
        )

    def train(self, epochs):
        for _ in range(epochs):
            self.model.train()
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(inputs), labels)
                    neuvar.optimizer_of(self.model).report_loss(loss)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()

    def predict(self):
        self.model.eval()
        with torch.no_grad():
            return self.model(INPUTS)


def train_by_hand(*, b, precision=None):
    """The same training without Accelerate; returns clean weights and predictions."""
    model = make_model()
    optimizer = neuvar.NVRMAdam(model.parameters(), lr=1e-2, b=b)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is not None)
    for _ in range(EPOCHS):
        for first in range(0, len(DATA), 8 * PARTS):
            for part in range(first, first + 8 * PARTS, 8):
                with autocast:
                    scores = model(INPUTS[part : part + 8])
                loss = cross_entropy(scores.float(), LABELS[part : part + 8]) / PARTS
                optimizer.report_loss(loss)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with optimizer.denoised(), torch.no_grad():
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        with autocast:
            return weights, model(INPUTS).float()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("b", [0.05, "auto"])
def test_evaluation_and_saved_weights_are_clean(tmp_path, b, precision):
    weights, predictions = train_by_hand(b=b, precision=precision if precision != "no" else None)
    run = Run(b=b, precision=precision)
    run.train(EPOCHS)
    assert torch.equal(run.predict(), predictions)
    assert_same(run.raw.state_dict(), weights)
    run.accelerator.save_model(run.model, tmp_path)
    from safetensors.torch import load_file

    assert_same(load_file(tmp_path / "model.safetensors"), weights)


@pytest.mark.parametrize("b", [0.05, "auto"])
def test_a_loaded_state_continues_to_the_bit(tmp_path, b):
    whole = Run(b=b)
    whole.train(EPOCHS)
    begun = Run(b=b)
    begun.train(1)
    begun.accelerator.save_state(str(tmp_path))
    resumed = Run(b=b)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(EPOCHS - 1)
    assert_same(resumed.raw.state_dict(), whole.raw.state_dict())
    assert torch.equal(resumed.predict(), whole.predict())


def test_prepare_draws_no_noise_and_moves_no_weight():
    run = Run(b=0.05)
    assert_same(run.raw.state_dict(), make_model().state_dict())
    optimizer = neuvar.optimizer_of(run.model)
    assert optimizer is run.optimizer.optimizer
    assert not optimizer.has_noise
