"""The paper's networks, and small relatives of theirs for a CPU.

Every network is made from a seed: the same seed gives the same weights, and the global generator
is neither read nor advanced. All take a batch first and give one score a class.
"""

from typing import TYPE_CHECKING

from neuvar.lazy import attach as _attach

if TYPE_CHECKING:
    from neuvar.models.mobilenet import mobilenet_v2
    from neuvar.models.named import NETWORKS, build
    from neuvar.models.perceptron import MultiHead, mlp, multi_head
    from neuvar.models.residual import resnet
    from neuvar.models.stacked import vgg
else:
    __getattr__, __dir__ = _attach(
        __name__,
        {
            "NETWORKS": "named",
            "MultiHead": "perceptron",
            "build": "named",
            "mlp": "perceptron",
            "mobilenet_v2": "mobilenet",
            "multi_head": "perceptron",
            "resnet": "residual",
            "vgg": "stacked",
        },
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
