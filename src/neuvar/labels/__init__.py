"""Label noise and its book-keeping.

Every function returns a :class:`NoisyLabels`: the labels to train on, the clean ones, which were
changed, the rate and the matrix that came out, and where all of it comes from. The same seed gives
the same labels on any machine.
"""

from neuvar.labels.features import instance
from neuvar.labels.flips import flip
from neuvar.labels.given import from_array, from_file
from neuvar.labels.kinds import (
    corrupt,
    pair,
    semantic,
    superclass,
    symmetric,
    symmetric_including_self,
)
from neuvar.labels.result import NoisyLabels

__all__ = [
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
