"""Examples from arrays, data sets and folders of images."""

import datetime
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from neuvar.cleaning import find_label_issues, image_folder
from neuvar.cleaning.class_indices import read_labels
from neuvar.cleaning.examples import Examples, inputs_of, read_examples, read_inputs, split_data
from neuvar.data import Dataset, Split

FEATURES = np.arange(12, dtype=np.float32).reshape(6, 2)
LABELS = [0, 1, 0, 1, 1, 0]


def picture(mode="RGB", size=(8, 8), color=None):
    """A picture of one colour; black with a dot by default."""
    one = Image.new(mode, size, color or 0)
    if color is None:
        one.putpixel((0, 0), (255,) * len(one.getbands()) if len(one.getbands()) > 1 else 255)
    return one


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def folder(root, files):
    """Save pictures, bytes or texts under a folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Image.Image):
            content.save(path)
        else:
            path.write_bytes(content)
    return root


def png_header(width, height):
    """A PNG file that promises pixels and has none."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b""))


class TestLabels:
    @given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2).filter(lambda v: len(set(v)) > 1))
    def test_numbers_are_ranks_among_those_that_occur(self, values):
        numbers, names = read_labels(values)
        assert [int(names[k]) for k in numbers] == values
        assert [int(name) for name in names] == sorted(set(values))
        assert numbers.dtype == np.int64

    @given(
        st.lists(
            st.text(min_size=1).filter(lambda word: word.strip() and word.lower() != "nan"),
            min_size=2,
            unique=True,
        ),
        st.data(),
    )
    def test_text_is_its_own_name(self, words, data):
        values = words + data.draw(st.lists(st.sampled_from(words)))
        numbers, names = read_labels(values)
        assert [names[k] for k in numbers] == values
        assert list(names) == sorted(words)

    @pytest.mark.parametrize(
        ("values", "names"),
        [
            (np.array([9, 0, 5, 9]), ("0", "5", "9")),
            (np.array([9.0, 0.0, 5.0, 9.0]), ("0", "5", "9")),
            (torch.tensor([9, 0, 5, 9]), ("0", "5", "9")),
            (torch.tensor([9, 0, 5, 9], dtype=torch.bfloat16), ("0", "5", "9")),
            ([torch.tensor(9), 0, np.int8(5), np.array(9)], ("0", "5", "9")),
            (np.array([9, 0, 5, 9], dtype=">u2"), ("0", "5", "9")),
            (np.array([9, 0, 5, 9], dtype=object), ("0", "5", "9")),
            (pd.Series([9, 0, 5, 9], index=[3, 2, 1, 0]), ("0", "5", "9")),
            (pd.Series([9, 0, 5, 9], dtype="Int64"), ("0", "5", "9")),
            ((2**63, -1, 7, 2**63), ("-1", "7", "9223372036854775808")),
            ([2**70, 1, 3, 2**70], ("1", "3", "1180591620717411303424")),
            (np.array(["c", "a", "b", "c"]), ("a", "b", "c")),
            (np.array([b"c", b"a", b"b", b"c"]), ("a", "b", "c")),
            (pd.Series(["c", "a", "b", "c"]), ("a", "b", "c")),
            (pd.Series(["c", "a", "b", "c"], dtype="category"), ("a", "b", "c")),
            (pd.Index(["c", "a", "b", "c"]), ("a", "b", "c")),
            (
                [datetime.date(year, 1, 1) for year in (2003, 2001, 2002, 2003)],
                ("2001-01-01", "2002-01-01", "2003-01-01"),
            ),
            (
                np.array(["2003", "2001", "2002", "2003"], dtype="M8[Y]"),
                ("2001", "2002", "2003"),
            ),
            (
                np.array(["2003", "2001", "2002", "2003"], dtype="M8[ns]"),
                tuple(f"200{k}-01-01T00:00:00.000000000" for k in (1, 2, 3)),
            ),
        ],
    )
    def test_any_kind_that_can_be_sorted(self, values, names):
        numbers, found = read_labels(values)
        assert numbers.tolist() == [2, 0, 1, 2]
        assert found == names

    @pytest.mark.parametrize(
        "values",
        [
            [True, False, True],
            np.array([True, False, True]),
            torch.tensor([True, False, True]),
            [np.bool_(True), False, True],
            pd.Series([True, False, True], dtype="boolean"),
        ],
    )
    def test_truth_values_are_two_classes(self, values):
        numbers, names = read_labels(values)
        assert (numbers.tolist(), names) == ([1, 0, 1], ("False", "True"))

    @pytest.mark.parametrize(
        "values",
        [
            ["a", "b", None, "b", None],
            ["a", "b", float("nan"), "b", ""],
            ["a", "b", " \t", "b", None],
            [1, 2, None, 1, None],
            [1.0, 2.0, np.nan, 1.0, np.nan],
            np.array([1.0, 2.0, np.nan, 1.0, np.nan]),
            torch.tensor([1.0, 2.0, torch.nan, 1.0, torch.nan]),
            np.array(["a", "b", "", "b", ""]),
            np.array(["a", "b", np.nan, "b", np.nan]),
            ["a", "b", "nan", "b", "NaN"],
            np.array(["2001", "2002", "NaT", "2001", "NaT"], dtype="M8[Y]"),
            np.array(["2001", "2002", "NaT", "2001", "NaT"], dtype="M8[ns]"),
            np.ma.array([1, 2, 3, 1, 5], mask=[0, 0, 1, 0, 1]),
            pd.Series(["a", "b", None, "b", None]),
            pd.Series(["a", "b", pd.NA, "b", pd.NA], dtype="string"),
            pd.Series(["a", "b", None, "b", None], dtype="category"),
            pd.Series([1, 2, None, 1, None], dtype="Int64"),
            pd.Series([True, False, None, True, None], dtype="boolean"),
            [pd.Timestamp(1), pd.Timestamp(2), pd.NaT, pd.Timestamp(1), pd.NaT],
        ],
        ids=range(19),
    )
    def test_missing_ones_are_counted(self, values):
        with pytest.raises(ValueError, match="2 of 5 are missing, the first one at position 2"):
            read_labels(values)

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ([], "labels is empty"),
            ([3, 3], "at least two classes, got only one class, '3'"),
            (["cat"], "got only one class, 'cat'"),
            ([0, 0.5, 1], r"labels must be classes, got 0\.5 at position 1"),
            ([0, 1, np.inf], "got inf at position 2, which looks like a continuous quantity"),
            ([0, 1e300], r"got 1e\+300 at position 1"),
            (["a", 1], "of one type that can be sorted, got values of type int, str"),
            ([1j, 2j], "can be sorted, got values of type complex"),
            ([[1], [2]], "one number or name for each example, got list at position 0"),
            ([1, torch.tensor([1, 2])], "got Tensor at position 1"),
            (np.eye(3), r"labels must have the shape \(n,\), got \(3, 3\)"),
            (pd.DataFrame({"y": [1, 2]}), r"got \(2, 1\)"),
            (None, r"got \(\)"),
        ],
    )
    def test_bad_ones_get_a_sentence(self, values, sentence):
        with pytest.raises(ValueError, match=sentence):
            read_labels(values)

    def test_known_classes_keep_their_numbers(self):
        names = ("c", "a", "b")
        for values in ([2, 0, 2], [2.0, 0.0, 2.0], ["b", "c", "b"], np.array(["b", "c", "b"])):
            numbers, found = read_labels(values, names)
            assert (numbers.tolist(), found) == ([2, 0, 2], names)

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ([0, 1, 3], "names or indices of the 3 classes, got 3 at position 2"),
            ([0, -1, 1], "got -1 at position 1"),
            (np.array([0, 2**63], dtype=np.uint64), "got 9223372036854775808 at position 1"),
            (["a", "d", "b"], "got 'd' at position 1"),
            ([2, 2, 2], "got only one class, 'b'"),
            ([0, 1], "at least as many examples as there are classes, got 2 examples and 3"),
        ],
    )
    def test_known_classes_refuse_others(self, values, sentence):
        with pytest.raises(ValueError, match=sentence):
            read_labels(values, ("c", "a", "b"))

    def test_a_known_class_may_be_called_nan(self):
        assert read_labels(["nan", "a", "nan"], ("a", "nan"))[0].tolist() == [1, 0, 1]

    def test_names_must_differ(self):
        with pytest.raises(ValueError, match="names must all be different"):
            read_labels([0, 1], ("a", "a"))


class TestInputs:
    @pytest.mark.parametrize(
        "values",
        [
            [[1, 2.0], [3, 4]],
            ([1, 2], [3, 4.0]),
            np.array([[1, 2], [3, 4]], dtype=np.uint8),
            np.array([[1, 2], [3, 4]], dtype=np.uint64),
            np.array([[1, 2], [3, 4]], dtype=">f8"),
            np.array([[1, 3], [2, 4]], dtype=np.float16).T,
            torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8),
            torch.tensor([[1.0, 2], [3, 4]], dtype=torch.bfloat16, requires_grad=True),
            [torch.tensor([1.0, 2]), torch.tensor([3.0, 4])],
            [np.array([1.0, 2]), np.array([3, 4])],
            pd.DataFrame({"a": [1, 3], "b": [2.0, 4.0]}, index=[7, 5]),
            pd.DataFrame({"a": pd.array([1, 3], dtype="Int64"), "b": [2.0, 4.0]}),
        ],
        ids=range(12),
    )
    def test_numbers_become_float32(self, values):
        found = read_inputs(values)
        assert found.dtype == torch.float32
        assert found.tolist() == [[1, 2], [3, 4]]
        assert not found.requires_grad

    @pytest.mark.parametrize(
        "values",
        [
            [[1, 2], [3, 2**40 + 1]],
            np.array([[3, 2**40 + 1], [1, 2]])[::-1],
            np.array([[1, 2], [3, 2**40 + 1]], dtype=">i8"),
            torch.tensor([[1, 2], [3, 2**40 + 1]]),
            [torch.tensor([1, 2]), torch.tensor([3, 2**40 + 1])],
        ],
        ids=range(5),
    )
    def test_rows_of_whole_numbers_stay_whole(self, values):
        found = read_inputs(values)
        assert found.dtype == torch.int64
        assert found.tolist() == [[1, 2], [3, 2**40 + 1]]

    @pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.uint32])
    def test_short_whole_numbers(self, kind):
        found = read_inputs(np.array([[1, 2], [3, 4]], dtype=kind))
        assert (found.dtype, found.tolist()) == (torch.int64, [[1, 2], [3, 4]])

    def test_whole_numbers_that_are_no_rows_become_float32(self):
        for shape in ((2, 3, 4), (2, 2, 2, 2, 2)):
            assert read_inputs(np.ones(shape, dtype=np.int64)).dtype == torch.float32

    def test_truth_values_beside_numbers(self):
        frame = pd.DataFrame({"a": [1.5, 3.0], "b": [True, False]})
        assert read_inputs(frame).tolist() == [[1.5, 1], [3, 0]]

    @pytest.mark.parametrize(
        "shape", [(3, 8, 9), (3, 1, 8, 9), (3, 3, 8, 9), (3, 3, 4, 4), (3, 7, 4, 3)]
    )
    def test_images_stay_bytes(self, shape):
        x = noise(*shape)
        for values in (x, torch.from_numpy(x), list(x), list(torch.from_numpy(x))):
            found = read_inputs(values)
            assert found.dtype == torch.uint8
            assert (found.numpy() == x).all()

    @pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32, np.float64])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("size", [(5, 5), (9, 6)])
    def test_channels_move_before_height_and_width(self, size, channels, kind):
        x = noise(4, *size, channels).astype(kind)
        found = read_inputs(x)
        assert found.is_contiguous()
        assert found.dtype == (torch.uint8 if kind == np.uint8 else torch.float32)
        assert (found.numpy() == np.transpose(x, (0, 3, 1, 2))).all()

    def test_four_channels_of_floats_are_four_channels(self):
        """Nobody knows which number is opaque."""
        x = np.random.default_rng(0).random((2, 8, 8, 4), dtype=np.float32)
        assert (read_inputs(x).numpy() == np.transpose(x, (0, 3, 1, 2))).all()

    def test_transparent_pixels_are_on_white(self, monkeypatch):
        """Every colour with every opacity, rounded to the nearest; in several parts."""
        monkeypatch.setattr("neuvar.cleaning.examples.CHUNK", 3)
        colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
        x = np.stack([colour, 255 - colour, colour // 2, alpha], -1).astype(np.uint8)
        found = read_inputs(np.stack([x, x[::-1], x, x])).numpy()
        share = alpha[..., None] / 255
        expected = np.round(x[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
        assert (found[3] == np.moveaxis(expected, 2, 0)).all()
        assert (found[1] == np.moveaxis(expected[::-1], 2, 0)).all()

    @pytest.mark.parametrize("shape", [(3, 5), (3, 2, 4, 5, 3)])
    def test_bytes_that_are_no_images_become_float32(self, shape):
        x = noise(*shape)
        found = read_inputs(x)
        assert found.dtype == torch.float32
        assert (found.numpy() == x).all()

    @pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 8, 9), (2, 3, 4, 4), (2, 7, 4, 3)])
    def test_floating_point_images_with_channels_first_stay_as_they_are(self, shape):
        x = np.random.default_rng(0).random(shape, dtype=np.float32)
        assert (read_inputs(x).numpy() == x).all()

    def test_arrays_that_may_not_be_written_are_copied(self):
        x = noise(3, 8, 8)
        x.flags.writeable = False
        found = read_inputs(x)
        found.zero_()
        assert x.any()

    def test_memory_is_shared_where_it_can_be(self):
        x = noise(3, 8, 8)
        assert np.shares_memory(read_inputs(x).numpy(), x)
        assert np.shares_memory(read_inputs(FEATURES).numpy(), FEATURES)

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ([], r"inputs must have the shape \(n, ...\) and not be empty, got \(0,\)"),
            (np.zeros((3, 0)), r"not be empty, got \(3, 0\)"),
            (np.zeros(3), r"got \(3,\)"),
            (pd.Series([1.0, 2.0]), r"got \(2,\)"),
            (None, "inputs must be numbers, got values of type object"),
            (np.array([[1, None]]), "inputs must be numbers, got values of type object"),
            ([["a"], ["b"]], "inputs must be numbers, got values of type <U1"),
            (np.ones((2, 2), dtype=complex), "got values of type complex128"),
            (pd.DataFrame({"a": [1, 2], "b": ["1", "2"]}), "inputs must be numbers"),
            ([[1, 2], [3]], "inputs must all have one shape"),
            ([torch.ones(2), torch.ones(3)], r"got \(2,\) at position 0 and \(3,\) at position 1"),
            ([torch.ones(2), 3], r"and \(\) at position 1"),
            (np.ma.array([[1.0, 2.0]], mask=[[0, 1]]), "no masked elements"),
            (torch.ones(2, 2).to_sparse(), "dense tensor of real numbers, got torch.sparse_coo"),
            (torch.ones(2, 2, dtype=torch.complex64), "real numbers"),
            (
                [[1, 2], [np.nan, 1], [2, np.inf]],
                "finite in float32, but 2 of 3 examples are not, the first one at position 1",
            ),
            (torch.tensor([[1.0], [-torch.inf]]), "1 of 2 examples are not"),
            (np.array([[1.0], [1e39]]), "1 of 2 examples are not, the first one at position 1"),
            (pd.DataFrame({"a": pd.array([1, None], dtype="Int64")}), "1 of 2 examples"),
        ],
        ids=range(19),
    )
    def test_bad_ones_get_a_sentence(self, values, sentence):
        with pytest.raises(ValueError, match=sentence):
            read_inputs(values)


class Items:
    """A data set of torch's kind, without being one."""

    def __init__(self, inputs, labels, classes=None):
        self.inputs, self.labels = inputs, labels
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Dicts(Items):
    """The same with items as Hugging Face has them."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


class TestExamples:
    def test_they_are_returned_as_they_are(self):
        found = read_examples((FEATURES, LABELS))
        assert read_examples(found) is found
        assert inputs_of(split_data(found)) is found.inputs
        assert len(found) == 6
        for change in ({"size": 8}, {"names": ("a", "b")}):
            with pytest.raises(ValueError, match="size and names must be left out for Examples"):
                read_examples(found, **change)

    @pytest.mark.parametrize(
        "data",
        [
            (FEATURES, LABELS),
            [FEATURES, LABELS],
            (FEATURES.tolist(), tuple(LABELS)),
            (torch.from_numpy(FEATURES), torch.tensor(LABELS)),
            (pd.DataFrame(FEATURES), pd.Series(LABELS)),
            TensorDataset(torch.from_numpy(FEATURES), torch.tensor(LABELS)),
            Subset(Items(np.vstack([FEATURES, FEATURES]), LABELS + LABELS), range(6)),
            Items(FEATURES, LABELS),
            Items(FEATURES, LABELS, classes=10),
        ],
        ids=range(9),
    )
    def test_the_same_from_everywhere(self, data):
        found = read_examples(data)
        assert (found.inputs.numpy() == FEATURES).all()
        assert found.labels.tolist() == LABELS
        assert (found.names, found.files) == (("0", "1"), ())

    @pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
    def test_items_that_are_dicts(self, key):
        rows = zip(FEATURES, LABELS, strict=True)
        items = [{"id": "a", "x": x, key: y, "note": None} for x, y in rows]
        for kind in (torch.from_numpy, list, np.asarray):
            found = read_examples(Dicts([item | {"x": kind(item["x"])} for item in items]))
            assert (found.inputs.numpy() == FEATURES).all()
            assert found.labels.tolist() == LABELS
        labels, names = read_labels(split_data(Dicts(items)).labels, classes=3)
        assert (labels.tolist(), names) == (LABELS, ("0", "1", "2"))

    def test_pictures_and_words_in_dicts(self):
        x = noise(6, 9, 9)
        items = [
            {"image": Image.fromarray(one), "label": k} for one, k in zip(x, LABELS, strict=True)
        ]
        assert (read_examples(Dicts(items)).inputs.numpy() == x).all()
        words = read_examples(Dicts([{"input_ids": [k, 7, 2], "label": k} for k in LABELS]))
        assert words.inputs.dtype == torch.int64

    @pytest.mark.parametrize(
        "item",
        [
            {"x": 1.0},
            {"label": 0},
            {"text": "good", "label": 0},
            {"x": [1.0], "z": [1.0], "label": 0},
            {"x": [1.0], "label": 0, "y": 0},
        ],
    )
    def test_dicts_without_one_input_and_one_label(self, item):
        sentence = (
            "items of data that are dicts must have a label under one of labels, label, targets, "
            f"target, y and one input, got the keys {', '.join(item)} at position 1"
        )
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            read_examples(Dicts([{"x": [1.0], "label": 0}, item]))

    def test_a_split_and_the_training_part_of_a_data_set(self):
        images = torch.from_numpy(noise(6, 3, 8, 8))
        part = Split(images, torch.tensor(LABELS))
        other = Split(images[:0], torch.zeros(0))
        assert torch.equal(read_examples(part).inputs, images)
        for names, expected in (((), ("0", "1", "2")), (("x", "y", "z"), ("x", "y", "z"))):
            found = read_examples(Dataset("some", 3, part, other, names))
            assert torch.equal(found.inputs, images)
            assert (found.labels.tolist(), found.names) == (LABELS, expected)

    def test_a_data_set_may_know_its_classes(self):
        known = Items(FEATURES, [2, 0, 2, 0, 0, 2], classes=["c", "a", "b"])
        for data in (known, Subset(Subset(known, range(6)), range(6))):
            found = read_examples(data)
            assert (found.labels.tolist(), found.names) == ([2, 0, 2, 0, 0, 2], ("c", "a", "b"))
        by_name = read_examples(Items(FEATURES, list("bcbccb"), classes=("c", "a", "b")))
        assert by_name.labels.tolist() == [2, 0, 2, 0, 0, 2]

    def test_given_names_come_first(self):
        data = Items(FEATURES, LABELS, classes=["c", "a"])
        assert read_examples(data, names=("x", "y", "z")).names == ("x", "y", "z")
        found = read_examples((FEATURES, [5, 0, 5, 0, 0, 5]), names="abcdef")
        assert found.labels.tolist() == [5, 0, 5, 0, 0, 5]

    def test_items_of_bytes_are_images(self):
        x = noise(6, 9, 8, 3)
        expected = torch.from_numpy(x).movedim(3, 1)
        assert torch.equal(read_examples(Items(x, LABELS)).inputs, expected)
        assert torch.equal(
            read_examples(TensorDataset(expected, torch.tensor(LABELS))).inputs, expected
        )

    def test_pictures_in_pairs_and_items(self):
        x = noise(6, 9, 8, 3)
        many = [Image.fromarray(one) for one in x]
        for data in ((many, LABELS), Items(many, LABELS)):
            found = read_examples(data).inputs
            assert found.shape == (6, 3, 9, 9)
            assert (found[:, :, :, :8].numpy() == np.moveaxis(x, 3, 1)).all()
            assert read_examples(data, size=5).inputs.shape == (6, 3, 5, 5)
        assert all(one.size == (8, 9) for one in many)

    @pytest.mark.parametrize(
        ("data", "sentence"),
        [
            ((FEATURES, LABELS[:5]), "must have the same length, got 6 and 5"),
            ((FEATURES, LABELS, LABELS), "data must be a pair .* got tuple"),
            (FEATURES, "data must be a pair .* got ndarray"),
            (torch.from_numpy(FEATURES), "got Tensor"),
            (pd.DataFrame(FEATURES), "got DataFrame"),
            ({"x": FEATURES, "y": LABELS}, "got dict"),
            (None, "got NoneType"),
            (Stream(), "a dataset with a length and items, .* got Stream"),
            (DataLoader(Items(FEATURES, LABELS)), "got DataLoader"),
            (
                TensorDataset(torch.ones(3, 2)),
                "pairs of an input and a label, or dicts with them, got tuple at",
            ),
            (Items([picture(), 3], [0, 1]), "must all be PIL images, or none, got 1 of 2"),
            (Items([], []), "labels is empty"),
        ],
        ids=range(12),
    )
    def test_bad_data_get_a_sentence(self, data, sentence):
        with pytest.raises(ValueError, match=sentence):
            read_examples(data)

    def test_an_item_that_is_no_pair_is_named(self):
        data = TensorDataset(torch.ones(3, 2), torch.ones(3), torch.ones(3))
        with pytest.raises(ValueError, match=r"items of data must be pairs .* at position 0"):
            read_examples(data)

    @pytest.mark.parametrize("size", [0, -3, 2.0, "8", True])
    def test_size_is_a_whole_number(self, size):
        with pytest.raises(ValueError, match="size must be an integer >= 1"):
            read_examples((FEATURES, LABELS), size=size)

    def test_size_is_for_pictures(self):
        with pytest.raises(ValueError, match="size is for PIL images and folders of images"):
            read_examples((FEATURES, LABELS), size=8)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"labels": np.array(LABELS[:5])}, "must have the same length, got 6 and 5"),
            ({"files": ("a",)}, "got 6 and 6, and 1 files"),
            ({"names": ("a",)}, "labels must be int64 from 0 to 0"),
            ({"labels": np.array(LABELS) - 1}, "labels must be int64 from 0 to 1"),
            ({"labels": np.array(LABELS, dtype=np.float32)}, "labels must be int64"),
            (
                {"inputs": torch.ones(6, 2, dtype=torch.uint8)},
                "inputs must be float32, int64 with 2",
            ),
            ({"inputs": torch.ones(6, 2, 2, dtype=torch.int64)}, r"got torch.int64 of shape"),
            ({"inputs": torch.ones(6, 2).double()}, r"got torch.float64 of shape \(6, 2\)"),
        ],
    )
    def test_examples_are_checked(self, change, sentence):
        parts = {"inputs": torch.ones(6, 2), "labels": np.array(LABELS), "names": ("a", "b")}
        assert Examples(**parts).names == ("a", "b")
        assert Examples(**parts | {"inputs": torch.ones(6, 2).long()}).names == ("a", "b")
        with pytest.raises(ValueError, match=sentence):
            Examples(**parts | change)

    def test_nothing_optional_is_imported_for_arrays(self):
        code = """
import sys
from neuvar.cleaning import read_examples
read_examples(([[1, 2], [3, 4]], ["a", "b"]))
print(sorted({"PIL", "pandas", "sklearn"} & set(sys.modules)))
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "[]\n"


class TestFolder:
    def test_classes_files_and_pixels(self, tmp_path):
        x = noise(4, 8, 8)
        names = ["dog/b.png", "cat/z.png", "dog/a/c.png", "cat/a.png"]
        many = dict(zip(names, map(Image.fromarray, x), strict=True))
        for path in (folder(tmp_path, many), str(tmp_path)):
            found = read_examples(path)
            assert found.names == ("cat", "dog")
            assert found.files == ("cat/a.png", "cat/z.png", "dog/a/c.png", "dog/b.png")
            assert found.labels.tolist() == [0, 0, 1, 1]
            assert (found.inputs.numpy() == x[[3, 1, 2, 0]]).all()

    def test_only_images_count(self, tmp_path):
        many = {
            "cat/1.png": picture(),
            "dog/2.png": picture(),
            "cat/Thumbs.db": b"x",
            "cat/notes.txt": b"x",
            "cat/.hidden.png": b"x",
            "cat/.cache/3.png": b"x",
            "dog/__MACOSX/4.png": b"x",
            ".git/5.png": b"x",
            "6.png": b"x",
            "README.md": b"x",
        }
        found = read_examples(folder(tmp_path, many))
        assert found.files == ("cat/1.png", "dog/2.png")
        assert found.names == ("cat", "dog")

    def test_a_class_may_be_empty(self, tmp_path):
        many = {f"{k % 2}/{k}.png": picture() for k in range(6)} | {"01/notes.txt": b"x"}
        found = read_examples(folder(tmp_path, many))
        assert found.names == ("0", "01", "1")
        assert found.labels.tolist() == [0, 0, 0, 2, 2, 2]

    def test_names_give_the_order_of_classes(self, tmp_path):
        many = {f"{k}/{i}.png": picture() for k in ("cat", "dog") for i in range(2)}
        folder(tmp_path, many)
        found = read_examples(tmp_path, names=("dog", "bird", "cat"))
        assert found.labels.tolist() == [2, 2, 0, 0]
        with pytest.raises(ValueError, match="indices of the 2 classes, got 'cat' at position 0"):
            read_examples(tmp_path, names=("dog", "bird"))
        for path in (tmp_path, str(tmp_path)):
            labels, names = read_labels(split_data(path).labels, ("dog", "cat"), classes=2)
            assert (labels.tolist(), names) == ([1, 1, 0, 0], ("dog", "cat"))
            with pytest.raises(ValueError, match="indices of the 1 classes, got 'cat'"):
                read_labels(split_data(path).labels, ("dog",), classes=1)
        p = np.full((4, 3), 1 / 3)
        with pytest.raises(ValueError, match="names must be left out for Examples"):
            find_label_issues(p, found, names=("dog", "bird", "cat"))
        assert find_label_issues(p, found).names == found.names

    def test_a_class_may_be_called_nan(self, tmp_path):
        folder(tmp_path, {f"{k}/1.png": picture() for k in ("nan", "cat")})
        assert read_examples(tmp_path).names == ("cat", "nan")

    @pytest.mark.parametrize("ending", sorted(image_folder.SUFFIXES))
    def test_all_kinds_of_images(self, tmp_path, ending):
        grey = ending == ".pgm"
        one, two = (
            picture("L" if grey else "RGB", (8, 8), level if grey else (level,) * 3)
            for level in (200, 100)
        )
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        kind = "JPEG" if ending == ".jfif" else None  # which Pillow reads under this name only
        one.save(tmp_path / f"a/1{ending}", kind)
        two.save(tmp_path / f"b/2{ending}", kind)
        (tmp_path / f"b/2{ending}").rename(tmp_path / f"b/2{ending.upper()}")
        found = read_examples(tmp_path)
        assert len(found) == 2
        for image, level in zip(found.inputs.int(), (200, 100), strict=True):
            assert (image - level).abs().max() <= 2  # JPEG and WebP lose a little

    def test_links(self, tmp_path):
        """A class may be a link; loops, and links within a class, are not followed."""
        root = folder(tmp_path / "data", {"cat/1.png": picture(), "cat/in/2.png": picture()})
        elsewhere = folder(tmp_path / "elsewhere", {"3.png": picture(), "4.png": picture()})
        (root / "dog").symlink_to(elsewhere)
        (root / "loop").symlink_to(root)
        (root / "above").symlink_to(tmp_path)
        (root / "cat/loop").symlink_to(root / "cat")
        (root / "cat/in/all").symlink_to(root)
        (root / "cat/5.png").symlink_to(elsewhere / "3.png")
        found = read_examples(root)
        assert found.files == ("cat/1.png", "cat/5.png", "cat/in/2.png", "dog/3.png", "dog/4.png")
        assert found.names == ("cat", "dog")

    def test_unreadable_images_are_counted_and_the_first_is_named(self, tmp_path):
        good = tmp_path / "good.png"
        Image.fromarray(noise(32, 32)).save(good)
        content = good.read_bytes()
        many = {
            "a/1.png": picture(),
            "b/2.png": content,
            "b/3.png": content[: len(content) // 2],
            "b/4.jpg": b"",
            "b/5.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        }
        root = folder(tmp_path / "data", many)
        (root / "b/6.png").symlink_to(tmp_path / "nowhere")
        os.mkfifo(root / "b/7.png")
        with pytest.raises(
            ValueError, match=r"5 of 7 images in .* cannot be read, the first is b/3"
        ):
            read_examples(root)
        (root / "b/3.png").unlink()
        sentence = r"4 of 6 images .* the first is b/4\.jpg: not an image of a supported format; "
        with pytest.raises(ValueError, match=sentence):
            read_examples(root)
        (root / "b/4.jpg").unlink()
        # Pillow knows PostScript, and would start another program for it.
        with pytest.raises(ValueError, match=r"b/5\.png: not an image of a supported format; corr"):
            read_examples(root)
        (root / "b/5.png").unlink()
        with pytest.raises(
            ValueError, match=r"the first is b/6\.png: No such file or directory; corr"
        ):
            read_examples(root)

    @pytest.mark.parametrize("size", [(50_000, 50_000), (12_000, 10_000)])
    def test_bombs_are_refused(self, tmp_path, size):
        many = {"a/1.png": picture(), "b/2.png": png_header(*size)}
        with pytest.raises(ValueError, match=r"1 of 2 images .* the first is b/2\.png: .* pixels"):
            read_examples(folder(tmp_path, many))

    def test_the_limit_of_pixels_is_ours(self, tmp_path, monkeypatch):
        """It holds for the picture as it is stored, not for what is unpacked of it."""
        many = {"a/1.png": picture(size=(10, 10)), "b/2.jpg": picture(size=(1000, 1001))}
        folder(tmp_path, many)
        monkeypatch.setattr(image_folder, "MAX_PIXELS", 1_001_000)
        assert len(read_examples(tmp_path)) == 2
        monkeypatch.setattr(image_folder, "MAX_PIXELS", 1_000_999)
        with pytest.raises(ValueError, match="it has 1000 x 1001 pixels, more than 1,000,999"):
            read_examples(tmp_path)
        with pytest.raises(ValueError, match="it has 1000 x 1001 pixels"):
            read_examples(([picture(size=(1000, 1001))] * 2, [0, 1]))

    @pytest.mark.parametrize(
        ("many", "sentence"),
        [
            ({"a/1.png": picture()}, "at least two classes, got only one class, 'a'"),
            ({"1.png": picture()}, "a folder of images for each class, it has no folders"),
            ({"train/a/1.png": picture()}, "has the splits train of a dataset: give one of them"),
            ({"a/1.txt": b"", "b/2.txt": b""}, "it has 2 folders and no image in them"),
            ({"a/1.png": picture(), "b/2.txt": b""}, "got only one class, 'a'"),
            (
                {"a/1.png": picture(), "b/2.png": picture(), "c/x": b"", "d/x": b""},
                "at least as many examples as there are classes, got 2 examples and 4 classes",
            ),
            (
                {"train/a/1.png": picture(), "Val/a/1.png": picture()},
                "the splits Val, train of a dataset: give one of them, such as .*Val",
            ),
        ],
    )
    def test_folders_without_two_classes_get_a_sentence(self, tmp_path, many, sentence):
        with pytest.raises(ValueError, match=sentence):
            read_examples(folder(tmp_path, many))

    def test_what_is_no_folder_gets_a_sentence(self, tmp_path):
        with pytest.raises(ValueError, match="nothing cannot be read: No such file or directory"):
            read_examples(tmp_path / "nothing")
        file = tmp_path / "file.npz"
        file.write_bytes(b"")
        with pytest.raises(ValueError, match=r"file\.npz cannot be read: Not a directory"):
            read_examples(str(file))

    def test_without_pillow_there_is_a_sentence(self, tmp_path, monkeypatch):
        folder(tmp_path, {"a/1.png": picture(), "b/2.png": picture()})
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(ImportError, match=r'pip install "neuvar\[clean\]"'):
            read_examples(tmp_path)

    def test_oddities_that_pillow_warns_of_are_no_errors(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 1
        folder(tmp_path, {"a/1.png": picture(), "b/2.png": picture()})
        damaged = b"Exif\0\0" + exif.tobytes()[6:16]
        picture(size=(9, 9)).save(tmp_path / "b/3.jpg", exif=damaged)
        assert len(read_examples(tmp_path)) == 3


class TestPictures:
    def read(self, tmp_path, *many, size=None):
        """Images of a folder with pictures, the first of which is a class of its own."""
        for number, one in enumerate(many):
            path = tmp_path / str(min(number, 1))
            path.mkdir(exist_ok=True)
            one.save(path / f"{number:03}.png" if one.mode != "I;16B" else path / f"{number}.tif")
        return read_examples(tmp_path, size=size).inputs.numpy()

    @pytest.mark.parametrize(
        ("sizes", "size", "side"),
        [
            ([(28, 28)] * 2, None, 28),
            ([(28, 20), (20, 28)], None, 28),
            ([(64, 64)] * 2, None, 64),
            ([(65, 65)] * 2, None, 64),
            ([(28, 28), (29, 29)], None, 64),
            ([(64, 64), (300, 20)], None, 64),
            ([(28, 28)] * 2, 40, 40),
            ([(200, 100), (3, 5)], 16, 16),
            ([(200, 1), (1, 1)], 8, 8),
        ],
    )
    def test_size(self, tmp_path, sizes, size, side):
        many = [picture("L", one, level) for one, level in zip(sizes, (9, 7), strict=True)]
        found = self.read(tmp_path, *many, size=size)
        assert found.shape == (2, side, side)
        for image, (width, height), level in zip(found, sizes, (9, 7), strict=True):
            # The whole picture is there, its longer side fills the square, the rest is black.
            inner_width, inner_height = (
                max(1, round(one * side / max(width, height))) for one in (width, height)
            )
            expected = np.zeros((side, side), dtype=np.uint8)
            top, left = (side - inner_height) // 2, (side - inner_width) // 2
            expected[top : top + inner_height, left : left + inner_width] = level
            assert (image == expected).all()

    def test_pictures_of_the_right_size_are_not_touched(self, tmp_path):
        x = noise(2, 20, 13, 3)
        found = self.read(tmp_path, *map(Image.fromarray, x))
        assert (found[:, :, :, 3:16] == np.moveaxis(x, 3, 1)).all()
        assert not found[:, :, :, :3].any()
        assert not found[:, :, :, 16:].any()

    def test_scaling_does_not_alias(self, tmp_path):
        """Stripes of one pixel become even grey; picking pixels would give black or white."""
        stripes = np.zeros((640, 640), dtype=np.uint8)
        stripes[:, ::2] = 255
        found = self.read(tmp_path, *map(Image.fromarray, [stripes, stripes.T.copy()]))
        inner = found[:, 4:-4, 4:-4].astype(float)
        assert np.abs(inner - 127.5).max() < 2

    def test_a_ramp_stays_a_ramp(self, tmp_path):
        ramp = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)).copy()
        found = self.read(tmp_path, *map(Image.fromarray, [ramp, ramp]), size=32)
        expected = np.arange(32) * 8 + 3.5  # centres of eight pixels
        assert np.abs(found[:, :, 2:-2] - expected[2:-2]).max() <= 0.5

    @pytest.mark.parametrize(
        ("orientation", "turned"),
        [
            (1, lambda x: x),
            (2, lambda x: x[:, ::-1]),
            (3, lambda x: x[::-1, ::-1]),
            (4, lambda x: x[::-1]),
            (5, lambda x: x.T),
            (6, lambda x: np.rot90(x, -1)),
            (7, lambda x: x[::-1, ::-1].T),
            (8, np.rot90),
        ],
    )
    def test_pictures_are_turned_as_the_camera_says(self, tmp_path, orientation, turned):
        x = noise(10, 10)
        exif = Image.Exif()
        exif[0x0112] = orientation
        folder(tmp_path, {"a/1.png": Image.fromarray(x)})
        (tmp_path / "b").mkdir()
        Image.fromarray(x).save(tmp_path / "b/2.png", exif=exif)
        found = read_examples(tmp_path).inputs.numpy()
        assert (found[0] == x).all()
        assert (found[1] == turned(x)).all()

    def test_grey_of_all_kinds_is_one_byte(self, tmp_path):
        levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
        wide = Image.fromarray(levels * 257)
        assert wide.mode == "I;16"
        clear = Image.fromarray(np.stack([levels, np.full_like(levels, 255)], -1).astype(np.uint8))
        assert clear.mode == "LA"
        big = Image.frombytes("I;16B", (16, 16), (levels * 257).astype(">u2").tobytes())
        dots = Image.fromarray((levels % 2 * 255).astype(np.uint8)).convert("1")
        plain = Image.fromarray(levels.astype(np.uint8))
        found = self.read(tmp_path, plain, wide, clear, dots, big)
        assert found.shape == (5, 16, 16)
        for number in (0, 1, 2, 4):
            assert (found[number] == levels).all()
        assert (found[3] == levels % 2 * 255).all()

    @pytest.mark.parametrize(
        ("kind", "levels", "expected"),
        [
            (np.uint16, [0, 128, 129, 65406, 65535], [0, 0, 1, 254, 255]),
            (np.uint16, [0, 1, 8, 9, 1024], [0, 0, 0, 1, 64]),  # 12 bits
            (np.uint16, [0, 1, 100, 511, 1023], [0, 0, 25, 127, 255]),  # 10 bits
            (np.int32, [0, 1, 2, 100, 255], [0, 1, 2, 100, 255]),
            (np.int32, [0, 1, 2, 3, 7], [0, 1, 2, 3, 7]),
            (np.int32, [0, 65535, 131071, 196608, 262143], [0, 64, 127, 191, 255]),  # 18 bits
            (np.int32, [-1000, 0, 1000, 2000, 3095], [0, 62, 125, 187, 255]),  # 12 bits from -1000
            (np.int32, [0, 0, 0, 0, 2**30], [0, 0, 0, 0, 64]),
        ],
    )
    def test_one_range_for_all_with_more_than_a_byte(self, tmp_path, kind, levels, expected):
        x = np.array(levels, dtype=kind)
        many = [Image.fromarray(np.tile(row, (5, 1))) for row in (x, x[[3] * 5])]
        root = folder(tmp_path, {"a/1.tif": many[0], "b/2.tif": many[1]})
        for data in ((many, [0, 1]), root):
            found = read_examples(data).inputs
            assert found[:, 2].tolist() == [expected, [expected[3]] * 5]

    def test_bytes_stay_beside_more_than_a_byte(self):
        many = [picture("L", (8, 8), 200), Image.fromarray(np.full((8, 8), 512, np.uint16))]
        assert read_examples((many, [0, 1])).inputs[:, 0, 0].tolist() == [200, 128]

    def test_the_range_is_that_of_what_is_left_after_scaling(self):
        x = np.full((640, 640), 1000, np.uint16)
        many = [Image.fromarray(x), Image.fromarray(x // 2)]
        assert read_examples((many, [0, 1])).inputs.flatten(1).unique(dim=1).tolist() == [
            [249],
            [125],
        ]

    @pytest.mark.parametrize(("mode", "color", "said"), [("L", 7, "7"), ("RGB", (1, 2, 3), "[1,")])
    def test_pictures_that_are_all_one_colour_are_refused(self, tmp_path, mode, color, said):
        many = {f"{k}/1.png": picture(mode, (8, 8), color) for k in "ab"}
        with pytest.raises(
            ValueError, match="must differ, but all pixels of all 2 images are "
        ) as no:
            read_examples(folder(tmp_path, many))
        assert said in str(no.value)
        folder(tmp_path, {"b/2.png": picture(mode, (8, 8), 0)})
        assert len(read_examples(tmp_path)) == 3

    def test_one_coloured_picture_makes_all_coloured(self, tmp_path):
        grey, colour = noise(8, 8), noise(8, 8, 3)
        found = self.read(tmp_path, Image.fromarray(grey), Image.fromarray(colour))
        assert (found[0] == grey).all()  # in each of three channels
        assert (found[1] == np.moveaxis(colour, 2, 0)).all()

    def test_transparent_pictures_are_on_white(self, tmp_path):
        clear = noise(8, 8, 4)
        two = noise(8, 8, 2)
        found = self.read(tmp_path, Image.fromarray(clear), Image.fromarray(two))
        for image, pixels in zip(found, (clear, two), strict=True):
            share = pixels[..., -1:] / 255
            expected = pixels[..., :-1] * share + 255 * (1 - share)
            assert np.abs(image - np.moveaxis(expected, 2, 0)).max() < 1

    def test_palettes_with_a_transparent_colour(self, tmp_path):
        one = Image.new("P", (8, 8), 1)
        one.putpalette([10, 20, 30, 40, 50, 60])
        one.putpixel((2, 3), 0)
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        one.save(tmp_path / "a/1.gif", transparency=0)
        one.save(tmp_path / "b/2.png")
        found = read_examples(tmp_path).inputs
        assert found[:, :, 3, 2].tolist() == [[255] * 3, [10, 20, 30]]
        assert found[:, :, 0, 0].tolist() == [[40, 50, 60]] * 2

    def test_large_photographs(self, tmp_path):
        """JPEG files that are unpacked at an eighth of their size show the same picture."""
        small = noise(8, 6, 3)
        large = Image.fromarray(small).resize((1200, 1600), Image.Resampling.NEAREST)
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        large.save(tmp_path / "a/1.jpg", quality=95)
        large.save(tmp_path / "b/2.png")
        photograph, exact = read_examples(tmp_path).inputs.int()
        assert (photograph - exact).abs().double().mean() < 4
        large.convert("CMYK").save(tmp_path / "a/1.jpg", quality=95)
        photograph, exact = read_examples(tmp_path).inputs.int()
        assert (photograph - exact).abs().double().mean() < 6

    def test_floating_point_pixels_are_refused(self, tmp_path):
        folder(tmp_path, {"a/1.png": picture(), "b/2.tif": picture("F")})
        with pytest.raises(ValueError, match=r"b/2\.tif: its pixels are floating point numbers"):
            read_examples(tmp_path)

    def test_the_first_frame_of_a_film(self, tmp_path):
        folder(tmp_path, {"a/1.png": picture("L", (8, 8), 3)})
        (tmp_path / "b").mkdir()
        frames = [picture("L", (8, 8), level) for level in (50, 90)]
        frames[0].save(tmp_path / "b/2.gif", save_all=True, append_images=frames[1:])
        found = read_examples(tmp_path).inputs
        assert found[1].unique().tolist() == [50]

    def test_is_pil_image(self, monkeypatch):
        assert image_folder.is_pil_image(picture())
        assert not image_folder.is_pil_image(np.zeros((8, 8)))
        monkeypatch.delitem(sys.modules, "PIL.Image")
        assert not image_folder.is_pil_image(Path())
