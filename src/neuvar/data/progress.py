"""Show how a download goes, if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Bar:
    """A progress bar of rich in the form that pooch asks for."""

    def __init__(self, name: str, done: int) -> None:
        self._done = done
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that are still to come."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        show = _rich_bar()
        if show is not None:
            self._bar = show()
            self._bar.start()
            known = self._done + total if total else None
            self._task = self._bar.add_task(self._name, total=known, completed=self._done)

    def update(self, count: int) -> None:
        """Count bytes that have come."""
        if self._bar is not None:
            self._bar.update(self._task, advance=count)

    def reset(self) -> None:
        """Go back to where this attempt began."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._bar is not None:
            self._bar.stop()


def _rich_bar() -> Callable[[], Any] | None:
    """How to make a progress bar on standard error, if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        return None
    return lambda: Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
