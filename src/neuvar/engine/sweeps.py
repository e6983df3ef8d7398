"""Sweeps: many runs, each recorded once."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuvar.engine.job import Summary, SweepSpec, Tally, Watch, cores
from neuvar.engine.local import LocalPool
from neuvar.engine.ray import check_address, require_ray, run_on_ray
from neuvar.engine.results_file import Results
from neuvar.experiments.run_spec import KINDS, Run


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
        runs: the runs; of several with the same key, the first.
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
        if type(run) not in KINDS.values():
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
