"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.functional import relu

from neuvar.models.images import ImageNetwork, convolution
from neuvar.models.seeded import checked_size, checked_sizes, seeded


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride=stride),
            nn.ReLU(),
            *convolution(outputs, outputs, 3),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.extend(convolution(inputs, outputs, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        """Images of another depth and, with a stride, of half the size."""
        return relu(self.body(x) + self.shortcut(x))


def resnet(
    blocks: Iterable[int] = (3, 4, 6, 3),
    *,
    classes: int,
    seed: int,
    width: int = 64,
    channels: int = 3,
) -> ImageNetwork:
    """Make a residual network for small images, by default the paper's ResNet-34.

    A 3×3 convolution without pooling, then stages of basic blocks; each stage after the first
    doubles the channels and halves the size.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

    Args:
        blocks: how many blocks each stage has; (2, 2, 2, 2) is ResNet-18, (1, 1, 1, 1) ResNet-10.
        classes: how many classes there are.
        seed: what the weights depend on.
        width: channels of the first stage.
        channels: channels of the images.

    Returns:
        A network that takes images (n, channels, height, width).

    >>> import torch
    >>> small = resnet((1, 1, 1, 1), width=16, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 308826)
    """
    stages = checked_sizes("blocks", blocks, at_least=1)
    scores, first = checked_size("classes", classes), checked_size("width", width)
    colours = checked_size("channels", channels)

    def make() -> ImageNetwork:
        layers = [*convolution(colours, first, 3), nn.ReLU()]
        inputs = first
        for stage, count in enumerate(stages):
            for index in range(count):
                layers.append(Block(inputs, first << stage, 2 if stage and not index else 1))
                inputs = first << stage
        return ImageNetwork(nn.Sequential(*layers), nn.Linear(inputs, scores), channels=colours)

    return seeded(make, seed)
