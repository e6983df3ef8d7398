"""``neuvar demo``: see forgetting and wrong labels, plain against NVRM, in a minute or two."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.carrying import Sweep, carry_through
from neuvar.cli.columns import aligned, paragraph
from neuvar.cli.parsing import Commands, add_command, whole
from neuvar.cli.selection import runs_of
from neuvar.engine import Results
from neuvar.experiments import EXPERIMENTS

if TYPE_CHECKING:
    from neuvar.report import Claim

SHOWN = ("forgetting", "pair-flips")


def add_demo(commands: Commands) -> None:
    """Add ``neuvar demo``."""
    parser = add_command(
        commands,
        "demo",
        "see forgetting and wrong labels, plain against NVRM, in a minute or two",
        """\
It trains small networks on the MNIST excerpt that comes with the package, and needs no network.
What is finished is shown at once the next time.

examples:
  neuvar demo                    the results, and the page out/demo/index.html
  neuvar demo --trials 5         with more trials
  neuvar demo --fresh            train everything anew
""",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR",
        help="where results and page go (default: out/demo)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=whole, default=0, metavar="N", help="runs at a time (0: what fits)"
    )
    parser.add_argument(
        "--trials", type=whole, default=0, metavar="N", help="trials of each (0: a few)"
    )
    parser.add_argument("--fresh", action="store_true", help="remove its results and train anew")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from neuvar.report import write  # imports numpy

    chosen = [EXPERIMENTS[name] for name in SHOWN]
    runs = runs_of(chosen, "smoke", options.trials)
    results = Results(options.out / "results" / "smoke.jsonl")
    if options.fresh:
        results.remove(run.key for run in runs)
    again = [word for word in options.words if word != "--fresh"]
    sweep = Sweep(runs, results, again=again, workers=options.workers)
    code = 0
    if left := sweep.left(results.lines()):
        print(f"{len(left)} small networks are trained, with and without NVRM", flush=True)
        code = carry_through(sweep, quiet=False)
        if code > 1:
            return code
    report = write([results.path], options.out, experiments=chosen, scales=["smoke"])
    _show(report.claims)
    if not left:
        print("these are results of an earlier time; neuvar demo --fresh trains anew")
    print(f"written: {report.page}")
    return code


def _show(claims: Sequence[Claim]) -> None:
    for claim in claims:
        print(f"\n{claim.experiment.title}")
        for finding in claim.findings:
            print(paragraph(finding.experiment.settings(finding.scale), indent=2))
            rows = [finding.table.columns, *(map(str, row) for row in finding.table.rows)]
            print(*("  " + line for line in aligned([list(row) for row in rows])), sep="\n")
            for text in (finding.verdict.because, *finding.verdict.cases):
                print(paragraph(text, indent=2))
    print()
