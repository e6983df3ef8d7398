"""Batches of images in memory: shuffled, augmented and normalized batch by batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from neuvar import _validate
from neuvar.data.dataset import Split

HASHED_ROWS, HASHED_NUMBERS = 256, 1 << 20
"""Largest number of rows and of elements of a tensor that :func:`digest` hashes."""


@dataclass(frozen=True)
class Augmentation:
    """Random crop and horizontal flip.

    Attributes:
        pad: black pixels added on every side before a random crop to the original size.
        flip: whether to flip an image horizontally with probability 1/2.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "pad", _validate.integer("pad", self.pad, low=0))
        _validate.boolean("flip", self.flip)


@dataclass(frozen=True, eq=False)
class Normalization:
    r"""Mean and standard deviation to normalize images with: :math:`(x / 255 - \mu) / \sigma`.

    Attributes:
        mean: shape (channels, 1, 1), or (channels, height, width) for a mean of each pixel; pixels
            are from 0 to 1.
        std: standard deviation, of the same shapes.
    """

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.mean).all()):
            raise ValueError(f"mean must be finite everywhere, got {self.mean.tolist()!r:.100}")
        if not bool((self.std > 0).all()):
            raise ValueError(f"std must be positive everywhere, got {self.std.tolist()!r:.100}")


def normalization(images: Tensor, *, mean: str = "channel") -> Normalization:
    """Mean and standard deviation of each channel of a training split.

    They are computed from sums of integers, so they are exact and the same on every machine.

    Args:
        images: uint8, shape (n, height, width) or (n, channels, height, width).
        mean: "channel", or "pixel" for a mean of each pixel.

    Examples:
        >>> from neuvar.data import mnist_excerpt
        >>> statistics = normalization(mnist_excerpt().train.images)
        >>> round(float(statistics.mean), 3), round(float(statistics.std), 3)
        (0.13, 0.308)
    """
    _validate.one_of("mean", mean, ("channel", "pixel"))
    images = _with_channels(images)
    if not len(images):
        raise ValueError("images must not be empty")
    count = images.numel() // images.shape[1]
    pixels = torch.zeros(images.shape[1:], dtype=torch.int64, device=images.device)
    squares = torch.zeros(images.shape[1], dtype=torch.int64, device=images.device)
    for part in images.split(4096):
        pixels += part.sum(0)
        squares += part.to(torch.int32).square_().sum((0, 2, 3))
    channel = pixels.sum((1, 2)).double() / count
    std = (squares.double() / count - channel.square()).clamp_(min=0).sqrt()
    std[std == 0] = 255.0  # constant channels are not scaled
    centre = channel[:, None, None] if mean == "channel" else pixels.double() / len(images)
    return Normalization((centre / 255).float(), (std / 255).float()[:, None, None])


class Batches:
    """Batches of a dataset that stays in memory as uint8, on any device.

    A batch is a tuple of float images, shape (batch, channels, height, width), and labels. The
    order and the augmentation of an epoch depend only on the seed and the epoch's number, so a run
    can resume with the batches it would have had: ``batches.epoch(3, start=17)``. A loop
    ``for images, labels in batches`` takes the next epoch each time.

    Args:
        data: a split, or tensors of the same length, the first of which holds uint8 images. A batch
            has an item for each tensor; add ``torch.arange(n)`` to get the indices of the images.
        batch_size: images per batch.
        seed: an integer from 0 to 2**32 - 1; required to shuffle or to augment.
        shuffle: False keeps the official order, for evaluation.
        augment: random changes of the images, or None.
        normalize: see :func:`normalization`; None leaves images in [0, 1].
        device: device of the batches; the dataset is moved there once.
        drop_last: whether to drop the last batch if it is not full.

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
        if seed is not None or shuffle or augment is not None:
            seed = _validate.seed(seed)
        self.batch_size = _validate.integer("batch_size", batch_size, low=1)
        self.next_epoch = 0
        self._images = images.to(device)
        self._others = [other.to(device) for other in others]
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._augment = augment
        self._scale, self._shift = _scale_and_shift(normalize, self._images)

    def __len__(self) -> int:
        count, size = len(self._images), self.batch_size
        return count // size if self._drop_last else -(-count // size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.next_epoch += 1
        return self.epoch(self.next_epoch - 1)

    def order(self, number: int) -> Tensor:
        """Indices of the images of an epoch in its order: int64 on the CPU, shape (n,)."""
        number = _validate.seed(number, "number")
        if not self._shuffle:
            return torch.arange(len(self._images))
        return torch.from_numpy(self._random(number, 0).permutation(len(self._images)))

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of epoch ``number`` (the first is 0), from batch ``start`` on."""
        number = _validate.seed(number, "number")
        return self._epoch(number, _validate.integer("start", start, low=0, high=len(self)))

    def fingerprint(self) -> dict[str, Any]:
        """Options, and hashes of some images and of all labels; the same on any device."""
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
        draws: Sequence[Any] = ()
        augment: Callable[..., Tensor] | None = None
        if self._augment is not None:
            draws, pad = self._draws(number), self._augment.pad
            if device.type == "cpu":
                augment = _Cropper((min(size, len(order)), *self._images.shape[1:]), pad)
            else:
                draws = [torch.from_numpy(draw).to(device) for draw in draws]
                augment = partial(crop_and_flip, pad=pad)
        for batch in range(start, len(self)):
            rows = slice(batch * size, (batch + 1) * size)
            index = order[rows]
            images = self._images.index_select(0, index)
            if augment is not None:
                images = augment(images, *(draw[rows] for draw in draws))
            images = images.to(torch.float32).mul_(self._scale).add_(self._shift)
            yield (images, *(other.index_select(0, index) for other in self._others))

    def _draws(self, number: int) -> tuple[NDArray[Any], ...]:
        """First row and column of each crop of an epoch, and whether it is flipped."""
        assert self._augment is not None
        random, count = self._random(number, 1), len(self._images)
        top, left = random.integers(0, 2 * self._augment.pad + 1, (2, count))
        flip = (random.integers(0, 2, count) * self._augment.flip).astype(bool)
        return top, left, flip

    def _random(self, number: int, purpose: int) -> np.random.Generator:
        # numpy joins the parts of a seed as 32-bit words. Each part is checked to fit into one
        # word, so different seeds and epochs have different streams.
        assert self._seed is not None
        return np.random.default_rng([self._seed, number, purpose])


def digest(parts: Iterable[Tensor | NDArray[Any]]) -> str:
    """Short hash of tensors or arrays.

    It covers all elements of integer vectors, such as labels, and some rows of other tensors.

    >>> digest([torch.arange(3)]) == digest([torch.arange(3)]) != digest([torch.arange(4)])
    True
    """
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(f"{tuple(part.shape)} {part.dtype};".encode())
        rows: Any = part.reshape(1) if not part.ndim else part
        width = math.prod(rows.shape[1:])
        if not len(rows) * width or (isinstance(rows, Tensor) and rows.layout != torch.strided):
            continue
        if rows.ndim > 1 or "float" in str(rows.dtype):
            most = max(1, min(HASHED_ROWS, HASHED_NUMBERS // width, len(rows)))
            rows = rows[np.linspace(0, len(rows) - 1, most).astype(int).tolist()]
        if isinstance(rows, Tensor):
            # A copy has contiguous strides even if a dimension has length 1.
            rows = rows.detach().cpu().clone(memory_format=torch.contiguous_format)
            rows = rows.reshape(-1).view(torch.uint8).numpy()
        hasher.update(np.ascontiguousarray(rows).tobytes())
    return f"#{hasher.hexdigest()}"


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, pad: int) -> Tensor:
    """Pad images with zeros, crop each at its own row ``top`` and column ``left``, and flip some.

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
    # One gather for all channels: a pixel has the same index in each flattened channel.
    index = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    index = index.view(n, 1, height * width).expand(n, channels, height * width)
    return padded.view(n, channels, -1).gather(2, index).view(images.shape)


class _Cropper:
    """:func:`crop_and_flip` on a CPU, where copying windows is faster than a gather.

    A result is valid until the next call, which writes to the same buffers.
    """

    def __init__(self, shape: tuple[int, ...], pad: int) -> None:
        n, channels, height, width = shape
        padded = np.zeros((n, channels, height + 2 * pad, width + 2 * pad), np.uint8)
        self._pad = pad
        self._center = padded[:, :, pad : pad + height, pad : pad + width]
        self._crops = np.empty(shape, np.uint8)
        self._windows, self._flipped = (
            np.lib.stride_tricks.sliding_window_view(side, (height, width), (2, 3))
            for side in (padded, padded[..., ::-1])
        )

    def __call__(
        self, images: Tensor, top: NDArray[Any], left: NDArray[Any], flip: NDArray[Any]
    ) -> Tensor:
        self._center[: len(images)] = images.numpy()
        for windows, column, rows in (
            (self._windows, left, np.flatnonzero(~flip)),
            (self._flipped, 2 * self._pad - left, np.flatnonzero(flip)),
        ):
            self._crops[rows] = windows[rows, :, top[rows], column[rows]]
        return torch.from_numpy(self._crops[: len(images)])


def _with_channels(images: Any) -> Tensor:
    """Images of shape (n, channels, height, width); a channel is added if there is none."""
    kind, shape = getattr(images, "dtype", type(images).__name__), getattr(images, "shape", ())
    if kind != torch.uint8 or len(shape) not in (3, 4):
        raise ValueError(
            "images must be uint8 of shape (n, height, width) or (n, channels, height, width), "
            f"got {kind} of shape {tuple(shape)}"
        )
    result: Tensor = images if len(shape) == 4 else images.unsqueeze(1)
    return result


def _scale_and_shift(normalize: Normalization | None, images: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and offset that normalize uint8 images."""
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
