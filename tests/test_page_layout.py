"""The hook that lays out the pages of the site."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def lay_out():
    path = Path(__file__).parents[1] / "tools" / "page_layout.py"
    spec = importlib.util.spec_from_file_location("page_layout", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.on_page_content


UNBROKEN = [
    "0.05 ± 0.01", "95 %", "b = 0.05", "λ 300", "θ + ε", "5 of 10", "at 0.05", "b = auto",
    "h₀ = 0.1", "σ² = 1/m", "± standard", "(-0.2 to +0.1)", "[0.03, 0.05]",
]  # fmt: skip


@pytest.mark.parametrize("text", UNBROKEN)
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


@pytest.mark.parametrize("name", ["CIFAR-10", "NVRM-SGD", "784-256-256-10", "11–12"])
def test_names_do_not_break_at_hyphens(lay_out, name):
    assert lay_out(f"<p>On {name}.</p>") == f'<p>On <span class="name">{name}</span>.</p>'
    assert lay_out(f"<p><code>{name}</code></p>").count("<span") == 0


def test_long_code_breaks_after_dots_and_brackets(lay_out):
    code = "<code>filter.find_label_issues(issues.labels, threshold=0.5)</code>"
    broken = "<code>filter.<wbr>find_label_issues(<wbr>issues.<wbr>labels, threshold=0.5)</code>"
    assert lay_out(code) == broken


def test_options_in_long_code_stay_whole(lay_out):
    code = "<code>python tools/a_file.py --skip-some FILE</code>"
    whole = '<span class="name">--skip-some</span>'
    assert whole in lay_out(code)
    assert lay_out(code).replace(whole, "--skip-some").replace("<wbr>", "") == code


def test_an_interval_may_begin_a_line(lay_out):
    cell = "<td>+0.1\u00a0(-0.2\u00a0to\u00a0+0.4)</td>"
    assert "+0.1 (-0.2\u00a0to\u00a0+0.4)" in lay_out(cell)


def test_pages_with_few_sections_have_no_table_of_contents(lay_out):
    for sections, hidden in ((0, ["toc"]), (1, ["toc"]), (2, [])):
        title = SimpleNamespace(children=["section"] * sections)
        page = SimpleNamespace(toc=[title], meta={})
        lay_out("<p>Text.</p>", page=page)
        assert page.meta.get("hide", []) == hidden


def test_short_code_is_marked(lay_out):
    short = "<p><code>--decisions</code>, <code>a = 5</code></p>"
    assert lay_out(short) == short.replace("<code>", '<code class="short">')


def test_long_cells_are_marked(lay_out):
    row = '<tr><td>a name of some length</td><td>short</td><td style="">1</td></tr>'
    assert lay_out(row) == row.replace("<td>a", '<td class="long">a')
    assert lay_out("<td><a href='https://example.org'>short</a></td>").startswith("<td>")
