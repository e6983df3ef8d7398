"""``neuvar report``: turn results into verdicts, figures and a page."""

from __future__ import annotations

import argparse
import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.columns import aligned, paragraph
from neuvar.cli.parsing import Commands, add_command, add_results
from neuvar.cli.run_selection import find_experiments
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
Nothing is trained. Without --scale, the report shows the results of cpu and paper, or of smoke if
there are no others.

{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar report                                all experiments, into out/report
  neuvar report forgetting ewc --scale paper   two of them, at the paper's settings
  neuvar report --into README.md docs/results.md
                                               update the results between markers in documents
  neuvar report --open                         open the page in a browser
""",
    )
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="which (default: all)")
    add_results(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("out/report"), metavar="DIR",
        help="folder to write to (default: out/report)",
    )  # fmt: skip
    parser.add_argument("--scale", nargs="+", choices=SCALES, default=[], help="which results")
    parser.add_argument(
        "--into", nargs="+", type=Path, default=[], metavar="FILE",
        help="documents to update between their markers",
    )  # fmt: skip
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from neuvar.report import gather, insert, load, write_claims  # imports numpy

    chosen = find_experiments(options.names)
    lines = load(options.results / f"{scale}.jsonl" for scale in SCALES)
    claims = gather(lines, chosen, options.scale)
    if not any(claim.findings for claim in claims):
        what = [e.argument for e in chosen] if options.names else ["all"]
        scale = ["--scale", options.scale[0]] if options.scale else []
        command = shlex.join(["neuvar", "run", *what, *scale])
        raise ValueError(f"{options.results} has no results to report; run them with: {command}")
    report = write_claims(claims, options.out)
    print(*verdicts(claims), sep="\n")
    every = claims
    if options.into and (options.names or options.scale):  # documents may show the others
        every = gather(lines, EXPERIMENTS.values())
    for document in options.into:
        changed = insert(document, every, figures=options.out / "figures")
        print(f"{'updated' if changed else 'unchanged'}: {document}")
    print(f"written: {report.page}")
    if options.open:
        webbrowser.open(report.page.resolve().as_uri())
    return 0


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """Every claim with its verdict, as text in columns."""
    from neuvar.report.text import VERDICTS

    rows = [("no.", "experiment", "verdict", "scale", "n", "because")]
    for claim in claims:
        e, because = claim.experiment, [f.verdict.because for f in claim.findings] or [""]
        for (_, outcome, scale, n, _), why in zip(claim.rows(), because, strict=True):
            rows.append((e.number, e.name, " ".join(VERDICTS[outcome]), scale, n, why))
    return aligned(rows)
