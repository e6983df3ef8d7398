"""The larger runs of four claims: first b is chosen, then it is judged by the usual logic."""

import sys
from pathlib import Path

import pytest

from neuvar.cli.run_selection import find_experiments
from neuvar.experiments.run_spec import CHOICE_SEED, as_dict
from neuvar.report import gather_claims
from neuvar.report.documents import report_markdown
from tests.test_experiments_results import nvrm_ahead, result

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("robustness", "generalization", "noise_types", "gradient_noise")
BEST = 0.02
"""The b that held-out images prefer; test images prefer the smallest."""


@pytest.fixture(autouse=True)
def claims_alone(monkeypatch):
    """The modules of the benchmarks only for these tests."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [n for n in sys.modules if n == "claims" or n.startswith("neuvar_experiment_")]:
        del sys.modules[name]


def load(name):
    (experiment,) = find_experiments([str(BENCHMARKS / f"claims_{name}.py")])
    return experiment


def line(run, by=0.1):
    score = nvrm_ahead(run, by) + (0.01 / (1 + 100 * run.b) if run.b else 0.0)
    held_out = 0.9 - abs(run.b - BEST)
    recorded = result(run, score, held_out=held_out).line
    return {"key": run.key, "run": as_dict(run)} | recorded


def recorded(experiment, by=0.1):
    """Lines of both stages, as ``neuvar run`` records them."""
    lines = {}
    while left := [r for r in experiment.planned("cpu", 0, lines) if r.key not in lines]:
        lines |= {run.key: line(run, by) for run in left}
    return lines


@pytest.mark.parametrize("name", NAMES)
class TestPlan:
    def test_first_only_the_trials_that_choose(self, name):
        first = load(name).planned("cpu")
        assert {run.seed for run in first} == {CHOICE_SEED, CHOICE_SEED + 1}
        assert all(run.b and run.held_out == 1000 and run.images == 10_000 for run in first)
        grids = {}
        for run in first:
            grids.setdefault((run.model, run.noise), set()).add(run.b)
        assert all(len(grid) >= 4 for grid in grids.values())

    def test_nothing_follows_before_all_are_recorded(self, name):
        experiment = load(name)
        first = experiment.planned("cpu")
        some = {run.key: line(run) for run in first[:-1]}
        assert experiment.planned("cpu", 0, some) == first

    def test_then_ten_trials_of_the_chosen_b(self, name):
        experiment = load(name)
        first, lines = experiment.planned("cpu"), recorded(experiment)
        later = [r for r in experiment.planned("cpu", 0, lines) if r not in first]
        assert {run.seed for run in later} == set(range(10))
        last = [run for run in later if run.seed == 9]
        assert {run.b for run in last} == {0.0, BEST}
        assert all(run.model != "mobilenet-v2" for run in last)

    def test_only_at_one_scale(self, name):
        assert load(name).planned("smoke") == load(name).planned("paper") == []
        assert load(name).settings("paper")


@pytest.mark.parametrize("name", NAMES)
class TestVerdict:
    def finding(self, name, lines):
        (claim,) = gather_claims({"cpu": lines}, [load(name)], ["cpu"])
        return claim.findings[0]

    @pytest.mark.parametrize(("by", "outcome"), [(0.1, "true"), (-0.1, "false")])
    def test_by_the_usual_logic(self, name, by, outcome):
        finding = self.finding(name, recorded(load(name), by))
        assert finding.status == outcome, finding.because
        assert finding.n in ("5–10", "10")
        assert finding.recorded == finding.planned
        for case in finding.verdict.cases:
            if name == "gradient_noise" or "range" in case.name:
                assert case.choice == ""
            else:
                assert f"b = {BEST:g}" in case.name
                assert case.choice == "chosen on held-out images in other trials"
            assert len(case.differences) in (5, 10)

    def test_what_was_only_tried_is_shown(self, name):
        rows = self.finding(name, recorded(load(name))).table.rows
        marks = [str(cell) for row in rows for cell in row]
        tried = [row for row in rows if any("(tried)" in str(cell) for cell in row)]
        if name in ("robustness", "generalization"):
            assert sum("(chosen)" in mark for mark in marks) == {"robustness": 3}.get(name, 2)
            assert {row[2] for row in tried} == {"2"}
        else:  # all b of claim 6 are judged by how sensitive they are; S takes its b from there
            assert not tried

    def test_preliminary_until_all_are_in(self, name):
        lines = recorded(load(name))
        some = dict(list(lines.items())[:-1])
        assert self.finding(name, some).status == "preliminary-true"
        first = {run.key: lines[run.key] for run in load(name).planned("cpu")}
        finding = self.finding(name, first)
        assert (finding.status, finding.n) == ("preliminary-undecided", "0")
        assert finding.because == "There are no finished trials to compare."

    def test_a_b_that_diverged_is_not_chosen(self, name):
        experiment = load(name)
        lines = {run.key: line(run) for run in experiment.planned("cpu")}
        for own in lines.values():
            if own["run"]["b"] == BEST and own["run"]["seed"] == CHOICE_SEED:
                own |= {"status": "diverged", "last": {}, "curves": {}, "best": {}}
        planned = experiment.planned("cpu", 0, lines)
        judged = {run.b for run in planned if run.b and run.seed == 9}
        assert judged
        assert BEST not in judged

    def test_a_broken_line_is_told(self, name):
        lines = recorded(load(name))
        key = next(iter(lines))
        lines[key] = lines[key] | {"last": None}
        with pytest.warns(UserWarning, match=f"run {key} is broken"):
            finding = self.finding(name, lines)
        assert finding.verdict.preliminary


def test_all_of_them_in_one_report():
    experiments = [load(name) for name in NAMES]
    lines = {}
    for experiment in experiments:
        lines |= recorded(experiment)
    text = report_markdown(gather_claims({"cpu": lines}, experiments, ["cpu"]))
    assert text.count("| ✓ holds | cpu |") == 4
    for experiment in experiments:
        assert f"## {experiment.number}. {experiment.title}" in text
