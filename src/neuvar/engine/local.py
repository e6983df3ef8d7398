"""Runs on this machine, in processes that share its cores and may be killed at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from neuvar.engine.job import (
    RETRY_SECONDS,
    RunQueue,
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


class LocalPool:
    """Worker processes, one per entry of ``devices``.

    A worker records results itself, so nothing is lost if this process is killed. Workers exit
    with this process. If a worker is killed, another one resumes its run, at most RETRIES times.
    """

    def __init__(self, spec: SweepSpec, results: Results, devices: list[str], tally: Tally) -> None:
        self._spec, self._results, self._tally = spec, results, tally
        self._free_devices = list(reversed(devices))
        self._workers: list[Worker] = []
        self._deaths: dict[str, list[str]] = {}

    def run(self, runs: list[Run]) -> None:
        """Run all runs; returns when each is recorded or has failed."""
        queue = RunQueue(runs)
        try:
            while queue or any(worker.run for worker in self._workers):
                self._assign(queue)
                self._listen(queue)
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

    def _assign(self, queue: RunQueue) -> None:
        """Give runs to idle workers, and start workers while devices are free."""
        while True:
            worker = next((w for w in self._workers if w.run is None), None)
            run = queue.pop() if worker or self._free_devices else None
            if run is None:
                return
            worker = worker or self._start(self._free_devices.pop())
            worker.run = run
            with contextlib.suppress(OSError):  # it was killed; _listen finds out
                worker.pipe.send(run)

    def _start(self, device: str) -> Worker:
        context = mp.get_context("spawn")  # a fork of a process with torch's threads may hang
        here, there = context.Pipe()
        spec = replace(self._spec, device=device)
        process = context.Process(target=_serve, args=(spec, self._results, there), name="neuvar")
        resource_tracker.ensure_running()  # otherwise starting it would unblock SIGINT
        with _child_settings(spec.threads):
            process.start()
            worker = Worker(process, here, device)
            self._workers.append(worker)
        there.close()  # so that reading ends when the process does
        return worker

    def _listen(self, queue: RunQueue) -> None:
        """Wait until a worker sends a message or exits, or until a waiting run is due."""
        workers = {worker.pipe: worker for worker in self._workers}
        for pipe in connection.wait(list(workers), timeout=RETRY_SECONDS if queue else None):
            worker = workers[pipe]
            try:
                kind, fraction, message = worker.pipe.recv()
            except (EOFError, OSError):
                self._replace_dead(worker, queue)
                continue
            run = worker.run
            assert run is not None
            if kind == "started" and run.key in self._deaths:
                message = f"again: {self._deaths[run.key][-1]}"
            if kind not in ("started", "progress"):
                worker.run = None
            if kind == "taken":
                queue.push(run, delay=RETRY_SECONDS)
            self._tally.report(kind, run, fraction, message)

    def _replace_dead(self, worker: Worker, queue: RunQueue) -> None:
        """Free the device of a worker that died, and queue its run again, up to RETRIES times."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        self._free_devices.append(worker.device)
        run = worker.run
        if run is None:
            return
        deaths = self._deaths.setdefault(run.key, [])
        code = worker.process.exitcode
        killed = "its process was killed, perhaps because memory ran out"
        deaths.append(killed if code == -signal.SIGKILL else f"its process ended with code {code}")
        line = self._results.recorded(run.key)
        if line is not None:  # recorded just before it died
            self._results.remove_checkpoints([run.key])
            self._tally.report_recorded(run, line)
        elif len(deaths) > RETRIES:
            self._tally.report("failed", run, 1.0, f"{deaths[-1]}, {len(deaths)} times")
        else:
            queue.push(run)


@contextlib.contextmanager
def _child_settings(threads: int) -> Iterator[None]:
    """Set the environment of a process that is started here, and block its SIGINT.

    Ctrl-C reaches all processes of a terminal; only the parent handles it.
    """
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name in THREAD_VARIABLES:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(spec: SweepSpec, results: Results, pipe: Any) -> None:
    """The main function of a worker: run what the pipe sends, until it sends None."""
    import torch  # noqa: F401 - now, so that the time of the first run does not include it

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (run := pipe.recv()) is not None:
            tally = Tally(lambda event: pipe.send((event.kind, event.fraction, event.message)))
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
    claimed = None
    try:
        claimed = claim(results.checkpoints, run.key)
        if claimed is None:
            tally.report("taken", run)
            return
        line = results.recorded(run.key)
        if line is None:
            tally.report("started", run)
            with contextlib.ExitStack() as stack:
                writer = None
                if spec.tensorboard is not None:
                    writer = summary_writer(Path(spec.tensorboard) / run.key)
                    stack.callback(writer.close)
                line = run_job(
                    spec,
                    run,
                    checkpoint=claimed.checkpoint,
                    progress=lambda fraction: tally.report("progress", run, fraction),
                    writer=writer,
                )
            results.add(line)
    except Exception as error:  # noqa: BLE001 - one failed run must not end the others
        if claimed is not None:
            claimed.release()
        tally.report("failed", run, 1.0, error_message(error))
        return
    claimed.finish()
    tally.report_recorded(run, line)
