"""Near-duplicates with other labels, outliers and ambiguous examples, beside cleanlab's Datalab.

Run it as ``python benchmarks/data_issues.py [--seed N] [--fashion FILE]``: about three minutes on
one core. In the 6,000 training digits of the excerpt of MNIST, 5 % of the labels are wrong. Added
are 100 copies with another label, 100 images that are no digits, with random labels, and 100 means
of two digits of different classes, with the label of one. ``FILE`` is an IDX file of other images,
such as Fashion-MNIST's ``t10k-images-idx3-ubyte.gz``.

Datalab's rules: the distance to the nearest neighbour is below 0.13 times its median (duplicates),
and the mean distance to the ten nearest (outliers), both by the cosine.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import NearestNeighbors

from neuvar import find_label_issues
from neuvar.cleaning import find_duplicates
from neuvar.data import mnist_excerpt
from neuvar.models import mlp

Array = np.ndarray[Any, np.dtype[Any]]
PLANTED, WRONG, KINDS = 100, 300, ("", "wrong", "copy", "outlier", "ambiguous")


def noisy(x: Array, rng: np.random.Generator) -> Array:
    return x + rng.normal(0, 8, x.shape)


def darker(x: Array, rng: np.random.Generator) -> Array:
    return x * rng.uniform(0.8, 0.95, (len(x), 1, 1))


def shifted(x: Array, rng: np.random.Generator) -> Array:
    return np.stack([np.roll(image, rng.choice([-1, 1]), rng.integers(2)) for image in x])


def rotated(x: Array, rng: np.random.Generator) -> Array:
    return np.rot90(x, axes=(1, 2))


def inverted(x: Array, rng: np.random.Generator) -> Array:
    return 255 - x


def random_pixels(x: Array, rng: np.random.Generator) -> Array:
    return rng.integers(256, size=x.shape)


def plant(
    copy: Callable[..., Array], outlier: Callable[..., Array], seed: int
) -> tuple[Array, ...]:
    """Images, labels, the kind of each, and whether it is a copy or has one."""
    train, rng = mnist_excerpt().train, np.random.default_rng(seed)
    x, y = train.images.numpy().reshape(-1, 28, 28), train.labels.numpy().copy()
    order, n = rng.permutation(len(x)), len(x)
    wrong, first, second, third, fourth = np.split(
        order[: WRONG + 4 * PLANTED], WRONG + PLANTED * np.arange(4)
    )
    y[wrong] = (y[wrong] + rng.integers(1, 10, WRONG)) % 10
    fourth = np.array([rng.choice(order[WRONG:][y[order[WRONG:]] != y[i]]) for i in third])
    both = (x[third].astype(int) + x[fourth]) // 2
    added = np.concatenate([copy(x[first], rng), outlier(x[second], rng), both])
    other = (y[first] + rng.integers(1, 10, PLANTED)) % 10
    labels = np.concatenate([y, other, rng.integers(10, size=PLANTED), y[third]])
    kind = np.concatenate([np.zeros(n, dtype=int), np.repeat([2, 3, 4], PLANTED)])
    kind[wrong] = 1
    has_copy = kind == 2
    has_copy[first] = True
    return np.concatenate([x, added.round().clip(0, 255).astype(np.uint8)]), labels, kind, has_copy


def row(name: str, flagged: Array, true: Array) -> str:
    precision = true[flagged].mean() if flagged.any() else float("nan")
    return f"| {name} | {flagged.sum()} | {precision:.2f} | {flagged[true].mean():.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--fashion", type=Path)
    options = parser.parse_args()
    pairs: list[tuple[Any, Any]] = [(noisy, inverted), (darker, rotated), (shifted, random_pixels)]
    if options.fashion:
        content = gzip.decompress(options.fashion.read_bytes())
        images = np.frombuffer(content, np.uint8, offset=16).reshape(-1, 28, 28)

        def clothes(x: Array, rng: np.random.Generator) -> Array:
            return images[rng.choice(len(images), len(x), replace=False)]

        pairs.append((noisy, clothes))
    torch.set_num_threads(1)
    duplicates, unclear = [], []
    for seed, (copy, outlier) in enumerate(pairs, options.seed):
        x, y, kind, has_copy = plant(copy, outlier, seed)
        rows = x.reshape(len(x), -1) / 255
        distances, _ = NearestNeighbors(n_neighbors=10, metric="cosine").fit(rows).kneighbors()
        conflicting = np.zeros(len(x), dtype=bool)
        conflicting[find_duplicates((x, y)).conflicting] = True
        near = distances[:, 0] < 0.13 * np.median(distances[:, 0])
        duplicates += [row(f"{copy.__name__} | neuvar", conflicting, has_copy),
                       row(f"{copy.__name__} | Datalab", near, has_copy)]  # fmt: skip
        issues = find_label_issues(mlp((784, 256, 256, 10), seed=seed), (x, y), epochs=15)
        for name, score in (("uncertainty", issues.uncertainty), ("Datalab", distances.mean(1))):
            areas = [roc_auc_score(kind == k, score) for k in (3, 4)]
            among = np.isin(kind, (3, 4))
            apart = roc_auc_score(kind[among] == 3, score[among])
            precision = average_precision_score(kind == 3, score)
            unclear.append(
                f"| {outlier.__name__} | {name} | {areas[0]:.3f} | {precision:.2f} | "
                f"{areas[1]:.3f} | {apart:.2f} |"
            )
        flags = [int(issues.flagged[kind == k].sum()) for k in range(len(KINDS))]
        print(f"labels flagged with {outlier.__name__}: {dict(zip(KINDS, flags, strict=True))}")
    print(
        "\n| copies | method | flagged | precision | recall |\n| --- | --- | ---: | ---: | ---: |"
    )
    print(*duplicates, sep="\n")
    columns = ("AUROC, outliers", "average precision, outliers", "AUROC, ambiguous",
               "AUROC, outliers against ambiguous")  # fmt: skip
    print(f"\n| outliers | score | {' | '.join(columns)} |\n| --- | --- |" + " ---: |" * 4)
    print(*unclear, sep="\n")


if __name__ == "__main__":
    main()
