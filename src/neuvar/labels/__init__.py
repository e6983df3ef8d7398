"""Label noise.

Every function that makes noise returns a :class:`NoisyLabels`: noisy and clean labels, a mask of
the changed labels, the actual rate and confusion matrix, and the provenance. The same seed gives
the same labels on any machine.
"""

from neuvar.labels.kinds import (
    KINDS,
    corrupt,
    instance,
    pair,
    semantic,
    superclass,
    symmetric,
    symmetric_including_self,
)
from neuvar.labels.label_files import from_array, from_file
from neuvar.labels.noisy_labels import NoisyLabels, flip
from neuvar.labels.real_noise import (
    CIFAR10N,
    LabelErrors,
    SoftLabels,
    cifar10h,
    cifar10n,
    cifar100n,
    label_errors,
)

__all__ = [
    "CIFAR10N",
    "KINDS",
    "LabelErrors",
    "NoisyLabels",
    "SoftLabels",
    "cifar10h",
    "cifar10n",
    "cifar100n",
    "corrupt",
    "flip",
    "from_array",
    "from_file",
    "instance",
    "label_errors",
    "pair",
    "semantic",
    "superclass",
    "symmetric",
    "symmetric_including_self",
]
