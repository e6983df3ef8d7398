"""Packages that import a name when it is first used, so that importing them is cheap (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def attach(package: str, **names: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make ``__getattr__`` and ``__dir__`` for a package.

    Type checkers do not see them: the package also imports the names ``if TYPE_CHECKING``. No
    function may have the name of a submodule: the import of the submodule would replace it.

    Args:
        package: its ``__name__``.
        **names: for each submodule the names that come from it, separated by spaces; its own name
            means the submodule itself.
    """
    homes = {name: home for home, own in names.items() for name in own.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        value = module if name == homes[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)  # so __getattr__ is not called again
        return value

    def public() -> list[str]:
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name[:2] == "__")})

    return find, public
