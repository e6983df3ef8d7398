"""The paper's networks, and smaller ones for a CPU.

The same seed gives the same initial weights; the global generator is neither read nor advanced.
Every network maps a batch (n, ...) to class scores (n, classes).
"""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar.models.convolutional import mobilenet_v2, resnet, vgg
    from neuvar.models.perceptron import MultiHead, mlp, multi_head
    from neuvar.models.registry import NETWORKS, build
else:
    __getattr__, __dir__ = _attach(
        __name__,
        convolutional="mobilenet_v2 resnet vgg",
        perceptron="MultiHead mlp multi_head",
        registry="NETWORKS build",
    )

__all__ = [
    "NETWORKS",
    "MultiHead",
    "build",
    "mlp",
    "mobilenet_v2",
    "multi_head",
    "resnet",
    "vgg",
]
