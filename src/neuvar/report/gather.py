"""Find the recorded runs of each claim, and let its experiment judge them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from neuvar._validate import one_of
from neuvar.engine import Results
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict
from neuvar.experiments.run_spec import Run, as_dict

Lines: TypeAlias = Mapping[str, dict[str, Any]]
"""The recorded lines of a scale by their keys."""

MOST_TRIALS = 1000
ORDER: tuple[Scale, ...] = ("paper", "cpu", "smoke")
"""The order of scales under a claim: the most informative first."""


@dataclass(frozen=True)
class Finding:
    """The results for one claim at one scale; figure, table and verdict are made when needed.

    Attributes:
        experiment: the claim.
        scale: at which scale.
        results: the recorded runs, in the order of the experiment.
        planned: number of runs of the scale.
        recorded: how many of these are recorded.
        trials: fewest and most finished trials of a setting.
        asked: number of trials to ask the command for; 0 for the scale's own.
        short: settings with fewer than two recorded trials, as "2 of 8"; empty if there are none.
    """

    experiment: Experiment
    scale: Scale
    results: tuple[Result, ...]
    planned: int
    recorded: int
    trials: tuple[int, int]
    asked: int
    short: str

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The figure."""
        return tuple(self.experiment.panels(self.results))

    @cached_property
    def table(self) -> Table:
        """The numbers."""
        return self.experiment.table(self.results)

    @cached_property
    def verdict(self) -> Verdict:
        """The experiment's verdict; undecided while a setting has fewer than two trials."""
        verdict = self.experiment.check(self.results)
        if not self.short or verdict.outcome == "undecided":
            return verdict
        because = f"{self.short} settings have fewer than two trials yet. {verdict.because}"
        return Verdict("undecided", because, verdict.cases)

    @property
    def name(self) -> str:
        """The name of its files and of its section on the page."""
        return f"{self.experiment.name}-{self.scale}"

    @cached_property
    def diverged(self) -> tuple[Result, ...]:
        """The runs that diverged."""
        return tuple(result for result in self.results if not result.finished)

    @property
    def n(self) -> str:
        """The number of trials, such as "3", or "0–3" if settings differ."""
        few, most = self.trials
        return str(most) if few == most else f"{few}–{most}"

    @property
    def command(self) -> str:
        """The command that produces these results."""
        return command(self.experiment, self.scale, self.asked)

    @property
    def tally(self) -> str:
        """The number of runs, in words."""
        done = "" if self.recorded == self.planned else f"{self.recorded} of "
        text = f"{self.recorded} of {self.planned} runs"
        if extra := len(self.results) - self.recorded:
            trials = "extra trial" if extra == 1 else "extra trials"
            text = f"{len(self.results)} runs ({done}{self.planned} planned, {extra} {trials})"
        return f"{text}, {len(self.diverged)} diverged" if self.diverged else text


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
    claims = []
    for experiment in experiments:
        every = (_finding(experiment, scale, results.get(scale, {})) for scale in ORDER)
        claims.append(Claim(experiment, tuple(finding for finding in every if finding)))
    present = {finding.scale for claim in claims for finding in claim.findings}
    shown = set(scales) or (present - {"smoke"}) or present
    return tuple(
        Claim(c.experiment, tuple(f for f in c.findings if f.scale in shown)) for c in claims
    )


def _finding(experiment: Experiment, scale: Scale, lines: Lines) -> Finding | None:
    """The results of an experiment among the lines; None if there are none."""
    if not lines:
        return None
    # Trials are numbered by their seeds, so the largest seed says how many there may be.
    seeds = [line["run"].get("seed") for line in lines.values()]
    most = min(MOST_TRIALS, 1 + max((s for s in seeds if isinstance(s, int)), default=0))
    planned = _by_key(experiment.runs(scale, 0))
    known = _by_key(experiment.runs(scale, most)) | planned
    results = tuple(Result(run, lines[key]) for key, run in known.items() if key in lines)
    if not results:
        return None
    extra = (known.keys() & lines.keys()) - planned.keys()
    enough = (t for t in range(1, most) if extra <= _by_key(experiment.runs(scale, t)).keys())
    recorded = Counter(_setting(result.run) for result in results)
    finished = Counter(_setting(result.run) for result in results if result.finished)
    settings = set(map(_setting, planned.values()))
    counts = [finished[setting] for setting in settings | finished.keys()]
    short = sum(recorded[setting] < 2 for setting in settings)
    return Finding(
        experiment=experiment,
        scale=scale,
        results=results,
        planned=len(planned),
        recorded=sum(key in lines for key in planned),
        trials=(min(counts, default=0), max(counts, default=0)),
        asked=next(enough, most) if extra else 0,
        short=f"{short} of {len(settings)}" if short else "",
    )


def _by_key(runs: Iterable[Run]) -> dict[str, Run]:
    return {run.key: run for run in runs}


def _setting(run: Run) -> str:
    """What a run shares with its other trials."""
    return json.dumps({k: v for k, v in as_dict(run).items() if k not in ("seed", "label_seed")})
