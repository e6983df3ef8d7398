"""idx files, plain and packed with gzip: what is right is read, what is wrong gets a sentence."""

import gzip
import hashlib
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuvar.data import DataError, idx
from tests.official_files import idx_bytes, refusal

SHAPE = (5, 3, 2)
ARRAY = np.arange(30, dtype=np.uint8).reshape(SHAPE)


class TestIdx:
    def test_header_is_that_of_the_official_files(self):
        """The first bytes of train-images-idx3-ubyte, as its description gives them."""
        assert idx.header((60000, 28, 28)) == struct.pack(">4I", 0x803, 60000, 28, 28)
        assert idx.header((10000,)) == struct.pack(">2I", 0x801, 10000)

    def test_sha256_is_that_of_the_file(self):
        assert idx.sha256(ARRAY) == hashlib.sha256(idx_bytes(ARRAY)).hexdigest()
        assert idx.sha256(ARRAY[:, ::-1]) == hashlib.sha256(idx_bytes(ARRAY[:, ::-1])).hexdigest()

    def test_file_and_bytes_are_read_alike(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(idx_bytes(ARRAY))
        for result in (idx.read(path, SHAPE), idx.decode(idx_bytes(ARRAY), SHAPE, "x")):
            assert (result == ARRAY).all()
            assert result.flags.writeable

    @pytest.mark.parametrize("change", [b"", b"+", "cut", "magic", "swapped"])
    def test_only_the_expected_file_is_read(self, tmp_path, change):
        content = bytearray(idx_bytes(ARRAY))
        if change == b"+":
            content += b"x"
        elif change == "cut":
            content = content[:-1]
        elif change == "magic":
            content[2] = 9
        elif change == "swapped":
            content[4:12] = content[8:12] + content[4:8]
        path = tmp_path / "some-idx3-ubyte"
        path.write_bytes(content)
        if change == b"":
            assert (idx.read(path, SHAPE) == ARRAY).all()
            return
        for read in (
            lambda: idx.read(path, SHAPE),
            lambda: idx.decode(bytes(content), SHAPE, str(path)),
        ):
            with pytest.raises(DataError, match=r"some-idx3-ubyte .*but an idx file of 5×3×2"):
                read()

    def test_a_promise_is_not_believed(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(idx.header((2**31, 2**20, 2**10)) + b"abc")
        with pytest.raises(DataError, match=r"x has 19 bytes, but"):
            idx.read(path, (60000, 28, 28))
        with path.open("wb") as file:
            file.truncate(1 << 40)  # takes no room on the disk
        with pytest.raises(DataError, match=r"x has 1099511627776 bytes, but"):
            idx.read(path, (60000, 28, 28))

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
    def test_a_pipe_is_refused_and_does_not_block(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="must be a regular file"):
            idx.read(tmp_path / "pipe", SHAPE)


PACKED = gzip.compress(b"0123456789" * 20, mtime=0)


class TestGzip:
    def test_reads_what_was_packed(self):
        assert idx.gunzip(PACKED, 200, "x") == b"0123456789" * 20

    @pytest.mark.parametrize("length", [0, 1, 199, 201, 5000])
    def test_refuses_another_length(self, length):
        with pytest.raises(DataError, match="x unpacks to"):
            idx.gunzip(PACKED, length, "x")

    @pytest.mark.parametrize("cut", range(len(PACKED)))
    def test_refuses_every_truncation(self, cut):
        with pytest.raises(DataError, match="x ends in the middle of its gzip data"):
            idx.gunzip(PACKED[:cut], 200, "x")

    @pytest.mark.parametrize("at", range(-8, 0))
    def test_refuses_a_wrong_checksum_or_length(self, at):
        content = bytearray(PACKED)
        content[at] ^= 1
        with pytest.raises(DataError, match="x is not a valid gzip file"):
            idx.gunzip(bytes(content), 200, "x")

    @pytest.mark.parametrize("more", [b"\0", b"x", PACKED])
    def test_refuses_what_follows(self, more):
        with pytest.raises(DataError, match="x has bytes after the end"):
            idx.gunzip(PACKED + more, 200, "x")

    @pytest.mark.parametrize("shape", [(1 << 20,), (100, 28, 28)])
    def test_a_bomb_takes_no_memory(self, tmp_path, shape):
        path = tmp_path / "x.gz"
        path.write_bytes(gzip.compress(bytes(100 << 20), 1))
        tracemalloc.start()
        with pytest.raises(DataError, match="unpacks to more than"):
            idx.read(path, shape)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20

    def test_packed_files_are_read(self, tmp_path):
        path = tmp_path / "x.gz"
        for array in (ARRAY, np.random.default_rng(0).integers(0, 256, 10**5).astype(np.uint8)):
            path.write_bytes(gzip.compress(idx_bytes(array)))
            assert np.array_equal(idx.read(path, array.shape), array)

    def test_a_huge_file_is_not_read(self, tmp_path):
        path = tmp_path / "x.gz"
        path.write_bytes(gzip.compress(idx_bytes(ARRAY)))
        with path.open("ab") as file:
            file.truncate(1 << 40)  # takes no room on the disk
        with pytest.raises(DataError, match="has bytes after the end"):
            idx.read(path, SHAPE)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content):
    """Whatever the bytes, each reader returns or raises its one error."""
    for read in (
        lambda: idx.decode(content, (3,), "x"),
        lambda: idx.gunzip(content, 100, "x"),
        lambda: idx.decode(idx.gunzip(gzip.compress(content, 1), len(content), "x"), (3,), "x"),
    ):
        assert (refusal(read) or "x").startswith("x")
