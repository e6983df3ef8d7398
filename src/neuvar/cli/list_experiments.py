"""``neuvar list``: the experiments, and how many of their runs are finished."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from neuvar.cli.command_line import add_results, aligned, paragraph
from neuvar.cli.run_selection import (
    differing_fields,
    fields_of,
    find_experiments,
    label,
)
from neuvar.engine import Results
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.run_spec import NOT_IN_KEY, Run, format_value

SEEDS = ("seed", "label_seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar list``."""
    parser.epilog = f"""\
{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar list                           all experiments, with finished / all runs
  neuvar list forgetting                one: its claim, its settings, its runs
  neuvar list forgetting --scale paper  with the runs of the paper's own settings
  neuvar list my_experiment.py          an experiment of your own
"""
    add = parser.add_argument
    add("names", nargs="*", metavar="EXPERIMENT", help="names or Python files to show in full")
    add("--scale", choices=SCALES, default="cpu", help="scale of the runs shown (default: cpu)")
    add_results(parser)
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    finished = {
        scale: Results(options.results / f"{scale}.jsonl").lines().keys() for scale in SCALES
    }
    if options.names:
        for number, experiment in enumerate(find_experiments(options.names)):
            print(end="\n" if number else "")
            _show(experiment, options.scale, finished[options.scale])
        return 0
    rows = [("name", "number", "title", *SCALES)]
    for e in EXPERIMENTS.values():
        keys = {scale: {run.key for run in e.runs(scale, 0)} for scale in SCALES}
        counts = [f"{len(keys[s] & finished[s])}/{len(keys[s])}" for s in SCALES]
        rows.append((e.name, e.number, e.title, *counts))
    print(*aligned(rows, right=[3, 4, 5]), sep="\n")
    print("\nfinished / all runs; a run that several experiments share is run once")
    return 0


def _show(experiment: Experiment, scale: Scale, finished: Collection[str]) -> None:
    """Print a claim, its settings and its runs."""
    number = f" ({experiment.number})" if experiment.number else ""
    print(f"{experiment.name}{number}: {experiment.title}\n")
    print(paragraph(experiment.sentence))
    if experiment.source:
        print(paragraph(f"({experiment.source})"))
    for other in SCALES:
        print(end="\n" if other == SCALES[0] or experiment.settings(other) else "")
        print(f"{other}: {len({run.key for run in experiment.runs(other, 0)})} runs")
        if settings := experiment.settings(other):
            print(paragraph(settings, indent=2))
    runs = experiment.runs(scale, 0)
    differing = [name for name in differing_fields(runs) if name not in SEEDS]
    shared = [n for n in fields_of(runs) if n not in (*differing, *NOT_IN_KEY, *SEEDS)]
    values = [(name, getattr(runs[0], name, None)) for name in shared]
    words = " ".join(f"{name}={format_value(value)}" for name, value in values if value)
    print(f"\nruns at scale {scale}")
    print(paragraph(f"all with {words}", indent=2))
    trials: dict[str, list[Run]] = {}  # runs that differ only in their seeds, by label
    for run in runs:
        trials.setdefault(label(run, differing).rpartition(" seed=")[0], []).append(run)
    rows = [("", "trials", "finished")]
    for words, group in trials.items():
        count = sum(run.key in finished for run in group)
        rows.append((f"  {words}", str(len(group)), str(count)))
    print(*aligned(rows, right=[1, 2]), sep="\n")
