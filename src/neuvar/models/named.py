"""Networks by name, for the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuvar import models

if TYPE_CHECKING:
    from torch import nn

    from neuvar.models.images import ImageNetwork


def _mlp(shape: tuple[int, ...], *, classes: int, seed: int, width: int) -> nn.Module:
    from neuvar.models.seeded import checked_size

    hidden, scores = checked_size("width", width), checked_size("classes", classes)
    return models.mlp((math.prod(shape), hidden, hidden, scores), seed=seed)


def _on_images(network: str, *layout: Any) -> Callable[..., nn.Module]:
    """A maker of networks; ``network`` is a function of ``models``, imported when it is called."""

    def make(shape: tuple[int, ...], **options: Any) -> nn.Module:
        if len(shape) != 3:
            raise ValueError(f"shape must be (channels, height, width), got {shape}")
        model: ImageNetwork = getattr(models, network)(*layout, channels=shape[0], **options)
        model.check(*shape)
        return model

    return make


NETWORKS: dict[str, tuple[Callable[..., nn.Module], int, tuple[int, ...]]] = {
    "mlp": (_mlp, 1024, (1, 28, 28)),
    "resnet-10": (_on_images("resnet", (1, 1, 1, 1)), 16, (3, 32, 32)),
    "resnet-18": (_on_images("resnet", (2, 2, 2, 2)), 64, (3, 32, 32)),
    "resnet-34": (_on_images("resnet", (3, 4, 6, 3)), 64, (3, 32, 32)),
    "vgg-11": (_on_images("vgg", (1, 1, 2, 2, 2)), 16, (3, 32, 32)),
    "vgg-16": (_on_images("vgg", (2, 2, 3, 3, 3)), 64, (3, 32, 32)),
    "mobilenet-v2": (_on_images("mobilenet_v2"), 32, (3, 32, 32)),
}
"""How each is made, and the width and the shape of one input that it has unless told otherwise.

The paper's are mlp, resnet-34, vgg-16 and mobilenet-v2. For a CPU there are resnet-10 and vgg-11,
which are narrow by default, and mobilenet-v2 with a width of 8.
"""


def build(
    name: str,
    *,
    classes: int,
    seed: int,
    width: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """Make a network that is known by its name.

    Args:
        name: one of :data:`NETWORKS`.
        classes: how many classes there are.
        seed: what the weights depend on.
        width: units of the hidden layers, or channels of the first convolution.
        shape: shape of one input, such as (3, 32, 32).

    Returns:
        The network, on the CPU, in training mode.

    >>> model = build("resnet-10", classes=10, seed=0, shape=(1, 28, 28))
    >>> sum(p.numel() for p in model.parameters())
    308538
    """
    from neuvar.models.seeded import checked_sizes

    if name not in NETWORKS:
        raise ValueError(f"name must be one of {', '.join(NETWORKS)}, got {name!r}")
    make, own_width, own_shape = NETWORKS[name]
    checked = own_shape if shape is None else checked_sizes("shape", shape, at_least=1)
    return make(checked, classes=classes, seed=seed, width=own_width if width is None else width)
