"""Memory of a training step, from the record of every allocation that torch makes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

# The profiler's backend announces every start and stop unless told otherwise before its first.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

STEP = "training step"


@dataclass(frozen=True)
class Memory:
    """Bytes that live when a training step is over, and at its peak."""

    steady: int
    peak: int


def measure(start: Callable[[], Callable[[], object]], *, steps: int = 2) -> Memory:
    """Build a training step with ``start``, run it a few times and measure the last.

    The record begins before the network is built: the profiler knows nothing of memory that was
    allocated earlier, and would miss its release.
    """

    def work() -> None:
        step = start()
        for _ in range(steps):
            with torch.profiler.record_function(STEP):
                step()

    live = peak = steady = 0
    began, ended, changes = _record(work)
    for time, size in changes:
        if time > ended:
            break
        live += size
        steady = live
        if time >= began:
            peak = max(peak, live)
    return Memory(steady, peak)


def left_behind(work: Callable[[], object]) -> int:
    """Bytes that stay allocated, in a cache for example, after ``work`` has gone."""

    def marked() -> None:
        with torch.profiler.record_function(STEP):
            work()

    return sum(size for _, size in _record(marked)[2])


def _record(work: Callable[[], None]) -> tuple[int, int, list[tuple[int, int]]]:
    """Begin and end of the last marked step, and all changes of memory as (time, bytes)."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
        gc.collect()
    events = profile.profiler.kineto_results.events()
    last = max((e for e in events if e.name() == STEP), key=lambda e: e.start_ns())
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return last.start_ns(), last.end_ns(), sorted(changes, key=lambda change: change[0])
