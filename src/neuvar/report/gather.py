"""Find the recorded runs of each claim, and let its experiment judge them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from neuvar._validate import one_of
from neuvar.engine import Results
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict
from neuvar.experiments.run_spec import as_dict

Lines: TypeAlias = Mapping[str, dict[str, Any]]
"""The recorded lines of a scale by their keys."""

MOST_TRIALS = 1000
ORDER: tuple[Scale, ...] = ("paper", "cpu", "smoke")
"""The order of scales under a claim: the most informative first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The results for one claim at one scale.

    Attributes:
        experiment: the claim.
        scale: at which scale.
        name: the name of its files and of its section on the page.
        results: the recorded runs, in the order of the experiment.
        diverged: those of them that diverged.
        panels: the figure.
        table: the numbers.
        verdict: the experiment's verdict; undecided while a setting has fewer than two trials.
        planned: number of runs of the scale.
        recorded: how many of these are recorded.
        trials: fewest and most finished trials of a setting.
        n: the same as text, such as "3", or "0–3" if settings differ.
        command: the command that produces these results.
    """

    experiment: Experiment
    scale: Scale
    name: str
    results: tuple[Result, ...]
    diverged: tuple[Result, ...]
    panels: tuple[Panel, ...]
    table: Table
    verdict: Verdict
    planned: int
    recorded: int
    trials: tuple[int, int]
    n: str
    command: str

    @property
    def tally(self) -> str:
        """The number of runs, in words."""
        text = f"{self.recorded} of {self.planned} runs"
        if extra := len(self.results) - self.recorded:
            done = "" if self.recorded == self.planned else f"{self.recorded} of "
            trials = "extra trial" if extra == 1 else "extra trials"
            text = f"{len(self.results)} runs ({done}{self.planned} planned, {extra} {trials})"
        return f"{text}, {len(self.diverged)} diverged" if self.diverged else text

    @property
    def counts(self) -> str:
        """The number of trials and of runs, in words."""
        return f"Mean ± standard deviation, n = {self.n} trials per setting; {self.tally}"


@dataclass(frozen=True)
class Claim:
    """A claim and its findings, one for each scale that has results."""

    experiment: Experiment
    findings: tuple[Finding, ...]

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Anchor, outcome, scale, n and runs of each finding; one row of dashes without any."""
        rows = [(f.name, str(f.verdict.outcome), str(f.scale), f.n, f.tally) for f in self.findings]
        return rows or [(f"claim-{self.experiment.name}", "", "–", "–", "–")]


def command(experiment: Experiment, scale: Scale, trials: int = 0) -> str:
    """The command that runs an experiment."""
    text = f"neuvar run {shlex.quote(experiment.argument)} --scale {scale}"
    return f"{text} --trials {trials}" if trials else text


def load(files: Iterable[Path]) -> dict[Scale, Lines]:
    """Read results files, each named after its scale, such as ``results/cpu.jsonl``.

    Files that do not exist are skipped.

    >>> load([Path("nowhere/cpu.jsonl")])
    {}
    """
    lines: dict[Scale, dict[str, dict[str, Any]]] = {}
    for file in map(Path, files):
        scale = next((known for known in SCALES if known == file.stem), None)
        if scale is None:
            raise ValueError(
                f"files must be named after a scale ({', '.join(SCALES)}), got {str(file)!r}"
            )
        if file.exists():
            lines.setdefault(scale, {}).update(Results(file).lines())
    return dict(lines)


def gather(
    results: Mapping[Scale, Lines],
    experiments: Iterable[Experiment],
    scales: Sequence[Scale] = (),
) -> tuple[Claim, ...]:
    """Collect the results of each experiment at each scale.

    Args:
        results: recorded lines by scale and key.
        experiments: the claims, in the order of the report.
        scales: which scales to show; by default paper and cpu, or smoke if there is nothing else.

    >>> from neuvar.experiments import EXPERIMENTS
    >>> claims = gather({"cpu": {}}, EXPERIMENTS.values())
    >>> len(claims) == len(EXPERIMENTS), claims[0].findings
    (True, ())
    """
    for scale in (*scales, *results):
        one_of("scales", scale, SCALES)
    chosen, shown = list(experiments), scales or ("paper", "cpu")
    claims = []
    for e in chosen:
        every = (_finding(e, s, results.get(s, {})) for s in ORDER if s in shown)
        claims.append(Claim(e, tuple(finding for finding in every if finding)))
    if not scales and not any(claim.findings for claim in claims):
        return gather(results, chosen, ["smoke"])
    return tuple(claims)


def _finding(experiment: Experiment, scale: Scale, lines: Lines) -> Finding | None:
    """The results of an experiment among the lines; None if there are none."""
    if not lines:
        return None
    # Trials are numbered by their seeds, so the largest seed says how many there may be.
    seeds = [line["run"].get("seed") for line in lines.values()]
    most = min(MOST_TRIALS, 1 + max((s for s in seeds if isinstance(s, int)), default=0))
    planned = {run.key: run for run in experiment.runs(scale, 0)}
    known = {run.key: run for run in experiment.runs(scale, most)} | planned
    found = {key: Result(run, lines[key]) for key, run in known.items() if key in lines}
    if not found:
        return None
    results, extra, asked = tuple(found.values()), found.keys() - planned.keys(), 0
    if extra:  # the smallest number of trials that includes them
        enough = (t for t in range(1, most) if extra <= {r.key for r in experiment.runs(scale, t)})
        asked = next(enough, most)

    # A setting is what a run shares with its other trials.
    setting = {}
    for key in planned.keys() | found.keys():
        values = as_dict(known[key]).items()
        setting[key] = json.dumps({k: v for k, v in values if k not in ("seed", "label_seed")})
    settings = {setting[key] for key in planned}
    recorded = Counter(setting[key] for key in found)
    finished = Counter(setting[key] for key, result in found.items() if result.finished)
    counts = [finished[one] for one in settings | finished.keys()]
    trials = min(counts, default=0), max(counts, default=0)
    verdict, short = experiment.check(results), sum(recorded[one] < 2 for one in settings)
    if short and verdict.outcome != "undecided":
        why = f"{short} of {len(settings)} settings have fewer than two trials yet. "
        verdict = Verdict("undecided", why + verdict.because, verdict.cases)
    return Finding(
        experiment=experiment,
        scale=scale,
        name=f"{experiment.name}-{scale}",
        results=results,
        diverged=tuple(result for result in results if not result.finished),
        panels=tuple(experiment.panels(results)),
        table=experiment.table(results),
        verdict=verdict,
        planned=len(planned),
        recorded=sum(key in found for key in planned),
        trials=trials,
        n="–".join(str(count) for count in dict.fromkeys(trials)),
        command=command(experiment, scale, asked),
    )
