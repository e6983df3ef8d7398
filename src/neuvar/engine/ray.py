"""Runs on a Ray cluster, whose machines may come and go.

The calling process writes the results, so the machines need no shared disk. If a machine dies, Ray
starts its runs on others. A run that finished twice is recorded once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuvar.engine.job import (
    PROGRESS_SECONDS,
    RETRY_SECONDS,
    SweepSpec,
    Tally,
    error_message,
    run_job,
    summary_writer,
)
from neuvar.engine.results_file import Line, Results, RunLock, lock_run
from neuvar.experiments.run_spec import Run

RETRIES = 5
"""How often Ray restarts a run whose process or machine died."""
CONNECT_SECONDS = 10.0
BOARD_SECONDS = 60.0
"""How long to wait for the message board, which starts slowly on a busy machine."""


class MessageBoard:
    """A Ray actor that collects messages of runs on other machines."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, str, Any]] = []

    def put(self, *message: Any) -> None:
        """Add a message: key of the run, kind, content. Without arguments, no-op."""
        if message:
            self._messages.append(message)

    def take(self) -> list[tuple[str, str, Any]]:
        """Remove and return all messages."""
        messages, self._messages = self._messages, []
        return messages


class RayPool:
    """A sweep on the machines of a connected cluster; ``ray`` is the module."""

    def __init__(self, ray: Any, spec: SweepSpec, results: Results, tally: Tally) -> None:
        self._ray, self._spec, self._results, self._tally = ray, spec, results, tally
        gpus = int(spec.device == "cuda")
        self._resource = "GPU" if gpus else "CPU"
        if not ray.cluster_resources().get(self._resource):
            raise ValueError(
                f"device is {spec.device!r}, but the Ray cluster has no {self._resource}"
            )
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_run_on_node)
        # On the driver's machine: if that dies, nothing is left to read the messages.
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(num_cpus=0)(MessageBoard).options(scheduling_strategy=here)
        self._board = board.remote()
        self._request: Any = None
        self._waiting: dict[Run, float] = {}  # with the time when each is due
        self._tasks: dict[Any, tuple[Run, RunLock]] = {}
        self._writers: dict[str, Any] = {}

    def run(self, runs: list[Run]) -> None:
        """Run all runs; returns when each is recorded or has failed."""
        self._waiting = dict.fromkeys(runs, 0.0)
        try:
            while self._waiting or self._tasks:
                self._submit()
                done: list[Any] = []
                if self._tasks:
                    done, _ = self._ray.wait(
                        list(self._tasks), num_returns=len(self._tasks), timeout=RETRY_SECONDS
                    )
                else:
                    time.sleep(RETRY_SECONDS)
                self._report_messages()
                for task in done:
                    self._collect(task)
        finally:
            for task, (_, run_lock) in self._tasks.items():
                self._ray.cancel(task, force=True)
                run_lock.release()
            for writer in self._writers.values():
                writer.close()

    def _submit(self) -> None:
        """Submit runs that no other process is running, about twice as many as fit."""
        slots = int(self._ray.cluster_resources().get(self._resource, 0))
        most = self._spec.workers or max(1, 2 * slots)
        for run in [run for run, due in self._waiting.items() if due <= time.monotonic()]:
            if len(self._tasks) >= most:
                return
            run_lock = lock_run(self._results.checkpoints, run.key)
            if run_lock is None:
                self._waiting[run] = time.monotonic() + RETRY_SECONDS
                self._tally.report("taken", run)
                continue
            del self._waiting[run]
            if (line := self._results.recorded(run.key)) is not None:
                run_lock.release(finished=True)
                self._tally.report_recorded(run, line)
            else:
                # Name of the folder for checkpoints on the other machines.
                name = f"{platform.node()}:{self._results.path}".encode()
                folder = hashlib.sha256(name).hexdigest()[:16]
                task = self._task.remote(self._spec, run, self._board, folder)
                self._tasks[task] = run, run_lock

    def _collect(self, task: Any) -> None:
        """Record a run that has ended."""
        run, run_lock = self._tasks[task]
        try:
            result = self._ray.get(task)
            if isinstance(result, dict):
                self._results.add(result)
        except Exception as error:  # noqa: BLE001 - one failed run must not end the others
            result = error_message(getattr(error, "cause", None) or error)
        del self._tasks[task]
        if not self._is_running(run):
            self._tally.report("started", run)
        run_lock.release(finished=isinstance(result, dict))
        if isinstance(result, dict):
            self._tally.report_recorded(run, result)
        else:
            self._tally.report("failed", run, 1.0, result)
        if (writer := self._writers.pop(run.key, None)) is not None:
            writer.close()

    def _is_running(self, run: Run) -> bool:
        """Whether a run has started and not ended, as far as reported."""
        last = self._tally.last.get(run.key)
        return last is not None and last.kind in ("started", "progress")

    def _report_messages(self) -> None:
        """Report what the board has collected, each run's events in order."""
        if self._request is None:
            self._request = self._board.take.remote()
        messages = []
        try:
            messages = self._ray.get(self._request, timeout=BOARD_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return  # keep the request: its answer is the only copy of these messages
        except self._ray.exceptions.RayError:
            pass  # the board died; no result depends on it
        self._request = None
        runs = {run.key: run for run, _ in self._tasks.values()}
        for key, kind, content in messages:
            run = runs.get(key)
            if run is None:
                continue
            if kind == "scalar":
                if key not in self._writers:
                    self._writers[key] = summary_writer(Path(str(self._spec.tensorboard)) / key)
                self._writers[key].add_scalar(*content)
                continue
            # A "started" message is lost if the machine could not reach the board.
            running = self._is_running(run)
            if kind == "started" or not running:
                why = "again: its process or its machine died" if running else ""
                self._tally.report("started", run, 0.0, why)
            if kind == "progress":
                self._tally.report("progress", run, content)


def run_on_ray(spec: SweepSpec, runs: list[Run], results: Results, tally: Tally) -> None:
    """Run runs on a Ray cluster: the connected one, that of the address, or a new local one."""
    ray = require_ray()
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            try:
                ray.init(
                    address=spec.address,
                    include_dashboard=False if spec.address is None else None,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                raise ConnectionError(
                    f"could not join the Ray cluster at address {spec.address!r}: {why[:500]}"
                ) from None
            stack.callback(ray.shutdown)
        RayPool(ray, spec, results, tally).run(runs)


def require_ray() -> Any:
    """The module Ray, without usage statistics and without output of its own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Otherwise it prints the log of a machine that died.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ModuleNotFoundError(
            'Ray is not installed; install it with pip install "neuvar[ray]"'
        ) from None


def check_address(address: str | None) -> None:
    """Raise at once if nothing answers at an address; Ray itself takes minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at address {address!r}: {error}") from None


@dataclass(frozen=True)
class BoardWriter:
    """Has TensorBoard's ``add_scalar`` and sends scalars to the message board."""

    board: Any
    key: str

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Send one scalar."""
        self.board.put.remote(self.key, "scalar", (tag, float(value), int(step)))


def _run_on_node(spec: SweepSpec, run: Run, board: Any, folder: str) -> Line | str:
    """Run a run on a machine of the cluster; returns its line, or why it failed."""
    top = Path(tempfile.gettempdir()) / f"neuvar-{os.getuid()}"
    tally = Tally(
        lambda event: board.put.remote(run.key, event.kind, event.fraction), PROGRESS_SECONDS
    )
    writer = BoardWriter(board, run.key) if spec.tensorboard is not None else None
    run_lock = None
    result: Line | str
    try:
        top.mkdir(mode=0o700, exist_ok=True)
        if top.stat().st_uid != os.getuid():
            raise PermissionError(f"{top} belongs to another user")
        # A process that is about to be killed may still hold the lock.
        while (run_lock := lock_run(top / folder, run.key)) is None:
            time.sleep(RETRY_SECONDS)
        result = run_job(spec, run, run_lock.checkpoint, tally, writer)
    except Exception as error:  # noqa: BLE001 - reported; the other runs continue
        result = error_message(error, spec.files)
    if run_lock is not None:
        run_lock.release(finished=isinstance(result, dict))
    with contextlib.suppress(OSError):  # not empty: other runs resume from it
        (top / folder).rmdir()
    # Messages arrive in order: when this one has arrived, all have.
    ray = require_ray()
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(board.put.remote(), timeout=BOARD_SECONDS)
    return result
