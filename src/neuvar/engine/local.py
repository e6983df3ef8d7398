"""Runs on this machine, in worker processes that may be killed at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing import connection, resource_tracker
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
from neuvar.engine.results_file import Results, claim
from neuvar.experiments.run_spec import Run

RETRIES = 2
"""How often a run is started again after its process was killed."""
EXIT_SECONDS = 10.0
"""How long an idle process may take to exit before it is killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Numerical libraries read these once, when they are loaded."""


@dataclass
class Worker:
    """A process that runs one run after another, and the run that it is running."""

    process: Any
    pipe: Any
    device: str
    run: Run | None = None


@dataclass
class LocalPool:
    """Worker processes, one per entry of ``devices``.

    A worker records results itself, so nothing is lost if this process is killed. Workers exit
    with this process. If a worker is killed, another one resumes its run, at most RETRIES times.
    """

    spec: SweepSpec
    results: Results
    devices: list[str]
    tally: Tally
    _workers: list[Worker] = field(default_factory=list)
    _waiting: dict[Run, float] = field(default_factory=dict)  # with the time when each is due
    _deaths: dict[str, list[str]] = field(default_factory=dict)

    def run(self, runs: list[Run]) -> None:
        """Run all runs; returns when each is recorded or has failed."""
        self._waiting = dict.fromkeys(runs, 0.0)
        try:
            while self._waiting or any(worker.run for worker in self._workers):
                self._assign()
                self._listen()
            for worker in self._workers:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
            for worker in self._workers:
                worker.process.join(EXIT_SECONDS)
        finally:
            # After an interrupt the workers are still running; their checkpoints stay.
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join()
                worker.pipe.close()

    def _assign(self) -> None:
        """Give runs that are due to idle workers, and start workers while devices are free."""
        for run in [run for run, due in self._waiting.items() if due <= time.monotonic()]:
            worker = next((worker for worker in self._workers if worker.run is None), None)
            if worker is None and len(self._workers) == len(self.devices):
                return
            worker = worker or self._start()
            worker.run = run
            del self._waiting[run]
            with contextlib.suppress(OSError):  # it was killed; _listen removes it
                worker.pipe.send(run)

    def _start(self) -> Worker:
        """Start a worker on a free device."""
        free = list(self.devices)
        for worker in self._workers:
            free.remove(worker.device)
        context = mp.get_context("spawn")  # a fork of a process with torch's threads may hang
        here, there = context.Pipe()
        spec = replace(self.spec, device=free[0])
        process = context.Process(target=_serve, args=(spec, self.results, there), name="neuvar")
        worker = Worker(process, here, spec.device)
        resource_tracker.ensure_running()  # otherwise starting it would unblock SIGINT
        before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
        # Ctrl-C reaches all processes of a terminal; only the parent handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(spec.threads)))
            process.start()
            self._workers.append(worker)
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        there.close()  # otherwise recv() would not end when the process does
        return worker

    def _listen(self) -> None:
        """Wait until a worker sends a message or exits, or until a waiting run is due."""
        workers = {worker.pipe: worker for worker in self._workers}
        timeout = RETRY_SECONDS if self._waiting else None
        for pipe in connection.wait(list(workers), timeout=timeout):
            worker = workers[pipe]
            try:
                kind, fraction, message = worker.pipe.recv()
            except (EOFError, OSError):
                self._remove_dead(worker)
                continue
            run = worker.run
            assert run is not None
            if kind == "started" and run.key in self._deaths:
                message = f"again: {self._deaths[run.key][-1]}"
            if kind not in ("started", "progress"):
                worker.run = None
            if kind == "taken":
                self._waiting[run] = time.monotonic() + RETRY_SECONDS
            self.tally.report(kind, run, fraction, message)

    def _remove_dead(self, worker: Worker) -> None:
        """Remove a worker that died; its run waits again, up to RETRIES times."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        run = worker.run
        if run is None:
            return
        deaths = self._deaths.setdefault(run.key, [])
        code = worker.process.exitcode
        killed = "its process was killed, perhaps because memory ran out"
        deaths.append(killed if code == -signal.SIGKILL else f"its process ended with code {code}")
        line = self.results.recorded(run.key)
        if line is not None:  # recorded just before it died
            self.results.remove_checkpoints([run.key])
            self.tally.report_recorded(run, line)
        elif len(deaths) > RETRIES:
            self.tally.report("failed", run, 1.0, f"{deaths[-1]}, {len(deaths)} times")
        else:
            self._waiting[run] = 0.0


def _serve(spec: SweepSpec, results: Results, pipe: Any) -> None:
    """The main function of a worker: run what the pipe sends, until it sends None."""
    import torch  # noqa: F401 - now, so that the time of the first run does not include it

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (run := pipe.recv()) is not None:
            tally = Tally(
                lambda event: pipe.send((event.kind, event.fraction, event.message)),
                PROGRESS_SECONDS,
            )
            _run_claimed(spec, results, run, tally)


def _exit_with_parent() -> None:
    """Exit when the parent process does."""
    parent = mp.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid and not connection.wait([parent.sentinel], timeout=1):
        pass
    os._exit(1)


def _run_claimed(spec: SweepSpec, results: Results, run: Run, tally: Tally) -> None:
    """Run a run and record it, unless another process is running it or it is recorded."""
    own = None
    try:
        own = claim(results.checkpoints, run.key)
        if own is None:
            tally.report("taken", run)
            return
        line = results.recorded(run.key)
        if line is None:
            folder = spec.tensorboard and Path(spec.tensorboard) / run.key
            with summary_writer(folder) if folder else contextlib.nullcontext() as writer:
                line = run_job(spec, run, own.checkpoint, tally, writer)
            results.add(line)
    except Exception as error:  # noqa: BLE001 - one failed run must not end the others
        if own is not None:
            own.release()
        tally.report("failed", run, 1.0, error_message(error, spec.files))
        return
    own.release(finished=True)
    tally.report_recorded(run, line)
