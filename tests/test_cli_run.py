"""``neuvar run``, with an engine that only pretends; and, at the end, with the real one."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neuvar.cli import main
from neuvar.cli import run as run_command
from neuvar.data import cache, loading
from neuvar.data.catalogue import ENTRIES, DataError
from neuvar.engine import Event, Results, Summary, check_device
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.run_spec import as_dict
from tests.cli_experiments import MADE, TINY, alone
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Only the tiny experiments, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEUVAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NEUVAR_DATA", raising=False)
    with alone():
        yield tmp_path


def neuvar(capsys, *arguments):
    """Exit code and what was said on both streams."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


def line(run, status="finished", seconds=10.0):
    return {
        "key": run.key,
        "run": as_dict(run),
        "status": status,
        "reason": "the loss is nan" if status == "diverged" else None,
        "device": "cpu",
        "seconds": seconds,
    }


class Engine:
    """Stands in for the engine: records each run at once, and remembers what it was asked."""

    def __init__(self):
        self.runs, self.options = [], {}
        self.becomes = {}
        self.stop_after = None

    def __call__(self, runs, results, spec, *, watch):
        self.runs, self.options, self.watch = list(runs), vars(spec), watch
        watch = watch or (lambda event: None)
        found = {"finished": {}, "diverged": {}, "failed": {}}
        before = results.lines()
        for number, run in enumerate(run for run in runs if run.key not in before):
            if number == self.stop_after:
                raise KeyboardInterrupt
            watch(Event("started", run.key, run))
            watch(Event("progress", run.key, run, 0.0))
            watch(Event("progress", run.key, run, 0.1))
            status, why = self.becomes.get(run.seed, "finished"), ""
            if status != "finished":
                why = f"why it {status}"
            if status != "failed":
                results.add(line(run, status))
            found[status][run.key] = why
            watch(Event(status, run.key, run, 1.0, why))
        skipped = tuple(run.key for run in runs if run.key in before)
        return Summary(tuple(found["finished"]), skipped, found["diverged"], found["failed"])


@pytest.fixture
def engine(monkeypatch):
    stand_in = Engine()
    monkeypatch.setattr(run_command, "sweep", stand_in)
    return stand_in


def test_runs_are_run_and_counted(capsys, engine, here):
    code, out, err = neuvar(capsys, "run", "labels", "--scale", "smoke")
    assert (code, err) == (0, "")
    assert [run.seed for run in engine.runs] == [0, 0, 1, 1]
    assert out.splitlines() == [
        "[0/4] started sgd seed=0",
        "[1/4] finished sgd seed=0 in less than 1 s, less than 1 s left",
        "[1/4] started nvrm-sgd b=0.05 seed=0",
        "[2/4] finished nvrm-sgd b=0.05 seed=0 in less than 1 s, less than 1 s left",
        "[2/4] started sgd seed=1",
        "[3/4] finished sgd seed=1 in less than 1 s, less than 1 s left",
        "[3/4] started nvrm-sgd b=0.05 seed=1",
        "[4/4] finished nvrm-sgd b=0.05 seed=1 in less than 1 s",
        "4 finished, in less than 1 s",
        "see them with: neuvar report labels --scale smoke",
    ]
    assert len(Results(here / "results" / "smoke.jsonl").lines()) == 4


def test_finished_runs_are_not_done_again(capsys, engine):
    neuvar(capsys, "run", "labels", "--trials", "1")
    code, out, _ = neuvar(capsys, "run", "labels", "--trials", "2", "--quiet")
    assert code == 0
    assert re.fullmatch("2 finished, 2 finished before, in .*\nsee them with: .*\n", out)
    assert engine.watch is None
    engine.runs = []
    code, out, _ = neuvar(capsys, "run", "labels", "--trials", "2")
    assert (code, engine.runs) == (0, [])
    assert out == "all 4 runs are finished; see them with: neuvar report labels --scale cpu\n"


def following():
    """An experiment whose second stage has a trial for each run that finished in the first."""

    def then(scale, trials, results):
        return [replace(r.run, seed=r.run.seed + 10) for r in results if r.finished]

    EXPERIMENTS["labels"] = replace(MADE["labels"], then=then)


def test_runs_that_follow_from_others(capsys, engine):
    following()
    engine.becomes = {1: "diverged"}
    words = ("run", "labels", "--scale", "smoke", "--quiet")
    _, out, _ = neuvar(capsys, *words, "--dry-run")
    assert "4 runs at scale smoke" in out
    assert "more runs may follow from their results" in out
    code, out, _ = neuvar(capsys, *words)
    assert code == 0
    assert "2 finished, 2 diverged, in " in out
    assert "2 finished, 4 finished before, in " in out
    assert out.count("see them with") == 1
    assert [run.seed for run in engine.runs] == [0, 0, 1, 1, 10, 10]
    assert neuvar(capsys, *words)[1].startswith("all 6 runs are finished")
    _, out, _ = neuvar(capsys, *words, "--dry-run")
    assert "6 runs at scale smoke, 6 finished, 0 to do" in out
    assert "more runs" not in out
    code, out, _ = neuvar(capsys, *words, "--fresh", "--yes")
    assert code == 0
    assert out.startswith("removed 6 results")
    assert "2 finished, 4 finished before, in " in out


def test_nothing_follows_runs_that_failed_or_were_stopped(capsys, engine):
    following()
    engine.becomes = {1: "failed"}
    assert neuvar(capsys, "run", "labels", "--scale", "smoke", "--quiet")[0] == 1
    assert len(engine.runs) == 4
    engine.becomes, engine.stop_after = {}, 1
    assert neuvar(capsys, "run", "labels", "--scale", "smoke", "--quiet")[0] == 130
    assert len(engine.runs) == 4


def test_options_reach_the_engine_and_the_runs(capsys, engine, here):
    (here / "sets").mkdir()
    arguments = "run labels tasks --trials 1 --precision bf16 --channels-last --compile"
    arguments += " --workers 3 --data sets --tensorboard curves --results elsewhere --quiet"
    code, out, _ = neuvar(capsys, *arguments.split())
    assert code == 0
    assert engine.options == {
        "engine": "local",
        "workers": 3,
        "device": "cpu",
        "data": Path("sets"),
        "address": None,
        "tensorboard": Path("curves"),
        "files": (),
        "run_one": None,
        "threads": 1,
    }
    assert {(r.precision, r.channels_last, r.compile) for r in engine.runs} == {
        ("bf16", True, True)
    }
    assert out.endswith("neuvar report labels tasks --scale cpu --results elsewhere\n")
    assert (here / "elsewhere" / "cpu.jsonl").exists()


def test_without_options_a_run_is_as_the_experiment_says(capsys, engine):
    quick = replace(TINY, precision="bf16", compile=True)
    run_command.EXPERIMENTS["labels"] = replace(MADE["labels"], runs=lambda *_: [quick])
    neuvar(capsys, "run", "labels")
    assert engine.runs == [quick]


def test_ray_gets_its_address(capsys, engine):
    arguments = "run labels --engine ray --address auto --device cuda"
    assert neuvar(capsys, *arguments.split())[0] == 0
    assert (engine.options["engine"], engine.options["address"]) == ("ray", "auto")
    assert engine.options["device"] == "cuda"
    code, _, err = neuvar(capsys, "run", "labels", "--address", "auto")
    assert (code, err) == (2, "neuvar: address needs engine ray, got 'auto' and local\n")


def test_diverged_runs_are_results_and_failed_ones_are_not(capsys, engine):
    engine.becomes = {1: "diverged"}
    code, out, _ = neuvar(capsys, "run", "labels", "--scale", "smoke", "--quiet")
    assert code == 0
    assert out.splitlines() == [
        "2 finished, 2 diverged, in less than 1 s",
        "  diverged: sgd seed=1: why it diverged",
        "  diverged: nvrm-sgd b=0.05 seed=1: why it diverged",
        "see them with: neuvar report labels --scale smoke",
    ]
    engine.becomes = {0: "failed"}
    code, out, _ = neuvar(capsys, "run", "labels", "--only", "optimizer=sgd", "--trials", "2")
    assert code == 1
    assert out.splitlines()[-2:] == [
        "1 finished, 1 failed, in less than 1 s",
        "  failed: sgd seed=0: why it failed",
    ]


def test_an_interrupt_says_how_to_go_on(capsys, engine):
    engine.stop_after = 1
    arguments = ["run", "labels", "--only", "seed=0,1", "--fresh", "--yes", "--results", "a b"]
    code, out, err = neuvar(capsys, *arguments)
    assert code == 130
    assert err == (
        "stopped; 1 of 4 runs is finished. Resume with: "
        "neuvar run labels --only seed=0,1 --results 'a b'\n"
    )
    assert "finished, in" not in out
    engine.stop_after = None
    code, out, _ = neuvar(capsys, *shlex.split(err)[-6:])
    assert (code, out.splitlines()[-2]) == (0, "3 finished, 1 finished before, in less than 1 s")


def record(here, runs, **options):
    results = Results(here / "results" / "cpu.jsonl")
    for run in runs:
        results.add(line(run, **options))
    return results


def test_a_dry_run_says_what_would_be_done_and_does_nothing(capsys, engine, here):
    runs = MADE["labels"].runs("cpu", 3)
    record(here, runs[:2], seconds=100.0)
    before = (here / "results" / "cpu.jsonl").read_bytes()
    code, out, _ = neuvar(capsys, "run", "labels", "--dry-run", "--workers", "2")
    assert code == 0
    assert out.splitlines() == [
        "6 runs at scale cpu, 2 finished, 4 to do",
        "  nvrm-sgd b=0.05 seed=0  (about 2 min)",
        "  nvrm-sgd b=0.05 seed=1  (about 2 min)",
        "  sgd seed=2  (about 2 min)",
        "  nvrm-sgd b=0.05 seed=2  (about 2 min)",
        "about 3 min, 2 at a time, predicted by similar runs",
    ]
    assert engine.runs == []
    _, out, _ = neuvar(capsys, "run", "labels", "--dry-run", "--fresh")
    assert out.splitlines()[:2] == [
        "--fresh would remove 2 results",
        "6 runs at scale cpu, 0 finished, 6 to do",
    ]
    _, out, _ = neuvar(capsys, "run", "labels", "tasks", "--dry-run", "--workers", "1")
    assert out.endswith("predicted by similar runs; 3 have no similar run\n")
    _, out, _ = neuvar(capsys, "run", "tasks", "--dry-run", "--only", "seed=1")
    assert out.endswith("the time is unknown: no similar run has finished yet\n")
    assert (here / "results" / "cpu.jsonl").read_bytes() == before


def test_fresh_removes_the_selected_runs_alone(capsys, engine, here, monkeypatch):
    runs = MADE["labels"].runs("cpu", 3)
    results = record(here, runs)
    results.checkpoints.mkdir()
    (results.checkpoints / f"{runs[0].key}.pt").write_bytes(b"half-way")
    (results.checkpoints / f"{runs[1].key}.pt").write_bytes(b"half-way")
    fresh = ["run", "labels", "--only", "seed=0", "--fresh"]
    code, _, err = neuvar(capsys, *fresh)
    said = "2 results and 1 checkpoint"
    assert (code, err) == (2, f"neuvar: --fresh would remove {said}; add --yes to remove them\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer in ("", "no"):
        monkeypatch.setattr("builtins.input", lambda asked, answer=answer: answer)
        code, _, err = neuvar(capsys, *fresh)
        assert code == 2
        assert err.startswith("neuvar: cancelled: nothing removed")
    assert len(results.lines()) == 6
    asked = []
    monkeypatch.setattr("builtins.input", lambda words: asked.append(words) or "y")
    code, out, _ = neuvar(capsys, *fresh)
    assert asked == [f"remove {said}? [y/N] "]
    assert code == 0
    assert out.startswith(f"removed {said}\n")
    assert out.count("] finished") == 2
    assert not (results.checkpoints / f"{runs[0].key}.pt").exists()
    assert (results.checkpoints / f"{runs[1].key}.pt").exists()
    assert len(results.lines()) == 6
    asked.clear()
    code, out, _ = neuvar(capsys, *fresh, "--yes")
    assert (code, asked) == (0, [])


def test_fresh_with_nothing_to_remove_asks_nothing(capsys, engine):
    code, out, _ = neuvar(capsys, "run", "labels", "--fresh", "--quiet")
    assert code == 0
    assert "removed" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run", "the following arguments are required: EXPERIMENT"),
        (
            "run label",
            "EXPERIMENT must be a .py file, all or one of labels, .*, got 'label'",
        ),
        ("run labels --scale huge", "argument --scale: invalid choice: 'huge'"),
        ("run labels --trials -1", "--trials: (must be an integer >= 0|expected one argument)"),
        ("run labels --trials two", "--trials: must be an integer >= 0, got 'two'"),
        ("run labels --workers x", "--workers: must be an integer >= 0, got 'x'"),
        ("run labels --only", "argument --only: expected at least one argument"),
        ("run labels --only seed", "--only must be FIELD=VALUE, such as seed=0, got 'seed'"),
        ("run --only seed=0 labels", "the following arguments are required: EXPERIMENT"),
        ("run labels --device gpu", "device must be cpu, cuda, cuda:N or mps, got 'gpu'"),
        ("run labels --engine slurm", "argument --engine: invalid choice: 'slurm'"),
        ("run labels --precision half", "argument --precision: invalid choice: 'half'"),
        ("run labels --dry", "unrecognized arguments: --dry"),
        ("run labels --data missing", "data (folder|must be a folder).*missing"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, sentence):
    code, out, err = neuvar(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert re.search(sentence, err)
    assert err.count("\n") == 1


def test_devices_are_checked_before_anything_starts(capsys, engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps"):
        code, _, err = neuvar(capsys, "run", "labels", "--device", device)
        assert code == 2
        assert err.startswith(f"neuvar: device {device} is not available: ")
        assert engine.runs == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match=r"cuda:2 is not available: PyTorch finds 2 cuda devices"):
        check_device("cuda:2")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert check_device("mps") == "mps"


@pytest.fixture
def needy():
    """An experiment that needs CIFAR-100, with either labels."""
    runs = [replace(TINY, data=name) for name in ("cifar100", "cifar100-coarse")]
    needs = replace(MADE["labels"], runs=lambda *_: runs)
    run_command.EXPERIMENTS["labels"] = needs
    return runs


def test_missing_data_are_said_before_anything_starts(capsys, engine, needy, monkeypatch):
    def missing(entry, **_):
        raise DataError(f"{entry.title} cannot be had: there is no network")

    monkeypatch.setattr(loading, "obtain", missing)
    code, _, err = neuvar(capsys, "run", "labels")
    assert (code, engine.runs) == (2, [])
    assert err == (
        "neuvar: 2 runs need cifar100, try neuvar data get cifar100: "
        "CIFAR-100 cannot be had: there is no network\n"
    )
    _, out, _ = neuvar(capsys, "run", "labels", "--dry-run")
    assert "cifar100 is not on this machine; neuvar data get cifar100 would download it" in out


def test_data_are_had_once_for_all(capsys, engine, needy, monkeypatch):
    had, kept = [], []

    def obtain(entry, *, folder):
        had.append((entry.name, folder))
        return loading.Obtained({}, "the web", is_new=len(had) == 1)

    monkeypatch.setattr(loading, "obtain", obtain)
    monkeypatch.setattr(cache, "store", lambda entry, arrays: kept.append(entry.name))
    assert neuvar(capsys, "run", "labels", "--only", "data=cifar100")[0] == 0
    assert (had, kept) == ([("cifar100", None)], ["cifar100"])
    Path("sets").mkdir()
    assert neuvar(capsys, "run", "labels", "--data", "sets")[0] == 0
    assert (had[1:], kept) == ([("cifar100", Path("sets"))], ["cifar100"])
    neuvar(capsys, "run", "labels")
    assert len(had) == 2  # finished runs need no data
    assert ENTRIES["cifar100"].name == "cifar100"


def started(*arguments):
    """The command in a process of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli_experiments", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process, word):
    """What was said until a line with a word came; the process is ended if none does."""
    said = []
    alarm = threading.Timer(PATIENCE, process.kill)
    alarm.start()
    for text in process.stdout:
        said.append(text)
        if word in text:
            break
    alarm.cancel()
    assert word in said[-1], said
    return said


def nobody_left(group, patience=PATIENCE):
    """Whether all processes of a group end within so many seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("number", "everyone", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
    ids=["ctrl-c", "sigint", "sigterm"],
)
def test_a_sweep_stops_at_a_signal_and_says_how_to_go_on(here, number, everyone, code):
    arguments = ["run", "slow", "--workers", "1", "--results", str(here / "results")]
    process = started(*arguments)
    try:
        said = wait_for(process, "[1/2] started sgd seed=1")
        assert any("[1/2] finished sgd seed=0" in text for text in said)
        if everyone:
            os.killpg(process.pid, number)  # Ctrl-C reaches all processes at a terminal
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code
    command = shlex.join(["neuvar", *arguments])
    assert err == (f"stopped; 1 of 2 runs is finished. Resume with: {command}\n")
    assert nobody_left(process.pid)


@pytest.mark.slow
def test_the_real_engine_from_the_command_line(here, capsys):
    code, out, err = neuvar(capsys, "run", "labels", "tasks", "--trials", "1", "--workers", "2")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2].startswith("3 finished, in ")
    assert out.count("] started ") == out.count("] finished ") == 3
    lines = Results(here / "results" / "cpu.jsonl").lines()
    assert {found["status"] for found in lines.values()} == {"finished"}
    assert neuvar(capsys, "run", "labels", "tasks", "--trials", "1")[1].startswith("all 3 runs")
