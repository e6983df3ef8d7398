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
GIT_SECONDS = 20.0


def provenance(device: str, threads: int) -> dict[str, Any]:
    """What is recorded with a result besides the run and its outcome.

    >>> sorted(provenance("cpu", 1))
    ['commit', 'device', 'machine', 'threads', 'versions', 'when']
    """
    import numpy as np
    import torch

    if torch.device(device).type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    return {
        "versions": {
            "python": platform.python_version(),
            "neuvar": importlib.metadata.version("neuvar"),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        "commit": commit(SOURCES),
        "machine": {
            "processor": _processor(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "device": device,
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
    """The commit of the sources, with "+" if they have changes; None outside a repository."""
    git = shutil.which("git")
    if git is None:
        return None
    answers = []
    # The folder may be in a repository that ignores it; that one's commit would be wrong.
    for words in (
        ["ls-files", "--error-unmatch", "__init__.py"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--", "."],
    ):
        try:
            # Without optional locks git only reads.
            done = subprocess.run(  # noqa: S603 - the words are our own
                [git, "--no-optional-locks", "-C", str(sources), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=GIT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(done.stdout.strip())
    _, head, changes = answers
    return head + "+" * bool(changes)


@functools.cache
def _processor() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
