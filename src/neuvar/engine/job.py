"""What both engines share: the specification of a sweep, its events, and how one run is run."""

from __future__ import annotations

import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from neuvar import _validate
from neuvar.engine.provenance import provenance
from neuvar.engine.results_file import Line
from neuvar.experiments.experiment import ExperimentFile
from neuvar.experiments.run_spec import Run, as_dict

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
Kind = Literal["started", "progress", "finished", "diverged", "failed", "taken"]
PROGRESS_SECONDS = 0.2
"""Minimum time between two progress reports."""
RETRY_SECONDS = 0.5
"""Time until a run that another process is running is tried again."""


@dataclass(frozen=True)
class SweepSpec:
    """How the runs of a sweep are run. Every process of the sweep gets a copy.

    Attributes:
        engine: "local" for processes on this machine, "ray" for a Ray cluster. There each run has
            one core, or one GPU. The machines need neuvar but no shared disk: each keeps
            checkpoints in its temporary folder, and results are sent to the calling machine.
        workers: number of runs at a time; 0 for one per core, or per GPU. The cores are divided
            among them as threads.
        device: "cpu", "mps", "cuda" for all GPUs, or "cuda:1" for one.
        data: folder of data sets; see :func:`neuvar.data.load`.
        address: address of the Ray cluster; None for the one that ``RAY_ADDRESS`` names, or else
            for a new one on this machine that ends with the sweep.
        tensorboard: folder for TensorBoard's files, with one folder per run.
        files: experiment files that each process loads before its first run.
        run_one: the function that trains, if not :func:`neuvar.experiments.run_one`; other
            processes must be able to import it.
        threads: threads per run; set by :func:`sweep`.
    """

    engine: str = "local"
    workers: int = 0
    device: str = "cpu"
    data: str | Path | None = None
    address: str | None = None
    tensorboard: str | Path | None = None
    files: tuple[ExperimentFile, ...] = ()
    run_one: Callable[..., Any] | None = None
    threads: int = 1

    def check(self) -> None:
        """Validate the fields."""
        _validate.one_of("engine", self.engine, ENGINES)
        _validate.integer("workers", self.workers, low=0)
        if self.engine == "ray":
            if self.device not in ("cpu", "cuda"):
                raise ValueError(f"device must be cpu or cuda with Ray, got {self.device!r}")
            return
        if self.address is not None:
            raise ValueError(f"address needs engine ray, got {self.address!r} and {self.engine}")
        check_device(self.device)
        if self.data is not None and not Path(self.data).is_dir():
            raise ValueError(f"data must be a folder, got {str(self.data)!r}")


def check_device(device: str) -> str:
    """Return the device if this machine has it."""
    kind, _, index = str(device).partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", str(device)):
        raise ValueError(f"device must be cpu, cuda, cuda:N or mps, got {device!r}")
    if kind != "cpu":
        import torch

        backend = torch.cuda if kind == "cuda" else torch.backends.mps
        count = int(backend.is_available())
        if count and kind == "cuda":
            count = torch.cuda.device_count()
        if int(index or 0) >= count:
            raise ValueError(
                f"device {device} is not available: PyTorch finds {count} {kind} devices here"
            )
    return device


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: "started", "progress", "finished", "diverged", "failed", or "taken" if another
            process is running it; the sweep waits for the result.
        key: key of the run.
        run: the run.
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
    """The outcome of a sweep, by the keys of its runs.

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
    """Keeps the last event of each run, and passes events on to ``watch``."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._last: dict[str, Event] = {}

    def report(self, kind: Kind, run: Run, fraction: float = 0.0, message: str = "") -> None:
        """Report an event; "taken" is reported once."""
        last = self._last.get(run.key)
        if kind == "taken" and last is not None and last.kind == "taken":
            return
        self._last[run.key] = event = Event(kind, run.key, run, fraction, message)
        if self._watch is not None:
            self._watch(event)

    def report_recorded(self, run: Run, line: Line) -> None:
        """Report that a run is in the results file."""
        kind: Kind = "diverged" if line["status"] == "diverged" else "finished"
        self.report(kind, run, 1.0, line.get("reason") or "")

    def is_running(self, run: Run) -> bool:
        """Whether a run has started and not ended."""
        last = self._last.get(run.key)
        return last is not None and last.kind in ("started", "progress")

    def summary(self, skipped: Sequence[str]) -> Summary:
        """The outcome of the sweep."""
        finished, diverged, failed = (
            {key: last.message for key, last in self._last.items() if last.kind == kind}
            for kind in ("finished", "diverged", "failed")
        )
        return Summary(tuple(finished), tuple(skipped), diverged, failed)


class RunQueue:
    """Runs that wait, some of them until a later time."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._waiting = deque((0.0, run) for run in runs)

    def __len__(self) -> int:
        return len(self._waiting)

    def pop(self) -> Run | None:
        """Remove and return the first run that is due, if any."""
        for index, (due, run) in enumerate(self._waiting):
            if due <= time.monotonic():
                del self._waiting[index]
                return run
        return None

    def push(self, run: Run, *, delay: float = 0.0) -> None:
        """Add a run that is due after a delay in seconds."""
        self._waiting.append((time.monotonic() + delay, run))


def run_job(
    spec: SweepSpec,
    run: Run,
    *,
    checkpoint: Path,
    progress: Callable[[float], None],
    writer: Any,
) -> Line:
    """Run one run in this process and return the line to record."""
    import torch

    from neuvar.experiments.runner import run_one

    for file in spec.files:
        file.load()
    if torch.get_num_threads() != spec.threads:
        torch.set_num_threads(spec.threads)
    origin = provenance(spec.device, spec.threads)  # before the run: sources may change meanwhile
    last_report = -PROGRESS_SECONDS

    def throttled(fraction: float) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= PROGRESS_SECONDS:
            last_report = time.monotonic()
            progress(float(fraction))

    outcome = (spec.run_one or run_one)(
        run,
        device=spec.device,
        data=spec.data,
        checkpoint=checkpoint,
        progress=throttled,
        writer=writer,
    )
    if not isinstance(outcome, dict) or outcome.get("status") not in ("finished", "diverged"):
        raise ValueError("the outcome of a run must have a status, finished or diverged")
    identity = {"key": run.key, "run": as_dict(run)}
    return identity | outcome | identity | origin


def error_message(error: BaseException) -> str:
    """An error in one line."""
    text, name = " ".join(str(error).split()), type(error).__name__
    return f"{name}: {text[:500]}" if text else name


def summary_writer(folder: Path) -> Any:
    """TensorBoard's writer."""
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
