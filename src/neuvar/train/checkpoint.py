"""A file from which an interrupted training goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from neuvar._validate import boolean

FORMAT = 2
"""Files of format 1 do not say which training they are of; nobody could tell."""


class Checkpoint:
    """Where training is saved from time to time, so that it can go on after any end.

    A file is replaced in one move, so there is always a whole one. It is read with
    ``weights_only=True``, so nothing in it is ever executed.

    The file says which training it is of: the options of the optimizer when training began, those
    of :func:`fit`, the data and their order, and the initial weights, the last two as hashes. The
    file of another training is refused. It is right to resume with more epochs. A program without
    a seed has other initial weights each time: set a seed, or give ``strict=False``.

    Args:
        path: the file.
        every: seconds between two of them; 0 saves after each step.
        strict: False resumes from the file of another training, too, as long as its tensors fit.
            Learning rate, b and other options are then those of the file.

    Attributes:
        outer: what whoever trains several times wants to be saved along, such as which task it is.
    """

    def __init__(self, path: str | Path, *, every: float = 60.0, strict: bool = True) -> None:
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds >= 0, got {every!r}")
        boolean("strict", strict)
        self.path = Path(path)
        self.every = every
        self.strict = strict
        self.outer: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._looked = False
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() - self._last >= self.every

    def write(self, fit: dict[str, Any]) -> None:
        """Replace the file; the old one stays if this fails half-way."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                torch.save({"format": FORMAT, "outer": self.outer, "fit": fit}, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)
        self._last = time.monotonic()

    def read(self) -> bool:
        """Look into the file, once, and say whether there is one; fills ``outer``."""
        if self._looked:
            return self._saved is not None
        self._looked = True
        if not self.path.exists():
            return False
        try:
            found = torch.load(self.path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise ValueError(
                f"{self.path} is no checkpoint that can be read; remove it to begin anew"
            ) from error
        parts = [found.get(name) if isinstance(found, dict) else None for name in ("outer", "fit")]
        if not all(isinstance(part, dict) for part in parts) or found.get("format") != FORMAT:
            raise ValueError(f"{self.path} is no checkpoint of this version; remove it")
        self.outer, self._saved = found["outer"], found["fit"]
        return True

    def take(self) -> dict[str, Any] | None:
        """What was saved about the training, the first time; None later and if there is none."""
        self.read()
        saved, self._saved = self._saved, None
        return saved

    def give_back(self, saved: dict[str, Any]) -> None:
        """Keep for the next :meth:`take` what could not be used."""
        self._saved = saved

    def remove(self) -> None:
        """Remove the file, when all is done."""
        self.path.unlink(missing_ok=True)
