"""What both engines share: the specification of a sweep, its events, and running one run."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from neuvar import _validate
from neuvar.engine.results_file import Line
from neuvar.experiments.experiment import ExperimentFile
from neuvar.experiments.run_spec import Run, as_dict

ENGINES = ("local", "ray")
Kind = Literal["started", "progress", "finished", "diverged", "failed", "taken"]
PROGRESS_SECONDS = 0.2
"""Minimum time between two progress events of a run."""
RETRY_SECONDS = 0.5
"""How long to wait before trying again to lock a run that another process is running."""
GIT_SECONDS = 20.0
SOURCES = Path(__file__).parents[1]


@dataclass(frozen=True)
class SweepSpec:
    """Options of a sweep. Every process of the sweep gets a copy.

    Attributes:
        engine: "local" for processes on this machine, "ray" for a Ray cluster. There each run has
            one core, or one GPU. The machines need neuvar but no shared disk: each keeps
            checkpoints in its temporary folder, and results are sent to the calling machine.
        workers: number of runs at a time; 0 for one per core, or per GPU. The cores are divided
            among them as threads.
        device: "cpu", "mps", "cuda" for all GPUs, or "cuda:1" for one.
        data: folder of datasets; see :func:`neuvar.data.load`.
        address: address of the Ray cluster; by default ``RAY_ADDRESS``. If that is not set, a
            cluster is started on this machine and stopped after the sweep.
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

        mps = int(torch.backends.mps.is_available())
        count = torch.cuda.device_count() if kind == "cuda" else mps
        if int(index or 0) >= count:
            raise ValueError(
                f"device {device} is not available: PyTorch finds {count} {kind} devices here"
            )
    return device


@dataclass(frozen=True)
class Event:
    """A change in the state of a run.

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
        finished: recorded as finished since the sweep began, by this or another process.
        skipped: recorded before the sweep began.
        diverged: recorded as diverged since the sweep began, with the reason.
        failed: not recorded, with the reason.
    """

    finished: tuple[str, ...]
    skipped: tuple[str, ...]
    diverged: dict[str, str] = field(hash=False)
    failed: dict[str, str] = field(hash=False)


@dataclass
class Tally:
    """Keeps the last event of each run, and passes events on to ``watch``.

    Attributes:
        watch: called for each event.
        interval: minimum time in seconds between two progress events.
        last: the last event of each run, by its key.
    """

    watch: Watch | None
    interval: float = 0.0
    last: dict[str, Event] = field(default_factory=dict)
    _next_progress: float = 0.0

    def report(self, kind: Kind, run: Run, fraction: float = 0.0, message: str = "") -> None:
        """Report an event; "taken" is reported once."""
        if kind == "progress":
            if time.monotonic() < self._next_progress:
                return
            self._next_progress = time.monotonic() + self.interval
        last = self.last.get(run.key)
        if kind == "taken" and last is not None and last.kind == "taken":
            return
        self.last[run.key] = event = Event(kind, run.key, run, fraction, message)
        if self.watch is not None:
            self.watch(event)

    def report_recorded(self, run: Run, line: Line) -> None:
        """Report that a run is in the results file."""
        kind: Kind = "diverged" if line["status"] == "diverged" else "finished"
        self.report(kind, run, 1.0, line.get("reason") or "")


def run_job(spec: SweepSpec, run: Run, checkpoint: Path, tally: Tally, writer: Any) -> Line:
    """Run one run in this process and return the line to record."""
    import torch

    from neuvar.experiments.runner import run_one

    tally.report("started", run)
    for file in spec.files:
        file.load()
    if torch.get_num_threads() != spec.threads:
        torch.set_num_threads(spec.threads)
    # Before the run, because the sources may change during it.
    origin = provenance(spec.device, spec.threads)
    outcome = (spec.run_one or run_one)(
        run,
        device=spec.device,
        data=spec.data,
        checkpoint=checkpoint,
        progress=lambda fraction: tally.report("progress", run, float(fraction)),
        writer=writer,
    )
    if not isinstance(outcome, dict) or outcome.get("status") not in ("finished", "diverged"):
        raise ValueError("the outcome of a run must have a status, finished or diverged")
    identity = {"key": run.key, "run": as_dict(run)}
    return identity | outcome | identity | origin


def error_message(error: BaseException, files: Sequence[ExperimentFile] = ()) -> str:
    """An error in one line, with the line of the user's experiment file that led to it."""
    text, name = " ".join(str(error).split()), type(error).__name__
    message = f"{name}: {text[:500]}" if text else name
    places = [place for file in files if (place := file.place_of(error))]
    return ": ".join([*places, message])


def summary_writer(folder: Path) -> Any:
    """TensorBoard's writer."""
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))


def provenance(device: str, threads: int) -> dict[str, Any]:
    """Where a result comes from: versions, commit, machine.

    >>> sorted(provenance("cpu", 1))
    ['commit', 'device', 'machine', 'threads', 'versions', 'when']
    """
    import numpy as np
    import torch

    if torch.device(device).type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return {
        "versions": {
            "python": platform.python_version(),
            "neuvar": importlib.metadata.version("neuvar"),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        "commit": commit(SOURCES),
        "machine": {
            "processor": model[1] if model else platform.processor() or platform.machine(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "device": device,
        "threads": threads,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def commit(sources: Path) -> str | None:
    """The commit of the sources, with "+" if they have changes; None outside a repository."""
    answers = []
    # First check that git tracks the sources: the repository around them may be another project's.
    for words in (
        ["ls-files", "--error-unmatch", "__init__.py"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", "."],
    ):
        try:
            # Without optional locks git only reads.
            done = subprocess.run(  # noqa: S603 - the words are our own
                [shutil.which("git") or "git", "--no-optional-locks", "-C", str(sources), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=GIT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(done.stdout.strip())
    _, head, changes = answers
    return head + "+" * bool(changes)
