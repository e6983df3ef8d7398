import hashlib
import importlib.util
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from neuvar import labels
from neuvar.data import Split, mnist_excerpt

ROOT = Path(__file__).parents[1]
SHA256 = {
    "train_images": "68c3743b63ac914ed333ef71e68edc7067a762f990832425157761d1bb8f4b0e",
    "train_labels": "a89126a1b1b0297c04a010f89c48174d096efb38616ee98a5c44f5a190d2b02f",
    "train_index": "f313dce8974eb81c0d43d81a92515be18d7a92dfdfdd71da9f666cdfa5e4b687",
    "test_images": "d7e0e71952e6756ac80af396b0bd5d409dca88ab1bf1380eb3e6068af95b9e7b",
    "test_labels": "e5a154be2d12218a6dae8c9079efb69854e53d9c02de262cf77ffa8e49614758",
    "test_index": "e176805fbe7eb1cfd45d5598e9d6090ac4313baa07eded93974ff5c09b9d1f0d",
}


def test_excerpt_file_is_the_one_that_was_made():
    with np.load(str(files("neuvar") / "_mnist" / "excerpt.npz"), allow_pickle=False) as arrays:
        result = {k: hashlib.sha256(a.tobytes()).hexdigest() for k, a in arrays.items()}
    assert result == SHA256


@pytest.mark.parametrize(("split", "per_class"), [("train", 600), ("test", 100)])
def test_excerpt_is_balanced_and_typed(split, per_class):
    data = mnist_excerpt()
    part = getattr(data, split)
    assert len(part) == per_class * data.classes
    assert part.images.shape == (per_class * 10, 28, 28)
    assert part.images.dtype == torch.uint8
    assert part.images.amin() == 0
    assert part.images.amax() == 255
    assert part.labels.dtype == torch.int64
    assert part.labels.bincount().tolist() == [per_class] * 10


@pytest.mark.parametrize("split", ["train", "test"])
def test_excerpt_tensors_are_those_of_the_file(split):
    part = getattr(mnist_excerpt(), split)
    for name, tensor in [("images", part.images), ("labels", part.labels.to(torch.uint8))]:
        digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        assert digest == SHA256[f"{split}_{name}"]


def test_excerpt_is_fresh_for_every_caller():
    first = mnist_excerpt()
    first.train.images.zero_()
    first.test.labels.zero_()
    second = mnist_excerpt()
    assert second.train.images.any()
    assert second.test.labels.any()


def test_excerpt_splits_share_no_image():
    data = mnist_excerpt()
    digests = [
        {hashlib.sha256(image.numpy().tobytes()).digest() for image in part.images}
        for part in (data.train, data.test)
    ]
    assert not digests[0] & digests[1]


def test_excerpt_states_its_provenance_and_licence():
    text = (files("neuvar") / "_mnist" / "README.md").read_text(encoding="utf-8")
    for fact in ("LeCun", "Cortes", "Burges", "by-sa/3.0", "seed 2021"):
        assert fact in text


def test_split_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="same length, got 3 and 2"):
        Split(torch.zeros(3, 28, 28, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))


@pytest.fixture
def maker():
    spec = importlib.util.spec_from_file_location("maker", ROOT / "tools/make_mnist_excerpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_maker_draws_the_shipped_choice_again(maker):
    """The official labels are not at hand, but the draw needs only where each class is."""
    labels = np.repeat(np.arange(10, dtype=np.uint8), 700)
    index = maker.choose(labels, 600)
    assert index.dtype == np.int32
    assert (np.diff(index) > 0).all()
    assert np.bincount(labels[index]).tolist() == [600] * 10
    assert (maker.choose(labels, 600) == index).all()


def test_maker_refuses_other_files(maker, tmp_path):
    with pytest.raises(SystemExit, match="neither"):
        maker.excerpt(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"not the canonical bytes")
    with pytest.raises(SystemExit, match="not the canonical file"):
        maker.excerpt(tmp_path)


def test_a_split_is_made_of_tensors():
    images, y = torch.zeros(4, 2, 2, dtype=torch.uint8), torch.arange(4) % 2
    noisy = labels.pair(y, 0.5, classes=2, seed=0)
    with pytest.raises(
        ValueError, match=r"labels must be a tensor, got NoisyLabels; use its \.noisy"
    ):
        Split(images, noisy)
    assert len(Split(images, noisy.noisy)) == 4
