"""What comes out of an experiment: numbers with their trials, as data that others may draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from neuvar.experiments.run_spec import Run

Role = Literal["plain", "nvrm", "other", "third", "fourth"]
"""Whose line it is, so that the same method has the same colour in every figure."""


@dataclass(frozen=True)
class Cell:
    """One number of a table, measured in several trials.

    Attributes:
        trials: its value in each trial.
        percent: whether it is a share that is to be shown in per cent.
    """

    trials: tuple[float, ...]
    percent: bool = True

    @property
    def mean(self) -> float:
        """Mean over the trials; NaN without any."""
        return statistics.fmean(self.trials) if self.trials else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over the trials; NaN for fewer than two."""
        return statistics.stdev(self.trials) if len(self.trials) > 1 else math.nan

    def __str__(self) -> str:
        if not self.trials:
            return "–"
        factor, digits = (100, 1) if self.percent else (1, 3)
        spread = f" ± {factor * self.deviation:.{digits}f}" if len(self.trials) > 1 else ""
        return f"{factor * self.mean:.{digits}f}{spread}{' %' if self.percent else ''}"


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers; the number of trials stands in a column of its own."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]


@dataclass(frozen=True)
class Line:
    """One line of a figure.

    Attributes:
        label: what it is called, such as "NVRM-SGD, b = .05".
        x: where it was measured.
        trials: a row for each trial, with a value for each x.
        role: whose it is.
    """

    label: str
    x: tuple[float, ...]
    trials: tuple[tuple[float, ...], ...]
    role: Role = "other"


@dataclass(frozen=True)
class Panel:
    """One part of a figure: lines over the same axes.

    Attributes:
        title: what is seen.
        x_label: with the unit.
        y_label: with the unit.
        lines: what to draw.
        percent: whether y is a share that is to be shown in per cent.
        log_x: whether x is to be shown on a logarithmic scale.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    percent: bool = True
    log_x: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether results bear a sentence out.

    Attributes:
        outcome: "true", "false" or "undecided".
        because: the numbers that decided, in a sentence.
    """

    outcome: Literal["true", "false", "undecided"]
    because: str


@dataclass(frozen=True)
class Result:
    """A finished run: the run, and the JSON object that was recorded for it.

    Attributes:
        run: what was carried out.
        line: everything that was recorded; see :mod:`neuvar.engine`.
    """

    run: Run
    line: dict[str, Any] = field(hash=False)

    @property
    def finished(self) -> bool:
        """Whether it came to its end; a run that diverged did not."""
        return bool(self.line["status"] == "finished")

    def curve(self, name: str) -> tuple[float, ...]:
        """A metric after each epoch, or after each task."""
        return tuple(map(_number, self.line["curves"][name]))

    def last(self, name: str) -> float:
        """A metric at the end."""
        return _number(self.line["last"][name])

    def best(self, name: str) -> float:
        """The best value of a metric at any epoch."""
        return _number(self.line["best"].get(name))


def _number(x: float | None) -> float:
    """A recorded number; what was not finite is recorded as null."""
    return math.nan if x is None else float(x)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of a few values and the ends of Student's interval.

    They are infinite for fewer than two values, and where a value is no finite number.
    """
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, -math.inf, math.inf
    from neuvar.measures.estimate import student_quantile  # imports torch

    half = student_quantile(0.5 + confidence / 2, len(values) - 1)
    half *= statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def gain(better: dict[int, float], worse: dict[int, float]) -> tuple[float, ...]:
    """Differences of two methods, trial by trial, for the trials that both have."""
    return tuple(better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys()))


@dataclass(frozen=True)
class Case:
    """One comparison of two methods that a sentence speaks of.

    Attributes:
        name: which one, in a few words.
        differences: by how much the sentence is borne out in each trial, as shares.
        lost: trials that diverged, of which nobody knows what they would have shown.
    """

    name: str
    differences: tuple[float, ...]
    lost: int = 0


def judge(what: str, cases: Sequence[Case]) -> Verdict:
    """Whether a sentence is borne out in every case that it speaks of.

    It is true if the 95 % interval of the mean difference is above zero in each case and no trial
    was lost. It is false if the interval is below zero in at least one, at a level that makes up
    for the number of cases. Otherwise it is undecided: there may be too few trials.

    >>> cases = [Case("A", (0.2, 0.22, 0.21)), Case("B", (-0.2, -0.22, -0.21))]
    >>> judge("Gain.", cases[:1]).outcome, judge("Gain.", cases).outcome
    ('true', 'false')
    """
    compared = [case for case in cases if case.differences or case.lost]
    if not compared:
        return Verdict("undecided", "There are no finished trials to compare.")
    intervals = [interval(case.differences) for case in compared if case.differences]
    strict = 1 - 0.05 / len(compared)
    against = [interval(c.differences, strict)[2] < 0 for c in compared if c.differences]
    holds = all(low > 0 for _, low, _ in intervals) and not any(case.lost for case in compared)
    outcome: Literal["true", "false", "undecided"] = "undecided"
    if any(against):
        outcome = "false"
    elif holds and intervals:
        outcome = "true"
    return Verdict(outcome, f"{what} {'; '.join(map(_said, compared))}.")


def _said(case: Case) -> str:
    """A comparison in numbers."""
    lost = f", {case.lost} diverged" if case.lost else ""
    if not case.differences:
        return f"{case.name}: nothing to compare{lost}"
    mean, low, high = interval(case.differences)
    said = f"{case.name}: {100 * mean:+.1f} points (n = {len(case.differences)}{lost}"
    if len(case.differences) > 1:
        said += f", 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{said})"
