"""Weight noise as a pure function of seed, draw, parameter and position.

Nothing here keeps state: the noise of any part of any parameter can be asked for at any time, in
any order, and comes out the same; the table sampler's does so on any device. That is what makes a
resumed run equal to an uninterrupted one, and a sharded run equal to an unsharded one.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TABLE_SIZE = 1 << 22
"""Entries of the shared table of standard draws: 16 MiB of float32 for each family in use."""

BLOCK = 1 << 16
"""How many positions of a parameter one seeding of the fresh sampler's generator serves."""


@dataclass(frozen=True)
class Family:
    """A distribution of noise at unit scale, b = 1.

    ``std`` is its standard deviation, ``quantile`` maps levels in (0, 1) to values, and ``fill_``
    overwrites a float tensor with draws from a generator.
    """

    std: float
    quantile: Callable[[Tensor], Tensor]
    fill_: Callable[[Tensor, torch.Generator], Tensor]


def _laplace_quantile(level: Tensor) -> Tensor:
    centred = level - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def _laplace_fill_(out: Tensor, generator: torch.Generator) -> Tensor:
    other = torch.empty_like(out).exponential_(generator=generator)
    return out.exponential_(generator=generator).sub_(other)


FAMILIES = {
    "gaussian": Family(
        std=1.0,
        quantile=torch.special.ndtri,
        fill_=lambda out, generator: out.normal_(generator=generator),
    ),
    "laplace": Family(std=math.sqrt(2), quantile=_laplace_quantile, fill_=_laplace_fill_),
    "uniform": Family(
        std=1 / math.sqrt(3),
        quantile=lambda level: 2 * level - 1,
        fill_=lambda out, generator: out.uniform_(-1, 1, generator=generator),
    ),
}


def family(noise: str) -> Family:
    """Look a family of noise up by its name."""
    if noise not in FAMILIES:
        raise ValueError(f"noise must be one of {', '.join(FAMILIES)}, got {noise!r}")
    return FAMILIES[noise]


def scale(name: str, value: object) -> float:
    """Return ``value`` as a float if it can be a scale of noise: a finite number, not negative."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    # What is too large for float32 would fail only when it is added.
    if isinstance(value, (bool, str)) or not (0 <= number <= torch.finfo(torch.float32).max):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return number


def std_from_b(noise: str, b: float) -> float:
    r"""Standard deviation of noise with variability scale b.

    Gaussian :math:`N(0, b^2)` has b, Laplace(0, b) has :math:`\sqrt2\,b`, and uniform noise in
    (-b, b) has :math:`b/\sqrt3`.

    >>> round(std_from_b("laplace", 0.05), 4)
    0.0707
    """
    return scale("b", b) * family(noise).std


def b_from_std(noise: str, std: float) -> float:
    """Variability scale b that gives the noise a chosen standard deviation.

    With it families can be compared at equal strength:

    >>> {name: round(b_from_std(name, 0.03), 4) for name in FAMILIES}
    {'gaussian': 0.03, 'laplace': 0.0212, 'uniform': 0.052}
    """
    return scale("std", std) / family(noise).std


class Draw(NamedTuple):
    r"""Which noise: all that it depends on besides the parameter and the position in it.

    Number 0 is the paper's :math:`\epsilon_0 = 0`: no noise.
    """

    number: int = 0
    sign: int = 1
    noise: str = "gaussian"
    seed: int = 0
    sampler: str = "table"
    rank: int = 0


class Slot(NamedTuple):
    """Where a parameter, or the part of it that this process holds, lies.

    ``number`` counts parameters and ``start`` their elements, in the optimizer's order; ``shape``
    is the whole parameter's, ``offset`` and ``local_shape`` say which block of it is meant.
    """

    number: int
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int] | None:
        """Flat range of the block in the whole parameter, or None if it is not one range."""
        if self.shape[1:] != self.local_shape[1:]:
            return None
        row = math.prod(self.shape[1:])
        low = self.offset[0] * row if self.offset else 0
        return low, low + math.prod(self.local_shape)


def whole_slot(shape: tuple[int, ...], *, number: int = 0, start: int = 0) -> Slot:
    """Slot of a parameter that is not sharded."""
    return Slot(number, start, tuple(shape), (0,) * len(shape), tuple(shape))


Piece = tuple[int, int, Tensor]
"""Flat range [low, high) of a block and the standard draws for it."""


def pieces(slot: Slot, draw: Draw, device: torch.device) -> Iterator[Piece]:
    """Standard draws, at unit scale, for a slot, as consecutive pieces of its flattened block.

    The table's pieces are views, the fresh sampler's are at most ``BLOCK`` long: neither needs
    memory that grows with the parameter, unless a block is no contiguous range of its parameter.
    """
    flat = SAMPLERS[draw.sampler]
    if slot.span is not None:
        low, high = slot.span
        for a, b, z in flat(slot, low, high, draw, device):
            yield a - low, b - low, z
    elif math.prod(slot.local_shape):
        every = torch.cat([z for _, _, z in flat(slot, 0, math.prod(slot.shape), draw, device)])
        where = tuple(slice(o, o + n) for o, n in zip(slot.offset, slot.local_shape, strict=True))
        block = every.view(slot.shape)[where].reshape(-1)
        yield 0, block.numel(), block


def standard_noise(slot: Slot, draw: Draw, device: torch.device | None = None) -> Tensor:
    """Standard draws for a slot as one tensor of its local shape.

    >>> z = standard_noise(whole_slot((2, 3)), Draw(number=1, seed=7))
    >>> z.shape, bool((z == standard_noise(whole_slot((2, 3)), Draw(number=1, seed=7))).all())
    (torch.Size([2, 3]), True)
    """
    found = [z for _, _, z in pieces(slot, draw, device or torch.device("cpu"))]
    empty = torch.empty(0, dtype=torch.float32, device=device or "cpu")
    return torch.cat([empty, *found]).view(slot.local_shape)


@functools.lru_cache(maxsize=256)
def _hash(*key: int) -> int:
    """64 bits that depend on every number of the key."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _fresh(slot: Slot, low: int, high: int, draw: Draw, device: torch.device) -> Iterator[Piece]:
    """Draw each block of a parameter from a generator seeded for it alone."""
    generator = torch.Generator(device)
    size = math.prod(slot.shape)
    for block in range(low // BLOCK, -(-high // BLOCK)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        # The CPU generator keeps the lower 32 bits: two blocks of a run may, with odds of one in
        # four thousand million for each pair, repeat each other. No pair does so twice.
        generator.manual_seed(_hash(draw.seed, draw.number, draw.rank, slot.number, block))
        z = torch.empty(last - first, dtype=torch.float32, device=device)
        family(draw.noise).fill_(z, generator)
        a, b = max(low, first), min(high, last)
        yield a, b, z[a - first : b - first]


@functools.cache
def table(noise: str, device: torch.device, size: int) -> Tensor:
    """Table of standard draws: every quantile of the family once, in a fixed random order.

    Its mean is 0 and its standard deviation the family's, to the precision of float32.
    """
    level = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) / size
    z = family(noise).quantile(level)
    z -= z.mean()
    z *= family(noise).std / z.square().mean().sqrt()
    order = np.random.Generator(np.random.PCG64(0)).permutation(size)
    return z[torch.from_numpy(order)].float().to(device)


def _from_table(
    slot: Slot, low: int, high: int, draw: Draw, device: torch.device
) -> Iterator[Piece]:
    """Read the table from an offset that is new for each draw.

    All parameters lie one after another along the table, which wraps around, so no two weights
    share an entry. A model with more weights than the table has entries goes round it again, each
    lap with an offset of its own: which weights then share an entry changes with every draw, and
    because the table's mean is 0 their covariance over draws is 0. A lap has as many different
    noises as the table has entries.
    """
    entries, size = table(draw.noise, device, TABLE_SIZE), TABLE_SIZE
    at, end = slot.start + low, slot.start + high
    while at < end:
        lap, place = divmod(at, size)
        entry = (place + _hash(draw.seed, draw.number, draw.rank, lap)) % size
        length = min(end - at, size - place, size - entry)
        yield at - slot.start, at - slot.start + length, entries[entry : entry + length]
        at += length


SAMPLERS = {"table": _from_table, "fresh": _fresh}
