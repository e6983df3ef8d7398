"""A search for wrong labels that is interrupted and resumed equals one that is not, to the bit."""

import numpy as np
import pytest
import torch
from torch import nn

from neuvar import find_label_issues
from neuvar.cli import progress as cli_progress
from neuvar.train import Checkpoint, fit
from tests.test_cleaning_finding import blobs
from tests.toy import same

SETTINGS = {"epochs": 3, "batch_size": 10, "lr": 0.05, "seed": 3}


class StoppedError(Exception):
    """Something from outside ends the search."""


class Stop:
    """Raises once, when this fraction of the training is done."""

    def __init__(self, fraction):
        self.fraction, self.calls = fraction, []

    def __call__(self, fraction):
        self.calls.append(fraction)
        if fraction >= self.fraction:
            raise StoppedError


@pytest.fixture(autouse=True)
def quick_writes(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power fails here


def network(classes=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, classes)
        )


def images(n=300):
    x, y, _ = blobs(n)
    pixels = np.clip(x * 40 + 60, 0, 255).astype(np.uint8).reshape(n, 1, 5)
    return nn.Sequential(nn.Flatten(), network()), (pixels, y)


def equal(first, second):
    names = ("labels", "probabilities", "quality", "flagged", "suggested", "error_probability")
    return first.b == second.b and all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in names
    )


@pytest.mark.parametrize("b", [0.05, "auto"])
@pytest.mark.parametrize("stop", [0.2, 0.3, 0.5, 0.95])
def test_stopping_anywhere_equals_never_stopping(tmp_path, b, stop):
    x, y, _ = blobs()
    expected = find_label_issues(network(), (x, y), b=b, **SETTINGS)
    path, stopped = tmp_path / "training.pt", Stop(stop)
    with pytest.raises(StoppedError):
        find_label_issues(
            network(), (x, y), b=b, progress=stopped, checkpoint=Checkpoint(path, every=0),
            **SETTINGS,
        )  # fmt: skip
    calls = []
    result = find_label_issues(
        network(), (x, y), b=b, progress=calls.append, checkpoint=path, **SETTINGS
    )
    assert equal(result, expected)
    assert 0 < calls[0] <= stopped.calls[-1]  # no epoch is repeated
    assert calls[-1] == 1


def test_images_resume(tmp_path):
    model, data = images()
    expected = find_label_issues(model, data, b=0.05, **SETTINGS)
    checkpoint = Checkpoint(tmp_path / "training.pt", every=0)
    with pytest.raises(StoppedError):
        find_label_issues(
            model, data, b=0.05, progress=Stop(0.5), checkpoint=checkpoint, **SETTINGS
        )
    result = find_label_issues(model, data, b=0.05, checkpoint=checkpoint.path, **SETTINGS)
    assert equal(result, expected)


def test_a_finished_search_is_not_repeated(tmp_path):
    x, y, _ = blobs()
    path, calls = tmp_path / "training.pt", []
    first = find_label_issues(network(), (x, y), b=0.05, checkpoint=path, **SETTINGS)
    again = find_label_issues(
        network(), (x, y), b=0.05, checkpoint=path, progress=calls.append, **SETTINGS
    )
    assert equal(first, again)
    assert calls == [1]
    content = torch.load(path, weights_only=True)
    assert content["outer"]["history"].shape == (300, 3)


@pytest.mark.parametrize("change", ["label", "input", "seed", "lr", "batch_size", "weights", "b"])
def test_the_checkpoint_of_another_search_is_refused(tmp_path, change):
    x, y, _ = blobs()
    checkpoint, model, options = Checkpoint(tmp_path / "c.pt", every=0), network(), {**SETTINGS}
    with pytest.raises(StoppedError):
        find_label_issues(
            model, (x, y), b=0.05, progress=Stop(0.5), checkpoint=checkpoint, **SETTINGS
        )
    before = checkpoint.path.read_bytes()
    options["b"] = 0.05
    if change == "label":
        y[211] = (y[211] + 1) % 3
    elif change == "input":
        x[211, 1] += 1e-6
    elif change == "weights":
        nn.init.ones_(model[0].bias)
    else:
        options[change] *= 2
    with pytest.raises(ValueError, match=r"checkpoint (is )?of (another|other)|has another"):
        find_label_issues(model, (x, y), checkpoint=checkpoint.path, **options)
    assert checkpoint.path.read_bytes() == before


def test_the_checkpoint_of_a_training_without_a_history_is_refused(tmp_path):
    x, y, _ = blobs()
    path, model = tmp_path / "c.pt", network()
    batches = [(torch.from_numpy(x), torch.from_numpy(y))]
    fit(model, batches, torch.optim.SGD(model.parameters(), lr=0.1), epochs=1, checkpoint=path)
    with pytest.raises(ValueError, match="other inputs or labels"):
        find_label_issues(network(), (x, y), b=0.05, checkpoint=path, **SETTINGS)


def test_a_damaged_file_is_refused(tmp_path):
    x, y, _ = blobs()
    (tmp_path / "c.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        find_label_issues(network(), (x, y), b=0.05, checkpoint=tmp_path / "c.pt", **SETTINGS)


def test_no_checkpoint_without_training(tmp_path):
    with pytest.raises(ValueError, match="checkpoint has no effect with probabilities"):
        find_label_issues([[0.9, 0.1], [0.2, 0.8]], [0, 1], checkpoint=tmp_path / "c.pt")


def test_the_model_is_not_changed_by_resuming(tmp_path):
    x, y, _ = blobs()
    model = network()
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        find_label_issues(model, (x, y), b=0.05, checkpoint=tmp_path / "c.pt", **SETTINGS)
    assert same(model.parameters(), before)


def test_the_time_left_counts_from_where_the_training_resumes(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 200.0])
    monkeypatch.setattr(cli_progress.time, "monotonic", lambda: next(clock))
    with cli_progress.training_progress() as show:
        for fraction in (0.5, 0.6, 0.7):
            show(fraction)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["trained to 60%, about 7 min left", "trained to 70%, about 5 min left"]


def test_the_time_left_is_said_after_seconds(monkeypatch, capsys):
    clock = iter([0.0, 3.0, 6.0, 9.0, 100.0])
    monkeypatch.setattr(cli_progress.time, "monotonic", lambda: next(clock))
    with cli_progress.training_progress() as show:
        for fraction in (0.0, 0.03, 0.06, 0.09, 1.0):
            show(fraction)
    assert capsys.readouterr().out.splitlines() == ["training, about 94 s left"]


def test_the_settings_of_another_search_are_named(tmp_path):
    x, y, _ = blobs()
    path = tmp_path / "c.pt"
    find_label_issues(network(), (x, y), checkpoint=path, **SETTINGS)
    other = SETTINGS | {"epochs": SETTINGS["epochs"] + 2, "lr": 2 * SETTINGS["lr"]}
    known = f"epochs={SETTINGS['epochs']}, lr={SETTINGS['lr']}; use these settings, or remove it"
    with pytest.raises(ValueError, match=f"c.pt is the checkpoint of another .*, with {known}"):
        find_label_issues(network(), (x, y), checkpoint=path, **other)
