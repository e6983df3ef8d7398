"""The order of the house: a module imports only from modules above it."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import neuvar

PACKAGE = Path(neuvar.__file__).parent
HOUSE = [
    "lazy",
    "_validate",
    "_atomic",
    "_batches",
    "noise",
    "optim",
    "_eval_mode",
    "baselines",
    "batchnorm",
    "schedule",
    "measures",
    "bounds",
    "prediction",
    "data",
    "labels",
    "continual",
    "models",
    "train",
    "pages",
    "cleaning",
    "experiments",
    "engine",
    "report",
    "cli",
    "integrations",
]
DOORS = ["__init__", "__main__"]
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The part of the house that a file is in, or the door that it is."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(source: str, file: Path) -> set[str]:
    """The parts of the house that a file imports; "" stands for the package as a whole."""
    package = ["neuvar", *file.relative_to(PACKAGE).parent.parts]
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            path = ".".join([*base, *([node.module] if node.module else [])])
            modules += [f"{path}.{alias.name}" for alias in node.names]
    names = [module.split(".") for module in modules]
    return {
        name[1] if len(name) > 1 and name[1] in HOUSE else ""
        for name in names
        if name[0] == "neuvar"
    }


def violations(source: str, file: Path) -> list[str]:
    """What a file imports against the order."""
    part = part_of(file)
    if part in DOORS:
        allowed = set(HOUSE) - {"integrations"}
    else:
        allowed = set(HOUSE[: HOUSE.index(part) + 1]) - {"integrations"} | {part}
    return sorted(imported(source, file) - allowed)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_module_is_in_the_house(file):
    assert part_of(file) in [*HOUSE, *DOORS], "a new module needs a place in HOUSE"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_module_imports_only_from_above(file):
    assert violations(file.read_text(encoding="utf-8"), file) == []


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        ("optim/nvrm.py", "from neuvar.noise import Draw", []),
        ("optim/nvrm.py", "from neuvar import noise as noise_", []),
        ("optim/nvrm.py", "from .keeping import Exact\nfrom ..noise import Draw", []),
        ("optim/nvrm.py", "from .. import noise", []),
        ("optim/nvrm.py", "from ..data import Split", ["data"]),
        ("optim/nvrm.py", "from .. import measures", ["measures"]),
        ("optim/nvrm.py", "def f():\n    import neuvar.measures", ["measures"]),
        ("noise.py", "from .optim import NVRM", ["optim"]),
        ("noise.py", "import neuvar", [""]),
        ("noise.py", "from neuvar import NVRM", [""]),
        ("cli.py", "from neuvar.integrations.lightning import Callback", ["integrations"]),
        ("__init__.py", "from neuvar.integrations import lightning", ["integrations"]),
        ("__init__.py", "from neuvar.optim import NVRM", []),
        ("integrations/lightning.py", "from neuvar.optim import NVRM\nfrom . import base", []),
        ("data.py", "import numpy\nfrom torch import nn\nimport neuvarious", []),
    ],
)
def test_the_rule_itself(where, source, expected):
    assert violations(source, PACKAGE / where) == expected


def test_import_brings_nothing_beyond_torch_and_numpy(tmp_path):
    """Not even torch._dynamo, which torch imports for the first optimizer that is created."""
    code = """
import json, sys
import numpy, torch
before = set(sys.modules)
import neuvar
for name in neuvar.__all__:
    getattr(neuvar, name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    new = json.loads(done.stdout)
    assert "neuvar.optim" in new
    assert "torch._dynamo" not in new
    roots = {name.split(".")[0] for name in new} - sys.stdlib_module_names
    assert roots <= {"neuvar", "torch", "numpy"}


LAZY = [file.parent for file in FILES if "_attach(" in file.read_text(encoding="utf-8")]


def lazy_names(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Names of a lazy package with their submodules: as type checkers see them, and its table."""
    package = ".".join(folder.relative_to(PACKAGE.parent).parts)
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    (branch,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for node in branch.body:
        submodule = node.module.removeprefix(package).removeprefix(".")
        seen |= {alias.name: submodule or alias.name for alias in node.names}
    homes = branch.orelse[0].value.keywords
    table = [(name, home.arg) for home in homes for name in ast.literal_eval(home.value).split()]
    assert len(dict(table)) == len(table)
    return seen, dict(table)


@pytest.mark.parametrize("folder", LAZY, ids=lambda f: f.name)
def test_lazy_names_are_complete(folder):
    seen, table = lazy_names(folder)
    package = importlib.import_module(".".join(folder.relative_to(PACKAGE.parent).parts))
    assert seen == table
    assert sorted(table) == sorted(package.__all__)
    assert set(table) <= set(dir(package))
    for name in table:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("folder", LAZY, ids=lambda f: f.name)
def test_importing_a_submodule_replaces_no_lazy_name(folder):
    _, table = lazy_names(folder)
    submodules = {path.stem for path in folder.iterdir()}
    assert [name for name in table if name in submodules and table[name] != name] == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_no_function_has_the_name_of_a_module(file):
    taken = {f.parent.name if f.stem == "__init__" else f.stem for f in FILES}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not functions & taken


def test_all_is_sorted():
    """Constants and acronyms, then classes, then functions, as ruff sorts them."""
    order = sorted(neuvar.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert neuvar.__all__ == order
    assert len(set(order)) == len(order)


@pytest.mark.parametrize("name", [n for n in neuvar.__all__ if not n.startswith("__")])
def test_public_name_and_its_methods_are_documented(name):
    thing = getattr(neuvar, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        public = [value for key, value in inspect.getmembers(thing) if not key.startswith("_")]
        methods = [m for m in public if getattr(m, "__module__", "").startswith("neuvar")]
        assert [m.__qualname__ for m in methods if not inspect.getdoc(m)] == []
