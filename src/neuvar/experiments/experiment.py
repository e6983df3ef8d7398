"""One claim of the paper: its runs, its figure, its sentence and how to judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from neuvar.experiments.findings import Panel, Result, Table, Verdict
from neuvar.experiments.runs import Run

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class Experiment:
    """A claim of the paper, and how it is put to the test.

    Attributes:
        name: what the command line calls it.
        number: what the paper calls it.
        title: a few words.
        sentence: the claim, in the paper's words, shortened.
        source: where the paper says so.
        runs: the runs at a scale, for so many trials; 0 trials for as many as the scale has.
        settings: what was run at a scale, and what was made smaller than in the paper.
        panels: the figure, from results.
        table: the numbers, from results.
        check: whether the results bear the sentence out.
    """

    name: str
    number: str
    title: str
    sentence: str
    source: str
    runs: Callable[[Scale, int], list[Run]]
    settings: Callable[[Scale], str]
    panels: Callable[[Sequence[Result]], list[Panel]]
    table: Callable[[Sequence[Result]], Table]
    check: Callable[[Sequence[Result]], Verdict]
