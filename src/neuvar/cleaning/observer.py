"""Find wrong labels with the predictions of any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import softmax
from torch.utils.data import Dataset

from neuvar._atomic import replacing
from neuvar._validate import integer
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.score import LabelIssues, judge_checked

UNKNOWN = -1
"""Label of an example that was never seen."""
PROBLEMS = ("indices", "labels", "changed")
"""Kinds of invalid values in batches, each with a counter."""


class LabelObserver:
    r"""Find wrong labels in your own training, with any loop, model and optimizer.

    Call :meth:`update` with the logits of each training batch. The observer averages the
    probabilities of each example over the training. :meth:`label_issues` judges the labels by the
    mean, with the rule of :func:`~neuvar.find_label_issues`:

    .. math:: \bar p_i = \frac{1}{T_i} \sum_{t=1}^{T_i} \mathrm{softmax}(z_i^{(t)}).

    An example that is seen several times in an epoch counts each time. Rows of logits with nan are
    skipped.

    Memory: examples × classes × 4 bytes, and 8 bytes per example for the labels. This is 2.9 MB for
    60,000 examples of 10 classes, and 5.1 GB for ImageNet (1.28 million examples, 1,000 classes).

    Under DDP each process has an observer and updates it with its own batches. ``state_dict``,
    ``save`` and ``label_issues`` add up all observers: call them on all ranks.

    Args:
        examples: number of training examples; indices are from 0 to this number minus 1.
        classes: number of classes, the columns of the logits.
        names: name of each class; its index by default.
        device: device of the sums; by default that of the first logits.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> inputs, labels = torch.randn(100, 2), torch.arange(100) % 2
    >>> inputs[:, 0] += 4 * labels
    >>> labels[0] = 1  # wrong
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> observer = LabelObserver(examples=100, classes=2)
    >>> for epoch in range(10):
    ...     for indices in torch.randperm(100).split(20):
    ...         logits = model(inputs[indices])
    ...         observer.update(indices, logits, labels[indices])
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(logits, labels[indices]).backward()
    ...         optimizer.step()
    >>> issues = observer.label_issues()
    >>> int(issues.ranked[0]), bool(issues.flagged[0])
    (0, True)
    """

    def __init__(
        self,
        examples: int,
        classes: int,
        *,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.examples = integer("examples", examples, low=1)
        self.classes = integer("classes", classes, low=2)
        self.names = None if names is None else tuple(map(str, names))
        if self.names is not None and len(self.names) != self.classes:
            raise ValueError(
                f"names must have {classes} entries, one per class, got {len(self.names)}"
            )
        self._device = None if device is None else torch.device(device)
        self._sums = torch.zeros(0)
        self._labels = torch.zeros(0, dtype=torch.int64)
        self._problems = torch.zeros(0, dtype=torch.int64)

    def __repr__(self) -> str:
        return f"LabelObserver(examples={self.examples}, classes={self.classes})"

    @torch.no_grad()
    def update(self, indices: Any, logits: Tensor, labels: Any) -> None:
        """Add the probabilities of a batch. Call it in training, before or after the step.

        On the CPU, invalid indices and labels raise an error at once. On other devices
        ``label_issues`` and ``state_dict`` raise it, so that the training does not wait for the
        device.

        Args:
            indices: position of each example in the training data, shape (n,).
            logits: shape (n, classes), in any precision.
            labels: class index of each example, shape (n,).
        """
        shape = tuple(getattr(logits, "shape", ()))
        if len(shape) != 2 or shape[1] != self.classes:
            got = shape or type(logits).__name__
            raise ValueError(f"logits must have the shape (n, {self.classes}), got {got}")
        self._prepare(logits.device)
        i, y = self._read("indices", indices, logits), self._read("labels", labels, logits)
        if i.device.type == "cpu":
            self._check_on_cpu(i.numpy(), y.numpy())
        else:
            outside = [(i < 0) | (i >= self.examples), (y < 0) | (y >= self.classes)]
            self._problems[:2] += torch.stack(outside).sum(1)
            i, y = i.clamp(0, self.examples - 1), y.clamp(0, self.classes - 1)
            known = self._labels[i]
            self._labels[i] = torch.where(known == UNKNOWN, y, known)
            self._problems[2] += (self._labels[i] != y).sum()
        p = softmax(logits.to(self._sums.device, torch.float32), 1).nan_to_num_(0.0)
        self._sums.index_add_(0, i, p)

    def _prepare(self, device: torch.device) -> None:
        """Allocate the sums on their device, or move loaded sums there."""
        if self._device is None:
            self._device = device
        if self._sums.numel() and self._sums.device == self._device:
            return
        if not self._sums.numel():
            self._sums = torch.zeros(self.examples, self.classes)
            self._labels = torch.full((self.examples,), UNKNOWN)
        self._sums, self._labels = self._sums.to(self._device), self._labels.to(self._device)
        self._problems = torch.zeros(len(PROBLEMS), dtype=torch.int64, device=self._device)

    def _read(self, name: str, values: Any, logits: Tensor) -> Tensor:
        values = torch.as_tensor(values)
        whole = not (values.is_floating_point() or values.is_complex())
        if values.shape != (len(logits),) or not whole or values.dtype == torch.bool:
            raise ValueError(
                f"{name} must be {len(logits)} integers, one for each row of logits, got "
                f"{values.dtype} of shape {tuple(values.shape)}"
            )
        read: Tensor = values.to(self._sums.device, torch.int64)
        return read

    def _check_on_cpu(self, indices: Array, labels: Array) -> None:
        """Check a batch and remember its labels; NumPy is faster than torch for small arrays."""
        limits = (("indices", indices, self.examples), ("labels", labels, self.classes))
        for name, values, count in limits:
            low, high = (values.min(), values.max()) if len(values) else (0, 0)
            if low < 0 or high >= count:
                raise ValueError(
                    f"{name} must be from 0 to {count - 1}, got {low if low < 0 else high}"
                )
        known = self._labels.numpy()
        if (known[indices] == labels).all():
            return  # after the first epoch
        new = known[indices] == UNKNOWN
        known[indices[new]] = labels[new]
        changed = known[indices] != labels
        if changed.any():
            first = int(changed.argmax())
            raise ValueError(
                "labels must not change during training, example "
                f"{indices[first]} had {known[indices[first]]} and now has {labels[first]}"
            )

    def label_issues(self, labels: Any = None) -> LabelIssues:
        """Judge the labels by the mean probabilities, as ``find_label_issues`` does.

        Examples that were never seen are not judged and not flagged. The result lists them in
        ``unseen``, and their label is -1 unless ``labels`` are given.

        Args:
            labels: labels of all examples, as class indices.
        """
        state = self.state_dict()
        y = state["labels"].numpy()
        if labels is not None:
            y = self._same_labels(y, labels)
        issues, seen = self._judge_seen(state["sums"], y)
        return issues if len(seen) == len(y) else _expand(issues, y, seen)

    def seen_issues(self) -> tuple[LabelIssues, Array]:
        """The issues of the examples that were seen, and their indices."""
        state = self.state_dict()
        return self._judge_seen(state["sums"], state["labels"].numpy())

    def _judge_seen(self, sums: Tensor, labels: Array) -> tuple[LabelIssues, Array]:
        total = sums.sum(1)
        seen = np.flatnonzero(total.numpy() > 0)
        if not len(seen):
            raise ValueError("the observer has seen no example; call update() with each batch")
        if len(seen) < len(labels):
            sums, total, labels = sums[seen], total[seen], labels[seen]
        p = sums.div_(total[:, None]).numpy()  # sums are a copy
        return judge_checked(p, labels, names=self.names, history=True), seen

    def _same_labels(self, own: Array, labels: Any) -> Array:
        """The given labels; refuses labels that differ from those seen in training."""
        y = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
        if y.shape != own.shape or y.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be {len(own)} class indices, got {y.dtype} of shape {y.shape}"
            )
        different = (own != UNKNOWN) & (own != y)
        if different.any():
            first = int(different.argmax())
            raise ValueError(
                f"labels must be those of the training, but {different.sum()} of {len(own)} are "
                f"not: example {first} had {own[first]}, got {y[first]}"
            )
        return y.astype(np.int64)

    def state_dict(self) -> dict[str, Any]:
        """The sums and labels as tensors on the CPU. Under DDP, call it on all ranks.

        It loads with ``torch.load(weights_only=True)``.
        """
        if not self._sums.numel():
            self._prepare(self._device or torch.device("cpu"))
        sums, labels, problems = self._sums, self._labels, self._problems.clone()
        if is_distributed():
            sums, labels, problems = _gather(sums, labels, problems)
        self._raise_problems(problems)
        return {
            "sums": sums.detach().to("cpu", copy=True),
            "labels": labels.to("cpu", copy=True),
            "names": None if self.names is None else list(self.names),
        }

    def _raise_problems(self, problems: Tensor) -> None:
        indices, labels, changed = problems.tolist()
        if indices:
            raise ValueError(
                f"indices must be from 0 to {self.examples - 1}, but {indices} of them were not"
            )
        if labels:
            raise ValueError(
                f"labels must be from 0 to {self.classes - 1}, but {labels} of them were not"
            )
        if changed:
            raise ValueError(
                f"labels must not change during training, but {changed} of them did; is the same "
                "index used for several examples?"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Under DDP, each rank loads the same state."""
        try:
            sums, labels, names = state["sums"], state["labels"], state["names"]
            shapes = tuple(sums.shape), tuple(labels.shape)
        except (KeyError, TypeError, AttributeError):
            raise ValueError("the state is not that of a LabelObserver") from None
        if shapes != ((self.examples, self.classes), (self.examples,)):
            raise ValueError(
                f"the state must be of {self.examples} examples and {self.classes} classes, got "
                f"sums of shape {shapes[0]} and labels of shape {shapes[1]}"
            )
        first = not is_distributed() or dist.get_rank() == 0
        self._sums = sums.to("cpu", torch.float32, copy=True) if first else torch.zeros(shapes[0])
        self._labels = labels.to("cpu", torch.int64, copy=True)
        self._problems = torch.zeros(len(PROBLEMS), dtype=torch.int64)
        if self._device is not None:
            self._prepare(self._device)
        self.names = self.names or (None if names is None else tuple(names))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file for :meth:`load` and for ``neuvar clean --observed``.

        Under DDP, call it on all ranks; the first one writes.
        """
        state = self.state_dict()
        if not is_distributed() or dist.get_rank() == 0:
            with replacing(Path(path)) as file:
                torch.save(state, file)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """An observer from a file that :meth:`save` has written."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            examples, classes = state["sums"].shape
        except (UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError):
            raise ValueError(f"{path} is not a file of LabelObserver.save()") from None
        observer = cls(examples, classes)
        observer.load_state_dict(state)
        return observer


class IndexedDataset(Dataset[Any]):
    """A dataset that also returns the index of each example, for :class:`LabelObserver`.

    A tuple gets the index as its last element, a dict under "index".

    Args:
        dataset: map-style dataset of tuples or dicts.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    >>> IndexedDataset(data)[2]
    (tensor([0., 0.]), tensor(1), 2)
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if isinstance(item, Mapping):
            return {**item, "index": index}
        if not isinstance(item, (tuple, list)):
            raise ValueError(
                f"items of the dataset must be tuples or dicts, got {type(item).__name__}"
            )
        return (*item, index)


def _expand(issues: LabelIssues, labels: Array, seen: Array) -> LabelIssues:
    """Issues of all examples, from those of the seen examples."""

    def expand(values: Array, missing: Any) -> Array:
        every = np.full((len(labels), *values.shape[1:]), missing, dtype=values.dtype)
        every[seen] = values
        return every

    suggested = labels.copy()
    suggested[seen] = issues.suggested
    return replace(
        issues,
        labels=labels,
        probabilities=expand(issues.probabilities, 1 / len(issues.names)),
        quality=expand(issues.quality, 0.5),
        flagged=expand(issues.flagged, False),
        error_probability=expand(issues.error_probability, 0),
        suggestion_probability=expand(issues.suggestion_probability, 0),
        suggested=suggested,
        unseen=np.setdiff1d(np.arange(len(labels)), seen),
    )


def is_distributed() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather(sums: Tensor, labels: Tensor, problems: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over all ranks, and the labels that at least one rank has seen."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else sums.device
    sums, labels, problems = (value.to(device, copy=True) for value in (sums, labels, problems))
    dist.all_reduce(sums)
    largest = labels.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # Ranks may have seen different labels of an example.
    problems[2] += ((labels != UNKNOWN) & (labels != largest)).sum()
    dist.all_reduce(problems)
    return sums, largest, problems
