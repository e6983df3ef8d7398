"""What a diagonal Fisher information costs: a loop over samples against many at once.

    python benchmarks/fisher.py [--quick] [--out results/fisher.json]

Loop: one forward pass for each sample and one backward pass for each score, as it is usually
written. Vmap: gradients of single samples, many at once, in chunks that fit into memory. Default:
what ``diagonal_fisher`` does, which never forms gradients of single samples for linear layers. All
are timed in turns, by sample, and compared within each round.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see optimizers.py

import torch
from torch import Tensor, nn

from networks import mlp
from neuvar.continual import diagonal_fisher
from neuvar.continual.importance import FISHERS, Problem, by_vmap
from results import Ratio, cpu_model

TARGET = 10.0
"""How many times as fast as the loop vmap has to be on networks where calls, not memory, cost."""


@dataclass(frozen=True)
class Case:
    """A network, how many samples each contender gets, and who has to meet the target."""

    title: str
    network: Callable[[], nn.Module]
    samples: dict[str, int]
    target: str


def convolutional() -> nn.Module:
    """Two strided convolutions and a linear layer for images of 28×28."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 4, 5, 2, 2), nn.ReLU(),
        nn.Conv2d(4, 8, 5, 2, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 49, 10),
    )  # fmt: skip


def deep() -> nn.Module:
    """A deep and narrow perceptron."""
    widths = [784, *[16] * 8]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 10))


CASES = {
    "convolutional": Case(
        "two convolutions, one linear layer",
        convolutional,
        {"loop": 32, "vmap": 1024, "default": 1024},
        "vmap",
    ),
    "deep": Case("784-16×8-10, tanh", deep, {"loop": 32, "vmap": 2048, "default": 8192}, "vmap"),
    # Its gradients are 7.5 MB a sample: writing them is what takes the time, alone or together.
    "mlp": Case("784-1024-1024-10", mlp, {"loop": 8, "vmap": 16, "default": 2048}, "default"),
}

Fisher = dict[str, Tensor]


def loop(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> Fisher:
    """One sample after another."""
    params = dict(model.named_parameters())
    totals = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(len(x)):
        logs = model(x[i : i + 1]).log_softmax(1)[0]
        labels = range(len(logs)) if kind == "exact" else [int(y[i])]
        for k in labels:
            weight = float(logs[k].detach().exp()) if kind == "exact" else 1.0
            found = torch.autograd.grad(
                logs[k], list(params.values()), retain_graph=len(labels) > 1
            )
            for total, gradient in zip(totals.values(), found, strict=True):
                total.addcmul_(gradient, gradient, value=weight / len(x))
    return totals


def vmapped(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> Fisher:
    """The general way, also where there is a faster one."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    problem = Problem(model, {}, FISHERS[kind], 2)
    return {name: total / len(x) for name, total in by_vmap(problem, weights, x, y).items()}


def default(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> Fisher:
    return diagonal_fisher(model, (x, y), kind=kind)


CONTENDERS = {"loop": loop, "vmap": vmapped, "default": default}


def check(model: nn.Module, x: Tensor, y: Tensor, kind: str) -> None:
    """Make sure that all give the same before they are timed."""
    expected = loop(model, x, y, kind)
    for name, contender in CONTENDERS.items():
        for key, found in contender(model, x, y, kind).items():
            if (found - expected[key]).abs().max() > 1e-4 * expected[key].abs().max():
                raise RuntimeError(
                    f"contender {name!r} is wrong in {key!r}, so its time is nothing"
                )


def measure(case: Case, kind: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a sample for each contender, by round, in a new order each round."""
    torch.manual_seed(0)
    most = max(case.samples.values())
    model, x, y = case.network(), torch.rand(most, 784), torch.arange(most) % 10
    check(model, x[:5], y[:5], kind)
    order, rng = list(CONTENDERS), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            n = case.samples[name]
            start = time.perf_counter()
            CONTENDERS[name](model, x[:n], y[:n], kind)
            times[name].append(1e3 * (time.perf_counter() - start) / n)
    return times


def speedup(times: dict[str, list[float]], name: str) -> Ratio:
    """How many times as fast as the loop, within each round, then quartiles."""
    ratios = [a / b for a, b in zip(times["loop"], times[name], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds: does it run at all?")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load, found = os.getloadavg()[0], {}
    if load > 0.3:
        print(f"The machine is busy (load {load:.1f}): expect a wide spread.", file=sys.stderr)
    print("| network | Fisher | loop, ms a sample | vmap | default | target |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for name, case in CASES.items():
        for kind in ("exact", "empirical"):
            times = measure(case, kind, 2 if options.quick else 15)
            ratios = {key: speedup(times, key) for key in ("vmap", "default")}
            met = ratios[case.target].median >= TARGET
            found[f"{name}, {kind}"] = {
                "title": case.title,
                "milliseconds": {key: statistics.median(t) for key, t in times.items()},
                "speedup": {key: asdict(ratio) for key, ratio in ratios.items()},
                "target": {"contender": case.target, "at_least": TARGET, "met": met},
            }
            cells = [f"{r.median:.1f}× ({r.low:.1f}–{r.high:.1f})" for r in ratios.values()]
            verdict = f"{case.target} {TARGET:.0f}×: {'met' if met else 'NOT MET'}"
            loop_time = f"{statistics.median(times['loop']):.2f}"
            cells = [case.title, kind, loop_time, *cells, verdict]
            print("| " + " | ".join(cells) + " |", flush=True)
    if options.out:
        about = {
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "machine": {"cpu": cpu_model(), "threads": options.threads, "load": load},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        options.out.write_text(json.dumps(about | {"cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
