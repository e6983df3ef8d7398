"""Where a result comes from: versions, commit, machine."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1]
PATIENCE = 20.0
"""Seconds that git may take to answer."""


def provenance(device: str, threads: int) -> dict[str, Any]:
    """What is recorded with a result besides the run and its outcome.

    >>> sorted(provenance("cpu", 1))
    ['commit', 'device', 'machine', 'threads', 'versions', 'when']
    """
    import numpy as np
    import torch

    return {
        "versions": {
            "python": platform.python_version(),
            "neuvar": importlib.metadata.version("neuvar"),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        "commit": commit(SOURCES),
        "machine": {
            "processor": processor(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "device": _name(device),
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
    """The commit of the sources, with a "+" if they differ from it; None if git knows neither."""
    # Sources may lie in a folder that a foreign repository ignores: it says nothing about them.
    if _git(sources, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(sources, "rev-parse", "HEAD")
    changed = _git(sources, "status", "--porcelain", "--", ".")
    return None if found is None or changed is None else found + "+" * bool(changed)


def _git(folder: Path, *words: str) -> str | None:
    """What git says, or None if it is not there or fails."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        # Without optional locks git only reads. No shell sees the words, which are our own.
        done = subprocess.run(  # noqa: S603
            [git, "--no-optional-locks", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()


@functools.cache
def processor() -> str:
    """The name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _name(device: str) -> str:
    """A device with the name of its model."""
    import torch

    if torch.device(device).type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device
