"""The hook that lays out the pages of the site."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def lay_out():
    path = Path(__file__).parents[1] / "tools" / "page_layout.py"
    spec = importlib.util.spec_from_file_location("page_layout", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.on_page_content


@pytest.mark.parametrize("text", ["0.05 ± 0.01", "95 %", "b = 0.05", "λ 300", "θ + ε", "5 of 10"])
def test_numbers_and_their_signs_stay_on_one_line(lay_out, text):
    unbroken = text.replace(" ", "\u00a0")
    assert lay_out(f"<p>It is {text} here.</p>") == f"<p>It is {unbroken} here.</p>"
    assert lay_out(f"<p>{text}</p>".replace(" ", "\n")) == f"<p>{unbroken}</p>"


def test_words_break(lay_out):
    text = '<p title="b = 1">of 3 runs, n is 5 and sub = 3: a + b</p>'
    assert lay_out(text) == text


def test_code_is_kept(lay_out):
    for code in ("<pre><code>b = 0.05</code></pre>", "<code>" + "b = 0.05 + " * 3 + "1</code>"):
        assert lay_out(code) == code


def test_short_code_is_marked(lay_out):
    short = "<p><code>--decisions</code>, <code>a = 5</code></p>"
    assert lay_out(short) == short.replace("<code>", '<code class="short">')


def test_long_cells_are_marked(lay_out):
    row = '<tr><td>a name of some length</td><td>short</td><td style="">1</td></tr>'
    assert lay_out(row) == row.replace("<td>a", '<td class="long">a')
    assert lay_out("<td><a href='https://example.org'>short</a></td>").startswith("<td>")
