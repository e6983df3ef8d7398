"""Runs on a Ray cluster, whose machines may come and go.

The process that calls holds the results: machines of the cluster need no common disk. If one of
them dies, Ray gives its runs to others; whatever it had done twice is still recorded once.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuvar.engine.events import Tally
from neuvar.engine.locks import Claim, claim
from neuvar.engine.results import Line, Results
from neuvar.engine.work import LATER, Job, Todo, ended, perform, sentence, summary_writer
from neuvar.experiments.run_spec import Run

RETRIES = 5
"""How often Ray begins a run again whose process or machine has died."""
PATIENCE = 10.0
"""Seconds to wait for an answer of the cluster."""
BOARD_PATIENCE = 60.0
"""Seconds to wait for an answer of the board. It starts slowly on a busy machine."""


class Board:
    """Where runs on other machines put up notes: that they started, how far they are."""

    def __init__(self) -> None:
        self._notes: list[tuple[str, str, Any]] = []

    def put(self, *note: Any) -> None:
        """Add a note: key of the run, kind of note, what it says."""
        if note:
            self._notes.append(note)

    def take(self) -> list[tuple[str, str, Any]]:
        """All notes since the last time."""
        notes, self._notes = self._notes, []
        return notes


class Fleet:
    """Runs that are carried out by the machines of a cluster.

    Args:
        ray: the module, connected to the cluster.
        job: what the runs have in common.
        results: where they are recorded.
        at_once: how many are given to the cluster at the same time; 0 for twice as many as fit.
        tensorboard: folder for TensorBoard's files, or None.
        tally: is told what happens.
    """

    def __init__(
        self,
        ray: Any,
        job: Job,
        results: Results,
        at_once: int,
        tensorboard: Path | None,
        tally: Tally,
    ) -> None:
        self._ray, self._job, self._results, self._tally = ray, job, results, tally
        self._at_once, self._tensorboard = at_once, tensorboard
        gpus = int(job.device == "cuda")
        self._unit = "GPU" if gpus else "CPU"
        if not ray.cluster_resources().get(self._unit):
            raise ValueError(f"device is {job.device!r}, but the Ray cluster has no {self._unit}")
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_on_node)
        self._board = self._put_up_board()
        self._notes: Any = None
        self._away: dict[Any, tuple[Run, Claim]] = {}
        self._writers: dict[str, Any] = {}
        self._todo = Todo([])

    def carry_out(self, runs: list[Run]) -> None:
        """Carry out runs; returns when each is recorded or has failed."""
        self._todo = Todo(runs)
        try:
            while self._todo or self._away:
                self._launch()
                done = self._wait()
                self._read_board()
                for task in done:
                    self._land(task)
        finally:
            for task, (_, mine) in self._away.items():
                self._ray.cancel(task, force=True)
                mine.release()
            for writer in self._writers.values():
                writer.close()

    def _put_up_board(self) -> Any:
        """A board on the machine that this process is on: if that one dies, nobody reads it."""
        ray = self._ray
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        return ray.remote(num_cpus=0)(Board).options(scheduling_strategy=here).remote()

    def _launch(self) -> None:
        """Give runs to the cluster that nobody has, as many as it can take soon."""
        fit = int(self._ray.cluster_resources().get(self._unit, 0))
        while len(self._away) < (self._at_once or max(1, 2 * fit)):
            run = self._todo.next()
            if run is None:
                return
            mine = claim(self._results.checkpoints, run.key)
            if mine is None:
                self._todo.again(run, later=LATER)
                self._tally.tell("taken", run)
            elif (line := self._results.recorded(run.key)) is not None:
                self._settle(run, mine, line)
            else:
                tensorboard = self._tensorboard is not None
                task = self._task.remote(
                    self._job, run, self._board, _folder_name(self._results), tensorboard
                )
                self._away[task] = run, mine

    def _wait(self) -> list[Any]:
        """Runs that have come back."""
        if not self._away:
            time.sleep(LATER)
            return []
        done, _ = self._ray.wait(list(self._away), num_returns=len(self._away), timeout=LATER)
        return list(done)

    def _land(self, task: Any) -> None:
        """Record a run that has come back."""
        run, mine = self._away[task]
        try:
            found = self._ray.get(task)
            if isinstance(found, dict):
                self._results.add(found)
        except Exception as error:  # noqa: BLE001 - one run that fails must not end the others
            found = sentence(getattr(error, "cause", None) or error)
        del self._away[task]
        if not self._tally.started(run):
            self._tally.tell("started", run)
        if isinstance(found, dict):
            self._settle(run, mine, found)
        else:
            mine.release()
            self._tally.tell("failed", run, 1.0, found)
        if (writer := self._writers.pop(run.key, None)) is not None:
            writer.close()

    def _settle(self, run: Run, mine: Claim, line: Line) -> None:
        """A run is recorded."""
        mine.finish()
        kind, reason = ended(line)
        self._tally.tell(kind, run, 1.0, reason)

    def _read_board(self) -> None:
        """Pass on what runs have told of themselves, each run's events in order."""
        runs = {run.key: run for run, _ in self._away.values()}
        for key, kind, what in self._take_notes():
            run = runs.get(key)
            if run is None:
                continue
            if kind == "scalar":
                self._write(key, what)
                continue
            # The note that a run started is lost if its machine could not reach the board.
            if kind == "started" or not self._tally.started(run):
                again = self._tally.started(run)
                why = "again: its process or its machine died" if again else ""
                self._tally.tell("started", run, 0.0, why)
            if kind == "progress":
                self._tally.tell("progress", run, what)

    def _take_notes(self) -> list[tuple[str, str, Any]]:
        """All notes since the last time; none if the board does not answer in time."""
        if self._notes is None:
            self._notes = self._board.take.remote()
        notes = []
        try:
            notes = self._ray.get(self._notes, timeout=BOARD_PATIENCE)
        except self._ray.exceptions.GetTimeoutError:
            return []  # keep the request: its answer is the only copy of these notes
        except self._ray.exceptions.RayError:
            pass  # the board died; no result depends on it
        self._notes = None
        return list(notes)

    def _write(self, key: str, scalar: tuple[str, float, int]) -> None:
        """Write what a run measured to TensorBoard's file."""
        assert self._tensorboard is not None
        if key not in self._writers:
            self._writers[key] = summary_writer(self._tensorboard / key)
        self._writers[key].add_scalar(*scalar)


def on_cluster(
    job: Job,
    runs: list[Run],
    results: Results,
    address: str | None,
    at_once: int,
    tensorboard: Path | None,
    tally: Tally,
) -> None:
    """Carry out runs on a Ray cluster."""
    with _connected(address) as ray:
        Fleet(ray, job, results, at_once, tensorboard, tally).carry_out(runs)


def require_ray() -> Any:
    """The module Ray, which then tells nobody that it is used, and prints nothing."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # When a machine dies, it would print that machine's log in between what others print.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ModuleNotFoundError(
            'engine="ray" needs Ray, which is not installed; pip install "neuvar[ray]" brings it'
        ) from None


def reach(address: str | None) -> None:
    """Say so at once if nobody answers at an address, for which Ray takes minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray cluster answers at address {address!r}: {error}") from None


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Connect to a cluster, or start one, for the time being; a connection that is there serves."""
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(
            address=address,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConnectionError(
            f"the Ray cluster at address {address!r} could not be joined: {why[:500]}"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _folder_name(results: Results) -> str:
    """A name for the checkpoints of a results file, on machines that do not see the file."""
    return hashlib.sha256(f"{platform.node()}:{results.path}".encode()).hexdigest()[:16]


def _folder(name: str) -> Path:
    """The folder for checkpoints on this machine, which nobody else may have made."""
    top = Path(tempfile.gettempdir()) / f"neuvar-{os.getuid()}"
    top.mkdir(mode=0o700, exist_ok=True)
    if top.stat().st_uid != os.getuid():
        raise PermissionError(f"{top} belongs to another user")
    return top / name


class _Forward:
    """What a run takes for TensorBoard's writer; it puts scalars up on the board."""

    def __init__(self, board: Any, key: str) -> None:
        self._board, self._key = board, key

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Put one up."""
        self._board.put.remote(self._key, "scalar", (tag, float(value), int(step)))


def _on_node(job: Job, run: Run, board: Any, folder: str, tensorboard: bool) -> Line | str:
    """Carry out a run on a machine of the cluster; returns its line, or why it failed."""
    try:
        place = _folder(folder)
        # A process of a machine that is about to die may still have the run.
        while (mine := claim(place, run.key)) is None:
            time.sleep(LATER)
    except OSError as error:
        return sentence(error)
    board.put.remote(run.key, "started", None)
    found: Line | str
    try:
        found = perform(
            job,
            run,
            checkpoint=mine.checkpoint,
            progress=lambda fraction: board.put.remote(run.key, "progress", fraction) and None,
            writer=_Forward(board, run.key) if tensorboard else None,
        )
        mine.finish()
    except Exception as error:  # noqa: BLE001 - it is told, and the other runs go on
        mine.release()
        found = sentence(error)
    with contextlib.suppress(OSError):  # it holds what other runs need to go on
        place.rmdir()
    # Notes arrive in their order: when this one has, all have.
    ray = require_ray()
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(board.put.remote(), timeout=BOARD_PATIENCE)
    return found
