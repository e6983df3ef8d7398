"""How long runs take, learned from runs like them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from neuvar.experiments.run_spec import Run, as_dict, from_dict

COSTLESS = {
    *("seed", "label_seed", "lr", "momentum", "weight_decay", "b", "rho", "clip", "strength"),
    *("noise", "label_noise", "noise_rate", "drop_every"),
}
"""Fields on which the time of a run does not depend."""

METHOD = {"optimizer", "penalty", "fisher", "fisher_images", "keep_optimizer"}
"""Fields on which it depends a little."""


def spoken(seconds: float) -> str:
    """A duration as one would say it.

    >>> [spoken(s) for s in (0.4, 43, 1500, 5000, 200000)]
    ['less than 1 s', '43 s', '25 min', '1 h 23 min', '2 d 8 h']
    """
    whole = round(seconds)
    if whole < 1:
        return "less than 1 s"
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(hours + minutes / 60), 24)
    return f"{days} d {hours} h"


def about(seconds: float) -> str:
    """A duration that is not known exactly.

    >>> about(43.3), about(0.2)
    ('about 43 s', 'less than 1 s')
    """
    return spoken(seconds) if round(seconds) < 1 else f"about {spoken(seconds)}"


class Experience:
    """What runs have taken, to tell what others like them will take.

    Runs are alike if they differ in nothing that costs time; failing that, if they differ in the
    method alone.

    Args:
        lines: what was recorded, by key; lines of another device tell nothing.
        device: where the runs are to be carried out.
    """

    def __init__(self, lines: Mapping[str, Mapping[str, Any]], device: str) -> None:
        self._taken: dict[tuple[Any, ...], list[float]] = {}
        for line in lines.values():
            alike = _family(str(line.get("device"))) == _family(device)
            if alike and line["status"] == "finished" and "seconds" in line:
                with suppress(ValueError, TypeError):  # a run of another version has other fields
                    self.learn(from_dict(line["run"]), float(line["seconds"]))

    def learn(self, run: Run, seconds: float) -> None:
        """Take in what one run has taken."""
        for cost in _costs(run):
            self._taken.setdefault(cost, []).append(seconds)

    def expected(self, run: Run) -> float | None:
        """Seconds that a run will take; None if nothing like it has been seen."""
        for cost in _costs(run):
            if cost in self._taken:
                return statistics.fmean(self._taken[cost])
        return None


def _family(device: str) -> str:
    """What kind of a device it is; its number and its name do not count."""
    return device.partition(" ")[0].partition(":")[0]


def _costs(run: Run) -> tuple[tuple[Any, ...], ...]:
    """What the time of a run depends on, with its method and without."""
    words = {k: tuple(v) if isinstance(v, list) else v for k, v in as_dict(run).items()}
    return tuple(
        (len(left_out), *(pair for pair in sorted(words.items()) if pair[0] not in left_out))
        for left_out in (COSTLESS, COSTLESS | METHOD)
    )


@dataclass
class _Active:
    run: Run
    began: float
    first: float | None = None
    """The share that was done when it first said so: what an earlier session had done."""

    fraction: float = 0.0

    def left(self, now: float, expected: float | None) -> float | None:
        """Seconds to its end, by its own pace as soon as it has gone a hundredth of the way."""
        gone = self.fraction - (self.first or 0.0)
        if gone > 0.01:
            return (now - self.began) / gone * (1 - self.fraction)
        return expected * (1 - self.fraction) if expected is not None else None


@dataclass
class Forecast:
    """When a sweep will be over.

    Attributes:
        experience: what runs have taken.
        waiting: the runs that have not begun, by key.
        workers: how many runs go on at a time.
    """

    experience: Experience
    waiting: dict[str, Run]
    workers: int = 1
    active: dict[str, _Active] = field(default_factory=dict)

    def start(self, key: str, now: float) -> None:
        """A run has begun, or begun again after its process was killed.

        Word from another machine may come late: a run that is over does not begin.
        """
        run = self.waiting.pop(key, None) or (self.active[key].run if key in self.active else None)
        if run is not None:
            self.active[key] = _Active(run, now)

    def advance(self, key: str, fraction: float) -> None:
        """A run has come so far."""
        if key in self.active:
            active = self.active[key]
            active.first = fraction if active.first is None else active.first
            active.fraction = fraction

    def end(self, key: str, now: float, *, learn: bool) -> float | None:
        """A run is over; seconds that it took here, None if another process has done it.

        What it took in full is learned from.
        """
        self.waiting.pop(key, None)
        active = self.active.pop(key, None)
        if active is None:
            return None
        taken = now - active.began
        if learn and (active.first or 0.0) < 0.5:
            self.experience.learn(active.run, taken / (1 - (active.first or 0.0)))
        return taken

    def left_of(self, key: str, now: float) -> float | None:
        """Seconds until a run that has begun is over; None if that is not known."""
        active = self.active[key]
        return active.left(now, self.experience.expected(active.run))

    def left(self, now: float) -> float | None:
        """Seconds until all is over; None if nothing is known.

        Runs that nothing is known of are taken to be like the mean of the others.
        """
        begun = [self.left_of(key, now) for key in self.active]
        known, unknown = total([*begun, *map(self.experience.expected, self.waiting.values())])
        if known is None:
            return 0.0 if not unknown else None
        lanes = max(1, min(self.workers, len(begun) + len(self.waiting)))
        return max(known / lanes, *(seconds or 0.0 for seconds in begun), 0.0)


def total(seconds: Sequence[float | None]) -> tuple[float | None, int]:
    """Sum of durations, where the unknown ones count as the mean of the others, and their number.

    >>> total([2.0, None, 4.0]), total([None]), total([])
    ((9.0, 1), (None, 1), (None, 0))
    """
    known = [s for s in seconds if s is not None]
    if not known:
        return None, len(seconds)
    return statistics.fmean(known) * len(seconds), len(seconds) - len(known)


def estimate(runs: Iterable[Run], experience: Experience, workers: int) -> tuple[float | None, int]:
    """Seconds that runs will take together, and how many of them nothing is known of."""
    expected = [experience.expected(run) for run in runs]
    seconds, unknown = total(expected)
    if seconds is None:
        return None, unknown
    lanes = max(1, min(workers, len(expected)))
    return max(seconds / lanes, *(s or 0.0 for s in expected)), unknown
