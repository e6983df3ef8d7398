"""What the convolutional networks share."""

from __future__ import annotations

from torch import Tensor, nn


class ImageNetwork(nn.Module):
    """Features of an image, their mean over all places, and a classifier.

    Nothing in it depends on the order of memory: channels-last images and weights stay so.

    Attributes:
        features: images to feature maps.
        classifier: mean features to scores.
    """

    def __init__(
        self, features: nn.Module, classifier: nn.Module, *, channels: int, smallest: int = 1
    ) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self._channels, self._smallest = channels, smallest

    def forward(self, images: Tensor) -> Tensor:
        """Scores of a batch of images."""
        self.check(*images.shape[1:])
        scores: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return scores

    def check(self, *shape: int) -> None:
        """Refuse images of a shape that the network cannot take."""
        fits = len(shape) == 3 and shape[0] == self._channels
        if not fits or min(shape[1:]) < self._smallest:
            raise ValueError(
                f"images must be ({self._channels}, height, width) with {self._smallest} or more "
                f"pixels a side, got {shape}"
            )


def convolution(
    inputs: int, outputs: int, size: int, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution and its batch normalisation, which makes a bias of its own useless."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
