"""Memory and time of find_label_issues for a million examples.

Run it as ``python benchmarks/cleaning_scale.py [--examples N] [--out FILE]``: about five minutes on
one core. Each row runs in a process of its own. Sizes are in megabytes. Memory is the peak during
the call minus that before it; pages of a mapped file, which the system can drop at any time, are
counted apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

CHUNK, COLUMNS, EPOCHS, MB = 10_000, 64, 2, 1e6
ROWS: dict[str, tuple[str, int]] = {
    "probabilities of 10 classes": ("probabilities", 10),
    "probabilities of 100 classes": ("probabilities", 100),
    "64 features, 10 classes, two epochs": ("memory", 10),
    "64 features, 100 classes, two epochs": ("memory", 100),
    "64 features in a file, 10 classes, two epochs": ("file", 10),
}
"""By name: where the inputs are, and the number of classes."""


class Peak:
    """The largest memory of this process while the block runs, by kind, sampled every 2 ms."""

    def __enter__(self) -> Peak:
        self.before = self.largest = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.largest = {k: max(v, self.largest[k]) for k, v in resident().items()}

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def extra(self, kind: str) -> float:
        """Megabytes beyond those before."""
        return (self.largest[kind] - self.before[kind]) / MB


def resident() -> dict[str, int]:
    """Bytes in memory: of this process alone, and of mapped files. Needs Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":") for line in lines if line.startswith("Rss"))
    own, files = (1024 * int(values[key].split()[0]) for key in ("RssAnon", "RssFile"))
    return {"own": own, "files": files}


def measure(where: str, classes: int, n: int, folder: Path) -> dict[str, float]:
    """Size of the inputs and of the probabilities, peak memory and time of one row."""
    import torch

    from neuvar import find_label_issues
    from neuvar.models import mlp

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    true = rng.integers(classes, size=n)
    y = np.where(rng.random(n) < 0.1, rng.integers(classes, size=n), true)
    model: Any
    if where == "probabilities":
        x = np.empty((n, classes), dtype=np.float32)
        for start in range(0, n, CHUNK):
            part = slice(start, start + CHUNK)
            p = rng.random((len(y[part]), classes), dtype=np.float32)
            p[np.arange(len(p)), true[part]] += classes
            x[part] = p / p.sum(1, keepdims=True)
        model, data, options = x, y, {}
        find_label_issues(x[:1000], y[:1000])  # imports everything
    else:
        centres = rng.standard_normal((classes, COLUMNS), dtype=np.float32)
        x = np.empty((n, COLUMNS), dtype=np.float32)
        for start in range(0, n, CHUNK):
            part = slice(start, start + CHUNK)
            noise = rng.standard_normal((len(y[part]), COLUMNS), dtype=np.float32)
            x[part] = centres[true[part]] + noise
        if where == "file":
            np.save(folder / "x.npy", x)
            x = np.load(folder / "x.npy", mmap_mode="r")
        model, options = mlp((COLUMNS, 64, classes), seed=0), {"epochs": EPOCHS, "b": 0.01}
        data = (x, y)
        find_label_issues(model, (np.array(x[:2000]), y[:2000]), **options)
    began = time.perf_counter()
    with Peak() as peak:
        issues = find_label_issues(model, data, **options)
    return {
        "inputs": x.nbytes / MB,
        "probabilities": issues.probabilities.nbytes / MB,
        "own": peak.extra("own"),
        "files": peak.extra("files"),
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(*ROWS[options.row], options.examples, Path(folder))
            print(json.dumps(result))
        return
    lines = [
        "| inputs | size | probabilities | extra memory | extra / size | pages of files |",
        "| --- |" + " ---: |" * 5,
    ]
    for row in ROWS:
        command = [sys.executable, __file__, "--row", row, "--examples", str(options.examples)]
        r = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(f"{row}: {r['seconds']:.0f} s", flush=True)
        sizes = " | ".join(f"{r[key]:.0f}" for key in ("inputs", "probabilities", "own"))
        ratio = r["own"] / r["inputs"]
        lines.append(f"| {row} | {sizes} | {ratio:.2f} | {r['files']:.0f} |")
    print(*lines, sep="\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
