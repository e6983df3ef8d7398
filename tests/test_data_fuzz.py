"""A short run of the fuzzer: thousands of damaged files, none of which does harm."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource")
TOOL = Path(__file__).parents[1] / "tools" / "fuzz_data.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fuzz_data", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kinds(tool, tmp_path_factory):
    return tool.kinds(tmp_path_factory.mktemp("valid"))


def test_valid_files_are_read(kinds):
    for kind in kinds.values():
        kind.path.write_bytes(kind.valid)
        kind.read(kind.path)


def test_damaged_files_are_refused_or_read_as_the_valid_one(tool, kinds):
    """Here without limits and watch, which need a process of their own."""
    refused = read = 0
    for name, kind in kinds.items():
        for number in range(200):
            kind.path.write_bytes(tool.make(kind, name, 1, number))
            try:
                kind.read(kind.path)
                read += 1
            except tool.DataError:
                refused += 1
        kind.path.write_bytes(kind.valid)
    assert refused + read == 200 * len(kinds)
    assert refused > 10 * read > 0


def test_the_same_number_gives_the_same_file(tool, kinds):
    for name, kind in kinds.items():
        files = [tool.make(kind, name, 0, number) for number in (0, 0, 1)]
        assert files[0] == files[1] != files[2]


@pytest.mark.slow
def test_the_fuzzer_itself_finds_nothing(tool):
    found = tool.run(files=200, seed=2, only="pickle", memory=256 << 20, seconds=5.0)
    assert found["failures"] == []
    assert sum(found["counts"]["pickle"].values()) == 200


def test_the_fuzzer_notices_what_it_looks_for(tool, tmp_path):
    """Readers that run something, hang or fail in another way are told apart."""
    import signal
    import time

    watch = tool.Watch()
    before = signal.signal(signal.SIGALRM, tool._too_slow)

    def outcome(read, seconds=60.0):
        return tool.attempt(tool.Kind(b"", tmp_path / "x", lambda _: read()), watch, seconds)

    try:
        assert outcome(lambda: None) == "read as the valid file"
        assert outcome(lambda: eval("1")).startswith("FAILED: it did compile")
        assert outcome(lambda: (tmp_path / "y").write_text("")).startswith("FAILED: it did open")
        assert outcome(lambda: time.sleep(60), 0.1).startswith("FAILED: took more than")
        assert outcome(lambda: 1 / 0).startswith("FAILED: ZeroDivisionError")
    finally:
        signal.signal(signal.SIGALRM, before)
