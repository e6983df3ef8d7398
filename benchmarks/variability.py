"""What measuring variability costs, beside plain evaluations and the loop one would write.

    python benchmarks/variability.py [--quick] [--only TEXT] [--out results/variability.json]

Plain: as many evaluations of the model as there are draws, without noise. Loop: a copy of the
model for each draw, noise from torch, evaluated. One by one and together: ours, with batching of
draws switched off and on. Ours: what it does by itself. All are timed in turns and compared within
each round. Memory is what a measurement needs at its peak, beyond the model and the data.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see optimizers.py

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from memory import measure as measure_memory
from networks import mlp, resnet
from results import Ratio, cpu_model

DRAWS = 32
B = 0.01
BATCH = 1024
Contenders = dict[str, Callable[..., Any]]
"""What is timed: called with a model, inputs, targets and perhaps the number of draws."""


@dataclass(frozen=True)
class Case:
    """A network, the data it is measured on, and what ours may cost against plain evaluations."""

    title: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target: float | None = None
    without: tuple[str, ...] = ()
    """Contenders that are not timed."""


def deep() -> nn.Module:
    """Thirty narrow layers: calls cost more than numbers."""
    layers = [m for a, b in pairwise([20] * 31) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(20, 10))


CASES = [
    Case("784-1024-1024-10, 10,000 images", mlp, (10_000, 784), target=1.15),
    Case("ResNet-10 of width 16, 256 images", lambda: resnet(16, (1, 1, 1, 1)), (256, 3, 32, 32)),
    Case("20-20×30-10, 64 examples", deep, (64, 20)),
]


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    total = 0.0
    for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        total += float(cross_entropy(model(inputs), targets)) * len(targets)
    return total / len(x)


def plain(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> float:
    return sum(evaluate(model, x, y) for _ in range(draws)) / draws


@torch.no_grad()
def noisy_copies(model: nn.Module, draws: int) -> Iterator[nn.Module]:
    for _ in range(draws):
        moved = copy.deepcopy(model)
        for p in moved.parameters():
            p.add_(torch.randn_like(p), alpha=B)
        yield moved


def loop(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> float:
    return sum(evaluate(moved, x, y) for moved in noisy_copies(model, draws)) / draws


def ours(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS, **options: bool) -> float:
    return neuvar.neural_variability(
        model, cross_entropy, (x, y), b=B, draws=draws, batch_size=BATCH, **options
    ).perturbed


def contenders(
    plain: Callable[..., Any], loop: Callable[..., Any], ours: Callable[..., Any]
) -> Contenders:
    return {
        "plain": plain,
        "loop": loop,
        "one by one": partial(ours, vectorize=False),
        "together": partial(ours, vectorize=True),
        "ours": ours,
    }


def build(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return case.network().eval(), torch.rand(case.shape), torch.arange(case.shape[0]) % 10


def in_turns(case: Case, timed: Contenders, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per draw of each contender, by round, in a new order each round."""
    data, order, rng = build(case), list(timed), random.Random(0)
    for contender in timed.values():
        contender(*data)
    times: dict[str, list[float]] = {name: [] for name in timed}
    end = time.perf_counter() + seconds
    while len(times["plain"]) < 5 or time.perf_counter() < end:
        rng.shuffle(order)
        for name in order:
            start = time.perf_counter()
            timed[name](*data)
            times[name].append(1e3 * (time.perf_counter() - start) / DRAWS)
    return times


def ratio(times: dict[str, list[float]], name: str) -> Ratio:
    """A contender's time divided by the plain one's of the same round; quartiles over rounds."""
    ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def peak(case: Case, timed: Contenders, draws: int) -> float:
    """Memory of ours at its peak, beyond that of plain, in multiples of the model."""
    data = build(case)
    weights = sum(p.nbytes for p in data[0].parameters())
    used, base = (
        measure_memory(lambda f=f: lambda: f(*build(case), draws), steps=1).peak
        for f in (timed["ours"], timed["plain"])
    )
    return (used - base) / weights


def measure(case: Case, timed: Contenders, seconds: float) -> dict[str, Any]:
    """Times, ratios and memory of one row."""
    times = in_turns(case, timed, seconds)
    ratios = {name: ratio(times, name) for name in times if name != "plain"}
    return {
        "milliseconds": {name: statistics.median(t) for name, t in times.items()},
        "rounds": len(times["plain"]),
        "ratios": {name: asdict(r) for name, r in ratios.items()},
        "memory": {f"{draws} draws": peak(case, timed, draws) for draws in (32, 128)},
        "target": case.target,
        "met": None if case.target is None else ratios["ours"].median <= case.target,
    }


def table_row(title: str, found: dict[str, Any], names: Sequence[str]) -> str:
    ratios = [found["ratios"].get(name) for name in names]
    cells = [f"{r['median']:.2f}× ({r['low']:.2f}–{r['high']:.2f})" if r else "" for r in ratios]
    memory = " and ".join(f"{m:.1f}×" for m in found["memory"].values())
    plain_time = f"{found['milliseconds']['plain']:.2f}"
    return "| " + " | ".join([title, plain_time, *cells, memory]) + " |"


def command(description: str, cases: Sequence[Case], timed: Contenders) -> None:
    """Read the arguments, measure all rows, and print the table; predicting.py runs it as well."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="five rounds: does it run at all?")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose title has this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    load, found = os.getloadavg()[0], {}
    if load > 0.3:
        print(f"The machine is busy (load {load:.1f}): expect a wide spread.", file=sys.stderr)
    names = [name for name in timed if name != "plain"]
    print(f"| network | plain, ms | {' | '.join(names)} | memory, 32 and 128 draws |")
    print("| --- |" + " ---: |" * (len(names) + 2))
    for case in [case for case in cases if options.only in case.title]:
        own = {name: f for name, f in timed.items() if name not in case.without}
        found[case.title] = measure(case, own, 0 if options.quick else 60)
        print(table_row(case.title, found[case.title], names), flush=True)
    if options.out:
        about = {
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "machine": {"cpu": cpu_model(), "threads": torch.get_num_threads(), "load": load},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        options.out.write_text(json.dumps(about | {"cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    command(__doc__.splitlines()[0], CASES, contenders(plain, loop, ours))
