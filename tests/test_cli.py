import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest

from neuvar.cli import data as data_command
from neuvar.cli import main
from neuvar.data import NAMES, cache, catalogue, loading
from neuvar.data.catalogue import ENTRIES
from tests.official_files import cifar_archive, serve, small, write_batches, write_idx


@pytest.fixture(autouse=True)
def sets(tmp_path, monkeypatch):
    """Small data sets that only a local folder has, and an empty cache."""
    monkeypatch.setenv("NEUVAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NEUVAR_DATA", raising=False)
    made = {name: small(name) for name in ENTRIES}
    for name, (entry, _) in made.items():
        monkeypatch.setitem(ENTRIES, name, replace(entry, packages=()))
    return made


def run(capsys, *arguments):
    """Exit code and what was said on both streams."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_get_copies_from_a_folder_into_the_cache(sets, tmp_path, capsys):
    write_batches(*sets["cifar100"], tmp_path / "data")
    code, out, err = run(capsys, "data", "get", "cifar100", "--data", str(tmp_path / "data"))
    assert (code, err) == (0, "")
    assert out.startswith("cifar100: 0 MB from ")
    assert "every byte checked" in out
    assert cache.has(ENTRIES["cifar100"])
    code, out, _ = run(capsys, "data", "get", "cifar100")
    assert code == 0
    assert "from the cache" in out


def test_get_downloads_several(sets, capsys, monkeypatch):
    with serve() as server:
        for name in ("cifar10", "cifar100"):
            entry, arrays = sets[name]
            server.files[f"/{entry.pickled.archive}"] = cifar_archive(entry, arrays)
            monkeypatch.setitem(ENTRIES, name, replace(ENTRIES[name], mirrors=(server.address,)))
        code, out, _ = run(capsys, "data", "get", "cifar10", "cifar100", "cifar10")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["cifar10", "cifar100"]
    assert cache.has(ENTRIES["cifar10"])
    assert cache.has(ENTRIES["cifar100"])


def test_get_goes_on_with_the_others_after_a_failure(sets, capsys, monkeypatch):
    entry, arrays = sets["cifar10"]
    with serve() as server:
        server.files[f"/{entry.pickled.archive}"] = cifar_archive(entry, arrays)
        monkeypatch.setitem(
            ENTRIES, "cifar10", replace(ENTRIES["cifar10"], mirrors=(server.address,))
        )
        code, out, err = run(capsys, "data", "get", "mnist", "cifar10")
    assert code == 2
    assert err.startswith("neuvar: could not load MNIST: ")
    assert out.startswith("cifar10: ")
    assert cache.has(ENTRIES["cifar10"])


def test_get_fails_with_one_sentence(capsys):
    code, out, err = run(capsys, "data", "get", "mnist")
    assert (code, out) == (2, "")
    assert err.startswith("neuvar: could not load MNIST: ")
    assert err.count("\n") == 1


def test_get_fails_if_it_cannot_keep(sets, tmp_path, capsys, monkeypatch):
    write_idx(*sets["mnist"], tmp_path / "data")
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEUVAR_CACHE", str(tmp_path / "file"))
    code, _, err = run(capsys, "data", "get", "mnist", "--data", str(tmp_path / "data"))
    assert code == 2
    assert "could not write" in err


def test_list_says_what_is_where(sets, tmp_path, capsys):
    entry, arrays = sets["mnist"]
    write_idx(entry, arrays, tmp_path / "data")
    cache.store(entry, arrays)
    code, out, _ = run(capsys, "data", "list", "--data", str(tmp_path / "data"))
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split() == ["name", "train", "test", "image", "classes", "where"]
    assert [row.split()[0] for row in rows] == list(ENTRIES)
    assert f"{tmp_path / 'data'}, {tmp_path / 'cache' / 'mnist'}" in rows[0]
    assert rows[1].endswith("not on this machine")
    assert "100, 20 coarse" in rows[3]


def test_verify_tells_sound_from_damaged(sets, tmp_path, capsys):
    for name in ("mnist", "cifar10"):
        cache.store(*sets[name])
    assert run(capsys, "data", "verify")[0] == 0
    path = tmp_path / "cache" / "mnist" / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out, err = run(capsys, "data", "verify")
    assert code == 2
    assert "cifar10: " in out
    assert "is complete, every byte checked" in out
    assert err.startswith("mnist: ")
    assert "train-labels-idx1-ubyte" in err
    assert run(capsys, "data", "verify", "cifar10")[0] == 0
    code, _, err = run(capsys, "data", "verify", "cifar100")
    assert code == 2
    assert "cifar100 is not on this machine" in err


def test_verify_without_data_says_so(capsys):
    assert run(capsys, "data", "verify") == (0, "no dataset is on this machine\n", "")


def test_verify_reads_the_local_folder(sets, tmp_path, capsys):
    write_batches(*sets["cifar10"], tmp_path)
    arguments = ("data", "verify", "cifar10", "--data", str(tmp_path))
    assert run(capsys, *arguments)[0] == 0
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"\x80\x02cos\nsystem\n.")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "test_batch is not the official file" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: command"),
        (["data"], "the following arguments are required: get|list|verify"),
        (["data", "get"], "the following arguments are required: NAME"),
        (
            ["data", "get", "imagenet"],
            "NAME must be one of mnist, fashion-mnist, cifar10, cifar100",
        ),
        (["data", "list", "--data", "missing"], "the data folder missing is not a folder"),
        (["train"], "invalid choice: 'train'"),
        (["data", "list", "--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, sentence):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["", "demo", "list", "run", "report", "data", "data get", "data list", "data verify"],
)
def test_help_has_examples(capsys, command):
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: neuvar {command}".rstrip())
    assert re.search(rf"examples?:\s+neuvar {command}", out)
    assert max(map(len, out.splitlines())) <= 100


def test_help_knows_every_command(capsys):
    out = run(capsys, "--help")[1]
    for command in ("demo", "list", "run", "report", "data"):
        assert re.search(rf"^    {command} ", out, re.MULTILINE)


def test_an_interrupt_is_not_a_crash(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "obtain", interrupted)
    assert run(capsys, "data", "get", "mnist") == (130, "", "neuvar: interrupted\n")


def test_python_runs_the_same_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "neuvar", "data", "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        entry.name
        for entry in (
            catalogue.MNIST,
            catalogue.FASHION_MNIST,
            catalogue.CIFAR10,
            catalogue.CIFAR100,
        )
    ]


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out == f"neuvar {metadata.version('neuvar')}\n"


def test_version_of_sources_that_are_not_installed(capsys, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert run(capsys, "--version")[:2] == (0, "neuvar from a source folder, not installed\n")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cifar100-coarse", "cifar100-coarse comes with cifar100, it has no files of its own"),
        ("mnist-excerpt", "mnist-excerpt comes with neuvar itself, it has no files of its own"),
    ],
)
def test_what_comes_with_another_is_said(capsys, name, sentence):
    assert run(capsys, "data", "get", name) == (2, "", f"neuvar: {sentence}\n")
    assert set(NAMES) == {*ENTRIES, *data_command.INCLUDED}


def test_a_damaged_cache_gets_a_plain_sentence(sets, tmp_path, capsys, monkeypatch):
    entry, arrays = sets["mnist"]
    cache.store(entry, arrays)
    write_idx(entry, arrays, tmp_path / "system")
    system = {str(tmp_path / "system"): "a package"}
    monkeypatch.setitem(ENTRIES, "mnist", replace(ENTRIES["mnist"], system=system))
    path = tmp_path / "cache" / "mnist" / "train-labels-idx1-ubyte"
    path.write_bytes(b"")
    code, out, err = run(capsys, "data", "get", "mnist")
    assert code == 0
    assert f"from {tmp_path / 'system'}" in out
    start = "neuvar: could not use the copy in the cache: "
    assert err.startswith(f"{start}{path} has 0 bytes, but an idx file")
    assert err.count("\n") == 1
    assert run(capsys, "data", "verify", "mnist")[0] == 0


def test_a_place_is_listed_once(sets, tmp_path, capsys, monkeypatch):
    entry, arrays = sets["mnist"]
    place = cache.store(entry, arrays)
    system = {str(place): "a package"}
    monkeypatch.setitem(ENTRIES, "mnist", replace(ENTRIES["mnist"], system=system))
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for folder in (tmp_path / "cache", tmp_path / "link"):
        _, out, _ = run(capsys, "data", "list", "--data", str(folder))
        assert out.splitlines()[1].endswith(f"  {folder / 'mnist'}")
    _, out, _ = run(capsys, "data", "verify", "--data", str(tmp_path / "cache"))
    assert out.count("is complete") == 1


def test_a_cache_nobody_has_gets_a_plain_sentence(capsys, monkeypatch):
    monkeypatch.setenv("NEUVAR_CACHE", "~nobody-has-this-name")
    code, out, err = run(capsys, "data", "list")
    assert code == 0
    assert out.count("not on this machine") == len(ENTRIES)
    assert set(err.splitlines()) == {
        "neuvar: the home folder in '~nobody-has-this-name' is not known"
    }


@pytest.mark.skipif(os.name != "posix", reason="pipes that break")
def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "neuvar", "data", "list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_screen_that_knows_few_signs_is_no_error():
    command = [sys.executable, "-m", "neuvar", "data", "list"]
    few = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, env=few, capture_output=True, check=True)
    assert b"28?28" in done.stdout
    assert done.stderr == b""
