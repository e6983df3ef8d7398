"""From recorded lines to figures, tables and verdicts, whatever part of the runs is there."""

import dataclasses
import inspect
import math

import pytest

from neuvar.experiments import EXPERIMENTS, SCALES
from neuvar.experiments.findings import (
    Case,
    Cell,
    Line,
    Panel,
    Result,
    Table,
    Verdict,
    gain,
    interval,
    judge,
)
from neuvar.experiments.results_query import against, choice, compare, curve, group, matching
from neuvar.experiments.run_spec import Tasks, Training

NAMES = list(EXPERIMENTS)
BY_TRIAL = (0.0, 0.001, -0.001, 0.0005, -0.0005)


def result(run, score, *, held_out=None, status="finished"):
    """A recorded line in which a run did as well as the score says, in every metric."""
    method = {"gaussian": 1.5, "laplace": 0.7, "uniform": 0.4}[run.noise] if run.b else 1.0
    score += BY_TRIAL[run.seed % 5] * (1.2 if run.optimizer == "psgd" else method)
    if isinstance(run, Tasks):
        last = {"first_task": score, "mean_accuracy": score, "new_task": score, "loss": 1 - score}
    else:
        last = {"test_accuracy": score, "train_accuracy": 0.95, "loss": 0.1, "test_loss": 0.5}
        last |= {"memorized": 1 - score, "learned": score} if run.label_noise else {}
        if run.held_out:
            last["held_out_accuracy"] = score if held_out is None else held_out
    line = {
        "status": status,
        "reason": None if status == "finished" else "the training loss was not finite",
        "curves": {k: [v / 2, v] for k, v in last.items()},
        "last": last,
        "best": last,
    }
    if status != "finished":  # as if it had diverged in the first epoch
        line |= {"curves": {}, "last": {}, "best": {}}
    elif isinstance(run, Training) and run.eval_noise:
        rises = [1 - score] * len(run.eval_noise)
        found = {"test_accuracy": [score] * len(rises), "expected_sharpness": rises}
        line["under_noise"] = {"scales": list(run.eval_noise), "draws": 10} | found
    if isinstance(run, Training) and run.reestimate and status == "finished":
        line["reestimated"] = {"test_accuracy": score}
    return Result(run, line)


def nvrm_ahead(run, by=0.1):
    """Methods in the order that the paper claims, or against it."""
    if run.optimizer == "psgd":
        return 0.5 + by / 4
    ahead = by * {"laplace": 0.8, "uniform": 0.7}.get(run.noise, 1.0)
    off = 0.0 if run.b == 0.02 else {"uniform": 0.1}.get(run.noise, 0.3)
    return 0.5 + (ahead * (1 - off) if run.b else 0.0)


def looked_at(experiment, results):
    panels, table = experiment.panels(results), experiment.table(results)
    verdict = experiment.check(results)
    assert all(isinstance(panel, Panel) and panel.title for panel in panels)
    for line in (line for panel in panels for line in panel.lines):
        assert isinstance(line, Line)
        assert all(len(row) == len(line.x) for row in line.trials), line
        assert all(isinstance(y, float) for row in line.trials for y in row)
    assert isinstance(table, Table)
    for row in table.rows:
        assert len(row) == len(table.columns)
        assert all(isinstance(c, str | Cell) and str(c) for c in row)
    assert isinstance(verdict, Verdict)
    assert verdict.because.endswith(".")
    return panels, table, verdict


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
class TestWhateverIsThere:
    def test_everything(self, name, scale):
        experiment = EXPERIMENTS[name]
        runs = experiment.runs(scale, 3)
        panels, table, _ = looked_at(experiment, [result(r, nvrm_ahead(r)) for r in runs])
        assert panels
        assert table.rows
        for row in table.rows:
            cells = [c for c in row if isinstance(c, Cell)]
            assert all(len(c.trials) == 3 for c in cells)
            assert "3" in row

    def test_nothing(self, name, scale):
        panels, table, verdict = looked_at(EXPERIMENTS[name], [])
        assert verdict.outcome == "undecided"
        assert "no finished trials" in verdict.because
        assert not any(line.trials for panel in panels for line in panel.lines)
        assert all("0" in row for row in table.rows)

    def test_one_trial_decides_nothing(self, name, scale):
        experiment = EXPERIMENTS[name]
        results = [result(r, nvrm_ahead(r)) for r in experiment.runs(scale, 1)]
        assert looked_at(experiment, results)[2].outcome == "undecided"

    def test_every_beginning_of_a_sweep(self, name, scale):
        experiment = EXPERIMENTS[name]
        results = [result(r, nvrm_ahead(r)) for r in experiment.runs(scale, 2)]
        for count in sorted({1, 2, 3, 5, len(results) // 2, len(results) - 1}):
            looked_at(experiment, results[:count])
            looked_at(experiment, results[-count:])

    def test_one_value_of_b_is_missing(self, name, scale):
        experiment = EXPERIMENTS[name]
        results = [result(r, nvrm_ahead(r)) for r in experiment.runs(scale, 3)]
        for b in {r.run.b for r in results}:
            looked_at(experiment, [r for r in results if r.run.b != b])
            looked_at(experiment, [r for r in results if r.run.b == b])

    def test_all_diverged(self, name, scale):
        experiment = EXPERIMENTS[name]
        results = [result(r, 0.5, status="diverged") for r in experiment.runs(scale, 2)]
        assert looked_at(experiment, results)[2].outcome == "undecided"

    def test_one_method_diverged(self, name, scale):
        experiment = EXPERIMENTS[name]
        for noisy in (False, True):
            results = [
                result(r, 0.5, status="diverged" if bool(r.b) == noisy else "finished")
                for r in experiment.runs(scale, 3)
            ]
            # NVRM alone diverged: that counts against it, but PSGD and other noise did so as well.
            against_nvrm = noisy and name not in ("denoising", "noise-types")
            outcome = looked_at(experiment, results)[2].outcome
            assert outcome == ("false" if against_nvrm else "undecided")

    def test_the_order_of_lines_does_not_matter(self, name, scale):
        experiment = EXPERIMENTS[name]
        results = [result(r, nvrm_ahead(r)) for r in experiment.runs(scale, 2)]
        assert looked_at(experiment, results) == looked_at(experiment, results[::-1])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
class TestVerdicts:
    @pytest.mark.parametrize(("by", "outcome"), [(0.1, "true"), (-0.1, "false")])
    def test_clear_cases(self, name, scale, by, outcome):
        runs = EXPERIMENTS[name].runs(scale, 3)
        verdict = EXPERIMENTS[name].check([result(r, nvrm_ahead(r, by)) for r in runs])
        assert verdict.outcome == outcome, verdict.because
        assert all("n = 3" in str(case) for case in verdict.cases)
        assert verdict.preliminary  # three trials are few

    def test_no_difference(self, name, scale):
        runs = EXPERIMENTS[name].runs(scale, 3)
        verdict = EXPERIMENTS[name].check([result(r, 0.5) for r in runs])
        assert verdict.outcome == "undecided"

    def test_it_depends_on_the_trial(self, name, scale):
        runs = EXPERIMENTS[name].runs(scale, 3)
        mixed = [result(r, nvrm_ahead(r, 0.3 * (-1) ** r.seed)) for r in runs]
        assert EXPERIMENTS[name].check(mixed).outcome == "undecided"


class TestChoices:
    """b is chosen on held-out images, also where the test would choose otherwise."""

    def made(self, name, score):
        """NVRM at the b that is worst on the test is best on held-out images."""
        runs = EXPERIMENTS[name].runs("cpu", 3)
        best = {}
        for run in runs:
            if run.b:
                key = (run.optimizer, run.noise, run.noise_rate, run.data)
                best.setdefault(key, []).append(run.b)
        found = []
        for run in runs:
            grid = sorted(set(best.get((run.optimizer, run.noise, run.noise_rate, run.data), [])))
            first = bool(run.b) and run.b == grid[0]
            found.append(result(run, score(run, first), held_out=0.9 if first else 0.1))
        return found

    def test_the_function(self):
        runs = [Training(data="x", b=b, seed=s, held_out=1) for b in (0.1, 0.2) for s in (0, 1)]
        results = [result(r, r.b, held_out=1 - r.b) for r in runs]
        assert choice(results)[0] == 0.1
        assert choice([])[0] is None
        assert choice(results[:1])[0] == 0.1  # there is nothing to choose
        unknown = [result(Training(data="x", b=b), 0.5) for b in (0.1, 0.2)]
        assert choice(unknown)[0] is None  # no images were held out
        lost = [results[0], result(runs[1], 0.5, status="diverged"), *results[2:]]
        assert choice(lost)[0] == 0.2

    @pytest.mark.parametrize("name", ["pair-flips", "symmetric-flips", "denoising", "noise-types"])
    @pytest.mark.parametrize(("at_it", "elsewhere", "outcome"), [(0.3, 0.9, "false"),
                                                                 (0.9, 0.3, "true")])  # fmt: skip
    def test_verdicts_go_by_held_out_images(self, name, at_it, elsewhere, outcome):
        """At the chosen b NVRM is far behind the others, and elsewhere far ahead; or reversed."""

        def score(run, first):
            compared = run.optimizer == "nvrm-sgd" and run.noise == "gaussian"
            if run.noise == "laplace" and not first:
                return 0.45  # so that its range over b is larger than that of uniform noise
            return (at_it if first else elsewhere) if compared else 0.5

        verdict = EXPERIMENTS[name].check(self.made(name, score))
        assert verdict.outcome == outcome, verdict.because

    @pytest.mark.parametrize("name", ["denoising", "noise-types", "pair-flips"])
    def test_tables_mark_the_chosen_one(self, name):
        rows = EXPERIMENTS[name].table(self.made(name, lambda run, first: 0.5)).rows
        marked = [row for row in rows if any("(chosen)" in c for c in row if isinstance(c, str))]
        assert marked
        for row in marked:
            cell = next(c for c in row if isinstance(c, str) and "(chosen)" in c)
            assert any(f"{b:g} (chosen)" in cell for b in (0.01, 0.02, 0.03, 0.05, 0.1))

    def test_a_rate_with_one_b_is_compared_at_that(self):
        """At 40 % another b is chosen, which the other rates do not have."""
        runs = EXPERIMENTS["pair-flips"].runs("cpu", 3)
        results = [
            result(r, nvrm_ahead(r), held_out=0.9 if r.b == 0.03 else 0.1)
            for r in runs if r.data == "mnist"
        ]  # fmt: skip
        verdict = EXPERIMENTS["pair-flips"].check(results)
        assert verdict.outcome == "true", verdict.because
        assert ["n = 3" in str(case) for case in verdict.cases] == [True] * (2 * 4)


class TestFindings:
    def test_an_interval_is_students(self):
        mean, low, high = interval([1.0, 2.0, 3.0])
        half = 4.302652729749464 / math.sqrt(3)
        assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-6)
        assert interval([1.0]) == (1.0, -math.inf, math.inf)

    def test_gains_are_of_the_same_trials(self):
        assert gain({0: 0.5, 1: 0.7, 3: 0.9}, {1: 0.4, 0: 0.4, 2: 0.1}) == pytest.approx((0.1, 0.3))

    def test_judge(self):
        up, down, open_ = (0.1, 0.11, 0.09), (-0.1, -0.11, -0.09), (0.1, -0.1, 0.05)

        def outcome(*cases):
            return judge("", [Case(str(k), found) for k, found in enumerate(cases)]).outcome

        assert outcome(up) == outcome(up, up) == "true"
        assert outcome(up, ()) == "undecided"
        assert outcome(down) == outcome(up, down) == outcome(open_, down) == "false"
        assert outcome(open_) == outcome(up, open_) == outcome((0.1,)) == "undecided"
        assert outcome() == outcome(()) == outcome((0.0, 0.0)) == "undecided"
        assert outcome((math.nan, 0.1)) == outcome(up, (math.nan, 0.1)) == "undecided"
        said = judge("Gain", [Case("A", up), Case("B", (), 2), Case("C", (0.1,), 1)])
        assert said.outcome == "undecided"  # nobody knows what the lost ones would have shown
        assert said.because == "Gain: better in 1 case, diverged in 2."
        assert tuple(map(str, said.cases)) == (
            "A: 10.0 points higher (95 % interval 7.5 to 12.5, n = 3)",
            "B: nothing to compare, 2 diverged",
            "C: 10.0 points higher (n = 1, 1 diverged)",
        )
        assert judge("Gain", [Case("A", up)] * 2).because == "Gain: better in all 2 cases."

    def test_cases_say_which_way_they_go(self):
        down = (-0.1, -0.11, -0.09)
        assert str(Case("A", down)) == "A: 10.0 points lower (95 % interval 7.5 to 12.5, n = 3)"
        assert str(Case("A", down, lower=True)).startswith("A: 10.0 points higher (95 % ")
        rise = Case("sharpness (rise of the loss)", (115.0, 117.0), lower=True, percent=False)
        assert (
            str(rise) == "sharpness (rise of the loss): 116 lower (95 % interval 103 to 129, n = 2)"
        )

    def test_trials_that_diverged_keep_a_sentence_from_holding(self):
        up, down = (0.1, 0.11, 0.09), (-0.1, -0.11, -0.09)
        assert judge("", [Case("A", up)]).outcome == "true"
        assert judge("", [Case("A", up, lost=1)]).outcome == "undecided"
        assert judge("", [Case("A", up), Case("B", up, lost=1)]).outcome == "undecided"
        assert judge("", [Case("A", down, lost=1)]).outcome == "false"

    def test_false_needs_more_where_there_are_more_cases(self):
        """Twenty cases without any effect would else give a false one by chance."""
        found = (-0.1, -0.08, -0.09)
        alone = judge("", [Case("A", found)])
        among = judge("", [Case(str(k), found) for k in range(20)])
        assert (alone.outcome, among.outcome) == ("false", "undecided")

    def test_compare(self):
        runs = [Training(data="x", b=b, seed=s) for b in (0.0, 0.1) for s in (0, 1, 2)]
        results = [result(r, r.b, status="diverged" if r.seed == 2 else "finished") for r in runs]
        case = compare("A", matching(results, b=0.1), matching(results, b=0.0), "test_accuracy")
        assert case.differences == pytest.approx((0.1, 0.1005))
        assert case.lost == 2
        turned = compare(
            "A", matching(results, b=0.1), matching(results, b=0.0), "test_accuracy", lower=True
        )
        assert turned.differences == pytest.approx((-0.1, -0.1005))

    def test_trials_of_generalization_that_diverged(self):
        experiment = EXPERIMENTS["generalization"]
        runs = experiment.runs("cpu", 3)
        results = [
            result(r, nvrm_ahead(r), status="diverged" if r.b and not r.seed else "finished")
            for r in runs
        ]
        for found in results:
            if found.finished:  # the gap of all but the lost trials is narrower beyond doubt
                found.line["curves"]["train_accuracy"][-1] -= found.line["last"]["test_accuracy"]
        said = experiment.check(results).cases
        gaps = [case for case in said if "generalization gap" in case.name]
        assert gaps
        assert all("points lower" in str(case) for case in gaps)
        assert all("n = 2, 1 diverged" in str(case) for case in said)

    def test_a_sharpness_that_was_not_finite(self):
        experiment = EXPERIMENTS["robustness"]
        results = [result(r, nvrm_ahead(r)) for r in experiment.runs("cpu", 3)]
        for found in results:
            found.line["under_noise"]["expected_sharpness"][-1] = None
        panels, _, verdict = looked_at(experiment, results)
        assert "nan" not in " ".join(map(str, verdict.cases))
        assert any(math.isnan(y) for p in panels for line in p.lines for y in line.trials[0])

    def test_cells(self):
        assert str(Cell(())) == "–"
        assert str(Cell((0.5,))) == "50.0 %"
        assert str(Cell((0.4, 0.6))) == "50.0 ± 14.1 %"
        assert str(Cell((1.0, 2.0), percent=False)) == "1.500 ± 0.707"
        assert math.isnan(Cell(()).mean)
        assert math.isnan(Cell((0.5,)).deviation)

    def test_numbers_that_were_not_finite(self):
        line = {"status": "finished", "curves": {"x": [0.5, None]}, "last": {"x": None}, "best": {}}
        found = Result(Training(data="x"), line)
        assert found.curve("x")[0] == 0.5
        assert math.isnan(found.curve("x")[1])
        assert math.isnan(found.last("x"))
        assert math.isnan(found.best("x"))

    def test_lines_against_a_field_have_the_trials_that_are_whole(self):
        runs = [Training(data="x", b=b, seed=s) for b in (0.1, 0.2) for s in (0, 1)]
        line = against(
            [result(r, r.b) for r in runs[:3]], "b", (0.1, 0.2), "test_accuracy", "", "nvrm"
        )
        assert line.x == (0.1, 0.2)
        assert line.trials == ((pytest.approx(0.1), pytest.approx(0.2)),)

    def test_groups_are_of_finished_runs_in_order(self):
        runs = [Training(data="x", seed=s) for s in (2, 0, 1)]
        results = [result(r, 0.5, status="diverged" if r.seed == 1 else "finished") for r in runs]
        assert [r.run.seed for r in group(results, data="x")] == [0, 2]
        assert group(results, data="y") == []
        line = curve(group(results), "test_accuracy", "SGD", "plain")
        assert line.x == (1.0, 2.0)
        assert len(line.trials) == 2


def test_unknown_fields_and_metrics_are_named():
    results = [result(Training(data="mnist-excerpt"), 0.5)]
    with pytest.raises(ValueError, match=r"field must be one of .*optimizer.* got 'bb'"):
        matching(results, bb=0.1)
    with pytest.raises(
        ValueError, match=r"metric must be one of .*test_accuracy.* got 'accuracyy'"
    ):
        curve(results, "accuracyy", "SGD")


@pytest.mark.parametrize("kind", [Training, Tasks])
def test_help_shows_all_fields(kind):
    for name in (field.name for field in dataclasses.fields(kind)):
        assert f"    {name}: " in inspect.getdoc(kind)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"role": "nvrm-sgd"},
            "role must be one of plain, nvrm, other, third, fourth, got 'nvrm-s",
        ),
        ({"b": -1}, "b must be a finite number >= 0, got -1"),
    ],
)
def test_a_line_has_a_known_role_and_a_scale(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        curve([], "test_accuracy", "SGD", **options)
