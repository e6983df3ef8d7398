"""The site understands our docstrings."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("griffe")
pytest.importorskip("latex2mathml")


@pytest.fixture(scope="module")
def to_markdown():
    path = Path(__file__).parents[1] / "tools" / "docstring_markup.py"
    spec = importlib.util.spec_from_file_location("docstring_markup", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.to_markdown


def test_reference_becomes_code(to_markdown):
    assert to_markdown("Call :meth:`step` once.") == "Call `step` once."
    assert to_markdown("A :class:`~torch.optim.SGD`.") == "A `SGD`."


def test_equation_becomes_mathml(to_markdown):
    found = to_markdown(r"Its scale is :math:`\eta b` here.")
    assert found.startswith("Its scale is <span><math ")
    assert found.endswith("</math></span> here.")
    assert 'display="inline"' in found
    assert "&#x003B7;" in found  # η


def test_equation_block_ends_where_its_indentation_ends(to_markdown):
    found = to_markdown("Title.\n\n.. math:: a =\n          b\n\nText: 1 + 1.\n\nArgs:\n    x: y")
    title, equation, rest = found.split("\n\n", 2)
    assert title == "Title."
    assert equation.startswith('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">')
    assert equation.endswith("</math>")
    assert equation.count("<mi>") == 2
    assert rest == "Text: 1 + 1.\n\nArgs:\n    x: y"


def test_example_becomes_a_code_block(to_markdown):
    assert to_markdown("Say so.\n\n>>> 1 + 1\n2\n") == "Say so.\n\n```pycon\n>>> 1 + 1\n2\n```\n"


def test_example_under_a_heading_is_left_to_griffe(to_markdown):
    text = "Say so.\n\nExamples:\n    >>> 1 + 1\n    2\n"
    assert to_markdown(text) == text
