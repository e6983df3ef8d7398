"""Progress of a sweep or a training: rich's bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from neuvar.cli.run_times import Forecast, duration
from neuvar.engine import Event

TRAINING_LINES = 10
"""A training without bars prints a line after each such part."""


def rich_progress(*columns: Any) -> Any:
    """Rich's Progress with these columns after a bar, or None without a terminal or rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ImportError:
        return None
    name = TextColumn("{task.description}", markup=False)
    texts = (TextColumn(column, markup=False) for column in columns)
    return Progress(name, BarColumn(), TaskProgressColumn(), *texts)


class SweepProgress:
    """Shows the events of a sweep: a bar per run on a terminal, else a line per start and end.

    Args:
        forecast: predicts the remaining time.
        labels: labels of the runs by key.
        total: number of runs, including those finished before.
        quiet: whether to show nothing.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        forecast: Forecast,
        labels: Mapping[str, str],
        *,
        total: int,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.forecast, self.total, self.done = forecast, total, total - len(forecast.waiting)
        self.bars: Any = None if quiet else rich_progress("{task.fields[left]}")
        self._labels, self._quiet, self._clock = labels, quiet, clock
        self._tasks: dict[str, Any] = {}
        if self.bars is not None:
            words = f"{self.done} of {total} runs"
            self._sweep = self.bars.add_task(words, total=total, completed=self.done, left="")

    def __enter__(self) -> SweepProgress:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            for key in list(self._tasks):  # bars of interrupted runs would stay on the screen
                self._remove_bar(key)
            self.bars.stop()

    def __call__(self, event: Event) -> None:
        """Show an event of :func:`neuvar.engine.sweep`."""
        key, now, label = event.key, self._clock(), self._labels[event.key]
        if event.kind == "taken":
            self._print(f"{label} is being run by another process")
            return
        if event.kind == "started":
            self.forecast.start(key, now)
        elif event.kind == "progress":
            self.forecast.advance(key, event.fraction)
        else:
            self._remove_bar(key)
            self._end(event, label, now)
        if key in self.forecast.active:  # a message about a finished run may come late
            if event.kind == "started" and (self.bars is None or event.message):
                self._print(f"{self._count} started {label} {event.message}".rstrip())
            self._update_bar(key, label, now)
        if self.bars is not None:
            running = sum(active.fraction for active in self.forecast.active.values())
            self.bars.update(
                self._sweep,
                description=f"{self.done} of {self.total} runs",
                completed=self.done + running,
                left=_left(self.forecast.remaining(now)),
            )

    @property
    def _count(self) -> str:
        return f"[{self.done}/{self.total}]"

    def _end(self, event: Event, label: str, now: float) -> None:
        self.done += event.kind != "failed"
        seconds = self.forecast.end(event.key, now, learn=event.kind == "finished")
        taken = "by another process" if seconds is None else f"in {duration(seconds)}"
        why = f" ({event.message})" if event.kind != "finished" and event.message else ""
        text = f"{self._count} {event.kind} {label} {taken}{why}"
        remaining = self.forecast.remaining(now)
        self._print(f"{text}, {_left(remaining, about=True)}" if remaining else text)

    def _update_bar(self, key: str, label: str, now: float) -> None:
        if self.bars is not None:
            if key not in self._tasks:
                self._tasks[key] = self.bars.add_task(f"  {label}", total=1, left="")
            fraction = self.forecast.active[key].fraction
            left = _left(self.forecast.remaining_of(key, now))
            self.bars.update(self._tasks[key], completed=fraction, left=left)

    def _remove_bar(self, key: str) -> None:
        if key in self._tasks:
            self.bars.remove_task(self._tasks.pop(key))

    def _print(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            print(text, flush=True)


def _left(seconds: float | None, *, about: bool = False) -> str:
    return f"{duration(seconds, about=about)} left" if seconds else ""


@contextmanager
def training_progress() -> Iterator[Callable[[float], None]]:
    """Yields a function that shows the fraction of a training that is done."""
    start, printed = time.monotonic(), 0
    bars = rich_progress("{task.fields[left]}")
    task = None if bars is None else bars.add_task("training", total=1.0, left="")

    def show(fraction: float) -> None:
        nonlocal printed
        left = (time.monotonic() - start) * (1 - fraction) / max(fraction, 1e-9)
        if bars is not None:
            bars.update(task, completed=fraction, left=_left(left))
        elif printed < int(TRAINING_LINES * fraction) < TRAINING_LINES:
            printed = int(TRAINING_LINES * fraction)
            print(f"trained to {fraction:.0%}, {duration(left, about=True)} left", flush=True)

    if bars is None:
        yield show
    else:
        with bars:
            yield show
