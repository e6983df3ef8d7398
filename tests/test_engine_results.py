"""Results files: several writers, torn lines, full disks."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neuvar.engine
from neuvar.engine import Results
from neuvar.engine.results_file import lock, lock_run
from tests.conftest import PATIENCE

# Only the two modules in question: the package as a whole takes seconds to import.
ALONE = f"""
import sys, types
for name, folder in [("neuvar", {str(Path(neuvar.engine.__file__).parents[1])!r}),
                     ("neuvar.engine", {str(Path(neuvar.engine.__file__).parent)!r})]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from neuvar.engine.results_file import Results, lock_run
"""


def line(key, **more):
    return {"key": key, "status": "finished", "run": {"seed": 1}} | more


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", ALONE + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def quietly(results):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return results.lines()


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "some" / "smoke.jsonl")


class TestOneWriter:
    def test_lines_come_back_as_they_went_in(self, results):
        lines = [line(f"{i:016x}", curves={"loss": [0.1, 1 / 3]}, note="θ, é") for i in range(5)]
        assert [results.add(found) for found in lines] == [True] * 5
        assert list(results.lines().values()) == lines
        assert results.path.read_bytes().count(b"\n") == 5

    def test_a_run_is_recorded_once(self, results):
        assert results.add(line("a", last={"loss": 1.0}))
        before = results.path.read_bytes()
        assert not results.add(line("a", last={"loss": 2.0}))
        assert results.path.read_bytes() == before

    def test_no_file_is_no_results(self, results):
        assert results.lines() == {}
        assert results.recorded("a") is None
        assert results.remove(["a"]) == 0
        assert not results.path.exists()

    def test_numbers_beyond_all_are_null(self, results):
        results.add(line("a", curves={"loss": [1.0, math.nan, -math.inf]}, deep=({"x": math.inf},)))
        found = results.lines()["a"]
        assert found["curves"]["loss"] == [1.0, None, None]
        assert found["deep"] == [{"x": None}]
        assert "NaN" not in results.path.read_text(encoding="utf-8")

    def test_of_two_lines_with_one_key_the_first_counts(self, results):
        results.add(line("a", last={"x": 1}))
        with results.path.open("a") as file:
            file.write(json.dumps(line("a", last={"x": 2})) + "\n")
        assert results.lines()["a"]["last"] == {"x": 1}

    @pytest.mark.parametrize(
        ("bad", "sentence"),
        [
            ({"key": 3, "status": "finished", "run": {}}, r"must have key \(str\), status \(str\)"),
            ({"key": "a", "run": {}}, "must have key"),
            (["a"], "must have key"),
            (line("a", model=object()), "the result of run a is not JSON"),
            (line("a", odd={(1, 2): 3}), "the result of run a is not JSON"),
        ],
    )
    def test_bad_input_gets_a_sentence(self, results, bad, sentence):
        with pytest.raises(ValueError, match=sentence):
            results.add(bad)
        assert not results.path.exists()


class TestTornLines:
    def whole(self, results):
        for key in "ab":
            results.add(line(key, last={"x": 0.5}))
        return results.path.read_bytes()

    def test_cut_anywhere_nothing_else_is_lost(self, results):
        """A last line that is whole but for its end of line is whole."""
        data = self.whole(results)
        first = data.index(b"\n") + 1
        for end in range(len(data)):
            results.path.write_bytes(data[:end])
            kept = ["a"] * (end >= first - 1) + ["b"] * (end >= len(data) - 1)
            assert list(quietly(results)) == kept
            assert results.add(line("c"))
            assert list(results.lines()) == [*kept, "c"]

    @pytest.mark.parametrize(
        "tail", [b'{"key": "c', b"\xff\xfe\n", b"\0" * 40, b"{]\n", b"[" * 9999]
    )
    def test_what_is_no_json_at_the_end_is_skipped_and_cut_off(self, results, tail):
        data = self.whole(results)
        results.path.write_bytes(data + tail)
        with pytest.warns(UserWarning, match=r"line 3 of .*smoke.jsonl is not a result"):
            assert list(results.lines()) == ["a", "b"]
        assert results.add(line("c"))
        assert results.path.read_bytes() == data + results.path.read_bytes()[len(data) :]
        assert list(results.lines()) == ["a", "b", "c"]

    def test_foreign_lines_are_skipped_and_stay(self, results):
        self.whole(results)
        foreign = b'# a remark\n{"other": 1}\n[1, 2]\n\n'
        results.path.write_bytes(foreign + results.path.read_bytes())
        results.add(line("c"))
        with pytest.warns(UserWarning, match="is skipped") as seen:
            assert list(results.lines()) == ["a", "b", "c"]
        assert [str(w.message).split()[1] for w in seen] == ["1", "2", "3"]
        assert results.path.read_bytes().startswith(foreign)

    @settings(max_examples=60, deadline=None)
    @given(tail=st.binary(max_size=60))
    def test_no_bytes_at_the_end_are_fatal(self, tmp_path_factory, tail):
        results = Results(tmp_path_factory.mktemp("torn") / "x.jsonl")
        data = self.whole(results)
        results.path.write_bytes(data + tail)
        assert results.add(line("c"))
        assert list(quietly(results)) == ["a", "b", "c"]


class TestRemoving:
    def test_other_lines_stay_to_the_byte(self, results):
        for key in "abcd":
            results.add(line(key))
        kept = results.path.read_bytes().split(b"\n")
        results.path.write_bytes(b"# a remark\n" + results.path.read_bytes())
        results.path.chmod(0o640)
        assert results.remove(["b", "d", "x"]) == 2
        assert results.path.read_bytes() == b"\n".join([b"# a remark", kept[0], kept[2], b""])
        assert results.path.stat().st_mode & 0o777 == 0o640
        assert [p.name for p in results.path.parent.iterdir()] == ["smoke.jsonl"]

    def test_through_a_link(self, results, tmp_path):
        results.add(line("a"))
        link = tmp_path / "link.jsonl"
        link.symlink_to(results.path)
        assert Results(link).remove(["a"]) == 1
        assert link.is_symlink()
        assert results.lines() == {}

    def test_its_checkpoint_goes_too_unless_somebody_works_on_it(self, results):
        results.add(line("a"))
        results.checkpoints.mkdir()
        for name in ["a.pt", "a.pt.123.part", "b.pt"]:
            (results.checkpoints / name).write_bytes(b"x")
        mine = lock_run(results.checkpoints, "b")
        results.remove(["a", "b"])
        assert sorted(p.name for p in results.checkpoints.iterdir()) == ["b.lock", "b.pt"]
        mine.release()
        assert sorted(p.name for p in results.checkpoints.iterdir()) == ["b.pt"]

    def test_a_writer_that_waits_meanwhile_loses_nothing(self, results):
        """The file it waits for is replaced; it must write to the new one."""
        for i in range(50):
            results.add(line(f"old{i}"))
        writers = [
            threading.Thread(target=lambda t=t: [results.add(line(f"{t}-{i}")) for i in range(20)])
            for t in range(3)
        ]
        for writer in writers:
            writer.start()
        for i in range(50):
            assert results.remove([f"old{i}"]) == 1
        for writer in writers:
            writer.join()
        assert sorted(results.lines()) == sorted(f"{t}-{i}" for t in range(3) for i in range(20))


ADD = """
results, name, first, count = Results(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
added = 0
for i in range(first, first + count):
    line = {"key": f"{i:016x}", "status": "finished", "run": {}, "by": name, "x": [i / 7] * (i % 9)}
    added += results.add(line)
print(added)
"""


class TestSeveralWriters:
    def test_they_never_interleave_and_never_repeat(self, results):
        """Four processes, 150 lines each, every key from two of them."""
        writers = [start(ADD, results.path, f"w{w}", 150 * (w // 2), 150) for w in range(4)]
        assert sum(int(finish(writer)) for writer in writers) == 300
        texts = results.path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(text) for text in texts]
        assert sorted(x["key"] for x in found) == [f"{i:016x}" for i in range(300)]
        assert all(x["x"] == [int(x["key"], 16) / 7] * (int(x["key"], 16) % 9) for x in found)
        assert len({x["by"] for x in found}) > 1

    def test_killed_at_random_moments(self, results):
        rng = random.Random(0)
        for _ in range(12):
            writers = [start(ADD, results.path, "w", 0, 200) for _ in range(2)]
            time.sleep(rng.uniform(0.05, 0.3))
            for writer in writers:
                writer.send_signal(signal.SIGKILL)
                writer.communicate()
        finish(start(ADD, results.path, "w", 0, 200))
        texts = results.path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(text)["key"] for text in texts] == [f"{i:016x}" for i in range(200)]

    def test_a_reader_never_sees_half_a_line(self, results):
        writer = start(ADD, results.path, "w", 0, 200)
        seen = [0]
        while writer.poll() is None:
            seen.append(len(results.lines()))  # warnings are errors here
        finish(writer)
        assert seen == sorted(seen)
        assert len(results.lines()) == 200


FILL = """
import resource
results = Results(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    results.add({"key": "c", "status": "finished", "run": {}, "long": "x" * 1000})
except OSError as error:
    print(error)
"""


class TestFullDisk:
    @pytest.mark.parametrize("room", [0, 1, 500])
    def test_the_file_is_as_it_was(self, results, room):
        """A limit on the size of files stands for the disk: the system takes a part, then none."""
        results.add(line("a"))
        before = results.path.read_bytes()
        said = finish(start(FILL, results.path, len(before) + room))
        assert "could not add a result to" in said
        assert "which is unchanged: File too large" in said
        assert results.path.read_bytes() == before

    @pytest.mark.parametrize("name", ["write", "fsync"])
    def test_whatever_fails(self, results, monkeypatch, name):
        results.add(line("a"))
        before = results.path.read_bytes()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="which is unchanged: No space left on device"):
                results.add(line("b"))
        assert results.path.read_bytes() == before
        assert results.add(line("b"))


class TestClaims:
    def test_one_process_at_a_time(self, tmp_path):
        other = start(
            "import pathlib, time\n"
            "mine = lock_run(pathlib.Path(sys.argv[1]), 'k')\n"
            "print(mine is not None, flush=True)\n"
            "time.sleep(60)",
            tmp_path,
        )
        assert other.stdout.readline() == "True\n"
        assert lock_run(tmp_path, "k") is None
        mine = lock_run(tmp_path, "another")
        mine.release()
        other.kill()
        other.communicate()
        mine = lock_run(tmp_path, "k")  # the system let go of it
        assert mine is not None
        mine.checkpoint.write_bytes(b"x")
        mine.release()
        assert [p.name for p in tmp_path.iterdir()] == ["k.pt"]
        lock_run(tmp_path, "k").release(finished=True)
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_was_removed_protects_nothing(self, tmp_path):
        """Who waited for it must hold the new one, or two would hold the same name."""
        path = tmp_path / "x.lock"
        first = lock(path)
        found = []
        waiting = threading.Thread(target=lambda: found.append(lock(path)))
        waiting.start()
        time.sleep(0.1)
        path.unlink()
        first.close()
        waiting.join()
        assert os.path.samestat(os.fstat(found[0].fileno()), path.stat())
        with pytest.raises(BlockingIOError):
            lock(path, wait=False)
        found[0].close()

    def test_nobody_shares_it_in_a_crowd(self, tmp_path):
        inside, most = [], []

        def work():
            for _ in range(100):
                mine = lock_run(tmp_path / "folder", "k")
                if mine is not None:
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.0002)
                    inside.pop()
                    mine.release()

        crowd = [threading.Thread(target=work) for _ in range(6)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        assert set(most) == {1}
