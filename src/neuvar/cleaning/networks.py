"""Networks for people who bring none."""

from __future__ import annotations

import torch
from torch import nn

from neuvar.cleaning.inputs import Examples
from neuvar.models import build, mlp

HIDDEN = 1024
"""Units of the two hidden layers of a fully connected network, as in the paper."""
GREY_PIXELS = 32
"""Grey images that are larger than this go to a convolutional network."""


def network_for(examples: Examples, *, seed: int) -> nn.Module:
    """The paper's fully connected network for features and small grey images, else a small ResNet.

    The fully connected one has two hidden layers of 1024 units; the ResNet is a ResNet-10 of width
    16, which a CPU can train. Inputs of two or three dimensions each are images.
    """
    shape, classes = tuple(examples.inputs.shape[1:]), len(examples.names)
    grey = len(shape) == 2 or shape[:1] == (1,)
    if len(shape) in (2, 3) and not (grey and max(shape) <= GREY_PIXELS):
        network = build("resnet-10", classes=classes, seed=seed, shape=(1, *shape)[-3:])
        if len(shape) == 3 or examples.inputs.dtype == torch.uint8:
            return network
        # Bytes get their one channel on the way to the network, other numbers do not.
        return nn.Sequential(nn.Unflatten(1, (1, shape[0])), network)
    return mlp((examples.inputs[0].numel(), HIDDEN, HIDDEN, classes), seed=seed)
