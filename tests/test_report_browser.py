"""The page of the report in a real browser: what is seen, what moves, what it leaves alone."""

import io
from dataclasses import replace

import numpy as np
import pytest

from neuvar import report
from neuvar.experiments.findings import Cell, Table, Verdict
from tests.conftest import CONTRAST, NOWHERE, PATIENCE
from tests.test_report_examples import HOSTILE, claims, recorded, results

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.browser
LINES = {"light": [(213, 94, 0), (0, 114, 178)], "dark": [(245, 133, 58), (79, 168, 224)]}
"""Colours of SGD and of NVRM."""

NUMBERS = (0.31, 0.052, 0.9, 0.1)

# Columns that, sorted up and down, are not in the order of the values that their cells carry.
WRONG = """() => {
  const wrong = [];
  for (const head of document.querySelectorAll("th[data-sortable]")) {
    const body = head.closest("table").tBodies[0], numeric = "number" in head.dataset;
    const compare = (a, b) => numeric ? a - b : a.localeCompare(b, "en", {numeric: true});
    for (const sign of [1, -1]) {
      head.querySelector("button").click();
      const values = [...body.rows].map((row) => {
        const cell = row.cells[head.cellIndex], given = cell.dataset.sort;
        return numeric ? parseFloat(given) : given ?? cell.textContent.trim();
      });
      const known = values.filter((v) => v === v);
      const gaps = values.slice(0, known.length).some((v) => v !== v);
      const order = known.slice(1).every((v, i) => sign * compare(v, known[i]) >= 0);
      if (gaps || !order) wrong.push(head.textContent);
    }
  }
  return wrong;
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of all examples; the table of one of them has gaps, and no order."""

    def table(_):
        rows = [(name, Cell((x,)), "3") for name, x in zip("badc", NUMBERS, strict=True)]
        return Table(("name", "accuracy", "n"), (*rows, ("gap", Cell(()), "–")))

    some = [replace(e, table=table) if e.name == "ewc" else e for e in claims()]
    return report.write(report.gather_claims(results(), some), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def start(written):
    return written.page


def shown(page, selector):
    return page.locator(selector).evaluate_all(
        "all => all.filter(e => e.offsetParent).map(e => e.id)"
    )


def test_it_opens_without_complaints_and_asks_for_nothing(visit):
    page = visit().page
    assert page.title() == "Neural variability: claims and results"
    assert page.locator("#shown").inner_text() == "Showing all 6 claims."


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_seen(visit, written, scheme):
    page = visit(color_scheme=scheme).page
    boxes = page.locator(".panel svg").evaluate_all(
        "all => all.map(e => { const b = e.getBoundingClientRect(); return [b.width, b.height]; })"
    )
    assert len(boxes) == sum(len(f.panels) for c in written.claims for f in c.findings)
    assert all(width > 200 and height > 120 for width, height in boxes)
    from matplotlib.image import imread

    for i in range(len(boxes)):
        png = page.locator(".panel svg").nth(i).screenshot()
        pixels = (imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)
        for colour in LINES[scheme]:
            near = np.abs(pixels - colour).max(axis=-1) < 12
            assert near.sum() > 100, f"panel {i} has no line in the colour {colour}"


@pytest.mark.parametrize("width", [360, 1280])
def test_every_forest_plot_is_seen_and_its_numbers_fold_out(visit, written, width):
    page = visit(viewport={"width": width, "height": 800}).page
    judged = [f for c in written.claims for f in c.findings if f.verdict.cases]
    plots = page.locator(".forest svg")
    assert plots.count() == len(judged)
    for i in range(plots.count()):
        box = plots.nth(i).bounding_box()
        assert 200 < box["width"] < 500
        assert box["height"] > 60
    (ewc,) = [f.verdict for f in judged if f.name == "ewc-cpu"]
    numbers = page.locator("#ewc-cpu details td", has_text=ewc.cases[0].numbers[0])
    assert not numbers.is_visible()
    page.locator("#ewc-cpu summary", has_text="Comparisons in numbers").click()
    assert numbers.is_visible()


class TestTables:
    def order(self, page):
        cells = page.locator("#ewc-cpu > .scroll tbody tr th")
        return cells.all_inner_texts()

    def test_numbers_sort_by_mean_both_ways_and_gaps_stay_last(self, visit):
        page = visit().page
        assert self.order(page) == ["b", "a", "d", "c", "gap"]
        head = page.locator("#ewc-cpu > .scroll thead th").nth(1)
        assert head.get_attribute("aria-sort") is None
        head.get_by_role("button").click()
        assert self.order(page) == ["a", "c", "b", "d", "gap"]
        assert head.get_attribute("aria-sort") == "ascending"
        head.get_by_role("button").click()
        assert self.order(page) == ["d", "b", "c", "a", "gap"]
        assert head.get_attribute("aria-sort") == "descending"

    def test_words_sort_too_and_by_keyboard(self, visit):
        page = visit().page
        heads = page.locator("#ewc-cpu > .scroll thead th")
        heads.nth(1).get_by_role("button").click()
        heads.nth(0).get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert self.order(page) == ["a", "b", "c", "d", "gap"]
        assert heads.nth(0).get_attribute("aria-sort") == "ascending"
        assert heads.nth(1).get_attribute("aria-sort") is None
        page.keyboard.press("Space")
        assert self.order(page) == ["gap", "d", "c", "b", "a"]

    def test_every_table_sorts(self, visit):
        """Each column of each table, against the values that its cells carry."""
        page = visit().page
        wrong = page.evaluate(WRONG)
        assert wrong == []


class TestFilters:
    def test_verdicts(self, visit):
        page = visit().page
        for value, names in (
            ("preliminary-false", ["ewc-cpu"]),
            ("preliminary-undecided", ["gradient-noise-cpu"]),
            ("preliminary-true", ["robustness-cpu", "pair-flips-cpu", "forgetting-cpu"]),
            ("true", ["robustness-paper"]),
        ):
            button = page.locator(f'.chipbutton[value="{value}"]')
            button.click()
            assert button.get_attribute("aria-pressed") == "true"
            assert shown(page, "article.finding") == names
            rows = page.locator(".summary tbody tr:visible")
            assert rows.count() == len(names)
            claims = {name.rpartition("-")[0] for name in names}
            assert set(shown(page, ".claim")) == {f"claim-{name}" for name in claims}
        page.locator('.chipbutton[value="none"]').click()
        assert shown(page, ".claim") == ["claim-split"]
        page.locator('.chipbutton[value=""]').click()
        assert len(shown(page, ".claim")) == 6

    def test_words(self, visit):
        page = visit().page
        page.locator("#search").fill("ELASTIC  weight")
        assert shown(page, ".claim") == ["claim-ewc"]
        assert page.locator("#shown").inner_text() == "Showing 1 of 6 claims."
        page.locator("#search").fill("no such words")
        assert shown(page, ".claim") == []
        page.locator("#nothing .clear").click()
        assert len(shown(page, ".claim")) == 6
        assert page.locator("#search").input_value() == ""

    def test_scales_and_all_together(self, visit):
        page = visit().page
        page.locator("#scale").select_option("paper")
        assert shown(page, "article.finding") == ["robustness-paper"]
        page.locator('.chipbutton[value="preliminary-false"]').click()
        assert shown(page, ".claim") == []
        page.locator("#scale").select_option("cpu")
        assert shown(page, "article.finding") == ["ewc-cpu"]

    def test_a_link_to_what_is_filtered_out_shows_it(self, visit):
        page = visit().page
        page.locator("#search").fill("elastic")
        page.locator('#claim-ewc a[rel="next"]').click()
        assert page.url.endswith("#claim-split")
        assert "claim-split" in shown(page, ".claim")
        place = "e => Math.abs(e.getBoundingClientRect().top)"
        for _ in range(10 * PATIENCE):  # scrolling is smooth
            if page.locator("#claim-split").evaluate(place) < 100:
                break
            page.wait_for_timeout(100)
        assert page.locator("#claim-split").evaluate(place) < 100


class TestTheme:
    def ground(self, page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_button_turns_it_and_it_is_remembered(self, visit, scheme):
        visited = visit(color_scheme=scheme)
        page = visited.page
        button = page.locator("#theme")
        before, other = self.ground(page), {"light": "Dark", "dark": "Light"}[scheme]
        assert button.inner_text() == other
        button.click()
        after = self.ground(page)
        assert after != before
        visited.reload(lambda: self.ground(page) == after)
        assert self.ground(page) == after
        button.click()
        assert self.ground(page) == before

    def test_it_works_where_nothing_can_be_remembered(self, visit):
        page = visit(before=NOWHERE).page
        before = self.ground(page)
        page.locator("#theme").click()
        assert self.ground(page) != before

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_all_words_stand_out(self, visit, scheme):
        page = visit(color_scheme=scheme).page
        page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        found = page.evaluate(CONTRAST)
        assert len(found) > 200
        assert found[0][0] >= 4.5, found[:3]


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_never_scrolls_sideways(visit, width):
    page = visit(viewport={"width": width, "height": 800}).page
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate("""() => [...document.querySelectorAll("body *")].filter((e) =>
      !e.closest(".scroll table, .command code, .label, .skip, svg *") &&
      e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1
    ).map((e) => e.outerHTML.slice(0, 80))""")
    assert cut == []


def test_on_a_phone_wide_tables_scroll_in_their_own_box_and_figures_fit(visit):
    page = visit(viewport={"width": 360, "height": 800}, has_touch=True, is_mobile=True).page
    sizes = page.locator(".finding .scroll").evaluate_all(
        "all => all.map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert any(inner > outer for inner, outer in sizes)
    assert page.locator(".scroll").first.evaluate("e => getComputedStyle(e).overflowX") == "auto"
    small = page.locator(".panel svg text").evaluate_all("""all => Math.min(...all.map(
      (e) => parseFloat(getComputedStyle(e).fontSize) * e.getCTM().a || 99))""")
    assert small >= 8


def test_command_is_copied(visit):
    one = visit()
    one.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = one.page.locator("#ewc-cpu .copy")
    button.click()
    button.filter(has_text="Copied").wait_for()
    assert one.page.evaluate("navigator.clipboard.readText()") == "neuvar run ewc --scale cpu"


def test_command_is_selected_where_it_cannot_be_copied(visit):
    page = visit().page
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject('no'); }")
    button = page.locator("#ewc-cpu .copy")
    button.click()
    button.filter(has_text="Selected").wait_for()
    assert page.evaluate("getSelection().toString()") == "neuvar run ewc --scale cpu"


def test_a_line_can_be_seen_alone(visit):
    page = visit().page
    button = page.locator("#ewc-cpu .legend button").nth(1)
    series = "#ewc-cpu .series"
    button.click()
    page.mouse.move(0, 0)
    assert button.get_attribute("aria-pressed") == "true"
    dim = page.locator(series).evaluate_all(
        "all => all.map(e => [e.classList.contains('s1'), e.classList.contains('dim')])"
    )
    assert len(dim) >= 4
    assert all(alone != dimmed for alone, dimmed in dim)
    button.click()
    page.mouse.move(0, 0)
    assert page.locator(f"{series}.dim").count() == 0


def test_print_is_light_and_has_all_details(visit):
    page = visit(color_scheme="dark").page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".filters").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0


def test_without_scripts_all_of_it_can_be_read(visit):
    page = visit(java_script_enabled=False).page
    assert page.locator(".claim:visible").count() == 6
    assert page.locator(".panel svg:visible").count() > 8
    assert not page.locator(".filters").is_visible()
    assert not page.locator("#theme").is_visible()


def test_hostile_words_do_nothing(visit, tmp_path):
    e = next(e for e in claims() if e.name == "gradient-noise")
    have = {run.key: recorded(run, machine=HOSTILE) | {"when": HOSTILE} for run in e.runs("cpu", 1)}
    for line in have.values():
        line["reason"] = line["reason"] and HOSTILE
    hostile = replace(
        e,
        number=HOSTILE,
        title=HOSTILE,
        sentence=HOSTILE,
        source=HOSTILE,
        settings=lambda scale: HOSTILE,
        panels=lambda found: [
            replace(p, title=HOSTILE, lines=tuple(replace(line, label=HOSTILE) for line in p.lines))
            for p in e.panels(found)
        ],
        table=lambda found: Table((HOSTILE, "n"), ((HOSTILE, HOSTILE),)),
        check=lambda found: Verdict("undecided", HOSTILE),
    )
    done = report.write(report.gather_claims({"cpu": have}, [hostile]), tmp_path)
    page = visit(done.page).page
    page.locator("#search").fill("<script>")
    assert len(shown(page, ".claim")) == 1
    page.locator(".finding th button").first.click()
    assert page.locator("blockquote").inner_text().startswith("</script><script>alert(1)")
    assert page.locator("img").count() == 0
