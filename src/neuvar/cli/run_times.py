"""How long runs take: expected from similar runs, and what remains of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from neuvar.experiments.run_spec import Run, as_dict, from_dict

NO_COST = {
    *("seed", "label_seed", "lr", "momentum", "weight_decay", "b", "rho", "clip", "strength"),
    *("noise", "label_noise", "noise_rate", "drop_every"),
}
"""Fields that the time of a run does not depend on."""
LITTLE_COST = {"optimizer", "penalty", "fisher", "fisher_images", "keep_optimizer"}
"""Fields that it depends on a little."""


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


class RunTimes:
    """Seconds that recorded runs took on the same kind of device, to predict similar runs.

    Runs are similar if they differ only in fields that cost no time, or else only in their method.
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
        for group in _similar_runs(run):
            self._seconds.setdefault(group, []).append(seconds)

    def expected(self, run: Run) -> float | None:
        """Expected seconds of a run; None if no similar run is known."""
        known = (self._seconds[group] for group in _similar_runs(run) if group in self._seconds)
        seconds = next(known, None)
        return None if seconds is None else statistics.fmean(seconds)


def _similar_runs(run: Run) -> list[tuple[Any, ...]]:
    """What identifies runs similar to this one: with the same method, then with any."""
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
        """A run reports the fraction that is done."""
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
        """Remaining seconds of an active run, by its own pace after the first hundredth."""
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
