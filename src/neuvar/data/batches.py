"""Batches of images, shuffled and augmented by the batch, normalised on the way out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from neuvar.data.sets import Split

HASHED_ROWS, HASHED_NUMBERS = 256, 1 << 20
"""How many rows and numbers of a large tensor a fingerprint looks at."""


@dataclass(frozen=True)
class Augmentation:
    """Random changes of an image that keep its class.

    Attributes:
        pad: the image gets this many black pixels on every side and is cut to its size again at a
            random place.
        flip: whether left and right are exchanged with probability ½.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if type(self.pad) is not int or self.pad < 0:
            raise ValueError(f"pad must be an integer >= 0, got {self.pad!r}")
        if type(self.flip) is not bool:
            raise ValueError(f"flip must be True or False, got {self.flip!r}")


@dataclass(frozen=True, eq=False)
class Normalization:
    r"""Subtract a mean and divide by a deviation: :math:`(x / 255 - \mu) / \sigma`.

    Attributes:
        mean: one number for each channel, shape (channels, 1, 1), or for each pixel, shape
            (channels, height, width); in the unit in which white is 1.
        std: likewise.
    """

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.mean).all()):
            raise ValueError(f"mean must be finite everywhere, got {self.mean.tolist()!r:.100}")
        if not bool((self.std > 0).all()):
            raise ValueError(f"std must be positive everywhere, got {self.std.tolist()!r:.100}")


def normalization(images: Tensor, *, mean: str = "channel") -> Normalization:
    """Statistics of a training split: each channel's deviation, and its mean or each pixel's.

    They come from sums of whole numbers, so they are exact and the same on every machine.

    Args:
        images: uint8, shape (n, height, width) or (n, channels, height, width).
        mean: "channel", or "pixel" to subtract each pixel's own mean over the images.

    Examples:
        >>> from neuvar.data import mnist_excerpt
        >>> found = normalization(mnist_excerpt().train.images)
        >>> round(float(found.mean), 3), round(float(found.std), 3)
        (0.13, 0.308)
    """
    if mean not in ("channel", "pixel"):
        raise ValueError(f"mean must be channel or pixel, got {mean!r}")
    images = _with_channels(images)
    if not len(images):
        raise ValueError("images is empty; a mean needs at least one image")
    count = images.numel() // images.shape[1]
    pixels = torch.zeros(images.shape[1:], dtype=torch.int64, device=images.device)
    squares = torch.zeros(images.shape[1], dtype=torch.int64, device=images.device)
    for part in images.split(4096):
        pixels += part.sum(0)
        squares += part.to(torch.int32).square_().sum((0, 2, 3))
    channel = pixels.sum((1, 2)).double() / count
    std = (squares.double() / count - channel.square()).clamp_(min=0).sqrt()
    std[std == 0] = 255.0  # a channel that is the same everywhere has nothing to scale
    centre = channel[:, None, None] if mean == "channel" else pixels.double() / len(images)
    return Normalization((centre / 255).float(), (std / 255).float()[:, None, None])


class Batches:
    """Batches of a data set that stays as bytes in memory, on any device.

    The order of an epoch and its augmentation depend on the seed and the epoch's number alone, and
    are the same on every device. So a run that stopped goes on with the very batches that it would
    have had: ``batches.epoch(3)``, or ``batches.epoch(3, start=17)`` from inside an epoch.

    Each batch is a tuple of float images, shape (batch, channels, height, width), and labels. Plain
    iteration, ``for images, labels in batches``, takes the next epoch each time it begins.

    Args:
        data: a split, or tensors of the same length whose first one holds uint8 images; a batch has
            an item for each of them. With ``torch.arange(n)`` among them, a batch knows its images.
        batch_size: images in a batch.
        seed: an integer from 0 to 2**32 - 1; needed to shuffle or to augment.
        shuffle: False for the official order, as for evaluation.
        augment: how to change images at random, or None.
        normalize: see :func:`normalization`; None leaves images in [0, 1].
        device: where batches are made; the data set is moved there once.
        drop_last: whether to leave out a last batch that is not full.

    Examples:
        >>> from neuvar.data import mnist_excerpt
        >>> train = mnist_excerpt().train
        >>> batches = Batches(train, 128, seed=0, normalize=normalization(train.images))
        >>> images, labels = next(batches.epoch(0))
        >>> images.shape, labels.shape, len(batches)
        (torch.Size([128, 1, 28, 28]), torch.Size([128]), 47)
    """

    def __init__(
        self,
        data: Split | Sequence[Tensor],
        batch_size: int,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        augment: Augmentation | None = None,
        normalize: Normalization | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
    ) -> None:
        tensors = [data.images, data.labels] if isinstance(data, Split) else list(data)
        images, others = _with_channels(tensors[0] if tensors else None), tensors[1:]
        if any(len(other) != len(images) for other in others):
            lengths = ", ".join(str(len(t)) for t in (images, *others))
            raise ValueError(f"data must be tensors of the same length, got {lengths}")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
        needs_seed = seed is not None or shuffle or augment is not None
        if needs_seed and not _is_word(seed):
            raise ValueError(f"seed must be an integer >= 0 and < 2**32, got {seed!r}")
        self.batch_size = batch_size
        self.next_epoch = 0
        self._images = images.to(device)
        self._others = [other.to(device) for other in others]
        self._seed = seed
        self._shuffle = shuffle
        self._augment = augment
        self._drop_last = drop_last
        self._scale, self._shift = _scale_and_shift(normalize, self._images)

    def __len__(self) -> int:
        count, size = len(self._images), self.batch_size
        return count // size if self._drop_last else -(-count // size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        number = self.next_epoch
        self.next_epoch += 1
        return self.epoch(number)

    def order(self, number: int) -> Tensor:
        """Which images an epoch shows, in its order: int64 on the CPU, shape (n,)."""
        if not _is_word(number):
            raise ValueError(f"number must be an integer >= 0 and < 2**32, got {number!r}")
        if not self._shuffle:
            return torch.arange(len(self._images))
        return torch.from_numpy(self._random(number, 0).permutation(len(self._images)))

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch, from number 0, beginning with its batch ``start``."""
        if not _is_word(number):
            raise ValueError(f"number must be an integer >= 0 and < 2**32, got {number!r}")
        if type(start) is not int or not 0 <= start <= len(self):
            raise ValueError(f"start must be an integer from 0 to {len(self)}, got {start!r}")
        return self._epoch(number, start)

    def fingerprint(self) -> dict[str, Any]:
        """What tells these batches from others: options, and hashes of the data.

        Of the images some are hashed, of the labels all. It is the same on every device.
        """
        return {
            "batch_size": self.batch_size,
            "seed of the batches": self._seed,
            "shuffle": self._shuffle,
            "augment": None if self._augment is None else str(self._augment),
            "drop_last": self._drop_last,
            "normalize": digest([self._scale, self._shift]),
            "images": digest([self._images]),
            "labels": digest(self._others),
        }

    def _epoch(self, number: int, start: int) -> Iterator[tuple[Tensor, ...]]:
        device, size = self._images.device, self.batch_size
        order = self.order(number).to(device)
        change = self._changes(number)
        for batch in range(start, len(self)):
            rows = slice(batch * size, (batch + 1) * size)
            index = order[rows]
            images = change(self._images.index_select(0, index), rows)
            images = images.to(torch.float32).mul_(self._scale).add_(self._shift)
            yield (images, *(other.index_select(0, index) for other in self._others))

    def _changes(self, number: int) -> Callable[[Tensor, slice], Tensor]:
        """What augmentation makes of the images at some places of an epoch."""
        if self._augment is None:
            return lambda images, _: images
        pad, (top, left, flip) = self._augment.pad, self._draws(number)
        if self._images.device.type == "cpu":
            most = min(self.batch_size, len(self._images))
            cutter = _Cutter((most, *self._images.shape[1:]), pad)
            return lambda images, rows: cutter(images, top[rows], left[rows], flip[rows])
        drawn = [torch.from_numpy(draw).to(self._images.device) for draw in (top, left, flip)]
        return lambda images, rows: crop_and_flip(images, *(d[rows] for d in drawn), pad=pad)

    def _draws(self, number: int) -> tuple[NDArray[Any], ...]:
        """Rows and columns of the cuts, and who is flipped, for every place of an epoch."""
        assert self._augment is not None
        random, count = self._random(number, 1), len(self._images)
        top, left = random.integers(0, 2 * self._augment.pad + 1, (2, count))
        flip = (random.integers(0, 2, count) * self._augment.flip).astype(bool)
        return top, left, flip

    def _random(self, number: int, purpose: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.Generator(np.random.PCG64([self._seed, number, purpose]))


def digest(parts: Iterable[Tensor | NDArray[Any]]) -> str:
    """Short hash of tensors or arrays, after a #: whole rows of labels, some rows of large others.

    >>> digest([torch.arange(3)]) == digest([torch.arange(3)]) != digest([torch.arange(4)])
    True
    """
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(f"{tuple(part.shape)} {part.dtype};".encode())
        rows: Any = part.reshape(1) if not part.ndim else part
        width = math.prod(rows.shape[1:])
        if not len(rows) * width or (isinstance(rows, Tensor) and rows.layout != torch.strided):
            continue
        if rows.ndim > 1 or "float" in str(rows.dtype):
            most = max(1, min(HASHED_ROWS, HASHED_NUMBERS // width, len(rows)))
            rows = rows[np.linspace(0, len(rows) - 1, most).astype(int).tolist()]
        if isinstance(rows, Tensor):
            # A copy has plain strides also where an axis is of length 1.
            rows = rows.detach().cpu().clone(memory_format=torch.contiguous_format)
            rows = rows.reshape(-1).view(torch.uint8).numpy()
        found.update(np.ascontiguousarray(rows).tobytes())
    return f"#{found.hexdigest()}"


def _is_word(number: Any) -> bool:
    """Whether a number may be part of a seed.

    numpy lays the parts of a seed end to end as words of 32 bits, so that only numbers of one word
    each make sure that different seeds and epochs have different streams.
    """
    return type(number) is int and 0 <= number < 1 << 32


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, pad: int) -> Tensor:
    """Cut each padded image at its own place, and flip those that are to be flipped.

    Args:
        images: shape (n, channels, height, width); any type.
        top: int64 in [0, 2 pad], shape (n,): the first row of the padded image that is kept.
        left: likewise, for columns.
        flip: bool, shape (n,): which images to mirror, after the cut.
        pad: pixels of zero added on every side.

    Examples:
        >>> image = torch.arange(4).view(1, 1, 2, 2)
        >>> one = torch.ones(1, dtype=torch.int64)
        >>> crop_and_flip(image, one, one, torch.tensor([True]), pad=1).flatten().tolist()
        [1, 0, 3, 2]
    """
    n, channels, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(n, width)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - columns, columns)
    # One gather for all: a pixel's place in the flattened image is the same in each channel.
    places = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    places = places.view(n, 1, height * width).expand(n, channels, height * width)
    return padded.view(n, channels, -1).gather(2, places).view(images.shape)


class _Cutter:
    """The same as :func:`crop_and_flip` on a CPU, where copying windows is quicker than a gather.

    Its buffers serve all batches of an epoch; what it returns is valid until the next call.
    """

    def __init__(self, shape: tuple[int, ...], pad: int) -> None:
        n, channels, height, width = shape
        padded = np.zeros((n, channels, height + 2 * pad, width + 2 * pad), np.uint8)
        self._pad = pad
        self._middle = padded[:, :, pad : pad + height, pad : pad + width]
        self._cuts = np.empty(shape, np.uint8)
        self._windows, self._mirrored = (
            np.lib.stride_tricks.sliding_window_view(side, (height, width), (2, 3))
            for side in (padded, padded[..., ::-1])
        )

    def __call__(
        self, images: Tensor, top: NDArray[Any], left: NDArray[Any], flip: NDArray[Any]
    ) -> Tensor:
        self._middle[: len(images)] = images.numpy()
        for windows, column, who in (
            (self._windows, left, np.flatnonzero(~flip)),
            (self._mirrored, 2 * self._pad - left, np.flatnonzero(flip)),
        ):
            self._cuts[who] = windows[who, :, top[who], column[who]]
        return torch.from_numpy(self._cuts[: len(images)])


def _with_channels(images: Any) -> Tensor:
    """Images of shape (n, channels, height, width); those without channels have one."""
    kind, shape = getattr(images, "dtype", type(images).__name__), getattr(images, "shape", ())
    if kind != torch.uint8 or len(shape) not in (3, 4):
        raise ValueError(
            "images must be uint8 of shape (n, height, width) or (n, channels, height, width), "
            f"got {kind} of shape {tuple(shape)}"
        )
    found: Tensor = images if len(shape) == 4 else images.unsqueeze(1)
    return found


def _scale_and_shift(normalize: Normalization | None, images: Tensor) -> tuple[Tensor, Tensor]:
    """The one multiplication and the one addition that normalise bytes."""
    if normalize is None:
        return torch.tensor(1 / 255, device=images.device), torch.tensor(0.0, device=images.device)
    mean, std = normalize.mean.double(), normalize.std.double()
    try:
        fits = torch.broadcast_shapes(mean.shape, std.shape, images.shape[1:]) == images.shape[1:]
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"normalize must fit images of shape {tuple(images.shape[1:])}, got mean and std of "
            f"shape {tuple(mean.shape)} and {tuple(std.shape)}"
        )
    return (1 / (255 * std)).float().to(images.device), (-mean / std).float().to(images.device)
