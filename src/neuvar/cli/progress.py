"""How a sweep or a training is going: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from neuvar.cli.timing import Forecast, about, spoken
from neuvar.engine import Event

ENDS = ("finished", "diverged", "failed")
LINES = 10
"""How often a training says how far it is where no bar can be shown."""


class Watch:
    """Follows a sweep without a word; what its relatives say is built on its counts.

    Args:
        forecast: of the runs that are left to do.
        labels: what each of them is called, by key.
        total: how many runs there are, with those that were finished before.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        forecast: Forecast,
        labels: Mapping[str, str],
        *,
        total: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.forecast = forecast
        self.labels = labels
        self.total = total
        self.done = total - len(forecast.waiting)
        self._clock = clock

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def __call__(self, event: Event) -> None:
        """Take in an event of :func:`neuvar.engine.sweep`."""
        now = self._clock()
        if event.kind == "started":
            self.forecast.start(event.key, now)
            if event.key in self.forecast.active:
                self.started(event)
        elif event.kind == "progress":
            self.forecast.advance(event.key, event.fraction)
            if event.key in self.forecast.active:
                self.advanced(event, now)
        elif event.kind in ENDS:
            self.done += event.kind != "failed"
            seconds = self.forecast.end(event.key, now, learn=event.kind == "finished")
            self.ended(event, self._sentence(event, seconds, now))
        elif event.kind == "taken":
            self.say(f"{self.labels[event.key]} is being carried out by another process")

    def _sentence(self, event: Event, seconds: float | None, now: float) -> str:
        """That a run is over, after how long, and when all will be."""
        words = f"[{self.done}/{self.total}] {event.kind} {self.labels[event.key]}"
        words += f" in {spoken(seconds)}" if seconds is not None else " by another process"
        if event.kind != "finished" and event.message:
            words += f" ({event.message})"
        return words + self._left(self.forecast.left(now))

    @staticmethod
    def _left(seconds: float | None) -> str:
        return f", {about(seconds)} left" if seconds else ""

    def say(self, words: str) -> None:
        """Put a line on the screen."""

    def started(self, event: Event) -> None:
        """A run has begun."""

    def advanced(self, event: Event, now: float) -> None:
        """A run has come further."""

    def ended(self, event: Event, sentence: str) -> None:
        """A run is over."""


class Lines(Watch):
    """One line for each run that begins or ends; readable in a file."""

    def say(self, words: str) -> None:
        print(words, flush=True)

    def started(self, event: Event) -> None:
        why = f" {event.message}" if event.message else ""
        self.say(f"[{self.done}/{self.total}] started {self.labels[event.key]}{why}")

    def ended(self, event: Event, sentence: str) -> None:
        self.say(sentence)


class Bars(Watch):
    """A bar for the sweep and one for each run that goes on, with the time that is left."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        super().__init__(*arguments, **options)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=Console(),
        )
        self._sweep = self._progress.add_task("", total=self.total, left="")
        self._tasks: dict[str, Any] = {}
        self._show(None)

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        # The bars of runs that were stopped half-way would stay on the screen and mean nothing.
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()
        self._progress.stop()

    def say(self, words: str) -> None:
        self._progress.console.print(words, markup=False, highlight=False)

    def started(self, event: Event) -> None:
        if event.key not in self._tasks:
            words = f"  {self.labels[event.key]}"
            self._tasks[event.key] = self._progress.add_task(words, total=1, left="")
        if event.message:
            self.say(f"started {self.labels[event.key]} {event.message}")
        self._show(self._clock())

    def advanced(self, event: Event, now: float) -> None:
        left = self._time(self.forecast.left_of(event.key, now))
        self._progress.update(self._tasks[event.key], completed=event.fraction, left=left)
        self._show(now)

    def ended(self, event: Event, sentence: str) -> None:
        if event.key in self._tasks:
            self._progress.remove_task(self._tasks.pop(event.key))
        self.say(sentence)
        self._show(self._clock())

    def _show(self, now: float | None) -> None:
        begun = sum(active.fraction for active in self.forecast.active.values())
        left = self._time(self.forecast.left(now)) if now is not None else ""
        words = f"{self.done} of {self.total} runs"
        done = self.done + begun
        self._progress.update(self._sweep, description=words, completed=done, left=left)

    @staticmethod
    def _time(seconds: float | None) -> str:
        return f"{spoken(seconds)} left" if seconds else ""


def watch(
    forecast: Forecast, labels: Mapping[str, str], *, total: int, quiet: bool = False
) -> Watch:
    """Bars if a person is watching and rich is installed, else lines; nothing if ``quiet``."""
    kind: type[Watch] = Lines
    if quiet:
        kind = Watch
    elif sys.stdout.isatty():
        try:
            import rich.progress  # noqa: F401, is it installed?

            kind = Bars
        except ImportError:
            kind = Lines
    return kind(forecast, labels, total=total)


@contextmanager
def training_progress() -> Iterator[Callable[[float], None]]:
    """A bar if a person is watching and rich is installed, else a line now and then."""
    if sys.stdout.isatty():
        try:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
        except ImportError:
            pass
        else:
            with Progress(
                "training", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
            ) as bar:
                task = bar.add_task("", total=1.0)
                yield lambda share: bar.update(task, completed=share)
            return
    yield _TrainingLines()


class _TrainingLines:
    """Says how far a training is, a few times in all."""

    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), 0

    def __call__(self, share: float) -> None:
        if self._said < int(LINES * share) < LINES:
            self._said = int(LINES * share)
            left = (time.monotonic() - self._began) * (1 - share) / share
            print(f"trained to {share:.0%}, {about(left)} left", flush=True)
