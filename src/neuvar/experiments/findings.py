"""What an experiment shows: figures, tables and a verdict, as plain data.

An experiment of your own builds these from its results; ``neuvar report`` draws them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from neuvar._validate import number, one_of
from neuvar.experiments.run_spec import CHOICE_SEED, Run

Role = Literal["plain", "nvrm", "other", "third", "fourth"]
"""Which method a line shows: a method has the same colour in every figure."""

Outcome = Literal["true", "false", "undecided"]


@dataclass(frozen=True)
class Cell:
    """A number in a table, measured in several trials.

    Attributes:
        trials: its value in each trial.
        percent: whether to show it in percent.
    """

    trials: tuple[float, ...]
    percent: bool = True

    @property
    def mean(self) -> float:
        """Mean over the trials; NaN without any."""
        return statistics.fmean(self.trials) if self.trials else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over the trials; NaN for fewer than two, or if one is not finite."""
        if len(self.trials) < 2 or not all(map(math.isfinite, self.trials)):
            return math.nan
        return statistics.stdev(self.trials)

    def __str__(self) -> str:
        if not self.trials:
            return "–"
        factor, digits = (100, 1) if self.percent else (1, 3)
        spread = f" ± {factor * self.deviation:.{digits}f}" if len(self.trials) > 1 else ""
        return f"{factor * self.mean:.{digits}f}{spread}{' %' if self.percent else ''}"


@dataclass(frozen=True)
class Table:
    """A table: the names of its columns, and rows of text and numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True)
class Line:
    """A line of a figure.

    Attributes:
        label: its name in the legend, such as "NVRM-SGD, b = 0.05".
        x: where it was measured.
        trials: a row for each trial, with a value for each x.
        role: which method it is: "plain" for the optimizer without noise, "nvrm" for NVRM, "other",
            "third" or "fourth" for further methods. Sets the colour.
        b: scale of the weight noise; sets the shade. 0 if there is none, or if x is b.
    """

    label: str
    x: tuple[float, ...]
    trials: tuple[tuple[float, ...], ...]
    role: Role = "other"
    b: float = 0.0

    def __post_init__(self) -> None:
        one_of("role", self.role, get_args(Role))
        number("b", self.b, low=0)


@dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
        title: what the panel shows.
        x_label: with the unit.
        y_label: with the unit.
        lines: what to draw.
        percent: whether y is a share between 0 and 1, to be shown in percent.
        log_x: whether x has a logarithmic axis.
        log_y: whether y has a logarithmic axis.
        signed: whether a share may be negative, as a difference of two shares.
        overview: whether the overview figure of the report shows it too.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    percent: bool = True
    log_x: bool = False
    log_y: bool = False
    signed: bool = False
    overview: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether the results support the claim.

    Attributes:
        outcome: "true", "false" or "undecided".
        because: the reason, in a sentence.
        cases: the comparisons that decided; ``str(case)`` is one with its numbers.
        preliminary: whether there are fewer than five trials, or planned trials are missing.
    """

    outcome: Outcome
    because: str
    cases: tuple[Case, ...] = ()
    preliminary: bool = False

    @property
    def status(self) -> str:
        """The outcome, after "preliminary-" if it is."""
        return f"preliminary-{self.outcome}" if self.preliminary else self.outcome


@dataclass(frozen=True)
class Result:
    """A run and the JSON object that was recorded for it; see :mod:`neuvar.engine`.

    A number that is not finite is recorded as null, and is NaN here.
    """

    run: Run
    line: dict[str, Any] = field(hash=False)

    @property
    def finished(self) -> bool:
        """Whether the run finished; otherwise it diverged."""
        return bool(self.line["status"] == "finished")

    @property
    def for_choice(self) -> bool:
        """Whether the trial is for choosing b, and so is not judged."""
        return self.run.seed >= CHOICE_SEED

    def curve(self, name: str) -> tuple[float, ...]:
        """A metric after each epoch, or after each task."""
        points = self.line["curves"][one_of("metric", name, self.line["curves"])]
        return tuple(math.nan if x is None else float(x) for x in points)

    def last(self, name: str) -> float:
        """A metric at the end."""
        x = self.line["last"][one_of("metric", name, self.line["last"])]
        return math.nan if x is None else float(x)

    def best(self, name: str) -> float:
        """The best value of a metric at any epoch."""
        x = self.line["best"].get(name)
        return math.nan if x is None else float(x)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean and Student's confidence interval: (mean, low, high).

    The interval is infinite for fewer than two values, and if a value is not finite.
    """
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, -math.inf, math.inf
    from neuvar.measures.estimate import student_quantile  # imports torch

    half = student_quantile(0.5 + confidence / 2, len(values) - 1)
    half *= statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def gain(better: dict[int, float], worse: dict[int, float]) -> tuple[float, ...]:
    """Differences ``better - worse``, one for each seed that both have."""
    return tuple(better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys()))


MIN_TRIALS = 5
"""A verdict on fewer trials is preliminary."""
NO_CHOICE = "no b was chosen"
NO_PAIRS = "nothing to compare"
WORDS = ("better", "worse", "no significant difference", "diverged", NO_CHOICE, NO_PAIRS)
"""What a case may show."""


@dataclass(frozen=True)
class Case:
    """A comparison of two methods on one metric.

    Attributes:
        name: what is compared.
        differences: one per trial; positive if it supports the claim.
        lost: number of runs without a finite value, such as those that diverged.
        lower: whether lower values of the metric support the claim.
        percent: whether the metric is a share, to be shown in percentage points.
        ratio: whether the metric is a logarithm, so that differences are shown as ratios.
        failed: whether all trials of the method that the claim favours diverged, but not all
            trials of the other method. This counts against the claim.
        judged: whether it is part of the claim; otherwise it is only shown.
        choice: how b was chosen, or "".
    """

    name: str
    differences: tuple[float, ...]
    lost: int = 0
    lower: bool = False
    percent: bool = True
    ratio: bool = False
    failed: bool = False
    judged: bool = True
    choice: str = ""

    def outcome(self, confidence: float = 0.95) -> Outcome:
        """Whether the interval is above zero and no trial diverged ("true"), or below ("false")."""
        if self.failed or not self.differences:
            return "false" if self.failed else "undecided"
        _, low, high = interval(self.differences, confidence)
        if high < 0:
            return "false"
        return "true" if low > 0 and not self.lost else "undecided"

    @property
    def word(self) -> str:
        """What it shows, one of ``WORDS``."""
        if self.choice == NO_CHOICE:
            return NO_CHOICE
        if not self.differences and not self.lost:
            return NO_PAIRS
        if self.failed or (self.lost and self.outcome() == "undecided"):
            return "diverged"
        return {"true": "better", "false": "worse"}.get(self.outcome(), WORDS[2])

    @property
    def n(self) -> int:
        """Number of compared trials, or of diverged ones if all diverged."""
        return len(self.differences) or self.lost

    @property
    def numbers(self) -> tuple[str, str]:
        """Mean difference and 95 % interval in words; empty without them."""
        if not self.differences:
            return "", ""
        mean, low, high = interval(self.differences)
        lower = self.lower
        if mean < 0:
            mean, low, high, lower = -mean, -high, -low, not lower
        form, unit = ".3g", ""
        if self.ratio:
            mean, low, high = (math.exp(min(x, 700.0)) for x in (mean, low, high))
            form, unit = ".2f" if mean < 10 else ".3g", " times"
        elif self.percent:
            mean, low, high = (100 * x for x in (mean, low, high))
            form, unit = ".1f", " points"
        between = f"{low:{form}} to {high:{form}}" if len(self.differences) > 1 else ""
        return f"{mean:{form}}{unit} {'lower' if lower else 'higher'}", between

    def __str__(self) -> str:
        why = "diverged or without a finite, positive value" if self.ratio else "diverged"
        lost = f", {self.lost} {why}" if self.lost else ""
        if not self.differences:
            return f"{self.name}: {NO_CHOICE if self.choice == NO_CHOICE else NO_PAIRS}{lost}"
        mean, between = self.numbers
        n = f"n = {len(self.differences)}{lost}"
        return f"{self.name}: {mean} ({f'95 % interval {between}, ' if between else ''}{n})"


def judge(what: str, cases: Sequence[Case]) -> Verdict:
    """Judge a claim by all comparisons that it is about.

    It is "true" if the 95 % interval of the mean difference is above zero in every case and no
    trial diverged. It is "false" if the interval is below zero in at least one case, at a level
    that is corrected for the number of cases (Bonferroni), or if every trial of the favoured method
    diverged in one. Otherwise it is "undecided", also if a case has nothing to compare. With fewer
    than five trials it is preliminary.

    Args:
        what: what is compared, without a full stop: "Test accuracy, NVRM-SGD against SGD".
        cases: the comparisons; see :func:`neuvar.experiments.compare`.

    >>> cases = [Case("A", (0.2, 0.22, 0.21)), Case("B", (-0.2, -0.22, -0.21))]
    >>> judge("Gain", cases[:1]).outcome, judge("Gain", cases).outcome
    ('true', 'false')
    >>> judge("Gain", cases).because, judge("Gain", cases).preliminary
    ('Gain: better in 1 case, worse in 1.', True)
    """
    judged = [case for case in cases if case.judged]
    if all(case.word == NO_PAIRS for case in judged):
        shown = tuple(case for case in cases if case.word != NO_PAIRS)
        return Verdict("undecided", "There are no finished trials to compare.", shown, True)
    outcome: Outcome = "undecided"
    if any(case.outcome(1 - 0.05 / len(judged)) == "false" for case in judged):
        outcome = "false"
    elif all(case.outcome() == "true" for case in judged):
        outcome = "true"
    words = [case.word for case in judged]
    counts = [f"{word} in {words.count(word)}" for word in WORDS if word in words]
    counts[0] += " case" if counts[0].endswith(" 1") else " cases"
    if len(counts) == 1 and len(words) > 1:
        counts[0] = counts[0].replace(" in ", " in all ")
    why = f"{what}: {', '.join(counts)}."
    if NO_CHOICE in words:
        why += " To choose among several b, set held_out in the runs, or fixed= in compare."
    few = any(case.n < MIN_TRIALS for case in judged)
    return Verdict(outcome, why, tuple(cases), few)
