"""From recorded lines to findings: which runs belong to a claim, and what they say together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from neuvar.engine import Results
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.findings import Panel, Result, Table, Verdict
from neuvar.experiments.run_spec import Run, as_dict

Lines: TypeAlias = Mapping[str, dict[str, Any]]
"""The recorded lines of a scale by their keys."""

MOST_TRIALS = 1000
"""Results of so many trials are looked for, whatever number of them the scale has."""

ORDER: tuple[Scale, ...] = ("paper", "cpu", "smoke")
"""How scales follow one another under a claim: the one that says most comes first."""


@dataclass(frozen=True)
class Finding:
    """What was found for one claim at one scale.

    Attributes:
        experiment: the claim.
        scale: at which scale.
        results: its recorded runs, in the order of the experiment's.
        planned: how many runs the scale has.
        recorded: how many of these are recorded.
        trials: fewest and most finished trials that a setting has.
        asked: number of trials that the command has to ask for; 0 for the scale's own.
        panels: the figure.
        table: the numbers.
        verdict: whether they bear the claim out.
    """

    experiment: Experiment
    scale: Scale
    results: tuple[Result, ...]
    planned: int
    recorded: int
    trials: tuple[int, int]
    asked: int
    panels: tuple[Panel, ...]
    table: Table
    verdict: Verdict

    @property
    def name(self) -> str:
        """What its files and its place on the page are called."""
        return f"{self.experiment.name}-{self.scale}"

    @cached_property
    def diverged(self) -> tuple[Result, ...]:
        """The runs that did not come to their end."""
        return tuple(result for result in self.results if not result.finished)

    @property
    def n(self) -> str:
        """The number of trials in words, such as "3", or "0–3" if settings differ."""
        few, most = self.trials
        return str(most) if few == most else f"{few}–{most}"

    @property
    def command(self) -> str:
        """What a terminal has to be told to get these results again."""
        return command(self.experiment, self.scale, self.asked)

    @property
    def tally(self) -> str:
        """How much of it has been run, in words."""
        said = f"{self.recorded} of {self.planned} runs"
        if more := len(self.results) - self.recorded:
            said += f" and {more} of further trials"
        return f"{said}, {len(self.diverged)} diverged" if self.diverged else said


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what was found for it, at no, one or several scales."""

    experiment: Experiment
    findings: tuple[Finding, ...]


def command(experiment: Experiment, scale: Scale, trials: int = 0) -> str:
    """The command that carries an experiment out."""
    said = f"neuvar run {experiment.name} --scale {scale}"
    return f"{said} --trials {trials}" if trials else said


def load(files: Iterable[Path]) -> dict[Scale, Lines]:
    """Read results files, each called after its scale, such as ``results/cpu.jsonl``.

    A file that does not exist has no results.

    >>> load([Path("nowhere/cpu.jsonl")])
    {}
    """
    found: dict[Scale, dict[str, dict[str, Any]]] = {}
    for file in map(Path, files):
        scale = next((known for known in SCALES if known == file.stem), None)
        if scale is None:
            raise ValueError(
                f"files must be called after a scale ({', '.join(SCALES)}), got {str(file)!r}"
            )
        if file.exists():
            found.setdefault(scale, {}).update(Results(file).lines())
    return dict(found)


def gather(
    results: Mapping[Scale, Lines],
    experiments: Iterable[Experiment],
    scales: Sequence[Scale] = (),
) -> tuple[Claim, ...]:
    """Sort results by claim and scale, and let each experiment say what they mean.

    Args:
        results: recorded lines by scale and key.
        experiments: the claims, in the order of the report.
        scales: which scales to show; none for paper and cpu, or smoke if it is all there is.

    >>> from neuvar.experiments import EXPERIMENTS
    >>> claims = gather({"cpu": {}}, EXPERIMENTS.values())
    >>> len(claims) == len(EXPERIMENTS), claims[0].findings
    (True, ())
    """
    for scale in (*scales, *results):
        if scale not in SCALES:
            raise ValueError(f"scales must be among {', '.join(SCALES)}, got {scale!r}")
    claims = []
    for experiment in experiments:
        every = (_finding(experiment, scale, results.get(scale, {})) for scale in ORDER)
        claims.append(Claim(experiment, tuple(finding for finding in every if finding)))
    found = {finding.scale for claim in claims for finding in claim.findings}
    shown = set(scales) or (found - {"smoke"}) or found
    return tuple(
        Claim(c.experiment, tuple(f for f in c.findings if f.scale in shown)) for c in claims
    )


def _finding(experiment: Experiment, scale: Scale, lines: Lines) -> Finding | None:
    """What lines say about a claim; None if none of them is about it."""
    if not lines:
        return None
    planned = _by_key(experiment.runs(scale, 0))
    known = _by_key(experiment.runs(scale, _most_trials(lines))) | planned
    results = tuple(Result(run, lines[key]) for key, run in known.items() if key in lines)
    if not results:
        return None
    return Finding(
        experiment=experiment,
        scale=scale,
        results=results,
        planned=len(planned),
        recorded=sum(key in lines for key in planned),
        trials=_trials(planned.values(), results),
        asked=_asked(experiment, scale, lines, {k for k in known if k in lines} - planned.keys()),
        panels=tuple(experiment.panels(results)),
        table=experiment.table(results),
        verdict=_verdict(experiment, planned.values(), results),
    )


def _verdict(experiment: Experiment, planned: Iterable[Run], results: Sequence[Result]) -> Verdict:
    """What the experiment says, unless a setting is still without two trials."""
    found = experiment.check(results)
    counts = Counter(_setting(result.run) for result in results)
    settings = set(map(_setting, planned))
    short = sum(counts[setting] < 2 for setting in settings)
    if not short or found.outcome == "undecided":
        return found
    missing = f"{short} of {len(settings)} settings have fewer than two trials yet."
    return Verdict("undecided", f"{missing} {found.because}")


def _by_key(runs: Iterable[Run]) -> dict[str, Run]:
    return {run.key: run for run in runs}


def _setting(run: Run) -> str:
    """What a run shares with its other trials."""
    return json.dumps({k: v for k, v in as_dict(run).items() if k not in ("seed", "label_seed")})


def _trials(planned: Iterable[Run], results: Iterable[Result]) -> tuple[int, int]:
    counts = dict.fromkeys(map(_setting, planned), 0)
    for result in results:
        if result.finished:
            setting = _setting(result.run)
            counts[setting] = counts.get(setting, 0) + 1
    return min(counts.values(), default=0), max(counts.values(), default=0)


def _most_trials(lines: Lines) -> int:
    """As many trials as there may be among the lines, since trials are numbered by their seeds."""
    seeds = [line["run"].get("seed") for line in lines.values()]
    return min(MOST_TRIALS, 1 + max((s for s in seeds if isinstance(s, int)), default=0))


def _asked(experiment: Experiment, scale: Scale, lines: Lines, further: set[str]) -> int:
    """The least number of trials that has all runs beyond the scale's own."""
    most = _most_trials(lines)
    for trials in range(1, most) if further else ():
        if further <= _by_key(experiment.runs(scale, trials)).keys():
            return trials
    return most if further else 0
