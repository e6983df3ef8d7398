"""CPU seconds of ``import torch``, of ``import neuvar`` and of commands that need no torch.

Run it as ``python benchmarks/startup.py [--rounds N] [--out FILE]``. Every round starts each of
them once in a new process, in a new random order; shown are medians over the rounds. Targets are
held against CPU time, which other programs on the machine change less than time on the clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

EVERY = "import torch, neuvar; every public name"
NAMES = "import torch, neuvar\nfor name in neuvar.__all__: getattr(neuvar, name)"
COMMANDS = ("--version", "--help", "run --help", "list")
PROCESSES = {
    "python": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "import torch, neuvar": ("-c", "import torch, neuvar"),
    EVERY: ("-c", NAMES),
    **{f"neuvar {words}": ("-m", "neuvar", *words.split()) for words in COMMANDS},
}
MORE_THAN_TORCH = 0.3
"""CPU seconds that neuvar with every public name may take on top of torch."""
COMMAND = 0.5
"""CPU seconds that a command may take."""


def seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    """CPU seconds and seconds on the clock of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, taken


def time_rounds(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Time all processes in turns, after one round that fills the caches of files."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROCESSES}
    order, rng = list(PROCESSES), random.Random(0)
    for number in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            taken = seconds(PROCESSES[name])
            if number:
                found[name].append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="how many (9)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    found = time_rounds(options.rounds)
    cpu = {name: statistics.median(c for c, _ in taken) for name, taken in found.items()}
    clock = {name: statistics.median(t for _, t in taken) for name, taken in found.items()}
    for name in PROCESSES:
        print(f"{name:<40} {cpu[name]:6.2f} s CPU {clock[name]:6.2f} s")
    pairs = zip(found[EVERY], found["import torch"], strict=True)
    more = statistics.median(ours[0] - torch[0] for ours, torch in pairs)
    slowest = max(cpu[f"neuvar {words}"] for words in COMMANDS)
    for target, value, most in (
        ("every public name, beyond torch", more, MORE_THAN_TORCH),
        ("slowest command", slowest, COMMAND),
    ):
        met = "met" if value <= most else "MISSED"
        print(f"{target}: {value:.2f} s CPU, at most {most} s: {met}")
    if options.out:
        figures = {
            "rounds": options.rounds,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "neuvar")},
            "cpu_seconds": cpu,
            "seconds": clock,
        }
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
