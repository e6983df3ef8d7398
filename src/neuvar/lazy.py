"""Packages that import a name when it is first used, so that importing them is cheap (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` for a package.

    Type checkers do not see them: the package also imports the names ``if TYPE_CHECKING``. A name
    must differ from every submodule but itself, because importing a submodule sets the attribute
    of this name.

    Args:
        package: its ``__name__``.
        homes: for each name the submodule that defines it; a submodule is its own home.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        value = module if name == homes[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
