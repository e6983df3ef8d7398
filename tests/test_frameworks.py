"""The table of frameworks names tests that exist, and versions that are installed by make."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("frameworks", ROOT / "tools/frameworks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["frameworks"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def rows_of_the_page():
    lines = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")]
    return {cells[0]: cells[1:] for line in table[2:] if (cells := line.strip("| ").split(" | "))}


def test_every_test_of_the_table_exists(tool):
    for file, name in tool.tests_of(tool.ROWS):
        tree = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        functions = [node.name for node in tree if isinstance(node, ast.FunctionDef)]
        assert any(f"{function}[".startswith(name.partition("[")[0]) for function in functions)


def test_the_page_has_a_row_for_each_framework_without_a_no(tool):
    rows = rows_of_the_page()
    assert list(rows) == [row.name for row in tool.ROWS]
    for _, *cells in rows.values():
        assert len(cells) == len(tool.COLUMNS)
        assert all(cell == "yes" or re.fullmatch(r"\(\d+\)", cell) for cell in cells)


def test_the_readme_names_each_framework(tool):
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## In frameworks")[1]
    named = " ".join(text.split("## ")[0].split())
    for row in tool.ROWS[1:]:  # after plain torch
        assert row.name.partition(",")[0] in named


def test_versions_are_those_of_the_constraints(tool):
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = rows_of_the_page()
    for row in tool.ROWS:
        assert f"{row.package}=={rows[row.name][0]}" in pins


def test_a_test_that_fails_or_is_missing_is_a_no(tool):
    row = tool.Row("one", "torch", "file", {c: ["test_a"] for c in tool.COLUMNS})
    row.cells["resume"] = tool.Why("It cannot.")
    assert "**no**" in tool.table([row], {"file": {"test_a": True, "test_a[1]": False}})
    assert "**no**" in tool.table([row], {"file": {"test_b": True}})
    good = tool.table([row], {"file": {"test_a": True}})
    assert "**no**" not in good
    assert good.endswith("| yes | yes | (1) | yes | yes | yes | yes |\n\n1. It cannot.")
