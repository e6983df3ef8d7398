"""What an experiment consists of, and experiments in a user's own files."""

from __future__ import annotations

import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from neuvar.experiments.findings import Panel, Result, Table, Verdict
from neuvar.experiments.run_spec import Run, Tasks, Training

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

RETURNED: dict[str, tuple[tuple[type, ...], str]] = {
    "runs": ((Training, Tasks), "a list of Training or Tasks"),
    "then": ((Training, Tasks), "a list of Training or Tasks"),
    "panels": ((Panel,), "a list of Panel"),
    "table": ((Table,), "a Table"),
    "check": ((Verdict,), "a Verdict, such as judge() returns"),
}
"""What the functions of an experiment return: its type, or that of its items, and in words."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim, the runs that test it, and how their results are shown and judged.

    ``neuvar run my_experiment.py`` runs the one that a file assigns to ``EXPERIMENT``.

    Attributes:
        title: a few words.
        sentence: the claim.
        runs: returns the runs for a scale ("smoke", "cpu" or "paper") and a number of trials. The
            first trial has seed 0, the next seed 1, and so on. 0 trials means the scale's default.
        then: returns further runs that depend on the results of ``runs``, such as trials at the b
            chosen there. It is called when all of ``runs`` are recorded.
        table: returns the table of results.
        check: returns the verdict: whether the results support the claim.
        panels: returns the panels of the figure.
        settings: describes the runs of a scale in a sentence.
        name: its name on the command line; a file's experiment is named after the file.
        number: its number in the paper, or "".
        source: where the claim comes from, or "".
        file: the user's file that defines it, or None.
    """

    title: str
    sentence: str
    runs: Callable[[Scale, int], list[Run]]
    table: Callable[[Sequence[Result]], Table]
    check: Callable[[Sequence[Result]], Verdict]
    then: Callable[[Scale, int, Sequence[Result]], list[Run]] | None = None
    panels: Callable[[Sequence[Result]], list[Panel]] = lambda results: []
    settings: Callable[[Scale], str] = lambda scale: ""
    name: str = ""
    number: str = ""
    source: str = ""
    file: ExperimentFile | None = None

    def planned(
        self, scale: Scale, trials: int = 0, lines: Mapping[str, dict[str, Any]] | None = None
    ) -> list[Run]:
        """The runs of a scale, and those that follow from recorded lines (by key)."""
        first, lines = self.runs(scale, trials), lines or {}
        if self.then is None or not first or any(run.key not in lines for run in first):
            return first
        results = [Result(run, lines[run.key]) for run in first]
        return list(dict.fromkeys([*first, *self.then(scale, trials, results)]))

    def command(self, scale: Scale, trials: int = 0) -> str:
        """The command that runs it."""
        text = f"neuvar run {shlex.quote(self.file.path if self.file else self.name)}"
        return f"{text} --scale {scale}" + (f" --trials {trials}" if trials else "")


@dataclass(frozen=True)
class ExperimentFile:
    """A user's file as it was read, so that every process executes the same text.

    Attributes:
        path: the file; modules in its folder can be imported.
        source: its text.
    """

    path: str
    source: str

    @classmethod
    def read(cls, path: str) -> ExperimentFile:
        """Read a file."""
        try:
            return cls(path, Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"could not read the experiment file {path}: {why}") from None

    def load(self) -> Experiment:
        """Execute the file, once per process and text, and return its experiment."""
        path = Path(self.path).absolute()
        name = f"neuvar_experiment_{path.stem}"
        module = sys.modules.get(name)
        if module is None or getattr(module, "_source", None) != self:
            module = ModuleType(name)
            vars(module).update(__file__=str(path), _source=self)
            if str(path.parent) not in sys.path:
                sys.path.append(str(path.parent))
            sys.modules[name] = module  # dataclasses and pickle look their module up
            try:
                exec(compile(self.source, str(path), "exec"), vars(module))  # noqa: S102 - the user's own
            except Exception as error:
                del sys.modules[name]
                raise self._explained(error) from error
        experiment = getattr(module, "EXPERIMENT", None)
        if not isinstance(experiment, Experiment):
            got = f", got {type(experiment).__name__}" if hasattr(module, "EXPERIMENT") else ""
            raise ValueError(f"{self.path} must define EXPERIMENT = Experiment(...){got}")
        functions = {part: getattr(experiment, part) for part in RETURNED}
        checked: dict[str, Any]
        checked = {part: self._checked(part, f) for part, f in functions.items() if f is not None}
        return replace(experiment, name=path.stem, file=self, **checked)

    def _explained(self, error: Exception) -> ValueError:
        """An error of this file in one sentence, with its line."""
        text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return ValueError(f"{self.place_of(error) or self.path}: {kind}{text}")

    def _checked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the experiment, with errors in one sentence and a result of its type."""
        types, words = RETURNED[part]

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except Exception as error:
                raise self._explained(error) from error
            several = words.startswith("a list") and isinstance(result, list | tuple)
            wrong = [x for x in (result if several else [result]) if not isinstance(x, types)]
            if wrong or several != words.startswith("a list"):
                got = f"one with {wrong[0]!r:.80}" if several else f"{result!r:.80}"
                raise ValueError(f"{self.path}: {part} must return {words}, got {got}")
            return result

        return call

    def place_of(self, error: BaseException) -> str:
        """The line that led to an error, as "mine.py, line 2"; else empty.

        It is the last one in this file, or in another file of its folder.
        """
        folder = Path(self.path).absolute().parent
        frames = traceback.extract_tb(error.__traceback__)
        places = [(Path(frame.filename), frame.lineno) for frame in frames]
        if isinstance(error, SyntaxError) and error.filename:
            places.append((Path(error.filename), error.lineno))
        own = [(path.name, line) for path, line in places if path.parent == folder]
        return f"{Path(self.path).with_name(own[-1][0])}, line {own[-1][1]}" if own else ""
