"""Networks by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from neuvar._validate import integer, one_of, returned, sizes
from neuvar.models.convolutional import ImageNetwork, mobilenet_v2, resnet, vgg
from neuvar.models.perceptron import mlp


def _mlp(
    *, classes: int, seed: int, width: int = 1024, shape: tuple[int, ...] = (1, 28, 28)
) -> nn.Module:
    hidden, scores = integer("width", width, low=1), integer("classes", classes, low=1)
    return mlp((math.prod(shape), hidden, hidden, scores), seed=seed)


def _for_images(
    make: Callable[..., ImageNetwork],
    *layout: Any,
    shape: tuple[int, ...] = (3, 32, 32),
    **options: int,
) -> nn.Module:
    if len(shape) != 3:
        raise ValueError(f"shape must be (channels, height, width), got {shape}")
    model = make(*layout, channels=shape[0], **options)
    model.check(*shape)
    return model


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "resnet-10": partial(_for_images, resnet, (1, 1, 1, 1), width=16),
    "resnet-18": partial(_for_images, resnet, (2, 2, 2, 2)),
    "resnet-34": partial(_for_images, resnet, (3, 4, 6, 3)),
    "vgg-11": partial(_for_images, vgg, (1, 1, 2, 2, 2), width=16),
    "vgg-16": partial(_for_images, vgg, (2, 2, 3, 3, 3)),
    "mobilenet-v2": partial(_for_images, mobilenet_v2),
}
"""Builders by name, called as ``builder(classes=..., seed=...)``; you may add your own.

``width`` and ``shape`` are passed only if the caller of :func:`build` gives them. The paper's
networks are mlp, resnet-34, vgg-16 and mobilenet-v2. For a CPU there are resnet-10 and vgg-11, and
mobilenet-v2 with a width of 8.
"""


def build(
    name: str,
    *,
    classes: int,
    seed: int,
    width: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """Make a network by its name.

    Args:
        name: one of :data:`NETWORKS`.
        classes: number of classes.
        seed: seed of the initial weights.
        width: units of the hidden layers, or channels of the first convolution.
        shape: shape of one input, such as (3, 32, 32).

    >>> model = build("resnet-10", classes=10, seed=0, shape=(1, 28, 28))
    >>> sum(p.numel() for p in model.parameters())
    308538

    Add a network of your own:

    >>> def linear(*, classes, seed, shape=(784,)):
    ...     return mlp((math.prod(shape), classes), seed=seed)
    >>> NETWORKS["linear"] = linear
    >>> sum(p.numel() for p in build("linear", classes=10, seed=0).parameters())
    7850
    >>> del NETWORKS["linear"]
    """
    options: dict[str, Any] = {}
    if width is not None:
        options["width"] = width
    if shape is not None:
        options["shape"] = sizes("shape", shape)
    built = NETWORKS[one_of("name", name, NETWORKS)](classes=classes, seed=seed, **options)
    model: nn.Module = returned(f'NETWORKS["{name}"]', built, nn.Module, "torch.nn.Module")
    return model
