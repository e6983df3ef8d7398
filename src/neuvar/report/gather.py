"""Find the recorded runs of each claim, and let its experiment judge them."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from neuvar._validate import one_of
from neuvar.engine import Results
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.findings import MIN_TRIALS, Panel, Result, Table, Verdict
from neuvar.experiments.results_query import PlannedResults
from neuvar.experiments.run_spec import CHOICE_SEED, Run, as_dict, from_dict

Lines: TypeAlias = Mapping[str, dict[str, Any]]
"""The recorded lines of a scale by their keys."""

_KEY = re.compile(rb'"key": ?"([^"]*)"')
SCALE_ORDER: tuple[Scale, ...] = ("paper", "cpu", "smoke")
"""The order of scales under a claim: the most informative first."""


class LinesOfFiles(dict[str, dict[str, Any]]):
    """Lines that :func:`load` read, by key; ``places`` says where each is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}


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
        verdict: the experiment's verdict; undecided while a setting has fewer than two trials,
            preliminary until all planned runs are recorded; None at the smoke scale.
        planned: number of runs of the scale.
        recorded: how many of these are recorded.
        trials: fewest and most finished trials of a setting.
        n: ``trials`` as text, such as "3", or "0–3" if settings differ.
        command: the command that produces these results.
        broken: error messages for recorded lines that cannot be read; these lines are left out.
    """

    experiment: Experiment
    scale: Scale
    name: str
    results: tuple[Result, ...]
    diverged: tuple[Result, ...]
    panels: tuple[Panel, ...]
    table: Table
    verdict: Verdict | None
    planned: int
    recorded: int
    trials: tuple[int, int]
    n: str
    command: str
    broken: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The status of the verdict, or "numbers" without one."""
        return self.verdict.status if self.verdict else "numbers"

    @property
    def because(self) -> str:
        """The reason of the verdict, in a sentence."""
        return self.verdict.because if self.verdict else "The smoke scale only tests the code."

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
        """Anchor, status, scale, n and runs of each finding; one row of dashes without any."""
        rows = [(f.name, f.status, str(f.scale), f.n, f.tally) for f in self.findings]
        return rows or [(f"claim-{self.experiment.name}", "", "–", "–", "–")]


def load(files: Iterable[Path]) -> dict[Scale, Lines]:
    """Read results files, each named after its scale, such as ``results/cpu.jsonl``.

    Files that do not exist are skipped.

    >>> load([Path("nowhere/cpu.jsonl")])
    {}
    """
    lines: dict[Scale, LinesOfFiles] = {}
    for file in map(Path, files):
        scale = next((known for known in SCALES if known == file.stem), None)
        if scale is None:
            raise ValueError(
                f"files must be named after a scale ({', '.join(SCALES)}), got {str(file)!r}"
            )
        if file.exists():
            read = lines.setdefault(scale, LinesOfFiles())
            read.update(Results(file).lines())
            for number, text in enumerate(file.read_bytes().split(b"\n"), start=1):
                if key := _KEY.search(text):
                    read.places.setdefault(key[1].decode(), f"{file}, line {number}")
    return dict(lines)


def gather_claims(
    results: Mapping[Scale, Lines],
    experiments: Iterable[Experiment],
    scales: Sequence[Scale] = (),
) -> tuple[Claim, ...]:
    """Collect the results of each experiment at each scale.

    Lines that cannot be read are left out, with a warning for each.

    Args:
        results: recorded lines by scale and key.
        experiments: the claims, in the order of the report.
        scales: which scales to show; by default paper and cpu, or smoke if there is nothing else.

    >>> from neuvar.experiments import EXPERIMENTS
    >>> claims = gather_claims({"cpu": {}}, EXPERIMENTS.values())
    >>> len(claims) == len(EXPERIMENTS), claims[0].findings
    (True, ())
    """
    for scale in (*scales, *results):
        one_of("scales", scale, SCALES)
    chosen, shown = list(experiments), scales or ("paper", "cpu")
    unknown: dict[Scale, dict[str, str]] = {scale: {} for scale in shown}
    for scale in shown:
        for key, line in results.get(scale, {}).items():
            try:
                from_dict(line["run"])
            except (TypeError, ValueError) as error:  # a run of another version
                unknown[scale][key] = _broken(results[scale], key, str(error))
    broken = {scale: dict(sentences) for scale, sentences in unknown.items()}
    claims = []
    for e in chosen:
        every = (
            _finding(e, s, results[s], unknown[s], broken[s])
            for s in SCALE_ORDER
            if s in shown and s in results
        )
        claims.append(Claim(e, tuple(finding for finding in every if finding)))
    for problems in broken.values():
        for problem in problems.values():
            warnings.warn(problem, stacklevel=2)
    if not scales and not any(claim.findings for claim in claims):
        return gather_claims(results, chosen, ["smoke"])
    return tuple(claims)


def _broken(lines: Lines, key: str, why: str) -> str:
    """The error message for a line that cannot be read, with file and number if known."""
    place = lines.places.get(key, key) if isinstance(lines, LinesOfFiles) else f"run {key}"
    return f"{place} is broken: {why}"


def _problem(experiment: Experiment, result: Result, *, thorough: bool) -> str:
    """Why a line cannot be used, or ""; ``thorough`` also draws and judges it alone."""
    if not result.finished:
        status = result.line["status"]
        return "" if status == "diverged" else f"the status is {status!r}"
    try:
        for part in ("curves", "last", "best", "reestimated", "under_noise"):
            for name, value in result.line.get(part, {}).items():
                several = part in ("curves", "under_noise") and isinstance(value, list)
                values = value if several else [value]
                # Losses may be infinite, which is recorded as null.
                if None in values and not name.endswith(("loss", "sharpness")):
                    return f"{name} in {part!r} is null"
                if any(type(x) not in (int, float, type(None)) for x in values):
                    return f"{name} in {part!r} is not a number"
        if thorough:
            for show in (experiment.panels, experiment.table, experiment.check):
                show([result])
    except KeyError as error:
        return f"{error} is missing"
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return str(error) if experiment.file else f"{type(error).__name__}: {error}"
    return ""


def _planned(
    experiment: Experiment, scale: Scale, trials: int, lines: Lines, unknown: Mapping[str, str]
) -> list[Run]:
    """The runs of a scale, and those that follow from its usable lines."""
    first = [] if experiment.then is None else experiment.runs(scale, trials)
    usable = {
        run.key: lines[run.key]
        for run in first
        if run.key in lines
        and run.key not in unknown
        and not _problem(experiment, Result(run, lines[run.key]), thorough=False)
    }
    return experiment.planned(scale, trials, usable)


def _runs_of_all_scales(experiment: Experiment, known: Iterable[Run]) -> list[Run]:
    """The known runs, and those of every scale; none if the experiment lacks a scale."""
    try:
        return [*known, *(run for scale in SCALES for run in experiment.runs(scale, 0))]
    except ValueError:
        return []


def _trials(planned: Iterable[Run], results: Sequence[Result]) -> tuple[tuple[int, int], str]:
    """Fewest and most finished trials of a setting; and why a verdict has to wait, or ""."""

    def setting(run: Run) -> str:  # all that its trials share
        return json.dumps(as_dict(run) | {"seed": None, "label_seed": None})

    # The verdict does not wait for settings whose trials only choose b.
    settings = {setting(run) for run in planned if run.seed < CHOICE_SEED}
    recorded = Counter(setting(r.run) for r in results)
    finished = Counter(setting(r.run) for r in results if r.finished and not r.for_choice)
    counts = [finished[one] for one in {*settings, *finished}]
    short = sum(recorded[one] < 2 for one in settings)
    wait = f"{short} of {len(settings)} settings have fewer than two trials yet. " if short else ""
    return (min(counts, default=0), max(counts, default=0)), wait


def _finding(
    experiment: Experiment,
    scale: Scale,
    lines: Lines,
    unknown: Mapping[str, str],
    broken: dict[str, str],
) -> Finding | None:
    """The results of an experiment among the lines; None if there are none.

    ``unknown`` has the error messages for lines whose runs cannot be read. Messages for other lines
    that this experiment cannot use are added to ``broken``.
    """
    if not lines:
        return None
    # Trials are numbered by their seeds, so the largest seed says how many there may be.
    seeds = [line["run"].get("seed") for line in lines.values()]
    most = 1 + max((s for s in seeds if isinstance(s, int) and s < CHOICE_SEED), default=0)
    planned = {run.key: run for run in _planned(experiment, scale, 0, lines, unknown)}
    known = {run.key: run for run in _planned(experiment, scale, most, lines, unknown)} | planned
    every = {key: Result(run, lines[key]) for key, run in known.items() if key in lines}
    problems = {key: unknown[key] for key in every if key in unknown}
    for thorough in (False, True):
        for key, result in every.items():
            if key not in problems and (why := _problem(experiment, result, thorough=thorough)):
                problems[key] = _broken(lines, key, why)
                broken.setdefault(key, problems[key])
        usable = {key: result for key, result in every.items() if key not in problems}
        if not usable and not (thorough and experiment.file):
            return None
        shown: Sequence[Result]
        shown = tuple((usable or every).values())  # if all lines fail, the user's file is wrong
        if experiment.file and experiment.then is None:
            shown = PlannedResults(shown, _runs_of_all_scales(experiment, known.values()))
        try:
            panels, table = tuple(experiment.panels(shown)), experiment.table(shown)
            # At smoke scale its mistakes must show, but not its verdict.
            judged = experiment.check(shown)
            break
        except Exception:
            if thorough:
                raise
    results, extra, trials_option = tuple(usable.values()), usable.keys() - planned.keys(), 0
    if extra:  # the smallest number of trials that includes them
        enough = (
            t
            for t in range(1, most)
            if extra <= {r.key for r in _planned(experiment, scale, t, lines, unknown)}
        )
        trials_option = next(enough, most)
    trials, wait = _trials(planned.values(), results)
    verdict = None if scale == "smoke" else judged
    if verdict and (trials[1] < MIN_TRIALS or not planned.keys() <= usable.keys()):
        verdict = replace(verdict, preliminary=True)
    if verdict and wait and verdict.outcome != "undecided":
        verdict = replace(verdict, outcome="undecided", because=wait + verdict.because)
    return Finding(
        experiment=experiment,
        scale=scale,
        name=f"{experiment.name}-{scale}",
        results=results,
        diverged=tuple(result for result in results if not result.finished),
        panels=panels,
        table=table,
        verdict=verdict,
        planned=len(planned),
        recorded=sum(key in usable for key in planned),
        trials=trials,
        n="–".join(str(count) for count in dict.fromkeys(trials)),
        command=experiment.command(scale, trials_option),
        broken=tuple(problems.values()),
    )
