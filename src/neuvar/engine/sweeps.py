"""Carry out many runs, each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from neuvar.engine.cluster import on_cluster, reach, require_ray
from neuvar.engine.events import Summary, Tally, Watch
from neuvar.engine.local import Crew
from neuvar.engine.provenance import cores
from neuvar.engine.results import Results
from neuvar.engine.work import Job, RunOne, require_tensorboard
from neuvar.experiments.run_spec import KINDS, Run

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


def sweep(
    runs: Iterable[Run],
    results: Results | str | Path,
    *,
    engine: str = "local",
    workers: int = 0,
    device: str = "cpu",
    data: str | Path | None = None,
    address: str | None = None,
    tensorboard: str | Path | None = None,
    watch: Watch | None = None,
    run_one: RunOne | None = None,
) -> Summary:
    """Carry out runs that are not recorded yet, several at a time, and record each once.

    It may be interrupted or killed at any moment: what is recorded stays, and called again it goes
    on from the checkpoints in the folder ``.checkpoints`` beside the results. Several sweeps may
    work on one file; they share the runs, and each returns when all of its own are recorded.

    A run that diverges is recorded as such. One that raises an exception is not recorded, but
    told of in the summary, and the others go on.

    Args:
        runs: what to do; of runs with the same key, the first one.
        results: the file to record them in.
        engine: "local" for processes on this machine, "ray" for a Ray cluster. There each run has
            one core, or one GPU. The machines need neuvar but no common disk: checkpoints stay in
            the temporary folder of each, results come to the machine this is called on.
        workers: how many runs at the same time; 0 for one on each core, or on each GPU. Cores are
            divided among them as threads.
        device: where networks are trained: "cpu", "mps", "cuda" for all GPUs, or "cuda:1" for one.
        data: folder of data sets; see :func:`neuvar.data.load`.
        address: of the Ray cluster; None for the one that ``RAY_ADDRESS`` names, or else for one
            on this machine that ends with the sweep.
        tensorboard: folder for TensorBoard's files, with a folder for each run.
        watch: is called, in this process, for each :class:`Event`.
        run_one: what trains, if not :func:`neuvar.experiments.run_one`; a function of a module
            that other processes can import too.

    Returns:
        What became of each run.

    Raises:
        ValueError: for arguments that make no sense, before anything starts.
        OSError: if results cannot be written or the cluster cannot be reached.
        KeyboardInterrupt: after all processes have been stopped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep([], Path(folder) / "smoke.jsonl")
    Summary(finished=(), skipped=(), diverged={}, failed={})
    """
    unique = _unique(runs)
    _check(engine, workers, device, address, data)
    results = Results(Path(results.path if isinstance(results, Results) else results).absolute())
    folder = _tensorboard_folder(tensorboard)
    results.check()
    recorded = results.lines()
    skipped = [key for key in unique if key in recorded]
    for key in skipped:
        results.forget(key)  # whoever recorded it may have been killed right after
    missing = [run for key, run in unique.items() if key not in recorded]
    tally = Tally(watch)
    try:
        if missing and engine == "ray":
            job = Job(run_one or default_run_one(), device, 1, None if data is None else str(data))
            on_cluster(job, missing, results, address, workers, folder, tally)
        elif missing:
            # How many threads a run has must not depend on what was done before an interruption,
            # because sums come out a little different: all runs count here, not the missing ones.
            devices = _devices(device, workers, len(unique))
            threads = max(1, cores() // len(devices))
            job = Job(
                run_one or default_run_one(),
                device,
                threads,
                None if data is None else str(Path(data).absolute()),
            )
            Crew(job, results, devices, folder, tally).carry_out(missing)
    finally:
        for key in skipped:
            results.forget(key)  # a worker without a parent may have held it until now
        with contextlib.suppress(OSError):  # it holds what other runs need to go on
            results.checkpoints.rmdir()
    return tally.summary(skipped)


def default_run_one() -> RunOne:
    """The function that trains; it imports torch."""
    from neuvar.experiments.runner import run_one

    return run_one


def _unique(runs: Iterable[Run]) -> dict[str, Run]:
    """Runs by key."""
    found: dict[str, Run] = {}
    for run in runs:
        if type(run) not in KINDS.values():
            raise ValueError(f"runs must be of Training or Tasks, got {run!r}")
        found.setdefault(run.key, run)
    return found


def _check(
    engine: str, workers: int, device: str, address: str | None, data: str | Path | None
) -> None:
    """Say what is wrong with what was asked for."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if type(workers) is not int or workers < 0:
        raise ValueError(f"workers must be an integer >= 0, got {workers!r}")
    if address is not None and engine != "ray":
        raise ValueError(f"address is for engine='ray', got {address!r} with engine={engine!r}")
    if engine == "ray":
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, Ray chooses which, got {device!r}")
        require_ray()
        reach(address)
        return
    _check_device(device)
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"data must be a folder, got {str(data)!r}")


def _check_device(device: str) -> None:
    """Whether this machine has a device."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device must be cpu, cuda, cuda:0, cuda:1, … or mps, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one that is there, and there are {torch.cuda.device_count()} GPUs for "
            f"CUDA, got {device!r}"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device must be one that is there, and this machine has no 'mps'")


def _tensorboard_folder(folder: str | Path | None) -> Path | None:
    """The folder for TensorBoard's files, if they are asked for and can be written."""
    if folder is None:
        return None
    require_tensorboard()
    folder = Path(folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"tensorboard cannot use {folder}: {error.strerror}") from None
    return folder


def _devices(device: str, workers: int, runs: int) -> list[str]:
    """The device of each process."""
    if device == "cpu":
        every = ["cpu"] * (workers or cores())
    else:
        import torch

        count = torch.cuda.device_count() if device == "cuda" else 1
        names = [f"cuda:{number}" for number in range(count)] if device == "cuda" else [device]
        every = [names[number % count] for number in range(workers or count)]
    return every[: max(1, runs)]
