"""``neuvar list``: the experiments, and how many of their runs are finished."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from neuvar.cli.columns import aligned, paragraph
from neuvar.cli.parsing import Commands, add_command, add_results
from neuvar.cli.run_selection import (
    differing_fields,
    fields_of,
    find_experiments,
    format_value,
    label,
)
from neuvar.engine import Results
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.run_spec import NOT_IN_KEY, Run

SEEDS = ("seed", "label_seed")


def add_list(commands: Commands) -> None:
    """Add ``neuvar list``."""
    parser = add_command(
        commands,
        "list",
        "show the experiments, their runs and how many of these are finished",
        f"""\
{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar list                           all experiments, with finished / all runs
  neuvar list forgetting                one: its claim, its settings, its runs
  neuvar list forgetting --scale paper  with the runs of the paper's own settings
  neuvar list my_experiment.py          an experiment of your own
""",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="EXPERIMENT", help="names or Python files to show in full")
    add("--scale", choices=SCALES, default="cpu", help="scale of the runs shown (default: cpu)")
    add_results(parser)
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    paths = {scale: options.results / f"{scale}.jsonl" for scale in SCALES}
    finished = {
        scale: set(Results(path).lines()) if path.exists() else set()
        for scale, path in paths.items()
    }
    if not options.names:
        _show_all(finished)
    for number, experiment in enumerate(find_experiments(options.names) if options.names else ()):
        if number:
            print()
        _show(experiment, options.scale, finished[options.scale])
    return 0


def _show_all(finished: dict[Scale, set[str]]) -> None:
    rows = [("name", "number", "title", *SCALES)]
    for experiment in EXPERIMENTS.values():
        counts = []
        for scale in SCALES:
            keys = {run.key for run in experiment.runs(scale, 0)}
            counts.append(f"{len(keys & finished[scale])}/{len(keys)}")
        rows.append((experiment.name, experiment.number, experiment.title, *counts))
    print(*aligned(rows, right=[3, 4, 5]), sep="\n")
    print("\nfinished / all runs; a run that several experiments share is run once")


def _show(experiment: Experiment, scale: Scale, finished: set[str]) -> None:
    number = f" ({experiment.number})" if experiment.number else ""
    print(f"{experiment.name}{number}: {experiment.title}\n")
    print(paragraph(experiment.sentence))
    if experiment.source:
        print(paragraph(f"({experiment.source})"))
    for other in SCALES:
        print(f"\n{other}: {len({run.key for run in experiment.runs(other, 0)})} runs")
        print(paragraph(experiment.settings(other), indent=2))
    runs = experiment.runs(scale, 0)
    differing = differing_fields(runs)
    shared = [n for n in fields_of(runs) if n not in (*differing, *NOT_IN_KEY, *SEEDS)]
    values = [(name, getattr(runs[0], name, None)) for name in shared]
    words = " ".join(f"{name}={format_value(value)}" for name, value in values if value)
    print(f"\nruns at scale {scale}")
    print(paragraph(f"all with {words}", indent=2))
    rows = [("", "trials", "finished")]
    for words, group in _settings(runs, differing).items():
        count = sum(run.key in finished for run in group)
        rows.append((f"  {words}", str(len(group)), str(count)))
    print(*aligned(rows, right=[1, 2]), sep="\n")


def _settings(runs: Sequence[Run], differing: Sequence[str]) -> dict[str, list[Run]]:
    """Runs that differ only in their seeds, by label."""
    names = [name for name in differing if name not in SEEDS]
    settings: dict[str, list[Run]] = {}
    for run in runs:
        settings.setdefault(label(run, names).rpartition(" seed=")[0], []).append(run)
    return settings
