"""Help and ``neuvar list`` answer at once: they import neither torch nor any other package."""

import json
import subprocess
import sys

import pytest

from neuvar.cli import COMMANDS

HELP = [f"{name} --help" for name in COMMANDS]
CODE = """
import json, sys
before = set(sys.modules)
from neuvar.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
new = {name.split(".")[0] for name in set(sys.modules) - before - {"__mp_main__"}}
print(json.dumps([code, sorted(new - sys.stdlib_module_names)]), file=sys.stderr)
"""


def packages_of(words, folder):
    """Output of a command, and the packages that it imports beside the standard library."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words.split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    code, packages = json.loads(done.stderr)
    assert code == 0
    return done.stdout, packages


@pytest.mark.parametrize(
    "words",
    [
        *("--help", "--version", "list", "list forgetting", *HELP),
        *(f"data {action} --help" for action in ("get", "list", "verify")),
    ],
)
def test_no_package_is_imported(tmp_path, words):
    said, packages = packages_of(words, tmp_path)
    assert said
    assert packages == ["neuvar"]


def test_the_check_itself(tmp_path):
    assert "numpy" in packages_of("data list", tmp_path)[1]
