"""Streams of tasks, made from one dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from neuvar import _validate
from neuvar.data import Dataset, Split

ROTATED_AT_ONCE = 4096
"""Number of images that are rotated together; limits the memory."""

View = Callable[[Split], Split]


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        number: position in the stream, from 0.
        name: such as "permutation 3".
        classes: classes of the dataset that the task has, in the order of its labels.
        head: head of a multi-head network to use; 0 if there is only one head.
    """

    number: int
    name: str
    classes: tuple[int, ...]
    head: int
    _data: Dataset = field(repr=False)
    _view: View = field(repr=False)

    @property
    def train(self) -> Split:
        """The training split, computed at each call: keep it while you train on the task."""
        return self._view(self._data.train)

    @property
    def test(self) -> Split:
        """The test split, computed at each call."""
        return self._view(self._data.test)


@dataclass(frozen=True, eq=False)
class Stream(Sequence[Task]):
    """A sequence of tasks; a slice is a stream too. The images are kept in memory once.

    Attributes:
        name: such as "permuted-mnist".
        tasks: its tasks, in order.
        outputs: number of outputs of each head that a network for this stream needs.
    """

    name: str
    tasks: tuple[Task, ...]
    outputs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Stream: ...
    def __getitem__(self, index: int | slice) -> Task | Stream:
        if isinstance(index, slice):
            return replace(self, tasks=self.tasks[index])
        return self.tasks[index]


def permuted_tasks(data: Dataset, tasks: int = 5, *, seed: int = 0) -> Stream:
    r"""Make tasks that permute the pixels of all images, each in its own order.

    All images and channels of a task have the same permutation; the first task is permuted too. A
    permutation depends on the seed and the task's number only, so a longer stream begins like a
    shorter one. All tasks share one head.

    References:
        Goodfellow et al. 2013, An empirical investigation of catastrophic forgetting.

    Args:
        data: the dataset.
        tasks: number of tasks.
        seed: seed of the permutations.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = permuted_tasks(mnist_excerpt(), 5, seed=1)
    >>> stream[0].train.images.shape, stream.outputs
    (torch.Size([6000, 28, 28]), (10,))
    """
    count, seed = _validate.integer("tasks", tasks, low=1), _validate.seed(seed)
    pixels = math.prod(data.train.images.shape[-2:])
    views = []
    for k in range(count):
        order = torch.from_numpy(np.random.default_rng((seed, k)).permutation(pixels))
        views.append((f"permutation {k}", partial(_permuted, order=order)))
    return _one_head("permuted", data, views)


def rotated_tasks(data: Dataset, angles: Sequence[float]) -> Stream:
    """Make tasks that rotate all images, each by its own angle.

    Rotation is around the centre, with bilinear interpolation and black outside. All tasks share
    one head.

    References:
        Lopez-Paz & Ranzato 2017, Gradient episodic memory for continual learning.

    Args:
        data: the dataset.
        angles: one angle per task, in degrees, counter-clockwise.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = rotated_tasks(mnist_excerpt(), [0, 45, 90])
    >>> [task.name for task in stream]
    ['0 degrees', '45 degrees', '90 degrees']
    """
    if not len(angles) or not all(math.isfinite(angle) for angle in angles):
        raise ValueError(f"angles must be at least one finite number of degrees, got {angles!r}")
    views = [(f"{a:g} degrees", partial(_rotated, degrees=float(a))) for a in angles]
    return _one_head("rotated", data, views)


def _one_head(kind: str, data: Dataset, views: Sequence[tuple[str, View]]) -> Stream:
    """Tasks with all classes and one head, each with its name and its view of the dataset."""
    classes = tuple(range(data.classes))
    tasks = (Task(k, name, classes, 0, data, view) for k, (name, view) in enumerate(views))
    return Stream(f"{kind}-{data.name}", tuple(tasks), (data.classes,))


def split_tasks(
    data: Dataset, groups: Sequence[Sequence[int]] | None = None, *, scenario: str = "task"
) -> Stream:
    """Make tasks with different classes each.

    References:
        Van de Ven & Tolias 2019, Three scenarios for continual learning.

    Args:
        data: the dataset.
        groups: the classes of each task; by default pairs in order.
        scenario: "task" gives each task its own head and labels from 0; "domain" has labels from 0
            and one head; "class" keeps the labels of the dataset and has one head for all classes.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = split_tasks(mnist_excerpt())
    >>> stream[2].classes, stream[2].head, stream[2].test.labels.bincount(), stream.outputs
    ((4, 5), 2, tensor([100, 100]), (2, 2, 2, 2, 2))
    """
    _validate.one_of("scenario", scenario, ("task", "domain", "class"))
    if groups is None:
        groups = [range(k, min(k + 2, data.classes)) for k in range(0, data.classes, 2)]
    last = data.classes - 1
    try:
        chosen = [
            tuple(_validate.integer("groups", k, low=0, high=last) for k in group)
            for group in groups
        ]
    except (TypeError, ValueError):
        chosen = []
    every = [k for group in chosen for k in group]
    if not (chosen and all(chosen)) or len(set(every)) < len(every):
        raise ValueError(
            f"groups must be lists of different classes from 0 to {last}, got {groups!r}"
        )
    tasks = []
    for k, group in enumerate(chosen):
        view = partial(_selected, classes=group, keep_labels=scenario == "class")
        name = "classes " + ", ".join(map(str, group))
        tasks.append(Task(k, name, group, k if scenario == "task" else 0, data, view))
    sizes = tuple(map(len, chosen))
    outputs = {"task": sizes, "domain": (max(sizes),), "class": (data.classes,)}[scenario]
    return Stream(f"split-{data.name}-{scenario}", tuple(tasks), outputs)


def _permuted(split: Split, order: Tensor) -> Split:
    pixels = split.images.flatten(-2)
    return Split(pixels[..., order].view_as(split.images), split.labels)


def _selected(split: Split, classes: tuple[int, ...], *, keep_labels: bool) -> Split:
    """The images of some classes, with labels from 0 unless they are kept."""
    where = torch.isin(split.labels, torch.tensor(classes)).nonzero().squeeze(1)
    labels = split.labels[where]
    if not keep_labels:
        new_labels = torch.full((max(classes) + 1,), -1)
        new_labels[list(classes)] = torch.arange(len(classes))
        labels = new_labels[labels]
    return Split(split.images[where], labels)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images counter-clockwise around their centre, with bilinear interpolation."""
    height, width = images.shape[-2:]
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    y = torch.arange(height)[:, None] - (height - 1) / 2
    x = torch.arange(width)[None, :] - (width - 1) / 2
    # Source of each pixel, in units of half the image; rows count downwards.
    grid = torch.stack([2 / width * (cos * x - sin * y), 2 / height * (sin * x + cos * y)], -1)
    planes = images.reshape(-1, height, width)
    rotated = torch.empty_like(planes)
    for start in range(0, len(planes), ROTATED_AT_ONCE):
        part = slice(start, start + ROTATED_AT_ONCE)
        # grid_sample reuses the interpolation weights for all channels of an image.
        result = grid_sample(planes[part][None].float(), grid[None], align_corners=False)
        rotated[part] = result[0].round()
    return rotated.view_as(images)


def _rotated(split: Split, degrees: float) -> Split:
    return Split(rotate(split.images, degrees), split.labels)


def _first_split(data: Dataset, tasks: int, *, seed: int) -> Stream:
    stream = split_tasks(data)
    return stream[: _validate.integer("tasks", tasks, low=1, high=len(stream))]


STREAMS: dict[str, Callable[..., Stream]] = {"permuted": permuted_tasks, "split": _first_split}
"""Functions by name, called as ``function(data, tasks, seed=...)``; you may add your own.

They are the values of ``stream`` of :class:`neuvar.experiments.Tasks`.
"""
