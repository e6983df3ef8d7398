"""How long runs take, and what is said while they go on."""

import io
import sys
from dataclasses import replace

import pytest

from neuvar.cli.progress import Forecast, RunTimes, SweepProgress, duration
from neuvar.engine import Event
from neuvar.experiments.run_spec import as_dict
from tests.cli_experiments import TINY

LONG = replace(TINY, epochs=10)
RUNS = [replace(TINY, seed=seed) for seed in range(4)]


def line(run, seconds, **others):
    said = {"status": "finished", "device": "cpu", "seconds": seconds, "run": as_dict(run)}
    return said | others


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "less than 1 s"),
        (0.6, "1 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (3569, "59 min"),
        (3571, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (86399, "1 d 0 h"),
        (100000, "1 d 4 h"),
    ],
)
def test_durations_are_said_as_one_would(seconds, words):
    assert duration(seconds) == words


def test_runs_are_expected_to_take_what_runs_like_them_took():
    lines = {"a": line(RUNS[0], 10), "b": line(RUNS[1], 20), "c": line(LONG, 100)}
    seen = RunTimes(lines, "cpu")
    assert seen.expected(replace(TINY, seed=9, b=0.3, lr=3.0)) == 15
    assert seen.expected(replace(LONG, label_noise="pair", noise_rate=0.4)) == 100
    assert seen.expected(replace(TINY, width=9)) is None
    assert seen.expected(replace(TINY, precision="bf16")) is None


def test_the_same_method_tells_more_than_another_one():
    sam = replace(TINY, optimizer="sam-sgd")
    seen = RunTimes({"a": line(TINY, 10)}, "cpu")
    assert seen.expected(sam) == 10
    seen.add(sam, 30)
    assert (seen.expected(sam), seen.expected(TINY)) == (30, 10)
    assert seen.expected(replace(TINY, optimizer="adam")) == 20


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda:0 (a fast one)"},
        {"status": "diverged"},
        {"run": {"kind": "training", "data": "mnist", "of_another_version": 1}},
        {"run": {}},
    ],
)
def test_lines_that_tell_nothing_are_passed_over(other):
    assert RunTimes({"a": line(TINY, 10) | other}, "cpu").expected(TINY) is None
    old = {key: value for key, value in line(TINY, 10).items() if key != "device"}
    assert RunTimes({"a": old}, "cpu").expected(TINY) is None


def test_one_gpu_is_like_another():
    seen = RunTimes({"a": line(TINY, 10, device="cuda:1 (a fast one)")}, "cuda")
    assert seen.expected(TINY) == 10


def test_estimates_share_the_work():
    seen = RunTimes({"a": line(TINY, 10), "b": line(LONG, 100)}, "cpu")

    def predicted(runs, workers):
        return Forecast(seen, {run.key: run for run in runs}, workers).remaining(0)

    assert predicted(RUNS, 2) == 20
    assert predicted(RUNS, 100) == 10
    assert predicted([*RUNS, LONG], 2) == 100
    assert predicted([*RUNS, replace(TINY, width=9)], 1) == 50
    assert predicted([replace(TINY, width=9)], 1) is None
    assert predicted([], 1) == 0


def forecast(lines=(), runs=RUNS, workers=1):
    return Forecast(RunTimes(dict(lines), "cpu"), {run.key: run for run in runs}, workers)


def test_a_forecast_goes_by_the_pace_of_what_goes_on():
    keys = [run.key for run in RUNS]
    when = forecast()
    assert when.remaining(0) is None
    when.start(keys[0], 0)
    assert when.remaining(1) is None
    when.advance(keys[0], 0.0)
    when.advance(keys[0], 0.25)
    assert when.remaining_of(keys[0], 2) == pytest.approx(6)
    assert when.remaining(2) == pytest.approx(24)  # the others count like the rest of this one
    assert when.end(keys[0], 8, learn=True) == 8
    assert when.remaining(8) == pytest.approx(24)
    for key in keys[1:]:
        when.end(key, 9, learn=True)
    assert when.remaining(9) == 0


def test_a_forecast_with_experience_and_workers():
    when = forecast({"a": line(TINY, 10)}.items(), [*RUNS, LONG], workers=2)
    assert when.remaining(0) == pytest.approx(25)
    when.start(LONG.key, 0)
    when.advance(LONG.key, 0.0)
    when.advance(LONG.key, 0.1)
    assert when.remaining(10) == pytest.approx(90)  # nothing ends before its longest run


def test_what_an_earlier_session_did_makes_no_run_quick():
    key = RUNS[0].key
    when = forecast()
    when.start(key, 0)
    when.advance(key, 0.4)
    when.advance(key, 0.7)
    assert when.remaining_of(key, 30) == pytest.approx(30)
    assert when.end(key, 60, learn=True) == 60
    assert when.times.expected(TINY) == pytest.approx(100)


def test_a_run_that_begins_again_begins_again():
    key = RUNS[0].key
    when = forecast({"a": line(TINY, 10)}.items())
    when.start(key, 0)
    when.advance(key, 0.9)
    when.start(key, 100)
    assert when.remaining_of(key, 100) == 10
    assert when.end(key, 110, learn=False) == 10


def test_what_another_process_does_has_no_duration():
    assert forecast().end(RUNS[0].key, 1, learn=True) is None


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def follow():
    clock = Clock()
    names = {run.key: f"run {run.seed}" for run in RUNS}
    following = SweepProgress(forecast(), names, total=6, clock=clock)

    def tell(now, what, number, fraction=0.0, message=""):
        clock.now = now
        run = RUNS[number]
        following(Event(what, run.key, run, fraction, message))

    return following, tell


class Screen(io.StringIO):
    """A terminal whose text is kept."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Call it to look at a screen of 100 columns from then on."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")

    def look():
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return look


def test_a_line_says_where_a_run_resumes(capsys):
    following, tell = follow()
    with following:
        tell(0, "started", 0)
        tell(0, "progress", 0, 0.41)
        tell(1, "progress", 0, 0.5)
        tell(1, "started", 1)
        tell(1, "progress", 1, 0.0)
        tell(2, "progress", 1, 0.1)
    assert capsys.readouterr().out.splitlines() == [
        "[2/6] started run 0",
        "[2/6] resumed run 0 at 41%",
        "[2/6] started run 1",
    ]


def test_lines_say_what_begins_and_ends(capsys):
    following, tell = follow()
    with following:
        tell(0, "started", 0)
        tell(0, "progress", 0, 0.0)
        tell(20, "progress", 0, 0.5)
        tell(43, "finished", 0, 1.0)
        tell(43, "started", 1)
        tell(50, "diverged", 1, 1.0, "the loss is nan")
        tell(50, "started", 2)
        tell(51, "started", 2, 0.0, "again: its process was killed")
        tell(53, "failed", 2, 1.0, "ValueError: no")
        tell(54, "taken", 3)
        tell(60, "finished", 3, 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "[2/6] started run 0",
        "[3/6] finished run 0 in 43 s, about 2 min left",
        "[3/6] started run 1",
        "[4/6] diverged run 1 in 7 s (the loss is nan), about 86 s left",
        "[4/6] started run 2",
        "[4/6] started run 2 again: its process was killed",
        "[4/6] failed run 2 in 2 s (ValueError: no), about 43 s left",
        "run 3 is being run by another process",
        "[5/6] finished run 3 by another process",
    ]


@pytest.mark.parametrize("bars", [False, True])
def test_word_that_comes_late_changes_nothing(capsys, terminal, bars):
    screen = terminal() if bars else None
    following, tell = follow()
    assert (following.bars is not None) == bars
    with following:
        tell(0, "progress", 0, 0.5)
        tell(1, "finished", 0, 1.0)
        tell(2, "started", 0)
        tell(3, "progress", 0, 0.5)
    assert following.done == 3
    assert following.forecast.active == {}
    assert "started" not in (screen.getvalue() if bars else capsys.readouterr().out)


def test_bars_show_the_sweep_and_each_run(terminal):
    screen = terminal()
    following, tell = follow()
    with following:
        tell(0, "started", 0)
        tell(0, "progress", 0, 0.0)
        tell(10, "progress", 0, 0.25)
        following.bars.refresh()
        assert [task.description for task in following.bars.tasks] == [
            "2 of 6 runs",
            "  run 0",
        ]
        assert [task.fields["left"] for task in following.bars.tasks] == [
            "2 min left",
            "30 s left",
        ]
        assert [task.completed for task in following.bars.tasks] == [2.25, 0.25]
        tell(11, "started", 0, 0.0, "again: its process was killed")
        tell(43, "finished", 0, 1.0)
        tell(44, "started", 1)
        assert len(following.bars.tasks) == 2
    assert [task.description for task in following.bars.tasks] == ["3 of 6 runs"]
    shown = screen.getvalue()
    assert "[3/6] finished run 0 in 32 s, about 96 s left\n" in shown
    assert "started run 0 again: its process was killed" in shown


def test_who_watches(terminal, monkeypatch):
    def has_bars():
        return SweepProgress(forecast(), {}, total=4).bars is not None

    terminal()
    assert has_bars()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert not has_bars()
    monkeypatch.delitem(sys.modules, "rich.progress")
    assert has_bars()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not has_bars()
