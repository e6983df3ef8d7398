"""Data sets in files, decisions taken back, and folders that are written whole or not at all."""

import csv
import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from neuvar._atomic import write_folder
from neuvar.cleaning.encoding import read_features
from neuvar.cleaning.readers import Source, read_probabilities, read_source, with_classes
from neuvar.cleaning.results import check_folder, write_cleaning, write_decided
from tests.test_cleaning_page import HOSTILE, cleaning

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 5, 5), dtype=np.uint8)
LABELS = np.array([3, 1, 1, 3, 10, 1])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(name="data.csv", text="a,b,label\n1,2.5,cat\n3,-4e1,dog\n0,0,cat\n"):
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def npz(name="data.npz", **arrays):
    np.savez(name, **arrays)
    return Path(name)


def photos(files):
    """A folder of grey pictures."""
    image = pytest.importorskip("PIL.Image")
    for i, file in enumerate(files):
        path = Path("photos") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(IMAGES[i % 6]).save(path)
    return Path("photos")


def parquet(name="data.parquet", **columns):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), name)
    return Path(name)


def refused(*arguments, **options):
    """The one sentence with which data are refused."""
    with pytest.raises(ValueError) as caught:
        read_source(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestArrays:
    @pytest.mark.parametrize("inputs", ["images", "inputs", "x", "X", "data"])
    @pytest.mark.parametrize("labels", ["labels", "y", "targets"])
    def test_usual_names(self, inputs, labels):
        source = read_source(npz(**{inputs: IMAGES, labels: LABELS, "other": LABELS[:2]}))
        assert (source.kind, source.name, source.id_column) == ("npz", "data.npz", "index")
        assert (source.examples.inputs.numpy() == IMAGES).all()
        assert source.examples.names == ("1", "3", "10")
        assert (source.values[source.examples.labels] == LABELS).all()
        assert source.ids == ["0", "1", "2", "3", "4", "5"]

    def test_labels_by_name_and_from_files(self):
        path = npz(x=IMAGES, mine=LABELS[::-1], y=LABELS)
        np.save("apart.npy", LABELS[::-1])
        npz("apart.npz", targets=LABELS[::-1])
        table("apart.csv", "label\n" + "".join(f"{k}\n" for k in LABELS[::-1]))
        rows = "".join(f"{5 - i},{k}\n" for i, k in enumerate(LABELS))
        table("placed.csv", f"index,label\n{rows}")
        for where in ("mine", "apart.npy", "apart.npz", "apart.csv", "placed.csv"):
            source = read_source(path, labels=where)
            assert (source.values[source.examples.labels] == LABELS[::-1]).all(), where

    @pytest.mark.parametrize(
        "labels",
        [
            np.array(["eel", "cat", "cat", "eel", "dog", "cat"]),
            np.array([b"eel", b"cat", b"cat", b"eel", b"dog", b"cat"]),
            np.array([[3.0], [1.0], [1.0], [3.0], [2.0], [1.0]]),
            np.array([True, False, False, True, True, False]),
        ],
    )
    def test_labels_of_every_kind(self, labels):
        source = read_source(npz(x=IMAGES, y=labels))
        back = source.values[source.examples.labels]
        wanted = labels.reshape(-1)
        assert (back.astype(wanted.dtype) == wanted).all()
        assert back.dtype.kind in "iU"

    def test_text_stays_text(self):
        y = np.array(["9", "10", "9", "10", "9", "9"])
        for source in (
            read_source(npz(x=IMAGES, y=y)),
            read_source(parquet(a=np.arange(6), label=y)),
        ):
            assert source.examples.names == ("10", "9")
            assert source.values[source.examples.labels].tolist() == y.tolist()
        npz("apart.npz", y=y)
        assert read_source(npz(x=IMAGES), labels="apart.npz").values.tolist() == ["10", "9"]

    def test_what_is_looked_for_and_what_is_there(self):
        assert refused(npz(pixels=IMAGES, y=LABELS)) == (
            "data.npz has no inputs: looked for an array called images, inputs, x, X, data; "
            "it has pixels, y; name them with --inputs NAME and --labels NAME"
        )
        assert "looked for an array called labels, y, targets; it has x" in refused(npz(x=IMAGES))
        path = npz(x=IMAGES, y=LABELS)
        assert refused(path, labels="z") == (
            "--labels must be a .npy, .npz or .csv file or an array of data.npz, which has x, y, "
            "got 'z'"
        )
        npz("apart.npz", z=LABELS, w=LABELS)
        assert refused(path, labels="apart.npz").endswith("labels, y, targets; it has z, w")
        assert "same length, got 6 and 5" in refused(npz(x=IMAGES, y=LABELS[:5]))
        assert "at least two classes" in refused(npz(x=IMAGES, y=np.zeros(6)))
        assert "6 of 6 are missing" in refused(npz(x=IMAGES, y=LABELS * np.nan))
        assert "1 of 6 are missing" in refused(npz(x=IMAGES, y=[1, 2, np.nan, 1, 2, 1]))

    def test_inputs_by_name(self):
        """As Keras keeps its MNIST, and as numpy calls arrays without names."""
        keras = npz("keras.npz", x_test=IMAGES[:1], x_train=IMAGES, y_train=LABELS)
        np.savez("plain.npz", IMAGES, LABELS)
        for path, inputs, labels in (
            (keras, "x_train", "y_train"),
            (Path("plain.npz"), "arr_0", "arr_1"),
        ):
            source = read_source(path, inputs=inputs, labels=labels)
            assert (source.examples.inputs.numpy() == IMAGES).all()
            assert (source.values[source.examples.labels] == LABELS).all()
        assert refused(keras, inputs="z", labels="y_train") == (
            "--inputs must be an array of keras.npz, which has x_test, x_train, y_train, got 'z'"
        )
        assert refused(keras, inputs="y_train", labels="y_train") == (
            "inputs and labels must be two arrays of keras.npz, got 'y_train'"
        )
        assert "labels, y, targets; it has x_test, x_train, y_train; name them with" in refused(
            keras, inputs="x_train"
        )
        assert refused(table(), inputs="a") == "--inputs is for .npz files, got data.csv"
        assert "--inputs is for .npz files" in refused(photos(["a/1.png"]), inputs="a")

    def test_rows_of_whole_numbers_are_features(self):
        source = read_source(npz(x=np.arange(12).reshape(6, 2), y=LABELS))
        assert source.examples.inputs.dtype == torch.float32
        assert source.examples.inputs[-1].tolist() == [10, 11]

    def test_damaged_files(self):
        path = npz(x=IMAGES, y=LABELS)
        whole = path.read_bytes()
        start = "data.npz is not a readable .npz file: "
        for kept in (0, 1, 40, len(whole) // 2, len(whole) - 30):
            path.write_bytes(whole[:kept])
            assert refused(path).startswith(start)
        flipped = bytearray(whole)
        flipped[len(whole) // 3] ^= 255
        path.write_bytes(flipped)
        assert refused(path).startswith(start)
        np.save("data.npy", IMAGES)
        Path("data.npy").rename("data.npz")
        assert refused(path).startswith(start)
        np.savez("data.npz", x=IMAGES, y=np.array(LABELS, dtype=object))
        assert refused(path).startswith(start)
        Path("labels.npy").write_bytes(b"\x93NUMPY\x01\x00\x02")
        assert refused(npz(x=IMAGES), labels="labels.npy").startswith(
            "labels.npy is not a readable .npy"
        )

    def test_an_array_of_objects_that_nobody_asked_for_is_no_harm(self):
        source = read_source(npz(x=IMAGES, y=LABELS, names=np.array(["a", None], dtype=object)))
        assert len(source.examples) == 6


class TestTables:
    def test_csv(self):
        source = read_source(table())
        assert source.columns == ("a", "b")
        assert source.examples.inputs.tolist() == [[1, 2.5], [3, -40], [0, 0]]
        assert source.examples.names == ("cat", "dog")
        assert source.examples.labels.tolist() == [0, 1, 0]
        moved = table("moved.csv", "\ufeffkind,b,a\r\n9,2.5,1\r\n\r\n10,-40,3\r\n9,0,0\r\n")
        source = read_source(moved, labels="kind")
        assert source.columns == ("b", "a")
        assert source.values[source.examples.labels].tolist() == [9, 10, 9]
        assert source.examples.names == ("9", "10")  # as numbers, not as words

    @pytest.mark.parametrize(
        ("labels", "names"),
        [
            (["9.0", "10.0", "9.0"], ("9", "10")),
            (["9", "10.0", "-0.0"], ("0", "9", "10")),
            (["99999", "1e+05", "99999"], ("99999", "100000")),
            (["9", "010", "9"], ("010", "9")),
            (["09.0", "10.0", "09.0"], ("09.0", "10.0")),
            (["1E1", "1E0", "1E1"], ("1E0", "1E1")),
            (["9", "+10", "9"], ("+10", "9")),
            (["9.5", "ten", "9.5"], ("9.5", "ten")),
            (["9" * 19, "10", "10"], ("10", "9" * 19)),
        ],
    )
    def test_what_labels_of_a_csv_file_spell(self, labels, names):
        rows = "".join(f"{i},{label}\n" for i, label in enumerate(labels))
        table("given.csv", "label\n" + "\n".join(labels) + "\n")
        for source in (
            read_source(table(text=f"a,label\n{rows}")),
            read_source(table("plain.csv", "a\n1\n2\n3\n"), labels="given.csv"),
        ):
            assert source.examples.names == names
            assert source.values.astype(str).tolist() == list(names)

    def test_measured_quantities_are_no_labels(self):
        sentence = "labels must be classes, got 0.5 at position 1, which looks like a continuous"
        assert sentence in refused(table(text="a,label\n1,3.0\n2,0.5\n3,1e-05\n"))

    def test_truth_values_of_a_csv_file_are_numbers(self):
        text = "a,b,c,label\nTrue,1,false,x\nFalse,2,TRUE,y\nTrue,3,true,x\n"
        assert read_source(table(text=text)).examples.inputs.tolist() == [
            [1, 1, 0],
            [0, 2, 1],
            [1, 3, 1],
        ]

    def test_whole_numbers_of_64_bits(self):
        source = read_source(parquet(a=[2**53 + 1, 2**62 + 1], b=[1, 2], label=[0, 1]))
        assert source.examples.inputs.tolist() == [[2.0**53, 1], [2.0**62, 2]]

    def test_parquet(self):
        path = parquet(a=[1, 2, 3], b=[0.5, 1.5, 2.5], c=[True, False, True], label=[7, 9, 7])
        source = read_source(path)
        assert source.columns == ("a", "b", "c")
        assert source.examples.inputs.tolist() == [[1, 0.5, 1], [2, 1.5, 0], [3, 2.5, 1]]
        assert source.examples.names == ("7", "9")
        arrow = pytest.importorskip("pyarrow")
        words = arrow.array(["x", "y", "x"]).dictionary_encode()
        source = read_source(parquet(a=[1, 2, 3], kind=words), labels="kind")
        assert source.examples.names == ("x", "y")

    def test_labels_from_a_file_of_their_own(self):
        np.save("given.npy", [1, 0, 1])
        for path in (table(text="a,b\n1,2\n3,4\n5,6\n"), parquet(a=[1, 3, 5], b=[2, 4, 6])):
            source = read_source(path, labels="given.npy")
            assert source.columns == ("a", "b")
            assert source.examples.labels.tolist() == [1, 0, 1]

    def test_a_column_of_other_labels_is_no_feature(self):
        """It would tell the network what it is to find out."""
        table("found.csv", "index,label\n0,x\n1,y\n2,x\n")
        columns = {"a": [1, 3, 5], "label": [0, 1, 1], "kind": [7, 8, 7]}
        text = "a,label,kind\n1,0,7\n3,1,8\n5,1,7\n"
        for path in (table(text=text), parquet(**columns)):
            source = read_source(path, labels="found.csv", drop=["kind"])
            assert (source.columns, source.examples.names) == (("a",), ("x", "y"))
            assert source.left_out == ("column 'label' (other labels)",)
            source = read_source(path, labels="kind")
            assert (source.columns, source.examples.names) == (("a",), ("7", "8"))
            assert source.left_out == ("column 'label' (other labels)",)
            assert read_source(path).columns == ("a", "kind")
            assert read_source(path).left_out == ()

    def test_dropped_columns_may_hold_anything(self):
        text = 'id,a,b,label\n"x, y",1,2,u\n,3,4,v\nnan,5,6,u\n'
        columns = {"id": ["x", None, "z"], "a": [1, 3, 5], "b": [2, 4, 6], "label": list("uvu")}
        for path in (table(text=text), parquet(**columns)):
            source = read_source(path, drop=["b", "id"])
            assert (source.columns, source.left_out) == (("a",), ())
            assert source.examples.inputs.tolist() == [[1], [3], [5]]
            assert refused(path, drop=["id", "c"]) == (
                f"{path} has no column 'c'; its columns are 'id', 'a', 'b', 'label'"
            )
            assert refused(path, drop=["label"]) == (
                "--drop must not have the column of labels, got 'label'"
            )
            assert "got 'b'" in refused(path, labels="b", drop=["b"])
            assert "must have columns beside" in refused(path, drop=["id", "a", "b"])
        assert refused(npz(x=IMAGES, y=LABELS), drop=["x"]) == "--drop is for tables, got data.npz"
        assert "--drop is for tables" in refused(photos(["a/1.png"]), drop=["x"])

    @pytest.mark.parametrize("name", ["", "Unnamed: 0"])
    def test_row_numbers_of_a_csv_file_are_no_feature(self, name):
        path = table(text=f"{name},a,label\n0,1,x\none,2,y\n2,3,x\n")
        source = read_source(path)
        assert source.columns == ("a",)
        assert source.left_out == (f"column {name!r} (row numbers)",)
        assert read_source(path, drop=[name]).left_out == ()
        again = read_source(table(text=f"a,label,{name}\n1,u,x\n2,v,y\n"))
        assert again.columns == ("a", name)  # row numbers are in the first column
        table("p.csv", f"{name},cat,dog\n0,0.25,0.75\n1,0.5,0.5\n")
        assert read_probabilities(Path("p.csv"), ("cat", "dog")).shape == (2, 2)

    def test_row_numbers_of_a_parquet_file_are_no_feature(self):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        frame = pandas.DataFrame({"a": [1, 3, 5], "label": list("uvu")})
        path = Path("data.parquet")
        frame.to_parquet(path)
        assert read_source(path).left_out == ()  # they are not kept if they only count
        frame.sort_values("label").to_parquet(path)
        source = read_source(path)
        assert source.columns == ("a",)
        assert source.left_out == ("column '__index_level_0__' (row numbers)",)
        frame.assign(id=[7, 8, 9], who=list("xyz")).set_index(["id", "who"]).to_parquet(path)
        source = read_source(path)
        assert source.columns == ("a",)
        assert source.left_out == ("column 'id' (row numbers)", "column 'who' (row numbers)")
        frame.set_index("label").to_parquet(path)
        assert read_source(path).examples.names == ("u", "v")

    def test_nonsense_in_the_place_of_what_pandas_says(self):
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet as files

        found = arrow.table({"a": [1, 3], "label": [0, 1]})
        for said in (b"{", b"\xff", b"[1]", b'{"index_columns": [{"kind": "range"}]}'):
            files.write_table(found.replace_schema_metadata({b"pandas": said}), "data.parquet")
            assert read_source(Path("data.parquet")).columns == ("a",)

    @pytest.mark.parametrize(
        "text",
        [
            "species\nx\ny\nx\n",
            "index,species\n2,x\n1,y\n0,x\n",
            "file,species\na,x\nb,y\nc,x\n",
            ",species\n0,x\n1,y\n2,x\n",
            "species,label\n1,x\n2,y\n3,x\n",
        ],
    )
    def test_a_file_of_labels_may_call_them_as_it_likes(self, text):
        table("given.csv", text)
        source = read_source(table(text="a\n1\n2\n3\n"), labels="given.csv")
        assert [source.examples.names[k] for k in source.examples.labels] == ["x", "y", "x"]

    def test_files_of_labels_that_are_refused(self):
        path = table(text="a\n1\n2\n3\n")
        table("given.csv", "species,colour\nx,red\ny,blue\nx,red\n")
        assert refused(path, labels="given.csv") == (
            "given.csv has no column 'label'; its columns are 'species', 'colour'"
        )
        table("given.csv", "index\n0\n1\n2\n")
        assert "given.csv has no column 'label'" in refused(path, labels="given.csv")
        Path("given.txt").write_text("x\ny\nx\n")
        assert refused(path, labels="given.txt") == (
            "--labels must be a .npy, .npz or .csv file or a column of data.csv, got 'given.txt'"
        )
        table("given.csv", "label\nx\nnan\ny\n")
        assert refused(path, labels="given.csv") == (
            "labels must not be missing, 1 of 3 are missing, the first one at position 1"
        )

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("a,label\n1,x\n2, \n", "line 3, column 'label' is empty"),
            ("a,label\n1,x\n1e99,y\n", "line 3, column 'a' must be a finite number for float32"),
            (
                'a,label\n"1\n",x\n' + "3,y\n" * 9 + "4.x,y\n",
                "line 13, column 'a' must be a finite number for float32, got '4.x'; correct it",
            ),
            ("a,label\n1,x\n2\n", "line 3, column 'label' is empty"),
            (
                "a;label\n1;x\n",
                "data.csv has no column 'label'; its columns are 'a;label'; separate",
            ),
            ("a,a,label\n1,2,x\n", "must name each column once, but 'a' occurs twice"),
            ("", "must begin with a line of column names, it is empty"),
            ("a,label\n", "data.csv has no rows"),
            ("label\nx\ny\n", "must have columns besides the labels"),
            (
                'a,label\n1,"x\n',
                "data.csv is not a CSV file: Error tokenizing data. C error: EOF inside string",
            ),
            ("a,label\n1,x\n2,x\n", "labels must have at least two classes"),
        ],
    )
    def test_csv_is_refused_with_line_and_column(self, text, sentence):
        assert sentence in refused(table(text=text))

    def test_csv_that_is_no_text(self):
        Path("data.csv").write_bytes(b"a,label\n\xff\xfe,x\n")
        assert refused(Path("data.csv")).startswith("data.csv is not a CSV file in UTF-8")
        Path("data.csv").write_bytes(b"a,label\n1\x002,x\n")
        assert "data.csv" in refused(Path("data.csv"))

    @pytest.mark.parametrize(
        ("columns", "sentence"),
        [
            (
                {"a": [1.0, float("inf")], "label": [0, 1]},
                "row 1, column 'a' must be a finite number for float32, got",
            ),
            ({"a": [1.0, 2.0], "label": [None, 1]}, "row 0, column 'label' is empty"),
            ({"a": [1.0, 2.0], "label": [[0], [1]]}, "column 'label' must hold labels, got object"),
            ({"a": [1.0, 2.0]}, "has no column 'label'; its columns are 'a'"),
            ({"label": [0, 1]}, "must have columns besides the labels"),
        ],
    )
    def test_parquet_is_refused_with_row_and_column(self, columns, sentence):
        assert sentence in refused(parquet(**columns))

    def test_damaged_parquet(self):
        path = parquet(a=[1.0, 2.0], label=[0, 1])
        whole = path.read_bytes()
        for kept in (0, 3, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:kept])
            assert refused(path).startswith("data.parquet is not a readable Parquet file")

    @pytest.mark.parametrize("missing", ["pandas", "pyarrow"])
    def test_without_pandas_or_pyarrow(self, monkeypatch, missing):
        paths = {"pandas": table(), "pyarrow": parquet(a=[1.0, 2.0], label=[0, 1])}
        monkeypatch.setitem(sys.modules, missing, None)
        sentence = r'reading tables needs pandas and pyarrow: pip install "neuvar\[clean\]"'
        with pytest.raises(ImportError, match=sentence):
            read_source(paths[missing])


class TestFolders:
    def test_class_folders(self):
        source = read_source(photos(["b/1.png", "a/2.png", "a/1.png"]))
        assert (source.kind, source.id_column, source.name) == ("folder", "file", "photos")
        assert source.ids == ("a/1.png", "a/2.png", "b/1.png")
        assert source.examples.names == ("a", "b")
        assert source.examples.inputs.shape == (3, 5, 5)
        assert read_source(Path("photos"), size=8).examples.inputs.shape == (3, 8, 8)

    def test_labels_of_a_table(self):
        folder = photos(["1.png", "deep/er/2.png", "3.png"])
        (folder / ".hidden.png").write_text("no image")
        (folder / "notes.txt").write_text("no image")
        for name in ("label", "animal"):
            table("given.csv", f"{name},file\ncat,3.png\ndog,1.png\ncat,deep/er/2.png\n")
            source = read_source(folder, labels="given.csv")
            assert source.ids == ("1.png", "3.png", "deep/er/2.png")
            assert source.examples.labels.tolist() == [1, 0, 0]
            assert (source.examples.inputs[1].numpy() == IMAGES[2]).all()

    def test_labels_of_a_table_are_text_as_folders_are(self):
        folder = photos(["9/1.png", "10/2.png"])
        table("given.csv", "file,label\n9/1.png,9\n10/2.png,10\n")
        for labels in (None, "given.csv"):
            source = read_source(folder, labels=labels)
            assert source.examples.names == ("10", "9")
            assert source.values.tolist() == ["10", "9"]

    def test_other_files_are_counted(self):
        folder = photos(["a/1.png", "b/1.png"])
        assert read_source(folder).left_out == ()
        for name in ("a/Thumbs.db", "b/.DS_Store", "a/__MACOSX/2.txt", "desktop.ini"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        assert read_source(folder).left_out == ()
        (folder / "b/2.TXT").touch()
        assert read_source(folder).left_out == ("1 other file (.txt)",)
        for name in ("a/README", "b/1.avif", "0.png"):
            (folder / name).touch()
        assert read_source(folder).left_out == ("4 other files (.avif, .png, .txt, no ending)",)
        (folder / "0.png").unlink()
        for k in range(4):
            (folder / f"b/1.{k}").touch()
        assert read_source(folder).left_out == ("7 other files (.0, .1, .2, .3, .avif, …)",)
        table("photos/given.csv", "file,label\na/1.png,x\nb/1.png,y\n")
        source = read_source(folder, labels="photos/given.csv")
        assert source.left_out == ("7 other files (.0, .1, .2, .3, .avif, …)",)

    def test_links_to_classes_are_read_with_labels_as_without(self):
        folder = photos(["a/1.png", "a/2.png"])
        folder.rename("store")
        folder.mkdir()
        for name, target in {"x": "store/a", "y": "store/a", "loop": "photos", "up": "."}.items():
            (folder / name).symlink_to(Path(target).resolve())
        (Path("store/a") / "loop").symlink_to(folder.resolve())
        files = read_source(folder).ids
        assert files == ("x/1.png", "x/2.png", "y/1.png", "y/2.png")
        table("given.csv", "file,label\n" + "".join(f"{file},{file[2]}\n" for file in files))
        source = read_source(folder, labels="given.csv")
        assert source.ids == files
        assert source.examples.labels.tolist() == [0, 1, 0, 1]

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("file,label\n1.png,a\n", "given.csv has no label for file '2.png'"),
            ("file,label\n1.png,a\n2.png,b\n3.png,b\n", "file '3.png', which is not in the data"),
            ("file,label\n1.png,a\n../photos/2.png,b\n", "not in the data"),
            ("file,label\n1.png,a\n1.png,b\n2.png,a\n", "'1.png' occurs twice"),
            ("name,label\n1.png,a\n", "has no column 'file'; its columns are 'name', 'label'"),
            ("file,label\n1.png,\n2.png,b\n", "line 2, column 'label' is empty"),
        ],
    )
    def test_tables_that_do_not_fit(self, text, sentence):
        folder = photos(["1.png", "2.png"])
        table("given.csv", text)
        assert sentence in refused(folder, labels="given.csv")

    def test_unreadable(self):
        folder = photos(["a/1.png", "b/1.png"])
        Path("photos/b/1.png").write_bytes(b"\x89PNG nonsense")
        assert "b/1.png" in refused(folder)
        assert "--labels of a folder must be a .csv file" in refused(folder, labels="given.npy")
        Path("photos/b/1.png").unlink()
        assert "at least two classes" in refused(folder)
        photos(["a/1.png", "b/1.png"])
        for name in "cd":
            (folder / name).mkdir()
        assert "got 2 examples and 4 classes" in refused(folder)
        Path("empty").mkdir()
        table("given.csv", "file,label\n1.png,a\n")
        assert refused(Path("empty"), labels="given.csv") == "empty has no image"


def test_other_kinds_are_refused():
    assert refused(Path("nothing.npz")) == (
        "there is no nothing.npz; DATA must be a folder of images, a .npz, a .csv or a .parquet "
        "file"
    )
    Path("data.xlsx").touch()
    assert refused(Path("data.xlsx")).endswith("file, got data.xlsx")
    assert refused(table(), size=8) == "--size is for folders of images, got data.csv"


class TestProbabilities:
    def test_files_of_all_kinds(self):
        p = np.array([[0.25, 0.75], [0.5, 0.5]])
        np.save("p.npy", p)
        np.savez("one.npz", whatever=p)
        np.savez("two.npz", pred_probs=p, y=[1])
        table("plain.csv", "first,second\n0.25,0.75\n0.5,0.5\n")
        table("named.csv", "dog,cat\n0.75,0.25\n0.5,0.5\n")
        for name in ("p.npy", "one.npz", "two.npz", "plain.csv", "named.csv"):
            assert (read_probabilities(Path(name), ("cat", "dog")) == p).all(), name

    @pytest.mark.parametrize("name", ["p.txt", "missing.npy", "flat.npy", "text.npy", "two.npz"])
    def test_others_are_refused(self, name):
        Path("p.txt").touch()
        np.save("flat.npy", np.ones(3))
        np.save("text.npy", np.array([["a", "b"]]))
        np.savez("two.npz", a=np.ones((2, 2)), b=np.ones((2, 2)))
        with pytest.raises(ValueError, match=re.escape(name)):
            read_probabilities(Path(name), ("cat", "dog"))

    def test_classes_that_no_label_has(self):
        source = read_source(npz(x=IMAGES, y=LABELS))
        wider = with_classes(source, 12)
        assert wider.examples.names == tuple(map(str, range(12)))
        assert wider.examples.labels.tolist() == LABELS.tolist()
        assert (wider.values[wider.examples.labels] == LABELS).all()
        assert with_classes(source, 3) is source
        with pytest.raises(ValueError, match=r"each of the 3 classes of data\.npz, got 10 columns"):
            with_classes(source, 10)
        named = read_source(npz(x=IMAGES, y=np.array(list("abcabc"))))
        with pytest.raises(ValueError, match="got 4 columns"):
            with_classes(named, 4)


def test_other_data_have_another_digest():
    e = cleaning().source.examples
    sources = [
        Source("x", "npz", some, np.arange(3))
        for some in (
            e,
            replace(e, labels=np.roll(e.labels, 1)),
            replace(e, inputs=torch.cat([e.inputs[:-1], 255 - e.inputs[-1:]])),
            replace(e, inputs=e.inputs.reshape(40, 4, 16)),
            replace(e, names=("cat", "dog", "fox")),
            replace(e, files=tuple(f"{i}.png" for i in range(40))),
        )
    ]
    assert len({source.sha256 for source in sources}) == len(sources)
    assert replace(sources[0], name="y", kind="csv").sha256 == sources[0].sha256


def rows_of(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


class TestWriting:
    def test_files_say_what_was_found(self):
        one = cleaning()
        write_cleaning(one, Path("out/deep/x"), top=5)
        out = Path("out/deep/x")
        assert {path.name for path in out.iterdir()} == {
            *("index.html", "issues.csv", "labels.csv", "labels.npy", "summary.json"),
            "summary.md",
        }
        assert [path.name for path in out.parent.iterdir()] == ["x"]
        head, *rows = rows_of(out / "issues.csv")
        assert head == [
            *("index", "given", "suggested", "quality", "error_probability"),
            *("suggestion_probability", "flagged", "replaced"),
        ]
        issues, names = one.issues, one.issues.names
        assert [int(row[0]) for row in rows] == issues.ranked.tolist()
        replaced = issues.sure()
        assert 0 < replaced.sum() < issues.flagged.sum()
        for i, row in zip(issues.ranked, rows, strict=True):
            _, given, suggested, quality, wrong, right, flagged, changed = row
            assert (given, suggested) == (names[issues.labels[i]], names[issues.suggested[i]])
            assert float(quality) == pytest.approx(issues.quality[i], rel=1e-5)
            assert float(wrong) == pytest.approx(issues.error_probability[i], rel=1e-5)
            assert float(right) == pytest.approx(issues.suggestion_probability[i], rel=1e-5)
            assert flagged == ("true" if issues.flagged[i] else "false")
            assert changed == ("true" if replaced[i] else "false")
        assert rows_of(out / "labels.csv") == [
            ["index", "label"],
            *([str(i), names[k]] for i, k in enumerate(issues.cleaned)),
        ]
        assert np.load(out / "labels.npy").tolist() == [names[k] for k in issues.cleaned]
        assert json.loads((out / "summary.json").read_text())["flagged"] == one.flagged

    def test_numbers_stay_numbers_in_the_array(self):
        source = read_source(npz(x=IMAGES, y=LABELS))
        one = cleaning(n=6, source=source)
        write_cleaning(one, Path("out"), top=1)
        found = np.load("out/labels.npy", allow_pickle=False)
        assert found.dtype == np.int64
        assert found.tolist() == np.array([1, 3, 10])[one.issues.cleaned].tolist()

    def test_cleaned_labels_can_be_read_again(self):
        """Names that spreadsheets would carry out or that need quotes come back as they were."""
        names = ("=1+1", 'a "b", c', HOSTILE)
        path = npz(images=np.zeros((40, 8, 8), np.uint8), y=np.zeros(40))
        one = cleaning(names=names)
        write_cleaning(one, Path("out"), top=1)
        assert b"\n0,=" not in Path("out/labels.csv").read_bytes()
        assert b"'=1+1" in Path("out/labels.csv").read_bytes()
        source = read_source(path, labels="out/labels.csv")
        again = [source.examples.names[k] for k in source.examples.labels]
        assert again == [names[k] for k in one.issues.cleaned]

    def test_an_earlier_result_is_replaced_only_if_asked(self):
        out = Path("out")
        write_cleaning(cleaning(seed=1), out, top=1)
        before = (out / "issues.csv").read_bytes()
        with pytest.raises(
            ValueError, match="out has an earlier result, use --overwrite to replace it"
        ):
            write_cleaning(cleaning(), out, top=1)
        assert (out / "issues.csv").read_bytes() == before
        kind = cleaning(files=[f"{i}.png" for i in range(40)])
        write_cleaning(kind, out, top=1, overwrite=True)
        assert not (out / "labels.npy").exists()
        assert (out / "issues.csv").read_bytes() != before
        assert list(Path().iterdir()) == [out]

    def test_a_folder_of_others_is_never_touched(self):
        out = Path("out")
        write_cleaning(cleaning(), out, top=1)
        (out / "decisions.csv").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(
                ValueError, match=r"has 'decisions\.csv', which neuvar clean did not"
            ):
                write_cleaning(cleaning(), out, top=1, overwrite=overwrite)
        with pytest.raises(ValueError, match=r"--overwrite would delete it: move it$"):
            check_folder(out, overwrite=True)
        assert (out / "decisions.csv").read_text() == "mine"
        (out / "decisions.csv").unlink()
        (out / "summary.json").write_text("{}")
        with pytest.raises(ValueError, match="out has no readable result of neuvar clean"):
            check_folder(out, overwrite=True)
        Path("file").touch()
        with pytest.raises(ValueError, match="--out must be a folder, file is a file"):
            check_folder(Path("file"), overwrite=True)
        with pytest.raises(ValueError, match="must not be the current folder"):
            check_folder(Path(), overwrite=False)
        with pytest.raises(ValueError, match="must not be a mount point"):
            check_folder(Path("/proc"), overwrite=False)
        with pytest.raises(ValueError, match=r"--out cannot be created in /proc: "):
            check_folder(Path("/proc/there/found"), overwrite=False)
        assert not list(Path().glob(".neuvar-*"))
        Path("empty").mkdir()
        write_cleaning(cleaning(), Path("empty"), top=1)
        assert Path("empty/index.html").exists()

    def test_a_link_stays_a_link(self):
        Path("real").mkdir()
        Path("out").symlink_to("real")
        write_cleaning(cleaning(), Path("out"), top=1)
        assert Path("out").is_symlink()
        assert Path("real/index.html").exists()

    @pytest.mark.parametrize("earlier", [False, True])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
    @pytest.mark.parametrize("after", range(8))
    def test_interrupted_anywhere_it_leaves_nothing(self, monkeypatch, earlier, error, after):
        """Each of six files may be the last that is written, and each of two renames may fail."""
        out, old = Path("deep/out"), {}
        if earlier:
            write_cleaning(cleaning(seed=1), out, top=1)
            old = {path.name: path.read_bytes() for path in out.iterdir()}
        calls = iter(range(100))

        def failing(real):
            def call(*arguments):
                if next(calls) >= after:
                    raise error
                return real(*arguments)

            return call

        rename, renames = Path.rename, iter(range(100))

        def renaming(self, target):
            # The old folder must still be put back, which is the third.
            return (failing(rename) if next(renames) < 2 else rename)(self, target)

        monkeypatch.setattr(os, "fsync", failing(lambda _: None))
        monkeypatch.setattr(Path, "rename", renaming)
        expected = type(error) if isinstance(error, Exception) else error
        if after > 6 and not earlier:
            write_cleaning(cleaning(), out, top=1, overwrite=earlier)  # there is but one rename
            return
        with pytest.raises(expected):
            write_cleaning(cleaning(), out, top=1, overwrite=earlier)
        assert {path.name: path.read_bytes() for path in out.glob("*")} == old
        assert [path.name for path in Path().rglob("*.part")] == []
        assert [path.name for path in Path().rglob("*.old")] == []
        assert Path("deep").exists() == earlier

    @pytest.mark.parametrize("failing", range(13))
    def test_an_existing_folder_is_kept_and_restored(self, monkeypatch, failing):
        """Any of the twelve renames may fail, and then the folder has the old files again."""
        out = Path("out")
        out.mkdir()
        out.chmod(0o2770)
        same = out.stat().st_ino, out.stat().st_mode
        write_cleaning(cleaning(seed=1), out, top=1)
        old = {path.name: path.read_bytes() for path in out.iterdir()}
        rename, renames = Path.rename, iter(range(100))

        def renaming(self, target):
            if next(renames) == failing:
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", renaming)
        with pytest.raises(KeyboardInterrupt) if failing < 12 else nullcontext():
            write_cleaning(cleaning(), out, top=1, overwrite=True)
        new = {path.name: path.read_bytes() for path in out.iterdir()}
        assert (new == old) == (failing < 12)
        assert new.keys() == old.keys()
        assert (out.stat().st_ino, out.stat().st_mode) == same

    def test_a_read_only_folder_is_refused(self):
        Path("out").mkdir()
        Path("out").chmod(0o555)
        with pytest.raises(ValueError, match="--out cannot be written to out: "):
            check_folder(Path("out"), overwrite=True)

    def test_what_a_killed_process_left_is_ignored(self):
        Path("out/.neuvar-1.part/new").mkdir(parents=True)
        write_cleaning(cleaning(), Path("out"), top=1)
        assert Path("out/index.html").exists()

    def test_a_full_disk(self):
        """A real one: files of this process may not grow beyond a few bytes."""
        import resource
        import signal

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            with pytest.raises(OSError, match="File too large"):
                write_folder(Path("a/b"), {"x": b"1", "y": b"2" * 5000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert list(Path().iterdir()) == []


class TestDecisions:
    @pytest.fixture
    def written(self):
        one = cleaning(names=("=a", "b,c", "d"))
        write_cleaning(one, Path("out"), top=100)
        return one

    def decide(self, one, made):
        names = one.issues.names
        rows = [
            f'{i},"{names[one.issues.labels[i]]}",,{"accept"},"{names[k]}"\n'
            for i, k in made.items()
        ]
        return table("decisions.csv", "index,given,suggested,decision,label\n" + "".join(rows))

    def test_they_come_before_what_was_found(self, written):
        issues = written.issues
        first, second, third = (int(i) for i in issues.worst[:3])
        calm = int(np.flatnonzero(~issues.flagged)[0])
        made = {first: int(issues.labels[first]), second: int(issues.suggested[second])}
        made[third] = 3 - int(issues.labels[third]) - int(issues.suggested[third])
        made[calm] = (int(issues.labels[calm]) + 1) % 3
        path = self.decide(written, made)
        others = {n: (Path("out") / n).read_bytes() for n in ("issues.csv", "index.html")}
        assert len(write_decided(written.source, Path("out"), path)) == 4
        wanted = issues.cleaned.copy()
        wanted[list(made)] = list(made.values())
        labels = [row[1] for row in rows_of("out/labels.csv")[1:]]
        assert labels == [{"=a": "'=a"}.get(issues.names[k], issues.names[k]) for k in wanted]
        assert np.load("out/labels.npy").tolist() == [issues.names[k] for k in wanted]
        assert json.loads(Path("out/summary.json").read_text())["decisions"] == 4
        assert others == {n: (Path("out") / n).read_bytes() for n in others}
        assert len(list(Path("out").iterdir())) == 6

    @pytest.mark.parametrize(
        ("row", "sentence"),
        [
            ("99,'=a,,accept,d", "which has no index '99' with the label '=a'"),
            ("0,nonsense,,accept,d", "which has no index '0' with the label 'nonsense'"),
            ("0,{given},,accept,eel", "the label of index '0' must be a class of pets.npz"),
            ("0,{given},,accept,d\n0,{given},,accept,d", "must have index '0' once"),
            ("0,{given},,accept,", "line 2, column 'label' is empty"),
        ],
    )
    def test_of_other_data_are_refused(self, written, row, sentence):
        given = written.issues.names[written.issues.labels[0]]
        row = row.format(given=f'"{given}"')
        path = table("decisions.csv", f"index,given,suggested,decision,label\n{row}\n")
        before = Path("out/labels.csv").read_bytes()
        with pytest.raises(ValueError, match=re.escape(sentence)):
            write_decided(written.source, Path("out"), path)
        assert Path("out/labels.csv").read_bytes() == before

    def test_what_they_need(self, written):
        path = self.decide(written, {})
        with pytest.raises(ValueError, match=r"there is no nowhere\.csv"):
            write_decided(written.source, Path("elsewhere"), Path("nowhere.csv"))
        with pytest.raises(ValueError, match="elsewhere has no readable result of neuvar clean"):
            write_decided(written.source, Path("elsewhere"), path)
        other = cleaning(seed=5, names=written.issues.names).source
        with pytest.raises(ValueError, match="holds results for other data or labels"):
            write_decided(other, Path("out"), path)
        assert len(write_decided(written.source, Path("out"), path)) == 0

    def test_classes_that_only_probabilities_have(self):
        """The folder knows of more classes than the labels do."""
        source = with_classes(read_source(npz(x=IMAGES, y=LABELS)), 12)
        one = cleaning(n=6, names=source.examples.names, source=source)
        issues = replace(one.issues, labels=source.examples.labels)
        one = replace(one, issues=replace(issues, flagged=issues.suggested != issues.labels))
        write_cleaning(one, Path("out"), top=9)
        path = table("decisions.csv", "index,given,label\n4,10,11\n")
        write_decided(read_source(Path("data.npz")), Path("out"), path)
        wanted = np.array(LABELS)  # without a decision, a label is kept
        wanted[4] = 11
        assert np.load("out/labels.npy").tolist() == wanted.tolist()

    def test_files(self):
        files = [f"-{i}.png" for i in range(40)]
        one = cleaning(files=files)
        write_cleaning(one, Path("out"), top=9)
        given = one.issues.names[one.issues.labels[7]]
        path = table("decisions.csv", f"file,given,label\n'-7.png,{given},eel\n")
        write_decided(one.source, Path("out"), path)
        assert rows_of("out/labels.csv")[8] == ["'-7.png", "eel"]


def test_unreadable_images_are_left_out_if_asked():
    folder = photos([f"{k}/{i}.png" for k in "ab" for i in range(3)])
    for file in ("a/1.png", "b/0.png"):
        (folder / file).write_bytes(b"no picture")
    assert "2 of 6 images in photos cannot be read, the first is a/1.png" in refused(folder)
    kept = ("a/0.png", "a/2.png", "b/1.png", "b/2.png")
    table(
        "given.csv", "file,label\n" + "".join(f"{k}/{i}.png,{i}\n" for k in "ab" for i in range(3))
    )
    for labels, wanted in ((None, [0, 0, 1, 1]), ("given.csv", [0, 2, 1, 2])):
        source = read_source(folder, labels=labels, skip_unreadable=True)
        assert source.examples.files == kept
        assert len(source.examples.inputs) == 4
        assert source.examples.labels.tolist() == wanted
        assert source.left_out == ("2 unreadable images (a/1.png, b/0.png)",)
    for file in kept:
        (folder / file).write_bytes(b"no picture")
    assert "6 of 6 images" in refused(folder, skip_unreadable=True)
    words = refused(npz(x=IMAGES, y=LABELS), skip_unreadable=True)
    assert words == "--skip-unreadable is for folders of images, got data.npz"


def test_large_tables_are_read_without_delay():
    rows = "1.5,2.5,3.5,4.5,cat\n2,3,4,5,dog\n" * 25_000
    features, _ = read_features(table(text=f"a,b,c,d,label\n{rows}"), list("abcd"), "label")
    numbers = features.numbers
    assert numbers.shape == (50_000, 4)
    assert numbers[1].tolist() == [2, 3, 4, 5]


def test_names_that_are_no_text_come_back():
    """Of files and of classes, from labels.csv."""
    folder = photos([f"{k}\udcff/{i}\udce9.png" for k in "ab" for i in range(20)])
    source = read_source(folder)
    one = cleaning(names=source.examples.names, source=source)
    one = replace(one, issues=replace(one.issues, labels=source.examples.labels))
    write_cleaning(one, Path("out"), top=3)
    again = read_source(folder, labels="out/labels.csv").examples
    cleaned = [source.examples.names[k] for k in one.issues.cleaned]
    assert again.files == source.examples.files
    assert [again.names[k] for k in again.labels] == cleaned
    path = table("decisions.csv", "file,given,label\n")
    assert len(write_decided(source, Path("out"), path)) == 0
    assert read_source(folder, labels="out/labels.csv").examples.labels.tolist() == (
        source.examples.labels.tolist()
    )


def test_names_of_files_go_out_as_they_came_in():
    files = [f"a/{i}\udcff.png" for i in range(40)]
    write_cleaning(cleaning(files=files), Path("out"), top=3)
    assert b"a/7\xff.png" in Path("out/labels.csv").read_bytes()
