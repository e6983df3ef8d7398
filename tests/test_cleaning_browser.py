"""The page of a cleaning in a real browser: what is seen, decided, remembered and given out."""

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from neuvar.cleaning.readers import Source
from neuvar.cleaning.results import label_rows, write_cleaning, write_decided
from tests.conftest import CONTRAST, NOWHERE
from tests.test_cleaning_page import HOSTILE, RTL, cleaning

pytestmark = pytest.mark.browser
NAMES = ("=ant", "bee, wild", 'cat "tom"', "dog")


@pytest.fixture
def own():
    return ("data:", "blob:")  # pictures, and what is downloaded


@pytest.fixture(scope="module")
def one():
    """400 images, of which about half are flagged."""
    return cleaning(n=400, names=NAMES, wrong=0.5)


@pytest.fixture(scope="module")
def written(one, tmp_path_factory):
    out = tmp_path_factory.mktemp("clean") / "out"
    write_cleaning(one, out, top=150)
    return out


@pytest.fixture(scope="module")
def start(written):
    return written / "index.html"


@pytest.fixture
def page(visit):
    return visit().page


def shown(page):
    """Numbers of the examples that are in the grid."""
    return page.locator(".card").evaluate_all("all => all.map(e => Number(e.dataset.index))")


def said(page):
    return page.locator("#count").inner_text()


def downloaded(page, button):
    """The bytes that a button gives out."""
    with page.expect_download() as waiting:
        page.locator(button).click()
    path = waiting.value.path()
    return waiting.value.suggested_filename, Path(path).read_bytes()


def rows_of(content):
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def show_more(page):
    """Press the button by key: the layout may still move under the mouse."""
    page.locator("#more").press("Enter")


def card(page, index):
    return page.locator(f'.card[data-index="{index}"]')


def worst_of(one, given, suggested):
    issues = one.issues
    return [
        int(i)
        for i in issues.worst[:150]
        if (issues.labels[i], issues.suggested[i]) == (given, suggested)
    ]


class TestSeen:
    def test_head(self, page, one):
        assert page.title() == "Labels of pets.npz"
        assert page.locator("h1").inner_text() == "Which labels of “pets.npz” are wrong?"
        texts = page.locator(".figures dd").all_inner_texts()
        figures = [text.replace("\xa0", " ") for text in texts]  # which keeps "%" on the line
        assert figures[0].split() == ["400", "in", "4", "classes"]
        assert figures[1].startswith(str(one.flagged))
        assert figures[2].split("\n")[0].startswith("30.0 %")
        assert "20.0 – 41.5 %" in figures[2]
        page.locator(".how summary").click()
        assert "0.05" in page.locator(".settings").inner_text()
        assert page.locator(".how code").inner_text() == "neuvar clean pets.npz"

    def test_pictures_are_seen_pixel_by_pixel(self, page, one):
        first = page.locator(".card img").first
        assert first.evaluate("e => [e.complete, e.naturalWidth, e.naturalHeight]") == [True, 8, 8]
        box = first.bounding_box()
        assert box["width"] > 100
        seen = first.evaluate("""e => {
          const context = new OffscreenCanvas(8, 8).getContext("2d");
          context.drawImage(e, 0, 0);
          return [...context.getImageData(0, 0, 8, 8).data].filter((_, i) => i % 4 === 0);
        }""")
        image = one.source.examples.inputs[int(one.issues.worst[0])]
        assert seen == image.flatten().tolist()

    def test_cards_say_what_is_known(self, page, one):
        index = int(one.issues.worst[0])
        text = card(page, index).inner_text()
        issues = one.issues
        given, suggested = NAMES[issues.labels[index]], NAMES[issues.suggested[index]]
        assert given in text
        assert suggested in text
        assert f"#{index}" in text
        assert f"wrong: {int(100 * float(f'{issues.error_probability[index]:.4g}'))} %" in text

    def test_the_worst_come_first_and_more_on_demand(self, page, one):
        worst = one.issues.worst[:150].tolist()
        assert shown(page) == worst[:60]
        assert "(90 left)" in page.locator("#more").inner_text()
        show_more(page)
        assert shown(page) == worst[:120]
        assert page.evaluate("Number(document.activeElement.dataset.index)") == worst[60]
        show_more(page)
        assert shown(page) == worst
        assert not page.locator("#more").is_visible()
        assert page.locator("#shown").inner_text() == (
            f"All 150 examples on this page are shown; issues.csv has all {one.flagged} "
            "flagged labels."
        )

    def test_order(self, page, one):
        worst = one.issues.worst[:150].tolist()
        page.locator("#order").select_option("best")
        assert shown(page) == worst[::-1][:60]
        page.locator("#order").select_option("data")
        assert shown(page) == sorted(worst)[:60]
        page.locator("#order").select_option("sure")
        assert shown(page) == worst[:60]  # here the quality is that the label is right
        page.locator("#order").select_option("worst")
        assert shown(page) == worst[:60]

    @pytest.mark.parametrize(("width", "what"), [(4, "table"), (30, "svg")])
    def test_features(self, visit, tmp_path, width, what):
        one = cleaning(n=30, shape=(width,))
        write_cleaning(one, tmp_path / "out", top=9)
        page = visit(tmp_path / "out/index.html").page
        first = page.locator(f".card {what}").first
        assert first.bounding_box()["height"] > 50
        index = int(one.issues.worst[0])
        values = one.source.examples.inputs[index].tolist()
        if what == "table":
            assert [float(v) for v in first.locator("td").all_inner_texts()] == values
        else:
            assert first.locator("rect").count() == width
            signs = one.source.examples.inputs - one.source.examples.inputs.mean(0)
            above = first.locator("rect").evaluate_all("all => all.map(e => e.getAttribute('y'))")
            assert [float(y) < 99 for y in above] == [
                round(float(100 * z / s / 3)) > 1
                for z, s in zip(signs[index], signs.std(0, correction=0), strict=True)
            ]

    def test_nothing_flagged(self, visit, tmp_path):
        write_cleaning(cleaning(wrong=0.0), tmp_path / "out", top=9)
        page = visit(tmp_path / "out/index.html").page
        assert page.locator("#shown").inner_text() == "No label is flagged."
        assert page.locator(".card").count() == 0
        assert page.locator("#save-decisions").is_disabled()
        assert page.locator("#accept-all").is_disabled()
        assert downloaded(page, "#save-labels")[1] == (tmp_path / "out/labels.csv").read_bytes()

    def test_none_of_those_that_are_flagged(self, visit, tmp_path):
        one = cleaning()
        write_cleaning(one, tmp_path / "out", top=0)
        page = visit(tmp_path / "out/index.html").page
        assert page.locator("#shown").inner_text() == (
            f"This page has no examples; issues.csv has all {one.flagged} flagged labels."
        )
        assert page.locator("#accept-all").is_disabled()


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    one = cleaning(n=40)
    suggested = one.issues.suggested
    assert (suggested == one.issues.labels)[~one.issues.flagged].any()
    out = tmp_path_factory.mktemp("some") / "out"
    write_cleaning(one, out, top=30)
    return one, out


class TestUnflagged:
    def test_one_click_shows_the_others(self, visit, some):
        one, out = some
        page = visit(out / "index.html").page
        worst, others = one.issues.worst.tolist(), one.issues.ranked.tolist()
        others = [i for i in others if not one.issues.flagged[i]][: 30 - len(worst)]
        assert shown(page) == worst
        assert page.locator("#shown").inner_text() == (
            f"All {len(worst)} flagged examples on this page are shown."
        )
        page.locator('#scope [value="others"]').click()
        assert shown(page) == others
        assert page.locator(".boundary").count() == 0
        assert said(page).startswith(f"0 of {len(others)} decided")
        assert "not flagged" in card(page, others[0]).inner_text()
        page.locator('#scope [value=""]').click()
        assert shown(page) == worst + others
        marks = page.locator(".portion > li").evaluate_all("all => all.map(e => e.className)")
        assert marks.index("boundary") == len(worst)
        assert marks.count("boundary") == 1
        page.locator("#order").select_option("data")
        assert page.locator(".boundary").count() == 0
        page.locator(f'#map [data-row="{one.issues.labels[worst[0]]}"]').nth(1).click()
        assert page.locator('#scope [value="flagged"]').get_attribute("aria-pressed") == "true"

    def test_without_a_suggestion_the_label_can_only_be_kept_or_changed(self, visit, some):
        one, out = some
        page = visit(out / "index.html").page
        page.locator('#scope [value="others"]').click()
        index = next(i for i in shown(page) if one.issues.suggested[i] == one.issues.labels[i])
        assert card(page, index).locator(".accept").count() == 0
        page.locator("#accept-all").click()
        assert card(page, index).get_attribute("data-decision") == ""
        card(page, index).locator(".reject").click()
        assert card(page, index).get_attribute("data-decision") == "reject"
        assert said(page).split("·")[0].split()[0] != "0"
        content = downloaded(page, "#save-decisions")[1].decode()
        assert f"\n{index}," in content

    def test_the_choice_is_not_offered_if_all_are_flagged(self, page):
        assert not page.locator("#scope").is_visible()


class TestFilters:
    def test_pair(self, page, one):
        page.locator("#given").select_option(label=NAMES[1])
        page.locator("#suggested").select_option(label=NAMES[3])
        wanted = worst_of(one, 1, 3)
        assert 3 < len(wanted) < 60
        assert shown(page) == wanted
        assert page.locator("#shown").inner_text().startswith(f"{len(wanted)} of 150 examples")
        page.locator("#clear").click()
        assert len(shown(page)) == 60
        assert not page.locator("#clear").is_visible()

    def test_text(self, page, one):
        first, second = (int(i) for i in one.issues.worst[[3, 8]])
        page.locator("#search").fill(str(first))
        assert shown(page) == [first]
        page.locator("#search").fill(f"#{first}, {second} 999999")
        assert shown(page) == [first, second]
        page.locator("#search").fill("nothing")
        assert shown(page) == []
        assert page.locator("#nothing").is_visible()
        assert page.locator("#accept-all").is_disabled()

    def test_cell_of_the_map(self, page, one):
        cell = page.locator('#map [data-row="2"][data-column="0"]')
        assert cell.inner_text() == str(one.issues.pairs[2, 0])
        cell.click()
        assert shown(page) == worst_of(one, 2, 0)
        assert cell.get_attribute("aria-selected") == "true"
        assert page.locator("#given").input_value() == "2"
        assert page.locator("#readout").inner_text() == (
            f"{NAMES[2]} given, {NAMES[0]} suggested: {one.issues.pairs[2, 0]} flagged"
        )
        cell.click()
        assert len(shown(page)) == 60
        assert cell.get_attribute("aria-selected") is None

    @pytest.mark.parametrize("view", ["pairs", "transition"])
    def test_an_empty_cell_of_the_map(self, visit, tmp_path, view):
        """Labels of 0 are flagged as 1, and no others: the lists know all classes nevertheless."""
        one = cleaning()
        issues = one.issues
        suggested = np.where(issues.labels == 0, 1, issues.labels)
        one = replace(one, issues=replace(issues, suggested=suggested, flagged=issues.labels == 0))
        write_cleaning(one, tmp_path / "out", top=9)
        page = visit(tmp_path / "out/index.html").page
        page.locator(f'.views [value="{view}"]').click()
        for given, wanted in ((2, 1), (0, 2), (2, 2)):
            row, column = (given, wanted) if view == "pairs" else (wanted, given)
            cell = page.locator(f'#map [data-row="{row}"][data-column="{column}"]')
            cell.click()
            assert shown(page) == []
            assert page.locator("#shown").inner_text().startswith("0 of 9 examples")
            assert page.locator("#nothing").inner_text() == "No example matches."
            assert page.locator("#accept-all").is_disabled()
            assert cell.get_attribute("aria-selected") == "true"
            cell.click()
            assert len(shown(page)) == 9

    def test_every_cell_has_its_number(self, page, one):
        table = page.locator("#map tbody tr").evaluate_all(
            "all => all.map(r => [...r.cells].slice(1).map(c => Number(c.textContent)))"
        )
        assert table == one.issues.pairs.tolist()

    def test_estimated_noise(self, page, one):
        page.locator('.views [value="transition"]').click()
        matrix = one.issues.transition.matrix
        table = page.locator("#map tbody tr").evaluate_all(
            "all => all.map(r => [...r.cells].slice(1).map(c => Number(c.textContent)))"
        )
        assert np.allclose(table, 100 * matrix, atol=0.51)
        cell = page.locator('#map [data-row="0"][data-column="2"]')
        cell.click()
        assert shown(page) == worst_of(one, 2, 0)
        low, high = one.issues.transition.low[0, 2], one.issues.transition.high[0, 2]
        assert page.locator("#readout").inner_text() == (
            f"{NAMES[0]} gets the label {NAMES[2]}: {100 * matrix[0, 2]:.1f} %, "
            f"interval {100 * low:.1f} % – {100 * high:.1f} %"
        )

    def test_map_by_keyboard(self, page, one):
        page.locator('#map [data-row="0"][data-column="0"]').focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp"):
            page.keyboard.press(key)
        assert page.evaluate(
            "[document.activeElement.dataset.row, document.activeElement.dataset.column]"
        ) == ["1", "1"]
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")  # there is nothing further left
        page.keyboard.press("Enter")
        assert shown(page) == worst_of(one, 1, 0)
        assert page.locator('#map [tabindex="0"]').count() == 1

    def test_frequent_pairs(self, page, one):
        first = page.locator("#pairs button").first
        i, j = np.unravel_index(one.issues.pairs.argmax(), one.issues.pairs.shape)
        assert first.locator(".times").inner_text() == str(one.issues.pairs.max())
        first.click()
        assert shown(page) == worst_of(one, i, j)
        assert first.get_attribute("aria-pressed") == "true"

    def test_decisions(self, page, one):
        worst = one.issues.worst.tolist()
        for i in (0, 2):
            card(page, worst[i]).locator(".accept").click()
        page.locator("#decided").select_option("made")
        assert shown(page) == [worst[0], worst[2]]
        page.locator("#decided").select_option("open")
        assert shown(page)[:2] == [worst[1], worst[3]]


class TestDecisions:
    def test_accept_reject_other_and_undo(self, page, one):
        a, b, c = (int(i) for i in one.issues.worst[:3])
        card(page, a).locator(".accept").click()
        card(page, b).locator(".reject").click()
        assert said(page) == "2 of 150 decided · 1 accepted · 1 rejected"
        third = ({0, 1, 2, 3} - {int(one.issues.labels[c]), int(one.issues.suggested[c])}).pop()
        choice = card(page, c).locator("select")
        choice.focus()
        choice.select_option(label=NAMES[third])
        assert said(page) == "3 of 150 decided · 1 accepted · 1 rejected · 1 other"
        kinds = [card(page, i).get_attribute("data-decision") for i in (a, b, c)]
        assert kinds == ["accept", "reject", "other"]
        pressed = card(page, a).locator(".accept").get_attribute("aria-pressed")
        assert pressed == "true"
        page.locator("#undo").click()
        assert choice.input_value() == ""
        page.locator("#undo").click()
        assert said(page) == "1 of 150 decided · 1 accepted"
        assert card(page, b).get_attribute("data-decision") == ""
        page.locator("#undo").click()
        assert said(page) == "0 of 150 decided"

    def test_a_second_click_takes_it_back(self, page, one):
        a = int(one.issues.worst[0])
        for kind in ("accept", "reject", "reject"):
            card(page, a).locator(f".{kind}").click()
        assert card(page, a).get_attribute("data-decision") == ""
        page.locator("#undo").click()
        assert card(page, a).get_attribute("data-decision") == "reject"

    def test_the_given_label_from_the_list_is_a_rejection(self, page, one):
        a = int(one.issues.worst[0])
        choice = card(page, a).locator("select")
        choice.focus()
        choice.select_option(label=NAMES[one.issues.labels[a]])
        assert card(page, a).get_attribute("data-decision") == "reject"
        assert choice.input_value() == ""

    def test_all_shown_at_once_leaves_what_is_decided(self, page, one):
        wanted = worst_of(one, 1, 3)
        page.locator('#map [data-row="1"][data-column="3"]').click()
        card(page, wanted[1]).locator(".reject").click()
        page.locator("#accept-all").click()
        assert said(page) == (
            f"{len(wanted)} of 150 decided · {len(wanted) - 1} accepted · 1 rejected"
        )
        page.locator("#undo").click()
        assert said(page) == "1 of 150 decided · 1 rejected"
        page.locator("#clear").click()
        page.locator("#reject-all").click()  # not those that are not drawn yet
        assert said(page) == "60 of 150 decided · 60 rejected"
        page.locator("#forget").click()
        assert said(page).startswith("0 of 150 decided")
        page.locator("#undo").click()
        assert said(page).startswith("60 of 150 decided")

    def test_keys(self, page, one):
        worst = [int(i) for i in one.issues.worst]
        card(page, worst[0]).focus()
        for key in ("a", "r", "ArrowRight", "A"):
            page.keyboard.press(key)
        kinds = [card(page, i).get_attribute("data-decision") for i in worst[:5]]
        assert kinds == ["accept", "reject", "", "accept", ""]
        here = "Number(document.activeElement.dataset.index)"
        assert page.evaluate(here) == worst[4]
        page.keyboard.press("u")
        assert said(page) == "2 of 150 decided · 1 accepted · 1 rejected"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        columns = page.locator(".portion").first.evaluate(
            "e => getComputedStyle(e).gridTemplateColumns.split(' ').length"
        )
        assert columns > 3
        assert page.evaluate(here) == worst[3 + columns]
        page.keyboard.press("ArrowUp")
        assert page.evaluate(here) == worst[3]
        page.keyboard.press("Control+a")  # is the browser's
        assert card(page, worst[3]).get_attribute("data-decision") == ""
        assert page.locator('.card[tabindex="0"]').count() == 1

    def test_keys_go_on_beyond_what_is_drawn(self, page, one):
        worst = [int(i) for i in one.issues.worst]
        card(page, worst[59]).focus()
        page.keyboard.press("a")
        assert page.evaluate("Number(document.activeElement.dataset.index)") == worst[60]

    def test_n_goes_to_the_next_open_label_from_anywhere(self, page, one):
        worst = [int(i) for i in one.issues.worst]
        here = "Number(document.activeElement.dataset.index)"
        page.keyboard.press("n")
        assert page.evaluate(here) == worst[0]
        page.keyboard.press("n")
        assert page.evaluate(here) == worst[1]
        for i in (2, 3):
            card(page, worst[i]).locator(".accept").click()
        card(page, worst[1]).focus()
        page.keyboard.press("n")
        assert page.evaluate(here) == worst[4]
        page.locator("#accept-all").click()
        page.keyboard.press("n")  # the first that is not drawn yet
        assert page.evaluate(here) == worst[60]
        assert page.locator(".card").count() >= 61
        page.locator("#search").press_sequentially("n")
        assert page.evaluate("document.activeElement.id") == "search"

    def test_progress(self, page, one):
        bar = page.locator("#progress")
        assert bar.evaluate("e => [e.value, e.max]") == [0, 150]
        for i in one.issues.worst[:3]:
            card(page, int(i)).locator(".reject").click()
        assert bar.evaluate("e => [e.value, e.max]") == [3, 150]

    def test_nothing_covers_the_cards(self, page, one):
        """Neither the card that has the focus, nor the last one."""
        apart = """() => {
          const dock = document.getElementById("dock").getBoundingClientRect();
          const card = document.activeElement.getBoundingClientRect();
          return card.top >= dock.bottom && card.bottom <= innerHeight;
        }"""
        card(page, int(one.issues.worst[0])).focus()
        for key in (*["ArrowDown"] * 9, *["ArrowUp"] * 5, *["a"] * 70):
            page.keyboard.press(key)
            assert page.evaluate(apart), key
        while page.locator("#more").is_visible():
            show_more(page)
        page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
        dock, last = page.locator("#dock").bounding_box(), page.locator(".card").last
        assert dock["y"] + dock["height"] <= last.bounding_box()["y"]

    def test_typing_in_a_field_decides_nothing(self, page):
        page.locator(".card select").first.focus()
        page.keyboard.press("a")
        page.locator("#search").press_sequentially("ararua")
        assert said(page) == "0 of 150 decided"

    def test_they_are_remembered(self, visit, one):
        visited = visit()
        page = visited.page
        a, b = (int(i) for i in one.issues.worst[[0, 100]])
        card(page, a).locator(".reject").click()
        show_more(page)
        card(page, b).locator(".accept").click()
        both = "2 of 150 decided · 1 accepted · 1 rejected"
        visited.reload(lambda: said(page) == both)
        assert said(page) == both
        assert card(page, a).get_attribute("data-decision") == "reject"
        show_more(page)
        assert card(page, b).get_attribute("data-decision") == "accept"
        assert page.locator("#undo").is_disabled()
        kept = page.evaluate("Object.keys(localStorage)")
        assert kept == [f"neuvar-clean-{one.source.sha256[:16]}"]

    def test_other_suggestions_do_not_turn_them_around(self, visit, one, tmp_path):
        """What is kept is the label, not whether it was the suggestion of that time."""
        page = visit().page
        a = int(one.issues.worst[0])
        card(page, a).locator(".accept").click()
        label = int(one.issues.suggested[a])
        suggested = one.issues.suggested.copy()
        suggested[a] = ({0, 1, 2, 3} - {label, int(one.issues.labels[a])}).pop()
        later = replace(one, issues=replace(one.issues, suggested=suggested))
        write_cleaning(later, tmp_path / "out", top=150)
        kept = page.evaluate("({...localStorage})")
        again = visit(tmp_path / "out/index.html")
        again.page.evaluate("kept => Object.assign(localStorage, kept)", kept)
        again.reload(lambda: card(again.page, a).get_attribute("data-decision") == "other")
        assert card(again.page, a).get_attribute("data-decision") == "other"
        assert rows_of(downloaded(again.page, "#dock-save")[1])[1][3:] == [
            "other",
            NAMES[label] if label else "'=ant",
        ]

    def test_what_others_have_stored_is_no_harm(self, visit, one):
        key = json.dumps(f"neuvar-clean-{one.source.sha256[:16]}")
        a = int(one.issues.worst[0])

        def opened(kept):
            page = visit(before=f"localStorage.setItem({key}, {json.dumps(kept)})").page
            assert page.locator(".card").count() == 60
            return page

        for kept in (
            *("nonsense", "null", "7", "[1, 1, 1, 1]", '{"-1":0}', '{"x":0}'),
            *(f'{{"{a}":{label}}}' for label in ('"x"', 4, -1, 1.5, "null")),
        ):
            assert said(opened(kept)) == "0 of 150 decided", kept
        assert said(opened(f'{{"{a}":3}}')).startswith("1 of 150 decided")

    def test_without_storage(self, visit, one):
        page = visit(before=NOWHERE).page
        card(page, int(one.issues.worst[0])).locator(".accept").click()
        assert said(page) == "1 of 150 decided · 1 accepted"
        page.locator("#theme").click()


class TestDownloads:
    def decide(self, page, one):
        a, b, c = (int(i) for i in one.issues.worst[[4, 0, 7]])
        card(page, a).locator(".accept").click()
        card(page, b).locator(".reject").click()
        third = ({0, 1, 2, 3} - {int(one.issues.labels[c]), int(one.issues.suggested[c])}).pop()
        card(page, c).locator("select").focus()
        card(page, c).locator("select").select_option(str(third))
        return {
            a: ("accept", int(one.issues.suggested[a])),
            b: ("reject", int(one.issues.labels[b])),
            c: ("other", third),
        }

    @pytest.mark.parametrize("button", ["#save-decisions", "#dock-save"])
    def test_decisions(self, page, one, button):
        made = self.decide(page, one)
        name, content = downloaded(page, button)
        assert name == "decisions.csv"
        a, b, c = made

        def safe(k):
            return "'=ant" if k == 0 else NAMES[k]

        wanted = [["index", "given", "suggested", "decision", "label"]]
        wanted += [
            [
                str(i),
                safe(one.issues.labels[i]),
                safe(one.issues.suggested[i]),
                made[i][0],
                safe(made[i][1]),
            ]
            for i in (b, a, c)
        ]
        assert rows_of(content) == wanted

    def test_labels(self, page, one):
        name, content = downloaded(page, "#save-labels")
        assert name == "labels.csv"
        given = [list(row) for row in label_rows(one.source, one.issues.labels)]
        assert [[cell.removeprefix("'") for cell in row] for row in rows_of(content)] == given
        made = self.decide(page, one)
        labels = one.issues.labels.copy()
        for i, (_, k) in made.items():
            labels[i] = k
        _, content = downloaded(page, "#save-labels")
        ours = [list(row) for row in label_rows(one.source, labels)]
        theirs = [[cell.removeprefix("'") for cell in row] for row in rows_of(content)]
        assert theirs == ours

    def test_the_command_takes_them_back(self, page, one, written, tmp_path):
        out = tmp_path / "out"
        shutil.copytree(written, out)
        self.decide(page, one)
        (tmp_path / "decisions.csv").write_bytes(downloaded(page, "#save-decisions")[1])
        assert len(write_decided(one.source, out, tmp_path / "decisions.csv")) == 3
        assert (out / "labels.csv").read_bytes() == downloaded(page, "#save-labels")[1]
        assert page.locator("#apply-command").inner_text() == (
            f"neuvar clean pets.npz --decisions decisions.csv --out {written}"
        )

    def test_too_many_labels_stay_behind(self, visit, one, tmp_path, monkeypatch):
        monkeypatch.setattr("neuvar.cleaning.page.MAX_DATA", 2_000_100)
        write_cleaning(one, tmp_path / "out", top=9)
        page = visit(tmp_path / "out/index.html").page
        assert not page.locator("#save-labels").is_visible()
        assert page.locator("#too-many").is_visible()


class TestNames:
    def test_hostile_ones_are_shown_as_text(self, visit, tmp_path):
        names = (HOSTILE, "${js}", "نمله", '"><b onmouseover=alert(3)>')
        files = [f"{k}/{HOSTILE}/{i}.png" for i, k in enumerate("abcd" * 10)]
        files[3], files[5] = RTL, "-7+1"
        one = cleaning(names=names, files=files, wrong=0.8, command=HOSTILE)
        source = Source(HOSTILE, "folder", one.source.examples, one.source.values)
        one = cleaning(source=source, issues=one.issues, command=HOSTILE, data_arguments=(HOSTILE,))
        write_cleaning(one, tmp_path / "out", top=50)
        page = visit(tmp_path / "out/index.html").page
        assert HOSTILE.split("<!--")[0] in page.locator("h1").inner_text()
        assert page.locator("h1 bdi").evaluate("e => e.textContent") == HOSTILE
        seen = page.locator(".card .id").evaluate_all("all => all.map(e => e.textContent)")
        assert set(seen) == {files[i] for i in one.issues.worst}
        assert page.locator("b:not(.figures b)").count() == 0
        assert page.locator("img:not(.card img)").count() == 0
        given = {names[one.issues.labels[i]] for i in one.issues.worst}
        texts = page.locator("#given option").evaluate_all("all => all.map(e => e.textContent)")
        assert set(texts[1:]) == given
        page.locator("#given").select_option(label=HOSTILE)
        page.locator("#search").fill(".png")
        page.locator("#clear").click()
        page.locator("#accept-all").click()
        for cell in page.locator("#map [data-row]").all()[:6]:
            cell.hover()
        decided = downloaded(page, "#save-decisions")[1]
        (tmp_path / "decisions.csv").write_bytes(decided)
        assert (
            len(write_decided(source, tmp_path / "out", tmp_path / "decisions.csv")) == one.flagged
        )
        assert (tmp_path / "out/labels.csv").read_bytes() == downloaded(page, "#save-labels")[1]

    def test_files_are_searched_by_their_words(self, visit, tmp_path):
        files = [f"kind {i % 4}/Picture-{i}.png" for i in range(40)]
        one = cleaning(files=files, wrong=0.8)
        write_cleaning(one, tmp_path / "out", top=50)
        page = visit(tmp_path / "out/index.html").page
        page.locator("#search").fill("kind picture-1")
        assert shown(page) == [int(i) for i in one.issues.worst if "Picture-1" in files[i]]
        assert page.locator("#search-name").inner_text() == "File"

    def test_names_do_not_leak_their_direction(self, visit, tmp_path):
        files = [f"{RTL}{i}" for i in range(40)]
        write_cleaning(cleaning(files=files, wrong=0.8), tmp_path / "out", top=50)
        page = visit(tmp_path / "out/index.html").page
        first = page.locator(".card .id").first
        assert first.evaluate("e => [e.tagName, getComputedStyle(e).unicodeBidi]") == [
            "BDI",
            "isolate",
        ]


class TestTables:
    @pytest.fixture
    def table(self, visit, tmp_path):
        """A page of a table with a number, a category and a text."""
        one = cleaning(n=300, shape=(3,), wrong=0.5)
        worst = int(one.issues.worst[0])
        ages, cities = ["30", "31"] * 150, ["Rome"] * 300
        ages[worst], cities[worst] = "900", "Atlantis"
        texts = [f"<b>film {i}</b> was long, but its music made up for it" for i in range(300)]
        columns = ("age", "city", "review")
        cells = (tuple(ages), tuple(cities), tuple(texts))
        source = replace(one.source, kind="csv", columns=columns, cells=cells)
        write_cleaning(replace(one, source=source), tmp_path / "out", top=80)
        return visit(tmp_path / "out/index.html").page, worst, texts

    def test_names_and_values_with_the_unusual_marked(self, table):
        page, worst, _ = table
        names = card(page, worst).locator("th").all_inner_texts()
        assert names == ["age", "city"]
        unusual = card(page, worst).locator("td.unusual")
        assert [text.split()[0] for text in unusual.all_text_contents()] == ["900", "Atlantis"]
        other = page.locator(".card").nth(1)
        assert other.locator("td").count() == 2
        assert other.locator(".unusual").count() == 0

    def test_text_is_text(self, table):
        page, worst, texts = table
        for width in (320, 420, 768, 1200):
            page.set_viewport_size({"width": width, "height": 800})
            text = card(page, worst).locator(".text")
            assert text.inner_text().split("\n")[-1] == texts[worst]
            wide, lines = text.evaluate(
                "e => [e.clientWidth, e.clientHeight / parseFloat(getComputedStyle(e).lineHeight)]"
            )
            assert wide > 150
            assert lines < 7  # not a letter in each line


def test_thousands_of_cards_are_drawn_when_they_are_needed(visit, tmp_path):
    one = cleaning(n=5000, shape=(4, 4), wrong=0.9)
    write_cleaning(one, tmp_path / "out", top=5000)
    page = visit(tmp_path / "out/index.html").page
    cards = page.locator(".card")
    assert cards.count() == 60
    page.keyboard.press("n")
    for _ in range(59):
        page.keyboard.press("a")
    # Not page.wait_for_function: it evaluates a string, which the page's policy forbids.
    cards.nth(119).wait_for(state="attached")
    assert cards.count() == 120
    laid_out = page.locator(".portion").evaluate_all(
        "all => all.map(e => getComputedStyle(e).contentVisibility)"
    )
    assert laid_out == ["visible", "auto"]
    page.locator("#order").select_option("sure")
    assert cards.count() == 60


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    one = cleaning(n=1500, names=[f"class {k:03}" for k in range(120)], wrong=0.5)
    out = tmp_path_factory.mktemp("many") / "out"
    write_cleaning(one, out, top=500)
    return one, out


class TestManyClasses:
    def test_the_map_shows_those_that_matter_and_all_on_demand(self, visit, many):
        one, out = many
        page = visit(out / "index.html").page
        assert page.locator("#map tbody tr").count() == 20
        i, j = np.unravel_index(one.issues.pairs.argmax(), one.issues.pairs.shape)
        assert page.locator(f'#map [data-row="{i}"][data-column="{j}"]').inner_text() == str(
            one.issues.pairs.max()
        )
        page.locator("#extent select").select_option("all")
        assert page.locator("#map [data-row]").count() == 120 * 120
        cell = page.locator(f'#map [data-row="{i}"][data-column="{j}"]')
        cell.click()
        assert shown(page) == [
            int(k)
            for k in one.issues.worst[:500]
            if (one.issues.labels[k], one.issues.suggested[k]) == (i, j)
        ]
        assert page.locator("#readout").inner_text().endswith(f": {one.issues.pairs.max()} flagged")

    def test_of_very_many_the_map_says_that_it_has_some(self, visit, many, tmp_path):
        said = "The map shows the 20 most confused of 1,000 classes."
        assert said not in visit(many[1] / "index.html").page.locator("#reading").inner_text()
        names = [f"class {k}" for k in range(1000)]
        write_cleaning(cleaning(n=2000, names=names), tmp_path / "out", top=9)
        page = visit(tmp_path / "out/index.html").page
        assert not page.locator("#extent").is_visible()
        assert page.locator("#map tbody tr").count() == 20
        assert page.locator("#reading").inner_text().endswith(said)

    def test_lists_of_classes_are_filled_when_they_are_needed(self, visit, many):
        _, out = many
        page = visit(out / "index.html").page
        assert page.locator(".card option").count() == 60
        page.locator(".card select").first.focus()
        assert page.locator(".card option").count() == 60 + 120


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["pairs", "transition"])
def test_all_words_stand_out(visit, one, scheme, view):
    page = visit(color_scheme=scheme).page
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(251, 250, 247)", "dark": "rgb(21, 23, 27)"}[scheme]
    page.locator(".how summary").click()
    page.locator(f'.views [value="{view}"]').click()
    for i, kind in enumerate(("accept", "reject")):
        page.locator(f".card .{kind}").nth(i).click()
    page.locator(".card select").nth(2).focus()
    page.locator(".card select").nth(2).select_option(index=1)
    page.locator("#given").focus()
    found = page.evaluate(CONTRAST)
    assert len(found) > 300
    assert found[0][0] >= 4.5, found[:4]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_turns_and_is_remembered(visit, scheme):
    visited = visit(color_scheme=scheme)
    page = visited.page

    def ground():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    before = ground()
    page.locator("#theme").click()
    after = ground()
    assert after != before
    visited.reload(lambda: ground() == after)
    assert ground() == after


def test_the_page_never_scrolls_sideways(visit, tmp_path):
    long = [f"a-very-long-name-of-a-class-{k}-without-any-space-in-it" for k in range(30)]
    files = [f"{'deep-folder/' * 12}{i}.png" for i in range(60)]
    one = cleaning(n=60, names=long, files=files, wrong=0.9)
    source = Source("x" * 200, "folder", one.source.examples, one.source.values)
    one = cleaning(source=source, issues=one.issues, command="neuvar " * 60)
    write_cleaning(one, tmp_path / "out", top=50)
    page = visit(tmp_path / "out/index.html").page
    page.locator(".how summary").click()
    page.locator(".card .accept").first.click()
    for width in (320, 390, 768, 1280, 2200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate("""() => [...document.querySelectorAll("body *")].filter((e) =>
          !e.closest(".scroll table, .command code, .label, .skip, svg *, option") &&
          e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1
        ).map((e) => e.outerHTML.slice(0, 80))""")
        assert cut == []
        assert page.locator("#dock").bounding_box()["x"] >= 0


def test_on_a_phone_two_cards_stand_side_by_side_and_can_be_touched(visit):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page
    boxes = [page.locator(".card").nth(i).bounding_box() for i in (0, 1, 2)]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"]
    button = page.locator(".card .accept").first
    assert button.bounding_box()["height"] >= 30
    button.tap()
    assert page.locator("#count").inner_text() == "1 of 150 decided"


def test_everything_can_be_reached_and_has_a_name(page):
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, select, input, img")]
      .filter((e) => e.offsetParent && !(e.textContent.trim() && e.tagName === "BUTTON")
        && !e.labels?.length && !e.getAttribute("aria-label") && !e.getAttribute("alt"))
      .map((e) => e.outerHTML.slice(0, 80))""")
    assert unnamed == []
    assert page.locator(".card").first.get_attribute("aria-label").endswith(", open")
    headings = page.locator("h1, h2, h3").evaluate_all("all => all.map(e => Number(e.tagName[1]))")
    assert headings[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == (
        page.locator("[id]").count()
    )


def test_command_is_copied(visit):
    visited = visit()
    visited.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = visited.page.locator("#save .copy")
    button.click()
    button.filter(has_text="Copied").wait_for()
    copied = visited.page.evaluate("navigator.clipboard.readText()")
    assert re.match(r"neuvar clean pets\.npz --decisions decisions\.csv --out ", copied)


def test_without_scripts_it_says_where_to_look(visit):
    page = visit(java_script_enabled=False).page
    assert "issues.csv" in page.locator("noscript").inner_text()
    assert page.locator(".figures").is_visible()
    assert not page.locator("main").is_visible()


def test_print_is_light_and_shows_pictures(visit):
    page = visit(color_scheme="dark").page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".card img").first.is_visible()
    assert not page.locator(".choices").first.is_visible()
