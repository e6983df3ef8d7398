"""``neuvar run``: carry out the runs of experiments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neuvar.cli.carrying import Sweep, carry_through
from neuvar.cli.columns import paragraph
from neuvar.cli.data import places_of
from neuvar.cli.naming import labels
from neuvar.cli.parsing import Commands, add_command, add_results, whole
from neuvar.cli.ready import check_data, checked_device, entries_of
from neuvar.cli.selection import experiments, only, runs_of
from neuvar.cli.timing import Experience, about, estimate
from neuvar.engine import ENGINES, Results
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES
from neuvar.experiments.run_spec import Run

AGAIN = ("--fresh", "--yes", "--resume")
"""Options that say whether finished runs are done again."""

PRECISIONS = ("float32", "bf16", "fp16")


def add_run(commands: Commands) -> None:
    """Add ``neuvar run``."""
    parser = add_command(
        commands,
        "run",
        "carry out the runs of experiments, going on where an earlier time stopped",
        f"""\
Each finished run is a line of RESULTS/SCALE.jsonl and is not done again. Stop at any time with
Ctrl-C: the same command goes on where it was.

{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar run forgetting                          on two cores, in a part of an hour
  neuvar run all --scale smoke                   every experiment, in a minute or a few
  neuvar run pair-flips --scale paper --device cuda --precision bf16 --channels-last
  neuvar run forgetting --only optimizer=nvrm-adam b=0.03,0.05 seed=0 --dry-run
  neuvar run ewc split --engine ray --address auto --workers 8
""",
    )
    _add_selection(parser)
    _add_machinery(parser)
    _add_manner(parser)
    parser.set_defaults(run=_run)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which runs")
    add = group.add_argument
    add("names", nargs="+", metavar="EXPERIMENT", help="names of experiments, or all")
    add("--scale", choices=SCALES, default="cpu", help="size of the runs (default: cpu)")
    add("--trials", type=whole, default=0, metavar="N", help="trials of each (0: the scale's own)")
    add(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="those with these values, several of a field with commas between",
    )


def _add_machinery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where and how")
    add = group.add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    add("--precision", choices=PRECISIONS, help="mixed precision, whatever the run says")
    add("--channels-last", action="store_true", help="keep images with their channels last")
    add("--compile", action="store_true", help="compile the networks")
    add("--engine", choices=ENGINES, default="local", help="processes here, or a Ray cluster")
    add("--address", metavar="ADDRESS", help="of the Ray cluster; auto for the one that is there")
    add("--workers", type=whole, default=0, metavar="N", help="runs at a time (0: what fits)")
    add("--data", type=Path, metavar="FOLDER", help="look here first for data sets")
    add("--tensorboard", type=Path, metavar="DIR", help="write curves for TensorBoard here")


def _add_manner(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to go about it")
    add_results(group)
    again = group.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on, skip finished runs (default)")
    again.add_argument("--fresh", action="store_true", help="remove their results and do them anew")
    group.add_argument("--yes", action="store_true", help="remove without asking")
    group.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    group.add_argument("--quiet", action="store_true", help="say only what came of it")


def _run(options: argparse.Namespace) -> int:
    if options.address and options.engine != "ray":
        raise ValueError(f"--address is for --engine ray, got --engine {options.engine}")
    there = options.engine == "ray" and (options.address or os.environ.get("RAY_ADDRESS"))
    device = checked_device(options.device, elsewhere=bool(there))
    runs = chosen(options)
    results = Results(options.results / f"{options.scale}.jsonl")
    sweep = Sweep(
        runs,
        results,
        again=[*(word for word in options.words if word not in AGAIN), "--resume"],
        engine=options.engine,
        workers=options.workers,
        device=device,
        data=options.data,
        address=options.address,
        tensorboard=options.tensorboard,
    )
    if options.dry_run:
        _tell(sweep, options)
        return 0
    if options.fresh:
        _start_over(runs, results, asked=not options.yes)
    left = sweep.left(results.lines())
    if not left:
        print(f"all {len(runs)} runs are finished; {_next(options)}")
        return 0
    check_data(left, options.data)
    code = carry_through(sweep, quiet=options.quiet)
    if not code:
        print(_next(options))
    return code


def chosen(options: argparse.Namespace) -> list[Run]:
    """The runs that the options mean, carried out as they say."""
    runs = runs_of(experiments(options.names), options.scale, options.trials)
    how = {
        "precision": options.precision,
        "channels_last": options.channels_last,
        "compile": options.compile,
    }
    said = {name: value for name, value in how.items() if value}
    return [replace(run, **said) for run in only(runs, options.only)]


def _next(options: argparse.Namespace) -> str:
    """How to see what came of it."""
    names = "" if "all" in options.names else " ".join(["", *dict.fromkeys(options.names)])
    place = "" if options.results == Path("results") else f" --results {options.results}"
    return f"see them with: neuvar report{names} --scale {options.scale}{place}"


def _start_over(runs: Sequence[Run], results: Results, *, asked: bool) -> None:
    """Remove what there is of the runs, after saying how much and, if ``asked``, after a yes."""
    said = _leftovers(runs, results)
    if not said:
        return
    if asked:
        if not sys.stdin.isatty():
            raise ValueError(f"--fresh would remove {said}; say --yes if that is meant")
        if input(f"remove {said}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ValueError("nothing was removed; without --fresh the runs go on where they were")
    results.remove(run.key for run in runs)
    print(f"removed {said}", flush=True)


def _leftovers(runs: Sequence[Run], results: Results) -> str:
    """How many results and checkpoints there are of runs; empty if there are none."""
    keys = {run.key for run in runs}
    count = len(keys & results.lines().keys())
    saved = sum((results.checkpoints / f"{key}.pt").exists() for key in keys)
    words = [f"{count} result{'s' * (count != 1)}"] if count else []
    words += [f"{saved} checkpoint{'s' * (saved != 1)}"] if saved else []
    return " and ".join(words)


def _tell(sweep: Sweep, options: argparse.Namespace) -> None:
    """Say what would be done."""
    lines = sweep.results.lines()
    if options.fresh:
        print(f"--fresh would remove {_leftovers(sweep.runs, sweep.results) or 'nothing'}")
    left = list(sweep.runs) if options.fresh else sweep.left(lines)
    finished = len(sweep.runs) - len(left)
    print(
        f"{len(sweep.runs)} runs at scale {options.scale}, {finished} finished, {len(left)} to do"
    )
    called, experience = labels(sweep.runs), Experience(lines, sweep.device)
    for run in left:
        seconds = experience.expected(run)
        expected = f"  ({about(seconds)})" if seconds is not None else ""
        print(f"  {called[run.key]}{expected}")
    for name, (entry, _) in entries_of(left).items():
        if not places_of(entry, options.data):
            print(f"{name} is not on this machine; it would be had as by neuvar data get {name}")
    if left:
        print(_outlook(left, experience, sweep.lanes()))


def _outlook(left: Sequence[Run], experience: Experience, lanes: int) -> str:
    seconds, unknown = estimate(left, experience, lanes)
    if seconds is None:
        return "how long they take is not known: no run like them has finished yet"
    words = f"{about(seconds)}, {lanes} at a time, by what runs like them have taken"
    return f"{words}; {unknown} are like none that has finished" if unknown else words
