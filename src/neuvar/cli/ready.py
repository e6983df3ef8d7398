"""What must be there before runs begin: a device and data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from neuvar.data.catalogue import ENTRIES, Entry
from neuvar.data.errors import DataError
from neuvar.experiments.run_spec import Run


def checked_device(name: str, *, elsewhere: bool = False) -> str:
    """A device by its name, if this machine has it.

    Args:
        name: cpu, cuda, cuda:1, …, or mps.
        elsewhere: whether other machines do the work, so that this one need not have it.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or mps, got {name!r}")
    if elsewhere or name == "cpu":
        return name
    import torch

    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("--device mps is not available: this machine has no Apple GPU")
        return name
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"--device {name} is not available: PyTorch finds no CUDA device here")
    if int(name.partition(":")[2] or 0) >= count:
        last = f"cuda:{count - 1}"
        raise ValueError(
            f"--device {name} is not available: the last one of this machine is {last}"
        )
    return name


def entries_of(runs: Sequence[Run]) -> dict[str, tuple[Entry, int]]:
    """The data sets that runs need beyond what comes with the package, and for how many."""
    needed = Counter(run.data.removesuffix("-coarse") for run in runs)
    return {name: (ENTRIES[name], count) for name, count in needed.items() if name in ENTRIES}


def check_data(runs: Sequence[Run], folder: Path | None) -> None:
    """Make sure, before runs begin, that their data sets are here, whole; get what is missing.

    Every process then reads the same files, and none of them waits for a download.
    """
    from neuvar.data import cache, loading  # imports torch

    for name, (entry, count) in entries_of(runs).items():
        try:
            obtained = loading.obtain(entry, folder=folder)
            if obtained.is_new:
                cache.store(entry, obtained.arrays)
        except DataError as error:
            plural = "run needs" if count == 1 else "runs need"
            raise DataError(
                f"{count} {plural} {name}, try neuvar data get {name}: {error}"
            ) from error
