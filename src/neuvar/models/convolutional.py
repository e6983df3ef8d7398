"""Convolutional networks for small images: ResNet, VGG and MobileNetV2."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.functional import relu

from neuvar._validate import integer, sizes
from neuvar.models.initialization import seeded

MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, channels, blocks and stride of the first block, from the paper's table.

The second stage has stride 1 as in that table; for ImageNet it has stride 2."""


class ImageNetwork(nn.Module):
    """Convolutional features, global average pooling and a classifier.

    Works with channels-last images and weights.

    Attributes:
        features: maps images to feature maps.
        classifier: maps pooled features to logits.
    """

    def __init__(
        self, features: nn.Module, classifier: nn.Module, *, channels: int, smallest: int = 1
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self._channels, self._smallest = channels, smallest

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        self.check(*images.shape[1:])
        scores: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return scores

    def check(self, *shape: int) -> None:
        """Raise a ValueError if the network does not support images of this shape."""
        fits = len(shape) == 3 and shape[0] == self._channels
        if not fits or min(shape[1:]) < self._smallest:
            raise ValueError(
                f"images must have the shape ({self._channels}, height, width) with height and "
                f"width >= {self._smallest}, got {shape}"
            )


def convolution(
    inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution without bias, followed by batch normalization."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Block(nn.Module):
    """ResNet's basic block; its shortcut is a 1×1 convolution where the shape changes."""

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
        """Feature maps after the block."""
        return relu(self.body(x) + self.shortcut(x))


def resnet(
    blocks: Iterable[int] = (3, 4, 6, 3),
    *,
    classes: int,
    seed: int,
    width: int = 64,
    channels: int = 3,
) -> ImageNetwork:
    """Make a ResNet for small images, by default the paper's ResNet-34.

    A 3×3 convolution without pooling, then stages of basic blocks. Each stage after the first
    doubles the channels and halves the image size.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.

    Args:
        blocks: blocks per stage; (2, 2, 2, 2) is ResNet-18, (1, 1, 1, 1) ResNet-10.
        classes: number of classes.
        seed: seed of the initial weights.
        width: channels of the first stage.
        channels: channels of the images.

    >>> import torch
    >>> small = resnet((1, 1, 1, 1), width=16, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 308826)
    """
    stages = sizes("blocks", blocks)
    classes, width, channels = _checked(classes=classes, width=width, channels=channels)

    def make() -> ImageNetwork:
        layers = [*convolution(channels, width, 3), nn.ReLU()]
        inputs = width
        for stage, count in enumerate(stages):
            for index in range(count):
                layers.append(Block(inputs, width << stage, 2 if stage and not index else 1))
                inputs = width << stage
        return ImageNetwork(nn.Sequential(*layers), nn.Linear(inputs, classes), channels=channels)

    return seeded(make, seed)


def vgg(
    convolutions: Iterable[int] = (2, 2, 3, 3, 3),
    *,
    classes: int,
    seed: int,
    width: int = 64,
    channels: int = 3,
) -> ImageNetwork:
    """Make a VGG network with batch normalization, by default the paper's VGG-16.

    Stages of 3×3 convolutions, each followed by max pooling, which halves the image size. Each
    stage doubles the channels, up to eight times the first. Two hidden layers follow, as wide as
    the last stage (the paper's fc-512 × 2). There is no dropout, as in the paper's table.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015.

    Args:
        convolutions: convolutions per stage; (1, 1, 2, 2, 2) is VGG-11. With five stages, images
            must have 32×32 pixels or more.
        classes: number of classes.
        seed: seed of the initial weights.
        width: channels of the first stage.
        channels: channels of the images.

    >>> import torch
    >>> small = vgg((1, 1, 2, 2, 2), width=16, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 612122)
    """
    stages = sizes("convolutions", convolutions)
    classes, width, channels = _checked(classes=classes, width=width, channels=channels)

    def make() -> ImageNetwork:
        layers: list[nn.Module] = []
        inputs = channels
        for stage, count in enumerate(stages):
            for _ in range(count):
                outputs = width << min(stage, 3)
                layers += [*convolution(inputs, outputs, 3), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        hidden = [nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, inputs), nn.ReLU()]
        classifier = nn.Sequential(*hidden, nn.Linear(inputs, classes))
        features = nn.Sequential(*layers)
        return ImageNetwork(features, classifier, channels=channels, smallest=1 << len(stages))

    return seeded(make, seed)


class Bottleneck(nn.Module):
    """MobileNetV2's inverted residual block; it has a shortcut where the shape stays the same."""

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
        """Feature maps after the block."""
        out: Tensor = self.body(x)
        return x + out if self.residual else out


def mobilenet_v2(*, classes: int, seed: int, width: int = 32, channels: int = 3) -> ImageNetwork:
    """Make a MobileNetV2 for small images, the paper's by default.

    A 3×3 convolution with stride 1, seven stages of bottlenecks, and a 1×1 convolution. As in the
    paper's table, the first bottleneck has an expansion layer too, with factor 1.

    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.

    Args:
        classes: number of classes.
        seed: seed of the initial weights.
        width: channels of the first convolution, a multiple of 4; all others are in proportion.
        channels: channels of the images.

    >>> import torch
    >>> small = mobilenet_v2(width=8, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 160882)
    """
    classes, width, channels = _checked(classes=classes, width=width, channels=channels)
    if width % 4:
        raise ValueError(f"width must be a positive multiple of 4, got {width!r}")

    def make() -> ImageNetwork:
        layers = [*convolution(channels, width, 3), nn.ReLU6()]
        inputs = width
        for expansion, size, count, stride in MOBILENET_STAGES:
            for index in range(count):
                outputs = size * width // 32
                layers.append(Bottleneck(inputs, outputs, expansion, 1 if index else stride))
                inputs = outputs
        last = 1280 * width // 32
        layers += [*convolution(inputs, last, 1), nn.ReLU6()]
        return ImageNetwork(nn.Sequential(*layers), nn.Linear(last, classes), channels=channels)

    return seeded(make, seed)


def _checked(**counts: int) -> tuple[int, ...]:
    return tuple(integer(name, count, low=1) for name, count in counts.items())
