"""``neuvar demo``: forgetting and wrong labels, with and without NVRM, in about 90 seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

from neuvar.cli.command_line import aligned, non_negative, paragraph
from neuvar.cli.run import run_watched
from neuvar.cli.run_selection import find_experiments, runs_of
from neuvar.engine import Results, SweepSpec

SUMMARIES = {
    "forgetting": ("first task", "Accuracy on the first task after all five"),
    "pair-flips": ("wrong labels memorized, last epoch", "Wrong labels that were memorized"),
}
"""For each experiment a column of its table, and what it says."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar demo``."""
    parser.epilog = """\
Trains small networks, with and without NVRM, on a sequence of tasks and on wrong labels. The data
is the MNIST excerpt in the package, so nothing is downloaded. Finished runs are not run again.

examples:
  neuvar demo                    the results, and the page out/demo/index.html
  neuvar demo --trials 5         with more trials
  neuvar demo --fresh            train everything again
"""
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR",
        help="folder for results and page (default: out/demo)")  # fmt: skip
    add("--workers", type=non_negative, default=0, metavar="N",
        help="runs at a time (0: as many as fit)")  # fmt: skip
    add("--trials", type=non_negative, default=0, metavar="N",
        help="trials per setting (0: three)")  # fmt: skip
    add("--fresh", action="store_true", help="remove its results and train again")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from neuvar.report import gather_claims, load, write  # imports numpy

    experiments = find_experiments(tuple(SUMMARIES))
    runs = runs_of(experiments, "smoke", options.trials)
    results = Results(options.out / "results" / "smoke.jsonl")
    if options.fresh:
        results.remove(run.key for run in runs)
    code, recorded = 0, results.lines()
    left = [run for run in runs if run.key not in recorded]
    if left:
        print(f"training {len(left)} small networks, with and without NVRM", flush=True)
        resume = [word for word in options.words if word != "--fresh"]
        spec = SweepSpec(workers=options.workers)
        code = run_watched(runs, recorded, results, spec, resume=resume)
        if code > 1:
            return code
    report = write(gather_claims(load([results.path]), experiments, ["smoke"]), options.out)
    for claim in report.claims:
        print(f"\n{claim.experiment.title}")
        for finding in claim.findings:
            print(paragraph(finding.experiment.settings(finding.scale), indent=2))
            rows = [[str(cell) for cell in row] for row in finding.table.rows]
            print(*("  " + line for line in aligned([finding.table.columns, *rows])), sep="\n")
            column, words = SUMMARIES[claim.experiment.name]
            if column in finding.table.columns and len(rows) > 1:
                plain, *_, noisy = (row[finding.table.columns.index(column)] for row in rows)
                print(f"\n  {words}: {plain} without noise, {noisy} with noise.")
    print()
    if not left:
        print("these are earlier results; neuvar demo --fresh trains again")
    print(f"written: {report.page}; open it in a browser")
    return code
