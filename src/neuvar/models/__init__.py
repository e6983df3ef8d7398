"""The paper's networks, and smaller ones for a CPU.

The same seed gives the same initial weights; the global generator is neither read nor advanced.
Every network maps a batch (n, ...) to logits (n, classes).
"""

from neuvar.models.convolutional import mobilenet_v2, resnet, vgg
from neuvar.models.perceptron import MultiHead, mlp, multi_head
from neuvar.models.registry import NETWORKS, build

__all__ = ["NETWORKS", "MultiHead", "build", "mlp", "mobilenet_v2", "multi_head", "resnet", "vgg"]
