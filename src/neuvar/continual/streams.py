"""Streams of tasks, made from one data set and read one task at a time."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from neuvar.data import Dataset, Split

SCENARIOS = ("task", "domain", "class")

ROTATED_AT_ONCE = 4096
"""How many images are turned together: the floats in between stay small."""


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        number: place in the stream, from 0.
        name: how the task is called in results.
        classes: which classes of the data set it has, in the order of its labels.
        head: which head of a multi-head network answers; 0 where there is but one.
    """

    number: int
    name: str
    classes: tuple[int, ...]
    head: int
    _data: Dataset = field(repr=False)
    _view: Callable[[Split], Split] = field(repr=False)

    @property
    def train(self) -> Split:
        """What may be learned from, made anew at each call: keep it while the task lasts."""
        return self._view(self._data.train)

    @property
    def test(self) -> Split:
        """What is only measured on, made anew at each call."""
        return self._view(self._data.test)


@dataclass(frozen=True, eq=False)
class Stream(Sequence[Task]):
    """Tasks in the order in which they are learned; a slice of it is a stream as well.

    It holds the images of the data set once, whatever the number of tasks.

    Attributes:
        name: how the stream is called in results.
        tasks: its tasks.
        outputs: how many outputs each head of a network for it needs.
    """

    name: str
    tasks: tuple[Task, ...]
    outputs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Stream: ...
    def __getitem__(self, index: int | slice) -> Task | Stream:
        if isinstance(index, slice):
            return replace(self, tasks=self.tasks[index])
        return self.tasks[index]


def permuted_tasks(data: Dataset, tasks: int = 5, *, seed: int = 0) -> Stream:
    r"""Make tasks that show the pixels of all images in an order of their own.

    Task k has the images :math:`x_{\pi_k(i)}`, where :math:`\pi_k` is one permutation for all its
    images and channels. Every task is permuted, the first as well. A permutation depends on the
    seed and on k alone, so a longer stream begins like a shorter one.

    References:
        Goodfellow et al.: An Empirical Investigation of Catastrophic Forgetting in Gradient-Based
        Neural Networks, 2013.

    Args:
        data: where the images come from.
        tasks: how many tasks.
        seed: seed of the permutations, below 2³², a matter apart from the seed of the training.

    Returns:
        The stream; all its tasks share one head.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = permuted_tasks(mnist_excerpt(), 5, seed=1)
    >>> stream[0].train.images.shape, stream.outputs
    (torch.Size([6000, 28, 28]), (10,))
    """
    count, seed = _at_least("tasks", tasks, 1), _at_least("seed", seed, 0)
    if seed >= 2**32:  # a larger one would take the place of the task's number in NumPy's mixing
        raise ValueError(f"seed must be an int from 0 to {2**32 - 1}, got {seed!r}")
    pixels = math.prod(data.train.images.shape[-2:])
    orders = [
        torch.from_numpy(np.random.default_rng((seed, k)).permutation(pixels)) for k in range(count)
    ]
    everything = tuple(range(data.classes))
    made = tuple(
        Task(k, f"permutation {k}", everything, 0, data, partial(_permuted, order=order))
        for k, order in enumerate(orders)
    )
    return Stream(f"permuted-{data.name}", made, (data.classes,))


def rotated_tasks(data: Dataset, angles: Sequence[float]) -> Stream:
    """Make tasks that show all images turned by an angle of their own.

    Pixels are interpolated bilinearly around the centre; what comes from outside is black.

    References:
        Lopez-Paz, Ranzato: Gradient Episodic Memory for Continual Learning, 2017.

    Args:
        data: where the images come from.
        angles: one angle a task, in degrees, counter-clockwise.

    Returns:
        The stream; all its tasks share one head.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = rotated_tasks(mnist_excerpt(), [0, 45, 90])
    >>> [task.name for task in stream]
    ['0 degrees', '45 degrees', '90 degrees']
    """
    if not len(angles) or not all(math.isfinite(angle) for angle in angles):
        raise ValueError(f"angles must be at least one finite number of degrees, got {angles!r}")
    everything = tuple(range(data.classes))
    made = tuple(
        Task(k, f"{a:g} degrees", everything, 0, data, partial(_rotated, degrees=float(a)))
        for k, a in enumerate(angles)
    )
    return Stream(f"rotated-{data.name}", made, (data.classes,))


def split_tasks(
    data: Dataset, groups: Sequence[Sequence[int]] | None = None, *, scenario: str = "task"
) -> Stream:
    """Make tasks that have some of the classes each.

    References:
        Zenke, Poole, Ganguli: Continual Learning Through Synaptic Intelligence, 2017. Van de Ven,
        Tolias: Three scenarios for continual learning, 2019.

    Args:
        data: where the images come from.
        groups: the classes of each task; pairs in order by default, the last alone if need be.
        scenario: "task" gives each task a head and labels from 0; "domain" labels from 0 and one
            head for all; "class" keeps the labels of the data set, with one head for all classes.

    Returns:
        The stream.

    >>> from neuvar.data import mnist_excerpt
    >>> stream = split_tasks(mnist_excerpt())
    >>> stream[2].classes, stream[2].head, stream[2].test.labels.bincount(), stream.outputs
    ((4, 5), 2, tensor([100, 100]), (2, 2, 2, 2, 2))
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}, got {scenario!r}")
    if groups is None:
        groups = [range(k, min(k + 2, data.classes)) for k in range(0, data.classes, 2)]
    chosen = _checked_groups(groups, data.classes)
    view = partial(_chosen, keep_labels=scenario == "class")
    made = tuple(
        Task(
            number=k,
            name="classes " + ", ".join(map(str, group)),
            classes=group,
            head=k if scenario == "task" else 0,
            _data=data,
            _view=partial(view, classes=group),
        )
        for k, group in enumerate(chosen)
    )
    sizes = tuple(len(group) for group in chosen)
    outputs = {"task": sizes, "domain": (max(sizes),), "class": (data.classes,)}[scenario]
    return Stream(f"split-{data.name}-{scenario}", made, outputs)


def _checked_groups(groups: Sequence[Sequence[int]], classes: int) -> list[tuple[int, ...]]:
    try:
        chosen = [tuple(group) for group in groups]
    except TypeError:  # a number in place of a list
        chosen = []
    every = [number for group in chosen for number in group]
    whole = all(hasattr(k, "__index__") and not isinstance(k, bool) for k in every)
    if (
        not (chosen and all(chosen) and whole)
        or len({int(k) for k in every}) < len(every)
        or not {int(k) for k in every} <= set(range(classes))
    ):
        raise ValueError(
            f"groups must be lists of different classes from 0 to {classes - 1}, got {groups!r}"
        )
    return [tuple(map(operator.index, group)) for group in chosen]


def _at_least(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    return operator.index(value)


def _permuted(split: Split, order: Tensor) -> Split:
    pixels = split.images.flatten(-2)
    return Split(pixels[..., order].view_as(split.images), split.labels)


def _chosen(split: Split, classes: tuple[int, ...], *, keep_labels: bool) -> Split:
    """The images of some classes, with labels that count these classes unless they are kept."""
    where = torch.isin(split.labels, torch.tensor(classes)).nonzero().squeeze(1)
    labels = split.labels[where]
    if not keep_labels:
        places = torch.full((max(classes) + 1,), -1)
        places[list(classes)] = torch.arange(len(classes))
        labels = places[labels]
    return Split(split.images[where], labels)


def _rotated(split: Split, degrees: float) -> Split:
    return Split(rotate(split.images, degrees), split.labels)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn images counter-clockwise around their centre, with bilinear interpolation."""
    height, width = images.shape[-2:]
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    y = torch.arange(height)[:, None] - (height - 1) / 2
    x = torch.arange(width)[None, :] - (width - 1) / 2
    # Where each pixel comes from, in halves of the image; rows count downwards.
    grid = torch.stack([2 / width * (cos * x - sin * y), 2 / height * (sin * x + cos * y)], -1)
    planes = images.reshape(-1, height, width)
    turned = torch.empty_like(planes)
    for start in range(0, len(planes), ROTATED_AT_ONCE):
        part = slice(start, start + ROTATED_AT_ONCE)
        # As channels of one image, all share the weights of the interpolation.
        found = grid_sample(planes[part][None].float(), grid[None], align_corners=False)
        turned[part] = found[0].round()
    return turned.view_as(images)
