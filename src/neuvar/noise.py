"""Weight noise as a pure function of seed, draw, parameter and position.

There is no state: the noise of any part of a parameter can be computed at any time and in any
order, with the same result. With the table sampler it is the same on any device. So a resumed run
equals an uninterrupted one, and a sharded run an unsharded one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuvar._validate import number, one_of

TABLE_SIZE = 1 << 22
"""Entries of the table of standard draws: 16 MiB of float32 for each family in use."""

LEVELS = 1 << 16
"""Number of levels at which the quantile function of a family is checked."""
TOLERANCE = 0.25
"""Relative error of mean and std in this check; the levels miss a part of heavy tails."""

BLOCK = 1 << 16
"""Number of weights that the fresh sampler draws from one seed."""

LARGEST_SCALE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Family:
    """A distribution of noise at b = 1.

    ``std`` is its standard deviation, ``quantile`` maps levels in (0, 1) to values (for the table
    sampler), and ``fill_`` overwrites a float tensor with draws from a generator (for the fresh
    sampler). Add yours to ``FAMILIES`` to use it by name:

    >>> FAMILIES["logistic"] = Family(
    ...     std=math.pi / math.sqrt(3),
    ...     quantile=torch.logit,
    ...     fill_=lambda out, generator: out.uniform_(generator=generator).logit_(1e-7),
    ... )
    >>> round(std_from_b("logistic", 0.05), 4)
    0.0907
    >>> del FAMILIES["logistic"]
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
_CHECKED = set(FAMILIES.values())
"""Families that are known to be right."""


def family(noise: str) -> Family:
    """Look up a family of noise by its name."""
    found = FAMILIES[one_of("noise", noise, FAMILIES)]
    if not isinstance(found, Family):
        raise ValueError(f'FAMILIES["{noise}"] must be a Family, got {type(found).__name__}')
    if found not in _CHECKED:
        _check_family(noise, found)
        _CHECKED.add(found)
    return found


def _check_family(noise: str, found: Family) -> None:
    name = f'of FAMILIES["{noise}"] must'
    std = number(f'std of FAMILIES["{noise}"]', found.std, above=0)
    level = (torch.arange(LEVELS, dtype=torch.float64, device="cpu") + 0.5) / LEVELS
    z: object = found.quantile(level.clone())
    if not isinstance(z, Tensor) or z.shape != level.shape:
        got = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(f"quantile {name} return one value for each level, got {got}")
    if not bool(z.isfinite().all()) or bool((z.diff() < 0).any()):
        raise ValueError(f"quantile {name} be finite and increasing between the levels 0 and 1")
    mean, spread = float(z.mean()), float(z.std(correction=0))
    if abs(mean) > TOLERANCE * std or abs(spread - std) > TOLERANCE * std:
        raise ValueError(
            f"quantile {name} have mean 0 and the family's std {std:.4g}, "
            f"got mean {mean:.4g} and std {spread:.4g}"
        )
    drawn = torch.full((16,), math.nan, device="cpu")
    found.fill_(drawn, torch.Generator("cpu").manual_seed(0))
    if not bool(drawn.isfinite().all()):
        raise ValueError(f"fill_ {name} overwrite its first argument with finite draws")


def scale(name: str, value: object) -> float:
    """Validate a scale of noise: a finite number >= 0."""
    result = number(name, value, low=0)
    if result > LARGEST_SCALE:  # float32 noise would overflow
        raise ValueError(f"{name} must be at most {LARGEST_SCALE:.3g} (float32), got {value!r}")
    return result


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

    Use it to compare families at equal strength:

    >>> {name: round(b_from_std(name, 0.03), 4) for name in FAMILIES}
    {'gaussian': 0.03, 'laplace': 0.0212, 'uniform': 0.052}
    """
    return scale("std", std) / family(noise).std


RELATIVE_TO = ("tensor", "filter", "weight")
"""What b may be relative to; see :func:`neuvar.optim.layout.relative_size`."""


class Draw(NamedTuple):
    r"""Identifies noise: together with a parameter and a position in it, it determines the value.

    Number 0 is the paper's :math:`\epsilon_0 = 0`: no noise. If b is relative to the weights
    (``relative_to`` is one of ``RELATIVE_TO``), the value depends on them, too.
    """

    number: int = 0
    sign: int = 1
    noise: str = "gaussian"
    seed: int = 0
    sampler: str = "table"
    rank: int = 0
    relative_to: str = ""


class Slot(NamedTuple):
    """The position of a parameter, or of the shard that this process holds.

    ``number`` counts parameters and ``start`` their elements, in the optimizer's order. ``shape``
    is the shape of the whole parameter; ``offset`` and ``local_shape`` locate the shard in it.
    ``span`` is the flat range of the shard, or None if it is not one contiguous range.
    """

    number: int
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    span: tuple[int, int] | None


def whole_slot(shape: tuple[int, ...], *, number: int = 0, start: int = 0) -> Slot:
    """Slot of a parameter that is not sharded."""
    return shard_slot(shape, (0,) * len(shape), shape, number=number, start=start)


def shard_slot(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    local_shape: tuple[int, ...],
    *,
    number: int = 0,
    start: int = 0,
) -> Slot:
    """Slot of a shard of a parameter."""
    span = None
    if tuple(shape[1:]) == tuple(local_shape[1:]):
        low = offset[0] * math.prod(shape[1:]) if offset else 0
        span = (low, low + math.prod(local_shape))
    return Slot(number, start, tuple(shape), tuple(offset), tuple(local_shape), span)


class Term(NamedTuple):
    """The noise of one parameter: its position, the draw, and the scale b."""

    slot: Slot
    draw: Draw
    b: float


Piece = tuple[int, int, Tensor]
"""Flat range [low, high) of a shard and the standard draws for it."""


SAMPLERS = ("table", "fresh")
"""Where standard draws come from."""


def pieces(slot: Slot, draw: Draw, device: torch.device) -> Iterable[Piece]:
    """Standard draws (b = 1) for a slot, as consecutive pieces of its flattened shard.

    The table's pieces are views, and the fresh sampler's have at most ``BLOCK`` elements. So the
    memory does not grow with the parameter, unless a shard is not a contiguous range.

    Each draw reads the table from a new offset. All parameters lie one after another along the
    table, which wraps around, so no two weights share an entry. If a model has more weights than
    the table has entries, it takes several laps, each with its own offset. Which weights share an
    entry then changes with every draw; because the mean of the table is 0, the covariance of their
    noise over draws is 0. The noise of a lap is one of ``TABLE_SIZE`` vectors, one for each offset.
    """
    low, high = slot.span or (0, math.prod(slot.shape))
    result: Iterable[Piece]
    if draw.sampler == "fresh":
        result = _fresh(slot, low, high, draw, device)
    else:
        result, size = [], TABLE_SIZE
        entries = table(draw.noise, device, size)
        first = at = slot.start + low
        end = slot.start + high
        while at < end:
            lap, position = divmod(at, size)
            entry = (position + _hash(draw.seed, draw.number, draw.rank, lap)) % size
            length = min(end - at, size - position, size - entry)
            result.append((at - first, at - first + length, entries[entry : entry + length]))
            at += length
    return result if slot.span is not None else _pieces_of_block(slot, result)


def _pieces_of_block(slot: Slot, whole: Iterable[Piece]) -> Iterator[Piece]:
    """Cut a shard that is not a contiguous range out of the draws of its whole parameter."""
    if math.prod(slot.local_shape):
        z = torch.cat([z for _, _, z in whole]).view(slot.shape)
        where = tuple(slice(o, o + n) for o, n in zip(slot.offset, slot.local_shape, strict=True))
        block = z[where].reshape(-1)
        yield 0, block.numel(), block


def standard_noise(slot: Slot, draw: Draw, device: torch.device | None = None) -> Tensor:
    """Standard draws for a slot as one tensor of its local shape.

    >>> z = standard_noise(whole_slot((2, 3)), Draw(number=1, seed=7))
    >>> z.shape, bool((z == standard_noise(whole_slot((2, 3)), Draw(number=1, seed=7))).all())
    (torch.Size([2, 3]), True)
    """
    parts = [z for _, _, z in pieces(slot, draw, device or torch.device("cpu"))]
    empty = torch.empty(0, dtype=torch.float32, device=device or "cpu")
    return torch.cat([empty, *parts]).view(slot.local_shape)


def add_noise(
    clean: Tensor, term: Term, *, out: Tensor, factor: int = 1, size: Tensor | None = None
) -> Tensor:
    """Set ``out`` to ``clean`` plus the noise, in one pass; returns ``out``.

    Noise that is relative to the weights is multiplied by their ``size``.
    """
    scale = factor * term.draw.sign * term.b
    if size is not None:
        return _add_relative(clean, term, size, scale, out)
    if not (clean.is_contiguous() and out.is_contiguous()):
        z = standard_noise(term.slot, term.draw, clean.device)
        return torch.add(clean, z, alpha=scale, out=out)
    for low, high, z in pieces(term.slot, term.draw, clean.device):
        if high - low == clean.numel():
            torch.add(clean, z.view_as(clean), alpha=scale, out=out)
        else:
            torch.add(clean.view(-1)[low:high], z, alpha=scale, out=out.view(-1)[low:high])
    return out


def _add_relative(clean: Tensor, term: Term, size: Tensor, scale: float, out: Tensor) -> Tensor:
    """As :func:`add_noise`, for noise that is multiplied by a size."""
    drawn = list(pieces(term.slot, term.draw, clean.device))
    contiguous = clean.is_contiguous() and out.is_contiguous()
    if len(drawn) == 1 or not contiguous:
        z = drawn[0][2] if len(drawn) == 1 else standard_noise(term.slot, term.draw, clean.device)
        return torch.addcmul(clean, z.view(clean.shape), size, value=scale, out=out)
    flat, result = clean.view(-1), out.view(-1)
    width = max(clean.numel() // max(size.numel(), 1), 1)  # how many weights share a size
    for low, high, z in drawn:
        # Cut the piece into ranges that lie inside one filter, or consist of whole filters.
        whole = min(-(-low // width) * width, high), max(high // width * width, low)
        cuts = sorted({low, *whole, high})
        for a, c in itertools.pairwise(cuts):
            rows = size.view(-1)[a // width : -(-c // width)].view(-1, 1)
            w, noisy, part = (
                t.view(len(rows), -1) for t in (flat[a:c], result[a:c], z[a - low : c - low])
            )
            torch.addcmul(w, part, rows, value=scale, out=noisy)
    return out


def has_noise(weights: Tensor, clean: Tensor, term: Term, size: Tensor | None = None) -> bool:
    """Whether weights equal ``clean`` plus the noise to the bit."""
    if size is not None:
        noisy = add_noise(clean, term, out=torch.empty_like(clean), size=size)
        return same_bits(weights.contiguous(), noisy.contiguous())
    if weights.is_contiguous() and clean.is_contiguous():
        weights, clean = weights.view(-1), clean.view(-1)
        parts: Iterable[Piece] = pieces(term.slot, term.draw, clean.device)
    else:
        z = standard_noise(term.slot, term.draw, clean.device).flatten()
        weights, clean, parts = weights.flatten(), clean.flatten(), [(0, z.numel(), z)]
    for low, high, z in parts:
        chunks = (t.split(BLOCK) for t in (weights[low:high], clean[low:high], z))
        for x, c, part in zip(*chunks, strict=True):  # in chunks, to need little memory
            noisy = torch.add(c, part, alpha=term.draw.sign * term.b)
            if not same_bits(x, noisy.to(x.dtype)):
                return False
    return True


def bit_patterns(x: Tensor) -> Tensor:
    """The bits of floating-point numbers, as integers in the same memory."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    return torch.equal(bit_patterns(x), bit_patterns(y))


@functools.lru_cache(maxsize=256)
def _hash(*key: int) -> int:
    """64 bits that depend on every number of the key."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _fresh(slot: Slot, low: int, high: int, draw: Draw, device: torch.device) -> Iterator[Piece]:
    """Draw each block of a parameter from a generator seeded for that block."""
    generator = torch.Generator(device)
    size = math.prod(slot.shape)
    for block in range(low // BLOCK, -(-high // BLOCK)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        # The CPU generator uses only the lower 32 bits of a seed, so two blocks of a draw have the
        # same noise with probability 2**-32. The next draw has other seeds.
        generator.manual_seed(_hash(draw.seed, draw.number, draw.rank, slot.number, block))
        z = torch.empty(last - first, dtype=torch.float32, device=device)
        family(draw.noise).fill_(z, generator)
        a, b = max(low, first), min(high, last)
        yield a - low, b - low, z[a - first : b - first]


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
