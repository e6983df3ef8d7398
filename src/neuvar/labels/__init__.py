"""Label noise.

Every function returns a :class:`NoisyLabels`: the noisy and the clean labels, which labels changed,
the actual rate and confusion matrix, and the provenance. The same seed gives the same labels on any
machine.
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

__all__ = [
    "KINDS",
    "NoisyLabels",
    "corrupt",
    "flip",
    "from_array",
    "from_file",
    "instance",
    "pair",
    "semantic",
    "superclass",
    "symmetric",
    "symmetric_including_self",
]
