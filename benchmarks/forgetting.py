"""What keeps a network from forgetting, and does noise help there? Permuted MNIST, no replay.

    python benchmarks/forgetting.py --choose   # settings, on held-out images and seeds >= 1000
    python benchmarks/forgetting.py            # seeds 0 to 9 on the test images
    python benchmarks/forgetting.py --tasks 10 # longer streams, with the same settings
    python benchmarks/forgetting.py --table    # run nothing, print the tables

784-1024-1024-10, one epoch a task, a new optimizer for each task. Matrix products are in bfloat16,
weights and optimizers in float32. Runs are lines of results/forgetting.jsonl; finished ones are
skipped. All methods have seed 0 before one has seed 1, so the tables are fair at any time. Methods
that were added later run last; until ``--choose`` has tried them they are left out.
``make report`` writes the tables into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forgetting_methods import (
    CHOICE_SEEDS,
    LATER,
    LONG,
    METHODS,
    SEEDS,
    Method,
    chosen,
    setting_of,
    tried,
)
from forgetting_table import choice_table, report
from forgetting_training import Run, execute
from neuvar.data import load

RESULTS = Path(__file__).parent.parent / "results"


def choice_runs(methods: Iterable[Method]) -> list[Run]:
    """All candidates of all methods; a candidate of two methods is run once."""
    runs = [
        Run("choice", 5, seed, setting)
        for seed in CHOICE_SEEDS
        for method in methods
        for setting in method.candidates
    ]
    return list(dict.fromkeys(runs))


def result_runs(
    methods: Iterable[Method], lines: list[dict[str, Any]], tasks: int, seeds: int
) -> list[Run]:
    """The chosen settings: all methods with the first seed, then all with the second.

    Methods that were added later come after all seeds of the others.
    """
    settings = {method.name: chosen(method, lines) for method in methods}
    groups = [
        [s for name, s in settings.items() if (name in LATER) == later] for later in (False, True)
    ]
    return [Run("test", tasks, seed, s) for own in groups for seed in range(seeds) for s in own]


def finished(path: Path) -> list[dict[str, Any]]:
    """Lines of earlier calls; torn lines are dropped, so that their runs are repeated."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(path: Path, line: dict[str, Any]) -> None:
    text = path.read_text() if path.exists() else ""
    torn = bool(text) and not text.endswith("\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(line) + "\n")


def left(runs: Iterable[Run], lines: list[dict[str, Any]]) -> list[Run]:
    """Runs that have no line yet."""
    done = {Run(line["role"], line["tasks"], line["seed"], setting_of(line)) for line in lines}
    return [run for run in runs if run not in done]


def minutes(runs: list[Run], lines: list[dict[str, Any]]) -> float:
    """Time for some runs, by the seconds per task of the latest ones."""
    per_task = [line["seconds"] / line["tasks"] for line in lines[-20:]] or [15.0]
    return statistics.mean(per_task) * sum(run.tasks for run in runs) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", action="store_true", help="try all candidates")
    parser.add_argument("--table", action="store_true", help="run nothing, print the tables")
    parser.add_argument("--tasks", type=int, choices=SEEDS, default=5)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", type=int, help="only the first of the planned seeds")
    parser.add_argument("--until", default="99:99", help="start no run after this time, HH:MM")
    parser.add_argument("--out", type=Path, default=RESULTS / "forgetting.jsonl")
    options = parser.parse_args()
    lines = finished(options.out)
    names = options.only or (LONG if options.tasks > 5 else METHODS)
    if not (options.choose or options.only):
        left_out = [name for name in names if name not in tried(METHODS, lines)]
        names = [name for name in names if name not in left_out]
        if left_out:
            print(f"left out until --choose has tried them: {', '.join(left_out)}")
    methods = [METHODS[name] for name in names]
    seeds = min(options.seeds or SEEDS[options.tasks], SEEDS[options.tasks])
    if options.choose:
        runs = choice_runs(methods)
    else:
        runs = result_runs(methods, lines, options.tasks, seeds)
    waiting = [] if options.table else left(runs, lines)
    data = load("mnist") if waiting else None
    while waiting and time.strftime("%H:%M") < options.until:
        time_left = f"{len(waiting)} runs left, about {minutes(waiting, lines):.0f} minutes"
        run = waiting.pop(0)
        print(f"{time_left}; next {run}", flush=True)
        lines.append(execute(run, data))
        append(options.out, lines[-1])
        print(f"mean of {run.tasks} tasks: {lines[-1]['mean']:.4f}", flush=True)
    if not options.choose:
        print("\n".join([*choice_table(lines), "", *report(lines)]))


if __name__ == "__main__":
    main()
