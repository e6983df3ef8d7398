"""Sweeps on this machine: what is recorded, what is told, and what a kill does not harm."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from neuvar.engine import Event, Results, Summary, SweepSpec, sweep
from neuvar.engine.job import commit, cores
from neuvar.engine.sweeps import worker_devices
from neuvar.experiments import ExperimentFile, Training, run_one
from neuvar.experiments.run_spec import as_dict
from neuvar.train import Checkpoint
from tests.conftest import PATIENCE

PASSING = ("seconds", "when", "machine", "pid", "given", "commit")
"""What may differ between two sweeps of the same runs: somebody may commit between them."""


def toy(run, *, device, data, checkpoint, progress, writer):
    """Count ``run.epochs`` steps of ``run.lr`` seconds, each saved; ``run.model`` says how it ends.

    Every beginning is noted in the folder ``data``.
    """
    if data is not None:
        with (Path(data) / f"{run.key}.begun").open("a") as file:
            file.write(f"{os.getpid()}\n")
        begun = len((Path(data) / f"{run.key}.begun").read_text().splitlines())
    curve = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    while len(curve) < run.epochs:
        curve.append(((curve[-1] if curve else run.seed) * 1103515245 + 12345) % 2**31)
        part = checkpoint.with_name(checkpoint.name + ".part")
        part.write_text(json.dumps(curve))
        part.replace(checkpoint)
        progress(len(curve) / run.epochs)
        if writer is not None:
            writer.add_scalar("x", curve[-1], len(curve))
        time.sleep(run.lr)
        if run.model == "killed" or (run.model == "killed once" and begun == 1):
            os.kill(os.getpid(), signal.SIGKILL)
    while run.model == "until enough" and not (Path(data) / "enough").exists():
        time.sleep(0.02)
    if run.model == "raises":
        raise RuntimeError("something is\nwrong")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)  # what one run does must not change the next
    return {
        "status": "diverged" if run.model == "diverges" else "finished",
        "reason": "the loss is nan at step 3" if run.model == "diverges" else None,
        "curves": {"x": curve, "nan": [float("nan")]},
        "seconds": time.process_time(),
        "threads_seen": threads,
        "environment": os.environ["OMP_NUM_THREADS"],
        "given": [device, data],
        "pid": os.getpid(),
    }


def no_status(run, **_):
    return {"curves": {}}


def toy_or_real(run, *, checkpoint, data, **others):
    """The real thing if the data have a name, saved after every step."""
    if run.data == "toy":
        return toy(run, checkpoint=checkpoint, data=data, **others)
    return run_one(run, checkpoint=Checkpoint(checkpoint, every=0), **others)


def runs(count, model="fine", **settings):
    settings = {"epochs": 4, "lr": 0.001, "images": len(model)} | settings
    return [Training(data="toy", model=model, seed=seed, **settings) for seed in range(count)]


def lasting(path):
    """What is recorded, without what may differ."""
    found = [json.loads(text) for text in Path(path).read_text().splitlines()]
    assert len({line["key"] for line in found}) == len(found)
    return {
        line["key"]: {name: value for name, value in line.items() if name not in PASSING}
        for line in found
    }


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, nursery):
    """One sweep with all that may happen to a run, in two processes.

    Five processes are killed in it, so they are forks; sweeps below start processes as a user's do.
    """
    folder = tmp_path_factory.mktemp("mixed")
    work = {
        model: runs(count, model)
        for model, count in [
            ("fine", 5),
            ("diverges", 1),
            ("raises", 1),
            ("killed once", 1),
            ("killed", 1),
        ]
    }
    results = Results(folder / "x.jsonl")
    done = runs(7, "fine")[5:]
    for run in done:
        results.add({"key": run.key, "status": "finished", "run": as_dict(run)})
        results.checkpoints.mkdir(exist_ok=True)
        (results.checkpoints / f"{run.key}.pt").write_text("left by a process that was killed")
    every = [*done, *work["killed"], *(run for model in work for run in work[model])]
    one = Sweep(nursery, folder, every, workers=2, method="fork")
    assert one.wait() == 0, one.said(2)
    events, summary = one.story()
    return work, done, results, events, summary


class TestSweep:
    def test_each_run_is_recorded_once(self, mixed):
        work, done, results, _, summary = mixed
        recorded = [*done, *work["fine"], *work["diverges"], *work["killed once"]]
        assert lasting(results.path).keys() == {run.key for run in recorded}
        assert set(summary.finished) == {r.key for r in [*work["fine"], *work["killed once"]]}
        assert summary.skipped == tuple(run.key for run in done)

    def test_divergence_is_a_status(self, mixed):
        work, _, results, _, summary = mixed
        (key,) = (run.key for run in work["diverges"])
        assert summary.diverged == {key: "the loss is nan at step 3"}
        line = results.lines()[key]
        assert (line["status"], line["reason"]) == ("diverged", "the loss is nan at step 3")
        assert line["curves"]["nan"] == [None]

    def test_failure_is_told_in_a_line_and_not_recorded(self, mixed):
        work, _, results, _, summary = mixed
        raised, killed = work["raises"][0].key, work["killed"][0].key
        assert summary.failed == {
            raised: "RuntimeError: something is wrong",
            killed: "its process was killed, perhaps because memory ran out, 3 times",
        }
        assert not results.lines().keys() & summary.failed.keys()

    def test_a_killed_process_is_replaced_and_its_run_goes_on(self, mixed):
        work, _, results, events, _ = mixed
        (run,) = work["killed once"]
        starts = [e.message for e in events if e.key == run.key and e.kind == "started"]
        assert starts == ["", "again: its process was killed, perhaps because memory ran out"]
        assert len(results.lines()[run.key]["curves"]["x"]) == 4

    def test_checkpoints_stay_only_where_they_are_needed(self, mixed):
        _, _, results, _, summary = mixed
        left = {path.name for path in results.checkpoints.iterdir() if path.suffix == ".pt"}
        assert left == {f"{key}.pt" for key in summary.failed}

    def test_a_line_says_where_it_comes_from(self, mixed):
        work, _, results, _, _ = mixed
        run = work["fine"][0]
        line = results.lines()[run.key]
        assert line["run"] == as_dict(run)
        assert line["versions"]["torch"] == str(torch.__version__)
        assert line["versions"]["numpy"] == np.__version__
        assert set(line["versions"]) == {"python", "neuvar", "torch", "numpy"}
        assert set(line["machine"]) == {"processor", "cores", "system"}
        assert line["device"] == "cpu"
        assert line["when"].endswith("+00:00")
        assert "commit" in line

    def test_processes_share_the_cores(self, mixed):
        work, _, results, _, _ = mixed
        threads = max(1, cores() // 2)
        for run in work["fine"]:
            line = results.lines()[run.key]
            assert line["threads"] == line["threads_seen"] == threads
            assert line["environment"] == str(threads)
            assert line["pid"] != os.getpid()

    def test_events_tell_the_story(self, mixed):
        work, done, _, events, _ = mixed
        assert all(isinstance(event, Event) and event.key == event.run.key for event in events)
        ends = Counter(e.key for e in events if e.kind in ("finished", "diverged", "failed"))
        assert ends == {run.key: 1 for model in work for run in work[model]}
        for run in work["fine"]:
            story = [event for event in events if event.key == run.key]
            assert [story[0].kind, story[-1].kind] == ["started", "finished"]
            assert {event.kind for event in story[1:-1]} == {"progress"}
            assert [e.fraction for e in story] == sorted(e.fraction for e in story)
        assert not {run.key for run in done} & {event.key for event in events}

    def test_nothing_to_do_starts_nothing(self, mixed):
        work, _, results, _, _ = mixed
        before = results.path.read_bytes()
        summary = sweep([*work["fine"], *work["diverges"]], results, run_one=toy)
        assert summary == Summary(
            (), tuple(r.key for r in [*work["fine"], *work["diverges"]]), {}, {}
        )
        assert results.path.read_bytes() == before


class TestResume:
    def test_a_checkpoint_is_gone_on_from(self, tmp_path):
        """Its first three steps are known by a mark that only the file can have brought."""
        (run,) = runs(1)
        results = Results(tmp_path / "x.jsonl")
        results.checkpoints.mkdir()
        (results.checkpoints / f"{run.key}.pt").write_text("[-1, -2, -3]")
        writing = tmp_path / "board"
        sweep([run], str(results.path), tensorboard=writing, run_one=toy)
        assert results.lines()[run.key]["curves"]["x"][:3] == [-1, -2, -3]
        assert not results.checkpoints.exists()
        (written,) = (writing / run.key).iterdir()
        assert written.name.startswith("events.out.tfevents")

    @pytest.mark.slow
    def test_two_sweeps_share_the_work(self, tmp_path, nursery):
        """Each waits for what the other one has."""
        work = runs(6, lr=0.2)
        sweeps = [Sweep(nursery, tmp_path, work, name=name, method="fork") for name in "ab"]
        assert [one.wait() for one in sweeps] == [0, 0]
        assert any(one.told("taken") for one in sweeps)
        told = [json.loads(one.said().splitlines()[-1]) for one in sweeps]
        assert lasting(tmp_path / "x.jsonl").keys() == {run.key for run in work}
        begun = [len(p.read_text().splitlines()) for p in (tmp_path / "data").iterdir()]
        assert begun == [1] * 6
        for one in told:
            assert set(one["finished"]) | set(one["skipped"]) == {run.key for run in work}

    def test_the_results_do_not_depend_on_when_it_was_resumed(self, tmp_path):
        """As many threads for the last run as for the first."""
        devices = [worker_devices(SweepSpec(), count) for count in (1, 100)]
        assert devices == [["cpu"], ["cpu"] * cores()]
        assert worker_devices(SweepSpec(workers=3), 100) == ["cpu"] * 3
        assert worker_devices(SweepSpec(workers=3), 2) == ["cpu"] * 2


OWN_FILE = """\
from neuvar.experiments import Experiment, Table, Verdict
from neuvar.models import NETWORKS, mlp

def broken(**_):
    sizes = {"first": 784}
    return sizes["second"]

def refused(*, classes, **_):
    return mlp((784, -classes), seed=0)

NETWORKS |= {"broken": broken, "refused": refused}
EXPERIMENT = Experiment(
    title="t", sentence="s", runs=lambda scale, trials: [],
    table=lambda results: Table((), ()), check=lambda results: Verdict("undecided", "why"),
)
"""


def test_an_error_in_a_worker_names_the_line_of_the_users_file(tmp_path, monkeypatch):
    """The last line of the file that was called, also if the library raised the error."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_FILE)
    work = [Training(data="mnist-excerpt", images=50, model=m) for m in ("broken", "refused", "x")]
    summary = sweep(work, "x.jsonl", workers=1, files=(ExperimentFile.read("mine.py"),))
    broken, refused, unknown = (summary.failed[run.key] for run in work)
    assert broken == "mine.py, line 6: KeyError: 'second'"
    assert refused.startswith("mine.py, line 9: ValueError: sizes must be")
    assert unknown.startswith("ValueError: name must be one of")  # no line of the file led to it


NURSERY = """
import json, multiprocessing, os, pickle, signal, sys, threading, time, traceback
from pathlib import Path
from neuvar.engine import sweep
from neuvar.experiments.run_spec import from_dict
from tests.test_engine import toy_or_real

events = []

def tell(event):
    events.append(event)
    print(event.kind, event.key, flush=True)

def end_with(nursery):
    while os.getppid() == nursery:
        time.sleep(1)
    os._exit(1)

def grow(nursery, folder, out, workers, runs, method):
    os.setsid()
    threading.Thread(target=end_with, args=[nursery], daemon=True).start()
    context = multiprocessing.get_context(method)
    multiprocessing.get_context = lambda _: context
    for number in (1, 2):
        os.dup2(os.open(f"{out}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # Whoever runs the tests in the background may ignore interrupts, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work = [from_dict(run) for run in runs]
    data = folder + "/data"
    try:
        found = sweep(
            work, folder + "/x.jsonl", workers=workers, data=data, watch=tell, run_one=toy_or_real
        )
    except KeyboardInterrupt:
        # Python ends with code 1 instead if something calls exec() while it shuts down.
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    Path(out + ".story").write_bytes(pickle.dumps((events, found)))
    print(json.dumps(vars(found)), flush=True)
    sys.exit()

nursery = os.getpid()
for text in sys.stdin:
    task = json.loads(text)
    if "wait" in task:
        print(os.waitstatus_to_exitcode(os.waitpid(task["wait"], 0)[1]), flush=True)
    elif (pid := os.fork()):
        print(pid, flush=True)
    else:
        grow(nursery, **task)
"""


@pytest.fixture(scope="module")
def nursery():
    """A process that has imported everything, because that takes seconds, and starts sweeps."""
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate(timeout=PATIENCE)


class Sweep:
    """A sweep in a process of its own, in a group of its own, which may be killed.

    Its workers import torch, which takes seconds, unless method is "fork".
    """

    def __init__(self, nursery, folder, work, *, workers=1, name="a", method="spawn"):
        (folder / "data").mkdir(exist_ok=True)
        self.nursery, self.out = nursery, folder / name
        for number in (1, 2):
            Path(f"{self.out}.{number}").write_text("")
        self.pid = self.ask(
            folder=str(folder),
            out=str(self.out),
            workers=workers,
            runs=[as_dict(run) for run in work],
            method=method,
        )

    def ask(self, **task):
        self.nursery.stdin.write(json.dumps(task) + "\n")
        self.nursery.stdin.flush()
        return int(self.nursery.stdout.readline())

    def told(self, kind):
        """How many events of a kind there were."""
        return Counter(text.split()[0] for text in self.said().splitlines())[kind]

    def said(self, number=1):
        return Path(f"{self.out}.{number}").read_text()

    def story(self):
        """All events, and the summary."""
        return pickle.loads(Path(f"{self.out}.story").read_bytes())

    def wait_for(self, kind, more_than=0):
        assert soon(lambda: self.told(kind) > more_than or not alive(self.pid)), self.said(2)

    def workers(self):
        """Processes that carry out runs."""
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
        return [pid for pid, command in commands.items() if b"resource_tracker" not in command]

    def wait(self):
        """How it ended."""
        return self.ask(wait=self.pid)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def members(group):
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(number) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def soon(condition):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


class TestInterruption:
    def test_ctrl_c_is_quiet_and_leaves_checkpoints(self, tmp_path, nursery):
        one = Sweep(nursery, tmp_path, runs(3, lr=0.05, epochs=10_000), workers=1)

        def spawned():
            """Not the resource tracker, which looks like its parent until it has started."""
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in one.workers()}
            return [pid for pid, command in commands.items() if b"spawn_main" in command]

        assert soon(spawned)
        (worker,) = spawned()
        assert soon(lambda: "libtorch" in Path(f"/proc/{worker}/maps").read_text())
        os.kill(worker, signal.SIGINT)  # it is still importing
        one.wait_for("progress")
        os.kill(worker, signal.SIGINT)  # now it is at work
        one.wait_for("progress", more_than=one.told("progress") + 2)
        assert one.workers() == [worker]
        os.killpg(one.pid, signal.SIGINT)
        assert one.wait() == -signal.SIGINT, one.said(2)
        said = one.said(2)
        assert said.strip().endswith("KeyboardInterrupt")
        assert said.count("Traceback") == 1  # that of the process that called
        assert "in toy" not in said
        assert not alive(worker)
        assert any((tmp_path / ".checkpoints").glob("*.pt"))
        assert not any((tmp_path / ".checkpoints").glob("*.lock"))
        assert (tmp_path / "x.jsonl").read_bytes() == b""

    @pytest.mark.slow
    def test_processes_end_with_the_one_that_started_them(self, tmp_path, nursery):
        """Also if a run says nothing for long, and so does not find out that nobody listens."""
        one = Sweep(nursery, tmp_path, runs(2, "until enough", epochs=1), workers=2)
        one.wait_for("started", more_than=1)
        crew = one.workers()
        assert len(crew) == 2
        os.kill(one.pid, signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
        ended = soon(lambda: not any(map(alive, crew)))
        (tmp_path / "data" / "enough").touch()
        assert ended


class TestKills:
    @pytest.mark.slow
    def test_killed_twenty_times_the_results_are_the_same(self, tmp_path, nursery):
        """The whole group, or the first process alone, or one that carries out runs.

        Workers of the first three sweeps that are killed start as they do for a user. The others
        are forks, which start in no time.
        """
        real = {"data": "mnist-excerpt", "images": 500, "test_images": 100, "width": 16}
        work = [
            *(Training(**real, epochs=3, b=0.02, optimizer="nvrm-sgd", seed=s) for s in range(2)),
            *runs(10, lr=0.01, epochs=60),
            *runs(1, "until enough", lr=0.05, epochs=1),
        ]
        calm, wild = tmp_path / "calm", tmp_path / "wild"
        for folder in (calm, wild):
            (folder / "data").mkdir(parents=True)
        (calm / "data" / "enough").touch()
        first = Sweep(nursery, calm, work, workers=2, method="fork")
        assert first.wait() == 0
        rng = random.Random(0)
        one, kills, groups = None, Counter(), []
        while kills.total() < 20:
            if one is None:
                method = "spawn" if len(groups) < 3 else "fork"
                one, started = Sweep(nursery, wild, work, workers=2, method=method), 0
                groups.append(one.pid)
            one.wait_for("started", more_than=started)
            time.sleep(rng.uniform(0, 0.3))
            crew = one.workers()
            kind = rng.choice(["group", "first", "worker"])
            kills[kind] += 1
            started = one.told("started")
            if kind == "worker":
                os.kill(rng.choice(crew), signal.SIGKILL)
            else:
                (os.killpg if kind == "group" else os.kill)(one.pid, signal.SIGKILL)
                assert one.wait() == -signal.SIGKILL
                one = None
        (wild / "data" / "enough").touch()
        if one is not None:
            one.wait()
        assert Sweep(nursery, wild, work, workers=2, method="fork").wait() == 0
        # Workers whose parent was killed end a second later; the next sweep removes what they left.
        assert soon(lambda: not any(map(members, groups)))
        assert Sweep(nursery, wild, work, workers=2, method="fork").wait() == 0
        assert lasting(wild / "x.jsonl") == lasting(calm / "x.jsonl")
        assert len(lasting(wild / "x.jsonl")) == len(work)
        assert not (wild / ".checkpoints").exists()
        assert len(kills) == 3


HEAD = {"ls-files": "echo __init__.py", "rev-parse": "echo 0123abcd"}


class TestProvenance:
    @pytest.fixture
    def git(self, tmp_path, monkeypatch):
        """A program by that name, which answers as the test says."""

        def answers(**words):
            lines = [f"{word}) {answer};;" for word, answer in words.items()]
            program = tmp_path / "bin" / "git"
            program.parent.mkdir(exist_ok=True)
            program.write_text(
                '#!/bin/sh\nprintf "%s\\n" "$*" >> "$0.asked"\ncase "$4" in\n'
                + "\n".join(lines)
                + "\n*) exit 128;;\nesac\n"
            )
            program.chmod(0o755)
            monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
            commit.cache_clear()
            return program

        yield answers
        commit.cache_clear()

    def test_commit_of_the_sources(self, git, tmp_path):
        program = git(**HEAD, status="true")
        assert commit(tmp_path) == "0123abcd"
        assert commit(tmp_path) == "0123abcd"
        asked = Path(f"{program}.asked").read_text().splitlines()
        assert len(asked) == 3  # once for all runs
        assert all(words.startswith(f"--no-optional-locks -C {tmp_path} ") for words in asked)

    def test_changed_sources_have_a_plus(self, git, tmp_path):
        git(**HEAD, status="echo ' M noise.py'")
        assert commit(tmp_path) == "0123abcd+"

    def test_a_repository_that_does_not_hold_the_sources_says_nothing(self, git, tmp_path):
        git(**HEAD | {"ls-files": "exit 1"}, status="true")
        assert commit(tmp_path) is None

    def test_no_commit_yet_and_no_git(self, git, tmp_path, monkeypatch):
        git(**HEAD | {"rev-parse": "exit 128"}, status="true")
        assert commit(tmp_path) is None
        commit.cache_clear()
        monkeypatch.setenv("PATH", str(tmp_path))
        assert commit(tmp_path) is None


class TestBadInput:
    """Nothing is started: what would train must not be called."""

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"engine": "slurm"}, "engine must be one of local, ray, got 'slurm'"),
            ({"workers": -1}, "workers must be an integer >= 0, got -1"),
            ({"workers": True}, "workers must be an integer >= 0, got True"),
            ({"workers": 1.5}, "workers must be an integer >= 0, got 1.5"),
            ({"address": "auto"}, "address needs engine ray, got .auto. and local"),
            ({"device": "tpu9"}, r"device must be cpu, cuda, .* got 'tpu9'"),
            ({"device": 3.5}, r"device must be cpu, cuda, .* got 3.5"),
            ({"device": "meta"}, r"device must be cpu, cuda, .* got 'meta'"),
            (
                {"device": "cuda:99"},
                r"device cuda:99 is not available: .* finds \d+ cuda",
            ),
            (
                {"device": "cuda:1", "engine": "ray"},
                "device must be cpu or cuda with Ray, got",
            ),
            ({"data": "no/such/folder"}, "data must be a folder, got 'no/such/folder'"),
            ({"runs": ["a"]}, "runs must be Training or Tasks, got 'a'"),
        ],
    )
    def test_bad_input_gets_a_sentence(self, tmp_path, settings, sentence):
        settings = {"runs": runs(1), "results": tmp_path / "new" / "x.jsonl"} | settings
        with pytest.raises(ValueError, match=sentence):
            sweep(**settings, run_one=toy)
        assert list(tmp_path.iterdir()) == []

    def test_results_that_cannot_be_written(self, tmp_path):
        with pytest.raises(OSError, match=f"cannot write results to {tmp_path}: Is a dir"):
            sweep(runs(1), tmp_path, run_one=toy)
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"x.jsonl: .*file is not a folder"):
            sweep(runs(1), tmp_path / "file" / "x.jsonl", run_one=toy)
        with pytest.raises(OSError, match="tensorboard cannot use"):
            sweep(runs(1), tmp_path / "x.jsonl", tensorboard=tmp_path / "file", run_one=toy)

    @pytest.mark.parametrize(
        ("package", "settings"),
        [("ray", {"engine": "ray"}), ("tensorboard", {"tensorboard": "board"})],
    )
    def test_a_package_that_is_not_installed(self, tmp_path, monkeypatch, package, settings):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, package, None)
        sentence = rf'not installed; install it with pip install "neuvar\[{package}\]"'
        with pytest.raises(ModuleNotFoundError, match=sentence):
            sweep(runs(1), "x.jsonl", **settings, run_one=toy)
        assert list(tmp_path.iterdir()) == []
