"""Sweeps on a cluster whose answers are scripted: what is told when messages are late or lost."""

from types import SimpleNamespace

import pytest

from neuvar.engine import Results
from neuvar.engine.job import SweepSpec, Tally
from neuvar.engine.ray import MessageBoard, RayPool
from neuvar.experiments.run_spec import as_dict
from tests.test_engine import runs, toy


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class ScriptedRay:
    """A stand-in for Ray with one task. Each wait puts the next notes up, then the task is done.

    Args:
        script: notes on the run, a list for each wait.
        late: how many requests for notes time out before the board answers.
    """

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    )

    def __init__(self, run, script, late=0):
        self.run, self.script, self.late = run, list(script), late
        self.board = MessageBoard()

    def cluster_resources(self):
        return {"CPU": 1}

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, **_):
        """The board is asked at once: its notes are gone even if nobody waits for the answer."""
        board = SimpleNamespace(take=SimpleNamespace(remote=self.board.take))
        handle = SimpleNamespace(remote=lambda *work: "task" if work else board)
        handle.options = lambda **_: handle
        return lambda _: handle

    def wait(self, tasks, **_):
        if not self.script:
            return tasks, []
        for note in self.script.pop(0):
            self.board.put(self.run.key, *note)
        return [], tasks

    def get(self, wanted, **_):
        if wanted == "task":
            return {"key": self.run.key, "run": as_dict(self.run), "status": "finished"}
        if self.late:
            self.late -= 1
            raise GetTimeoutError
        return wanted


def told(tmp_path, script, late):
    """Kinds and fractions of the events of one run."""
    (run,) = runs(1)
    events = []
    results, tally = Results(tmp_path / "x.jsonl"), Tally(events.append)
    spec = SweepSpec(run_one=toy)
    RayPool(ScriptedRay(run, script, late), spec, results, tally).run([run])
    assert [event.key for event in events if event.kind == "finished"] == [run.key]
    assert results.lines().keys() == {run.key}
    return [(event.kind, event.fraction) for event in events]


STARTED, HALF, MOST = ("started", None), ("progress", 0.5), ("progress", 0.9)
STORY = [("started", 0.0), ("progress", 0.5), ("progress", 0.9), ("finished", 1.0)]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_no_note_is_lost_if_the_board_answers_late(tmp_path, late):
    assert told(tmp_path, [[STARTED, HALF], [MOST], []], late) == STORY


def test_a_run_starts_before_it_goes_on_even_if_that_note_was_lost(tmp_path):
    assert told(tmp_path, [[HALF], [MOST]], 0) == STORY


def test_a_run_without_any_note_starts_and_ends(tmp_path):
    assert told(tmp_path, [], 0) == [STORY[0], STORY[-1]]


def test_a_run_that_is_begun_again_says_so_once(tmp_path):
    story = told(tmp_path, [[STARTED, HALF], [STARTED, HALF, MOST]], 1)
    assert [kind for kind, _ in story] == [
        *("started", "progress", "started", "progress", "progress", "finished")
    ]
