"""``neuvar list``: the experiments, and how far they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neuvar.cli.columns import aligned, paragraph
from neuvar.cli.naming import differing, fields_of, label, written
from neuvar.cli.parsing import Commands, add_command, add_results
from neuvar.cli.selection import experiments
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
  neuvar list                           all experiments, runs finished / runs in all
  neuvar list forgetting                one: its claim, its settings, its runs
  neuvar list forgetting --scale paper  with the runs of the paper's own settings
""",
    )
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="show these in full")
    parser.add_argument(
        "--scale", choices=SCALES, default="cpu", help="whose runs to show in full (default: cpu)"
    )
    add_results(parser)
    parser.set_defaults(run=_list)


def _list(options: argparse.Namespace) -> int:
    finished = {scale: _finished(options.results, scale) for scale in SCALES}
    if not options.names:
        _show_all(finished)
        return 0
    for number, experiment in enumerate(experiments(options.names)):
        if number:
            print()
        _show(experiment, options.scale, finished[options.scale])
    return 0


def _finished(folder: Path, scale: Scale) -> set[str]:
    path = folder / f"{scale}.jsonl"
    return set(Results(path).lines()) if path.exists() else set()


def _show_all(finished: dict[Scale, set[str]]) -> None:
    rows = [("name", "number", "title", *SCALES)]
    for experiment in EXPERIMENTS.values():
        counts = []
        for scale in SCALES:
            keys = {run.key for run in experiment.runs(scale, 0)}
            counts.append(f"{len(keys & finished[scale])}/{len(keys)}")
        rows.append((experiment.name, experiment.number, experiment.title, *counts))
    print(*aligned(rows, right=[3, 4, 5]), sep="\n")
    print("\nruns finished / runs in all; a run that several experiments share is done once")


def _show(experiment: Experiment, scale: Scale, finished: set[str]) -> None:
    print(f"{experiment.name} ({experiment.number}): {experiment.title}\n")
    print(paragraph(experiment.sentence))
    print(paragraph(f"({experiment.source})"))
    for other in SCALES:
        print(f"\n{other}: {len({run.key for run in experiment.runs(other, 0)})} runs")
        print(paragraph(experiment.settings(other), indent=2))
    runs = experiment.runs(scale, 0)
    print(f"\nruns at scale {scale}")
    print(paragraph(f"all with {_in_common(runs)}", indent=2))
    rows = [("", "trials", "finished")]
    for words, group in _groups(runs).items():
        count = sum(run.key in finished for run in group)
        rows.append((f"  {words}", str(len(group)), str(count)))
    print(*aligned(rows, right=[1, 2]), sep="\n")


def _in_common(runs: Sequence[Run]) -> str:
    """What all runs agree on, but for what is 0, false or empty."""
    first, different = runs[0], differing(runs)
    agreed = [n for n in fields_of(runs) if n not in (*different, *NOT_IN_KEY, *SEEDS)]
    return " ".join(f"{n}={written(getattr(first, n))}" for n in agreed if getattr(first, n, None))


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seeds alone, by what they are called."""
    names = [name for name in differing(runs) if name not in SEEDS]
    found: dict[str, list[Run]] = {}
    for run in runs:
        words = label(run, names).rpartition(" seed=")[0]
        found.setdefault(words, []).append(run)
    return found
