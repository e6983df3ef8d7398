"""What NVRM costs, beside its peers: full training steps as ratios to torch's own optimizers.

Run it as ``python benchmarks/optimizers.py [--quick] [--only NAME] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

# Threads that spin while they wait make every step many times slower as soon as another process
# wants a core, and the figures useless. It has to be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from contenders import CONTENDERS, Trainer, all_finite, check
from memory import Memory, left_behind, measure
from networks import CASES, Case
from results import Cost, Ratio, Result, as_json, markdown_report, text_report

AGAIN = "plain again"
"""A second plain copy, which shows what the measurement can tell apart."""

WARM_UP = 2
LEAST_ROUNDS = 3


def time_rounds(trainers: dict[str, Trainer], case: Case) -> list[dict[str, float]]:
    """Give every contender its turn, in a new order each round; seconds of a step, by round.

    What else the machine does then weighs on all of them alike.
    """
    rng = random.Random(0)
    names = list(trainers)
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + case.seconds
    while len(rounds) < LEAST_ROUNDS or time.perf_counter() < end:
        gc.collect()
        rng.shuffle(names)
        rounds.append({name: time_turn(trainers[name], case) for name in names})
    return rounds


def time_turn(trainer: Trainer, case: Case) -> float:
    """Seconds of a training step, over a few of them."""
    gc.disable()
    for _ in range(case.settle):
        trainer.step()
    start = time.perf_counter()
    for _ in range(case.steps):
        trainer.step()
    taken = time.perf_counter() - start
    gc.enable()
    return taken / case.steps


def ratio(rounds: list[dict[str, float]], name: str, base: str) -> Ratio:
    """Compare a contender with another one within each round, then take quartiles."""
    ratios = [taken[name] / taken[base] for taken in rounds]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def run_time(case: Case) -> list[dict[str, float]]:
    """Train all contenders in turns, from the same weights, on the same data."""
    data = case.batch_of_data()
    trainers = {name: build(case, data) for name, build in CONTENDERS.items()}
    for name, trainer in trainers.items():
        for _ in range(WARM_UP):
            trainer.step()
        check(name, trainer)
    trainers[AGAIN] = CONTENDERS["plain"](case, data)
    for _ in range(WARM_UP + 1):
        trainers[AGAIN].step()
    rounds = time_rounds(trainers, case)
    for name, trainer in trainers.items():
        if not all_finite(trainer, trainer.step()):
            raise RuntimeError(f"contender {name!r} diverged, so its times mean nothing")
    return rounds


def run_memory(case: Case) -> dict[str, Memory]:
    """Measure the memory of every contender, one after another."""
    data = case.batch_of_data()
    return {
        name: measure(lambda build=build: build(case, data).step)
        for name, build in CONTENDERS.items()
    }


def run_table() -> int:
    """Bytes of the table of precomputed draws: what the first NVRM of the process leaves behind."""
    case = replace(CASES[0], network=lambda: torch.nn.Linear(784, 10), batch=2)
    data = case.batch_of_data()

    def train(name: str) -> None:
        step = CONTENDERS[name](case, data).step
        step(), step()

    train("NVRM fresh")
    return left_behind(lambda: train("NVRM"))


def run(case: Case) -> Result:
    """Measure one row: memory, then time."""
    parameters = list(case.build().parameters())
    size = sum(p.nbytes for p in parameters)
    say(f"{case.title}: memory")
    memory = run_memory(case)
    say(f"{case.title}: time, {case.seconds:.0f} s or a little more")
    rounds = run_time(case)
    costs = {
        name: Cost(
            ratio=ratio(rounds, AGAIN if name == "plain" else name, "plain"),
            to_fused=ratio(rounds, name, "fused"),
            milliseconds=1e3 * statistics.median(taken[name] for taken in rounds),
            steady=(memory[name].steady - memory["plain"].steady) / size,
            peak=(memory[name].peak - memory["plain"].peak) / size,
        )
        for name in CONTENDERS
    }
    say("  " + ", ".join(f"{name} {cost.ratio.median:.3f}" for name, cost in costs.items()))
    return Result(case, sum(p.numel() for p in parameters), len(rounds), costs)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny batches: does it run at all?")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one row alone")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if options.only in (None, case.name)]
    if options.quick:
        cases = [replace(case, batch=max(2, case.batch // 16), seconds=1) for case in cases]

    load = os.getloadavg()[0]
    if load > 0.3:
        say(f"The machine is busy (load {load:.1f}): expect a wide spread.")
    table_bytes = run_table()
    results = [run(case) for case in cases]
    print(text_report(results, table_bytes))
    if options.quick:
        print("Measured with --quick, on tiny batches: a test of the benchmark, not a result.")
    if options.out:
        found = as_json(results, table_bytes, quick=options.quick, load=load)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown_report(results, table_bytes))


if __name__ == "__main__":
    main()
