"""``neuvar run``: run experiments, with progress, and resume after Ctrl-C."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuvar.cli.command_line import add_results, non_negative, paragraph
from neuvar.cli.data import places_of
from neuvar.cli.progress import Forecast, RunTimes, SweepProgress, duration
from neuvar.cli.run_selection import find_experiments, only, run_labels, runs_of
from neuvar.data.catalogue import ENTRIES, DataError
from neuvar.engine import ENGINES, Results, SweepSpec, sweep
from neuvar.engine.sweeps import worker_devices
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES
from neuvar.experiments.run_spec import NOT_IN_KEY, Run

PRECISIONS = ("float32", "bf16", "fp16")
NOT_REPEATED = ("--fresh", "--yes")
"""Options that are left out of the command to resume."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar run``."""
    parser.epilog = f"""\
Each finished run is a line of DIR/SCALE.jsonl (see --results) and is not run again. Stop at any
time with Ctrl-C: the same command resumes. EXPERIMENT may be a Python file that defines an
experiment of your own, as examples/my_experiment.py does.

{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar run forgetting                          less than an hour on two cores
  neuvar run all --scale smoke                   every experiment, in a few minutes
  neuvar run my_experiment.py --scale smoke      an experiment of your own
  neuvar run pair-flips --scale paper --device cuda --precision bf16 --channels-last
  neuvar run forgetting --only optimizer=nvrm-adam b=0.03,0.05 seed=0 --dry-run
  neuvar run ewc split --engine ray --address auto --workers 8
"""
    add = parser.add_argument_group("which runs").add_argument
    add("names", nargs="+", metavar="EXPERIMENT", help="names of experiments, Python files, or all")
    add("--scale", choices=SCALES, default="cpu", help="size of the runs (default: cpu)")
    add("--trials", type=non_negative, default=0, metavar="N",
        help="trials per setting (0: the scale's own number)")  # fmt: skip
    add("--only", nargs="+", action="extend", default=[], metavar="FIELD=VALUE",
        help="runs with these values; several values of a field separated by commas")  # fmt: skip
    add = parser.add_argument_group("where and how").add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    add("--precision", choices=PRECISIONS, help="mixed precision, instead of the runs' own")
    add("--channels-last", action="store_true", help="use the channels-last memory format")
    add("--compile", action="store_true", help="compile the networks")
    add("--engine", choices=ENGINES, default="local", help="local processes, or a Ray cluster")
    add("--address", metavar="ADDRESS", help="address of the Ray cluster; auto for a running one")
    add("--workers", type=non_negative, default=0, metavar="N",
        help="runs at a time (0: as many as fit)")  # fmt: skip
    add("--data", type=Path, metavar="FOLDER", help="look here first for datasets")
    add("--tensorboard", type=Path, metavar="DIR", help="write curves for TensorBoard here")
    group = parser.add_argument_group("results and output")
    add_results(group)
    group.add_argument("--fresh", action="store_true", help="remove earlier results and run again")
    group.add_argument("--yes", action="store_true", help="remove without asking")
    group.add_argument("--dry-run", action="store_true", help="show what would be run")
    group.add_argument("--quiet", action="store_true", help="show only the summary")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    experiments = find_experiments(options.names)
    names = ("engine", "workers", "device", "data", "address", "tensorboard")
    files = tuple(experiment.file for experiment in experiments if experiment.file)
    spec = SweepSpec(files=files, **{name: getattr(options, name) for name in names})
    spec.check()
    execution = {name: getattr(options, name) for name in NOT_IN_KEY if getattr(options, name)}
    results = Results(options.results / f"{options.scale}.jsonl")

    def planned(recorded: Mapping[str, dict[str, Any]]) -> list[Run]:
        runs = runs_of(experiments, options.scale, options.trials, recorded)
        runs = [replace(run, **execution) for run in only(runs, options.only)]
        if files:
            from neuvar.experiments.runner import check_names  # imports torch

            check_names(runs)
        return runs

    recorded = results.lines()
    runs = planned(recorded)
    if options.dry_run:
        return _dry_run(runs, results, spec, options)
    if options.fresh:
        _start_over(runs, results, ask=not options.yes)
        recorded = results.lines(warn=False)
        runs = planned(recorded)
    shown = [] if "all" in options.names else dict.fromkeys(options.names)
    folder = [] if options.results == Path("results") else ["--results", str(options.results)]
    report = shlex.join(["neuvar", "report", *shown, "--scale", options.scale, *folder])
    if all(run.key in recorded for run in runs):
        lost = sum(recorded[run.key]["status"] == "diverged" for run in runs)
        done = f"all {len(runs)} runs are" if len(runs) != 1 else "the run is"
        print(f"{done} finished{f', {lost} diverged' if lost else ''}; see them with: {report}")
        return 0
    resume = [word for word in options.words if word not in NOT_REPEATED]
    while left := [run for run in runs if run.key not in recorded]:
        _get_data(left, options.data)
        code = run_watched(runs, recorded, results, spec, resume=resume, quiet=options.quiet)
        if code:
            return code
        known = {run.key for run in runs}
        recorded = results.lines(warn=False)
        runs = planned(recorded)  # further runs may follow from these
        if known >= {run.key for run in runs}:
            break
    print(f"see them with: {report}")
    return 0


def run_watched(
    runs: Sequence[Run],
    recorded: Mapping[str, dict[str, Any]],
    results: Results,
    spec: SweepSpec,
    *,
    resume: Sequence[str],
    quiet: bool = False,
) -> int:
    """Run and show progress. Returns 0; 1 if runs failed; 130 after Ctrl-C; 143 after SIGTERM.

    ``recorded`` are the lines of the results file; ``resume`` is the command that resumes the runs,
    without ``neuvar``; ``quiet`` prints only the summary.
    """
    start, names = time.monotonic(), run_labels(runs)
    progress: AbstractContextManager[SweepProgress | None] = nullcontext()
    if not quiet:
        waiting = {run.key: run for run in runs if run.key not in recorded}
        workers = len(worker_devices(spec, len(runs)))
        forecast = Forecast(RunTimes(recorded, spec.device), waiting, workers)
        progress = SweepProgress(forecast, names, total=len(runs))
    try:
        with _terminable(), progress as watch:
            summary = sweep(runs, results, spec, watch=watch)
    except KeyboardInterrupt as stop:
        done, command = len({r.key for r in runs} & results.lines().keys()), ["neuvar", *resume]
        print(
            f"stopped; {done} of {len(runs)} runs {'is' if done == 1 else 'are'} finished. "
            f"Resume with: {shlex.join(command)}",
            file=sys.stderr,
        )
        return 143 if isinstance(stop, Terminated) else 130
    reasons_of = {"diverged": summary.diverged, "failed": summary.failed}
    counts = {"finished": summary.finished, "finished before": summary.skipped, **reasons_of}
    words = ", ".join(f"{len(keys)} {kind}" for kind, keys in counts.items() if keys)
    print(f"{words}, in {duration(time.monotonic() - start)}")
    for kind, reasons in reasons_of.items():
        for key, why in reasons.items():
            print(f"  {kind}: {names[key]}: {why}")
    return 1 if summary.failed else 0


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise Terminated at SIGTERM."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _get_data(runs: Sequence[Run], folder: Path | None) -> None:
    """Download missing datasets before runs start, so that no worker waits for a download."""
    datasets = _datasets(runs)
    if not datasets:
        return
    from neuvar.data import cache, loading  # imports torch

    for name, count in datasets.items():
        try:
            obtained = loading.obtain(ENTRIES[name], folder=folder)
            if obtained.is_new:
                cache.store(ENTRIES[name], obtained.arrays)
        except DataError as error:
            need = "run needs" if count == 1 else "runs need"
            raise DataError(
                f"{count} {need} {name}, try neuvar data get {name}: {error}"
            ) from error


def _datasets(runs: Sequence[Run]) -> dict[str, int]:
    """Datasets that do not come with the package, and how many runs need each."""
    counts = Counter(run.data.removesuffix("-coarse") for run in runs)
    return {name: count for name, count in counts.items() if name in ENTRIES}


def _start_over(runs: Sequence[Run], results: Results, *, ask: bool) -> None:
    """Remove the results and checkpoints of runs."""
    existing = _existing(runs, results)
    if not existing:
        return
    if ask:
        if not sys.stdin.isatty():
            raise ValueError(f"--fresh would remove {existing}; add --yes to remove them")
        if input(f"remove {existing}? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ValueError("cancelled: nothing removed; run without --fresh to resume")
    results.remove(run.key for run in runs)
    print(f"removed {existing}", flush=True)


def _existing(runs: Sequence[Run], results: Results) -> str:
    """How many results and checkpoints of runs exist; empty if none."""
    keys = {run.key for run in runs}
    counts = {
        "result": len(keys & results.lines().keys()),
        "checkpoint": sum((results.checkpoints / f"{key}.pt").exists() for key in keys),
    }
    return " and ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in counts.items() if n)


def _dry_run(
    runs: Sequence[Run], results: Results, spec: SweepSpec, options: argparse.Namespace
) -> int:
    """Print what would be run."""
    recorded = results.lines()
    if options.fresh:
        print(f"--fresh would remove {_existing(runs, results) or 'nothing'}")
    left = [run for run in runs if options.fresh or run.key not in recorded]
    done = len(runs) - len(left)
    print(f"{len(runs)} runs at scale {options.scale}, {done} finished, {len(left)} to do")
    names, times = run_labels(runs), RunTimes(recorded, spec.device)
    expected = {run.key: times.expected(run) for run in left}
    for key, seconds in expected.items():
        print(f"  {names[key]}" + (f"  ({duration(seconds, about=True)})" if seconds else ""))
    if left and any(experiment.then for experiment in find_experiments(options.names)):
        print("more runs may follow from their results")
    for name in _datasets(left):
        if not places_of(ENTRIES[name], options.data):
            print(f"{name} is not on this machine; neuvar data get {name} would download it")
    workers = len(worker_devices(spec, len(runs)))
    remaining = Forecast(times, {run.key: run for run in left}, workers).remaining(0)
    if remaining is None:
        print("the time is unknown: no similar run has finished yet")
    elif left:
        text = f"{duration(remaining, about=True)}, {workers} at a time, predicted by similar runs"
        unknown = sum(seconds is None for seconds in expected.values())
        print(f"{text}; {unknown} have no similar run" if unknown else text)
    return 0
