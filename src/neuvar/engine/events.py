"""What a sweep tells while it goes on, and what it says in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from neuvar.experiments.run_spec import Run

Kind = Literal["started", "progress", "finished", "diverged", "failed", "taken"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: "started", "progress", "finished", "diverged", "failed", or "taken" if another
            process has the run; the sweep waits for it.
        key: of the run.
        run: which run.
        fraction: how much of it is done, from 0 to 1.
        message: why it diverged or failed, or why it was started again; else empty.
    """

    kind: Kind
    key: str
    run: Run
    fraction: float = 0.0
    message: str = ""


Watch: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True)
class Summary:
    """What became of the runs of a sweep, by their keys.

    Attributes:
        finished: recorded since the sweep began, by this or by another process.
        skipped: recorded before.
        diverged: recorded as diverged since the sweep began, with the reason.
        failed: not recorded, with the reason.
    """

    finished: tuple[str, ...]
    skipped: tuple[str, ...]
    diverged: dict[str, str] = field(hash=False)
    failed: dict[str, str] = field(hash=False)


class Tally:
    """Counts what happens to runs and passes it on."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._last: dict[str, Event] = {}

    def tell(self, kind: Kind, run: Run, fraction: float = 0.0, message: str = "") -> None:
        """Take note of an event and let whoever watches know."""
        before = self._last.get(run.key)
        if kind == "taken" and before is not None and before.kind == "taken":
            return
        self._last[run.key] = event = Event(kind, run.key, run, fraction, message)
        if self._watch is not None:
            self._watch(event)

    def started(self, run: Run) -> bool:
        """Whether a run is under way."""
        last = self._last.get(run.key)
        return last is not None and last.kind in ("started", "progress")

    def summary(self, skipped: Sequence[str]) -> Summary:
        """What became of the runs."""
        by_kind = {
            kind: {key: last.message for key, last in self._last.items() if last.kind == kind}
            for kind in ("finished", "diverged", "failed")
        }
        return Summary(
            tuple(by_kind["finished"]), tuple(skipped), by_kind["diverged"], by_kind["failed"]
        )
