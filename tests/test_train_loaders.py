"""Training on a DataLoader or any other iterable of batches, and resuming between epochs."""

import math
import random

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from neuvar.train import Checkpoint, fit
from tests.toy import same
from tests.trainings import Chunks, StoppedError, network, optimizer, state

INPUTS, LABELS = Chunks().inputs, Chunks().labels
EPOCHS, COUNT = 4, 7


@pytest.fixture(autouse=True)
def generators(monkeypatch):
    """Orders are drawn from global generators; other tests shall not notice."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power fails here
    numpy, python = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(numpy)  # noqa: NPY002
    random.setstate(python)


class Augmented(Dataset):
    """Examples with noise from torch's, NumPy's and Python's global generators."""

    def __getitem__(self, index):
        scale = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return INPUTS[index] * scale, LABELS[index]

    def __len__(self):
        return len(LABELS)


class Stream(IterableDataset):
    """Examples of which nobody knows how many there are; the first pass has most."""

    def __init__(self, *counts):
        self.counts = list(counts)

    def __iter__(self):
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        yield from zip(INPUTS[:count], LABELS[:count], strict=True)


class ByEpoch(Sampler):
    """An order that depends on the epoch, as that of distributed training."""

    def __init__(self):
        self.number = 0

    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.number)
        return iter(torch.randperm(len(LABELS), generator=generator).tolist())

    def __len__(self):
        return len(LABELS)


PAIR = TensorDataset(INPUTS, LABELS)
LOADERS = {
    "global": lambda: DataLoader(PAIR, 4, shuffle=True),
    "own": lambda: DataLoader(
        PAIR, 4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "sampler": lambda: DataLoader(
        PAIR, 4,
        sampler=torch.utils.data.RandomSampler(
            PAIR, replacement=True, generator=torch.Generator().manual_seed(1)
        ),
    ),
    "by epoch": lambda: DataLoader(PAIR, 4, sampler=ByEpoch()),
    "augmented": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "list": lambda: list(DataLoader(PAIR, 4)),
    "stream": lambda: DataLoader(Stream(26), 4),
}  # fmt: skip


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def trained(batches, *, stop=-1, name="nvrm-adam", seed=0, **options):
    """Train on batches with dropout, until so many steps are done."""
    model, seen = network(dropout=True, norm=True), []
    opt = optimizer(name, model)

    def observe(batch, scores):
        seen.append(batch)
        if len(seen) == stop:
            raise StoppedError

    seed_all(seed)
    result = fit(model, batches, opt, epochs=EPOCHS, observe=observe, **options)
    return result, state(model), seen


class TestTraining:
    @pytest.mark.parametrize("kind", LOADERS)
    def test_as_a_loop_by_hand(self, kind):
        model = network(dropout=True, norm=True)
        opt, batches = optimizer("nvrm-adam", model), LOADERS[kind]()
        seed_all(0)
        for number in range(EPOCHS):
            if kind == "by epoch":
                batches.sampler.set_epoch(number)
            for inputs, labels in batches:
                opt.zero_grad()
                cross_entropy(model(inputs), labels).backward()
                opt.step()
        opt.eval()
        result, weights, seen = trained(LOADERS[kind]())
        assert same(weights, state(model))
        assert (result.status, result.epochs, len(seen)) == ("finished", EPOCHS, EPOCHS * COUNT)
        assert all(type(batch) is tuple for batch in seen)

    def test_batches_that_know_more_than_two_things(self):
        seen = []
        model = network()
        data = DataLoader(TensorDataset(INPUTS, LABELS, torch.arange(26)), 4)
        fit(
            model, data, optimizer("sgd", model), epochs=1, accumulate=2,
            observe=lambda batch, _: seen.append(batch[2]),
        )  # fmt: skip
        assert torch.cat(seen).tolist() == list(range(26))

    def test_progress_and_divergence_without_a_length(self):
        told, model = [], network()
        stream = DataLoader(Stream(26), 1)
        fit(model, stream, optimizer("sgd", model), epochs=2, progress=told.append)
        assert told == [0.5, 1.0]
        model = network(relu=True)
        opt = optimizer("sgd", model, lr=1e30)
        result = fit(model, DataLoader(Stream(26), 4), opt, epochs=2)
        assert result.reason.endswith("in epoch 1, by batch 7")
        model = network(relu=True)
        result = fit(model, stream, optimizer("sgd", model, lr=1e30), epochs=2)
        assert result.reason.endswith("in epoch 1, by batch 20")

    @pytest.mark.parametrize(
        ("batches", "words"),
        [
            (lambda: PAIR, "is a Dataset of single examples; put it into a DataLoader"),
            (lambda: (INPUTS, LABELS), "got tuple of Tensor, Tensor"),
            (lambda: INPUTS, "another iterable of batches, got Tensor"),
            (lambda: 3, "another iterable of batches, got int"),
            (lambda: (b for b in [(INPUTS, LABELS)]), "is a generator, which can be iterated"),
            (list, "batches is empty; a training needs at least one"),
            (lambda: DataLoader(Stream(0), 4), "batches is empty in epoch 1"),
            (lambda: DataLoader(Stream(26, 0), 4), "batches is empty in epoch 2"),
            (lambda: [{"x": INPUTS, "labels": LABELS}], "got dict with the keys x, labels"),
            (lambda: [(INPUTS, 3)], "got tuple of Tensor, int"),
            (lambda: [[INPUTS]], "got list of Tensor"),
            (lambda: [(INPUTS, LABELS), None], "got NoneType"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_trained_on(self, batches, words):
        model = network()
        with pytest.raises(ValueError, match="batches") as error:
            fit(model, batches(), optimizer("sgd", model), epochs=2)
        assert words in str(error.value)


class TestResume:
    @pytest.mark.parametrize("stop", [COUNT + 1, 2 * COUNT, 2 * COUNT + 5, 3 * COUNT])
    @pytest.mark.parametrize("kind", LOADERS)
    def test_it_resumes_at_the_beginning_of_an_epoch(self, tmp_path, kind, stop):
        """Exactly: the batches of that epoch come again, and dropout's draws with them."""
        expected, weights, seen = trained(LOADERS[kind]())
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            trained(LOADERS[kind](), stop=stop, checkpoint=Checkpoint(path, every=0))
        result, resumed, again = trained(LOADERS[kind](), seed=9, checkpoint=path)
        assert result == expected
        assert same(resumed, weights)
        done = (stop - 1) // COUNT * COUNT
        assert len(again) == len(seen) - done
        for one, other in zip(again, seen[done:], strict=True):
            assert all(map(torch.equal, one, other))

    def test_nothing_is_saved_inside_an_epoch(self, tmp_path):
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            trained(LOADERS["own"](), stop=COUNT, checkpoint=Checkpoint(path, every=0))
        assert not path.exists()

    def test_workers(self, tmp_path):
        def make():
            return DataLoader(Augmented(), 4, shuffle=True, num_workers=1)

        expected, weights, _ = trained(make())
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            trained(make(), stop=2 * COUNT + 3, checkpoint=Checkpoint(path, every=0))
        result, resumed, _ = trained(make(), seed=9, checkpoint=path)
        assert result == expected
        assert same(resumed, weights)

    def test_workers_that_stay_cannot_be_saved(self, tmp_path):
        loader = DataLoader(PAIR, 4, num_workers=1, persistent_workers=True)
        with pytest.raises(ValueError, match="persistent_workers=False if there is a checkpoint"):
            trained(loader, checkpoint=tmp_path / "c.pt")

    def test_ours_and_theirs_do_not_mix(self, tmp_path):
        """Also without the fingerprint: a checkpoint of ours may be from inside an epoch."""
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            trained(Chunks(stop=9), checkpoint=Checkpoint(path, every=0))
        with pytest.raises(ValueError, match="another kind of batches"):
            trained(LOADERS["list"](), checkpoint=Checkpoint(path, strict=False))

    def test_a_checkpoint_is_made_between_epochs_only_when_it_is_due(self, tmp_path):
        saved = Checkpoint(tmp_path / "c.pt", every=math.inf)
        with pytest.raises(StoppedError):
            trained(LOADERS["list"](), stop=EPOCHS * COUNT, checkpoint=saved)
        assert not list(tmp_path.iterdir())
