"""Corruptions of images: 26 kinds like those of MNIST-C and CIFAR-10-C.

Frost is left out, because it needs pictures. The code and the severities are our own. Do not
compare accuracies with published ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from neuvar import _validate

SEVERITIES = (1, 2, 3, 4, 5)

Corruption = Callable[[Tensor, float, torch.Generator], Tensor]
"""Corrupts images (n, channels, height, width) in [0, 1]; the result is clamped to [0, 1]."""


def corrupt_images(images: Any, kind: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt images; the same seed gives the same result.

    Args:
        images: Numbers from 0 to 1, or bytes, of shape (n, channels, height, width) or
            (n, height, width).
        kind: One of ``CORRUPTIONS``.
        severity: 1 to 5.
        seed: Of random corruptions.

    Returns:
        Images of the same shape, as floating-point numbers from 0 to 1.

    >>> images = torch.full((2, 1, 8, 8), 0.5)
    >>> corrupt_images(images, "brightness", 3).mean().item().__round__(2)
    0.7
    """
    images = as_images(images)
    _validate.one_of("kind", kind, CORRUPTIONS)
    severity = _validate.integer("severity", severity, low=1, high=5)
    function, strengths = CORRUPTIONS[kind]
    key = [_validate.seed(seed), zlib.crc32(kind.encode()), severity]
    number = int(np.random.SeedSequence(key).generate_state(1)[0])
    generator = torch.Generator().manual_seed(number)
    x = images.unsqueeze(1) if images.ndim == 3 else images
    return function(x, strengths[severity - 1], generator).clamp(0, 1).view_as(images)


def as_images(images: Any) -> Tensor:
    """Validate images, and convert bytes to numbers from 0 to 1."""
    if not isinstance(images, Tensor) or images.ndim not in (3, 4):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must have the shape (n, channels, height, width), got {got}")
    if not images.numel():
        raise ValueError(f"images must not be empty, got shape {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point() or not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            "images must be bytes or floating-point numbers from 0 to 1; normalize them after the "
            f"corruption, got {images.dtype} from {images.min().item()} to {images.max().item()}"
        )
    return images


def _random(x: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform numbers in [0, 1), the same on any device."""
    return torch.rand(shape or x.shape, generator=generator).to(x)


def gaussian_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise with this standard deviation."""
    return x + strength * torch.randn(x.shape, generator=generator).to(x)


def speckle_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise with a standard deviation proportional to the brightness."""
    return x * (1 + strength * torch.randn(x.shape, generator=generator).to(x))


def shot_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Draw each pixel as a count of photons: Poisson, with mean ``strength`` at brightness 1."""
    return torch.poisson(strength * x.cpu(), generator).to(x) / strength


def impulse_noise(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Set this share of the pixels to black or white."""
    u = _random(x, generator)
    return x.masked_fill(u < strength / 2, 0).masked_fill(u > 1 - strength / 2, 1)


def _blur(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve each channel with a kernel of odd size; edges are repeated."""
    pad = kernel.shape[-1] // 2
    weight = (kernel / kernel.sum()).to(x).expand(x.shape[1], 1, *kernel.shape)
    return F.conv2d(F.pad(x, [pad] * 4, mode="replicate"), weight, groups=x.shape[1])


def gaussian_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Blur with a Gaussian of this standard deviation in pixels."""
    radius = math.ceil(3 * strength)
    line = torch.exp(-torch.arange(-radius, radius + 1).double().square() / (2 * strength**2))
    return _blur(x, line[:, None] * line)


def defocus_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Blur with a disk of this radius in pixels."""
    radius = math.ceil(strength)
    line = torch.arange(-radius, radius + 1).double()
    distance = (line[:, None].square() + line.square()).sqrt()
    return _blur(x, (strength + 0.5 - distance).clamp(0, 1))


def motion_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Move each image along a line of this length in pixels, in a random direction."""
    angle = 2 * math.pi * _random(x, generator, len(x))
    steps = torch.linspace(-0.5, 0.5, 9).tolist()
    shifts = [strength * s * torch.stack([angle.cos(), angle.sin()], 1) for s in steps]
    return torch.stack([_affine(x, shift=shift) for shift in shifts]).mean(0)


def zoom_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Average zooms from 1 to this factor."""
    zooms = torch.linspace(1, strength, 8).tolist()
    return torch.stack([_affine(x, matrix=torch.eye(2) / zoom) for zoom in zooms]).mean(0)


def brightness(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add this to all pixels."""
    return x + strength


def contrast(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Multiply each pixel's difference from the mean of its image by this factor."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + strength * (x - mean)


def saturate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Multiply each channel's difference from the mean of the channels; grey images stay."""
    grey = x.mean(1, keepdim=True)
    return grey + strength * (x - grey)


def jpeg(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Round the cosine transform of 8 × 8 blocks as JPEG does at this quality, in every channel."""
    factor = 50 / strength if strength < 50 else 2 - strength / 50
    table = (factor * JPEG_STEPS.to(x) + 0.5).floor().clamp(1, 255)
    k = torch.arange(8).to(x)
    cosines = torch.cos(math.pi / 8 * (k + 0.5) * k[:, None]) / 2
    cosines[0] /= math.sqrt(2)
    height, width = x.shape[-2:]
    padded = F.pad(x, [0, -width % 8, 0, -height % 8], mode="replicate")
    blocks = (255 * padded - 128).unfold(2, 8, 8).unfold(3, 8, 8)
    rounded = (cosines @ blocks @ cosines.T / table).round() * table
    pixels = (cosines.T @ rounded @ cosines + 128) / 255
    return pixels.transpose(3, 4).reshape(padded.shape)[..., :height, :width]


def snow(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cover about this share of the pixels with blurred flakes, which fall in one direction."""
    flakes = (_random(x, generator, len(x), 1, *x.shape[-2:]) < strength / 3).to(x)
    return torch.maximum(x, 2 * motion_blur(flakes, 3, generator))


def spatter(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cover this share of each image with grey blots."""
    size = x.shape[-2:]
    coarse = _random(x, generator, len(x), 1, *(max(2, n // 3) for n in size))
    blots = F.interpolate(coarse, size, mode="bicubic")
    dry = math.ceil((1 - strength) * size.numel())
    edge = blots.flatten(1).kthvalue(max(dry, 1), dim=1).values
    return torch.where(blots > edge[:, None, None, None], 0.6, x)


def dotted_line(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Draw this many white dotted lines from the left to the right edge."""
    return _drawn(x, int(strength), generator, amplitude=0.0, dotted=True)


def zigzag(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Draw this many white zigzag lines from the left to the right edge."""
    return _drawn(x, int(strength), generator, amplitude=0.1, dotted=False)


def _drawn(
    x: Tensor, lines: int, generator: torch.Generator, *, amplitude: float, dotted: bool
) -> Tensor:
    """Draw lines one to two pixels wide; the amplitude is relative to the height."""
    height, width = x.shape[-2:]
    rows, columns = torch.arange(height).to(x)[:, None], torch.arange(width).to(x)
    for _ in range(lines):
        start, end = (height - 1) * _random(x, generator, 2, len(x), 1, 1, 1)
        wave = (columns / width * 5 % 1 - 0.5).abs() * 4 - 1  # from -1 to 1, five times
        line = start + (end - start) * columns / max(width - 1, 1) + amplitude * height * wave
        near = (rows - line).abs() < (1 if amplitude == 0 else 1.5)
        near &= (columns % 4 < 2) | (not dotted)
        x = x.masked_fill(near, 1)
    return x


def edges(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Mix the image with its edges, as Canny finds them, in this proportion."""
    smooth = gaussian_blur(x.mean(1, keepdim=True), 0.7, generator)
    around = F.pad(smooth, [1] * 4, mode="replicate")
    dx = around[..., 1:-1, 2:] - around[..., 1:-1, :-2]
    dy = around[..., 2:, 1:-1] - around[..., :-2, 1:-1]
    size = torch.hypot(dx, dy)
    padded = F.pad(size, [1] * 4)
    right, left = padded[..., 1:-1, 2:], padded[..., 1:-1, :-2]
    below, above = padded[..., 2:, 1:-1], padded[..., :-2, 1:-1]
    # Keep a pixel if no neighbour across the edge has a larger gradient.
    across, along = torch.maximum(left, right), torch.maximum(above, below)
    largest = torch.where(dx.abs() > dy.abs(), across, along)
    limit = 0.2 * size.amax((1, 2, 3), keepdim=True)
    found = (size >= largest) & (size > limit)
    return (1 - strength) * x + strength * found.to(x)


def fog(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add random clouds, and reduce the contrast to make room for them."""
    size = x.shape[-2:]
    clouds = torch.zeros(len(x), 1, *size).to(x)
    for level in range(1, 5):
        coarse = _random(x, generator, len(x), 1, 2**level, 2**level)
        clouds += F.interpolate(coarse, size, mode="bilinear", align_corners=True) / 2**level
    clouds /= clouds.amax((1, 2, 3), keepdim=True)
    return (x + strength * clouds) / (1 + strength)


def stripe(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Invert a vertical stripe of this share of the width, at a random position."""
    width = x.shape[-1]
    size = max(1, round(strength * width))
    left = (_random(x, generator, len(x), 1, 1, 1) * (width - size + 1)).floor()
    column = torch.arange(width).to(x)
    return torch.where((column >= left) & (column < left + size), 1 - x, x)


def pixelate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Reduce the resolution to this share, and enlarge to the old size."""
    size = x.shape[-2:]
    small = (max(1, round(strength * size[0])), max(1, round(strength * size[1])))
    return F.interpolate(F.adaptive_avg_pool2d(x, small), size, mode="nearest")


def elastic(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Move pixels by smooth random shifts of about this many pixels."""
    coarse = 2 * _random(x, generator, len(x), 2, 4, 4) - 1
    shifts = F.interpolate(coarse, x.shape[-2:], mode="bilinear", align_corners=True)
    return _affine(x, shift=strength * shifts.permute(0, 2, 3, 1))


def glass_blur(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Move each pixel by an independent random shift of up to this many pixels."""
    shifts = 2 * _random(x, generator, len(x), *x.shape[-2:], 2) - 1
    return _affine(x, shift=strength * shifts)


def rotate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Rotate by this many degrees, to the left or to the right."""
    angle = math.radians(strength) * _signs(x, generator)
    rows = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1)
    return _affine(x, matrix=rows.view(-1, 2, 2))


def shear(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Shift each row in proportion to its height, to the left or to the right."""
    slope = strength * _signs(x, generator)
    one, zero = torch.ones_like(slope), torch.zeros_like(slope)
    return _affine(x, matrix=torch.stack([one, slope, zero, one], 1).view(-1, 2, 2))


def shrink(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Reduce the size to this share, and fill the border with black."""
    return _affine(x, matrix=torch.eye(2) / strength)


def translate(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Shift by this many pixels in a random direction, and fill with black."""
    angle = 2 * math.pi * _random(x, generator, len(x))
    return _affine(x, shift=strength * torch.stack([angle.cos(), angle.sin()], 1))


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * (_random(x, generator, len(x)) < 0.5).to(x) - 1


def _affine(x: Tensor, *, matrix: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """Read each pixel from ``matrix @ position + shift``, in pixels around the centre."""
    n, _, height, width = x.shape
    rows = (torch.arange(height) - (height - 1) / 2).to(x)
    columns = (torch.arange(width) - (width - 1) / 2).to(x)
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).expand(n, -1, -1, -1)
    if matrix is not None:
        grid = torch.einsum("nij,nhwj->nhwi", matrix.to(x).expand(n, 2, 2), grid)
    if shift is not None:
        grid = grid + (shift if shift.ndim == 4 else shift[:, None, None])
    scaled = grid * 2 / torch.tensor([width, height]).to(x)
    return F.grid_sample(x, scaled, mode="bilinear", padding_mode="zeros", align_corners=False)


# The luminance table of annex K of the JPEG standard (ITU-T T.81), for quality 50.
JPEG_STEPS = torch.tensor(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)

CORRUPTIONS: dict[str, tuple[Corruption, tuple[float, float, float, float, float]]] = {
    "gaussian_noise": (gaussian_noise, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "shot_noise": (shot_noise, (60, 25, 12, 6, 3)),
    "impulse_noise": (impulse_noise, (0.02, 0.05, 0.1, 0.15, 0.25)),
    "speckle_noise": (speckle_noise, (0.1, 0.2, 0.3, 0.45, 0.6)),
    "gaussian_blur": (gaussian_blur, (0.5, 0.75, 1.0, 1.5, 2.0)),
    "defocus_blur": (defocus_blur, (0.75, 1.0, 1.5, 2.0, 3.0)),
    "glass_blur": (glass_blur, (0.5, 0.75, 1.0, 1.5, 2.0)),
    "motion_blur": (motion_blur, (2, 3, 4, 6, 8)),
    "zoom_blur": (zoom_blur, (1.1, 1.2, 1.3, 1.4, 1.6)),
    "brightness": (brightness, (0.1, 0.15, 0.2, 0.3, 0.4)),
    "contrast": (contrast, (0.6, 0.45, 0.3, 0.2, 0.1)),
    "saturate": (saturate, (1.5, 2, 3, 5, 8)),
    "jpeg": (jpeg, (75, 50, 30, 15, 8)),
    "snow": (snow, (0.05, 0.1, 0.15, 0.25, 0.4)),
    "spatter": (spatter, (0.05, 0.1, 0.15, 0.25, 0.4)),
    "dotted_line": (dotted_line, (1, 2, 3, 4, 6)),
    "zigzag": (zigzag, (1, 2, 3, 4, 6)),
    "edges": (edges, (0.2, 0.4, 0.6, 0.8, 1.0)),
    "fog": (fog, (0.3, 0.6, 0.9, 1.2, 1.8)),
    "stripe": (stripe, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelate": (pixelate, (0.75, 0.6, 0.5, 0.4, 0.3)),
    "elastic": (elastic, (1, 1.5, 2, 3, 4)),
    "rotate": (rotate, (8, 15, 22, 30, 45)),
    "shear": (shear, (0.1, 0.2, 0.3, 0.45, 0.6)),
    "shrink": (shrink, (0.9, 0.8, 0.7, 0.6, 0.5)),
    "translate": (translate, (1, 2, 3, 4, 6)),
}
"""Each kind of corruption: its function, and its strength at severities 1 to 5."""
