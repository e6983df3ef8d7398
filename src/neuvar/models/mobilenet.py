"""MobileNetV2 for small images."""

from __future__ import annotations

from torch import Tensor, nn

from neuvar.models.images import ImageNetwork, convolution
from neuvar.models.seeded import checked_size, seeded

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and stride of the first block, by the paper's table.

The table halves the size in three places; for ImageNet the second stage halves it as well."""

WIDTH = 32


class Bottleneck(nn.Module):
    """Expand, filter each channel, and project; added to its input where the shape is the same."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.body = nn.Sequential(
            *convolution(inputs, hidden, 1),
            nn.ReLU6(),
            *convolution(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.ReLU6(),
            *convolution(hidden, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Images of another depth and, with a stride, of half the size."""
        out: Tensor = self.body(x)
        return x + out if self.residual else out


def mobilenet_v2(*, classes: int, seed: int, width: int = WIDTH, channels: int = 3) -> ImageNetwork:
    """Make a MobileNetV2 for small images, the paper's by default.

    A 3×3 convolution of 32 channels without stride, seven stages of bottlenecks, and a 1×1
    convolution of 1280 channels. As in the paper's table, the first bottleneck has its expansion
    layer, too, though it expands by one.

    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.

    Args:
        classes: how many classes there are.
        seed: what the weights depend on.
        width: channels of the first convolution, a multiple of 4; all others are in proportion.
        channels: channels of the images.

    Returns:
        A network that takes images (n, channels, height, width).

    >>> import torch
    >>> small = mobilenet_v2(width=8, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 160882)
    """
    scores, first = checked_size("classes", classes), checked_size("width", width, multiple_of=4)
    colours = checked_size("channels", channels)

    def make() -> ImageNetwork:
        layers = [*convolution(colours, first, 3), nn.ReLU6()]
        inputs = first
        for expansion, size, count, stride in STAGES:
            for index in range(count):
                outputs = size * first // WIDTH
                layers.append(Bottleneck(inputs, outputs, expansion, 1 if index else stride))
                inputs = outputs
        last = 1280 * first // WIDTH
        layers += [*convolution(inputs, last, 1), nn.ReLU6()]
        return ImageNetwork(nn.Sequential(*layers), nn.Linear(last, scores), channels=colours)

    return seeded(make, seed)
