"""Carry out runs while someone watches, who may stop them at any time."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuvar.cli.naming import labels
from neuvar.cli.progress import watch
from neuvar.cli.timing import Experience, Forecast, spoken
from neuvar.engine import Results, Summary, sweep
from neuvar.engine.provenance import cores
from neuvar.experiments.run_spec import Run


@dataclass(frozen=True)
class Sweep:
    """Runs, and where and how to carry them out; see :func:`neuvar.engine.sweep`.

    Attributes:
        again: the command line that goes on with them, after ``neuvar``.
    """

    runs: Sequence[Run]
    results: Results
    again: Sequence[str]
    engine: str = "local"
    workers: int = 0
    device: str = "cpu"
    data: Path | None = None
    address: str | None = None
    tensorboard: Path | None = None

    def left(self, lines: Mapping[str, Any]) -> list[Run]:
        """The runs that have no result yet."""
        return [run for run in self.runs if run.key not in lines]

    def lanes(self) -> int:
        """How many runs go on at a time, as far as this machine can tell."""
        return min(self.workers or self._slots(), len(self.runs))

    def _slots(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.device_count()
        return cores() if self.device == "cpu" else 1


def carry_through(sweep_: Sweep, *, quiet: bool) -> int:
    """Carry out runs and say what came of them; 0, 1 if some failed, 130 or 143 if stopped."""
    began, lines = time.monotonic(), sweep_.results.lines()
    called = labels(sweep_.runs)
    forecast = Forecast(
        Experience(lines, sweep_.device),
        {run.key: run for run in sweep_.left(lines)},
        sweep_.lanes(),
    )
    try:
        with (
            _stoppable(),
            watch(forecast, called, total=len(sweep_.runs), quiet=quiet) as watching,
        ):
            summary = sweep(
                sweep_.runs,
                sweep_.results,
                engine=sweep_.engine,
                workers=sweep_.workers,
                device=sweep_.device,
                data=sweep_.data,
                address=sweep_.address,
                tensorboard=sweep_.tensorboard,
                watch=watching,
            )
    except KeyboardInterrupt as stop:
        return _stopped(sweep_, 143 if isinstance(stop, Terminated) else 130)
    print(*_said(summary, called, time.monotonic() - began), sep="\n", flush=True)
    return 1 if summary.failed else 0


class Terminated(KeyboardInterrupt):
    """Someone asked the process to end, as Ctrl-C does."""


@contextmanager
def _stoppable() -> Iterator[None]:
    """Take a request to end as one to stop cleanly."""

    def stop(*_: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears of signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(sweep_: Sweep, code: int) -> int:
    """Say how far it came and how it goes on."""
    count, total = len(sweep_.runs) - len(sweep_.left(sweep_.results.lines())), len(sweep_.runs)
    done = f"{count} of {total} runs {'is' if count == 1 else 'are'} finished"
    command = shlex.join(["neuvar", *sweep_.again])
    print(f"stopped; {done}, and the others go on where they were with: {command}", file=sys.stderr)
    return code


def _said(summary: Summary, called: Mapping[str, str], seconds: float) -> list[str]:
    """What came of a sweep: counts, then every run that diverged or failed, with the reason."""
    counts = {
        "finished": len(summary.finished),
        "finished before": len(summary.skipped),
        "diverged": len(summary.diverged),
        "failed": len(summary.failed),
    }
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    found = [f"{words or 'nothing to do'}, in {spoken(seconds)}"]
    found += [f"  diverged: {called[key]}: {why}" for key, why in summary.diverged.items()]
    found += [f"  failed: {called[key]}: {why}" for key, why in summary.failed.items()]
    return found
