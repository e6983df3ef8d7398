"""Missing values, dates, categories and text become numbers, and the user is told how."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from neuvar.cleaning.encoding import read_features
from neuvar.cleaning.page import unusual_cells
from neuvar.cleaning.readers import read_source
from neuvar.cleaning.tables import replace_column

pytest.importorskip("sklearn")
ROWS = 60


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def houses(kind="csv", **columns):
    """A table of houses, as CSV or Parquet."""
    rng = np.random.default_rng(0)
    words = np.array(["bright", "rooms", "garden", "near", "the", "old", "station", "quiet"])
    frame = pd.DataFrame(
        {
            "id": [f"house-{i}" for i in range(ROWS)],
            "size": [None if i == 3 else 50.5 + i for i in range(ROWS)],
            "rooms": rng.integers(1, 6, ROWS),
            "roof": [None if i == 7 else ("flat", "hip", "gable")[i % 3] for i in range(ROWS)],
            "built": [f"19{50 + i % 50}-0{1 + i % 9}-11" for i in range(ROWS)],
            "about": [" ".join(rng.choice(words, 6)) for _ in range(ROWS)],
            "class": [("cheap", "dear")[i % 2] for i in range(ROWS)],
        }
        | columns
    )
    path = Path(f"houses.{kind}")
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_every_kind_of_column(kind):
    source = read_source(houses(kind))
    assert source.examples.names == ("cheap", "dear")
    assert source.columns == ("size", "rooms", "roof", "built", "about")
    assert source.left_out == ("column 'id' (too many different values)",)
    labels, columns = source.notes
    assert labels == "labels: column 'class', guessed; name another with --labels"
    assert columns == (
        "2 columns of numbers ('size': 1 missing, filled with the median), 1 column of dates, "
        "1 column of categories ('roof': 4 values), "
        "1 column of text ('about': n-grams of letters and words)"
    )
    inputs = source.examples.inputs.numpy()
    # The filled value and its indicator, rooms, four roofs with the empty one, days, text features.
    assert inputs.shape == (ROWS, 2 + 1 + 4 + 1 + ROWS)
    assert inputs[3, :2].tolist() == [np.median([50.5 + i for i in range(ROWS) if i != 3]), 1]
    assert inputs[4, :2].tolist() == [54.5, 0]
    assert (inputs[:, 3:7].sum(1) == 1).all()
    assert inputs[7, 3] == 1
    days = (pd.Timestamp("1950-01-11") - pd.Timestamp(0)).days
    assert inputs[0, 7] == days
    assert np.isfinite(inputs).all()
    assert source.cells[0][3:5] == ("", "54.5")


def test_equal_texts_have_equal_numbers_and_the_digest_is_that_of_the_cells():
    texts = ["a bright small house", "a quiet old flat near the station", "no heating at all"]
    path = houses(about=[f"{texts[i % 3]} {i // 6}" for i in range(ROWS)])
    first, second = read_source(path), read_source(path)
    assert first.sha256 == second.sha256
    numbers = first.examples.inputs.numpy()[:, -ROWS:]
    near = np.linalg.norm(numbers[0] - numbers[3])
    assert near < 0.5 * np.linalg.norm(numbers[0] - numbers[1])
    again = houses(about=[f"{texts[(i + 1) % 3]} {i // 6}" for i in range(ROWS)])
    assert read_source(again).sha256 != first.sha256


def test_plain_numbers_are_left_as_they_are():
    Path("t.csv").write_text("a,b,label\n1,2.5,x\n3,4.5,y\n")
    features, labels = read_features(Path("t.csv"), ["a", "b"], "label")
    assert features.numbers.tolist() == [[1, 2.5], [3, 4.5]]
    assert (features.cells, features.summary, labels) == ((), "", ["x", "y"])


def test_all_problems_of_a_file_are_listed_at_once():
    columns = {"a": [*range(39), "4o"], "b": [*range(38), "1e99", "x"], "c": range(40)}
    pd.DataFrame(columns | {"label": ["x", "y"] * 20}).to_csv("t.csv", index=False)
    with pytest.raises(ValueError, match="2 columns with problems") as error:
        read_source(Path("t.csv"))
    advice = "; correct it, or leave the column out with --drop"
    assert str(error.value).splitlines() == [
        "t.csv has 2 columns with problems:",
        f"  line 41, column 'a' must be a finite number for float32, got '4o'{advice}",
        "  line 40, column 'b' must be a finite number for float32, got '1e99', and 1 more"
        f"{advice}",
    ]
    assert read_source(Path("t.csv"), drop=["a", "b"]).columns == ("c",)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [("a,Label,b", "Label"), ("target,a,b", "target"), ("a,b,species", "species")],
)
def test_the_column_of_labels_is_guessed_by_its_name_or_is_the_last(header, wanted):
    Path("t.csv").write_text(f"{header}\n1,2,3\n2,1,4\n1,2,3\n")
    source = read_source(Path("t.csv"))
    assert source.notes == (f"labels: column {wanted!r}, guessed; name another with --labels",)
    assert wanted not in source.columns
    assert read_source(Path("t.csv"), labels=wanted).notes == ()


def test_a_column_without_any_value_and_columns_that_never_repeat():
    path = houses(size=[None] * ROWS)
    assert np.isfinite(read_source(path).examples.inputs.numpy()).all()
    with pytest.raises(ValueError, match=r"has no column to train on: .*too many different values"):
        read_source(path, drop=["size", "rooms", "roof", "built", "about"])


@pytest.mark.parametrize(("first", "rows"), [(0, ROWS), (1, ROWS), (1000, 20), (0, 19)])
def test_a_column_that_counts_the_rows_is_left_out(first, rows):
    counts = list(range(first, first + rows))
    columns = {"id": counts, "x": [1.5] * rows, "down": counts[::-1]}
    labels = ["x"] * (rows // 2) + ["y"] * (rows - rows // 2)
    pd.DataFrame(columns | {"label": labels}).to_csv("t.csv", index=False)
    source = read_source(Path("t.csv"), labels="label")
    if rows >= 20:
        assert source.columns == ("x", "down")
        assert source.left_out == ("column 'id' (it counts the rows)",)
        alone = read_source(Path("t.csv"), labels="label", drop=["x", "down"])
        assert alone.columns == ("id",)  # nothing else is left to learn from
    else:
        assert source.columns == ("id", "x", "down")


def test_unusual_values():
    assert unusual_cells(["a few words", "other words here"] * 3).tolist() == [False] * 6
    assert unusual_cells([""] * 4).tolist() == [False] * 4


def test_the_cleaned_table_has_all_columns_and_only_other_labels():
    text = 'a,"the, kind",when\n1,x,"say ""hi"""\n\n2,-y,"two\nlines"\n3,x,=1\n'
    Path("t.csv").write_text("\ufeff" + text, encoding="utf-8")
    source = read_source(Path("t.csv"), labels="the, kind")
    assert source.label_column == (Path("t.csv"), "the, kind")
    kept = text.replace("\n\n", "\n")
    assert replace_column(*source.label_column, [None, None, None]) == kept
    changed = replace_column(*source.label_column, [None, None, "-y"])
    assert changed == kept.replace("3,x", "3,-y")
    np.save("y.npy", [0, 1, 0])
    assert read_source(Path("t.csv"), labels="y.npy").label_column is None
