"""Images per second of ``neuvar.data.Batches`` beside a ``DataLoader`` over single images.

Run it as ``python benchmarks/batches.py [--quick] [--out FILE] [--markdown FILE]``. All contenders
give shuffled batches of CIFAR-10 with the same pad-4 crop, flip and normalization.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

# Threads that spin while they wait slow everything down as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from neuvar.data import Augmentation, Batches, DataError, Normalization, Split, load, normalization
from results import Ratio, Verdict, cpu_model, quartiles

OURS = "neuvar.data.Batches"
TARGET = 5.0
LEAST_ROUNDS = 3
LEAST_TURN = 0.5
"""Seconds of a turn: a shorter one would catch more or less than its share of disturbances."""

Epoch = Callable[[], Iterable[tuple[Tensor, Tensor]]]


class SingleImages(Dataset[tuple[Tensor, Tensor]]):
    """What is usually written: one image at a time, with operations of torch."""

    def __init__(self, data: Split, normalize: Normalization, pad: int, flip: float) -> None:
        self.images, self.labels = data.images, data.labels
        self.mean, self.std = normalize.mean, normalize.std
        self.pad, self.flip = pad, flip

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        height, width = image.shape[1:]
        if self.pad:
            # Python's own generator is quicker for a single number than torch's.
            top, left = random.randint(0, 2 * self.pad), random.randint(0, 2 * self.pad)
            padded = F.pad(image, (self.pad,) * 4)
            image = padded[:, top : top + height, left : left + width]
        if random.random() < self.flip:
            image = image.flip(-1)
        return image.float().div_(255).sub_(self.mean).div_(self.std), self.labels[index]


def contenders(data: Split, batch: int) -> dict[str, Epoch]:
    """What gives an epoch's batches, by name."""
    normalize = normalization(data.images)
    single = SingleImages(data, normalize, pad=4, flip=0.5)
    ours = Batches(data, batch, seed=0, augment=Augmentation(pad=4), normalize=normalize)
    found: dict[str, Epoch] = {OURS: lambda: ours}
    for workers in (0, 2):
        loader = DataLoader(
            single,
            batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        found[f"DataLoader, {workers} workers"] = lambda loader=loader: loader
    return found


def check(data: Split, batch: int) -> None:
    """Without chance both ways give the same batches."""
    normalize = normalization(data.images)
    plain = DataLoader(SingleImages(data, normalize, pad=0, flip=0.0), batch)
    ours = Batches(data, batch, shuffle=False, normalize=normalize)
    mirror = DataLoader(SingleImages(data, normalize, pad=0, flip=1.0), batch)
    for (x, y), (a, b), (m, _) in zip(ours, plain, mirror, strict=True):
        torch.testing.assert_close(x, a, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.flip(-1), m, rtol=1e-5, atol=1e-5)
        assert torch.equal(y, b)


def time_turn(epoch: Epoch) -> float:
    """Seconds until the last batch of an epoch has come, over as many as fill a turn."""
    gc.collect()
    began, epochs = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < LEAST_TURN or not epochs:
        for images, _ in epoch():
            assert images.dtype == torch.float32
        epochs += 1
    return taken / epochs


def time_rounds(epochs: dict[str, Epoch], seconds: float) -> list[dict[str, float]]:
    """Give every contender its turn, in a new order each round; seconds of an epoch, by round."""
    for epoch in epochs.values():
        time_turn(epoch)  # starts workers, fills caches
    rng, names = random.Random(0), list(epochs)
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
        rng.shuffle(names)
        rounds.append({name: time_turn(epochs[name]) for name in names})
    return rounds


@dataclass(frozen=True)
class Speed:
    """Median images per second, and how many times as many ours gives, over rounds."""

    images_per_second: float
    ours_to_this: Ratio


def speeds(rounds: list[dict[str, float]], count: int) -> dict[str, Speed]:
    """Compare within each round, then take quartiles."""
    found = {}
    for name in rounds[0]:
        ratios = [taken[name] / taken[OURS] for taken in rounds]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rate = count / statistics.median(taken[name] for taken in rounds)
        found[name] = Speed(rate, Ratio(median, low, high))
    return dict(sorted(found.items(), key=lambda item: -item[1].images_per_second))


def verdicts(found: dict[str, Speed]) -> list[Verdict]:
    """The target, held against every DataLoader."""
    return [
        Verdict(
            name,
            f"at least {TARGET:.0f} times the images per second",
            f"{speed.ours_to_this.median:.1f}×, quartiles {quartiles(speed.ours_to_this)}",
            speed.ours_to_this.median >= TARGET,
        )
        for name, speed in found.items()
        if name != OURS
    ]


def table(found: dict[str, Speed]) -> str:
    """The figures as Markdown."""
    rows = [
        f"| {name} | {speed.images_per_second:,.0f} | {speed.ours_to_this.median:.1f}× "
        f"| {quartiles(speed.ours_to_this)} |"
        for name, speed in found.items()
    ]
    head = ["| batches from | images per second | ours to this | quartiles |", "| --- " * 4 + "|"]
    lines = [f"- {v.case}: {v.target}: {v.measured}: {_met(v)}" for v in verdicts(found)]
    return "\n".join([*head, *rows, "", *lines]) + "\n"


def _met(verdict: Verdict) -> str:
    return "met" if verdict.met else "MISSED"


def training_split(count: int) -> tuple[Split, str]:
    """CIFAR-10's training images if they are on this machine, generated ones otherwise."""
    try:
        data, source = load("cifar10", download=False).train, "CIFAR-10"
    except DataError:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (50_000, 3, 32, 32), dtype=np.uint8)
        data, source = Split(torch.from_numpy(images), torch.arange(50_000) % 10), "generated"
    return Split(data.images[:count], data.labels[:count]), source


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few images: does it run at all?")
    parser.add_argument("--batch", type=int, default=128, help="images in a batch (128)")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring (60)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    if load_before > 0.3:
        print(f"The machine is busy (load {load_before:.1f}): expect a spread.", file=sys.stderr)
    data, source = training_split(1_000 if options.quick else 10_000)
    check(data, options.batch)
    rounds = time_rounds(contenders(data, options.batch), 1 if options.quick else options.seconds)
    found = speeds(rounds, len(data))
    title = f"{len(data)} images ({source}), batch {options.batch}, {len(rounds)} rounds\n\n"
    print(title + table(found))
    if options.markdown:
        options.markdown.write_text(title + table(found))
    if options.out:
        figures = {
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "machine": {
                "cpu": cpu_model(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "system": platform.platform(),
                "load": load_before,
            },
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "numpy", "neuvar")},
            },
            "images": source,
            "count": len(data),
            "batch": options.batch,
            "rounds": len(rounds),
            "contenders": {name: asdict(speed) for name, speed in found.items()},
            "targets": [asdict(verdict) for verdict in verdicts(found)],
        }
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
