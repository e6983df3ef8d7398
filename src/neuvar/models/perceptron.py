"""Fully connected networks, with one head or one per task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor, nn

from neuvar import _validate
from neuvar._validate import integer
from neuvar.models.initialization import seeded


class Perceptron(nn.Module):
    """Linear layers with a ReLU after each but the last; see :func:`mlp`."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_layers(sizes)[:-1])
        self._inputs = sizes[0]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the flattened inputs."""
        scores: Tensor = self.layers(_flat(x, self._inputs))
        return scores


def mlp(sizes: Iterable[int] = (784, 1024, 1024, 10), *, seed: int) -> Perceptron:
    """Make a fully connected network with ReLUs, by default the paper's for MNIST.

    Args:
        sizes: units of each layer, from the inputs to the classes. Inputs may have any shape
            (n, ...) with ``sizes[0]`` elements each.
        seed: seed of the initial weights.

    >>> import torch
    >>> model = mlp(seed=0)
    >>> model(torch.zeros(2, 28, 28)).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([2, 10]), 1863690)
    """
    checked = _validate.sizes("sizes", sizes, at_least=2)
    return seeded(lambda: Perceptron(checked), seed)


class MultiHead(nn.Module):
    """A fully connected network with one output layer for each task; see :func:`multi_head`.

    One task is selected, at first task 0. The heads of all other tasks are frozen and have no
    gradient, so no optimizer changes them, and NVRM draws no noise for them. After :meth:`select`,
    the previous head may have the optimizer's noise until the next step; ``denoised()`` removes it.
    The selected task is part of the state dict.
    """

    def __init__(self, body: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(*_layers(body))
        self.heads = nn.ModuleList(nn.Linear(body[-1], count) for count in outputs)
        self.task = 0
        self._inputs = body[0]

    def select(self, task: int) -> None:
        """Train the head of this task, and freeze all others.

        >>> model = multi_head((4, 8, 2), tasks=3, seed=0)
        >>> model.select(2)
        >>> [head.weight.requires_grad for head in model.heads]
        [False, False, True]
        """
        self.task = self._checked(task)
        for number, head in enumerate(self.heads):
            head.requires_grad_(number == self.task)
            if number != self.task:
                head.zero_grad(set_to_none=True)  # a gradient left over would still move it

    def forward(self, x: Tensor, task: int | None = None) -> Tensor:
        """Logits from the head of a task, by default the selected one."""
        head = self.heads[self.task if task is None else self._checked(task)]
        scores: Tensor = head(self.body(_flat(x, self._inputs)))
        return scores

    def get_extra_state(self) -> int:
        """The selected task, for the state dict."""
        return self.task

    def set_extra_state(self, state: int) -> None:
        """Select the task that was selected when the state was saved."""
        self.select(state)

    def _checked(self, task: int) -> int:
        return integer("task", task, low=0, high=len(self.heads) - 1)


def multi_head(
    sizes: Iterable[int | Sequence[int]] = (784, 1024, 1024, 2),
    *,
    tasks: int | None = None,
    seed: int,
) -> MultiHead:
    """Make a fully connected network with a head for each task, by default that of Split MNIST.

    Args:
        sizes: units of each layer, from the inputs to the classes of one task. A tuple as the last
            item gives each head its own size, such as the outputs of a stream.
        tasks: number of heads; 5 by default, unless each head has its own size.
        seed: seed of the initial weights.

    >>> import torch
    >>> model = multi_head(seed=0)
    >>> model.select(3)
    >>> x = torch.ones(2, 784)
    >>> torch.equal(model(x), model(x, task=3)), torch.equal(model(x), model(x, task=0))
    (True, False)
    >>> [head.out_features for head in multi_head((784, 100, (3, 2)), seed=0).heads]
    [3, 2]
    """
    body, outputs = _body_and_heads(sizes, tasks)
    model = seeded(lambda: MultiHead(body, outputs), seed)
    model.select(0)
    return model


def _body_and_heads(sizes: object, tasks: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the layers below the heads, and of each head."""
    items = tuple(sizes) if isinstance(sizes, Iterable) else ()
    if not items or not isinstance(items[-1], Iterable):
        checked = _validate.sizes("sizes", items or sizes, at_least=3)
        return checked[:-1], checked[-1:] * integer("tasks", 5 if tasks is None else tasks, low=1)
    outputs = _validate.sizes("sizes of the heads", items[-1], at_least=1)
    if tasks is not None and integer("tasks", tasks, low=1) != len(outputs):
        raise ValueError(f"tasks must be {len(outputs)}, one for each size, got {tasks!r}")
    return _validate.sizes("sizes", (*items[:-1], outputs[0]), at_least=3)[:-1], outputs


def _layers(sizes: tuple[int, ...]) -> list[nn.Module]:
    pairs = [(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in pairwise(sizes)]
    return [layer for pair in pairs for layer in pair]


def _flat(x: Tensor, inputs: int) -> Tensor:
    if math.prod(x.shape[1:]) != inputs:
        raise ValueError(
            f"inputs must be (n, ...) with {inputs} elements each, got the shape {tuple(x.shape)}"
        )
    return x.flatten(1)
