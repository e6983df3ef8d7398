"""What all HTML pages have in common: each is one file that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from string import Template


def fill(package: str, /, *, scripts: Iterable[str] = ("page.js",), **parts: str) -> str:
    """The page of a package: its ``page.html`` with a head, and with what it asks for besides.

    Args:
        package: where ``page.html``, ``page.css`` and the scripts are.
        scripts: files that follow on the common script, in this order.
        parts: what else the template asks for, as HTML that is safe.
    """
    css = _part(__name__, "base.css") + _part(package, "page.css")
    # One function around all of them leaves nothing behind in the window.
    inner = "\n".join([_part(__name__, "base.js"), *(_part(package, name) for name in scripts)])
    js = f'"use strict";\n(() => {{\n{inner}}})();\n'
    head = Template(_part(__name__, "base.html")).substitute(policy=_policy(js), css=css, js=js)
    return Template(_part(package, "page.html")).substitute(parts, head=head)


def _part(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Only our own script runs, and nothing is loaded from anywhere."""
    # base.html puts a line break before the script.
    digest = hashlib.sha256(f"\n{script}".encode()).digest()
    allowed = {
        "default-src": "'none'",
        "script-src": f"'sha256-{base64.b64encode(digest).decode()}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())
