"""One run from beginning to end, in whatever process carries it out."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from neuvar.engine.events import Kind
from neuvar.engine.provenance import provenance
from neuvar.engine.results import Line
from neuvar.experiments.run_spec import Run, as_dict

RunOne: TypeAlias = Callable[..., Any]
"""A function such as :func:`neuvar.experiments.run_one`."""

Tell: TypeAlias = Callable[[float], None]

RECORDED = ("finished", "diverged")
OFTEN = 0.2
"""Seconds between two reports of progress."""
LATER = 0.5
"""Seconds until a run that another process has is asked for again."""


@dataclass(frozen=True)
class Job:
    """What all runs of a sweep have in common.

    Attributes:
        run_one: what trains.
        device: where.
        threads: how many each run has.
        data: folder of data sets, or None.
    """

    run_one: RunOne
    device: str
    threads: int
    data: str | None


def perform(job: Job, run: Run, *, checkpoint: Path, progress: Tell, writer: Any) -> Line:
    """Carry out a run and return the line to record."""
    import torch

    if torch.get_num_threads() != job.threads:
        torch.set_num_threads(job.threads)
    origin = provenance(job.device, job.threads)  # before, since sources may change meanwhile
    outcome = job.run_one(
        run,
        device=job.device,
        data=job.data,
        checkpoint=checkpoint,
        progress=_now_and_then(progress),
        writer=writer,
    )
    if not isinstance(outcome, dict) or outcome.get("status") not in RECORDED:
        raise ValueError(f"the outcome of a run must have a status, {' or '.join(RECORDED)}")
    known = {"key": run.key, "run": as_dict(run)}
    return known | outcome | known | origin


def ended(line: Line) -> tuple[Kind, str]:
    """How a run that is recorded ended, and the reason if there is one."""
    return "diverged" if line["status"] == "diverged" else "finished", line.get("reason") or ""


def _now_and_then(tell: Tell) -> Tell:
    """Pass on a report only if the last one is some time ago."""
    last = -OFTEN

    def progress(fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= OFTEN:
            last = time.monotonic()
            tell(float(fraction))

    return progress


def sentence(error: BaseException) -> str:
    """What went wrong, in one line."""
    said = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {said[:500]}" if said else kind


def require_tensorboard() -> None:
    """Say so if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            'tensorboard is not installed; pip install "neuvar[tensorboard]" brings it'
        )


def summary_writer(folder: Path) -> Any:
    """TensorBoard's writer."""
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))


class Todo:
    """Runs that nobody carries out yet, some of them to be asked for only later."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = deque((0.0, run) for run in runs)

    def __len__(self) -> int:
        return len(self._runs)

    def next(self) -> Run | None:
        """Take out the first run whose time has come, if there is one."""
        for place, (when, run) in enumerate(self._runs):
            if when <= time.monotonic():
                del self._runs[place]
                return run
        return None

    def again(self, run: Run, *, later: float = 0.0) -> None:
        """Put a run back, to be asked for after so many seconds."""
        self._runs.append((time.monotonic() + later, run))
