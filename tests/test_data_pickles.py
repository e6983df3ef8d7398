"""Pickles are read without running anything, in bounded memory and time."""

import os
import pickle
import pickletools
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuvar.data import DataError, pickles
from tests.official_files import batch_contents, python2_pickle, refusal, small

MANY = 10_000
ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "floats": np.linspace(0, 1, 7, dtype=np.float32),
    "numbers": np.arange(-3, 3).reshape(2, 3),
    "columns first": np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4)),
    "one": np.array([[7]], np.uint8),
    "long": np.arange(3000).astype(np.uint8),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_equal_those_that_pickle_gives(name, protocol):
    held = {b"data": ARRAYS[name], "labels": [1, 300, 70_000, -1, 1 << 40, None, True, ("a", b"b")]}
    content = pickle.dumps(held, protocol=protocol)
    found = pickles.load(content, "x", MANY)
    array = pickles.array(found.pop("data"), "x", "data")
    assert array.dtype == ARRAYS[name].dtype
    assert array.shape == ARRAYS[name].shape
    assert (array == ARRAYS[name]).all()
    assert found == {"labels": held["labels"]}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_python_2_files_are_what_pickle_reads(name):
    """The writer of the tests, against the real unpickler: it makes proper files of Python 2."""
    entry, arrays = small(name)
    for file, content in batch_contents(entry, arrays).items():
        true = pickle.loads(content, encoding="latin-1")
        found = pickles.load(content, file, MANY)
        assert (pickles.array(found.pop("data"), file, "data") == true.pop("data")).all()
        decoded = {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}
        decoded["filenames"] = [name.decode() for name in decoded["filenames"]]
        assert decoded == true


class Evil:
    def __init__(self, call, *arguments):
        self.made = call, arguments

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_tries_to_run_code_is_refused(tmp_path, protocol):
    path = tmp_path / "it ran"
    for evil in (
        Evil(os.system, f"touch '{path}'"),
        Evil(eval, f"open({str(path)!r}, 'w')"),
        Evil(exec, f"open({str(path)!r}, 'w')"),
        Evil(open, str(path), "w"),
        Evil(np.lib.format.open_memmap, str(path), "w+"),
    ):
        for held in (evil, {"data": evil}, [evil] * 3):
            with pytest.raises(DataError, match=r"x (wants to use|uses instruction|has a name)"):
                pickles.load(pickle.dumps(held, protocol=protocol), "x", MANY)
    assert not path.exists()


def test_the_trap_works(tmp_path):
    """The same file does run when Python's own unpickler reads it."""
    path = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Evil(open, str(path), "w"))).close()
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"(S'id'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'id'\no.",  # OBJ
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x04cnumpy\nndarray\n)}\x92.",  # NEWOBJ_EX
        b"\x80\x02\x82\x01.",  # EXT1
        b"P1\n.",  # PERSID
        b"\x80\x02NQ.",  # BINPERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x02N2.",  # DUP
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # LONG4
        b"I99\n.",  # text numbers of protocol 0
        b"\x80\x02cnumpy\ndtype\n(U\x01OK\0K\x01tR.",  # objects in an array
        b"\x80\x02cnumpy\ndtype\n(U\x03V99K\0K\x01tR.",
        b"\x80\x02cnumpy\ndtype\n}\x85R.",
        b"\x80\x02cnumpy\ndtype\n}b.",
        b"\x80\x02]}b.",
        b"\x80\x02c_codecs\nencode\n)R.",
        b"\x80\x02c_codecs\nencode\nX\x02\0\0\0\xc4\x80\x85R.",  # text beyond latin-1
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02NNR.",
    ],
)
def test_other_ways_to_call_are_refused(content):
    with pytest.raises(DataError, match=r"^x "):
        pickles.load(content, "x", MANY)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "ends too early"),
        (b"\x80\x02", "ends too early"),
        (b"N", "ends too early"),
        (b".", "does not end where its content ends"),
        (b"NN.", "does not end where its content ends"),
        (b"N.N", "does not end where its content ends"),
        (b"\x85.", "takes more from its stack than it put there"),
        (b"N(\x85.", "takes more from its stack than it put there"),
        (b"t.", "lacks the beginning of a sequence"),
        (b"Na.", "takes more from its stack than it put there"),
        (b"NNa.", "needs a list where there is none"),
        (b"N(Nu.", "needs a dict where there is none"),
        (b"}(Nu.", "has a key without a value"),
        (b"}NNs.", "has a key that is not text"),
        (b"}]Ns.", "has a key that is not text"),
        (b"h\x05.", "refers to a value that it does not have"),
        (b"cos", "has a name without an end"),
        (b"X\x01\0\0\0\xff.", "has text that is not UTF-8"),
        (b"\x8e" + struct.pack("<Q", 1 << 62), "ends too early"),
        (b"\x8d" + struct.pack("<Q", 1 << 63), "ends too early"),
        (b"T\xff\xff\xff\xffabc", "ends too early"),
    ],
)
def test_damaged_pickles_get_a_sentence(content, sentence):
    with pytest.raises(DataError, match=f"^x {sentence}$"):
        pickles.load(content, "x", MANY)


def array_pickle(shape, code, order, data):
    """An array as pickle would write it, with any claims about it."""
    numbers = b"".join(b"\x8a" + bytes([9]) + n.to_bytes(9, "little", signed=True) for n in shape)
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
        + (b"(K\x01(" + numbers + b"tcnumpy\ndtype\nU" + bytes([len(code)]) + code)
        + (b"K\0K\x01\x87R(K\x03U\x01" + order + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89")
        + (b"T" + struct.pack("<I", len(data)) + data + b"tb.")
    )


def test_an_array_is_as_large_as_its_bytes():
    good = pickles.load(array_pickle((2, 3), b"u1", b"|", b"abcdef"), "x", MANY)
    assert pickles.array(good, "x", "it").tobytes() == b"abcdef"
    for shape in [(1 << 40,), (1 << 31, 1 << 31), (7,), (5,), (-2, -3), (-6,), (1 << 70, 0), ()]:
        with pytest.raises(DataError, match="an array whose shape does not fit its bytes"):
            pickles.load(array_pickle(shape, b"u1", b"|", b"abcdef"), "x", MANY)
    for shape in [(1 << 40, 0), (0, 1 << 62)]:
        with pytest.raises(DataError, match="an array whose shape does not fit its bytes"):
            pickles.load(array_pickle(shape, b"u1", b"|", b""), "x", MANY)
    with pytest.raises(DataError, match="does not fit its bytes"):
        pickles.load(array_pickle((6,), b"i8", b"<", b"abcdef"), "x", MANY)
    with pytest.raises(DataError, match="bytes are in an unexpected order"):
        pickles.load(array_pickle((1,), b"f4", b">", b"abcd"), "x", MANY)


def test_an_unfinished_array_is_no_array():
    held = pickles.load(
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R.",
        "x",
        MANY,
    )
    for value in (held, None, b"abc", [1]):
        with pytest.raises(DataError, match="x: it must be an array"):
            pickles.array(value, "x", "it")


def cost(content, instructions=MANY):
    """CPU seconds and peak bytes of reading something that is refused or not."""
    tracemalloc.start()
    began = time.process_time()
    refusal(lambda: pickles.load(content, "x", instructions))
    taken, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken, peak


BOMBS = {
    "many empty lists": b"\x80\x02" + b"]" * 5_000_000,
    "many marks": b"(" * 5_000_000,
    "deep tuples": b"N" + b"\x85" * 5_000_000 + b".",
    "a list in itself": b"]q\0" + b"h\0a" * 1_000_000 + b".",
    "doubling": b"]q\0]q\1" + b"(h\0h\0eh\1(h\0h\0eh\0" * 200_000,
    "text encoded again and again": (
        b"c_codecs\nencode\nq\0X"
        + struct.pack("<I", 1 << 20)
        + b"a" * (1 << 20)
        + b"\x85q\1"
        + b"h\0h\1R" * 5000
    ),
    "one long string again and again": (
        b"T" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\0" + b"h\0" * 9000
    ),
    "memo of many places": b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_000_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_little(name):
    taken, peak = cost(BOMBS[name])
    assert taken < 2
    assert peak < 8 << 20


def test_work_is_bounded_by_the_number_of_instructions():
    content = pickle.dumps(list(range(100)), protocol=2)
    assert pickles.load(content, "x", 200) == list(range(100))
    with pytest.raises(DataError, match="x goes on after 50 instructions"):
        pickles.load(content, "x", 50)


def test_official_files_take_few_instructions():
    """What the limit allows for each row is several times what the official files need."""
    rows = 500
    labels = {"fine_labels": [1] * rows, "coarse_labels": [2] * rows}
    data = np.zeros((rows, 4), np.uint8)
    content = python2_pickle(labels, data, [f"{i}" for i in range(rows)])
    assert len(list(pickletools.genops(content))) < 5 * rows
    pickles.load(content, "x", 5 * rows)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text()
    | st.binary(min_size=1, max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES, st.integers(2, 5))
def test_plain_values_come_back(value, protocol):
    found = pickles.load(pickle.dumps(value, protocol=protocol), "x", MANY)
    assert found == value
    assert type(found) is type(value) or isinstance(found, memoryview)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(content):
    for start in (b"", b"\x80\x02"):
        said = refusal(lambda start=start: pickles.load(start + content, "x", MANY))
        assert (said or "x ").startswith("x ")


OFFICIAL = batch_contents(*small("cifar10", rows=10))["data_batch_1"]


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_changed_files_are_read_or_refused(data):
    content = bytearray(OFFICIAL)
    spots = data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5))
    heads = data.draw(st.lists(st.integers(0, 200), max_size=5))
    for at in (*spots, *heads):
        content[at] = data.draw(st.integers(0, 255))
    said = refusal(lambda: pickles.load(bytes(content), "x", MANY))
    assert (said or "x ").startswith("x ")
