"""Sweeps: many runs, each recorded once, in worker processes that may be killed at any moment."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from neuvar.engine.job import (
    PROGRESS_SECONDS,
    RETRY_SECONDS,
    Summary,
    SweepSpec,
    Tally,
    Watch,
    cores,
    error_message,
    run_job,
    summary_writer,
)
from neuvar.engine.ray import check_address, require_ray, run_on_ray
from neuvar.engine.results_file import Results, lock_run
from neuvar.experiments.run_spec import RUN_KINDS, Run

RETRIES = 2
"""How often a run is started again after its process was killed."""
EXIT_SECONDS = 10.0
"""How long an idle process may take to exit before it is killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Numerical libraries read these once, when they are loaded."""


def sweep(
    runs: Iterable[Run],
    results: Results | str | Path,
    spec: SweepSpec | None = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Summary:
    """Run the runs that are not recorded yet, several at a time, and record each once.

    A sweep may be interrupted or killed at any moment. Recorded results stay, and the next call
    resumes from the checkpoints in the folder ``.checkpoints`` beside the results file. Several
    sweeps may share one file: they share the runs, and each returns when all of its own are
    recorded.

    A run that diverges is recorded as diverged. A run that raises an exception is not recorded; it
    is in the summary, and the other runs continue.

    Args:
        runs: the runs; those with the same key are run once.
        results: the results file.
        spec: how they are run.
        watch: called in this process for each :class:`Event`.
        options: fields of :class:`SweepSpec`, such as ``workers=2``, that replace those of spec.

    Raises:
        ValueError: if an argument is not valid; nothing has been started then.
        OSError: if results cannot be written or the cluster cannot be reached.
        KeyboardInterrupt: after all processes have been stopped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep([], Path(folder) / "smoke.jsonl", workers=2)
    Summary(finished=(), skipped=(), diverged={}, failed={})
    """
    spec = replace(spec or SweepSpec(), **options)
    unique: dict[str, Run] = {}
    for run in runs:
        if type(run) not in RUN_KINDS.values():
            raise ValueError(f"runs must be Training or Tasks, got {run!r}")
        unique.setdefault(run.key, run)
    spec.check()
    if spec.engine == "ray":
        require_ray()
        check_address(spec.address)
    if spec.tensorboard is not None:
        spec = replace(spec, tensorboard=_tensorboard_folder(spec.tensorboard))
    results = Results(Path(results.path if isinstance(results, Results) else results).absolute())
    results.check()
    recorded = results.lines()
    skipped = tuple(key for key in unique if key in recorded)
    missing = [run for key, run in unique.items() if key not in recorded]
    results.remove_checkpoints(skipped)  # the process that recorded them may have been killed
    tally = Tally(watch)
    try:
        if missing and spec.engine == "ray":
            run_on_ray(spec, missing, results, tally)
        elif missing:
            # The number of threads changes the rounding of sums. It must not depend on how many
            # runs are recorded already, so it is computed from all runs.
            devices = worker_devices(spec, len(unique))
            data = None if spec.data is None else str(Path(spec.data).absolute())
            local = replace(spec, threads=max(1, cores() // len(devices)), data=data)
            LocalPool(local, results, devices, tally).run(missing)
    finally:
        results.remove_checkpoints(skipped)  # an orphaned worker may have held one until now
        for run in missing:  # workers that were stopped leave their lock files
            left = (results.checkpoints / f"{run.key}.lock").exists()
            if left and (run_lock := lock_run(results.checkpoints, run.key)):
                run_lock.release()
        with contextlib.suppress(OSError):  # not empty: other runs resume from it
            results.checkpoints.rmdir()
    finished, diverged, failed = (
        {key: last.message for key, last in tally.last.items() if last.kind == kind}
        for kind in ("finished", "diverged", "failed")
    )
    return Summary(tuple(finished), skipped, diverged, failed)


def _tensorboard_folder(folder: str | Path) -> Path:
    """Make the folder for TensorBoard's files."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            'tensorboard is not installed; install it with pip install "neuvar[tensorboard]"'
        )
    folder = Path(folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"tensorboard cannot use {folder}: {error.strerror}") from None
    return folder


def worker_devices(spec: SweepSpec, runs: int) -> list[str]:
    """The device of each worker process, for this number of runs."""
    count, names = cores(), [spec.device]
    if spec.device != "cpu":
        import torch

        count = torch.cuda.device_count() if spec.device == "cuda" else 1
        names = [f"cuda:{n}" for n in range(count)] if spec.device == "cuda" and count else names
    workers = max(1, min(spec.workers or count, runs))
    return [names[number % len(names)] for number in range(workers)]


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
            _run_locked(spec, results, run, tally)


def _exit_with_parent() -> None:
    """Exit when the parent process does."""
    parent = mp.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid and not connection.wait([parent.sentinel], timeout=1):
        pass
    os._exit(1)


def _run_locked(spec: SweepSpec, results: Results, run: Run, tally: Tally) -> None:
    """Run a run and record it, unless another process is running it or it is recorded."""
    run_lock = None
    try:
        run_lock = lock_run(results.checkpoints, run.key)
        if run_lock is None:
            tally.report("taken", run)
            return
        line = results.recorded(run.key)
        if line is None:
            folder = spec.tensorboard and Path(spec.tensorboard) / run.key
            with summary_writer(folder) if folder else contextlib.nullcontext() as writer:
                line = run_job(spec, run, run_lock.checkpoint, tally, writer)
            results.add(line)
    except Exception as error:  # noqa: BLE001 - one failed run must not end the others
        if run_lock is not None:
            run_lock.release()
        tally.report("failed", run, 1.0, error_message(error, spec.files))
        return
    run_lock.release(finished=True)
    tally.report_recorded(run, line)
