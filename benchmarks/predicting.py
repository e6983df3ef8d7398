"""What predictions averaged over 32 draws cost, beside 32 plain passes.

    python benchmarks/predicting.py [--quick] [--out results/predicting.json]

Plain: 32 forward passes over the data with softmax, without noise. Loop: a copy of the model for
each draw, noise from torch, and the mean of the probabilities. One by one and together: ours, with
batching of draws switched off and on. Ours: what it does by itself. All are timed in turns and
compared within each round; rows, rounds and ratios are those of variability.py.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see optimizers.py

import torch
from torch import Tensor, nn

import neuvar
import variability
from results import cpu_model
from variability import BATCH, DRAWS, B, Case, deep, in_turns, mlp, ratio, resnet

CASES = [
    Case("784-1024-1024-10, 10,000 images", mlp, (10_000, 784), target=1.15),
    Case("784-1024-1024-10, 1,000 images", mlp, (1_000, 784), target=1.15),
    Case(
        "ResNet-10 of width 16, 256 images",
        lambda: resnet(16, (1, 1, 1, 1)),
        (256, 3, 32, 32),
        target=1.15,
    ),
    Case("20-20×30-10, 64 examples", deep, (64, 20), target=1.15),
]


@torch.no_grad()
def passes(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part).softmax(1) for part in x.split(BATCH)])


def plain(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    return torch.stack([passes(model, x) for _ in range(draws)]).mean(0)


@torch.no_grad()
def loop(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    total = torch.zeros(())
    for _ in range(draws):
        moved = copy.deepcopy(model)
        for p in moved.parameters():
            p.add_(torch.randn_like(p), alpha=B)
        total = total + passes(moved, x)
    return total / draws


def ours(model: nn.Module, x: Tensor, y: Tensor, draws: int = DRAWS, **options: bool) -> Tensor:
    return neuvar.predict(model, x, b=B, draws=draws, batch_size=BATCH, **options).probabilities


CONTENDERS = {
    "plain": plain,
    "loop": loop,
    "one by one": lambda *data: ours(*data, vectorize=False),
    "together": lambda *data: ours(*data, vectorize=True),
    "ours": ours,
}
variability.ours, variability.plain = ours, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five rounds: does it run at all?")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose title has this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    load, found = os.getloadavg()[0], {}
    if load > 0.3:
        print(f"The machine is busy (load {load:.1f}): expect a wide spread.", file=sys.stderr)
    names = list(CONTENDERS)[1:]
    print(f"| network | plain, ms | {' | '.join(names)} | memory, 32 and 128 draws |")
    print("| --- |" + " ---: |" * (len(names) + 2))
    for case in [case for case in CASES if options.only in case.title]:
        # Batching the draws of a large network takes minutes, and is never chosen.
        slow = () if "20-20" in case.title else ("together",)
        variability.CONTENDERS = {k: v for k, v in CONTENDERS.items() if k not in slow}
        times = in_turns(case, 0 if options.quick else 60)
        ratios = {name: ratio(times, name) for name in names if name in times}
        memory = [variability.peak(case, draws) for draws in (32, 128)]
        found[case.title] = {
            "milliseconds": {name: statistics.median(t) for name, t in times.items()},
            "rounds": len(times["plain"]),
            "ratios": {name: asdict(r) for name, r in ratios.items()},
            "memory": dict(zip(("32 draws", "128 draws"), memory, strict=True)),
            "target": case.target,
            "met": ratios["ours"].median <= case.target,
        }
        shown = [ratios.get(name) for name in names]
        cells = [f"{r.median:.2f}× ({r.low:.2f}–{r.high:.2f})" if r else "" for r in shown]
        room = " and ".join(f"{m:.1f}×" for m in memory)
        plain_time = f"{statistics.median(times['plain']):.2f}"
        print("| " + " | ".join([case.title, plain_time, *cells, room]) + " |", flush=True)
    if options.out:
        about = {
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "machine": {"cpu": cpu_model(), "threads": torch.get_num_threads(), "load": load},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        options.out.write_text(json.dumps(about | {"cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
