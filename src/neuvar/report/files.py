"""Files that are replaced when they are complete, never before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def put(contents: Mapping[Path, bytes]) -> None:
    """Write files under other names first, and rename them once all of them are on disk.

    Whoever interrupts it finds the old files, and none that is half-written.
    """
    waiting: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting[path] = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
            with waiting[path].open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                waiting[path].chmod(path.stat().st_mode)
        for path, unfinished in waiting.items():
            unfinished.replace(path)
    finally:
        for unfinished in waiting.values():
            unfinished.unlink(missing_ok=True)
