"""Progress and remaining time of a sweep or a training.

Shown as bars on a terminal if rich is installed, otherwise as plain lines.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from neuvar.engine import Event
from neuvar.experiments.run_spec import Run, as_dict, from_dict

NO_COST = {
    *("seed", "label_seed", "lr", "momentum", "weight_decay", "b", "rho", "clip", "strength"),
    *("noise", "label_noise", "noise_rate", "drop_every"),
}
"""Fields that the time of a run does not depend on."""
LITTLE_COST = {"optimizer", "penalty", "fisher", "fisher_images", "keep_optimizer"}
"""Fields that this time depends on only a little."""
TRAINING_LINES = 10
"""A training without bars prints a line after each tenth."""
ESTIMATE_AFTER = 5.0
"""Seconds after which it prints its first estimate."""


def duration(seconds: float, *, about: bool = False) -> str:
    """A duration in words.

    >>> [duration(s) for s in (0.4, 43, 1500, 5000, 200000)]
    ['less than 1 s', '43 s', '25 min', '1 h 23 min', '2 d 8 h']
    >>> duration(43.3, about=True), duration(0.2, about=True)
    ('about 43 s', 'less than 1 s')
    """
    rounded, minutes = round(seconds), round(round(seconds) / 60)
    if rounded < 1:
        return "less than 1 s"
    if rounded < 100:
        text = f"{rounded} s"
    elif minutes < 60:
        text = f"{minutes} min"
    elif minutes < 24 * 60:
        text = f"{minutes // 60} h {minutes % 60} min"
    else:
        days, hours = divmod(round(minutes / 60), 24)
        text = f"{days} d {hours} h"
    return f"about {text}" if about else text


def _left(seconds: float | None, *, about: bool = False) -> str:
    return f"{duration(seconds, about=about)} left" if seconds else ""


class RunTimes:
    """Seconds that recorded runs took on the same kind of device, to predict similar runs.

    Similar runs differ only in fields that cost no time. If there are none, runs with another
    optimizer or penalty count too.
    """

    def __init__(self, lines: Mapping[str, Mapping[str, Any]], device: str) -> None:
        self._seconds: dict[tuple[Any, ...], list[float]] = {}
        kind = device.partition(":")[0]
        for line in lines.values():
            same_kind = str(line.get("device")).partition(" ")[0].partition(":")[0] == kind
            if same_kind and line["status"] == "finished" and "seconds" in line:
                with suppress(ValueError, TypeError):  # another version's run has other fields
                    self.add(from_dict(line["run"]), float(line["seconds"]))

    def add(self, run: Run, seconds: float) -> None:
        """Add a finished run."""
        for group in self._groups(run):
            self._seconds.setdefault(group, []).append(seconds)

    def expected(self, run: Run) -> float | None:
        """Expected seconds of a run; None if no similar run is known."""
        known = (self._seconds[group] for group in self._groups(run) if group in self._seconds)
        return next(map(statistics.fmean, known), None)

    @staticmethod
    def _groups(run: Run) -> list[tuple[Any, ...]]:
        """Keys of similar runs: first of runs with the same method, then of runs with any."""
        values = sorted((k, str(v)) for k, v in as_dict(run).items() if k not in NO_COST)
        return [tuple(values), tuple(pair for pair in values if pair[0] not in LITTLE_COST)]


@dataclass
class ActiveRun:
    """A run that is running; ``resumed_at`` is the fraction that an earlier sweep had done."""

    run: Run
    start: float
    resumed_at: float | None = None
    fraction: float = 0.0


@dataclass
class Forecast:
    """When the runs of a sweep will be finished; ``workers`` is the number of runs at a time."""

    times: RunTimes
    waiting: dict[str, Run]
    workers: int = 1
    active: dict[str, ActiveRun] = field(default_factory=dict)

    def start(self, key: str, now: float) -> None:
        """A run starts, or starts again. A late message about a finished run is ignored."""
        run = self.waiting.pop(key, None) or (self.active[key].run if key in self.active else None)
        if run is not None:
            self.active[key] = ActiveRun(run, now)

    def advance(self, key: str, fraction: float) -> None:
        """A run reports the fraction that is done; its first report is where it resumed."""
        if key in self.active:
            active = self.active[key]
            active.resumed_at = fraction if active.resumed_at is None else active.resumed_at
            active.fraction = fraction

    def end(self, key: str, now: float, *, learn: bool) -> float | None:
        """A run ends. Returns its seconds here, or None if another process ran it."""
        self.waiting.pop(key, None)
        active = self.active.pop(key, None)
        if active is None:
            return None
        seconds, skipped = now - active.start, active.resumed_at or 0.0
        if learn and skipped < 0.5:
            self.times.add(active.run, seconds / (1 - skipped))
        return seconds

    def remaining_of(self, key: str, now: float) -> float | None:
        """Remaining seconds of an active run, by its own speed once 1 % is done."""
        active = self.active[key]
        done_here = active.fraction - (active.resumed_at or 0.0)
        if done_here > 0.01:
            return (now - active.start) / done_here * (1 - active.fraction)
        expected = self.times.expected(active.run)
        return None if expected is None else expected * (1 - active.fraction)

    def remaining(self, now: float) -> float | None:
        """Remaining seconds of the sweep; None if no run can be predicted.

        Runs that cannot be predicted count as the mean of the others.
        """
        each = [self.remaining_of(key, now) for key in self.active]
        each += [self.times.expected(run) for run in self.waiting.values()]
        known = [seconds for seconds in each if seconds is not None]
        if not known:
            return None if each else 0.0
        workers = max(1, min(self.workers, len(each)))
        return max(statistics.fmean(known) * len(each) / workers, *known)


def rich_bars() -> Any:
    """Rich's Progress with a column "left" after each bar; None without a terminal or rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    except ImportError:
        return None
    name = TextColumn("{task.description}", markup=False)
    left = TextColumn("{task.fields[left]}", markup=False)
    return Progress(name, BarColumn(), TaskProgressColumn(), left)


class SweepProgress:
    """Shows the events of a sweep: a bar per run on a terminal, else a line per start and end.

    ``labels`` has the label of each run by key; ``total`` includes runs that were finished before.
    """

    def __init__(
        self,
        forecast: Forecast,
        labels: Mapping[str, str],
        *,
        total: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.forecast, self.total, self.done = forecast, total, total - len(forecast.waiting)
        self.bars: Any = rich_bars()
        self._labels, self._clock = labels, clock
        self._tasks: dict[str, Any] = {}  # of the bars, by key; "" is the whole sweep

    def __enter__(self) -> SweepProgress:
        if self.bars is not None:
            self._update_bars()
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            for key in self._tasks.keys() - {""}:  # interrupted runs would stay on the screen
                self.bars.remove_task(self._tasks[key])
            self.bars.stop()

    def __call__(self, event: Event) -> None:
        """Show an event of :func:`neuvar.engine.sweep`."""
        key, now, label = event.key, self._clock(), self._labels[event.key]
        if event.kind == "taken":
            self._print(f"{label} is being run by another process")
        elif event.kind == "started":
            self.forecast.start(key, now)
            late = key not in self.forecast.active  # the run has already finished
            if not late and (self.bars is None or event.message):
                self._print(f"[{self.done}/{self.total}] started {label} {event.message}".rstrip())
        elif event.kind == "progress":
            active = self.forecast.active.get(key)
            if active and active.resumed_at is None and event.fraction:
                self._print(f"[{self.done}/{self.total}] resumed {label} at {event.fraction:.0%}")
            self.forecast.advance(key, event.fraction)
        else:
            self.done += event.kind != "failed"
            seconds = self.forecast.end(key, now, learn=event.kind == "finished")
            taken = "by another process" if seconds is None else f"in {duration(seconds)}"
            why = f" ({event.message})" if event.kind != "finished" and event.message else ""
            text = f"[{self.done}/{self.total}] {event.kind} {label} {taken}{why}"
            left = _left(self.forecast.remaining(now), about=True)
            self._print(f"{text}, {left}" if left else text)
        if self.bars is not None:
            self._update_bars()

    def _print(self, text: str) -> None:
        if self.bars is not None:
            self.bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _update_bars(self) -> None:
        """Show a bar for the sweep and one for each active run."""
        now, active = self._clock(), self.forecast.active
        done = self.done + sum(run.fraction for run in active.values())
        words = f"{self.done} of {self.total} runs"
        shown = {"": (words, self.total, done, self.forecast.remaining(now))}
        for key, run in active.items():
            remaining = self.forecast.remaining_of(key, now)
            shown[key] = (f"  {self._labels[key]}", 1, run.fraction, remaining)
        for key in self._tasks.keys() - shown.keys():
            self.bars.remove_task(self._tasks.pop(key))
        for key, (words, total, completed, remaining) in shown.items():
            if key not in self._tasks:
                self._tasks[key] = self.bars.add_task(words, total=total, left="")
            task = self._tasks[key]
            self.bars.update(task, description=words, completed=completed, left=_left(remaining))


@contextmanager
def training_progress() -> Iterator[Callable[[float], None]]:
    """Yields a function that shows the fraction of a training that is done."""
    first: tuple[float, float] | None = None
    printed, estimated = 0, False
    bars = rich_bars()
    task = None if bars is None else bars.add_task("training", total=1.0, left="")

    def show(fraction: float) -> None:
        nonlocal first, printed, estimated
        now = time.monotonic()
        if first is None:  # above 0 if the training resumes
            first, printed = (now, fraction), int(TRAINING_LINES * fraction)
        left = (now - first[0]) * (1 - fraction) / max(fraction - first[1], 1e-9)
        if bars is not None:
            bars.update(task, completed=fraction, left=_left(left) if now > first[0] else "")
        elif printed < int(TRAINING_LINES * fraction) < TRAINING_LINES:
            printed, estimated = int(TRAINING_LINES * fraction), True
            print(f"trained to {fraction:.0%}, {duration(left, about=True)} left", flush=True)
        elif not estimated and fraction < 1 and now - first[0] >= ESTIMATE_AFTER:
            estimated = True
            print(f"training, {duration(left, about=True)} left", flush=True)

    with bars or nullcontext():
        yield show
