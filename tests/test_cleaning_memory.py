"""Memory of a search for wrong labels, counted by allocations: a copy of a large array shows."""

import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from neuvar import LabelObserver, find_label_issues
from neuvar.cleaning import judge_labels, read_examples
from neuvar.cleaning.training import History, hash_examples
from neuvar.models import mlp

EXAMPLES, CLASSES = 200_000, 50
BYTES = EXAMPLES * CLASSES * 4
"""Size of the probabilities in float32."""
SHARED = (torch.from_numpy, torch.as_tensor, torch.Tensor.data.__get__)
"""Functions whose result shares memory with an array or another tensor."""


@pytest.fixture(scope="module")
def probabilities():
    rng = np.random.default_rng(0)
    y = rng.integers(CLASSES, size=EXAMPLES)
    p = rng.random((EXAMPLES, CLASSES), dtype=np.float32)
    p[np.arange(EXAMPLES), np.where(rng.random(EXAMPLES) < 0.9, y, 0)] += 20
    p /= p.sum(1, keepdims=True)
    return p, y


def peak_bytes(work):
    """Largest number of bytes that Python and NumPy allocate at once for this work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class LargestTensor(TorchFunctionMode):
    """Size in bytes of the largest tensor that a torch function returns in new memory."""

    bytes = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and function not in SHARED:
            given = [x.data_ptr() for x in args if isinstance(x, torch.Tensor)]
            if result.data_ptr() not in given:
                self.bytes = max(self.bytes, result.nbytes)
        return result


@contextmanager
def mapped(tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    yield np.load(tmp_path / "x.npy", mmap_mode="r")


def features(n=50_000, columns=64, classes=10):
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=n)
    x = rng.standard_normal((n, columns), dtype=np.float32)
    x[np.arange(n), y] += 5
    return x, y


@pytest.mark.parametrize("function", [judge_labels, find_label_issues])
def test_given_probabilities_are_copied_once(probabilities, function):
    p, y = probabilities
    assert BYTES < peak_bytes(lambda: function(p, y)) < 1.8 * BYTES


def test_probabilities_that_do_not_fit_the_labels_are_refused():
    p = np.full((4, 3), 1 / 3)
    with pytest.raises(ValueError, match="same length, got 4 and 5"):
        find_label_issues(p, [0, 1, 2, 0, 1])
    with pytest.raises(ValueError, match="names must have one for each of 3 classes, got 2"):
        find_label_issues(p, ["cat", "dog", "cat", "dog"])


def test_the_sums_of_an_observer_are_copied_once(probabilities):
    p, y = probabilities
    observer = LabelObserver(EXAMPLES, CLASSES)
    observer.update(np.arange(EXAMPLES), torch.from_numpy(p).log(), y)
    with LargestTensor() as largest:
        observer.label_issues()
    beyond = peak_bytes(observer.label_issues)
    assert largest.bytes == BYTES  # the copy
    assert beyond < 0.8 * BYTES


def test_a_history_becomes_probabilities_in_place():
    history = History(100_000, 10, torch.device("cpu"))
    history((None, None, torch.arange(100_000)), torch.zeros(100_000, 10))
    with LargestTensor() as largest:
        p = history.mean()
    assert np.allclose(p, 0.1)
    assert largest.bytes <= p.nbytes / 10  # one number for each example


@pytest.mark.parametrize("trained", [False, True])
def test_no_tensor_is_larger_than_the_probabilities(tmp_path, trained):
    x, y = features()
    options = {"trained": True} if trained else {"b": 0.01, "epochs": 1, "batch_size": 500}
    model = nn.Linear(64, 10)
    nn.init.eye_(model.weight)
    find_label_issues(model, (x[:1000], y[:1000]), **options)  # makes the table of noise
    with mapped(tmp_path, x) as on_disk, LargestTensor() as largest:
        beyond = peak_bytes(lambda: find_label_issues(model, (on_disk, y), **options))
    p_bytes = len(y) * 10 * 4
    assert p_bytes <= largest.bytes <= 1.1 * p_bytes  # a sixth of the inputs
    assert beyond < x.nbytes


def test_a_file_on_disk_is_not_copied(tmp_path):
    x, y = features(1000)
    with mapped(tmp_path, x) as on_disk:
        inputs = read_examples((on_disk, y)).inputs
        assert inputs.data_ptr() == on_disk.ctypes.data
        part = read_examples((on_disk[10:], y[10:])).inputs
        assert part.data_ptr() == on_disk[10:].ctypes.data
        assert torch.equal(part, torch.from_numpy(x[10:]))
        columns = read_examples((on_disk[:, :3], y)).inputs  # not contiguous, so copied
        assert torch.equal(columns, torch.from_numpy(x[:, :3]))


def test_a_file_on_disk_gives_the_same_result(tmp_path):
    x, y = features(2000)
    options = {"b": 0.05, "epochs": 2}
    expected = find_label_issues(mlp((64, 10), seed=0), (x, y), **options)
    with mapped(tmp_path, x) as on_disk:
        result = find_label_issues(mlp((64, 10), seed=0), (on_disk, y), **options)
    assert np.array_equal(result.probabilities, expected.probabilities)


def test_chunks_do_not_change_the_judgement(probabilities, monkeypatch):
    p, y = (array[:5000] for array in probabilities)
    expected = judge_labels(p, y)
    monkeypatch.setattr("neuvar.cleaning.posterior.CHUNK", 7)
    result = judge_labels(p, y)
    assert result.quality == pytest.approx(expected.quality, rel=1e-9)
    assert np.array_equal(result.flagged, expected.flagged)


def test_hashes_cover_every_number(monkeypatch):
    x, y = features(100)
    expected = hash_examples(read_examples((x, y)))
    monkeypatch.setattr("neuvar.cleaning.training.HASHED_BYTES", 1000)
    assert hash_examples(read_examples((x, y))) == expected
    for array, place in ((x, (57, 3)), (y, 57)):
        array[place] = (array[place] + 1) % 10
        assert hash_examples(read_examples((x, y))) != expected
        expected = hash_examples(read_examples((x, y)))
