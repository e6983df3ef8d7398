"""Runs on this machine, in processes that share its cores and may be killed at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from neuvar.engine.events import Kind, Tally
from neuvar.engine.locks import claim
from neuvar.engine.results import Results
from neuvar.engine.work import LATER, Job, Todo, ended, perform, sentence, summary_writer
from neuvar.experiments.run_spec import Run

RETRIES = 2
"""How often a run is begun again whose process was killed."""
PATIENCE = 10.0
"""Seconds that a process has to end by itself when there is nothing left to do."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Read by numerical libraries once, when they are loaded."""


@dataclass
class Worker:
    """A process that carries out one run after another.

    Attributes:
        process: the process.
        pipe: to and from it.
        device: where it carries them out.
        run: the run that it is at work on, if any.
    """

    process: Any
    pipe: Any
    device: str
    run: Run | None = None


class Crew:
    """Processes that carry out runs, one for each device; the same device may be named repeatedly.

    A process records the result itself, so nothing is lost if this one is killed. It ends with
    this one, and if it is killed its run is begun again by another one, a few times.
    """

    def __init__(
        self,
        job: Job,
        results: Results,
        devices: list[str],
        tensorboard: Path | None,
        tally: Tally,
    ) -> None:
        self._job, self._results, self._tensorboard = job, results, tensorboard
        self._tally = tally
        self._devices = list(reversed(devices))
        self._workers: list[Worker] = []
        self._todo = Todo([])
        self._ends: dict[str, list[str]] = {}

    def carry_out(self, runs: list[Run]) -> None:
        """Carry out runs; returns when each is recorded or has failed."""
        self._todo = Todo(runs)
        try:
            while self._todo or any(worker.run for worker in self._workers):
                self._assign()
                self._listen()
            for worker in self._workers:
                with contextlib.suppress(OSError):
                    worker.pipe.send(None)
            for worker in self._workers:
                worker.process.join(PATIENCE)
        finally:
            # Whatever is still at work was interrupted; its checkpoint stays.
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join()
                worker.pipe.close()

    def _assign(self) -> None:
        """Give runs to processes without one, and start processes as long as there are devices."""
        while True:
            worker = next((w for w in self._workers if w.run is None), None)
            run = self._todo.next() if worker or self._devices else None
            if run is None:
                return
            worker = worker or self._start(self._devices.pop())
            worker.run = run
            with contextlib.suppress(OSError):  # it has been killed, and will be found so
                worker.pipe.send(run)

    def _start(self, device: str) -> Worker:
        context = mp.get_context("spawn")  # a fork of a process with torch's threads may hang
        here, there = context.Pipe()
        job = replace(self._job, device=device)
        process = context.Process(
            target=_serve, args=(job, self._results, self._tensorboard, there), name="neuvar"
        )
        resource_tracker.ensure_running()  # it would let interrupts through while it is started
        with _environment(dict.fromkeys(THREADS, str(job.threads))), _without_interrupts():
            process.start()
            worker = Worker(process, here, device)
            self._workers.append(worker)
        there.close()  # so that the end of the process is the end of what can be read
        return worker

    def _listen(self) -> None:
        """Wait until a process says something or ends, or until it is time to ask again."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in connection.wait(list(by_pipe), timeout=LATER if self._todo else None):
            worker = by_pipe[pipe]
            try:
                kind, fraction, message = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker)
            else:
                self._hear(worker, kind, fraction, message)

    def _hear(self, worker: Worker, kind: Kind, fraction: float, message: str) -> None:
        run = worker.run
        assert run is not None
        if kind == "started" and run.key in self._ends:
            message = f"again: {self._ends[run.key][-1]}"
        if kind not in ("started", "progress"):
            worker.run = None
        if kind == "taken":
            self._todo.again(run, later=LATER)
        self._tally.tell(kind, run, fraction, message)

    def _bury(self, worker: Worker) -> None:
        """A process has ended by itself: another takes over its run, unless that happens often."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        self._devices.append(worker.device)
        run = worker.run
        if run is None:
            return
        ends = self._ends.setdefault(run.key, [])
        ends.append(_end(worker.process.exitcode))
        line = self._results.recorded(run.key)
        if line is not None:  # that was its last deed
            self._results.forget(run.key)
            kind, reason = ended(line)
            self._tally.tell(kind, run, 1.0, reason)
        elif len(ends) > RETRIES:
            self._tally.tell("failed", run, 1.0, f"{ends[-1]}, {len(ends)} times")
        else:
            self._todo.again(run)


def _end(code: int) -> str:
    """How a process ended."""
    if code == -signal.SIGKILL:
        return "its process was killed, perhaps because memory ran out"
    if code < 0:
        return f"its process was ended by signal {-code}"
    return f"its process ended with code {code}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a process that is started here."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Put Ctrl-C off for a moment; a process that is started here never gets any.

    Ctrl-C reaches all processes at a terminal. Only the first one is to answer.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(job: Job, results: Results, tensorboard: Path | None, pipe: Any) -> None:
    """Carry out runs until there are no more; what a process of its own does."""
    import torch  # noqa: F401, now, so that the first run is not charged for it

    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # nobody listens any more
        while (run := pipe.recv()) is not None:

            def tell(kind: Kind, fraction: float) -> None:
                pipe.send((kind, fraction, ""))

            kind, message = _attempt(job, results, tensorboard, run, tell)
            pipe.send((kind, float(kind != "taken"), message))


def _end_with_parent() -> None:
    """End when the process does that started this one, so that nobody works in secret."""
    parent = mp.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid and not connection.wait([parent.sentinel], timeout=1):
        pass
    os._exit(1)


def _attempt(
    job: Job,
    results: Results,
    tensorboard: Path | None,
    run: Run,
    tell: Callable[[Kind, float], None],
) -> tuple[Kind, str]:
    """Carry out a run and record it, unless that has been done; returns what became of it."""
    mine = None
    try:
        mine = claim(results.checkpoints, run.key)
        if mine is None:
            return "taken", ""
        line = results.recorded(run.key)
        if line is None:
            tell("started", 0.0)
            with contextlib.ExitStack() as stack:
                writer = None
                if tensorboard is not None:
                    writer = summary_writer(tensorboard / run.key)
                    stack.callback(writer.close)
                line = perform(
                    job,
                    run,
                    checkpoint=mine.checkpoint,
                    progress=lambda fraction: tell("progress", fraction),
                    writer=writer,
                )
            results.add(line)
    except Exception as error:  # noqa: BLE001 - one run that fails must not end the others
        if mine is not None:
            mine.release()
        return "failed", sentence(error)
    mine.finish()
    return ended(line)
