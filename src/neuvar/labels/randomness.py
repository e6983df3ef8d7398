"""Random numbers that are the same on every machine and with every version of NumPy."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def words(seed: int, purpose: str, count: int) -> Array:
    """Random uint64 of a stream that belongs to a seed and a purpose alone.

    NumPy promises that the raw integers of PCG64 never change; for what its ``Generator`` makes
    of them (``permutation``, ``normal``) it promises nothing from one release to the next.
    """
    key = hashlib.blake2b(f"labels/{purpose}/{seed}".encode(), digest_size=16).digest()
    raw: Array = np.random.PCG64(int.from_bytes(key, "little")).random_raw(count)
    return raw


def uniforms(seed: int, purpose: str, count: int) -> Array:
    """Random float64 in the open interval (0, 1): multiples of 2⁻⁵² and a half of that."""
    u: Array = ((words(seed, purpose, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return u


def permutation(seed: int, purpose: str, count: int) -> Array:
    """A random permutation; the stable sort settles ties by position, everywhere alike."""
    order: Array = np.argsort(words(seed, purpose, count), kind="stable")
    return order
