"""VGG networks for small images."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from neuvar.models.images import ImageNetwork, convolution
from neuvar.models.seeded import checked_size, checked_sizes, seeded


def vgg(
    convolutions: Iterable[int] = (2, 2, 3, 3, 3),
    *,
    classes: int,
    seed: int,
    width: int = 64,
    channels: int = 3,
) -> ImageNetwork:
    """Make a VGG network with batch normalisation, by default the paper's VGG-16.

    Stages of 3×3 convolutions, each followed by a pooling that halves the size; each stage doubles
    the channels, up to eight times the first. Then two hidden layers of as many units as the last
    stage has channels (the paper's fc-512 × 2). There is no dropout, as in the paper's table.

    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015.

    Args:
        convolutions: how many convolutions each stage has; (1, 1, 2, 2, 2) is VGG-11.
        classes: how many classes there are.
        seed: what the weights depend on.
        width: channels of the first stage.
        channels: channels of the images.

    Returns:
        A network that takes images (n, channels, height, width), of 32×32 pixels or more if there
        are five stages.

    >>> import torch
    >>> small = vgg((1, 1, 2, 2, 2), width=16, classes=10, seed=0)
    >>> small(torch.zeros(2, 3, 32, 32)).shape, sum(p.numel() for p in small.parameters())
    (torch.Size([2, 10]), 612122)
    """
    stages = checked_sizes("convolutions", convolutions, at_least=1)
    scores, first = checked_size("classes", classes), checked_size("width", width)
    colours = checked_size("channels", channels)

    def make() -> ImageNetwork:
        layers: list[nn.Module] = []
        inputs = colours
        for stage, count in enumerate(stages):
            for _ in range(count):
                outputs = first << min(stage, 3)
                layers += [*convolution(inputs, outputs, 3), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        hidden = [nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, inputs), nn.ReLU()]
        classifier = nn.Sequential(*hidden, nn.Linear(inputs, scores))
        features = nn.Sequential(*layers)
        return ImageNetwork(features, classifier, channels=colours, smallest=1 << len(stages))

    return seeded(make, seed)
