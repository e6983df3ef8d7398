"""Pictures, summaries and the page of a cleaning, as far as they can be seen without a browser."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from neuvar.cleaning import Examples, LabelIssues, NoiseRate, Transition
from neuvar.cleaning.page import (
    MAX_DATA,
    MAX_TEXT,
    MIN_PICTURES,
    bars,
    embed,
    is_images,
    page_data,
    pictures,
    render_page,
)
from neuvar.cleaning.readers import Source
from neuvar.cleaning.results import write_cleaning
from neuvar.cleaning.summary import (
    Cleaning,
    escape_markdown,
    frequent_pairs,
    json_summary,
    markdown_summary,
)
from neuvar.cleaning.tables import escape_cell, unescape_cell

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \"'"
RTL = "\u202eתיוות\u202c.png"


def found(labels, suggested, quality, names, *, doubtful=False):
    """What a network might say: wrong are labels that it suggests another for, unless in doubt."""
    y, s = np.asarray(labels), np.asarray(suggested)
    q, classes = np.asarray(quality, dtype=float), len(names)
    matrix = np.zeros((classes, classes))
    np.add.at(matrix, (s, y), 1)
    with np.errstate(invalid="ignore"):
        matrix /= matrix.sum(1, keepdims=True)
    return LabelIssues(
        labels=y,
        probabilities=np.eye(classes)[s],
        quality=q,
        suggested=s,
        flagged=(s != y) & ~np.asarray(doubtful),
        error_probability=1 - q,
        suggestion_probability=1 - q,
        noise_rate=NoiseRate(0.3, 0.2, 0.415),
        transition=Transition(matrix, matrix / 2, np.sqrt(matrix)),
        names=tuple(names),
        values=np.arange(classes),
    )


def cleaning(
    n=40, names=("cat", "dog", "eel"), *, shape=(8, 8), files=(), seed=0, wrong=0.4, **facts
):
    """A cleaning of random images, or of features if the shape has one dimension."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, len(names), n)
    other = (truth + 1 + rng.integers(0, len(names) - 1, n)) % len(names)
    labels = np.where(rng.random(n) < wrong, other, truth).astype(np.int64)
    images = torch.from_numpy(rng.integers(0, 256, (n, *shape), dtype=np.uint8))
    inputs = images if len(shape) > 1 else images.float()
    examples = Examples(inputs, labels, tuple(names), tuple(files))
    kind = "folder" if files else "npz"
    source = Source("pets.npz", kind, examples, np.array(names))
    facts = {
        "source": source,
        "issues": found(labels, truth, rng.random(n) / 2, names, doubtful=rng.random(n) < 0.15),
        "settings": {"network": "Perceptron", "b": 0.05, "batch_size": 128, "seed": 3},
        "command": "neuvar clean pets.npz",
        "data_arguments": ("pets.npz",),
        "seconds": 1.25,
    } | facts
    return Cleaning(**facts)


def decoded(file):
    """A PNG file as Pillow reads it."""
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(file)))


class TestPictures:
    @pytest.mark.parametrize("shape", [(1, 1), (5, 7), (28, 28), (17, 5, 3)])
    def test_png_keeps_every_pixel(self, shape):
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        uri = pictures(torch.from_numpy(image)[None], np.arange(1), room=10**9)[0]
        assert uri.startswith("data:image/png;base64,")
        assert (decoded(base64.b64decode(uri.split(",")[1])) == image).all()

    def test_shrinking_takes_means(self):
        rows = np.repeat(np.repeat(np.arange(24, dtype=np.uint8).reshape(4, 6), 48, 0), 48, 1)
        uri = pictures(torch.from_numpy(rows)[None], np.arange(1), room=10**9)[0]
        small = decoded(base64.b64decode(uri.split(",")[1]))
        assert small.shape == (64, 96)
        assert (small[::16, ::16] == np.arange(24).reshape(4, 6)).all()
        checks = torch.from_numpy(np.indices((192, 192)).sum(0) % 2 * 200).to(torch.uint8)
        uri = pictures(checks[None], np.arange(1), room=10**9)[0]
        assert np.unique(decoded(base64.b64decode(uri.split(",")[1]))).tolist() == [100]

    def test_pictures_fit_into_their_room(self):
        noise = cleaning(n=20, shape=(3, 64, 64)).source.examples.inputs
        whole = pictures(noise, np.arange(20), room=10**9)
        tight = pictures(noise, np.arange(20), room=sum(map(len, whole)) // 5)
        sides = [decoded(base64.b64decode(p[0].split(",")[1])).shape for p in (whole, tight)]
        assert sides == [(64, 64, 3), (16, 16, 3)]
        assert sum(map(len, tight)) <= sum(map(len, whole)) // 5
        big = pictures(torch.zeros(1, 200, 100, dtype=torch.uint8), np.arange(1), room=10**9)
        assert decoded(base64.b64decode(big[0].split(",")[1])).shape == (67, 34)

    def test_chosen_pictures_in_their_order(self):
        images = torch.arange(10, dtype=torch.uint8)[:, None, None].expand(10, 4, 4)
        found = pictures(images, np.array([7, 2]), room=10**9)
        pixels = [decoded(base64.b64decode(uri.split(",")[1])) for uri in found]
        assert [np.unique(one).tolist() for one in pixels] == [[7], [2]]

    def test_floats_are_stretched_and_odd_channels_are_grey(self):
        values = torch.tensor([[-1.0, 0.0], [0.0, 3.0]])[None]
        uri = pictures(values, np.arange(1), room=10**9)[0]
        assert decoded(base64.b64decode(uri.split(",")[1])).tolist() == [[0, 64], [64, 255]]
        two = torch.tensor([[[[10]], [[20]]]], dtype=torch.uint8)
        uri = pictures(two, np.arange(1), room=10**9)[0]
        assert decoded(base64.b64decode(uri.split(",")[1])).tolist() == [[15]]
        assert not is_images(torch.zeros(3, 5))
        assert pictures(torch.zeros(3, 2, 2), np.array([], dtype=int), room=1) == []

    @pytest.mark.parametrize("low", [-3.0, 0.0, 100.0])
    def test_floats_with_channels_anywhere_are_the_picture(self, low):
        """A picture in bytes that reaches from black to white comes back, whatever its scale."""
        image = np.random.default_rng(0).integers(0, 256, (1, 8, 9, 3), dtype=np.uint8)
        image[0, 0, 0] = 0, 128, 255
        values = torch.from_numpy(image).float() / 100 + low
        for one in (values, values.movedim(3, 1)):
            uri = pictures(one, np.arange(1), room=10**9)[0]
            assert (decoded(base64.b64decode(uri.split(",")[1])) == image[0]).all()
        for one in (values[..., :1], values[..., :1].movedim(3, 1)):
            uri = pictures(one, np.arange(1), room=10**9)[0]
            assert decoded(base64.b64decode(uri.split(",")[1])).shape == (8, 9)

    def test_bars(self):
        features = torch.tensor([[1.0, 5.0, 0.123456], [3.0, 5.0, 0.5]])
        # Two examples are one deviation from their mean, a third of a full bar; a constant is 0.
        assert bars(features, np.array([0])) == [[-33, 0, -33]]
        assert len(bars(torch.arange(4000.0).reshape(4, 1000), np.arange(4))[0]) == 64
        far = torch.cat([torch.zeros(99, 1), torch.ones(1, 1)])
        assert bars(far, np.array([99])) == [[100]]


class TestSummary:
    def test_words(self):
        one = cleaning()
        flagged = int(one.issues.flagged.sum())
        assert str(one) == (
            f"{flagged} of 40 labels are flagged ({flagged / 0.4:.1f} %); about 30.0 % "
            f"[20.0, 41.5] of all labels are wrong. {int(one.issues.sure().sum())} labels are "
            "replaced: the suggestion is right with a probability of at least 0.9."
        )
        none, single = replace(one, replace_at=1.0), replace(one, replace_at=0.95)
        assert " No label is replaced" in str(none)
        assert single.replaced.sum() < one.replaced.sum()

    def test_pairs_are_counted_and_ranked(self):
        names = ("a", "b", "c")
        issues = found([0, 0, 0, 1, 2, 2], [1, 1, 2, 1, 0, 0], np.arange(6), names)
        assert frequent_pairs(issues) == [("a", "b", 2), ("c", "a", 2), ("a", "c", 1)]
        assert frequent_pairs(issues, 1) == [("a", "b", 2)]

    def test_json_has_all_that_was_asked(self):
        one = cleaning(names=("cat", "dog", "never", "eel"), wrong=0.2)
        said = json.loads(json.dumps(json_summary(one), allow_nan=False))
        assert said["made_by"] == "neuvar clean"
        assert (said["n"], said["flagged"]) == (40, int(one.issues.flagged.sum()))
        rate = {"value": 0.3, "low": 0.2, "high": 0.415, "confidence": 0.95}
        assert said["noise_rate"] == rate
        assert said["seed"] == 3
        assert said["settings"]["b"] == 0.05
        assert said["seconds"] == 1.25
        assert set(said["versions"]) == {"python", "neuvar", "torch", "numpy"}
        for name in ("matrix", "low", "high"):
            ours = np.array(said["transition"][name], dtype=float)
            assert np.allclose(ours, getattr(one.issues.transition, name), atol=1e-6)
        assert len(said["data"]["sha256"]) == 64

    def test_json_of_many_classes_has_what_is_not_zero(self):
        names = [f"class {k}" for k in range(51)]
        labels = np.arange(50)  # no example of the last class
        issues = found(labels, np.where(labels == 7, 3, labels), np.arange(50.0), names)
        said = json_summary(replace(cleaning(), issues=issues))["transition"]
        assert set(said) == {"meaning", "elements", "confidence"}
        filled = np.zeros((3, 51, 51))
        for true, given, *ends in said["elements"]:
            filled[:, true, given] = ends
        t = issues.transition
        assert np.allclose(filled, np.nan_to_num([t.matrix, t.low, t.high]), atol=1e-6)
        assert len(said["elements"]) == 50
        assert [3, 7, 0.5, 0.25, 0.707107] in said["elements"]
        few = found(labels, labels, np.arange(50.0), names[:50])
        assert "matrix" in json_summary(replace(cleaning(), issues=few))["transition"]

    def test_json_has_a_line_for_each_row_and_leaves_names_alone(self, tmp_path):
        names = ("[\n1,\n2\n]", "[1,   2]", "dog")
        one = cleaning(names=names)
        write_cleaning(one, tmp_path / "out", top=1)
        text = (tmp_path / "out/summary.json").read_text()
        assert json.loads(text) == json.loads(json.dumps(json_summary(one)))
        assert len(text.splitlines()) < 60
        first = json_summary(one)["transition"]["matrix"][0]
        assert f"   [ {', '.join(map(repr, first))} ],\n" in text

    def test_a_class_without_examples_is_unknown_not_nan(self):
        labels = np.array([0, 1, 0, 1])
        issues = found(labels, [0, 1, 1, 1], np.arange(4), ("a", "b", "c"))
        one = cleaning()
        examples = Examples(torch.zeros(4, 2), labels, issues.names)
        source = Source("x.csv", "csv", examples, np.array(issues.names))
        one = cleaning(source=source, issues=issues)
        assert json_summary(one)["transition"]["matrix"][2] == [None] * 3
        assert "| c | – | – | – |" in markdown_summary(one)
        embed(page_data(one, top=5, folder="out"))

    def test_markdown_shows_names_as_text(self):
        assert escape_markdown("a|b\n<i> # *x*") == r"a\|b &lt;i&gt; \# \*x\*"
        names = ("a|b", HOSTILE, "c\nd")
        text = markdown_summary(cleaning(names=names, command="neuvar clean 'a\n```\nb'"))
        assert "<script>" not in text
        assert "<img" not in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
        assert len(blocks) == 5
        for block in blocks:
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(widths) == 1
        assert sum(map(len, blocks)) == sum(len(row) + 1 for row in rows)
        assert text.count("```") == 3  # ours, and one within a line, which ends nothing
        assert text.rstrip().endswith("\n```")


def data_of(text):
    """What the script of a page reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


class TestPage:
    def test_data_are_those_of_the_issues(self):
        one = cleaning()
        data = data_of(render_page(one, top=5, folder="out/x"))
        worst = one.issues.worst[:5]
        assert data["cards"]["index"] == worst.tolist()
        assert data["cards"]["given"] == one.issues.labels[worst].tolist()
        assert data["cards"]["suggested"] == one.issues.suggested[worst].tolist()
        assert data["cards"]["quality"] == pytest.approx(one.issues.quality[worst], rel=1e-3)
        assert data["flagged"] == one.flagged
        matrix = np.zeros((3, 3), int)
        for i, j, count in data["pairs"]:
            matrix[i, j] = count
        assert (matrix == one.issues.pairs).all()
        assert len(data["pictures"]) == 5
        image = one.source.examples.inputs[int(worst[0])].numpy()
        assert (decoded(base64.b64decode(data["pictures"][0].split(",")[1])) == image).all()
        assert data["labels"]["given"] == one.issues.labels.tolist()
        assert data["command"] == ("neuvar clean pets.npz --decisions decisions.csv --out out/x")

    def test_the_transition_of_the_page_leaves_out_next_to_nothing(self):
        one = cleaning(n=300, names=[f"class {k}" for k in range(20)])
        data = data_of(render_page(one, top=1, folder="out"))
        filled = np.zeros((20, 20))
        for i, j, share, low, high in data["transition"]:
            filled[i, j] = share
            assert (low, high) == (
                pytest.approx(one.issues.transition.low[i, j], abs=1e-4),
                pytest.approx(one.issues.transition.high[i, j], abs=1e-4),
            )
        assert np.allclose(filled, one.issues.transition.matrix, atol=5e-4)

    def test_a_thousand_classes_leave_out_the_least(self, monkeypatch):
        one = cleaning(n=300, names=[f"class {k}" for k in range(20)])
        monkeypatch.setattr("neuvar.cleaning.page.MAX_ELEMENTS", 30)
        data = page_data(one, top=1, folder="out")
        every = np.sort(np.nan_to_num(one.issues.transition.matrix), axis=None)[::-1]
        assert data["least"] == every[29]
        assert len(data["transition"]) == (every >= every[29]).sum()
        names = [f"class {k}" for k in range(1000)]
        assert len(render_page(cleaning(n=3000, names=names), top=500, folder="out")) < 5_000_000

    def test_nothing_breaks_out(self):
        files = [f"{i}-{HOSTILE}.png" for i in range(39)] + [RTL]
        one = cleaning(
            names=(HOSTILE, "${css}$data", "\u2028]]>"),
            files=files,
            settings={"b": HOSTILE},
            command=HOSTILE,
        )
        one = cleaning(
            source=Source(HOSTILE, "folder", one.source.examples, one.source.values),
            issues=one.issues,
            settings=one.settings,
            command=one.command,
        )
        text = render_page(one, top=50, folder=HOSTILE)
        assert text.count("<script") == text.count("</script>") == 2
        assert "<img" not in text
        assert "<!--" not in text
        data = data_of(text)
        assert data["names"][0] == HOSTILE
        assert set(data["cards"]["id"]) <= set(files)
        assert "${css}$data" in data["names"]
        text.encode()  # no half of a pair of surrogates

    def test_names_of_files_that_are_no_text(self):
        files = [f"a/{i}\udcff.png" for i in range(40)]
        text = render_page(cleaning(files=files), top=3, folder="o\udcfft")
        text.encode()
        assert data_of(text)["labels"]["files"] == files

    @pytest.mark.parametrize(("width", "key"), [(4, "numbers"), (8, "numbers"), (9, "bars")])
    def test_features_are_numbers_or_bars(self, width, key):
        one = cleaning(shape=(width,))
        one.source.examples.inputs.div_(7)
        data = data_of(render_page(one, top=6, folder="out"))
        assert {"numbers", "bars", "pictures"} & set(data) == {key}
        assert len(data[key]) == 6
        assert len(data[key][0]) == width
        if key == "numbers":
            shown = one.source.examples.inputs[one.issues.worst[:6]]
            assert data[key] == [[float(f"{x:.4g}") for x in row] for row in shown.tolist()]
            assert data["columns"] == [f"feature {k}" for k in range(width)]

    def test_wide_tables_show_what_is_unusual(self):
        """And the first other columns; years are not rounded."""
        one = cleaning(n=60, shape=(20,))
        features = one.source.examples.inputs
        worst = int(one.issues.worst[0])
        features[:, 0] = 2024.0
        features[worst, 17] = 10_000.25
        names = tuple(f"column {k}" for k in range(20))
        one = replace(one, source=replace(one.source, kind="csv", columns=names))
        data = data_of(render_page(one, top=6, folder="out"))
        assert data["columns"] == list(names)
        assert data["unusual"][0] == [17]
        assert data["which"][0] == [*range(11), 17]
        assert data["numbers"][0][0] == 2024
        assert data["numbers"][0][11] == 10_000
        assert data["texts"] == []

    def test_texts_are_told_from_other_cells(self):
        one = cleaning(n=60, shape=(3,))
        sentence = "some words of a review " * 60
        cells = (("12",) * 60, (sentence,) * 60, ("Rome",) * 60)
        source = replace(one.source, kind="csv", columns=("age", "review", "city"), cells=cells)
        data = data_of(render_page(replace(one, source=source), top=2, folder="out"))
        assert data["texts"] == [1]
        assert data["numbers"][0] == ["12", f"{sentence[:MAX_TEXT]}…", "Rome"]
        assert data["which"] is None

    def test_many_pictures_are_not_shrunk(self):
        one = cleaning(n=4000, shape=(28, 28), wrong=0.9)
        data = data_of(render_page(one, top=3000, folder="out"))
        first = data["pictures"][0].split(",")[1]
        assert len(data["pictures"]) == 3000
        assert decoded(base64.b64decode(first)).shape == (28, 28)

    def test_script_is_the_only_one_that_may_run(self):
        text = render_page(cleaning(), top=1, folder="out")
        script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in text
        assert "default-src 'none'" in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)

    @pytest.mark.parametrize("shape", [(8, 8), (4,), (20,)])
    def test_nothing_flagged(self, shape):
        one = cleaning(wrong=0.0, shape=shape)
        data = data_of(render_page(one, top=5, folder="out"))
        assert data["cards"]["index"] == one.issues.ranked[:5].tolist()
        assert data["cards"]["flagged"] == 0
        assert data["pairs"] == []

    def test_flagged_examples_come_first_then_others(self):
        one = cleaning()
        issues = one.issues
        data = data_of(render_page(one, top=len(issues) - 1, folder="out"))
        index, flagged = np.array(data["cards"]["index"]), one.flagged
        assert 0 < flagged < 30
        assert data["cards"]["flagged"] == flagged
        assert index[:flagged].tolist() == issues.worst.tolist()
        others = index[flagged:]
        assert len(others) == len(issues) - 1 - flagged
        assert not issues.flagged[others].any()
        assert (np.diff(issues.quality[others]) >= 0).all()
        unseen = np.flatnonzero(~issues.flagged)[:3]
        one = replace(one, issues=replace(issues, unseen=unseen))
        data = data_of(render_page(one, top=len(issues), folder="out"))
        assert len(data["cards"]["index"]) == len(issues) - 3
        assert not set(data["cards"]["index"]) & set(unseen.tolist())

    @pytest.mark.parametrize(("setting", "name"), [("rho", "SAM"), ("b", "weight noise")])
    def test_the_training_is_named(self, setting, name):
        text = render_page(cleaning(settings={setting: 0.1}), top=1, folder="out")
        assert f"A network trained with {name} memorizes" in text

    def test_fifty_thousand_examples_stay_small(self):
        """Pictures of noise, which pack worst, and long names."""
        n = 50_000
        names = [f"class number {k}" for k in range(100)]
        many = cleaning(n=n, names=names, shape=(3, 32, 32))
        text = render_page(many, top=500, folder="out")
        assert len(text) < 5_000_000
        data = data_of(text)
        assert len(data["pictures"]) == 500
        assert len(data["labels"]["given"]) == n
        # With files of long names, the labels leave no room for the pictures, and stay behind.
        e = many.source.examples
        files = tuple(f"some/long/folder/of/images/{i:06}/picture-{i:06}.jpg" for i in range(n))
        source = Source(
            "x", "folder", Examples(e.inputs, e.labels, e.names, files), many.source.values
        )
        text = render_page(cleaning(source=source, issues=many.issues), top=500, folder="out")
        assert len(text) < 5_000_000
        data = data_of(text)
        assert data["labels"] is None
        assert len(data["pictures"]) == 500
        assert MAX_DATA - MIN_PICTURES > 2_000_000


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+a", "'+a"),
        ("-", "'-"),
        ("@x", "'@x"),
        ("\tx", "'\tx"),
        ("\rx", "'\rx"),
        ("-1", "-1"),
        ("+1.5e-3", "+1.5e-3"),
        ("-1+cmd", "'-1+cmd"),
        ("-inf", "'-inf"),
        ("'x", "'x"),
        ("cat", "cat"),
        ("", ""),
    ],
)
def test_no_cell_is_a_formula(cell, written):
    assert escape_cell(cell) == written
    assert unescape_cell(written) == cell
