"""Shared parts of the HTML pages, and safe text for them and for Markdown.

Each page is a single file without external resources.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib import resources
from string import Template

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_SPECIAL = re.compile(r"([\\`*_\[\]|~$#])")


def printable(text: str) -> str:
    """Text with control characters and broken surrogates replaced, which XML forbids.

    >>> printable("cat" + chr(0))
    'cat�'
    """
    return _CONTROL.sub("�", text)


def escape_markdown(text: str) -> str:
    r"""Text that Markdown shows unchanged, in one line.

    >>> escape_markdown("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    line = " ".join(printable(text).split())
    safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", safe)


def head(package: str, scripts: Iterable[str] = ("page.js",)) -> str:
    """The head of a page, with its policy, style and script.

    A package contains ``page.css`` and the scripts; they follow the shared ones.
    """
    css = _part(__name__, "base.css") + _part(package, "page.css")
    # One function around all of them keeps their names out of the global scope.
    inner = "\n".join([_part(__name__, "base.js"), *(_part(package, name) for name in scripts)])
    js = f'"use strict";\n(() => {{\n{inner}}})();\n'
    # Only our own script runs, which base.html puts on a line of its own; nothing is loaded.
    digest = hashlib.sha256(f"\n{js}".encode()).digest()
    allowed = {
        "default-src": "'none'",
        "script-src": f"'sha256-{base64.b64encode(digest).decode()}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in allowed.items())
    return Template(_part(__name__, "base.html")).substitute(policy=policy, css=css, js=js)


def _part(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
