"""Real label noise from files of public datasets: human labels and label errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar import _validate
from neuvar._validate import one_of
from neuvar.labels.label_files import from_array, read_content
from neuvar.labels.noisy_labels import (
    Array,
    Integers,
    NoisyLabels,
    checked_classes,
    checked_labels,
    make_result,
    random_uniforms,
    tensor_sha256,
)

CIFAR10N = {
    "aggre": "aggre_label",
    "random1": "random_label1",
    "random2": "random_label2",
    "random3": "random_label3",
    "worst": "worse_label",
}
"""Label sets of CIFAR-10N, and their names in the official file."""
TRAIN, TEST = 50_000, 10_000
"""Numbers of training and test images of CIFAR-10 and CIFAR-100."""
MAX_PEOPLE = 10**9
"""Largest number of people per class that a file may have."""
SUM_TOLERANCE = 0.01
"""Largest error of a sum of probabilities, which may be in float16."""


def cifar10n(
    path: str | Path, which: str | None = None, *, clean: Integers | None = None
) -> NoisyLabels:
    """CIFAR-10N: human labels of the CIFAR-10 training images.

    Wei et al., "Learning with Noisy Labels Revisited", ICLR 2022. About 9 % of ``"aggre"`` are
    wrong, 17 to 18 % of ``"random1"`` to ``"random3"``, 40 % of ``"worst"``.

    Args:
        path: the official ``CIFAR-10_human.pt``, or a ``.npy`` file with one set of 50,000 labels.
            Nothing in the file is executed.
        which: ``"aggre"`` (majority of three people), ``"random1"``, ``"random2"``, ``"random3"``
            (one person each) or ``"worst"`` (a wrong label if any of the three is wrong). None for
            ``.npy``.
        clean: the labels of CIFAR-10 in the official order. By default those in the official file.

    >>> from tempfile import TemporaryDirectory
    >>> clean, worst = np.arange(50_000) % 10, np.full(50_000, 3)
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "CIFAR-10_human.pt")  # a file of the same form
    ...     torch.save({"clean_label": clean, "worse_label": worst}, path)
    ...     cifar10n(path, "worst").rate
    0.9
    """
    key = None
    if Path(path).suffix == ".pt":
        key = CIFAR10N[one_of("which", which, CIFAR10N)]
    elif which is not None:
        raise ValueError(
            f"which must be None for {Path(path).name}, which has one set of labels, got {which!r}"
        )
    return _cifar_n(Path(path), key, 10, clean)


def cifar100n(path: str | Path, *, clean: Integers | None = None) -> NoisyLabels:
    """CIFAR-100N: human fine labels of the CIFAR-100 training images; about 40 % are wrong.

    Args:
        path: the official ``CIFAR-100_human.pt``, or a ``.npy`` file with 50,000 labels.
        clean: the fine labels of CIFAR-100 in the official order. By default those in the official
            file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "noisy.npy")
    ...     np.save(path, np.arange(50_000) % 100)
    ...     cifar100n(path, clean=np.arange(50_000) % 50).rate
    0.5
    """
    return _cifar_n(Path(path), "noisy_label" if Path(path).suffix == ".pt" else None, 100, clean)


def _cifar_n(path: Path, key: str | None, classes: int, clean: Integers | None) -> NoisyLabels:
    if path.suffix not in (".pt", ".npy"):
        raise ValueError(f"path must end in .pt or .npy, got {path.name!r}")
    content = read_content(path)
    noisy, name, truth = content, path.name, None
    if key is not None:
        noisy, in_file = (_entry(path, content, entry) for entry in (key, "clean_label"))
        name, truth = f"{name}:{key}", _sized(f"{name}:clean_label", in_file, classes, TRAIN)
    labels = _sized(name, noisy, classes, TRAIN)
    if clean is not None:
        known, truth = truth, _sized("clean", clean, classes, TRAIN)
        if known is not None and (differ := int((known != truth.cpu()).sum())):
            raise ValueError(
                f"clean must be the training labels in the official order, {differ:,} of "
                f"{TRAIN:,} differ from clean_label in {path.name}"
            )
    return from_array(labels, classes=classes, clean=truth, source=name)


def _entry(path: Path, content: Any, key: str) -> Any:
    """One array of a file by its name."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{path.name} must have arrays with names, got {type(content).__name__}")
    if key not in content:
        names = ", ".join(map(str, content)) or "none"
        raise ValueError(f"{path.name} must have {key!r}, it has {names:.200}")
    return content[key]


def _sized(name: str, labels: Any, classes: int, count: int) -> Tensor:
    """Labels as int64; their number must be ``count``."""
    result = checked_labels(name, labels, classes)
    if len(result) != count:
        raise ValueError(f"{name} must have {count:,} labels, got {len(result):,}")
    return result


@dataclass(frozen=True, eq=False)
class SoftLabels:
    """Labels of several people for each example.

    Attributes:
        probabilities: share of people who chose each class, float64, shape (n, classes).
        counts: number of people who chose each class, int64; None if only shares are known.
        majority: the class that most people chose; the first one of a tie.
    """

    probabilities: Tensor
    counts: Tensor | None = field(repr=False)
    majority: NoisyLabels

    def __len__(self) -> int:
        return len(self.probabilities)

    def sample(self, *, seed: int) -> NoisyLabels:
        """The label of one random person for each example. Depends only on the seed."""
        seed, clean = _validate.seed(seed), self.majority.clean
        levels = self.probabilities.cumsum(1)
        u = torch.from_numpy(random_uniforms(seed, "soft", len(self)))
        drawn = (u[:, None] >= levels / levels[:, -1:]).sum(1)
        noisy = drawn if clean is None else drawn.to(clean.device)
        facts = {"kind": "soft", "soft_sha256": tensor_sha256(self.probabilities), "seed": seed}
        return make_result(noisy, clean, self.probabilities.shape[1], **facts)


def cifar10h(path: str | Path, *, clean: Integers | None = None) -> SoftLabels:
    """CIFAR-10H: about 50 people's labels for each test image of CIFAR-10.

    Peterson et al., "Human uncertainty makes classification more robust", ICCV 2019.

    Args:
        path: the official ``cifar10h-probs.npy`` or ``cifar10h-counts.npy``.
        clean: the test labels of CIFAR-10 in the official order, if known.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "cifar10h-probs.npy")  # a file of the same form
    ...     np.save(path, np.tile([0.75, 0.25] + 8 * [0.0], (10_000, 1)))
    ...     people = cifar10h(path, clean=np.zeros(10_000, dtype=int))
    >>> people.majority.rate, round(people.sample(seed=0).rate, 1)
    (0.0, 0.2)
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"path must end in .npy, got {path.name!r}")
    values = read_content(path)
    if values.shape != (TEST, 10) or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{path.name} must have numbers of the shape ({TEST}, 10), "
            f"got {values.dtype} of the shape {values.shape}"
        )
    shares, counts = _shares(path.name, values)
    majority = torch.from_numpy(shares.argmax(1))
    truth = None if clean is None else _sized("clean", clean, 10, TEST)
    return SoftLabels(
        probabilities=torch.from_numpy(shares),
        counts=None if counts is None else torch.from_numpy(counts),
        majority=from_array(majority, classes=10, clean=truth, source=path.name),
    )


def _shares(name: str, values: Array) -> tuple[Array, Array | None]:
    """Shares of people in each row, and the counts if the values are counts."""
    exact = values.astype(np.float64)
    if not ((exact >= 0) & (exact <= MAX_PEOPLE)).all():
        raise ValueError(f"{name} must have numbers from 0 to {MAX_PEOPLE:,}")
    sums = exact.sum(1)
    if not (sums > 0).all():
        raise ValueError(f"{name} must have a number above 0 in row {sums.argmin()}")
    are_counts = bool((exact == exact.round()).all()) and bool((sums > 1).any())
    if not are_counts:
        _check_sums(name, sums)
    return exact / sums[:, None], exact.astype(np.int64) if are_counts else None


def _check_sums(name: str, sums: Array) -> None:
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"{name} must have rows that sum to 1, got {sums[worst]:.4g} in row {worst}"
        )


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """Labels of a dataset, predicted probabilities, and a mask of the wrong labels.

    The true labels are unknown.

    Attributes:
        labels: labels of the dataset, int64.
        probabilities: predicted probabilities of each class, float32, shape (n, classes).
        mask: True where the label is wrong.
        rate: share of wrong labels.
    """

    labels: Tensor
    probabilities: Tensor = field(repr=False)
    mask: Tensor
    rate: float

    def __len__(self) -> int:
        return len(self.labels)


def label_errors(path: str | Path) -> LabelErrors:
    """A dataset of cleanlab's label-error benchmark, to measure how well wrong labels are found.

    Args:
        path: ``.npz`` with the arrays ``labels`` (n), ``probabilities`` (n, classes) and ``wrong``
            (n, bool).

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "pets.npz")
    ...     p = np.float16([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    ...     np.savez(path, labels=[0, 0, 0], probabilities=p, wrong=[False, True, False])
    ...     label_errors(path).mask
    tensor([False,  True, False])
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {path.name!r}")
    content = read_content(path)
    raw, p, wrong = (_entry(path, content, key) for key in ("labels", "probabilities", "wrong"))
    if p.ndim != 2 or p.dtype.kind != "f" or not p.size:
        raise ValueError(
            f"{path.name} must have probabilities of the shape (n, classes), "
            f"got {p.dtype} of the shape {p.shape}"
        )
    labels = checked_labels(f"labels of {path.name}", raw, checked_classes(p.shape[1]))
    if wrong.dtype.kind != "b" or wrong.shape != raw.shape or len(p) != len(raw):
        shapes = f"{raw.shape}, {p.shape} and {wrong.shape} of {wrong.dtype}"
        raise ValueError(
            f"{path.name} must have a label, a row of probabilities and a boolean in wrong for "
            f"each example, got the shapes {shapes}"
        )
    exact = p.astype(np.float64)
    if not ((exact >= 0) & (exact <= 1)).all():
        raise ValueError(f"{path.name} must have probabilities from 0 to 1")
    sums = exact.sum(1)
    _check_sums(path.name, sums)
    return LabelErrors(
        labels=labels,
        probabilities=torch.from_numpy((exact / sums[:, None]).astype(np.float32)),
        mask=torch.from_numpy(wrong.copy()),
        rate=float(wrong.mean()),
    )
