"""Loaders of real label noise, on files that the tests make in the official formats."""

import numpy as np
import pytest
import torch

from neuvar import labels
from tests.test_labels import Touch

CLEAN = np.arange(50_000) % 10
NOISY = np.where(np.arange(50_000) % 4 == 0, (CLEAN + 3) % 10, CLEAN)
OFFICIAL = ("clean_label", "aggre_label", "worse_label", *(f"random_label{i}" for i in (1, 2, 3)))


def human(path, old_numpy=False, **changes):
    """A file like CIFAR-10_human.pt: a dict of arrays; each set of labels is another one."""
    content = {name: (CLEAN + k) % 10 for k, name in enumerate(OFFICIAL)} | changes
    torch.save(content, path, _use_new_zipfile_serialization=not old_numpy)
    if old_numpy:
        data = path.read_bytes()
        path.write_bytes(data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    return path


@pytest.mark.parametrize("old_numpy", [False, True])
def test_cifar10n_reads_each_set_of_the_official_file(tmp_path, old_numpy):
    path = human(tmp_path / "CIFAR-10_human.pt", old_numpy, aggre_label=NOISY)
    result = labels.cifar10n(path, "aggre")
    assert (result.noisy.numpy() == NOISY).all()
    assert (result.clean.numpy() == CLEAN).all()
    assert result.rate == 0.25
    assert (result.mask.numpy() == (NOISY != CLEAN)).all()
    assert result.provenance["source"] == "CIFAR-10_human.pt:aggre_label"
    for which, key in labels.CIFAR10N.items():
        k = OFFICIAL.index(key)
        expected = NOISY if which == "aggre" else (CLEAN + k) % 10
        assert (labels.cifar10n(str(path), which, clean=CLEAN).noisy.numpy() == expected).all()


def test_cifar10n_reads_one_set_from_npy(tmp_path):
    path = tmp_path / "aggregate.npy"
    np.save(path, NOISY.astype(np.uint8))
    unknown = labels.cifar10n(path)
    assert unknown.rate is None
    assert labels.cifar10n(path, clean=torch.from_numpy(CLEAN)).rate == 0.25
    with pytest.raises(ValueError, match=r"which must be None for aggregate.npy"):
        labels.cifar10n(path, "worst")


def test_cifar100n(tmp_path):
    fine = np.arange(50_000) % 100
    path = tmp_path / "CIFAR-100_human.pt"
    torch.save({"clean_label": fine, "noisy_label": (fine + 1) % 100}, path)
    result = labels.cifar100n(path)
    assert result.rate == 1
    assert result.counts.shape == (100, 100)
    np.save(tmp_path / "noisy.npy", fine)
    assert labels.cifar100n(tmp_path / "noisy.npy", clean=fine).rate == 0


def test_cifar_n_refuses_what_does_not_fit(tmp_path):
    path = human(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"which must be .*aggre.*worst.* got None"):
        labels.cifar10n(path)
    with pytest.raises(ValueError, match="official order, 50,000 of 50,000 differ"):
        labels.cifar10n(path, "worst", clean=(CLEAN + 1) % 10)
    with pytest.raises(ValueError, match=r"a.pt must have 'noisy_label', it has clean_label"):
        labels.cifar100n(path)
    human(path, worse_label=NOISY[:-1])
    with pytest.raises(ValueError, match=r"worse_label must have 50,000 labels, got 49,999"):
        labels.cifar10n(path, "worst")
    human(path, worse_label=np.where(CLEAN == 3, -1, CLEAN))
    with pytest.raises(ValueError, match=r"worse_label must be from 0 to 9 .* got -1"):
        labels.cifar10n(path, "worst")
    human(path, worse_label={"more": 1})
    with pytest.raises(ValueError, match="worse_label must be"):
        labels.cifar10n(path, "worst")
    torch.save(torch.zeros(50_000, dtype=torch.int64), path)
    with pytest.raises(ValueError, match=r"a.pt must have arrays with names, got Tensor"):
        labels.cifar10n(path, "worst")
    with pytest.raises(ValueError, match=r"path must end in .pt or .npy, got 'a.csv'"):
        labels.cifar10n(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="path must be a file"):
        labels.cifar10n(tmp_path / "missing.npy")


def test_nothing_in_a_file_is_executed(tmp_path):
    mark = tmp_path / "mark"
    path = human(tmp_path / "a.pt", worse_label=Touch(mark))
    with pytest.raises(ValueError, match=r"a.pt has objects other than arrays, or is damaged"):
        labels.cifar10n(path, "worst")
    for name, read in (("a.npy", labels.cifar10h), ("b.npy", labels.cifar10n)):
        np.save(tmp_path / name, np.array([Touch(mark)], dtype=object))
        with pytest.raises(ValueError, match=f"{name} is not a valid .npy file"):
            read(tmp_path / name)
    np.savez(tmp_path / "a.npz", labels=np.array([Touch(mark)], dtype=object))
    with pytest.raises(ValueError, match=r"a.npz is not a valid .npz file"):
        labels.label_errors(tmp_path / "a.npz")
    assert not mark.exists()


def people(path, dtype=float, scale=1):
    """10,000 images, of whose 50 people 40 chose the true class and 10 the next one."""
    counts = np.zeros((10_000, 10))
    rows, truth = np.arange(10_000), np.arange(10_000) % 10
    counts[rows, truth], counts[rows, (truth + 1) % 10] = 40, 10
    np.save(path, (counts * scale).astype(dtype))
    return truth


@pytest.mark.parametrize(("scale", "dtype"), [(1, int), (1, float), (0.02, float)])
def test_cifar10h_reads_counts_and_probabilities(tmp_path, scale, dtype):
    path = tmp_path / "cifar10h.npy"
    truth = people(path, dtype, scale)
    result = labels.cifar10h(path, clean=truth)
    assert len(result) == 10_000
    assert result.probabilities[3, 3:5].tolist() == pytest.approx([0.8, 0.2])
    assert (result.majority.noisy.numpy() == truth).all()
    assert result.majority.rate == 0
    if scale == 1:
        assert result.counts[3].tolist() == [0, 0, 0, 40, 10, 0, 0, 0, 0, 0]
    else:
        assert result.counts is None
    one, other = result.sample(seed=0), result.sample(seed=1)
    assert one.rate == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / 10_000) ** 0.5)
    assert one.hash == result.sample(seed=0).hash != other.hash
    assert set(((one.noisy - one.clean) % 10).tolist()) == {0, 1}
    assert labels.cifar10h(path).sample(seed=0).noisy.equal(one.noisy)
    assert labels.cifar10h(path).majority.rate is None


def test_cifar10h_refuses_what_does_not_fit(tmp_path):
    path = tmp_path / "a.npy"

    def refused(values, match, **options):
        np.save(path, values)
        with pytest.raises(ValueError, match=match):
            labels.cifar10h(path, **options)

    good = np.full((10_000, 10), 0.1)
    refused(good[:-1], r"a.npy must have numbers of the shape \(10000, 10\), got .* \(9999, 10\)")
    refused(good.astype(complex), "must have numbers")
    for bad in (np.nan, -1, np.inf, 1e300):
        refused(
            np.where(np.arange(10) == 2, bad, good), "must have numbers from 0 to 1,000,000,000"
        )
    refused(np.where(np.arange(10_000)[:, None] == 7, 0, good), "a number above 0 in row 7")
    refused(good * 0.5, "rows that sum to 1, got 0.5 in row 0")
    refused(good, "clean must have 10,000 labels, got 3", clean=[0, 1, 2])
    with pytest.raises(ValueError, match=r"path must end in \.npy, got 'a.npz'"):
        labels.cifar10h(tmp_path / "a.npz")


def errors(path, **changes):
    p = np.float16([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
    wrong = np.array([False, True, False, False])
    arrays = {"labels": np.uint8([0, 0, 2, 0]), "probabilities": p, "wrong": wrong} | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def test_label_errors(tmp_path):
    result = labels.label_errors(errors(tmp_path / "a.npz"))
    assert len(result) == 4
    assert result.labels.tolist() == [0, 0, 2, 0]
    assert result.probabilities.dtype == torch.float32
    assert result.probabilities.sum(1).tolist() == pytest.approx([1] * 4, abs=1e-6)
    assert result.mask.tolist() == [False, True, False, False]
    assert result.rate == 0.25


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"wrong": None}, r"a.npz must have 'wrong', it has labels, probabilities"),
        ({"wrong": np.zeros(3, bool)}, r"got the shapes \(4,\), \(4, 3\) and \(3,\)"),
        ({"wrong": np.zeros(4)}, "a boolean in wrong"),
        ({"labels": np.array([0, 1, 2, 3])}, "from 0 to 2 for 3 classes, got 3"),
        ({"labels": np.zeros(4)}, "labels of a.npz must be integers"),
        ({"labels": np.zeros((4, 1), int)}, r"must have the shape \(n,\)"),
        ({"probabilities": np.ones((4, 3), int)}, r"probabilities of the shape \(n, classes\)"),
        ({"probabilities": np.full((4, 3), np.nan)}, "probabilities from 0 to 1"),
        ({"probabilities": np.full((4, 3), 0.5)}, "rows that sum to 1, got 1.5 in row 0"),
        ({"probabilities": np.ones((4, 1))}, "classes must be"),
    ],
)
def test_label_errors_refuses_what_does_not_fit(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        labels.label_errors(errors(tmp_path / "a.npz", **changes))


def test_label_errors_takes_npz_only(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.npz"):
        labels.label_errors(tmp_path / "a.npy")
    (tmp_path / "a.npz").write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match=r"a\.npz"):
        labels.label_errors(tmp_path / "a.npz")
