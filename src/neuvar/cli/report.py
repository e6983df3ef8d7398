"""``neuvar report``: from results to verdicts, figures and a page."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.columns import aligned, paragraph
from neuvar.cli.parsing import Commands, add_command, add_results
from neuvar.cli.selection import experiments
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES

if TYPE_CHECKING:
    from neuvar.report import Claim


def add_report(commands: Commands) -> None:
    """Add ``neuvar report``."""
    parser = add_command(
        commands,
        "report",
        "turn results into verdicts, figures and an HTML page",
        f"""\
Nothing is trained. Without --scale the results of cpu and paper are shown, or those of smoke if
there are no others.

{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar report                                all experiments, into out/report
  neuvar report forgetting ewc --scale paper   two of them, at the paper's own settings
  neuvar report --into README.md docs/results.md
                                               renew the results between markers of documents
  neuvar report --open                         show the page in a browser
""",
    )
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="which (default: all)")
    add_results(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("out/report"), metavar="DIR",
        help="where to write (default: out/report)",
    )  # fmt: skip
    parser.add_argument("--scale", nargs="+", choices=SCALES, default=[], help="which results")
    parser.add_argument(
        "--into", nargs="+", type=Path, default=[], metavar="FILE",
        help="documents whose results, between markers, are to be renewed",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from neuvar.report import gather, insert, load, write  # imports numpy

    chosen = experiments(options.names)
    lines = load(options.results / f"{scale}.jsonl" for scale in SCALES)
    if not any(claim.findings for claim in gather(lines, chosen, options.scale)):
        what = " ".join(e.name for e in chosen) if options.names else "all"
        raise ValueError(
            f"{options.results} has no results to report; neuvar run {what} brings them"
        )
    written = write(lines, options.out, experiments=chosen, scales=options.scale)
    print(*verdicts(written.claims), sep="\n")
    for document in options.into:
        every = gather(lines, EXPERIMENTS.values())
        changed = insert(document, every, figures=options.out / "figures")
        print(f"{'renewed' if changed else 'nothing new in'}: {document}")
    print(f"written: {written.page}")
    if options.open:
        webbrowser.open(written.page.resolve().as_uri())
    return 0


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Every claim with its verdict, as text in columns."""
    from neuvar.report.words import VERDICTS

    rows = [("no.", "experiment", "verdict", "scale", "n", "because")]
    for claim in claims:
        number, name = claim.experiment.number, claim.experiment.name
        for found in claim.findings:
            said, because = " ".join(VERDICTS[found.verdict.outcome]), found.verdict.because
            rows.append((number, name, said, found.scale, found.n, because))
        if not claim.findings:
            rows.append((number, name, " ".join(VERDICTS[""]), "–", "–", ""))
    return aligned(rows)
