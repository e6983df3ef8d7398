"""Networks by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuvar import models
from neuvar._validate import integer, one_of, sizes

if TYPE_CHECKING:
    from torch import nn

    from neuvar.models.convolutional import ImageNetwork


def _mlp(
    *, classes: int, seed: int, width: int = 1024, shape: tuple[int, ...] = (1, 28, 28)
) -> nn.Module:
    hidden, scores = integer("width", width, low=1), integer("classes", classes, low=1)
    return models.mlp((math.prod(shape), hidden, hidden, scores), seed=seed)


def _on_images(network: str, *layout: Any, width: int) -> Callable[..., nn.Module]:
    """A builder; ``network`` is a function of ``models``, imported when the builder is called."""

    def make(
        *, shape: tuple[int, ...] = (3, 32, 32), width: int = width, **options: int
    ) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(f"shape must be (channels, height, width), got {shape}")
        build = getattr(models, network)
        model: ImageNetwork = build(*layout, width=width, channels=shape[0], **options)
        model.check(*shape)
        return model

    return make


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _mlp,
    "resnet-10": _on_images("resnet", (1, 1, 1, 1), width=16),
    "resnet-18": _on_images("resnet", (2, 2, 2, 2), width=64),
    "resnet-34": _on_images("resnet", (3, 4, 6, 3), width=64),
    "vgg-11": _on_images("vgg", (1, 1, 2, 2, 2), width=16),
    "vgg-16": _on_images("vgg", (2, 2, 3, 3, 3), width=64),
    "mobilenet-v2": _on_images("mobilenet_v2", width=32),
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
    ...     return models.mlp((math.prod(shape), classes), seed=seed)
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
    return NETWORKS[one_of("name", name, NETWORKS)](classes=classes, seed=seed, **options)
