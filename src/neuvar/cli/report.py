"""``neuvar report``: turn results into verdicts, figures and a page."""

from __future__ import annotations

import argparse
import shlex
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.command_line import add_results, aligned, paragraph
from neuvar.cli.run_selection import find_experiments
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES, Scale

if TYPE_CHECKING:
    from neuvar.report.gather import Lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar report``."""
    parser.epilog = f"""\
Nothing is trained. Without --scale, the report shows the results of cpu and paper, or of smoke if
there are no others.

{paragraph(f"experiments: {', '.join(EXPERIMENTS)}")}

examples:
  neuvar report                                all experiments, into out/report
  neuvar report forgetting ewc --scale paper   two of them, at the paper's settings
  neuvar report --into README.md docs/results.md
                                               update the results between markers in documents
  neuvar report --open                         open the page in a browser
"""
    add = parser.add_argument
    add("names", nargs="*", metavar="EXPERIMENT", help="names or Python files (default: all)")
    add_results(parser)
    add("--out", type=Path, default=Path("out/report"), metavar="DIR",
        help="folder to write to (default: out/report)")  # fmt: skip
    add("--scale", nargs="+", choices=SCALES, default=[], help="scales to report, see below")
    add("--into", nargs="+", type=Path, default=[], metavar="FILE",
        help="documents to update between their markers")  # fmt: skip
    add("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=_report)


def _no_results(options: argparse.Namespace, lines: Mapping[Scale, Lines]) -> str:
    """The error message for a report without any result: what there is, and what to do."""
    scale = ["--scale", options.scale[0]] if options.scale else []
    command = shlex.join(["neuvar", "run", *(options.names or ["all"]), *scale])
    counts = [
        f"{options.results / name}.jsonl has {len(found)} result{'s' * (len(found) != 1)}"
        for name, found in lines.items()
        if found and name in (options.scale or SCALES)
    ]
    if not counts:
        return f"{options.results} has no results to report; run them with: {command}"
    text = f"{', '.join(counts)}, none of a run of {', '.join(options.names) or 'the paper'}"
    if options.names:
        return f"{text}; were settings changed? Run it with: {command}"
    own = shlex.join(["neuvar", "report", "FILE.py", *scale])
    return f"{text}; for results of your own files: {own}"


def _report(options: argparse.Namespace) -> int:
    from neuvar.report import gather_claims, insert, load, write  # imports numpy
    from neuvar.report.documents import VERDICTS

    chosen = find_experiments(options.names)
    lines = load(options.results / f"{scale}.jsonl" for scale in SCALES)
    claims = gather_claims(lines, chosen, options.scale)
    if not any(claim.findings for claim in claims):
        raise ValueError(_no_results(options, lines))
    report = write(claims, options.out)
    rows = [("no.", "experiment", "verdict", "scale", "n", "because")]
    for claim in claims:
        e, reasons = claim.experiment, [f.because for f in claim.findings] or [""]
        for (_, status, scale, n, _), because in zip(claim.rows(), reasons, strict=True):
            rows.append((e.number, e.name, " ".join(VERDICTS[status]), scale, n, because))
    print(*aligned(rows), sep="\n")
    if options.into and (options.names or options.scale):  # documents may show the others
        files = {experiment.name: experiment for experiment in chosen if experiment.file}
        claims = gather_claims(lines, [*EXPERIMENTS.values(), *files.values()])
    for document in options.into:
        changed = insert(document, claims, figures=options.out / "figures")
        print(f"{'updated' if changed else 'unchanged'}: {document}")
    print(f"written: {report.page}")
    if options.open:
        webbrowser.open(report.page.resolve().as_uri())
    return 0
