"""The forgetting benchmark: its rule of choice, its tables from made-up lines, and a small run."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from neuvar.data import Dataset, Split, mnist_excerpt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import forgetting  # noqa: E402
import forgetting_table as tables  # noqa: E402
from forgetting_methods import (  # noqa: E402
    CHOICE_SEEDS,
    LATER,
    LONG,
    METHODS,
    Method,
    chosen,
    tried,
)
from forgetting_training import Run, Setting, execute, held_out, rates  # noqa: E402

SLOW, FAST = Setting("sgd", 0.01), Setting("sgd", 0.1)
DROPOUT = Setting("sgd", 0.1, dropout=0.5)
NOISY = Setting("sgd", 0.1, b=0.02)
MADE_UP = {
    "SGD": Method("SGD", (SLOW, FAST), simple=True),
    "dropout": Method("dropout", (DROPOUT,), simple=True),
    "NVRM-SGD": Method("NVRM-SGD", (NOISY,), without_noise="SGD"),
}
CHOICE = {SLOW: 0.7, FAST: 0.9, DROPOUT: 0.8, NOISY: 0.85}


def line(role, seed, setting, mean, tasks=5):
    run = asdict(Run(role, tasks, seed, setting))
    return run | {"final": [mean - 0.1] * (tasks - 1) + [mean + 0.1], "mean": mean, "seconds": 60.0}


def choice_lines(values=CHOICE):
    return [line("choice", seed, s, mean) for s, mean in values.items() for seed in CHOICE_SEEDS]


class TestChoice:
    def test_takes_the_best_on_held_out_images(self):
        assert chosen(MADE_UP["SGD"], choice_lines()) == FAST
        assert chosen(MADE_UP["SGD"], choice_lines({SLOW: 0.9, FAST: 0.7})) == SLOW

    def test_does_not_look_at_result_runs(self):
        misleading = [line("test", seed, SLOW, 0.99) for seed in (0, *CHOICE_SEEDS)]
        assert chosen(MADE_UP["SGD"], choice_lines() + misleading) == FAST

    def test_first_candidate_on_a_tie(self):
        assert chosen(MADE_UP["SGD"], choice_lines({SLOW: 0.8, FAST: 0.8})) == SLOW

    def test_refuses_candidates_that_were_not_tried(self):
        with pytest.raises(SystemExit, match=r"SGD: .*lr=0\.01.*not tried.*--choose"):
            chosen(MADE_UP["SGD"], choice_lines({FAST: 0.9}))

    def test_baseline_is_the_simple_method_that_is_best_on_held_out_images(self):
        better = CHOICE | {DROPOUT: 0.95, NOISY: 0.99}
        assert tables.strongest_simple(choice_lines(), MADE_UP).name == "SGD"
        assert tables.strongest_simple(choice_lines(better), MADE_UP).name == "dropout"

    def test_held_out_images_are_training_images(self):
        data = mnist_excerpt()
        part = held_out(data)
        assert len(part.train) + len(part.test) == len(data.train)
        joined = torch.cat([part.train.images, part.test.images])
        assert torch.equal(joined, data.train.images)


class TestTables:
    def report(self, results, planned=3):
        lines = [line("test", k, s, m) for s, means in results for k, m in enumerate(means)]
        return tables.report(choice_lines() + lines, {5: planned}, MADE_UP)

    def test_paired_difference_with_its_interval(self):
        # Differences 1, 2 and 3 points: mean 2, standard error 1/√3, Student's quantile 4.303.
        report = self.report([(FAST, [0.90, 0.80, 0.85]), (NOISY, [0.91, 0.82, 0.88])])
        assert (
            "| NVRM-SGD | lr 0.1, batch 256, b 0.02 | 3 | 77.00 ± 4.58 | 97.00 ± 4.58 "
            "| 87.00 ± 4.58 | +2.00 (-0.48 to +4.48) |" in report
        )
        assert "| SGD | 0.02 | 3 | 85.00 ± 5.00 | 87.00 ± 4.58 | +2.00 (-0.48 to +4.48) |" in report

    def test_baseline_has_no_difference_to_itself(self):
        report = self.report([(FAST, [0.9, 0.8, 0.7])])
        assert "difference to SGD" in report[0]
        assert report[2].endswith("| 80.00 ± 10.00 |  |")

    def test_says_how_many_of_the_planned_runs_are_in(self):
        report = self.report([(FAST, [0.9, 0.8]), (NOISY, [0.9])], planned=10)
        assert "| 2 of 10 |" in report[2]
        assert "| 1 of 10 |" in report[3]
        assert report[3].endswith("| 90.00 | +0.00 |")

    def test_differences_use_common_seeds_only(self):
        report = self.report([(FAST, [0.9, 0.8]), (NOISY, [0.91, 0.82, 0.1])])
        assert "| +1.50 (-4.85 to +7.85) |" in report[3]
        assert "| SGD | 0.02 | 2 of 3 | 85.00 ± 7.07 | 86.50 ± 6.36 |" in report[-1]

    def test_shows_only_the_chosen_setting(self):
        report = self.report([(FAST, [0.9]), (SLOW, [0.5])])
        assert [row for row in report if "lr 0.01" in row] == []

    def test_settings_that_were_tried(self):
        assert tables.choice_table(choice_lines(), MADE_UP)[2:] == [
            "| SGD | lr 0.01, batch 256 | 70.00 |",
            "| SGD | lr 0.1, batch 256 (chosen) | 90.00 |",
            "| dropout | lr 0.1, batch 256, dropout 0.5 (chosen) | 80.00 |",
            "| NVRM-SGD | lr 0.1, batch 256, b 0.02 (chosen) | 85.00 |",
        ]

    def test_longer_streams_have_their_own_table(self):
        lines = [line("test", 0, s, 0.8, tasks=10) for s in (FAST, NOISY)]
        report = tables.report(choice_lines() + lines, {5: 10, 10: 5, 20: 5}, MADE_UP)
        report = "\n".join(report)
        assert "| 10 tasks | chosen setting |" in report
        assert "| 1 of 5 |" in report
        assert "20 tasks" not in report


class TestPlan:
    def test_all_methods_have_a_seed_before_the_next_begins(self):
        runs = forgetting.result_runs(MADE_UP.values(), choice_lines(), 5, 10)
        settings = [FAST, DROPOUT, NOISY]
        assert [run.seed for run in runs] == [seed for seed in range(10) for _ in settings]
        assert [run.setting for run in runs[3:6]] == settings
        assert {run.role for run in runs} == {"test"}

    def test_methods_that_were_added_later_run_last(self):
        later = {LATER[0]: Method(LATER[0], (SLOW,)), **MADE_UP}
        runs = forgetting.result_runs(later.values(), choice_lines(), 5, 3)
        assert [run.setting for run in runs[-3:]] == [SLOW] * 3
        assert SLOW not in {run.setting for run in runs[:-3]}
        assert list(METHODS)[-len(LATER) :] == list(LATER)

    def test_methods_that_were_not_tried_are_left_out(self):
        lines = choice_lines({FAST: 0.9, SLOW: 0.8, DROPOUT: 0.7})
        lines += [line("test", seed, FAST, 0.9) for seed in range(5)]
        assert list(tried(MADE_UP, lines)) == ["SGD", "dropout"]
        text = "\n".join(tables.report(lines, {5: 5}, MADE_UP))
        assert "| SGD |" in text
        assert "NVRM" not in text.replace("with NVRM", "")

    def test_choices_and_results_share_no_seed(self):
        runs = forgetting.choice_runs(METHODS.values())
        assert min(run.seed for run in runs) >= 1000
        assert len(runs) == len(set(runs))

    def test_names(self):
        assert all(name == method.name for name, method in METHODS.items())
        assert set(LONG) <= METHODS.keys()
        for method in METHODS.values():
            assert all((s.b > 0) == bool(method.without_noise) for s in method.candidates)
            assert not method.without_noise or METHODS[method.without_noise]
            if method.simple:
                assert all(s.penalty == "none" and not s.b for s in method.candidates)

    def test_finished_runs_are_skipped_and_torn_lines_repeated(self, tmp_path):
        path, runs = tmp_path / "lines.jsonl", [Run("test", 5, k, FAST) for k in range(3)]
        for run in runs[:2]:
            forgetting.append(path, line("test", run.seed, FAST, 0.9))
        path.write_text(path.read_text()[:-30])  # killed while it wrote
        assert forgetting.left(runs, forgetting.finished(path)) == runs[1:]
        forgetting.append(path, line("test", 2, FAST, 0.9))
        assert forgetting.left(runs, forgetting.finished(path)) == runs[1:2]

    def test_time_left(self):
        lines = [line("test", 0, FAST, 0.9)]  # 12 s per task
        assert forgetting.minutes([Run("test", 10, 1, FAST)] * 3, lines) == pytest.approx(6)


def small_data():
    data = mnist_excerpt()
    train, test = (
        Split(s.images[:count], s.labels[:count])
        for s, count in ((data.train, 1200), (data.test, 200))
    )
    return Dataset("small", 10, train, test)


def small_run(role="test", tasks=2, **fields):
    setting = Setting(**{"optimizer": "adam", "lr": 0.003, "batch": 32} | fields)
    return execute(Run(role, tasks, 0, setting), small_data(), hidden=(64,), precision="float32")


class TestTraining:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"penalty": "ewc", "strength": 100.0, "within": "linear"},
            {"penalty": "si", "strength": 1.0},
            {"penalty": "mas", "strength": 0.1, "b": 0.01, "dropout": 0.2},
            {"optimizer": "momentum", "lr": 0.05, "task_decay": 0.5},
        ],
        ids=str,
    )
    def test_small_run_learns_both_tasks(self, fields):
        result = small_run(**fields)
        assert not result["diverged"]
        assert len(result["final"]) == len(result["learned"]) == 2
        assert min(result["learned"]) > 0.4
        assert result["mean"] == pytest.approx(sum(result["final"]) / 2, abs=1e-5)
        assert result["final"][1] == result["learned"][1]

    def test_same_seed_same_result(self):
        fields = {"b": 0.02, "dropout": 0.5, "penalty": "ewc", "strength": 30.0}
        first, second = small_run(**fields), small_run(**fields)
        assert first | {"seconds": 0} == second | {"seconds": 0}

    def test_a_strong_penalty_keeps_the_first_task(self):
        first = [
            small_run(tasks=4, lr=0.01, penalty="ewc", strength=strength)["final"][0]
            for strength in (1e-6, 300.0)
        ]
        assert first[1] > first[0] + 0.1

    def test_bfloat16_follows_the_weights(self):
        """Autocast keeps copies of weights; each step must have those of the latest weights."""
        setting = Setting("adam", 0.003, batch=32)
        result = execute(Run("test", 1, 0, setting), small_data(), hidden=(64,))
        assert result["precision"] == "bfloat16"
        assert result["learned"][0] > 0.6

    def test_divergence_is_recorded(self):
        result = small_run(optimizer="sgd", lr=1e30)
        assert result["diverged"]
        assert result["losses"][-1] is None
        assert len(result["final"]) == 2

    def test_rates_fall_to_zero_in_each_task(self):
        order = torch.arange(100)
        steps = list(rates(0.4, Setting("sgd", 0.4, within="linear", batch=25), order))
        assert [rate for rate, _ in steps] == pytest.approx([0.4, 0.3, 0.2, 0.1])
        assert torch.equal(torch.cat([index for _, index in steps]), order)
        constant = rates(0.4, Setting("sgd", 0.4, batch=25), order)
        assert {rate for rate, _ in constant} == {0.4}
