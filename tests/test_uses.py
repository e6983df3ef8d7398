"""What noise is good for: the choice of settings and baselines, and the tables."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import moved_weights
import uses


def line(method, seed, accuracy, setting=None, **others):
    setting = moved_weights.METHODS[method].settings[0] if setting is None else setting
    last = dict.fromkeys(("clean", *moved_weights.DISTURBANCES), accuracy) | others
    return {"run": {"method": method, "setting": setting, "seed": seed}, "last": last}


CHOICE = moved_weights.CHOICE_SEED
LINES = [
    line("NVRM-Adam", CHOICE, 0.8, {"b": 0.03}),
    line("NVRM-Adam", CHOICE, 0.9, {"b": 0.05}, clean=0.7),
    {"run": {"method": "NVRM-Adam", "setting": {"b": 0.07}, "seed": CHOICE}, "last": {}},
    line("dropout", CHOICE, 0.8, {"dropout": 0.5}),
    line("SAM, half the epochs", CHOICE, 0.8, {"rho": 0.2}),
    *(line("Adam", seed, 0.5 + 0.01 * seed) for seed in range(5)),
    *(line("dropout", seed, 0.6 + 0.01 * seed, {"dropout": 0.5}) for seed in range(5)),
    *(line("SAM", seed, 0.95, {"rho": 0.2}) for seed in range(5)),
    *(line("NVRM-Adam", s, 0.7 + 0.011 * s, {"b": 0.05}, clean=0.6) for s in range(5)),
    line("NVRM-Adam", 0, 0.99, {"b": 0.03}),  # chosen for clean weights only
]


class TestMovedWeights:
    def test_settings_are_chosen_by_held_out_accuracy_under_each_disturbance(self):
        assert moved_weights.chosen(LINES, "NVRM-Adam", "2 bits") == {"b": 0.05}
        assert moved_weights.chosen(LINES, "NVRM-Adam", "clean") == {"b": 0.03}
        assert moved_weights.chosen(LINES, "SAM", "2 bits") == {"rho": 0.2}
        assert moved_weights.chosen(LINES, "Adam", "2 bits") == {}

    def test_the_method_with_noise_is_chosen_on_held_out_images(self):
        better = line("dropout + NVRM-Adam", CHOICE, 0.85, **{"2 bits": 0.95})
        assert moved_weights.chosen_noise([*LINES, better], "2 bits") == "dropout + NVRM-Adam"
        assert moved_weights.chosen_noise([*LINES, better], "3 bits") == "NVRM-Adam"

    def test_each_chosen_setting_is_run_with_every_seed(self):
        runs = [run for run in moved_weights.reported_runs(LINES) if run["method"] == "NVRM-Adam"]
        first = [run["setting"] for run in runs if run["seed"] == 0]
        assert first == [{"b": 0.03}, {"b": 0.05}]
        assert len(runs) == 2 * moved_weights.SEEDS

    def test_a_baseline_of_twice_the_cost_is_shown_but_not_compared(self):
        assert moved_weights.best_baseline(LINES, "2 bits") == "dropout"
        text = "\n".join(moved_weights.table(LINES))
        assert "| SAM | 2 × | 5 of 10 | 95.0 ± 0.0<br>ρ = 0.2 |" in text

    def test_differences_are_paired_by_seed(self):
        mean, low, high = moved_weights.gain(LINES, "NVRM-Adam", "2 bits")
        assert mean == pytest.approx(10.2)
        assert low < mean < high
        assert high - low < 0.5

    def test_a_baseline_that_was_just_started_is_not_the_best(self):
        """Its only seed is easier than the others."""
        lines = [*LINES, line("Adam, half the epochs", 4, 0.99)]
        assert moved_weights.best_baseline(lines, "2 bits") == "dropout"

    def test_the_average_is_of_all_steps(self):
        x, y = torch.rand(256, 784), torch.arange(256) % 10
        kept, last = (
            moved_weights.train(
                moved_weights.METHODS["average of the weights"], setting, (x, y), 0, width=8
            )
            for setting in ({"average": 0.9}, {})
        )
        assert all(
            not torch.equal(a, b) for a, b in zip(kept.parameters(), last.parameters(), strict=True)
        )

    def test_a_tiny_network_is_trained_in_every_way(self):
        x, y = torch.rand(40, 784), torch.arange(40) % 10
        for name, method in moved_weights.METHODS.items():
            if method.optimizer == "ivon":
                pytest.importorskip("ivon")
            model = moved_weights.train(method, method.settings[-1], (x, y), 0, width=8)
            found = moved_weights.accuracies(model, (x, y), 0)
            assert found.keys() == {"clean", *moved_weights.DISTURBANCES}, name
            assert all(0 <= value <= 1 for value in found.values())

    def test_without_lines_there_is_only_a_head(self):
        assert len(moved_weights.table([])) == 2


class TestUses:
    def use(self, *gains, percent=True):
        without = dict.fromkeys(range(len(gains)), 0.5)
        return uses.Use(
            "u", "m", "dropout", without, "NVRM", {s: 0.5 + g for s, g in enumerate(gains)}, percent
        )

    def test_the_outcome_follows_the_interval(self):
        assert self.use(0.1, 0.11, 0.1, 0.11, 0.1).outcome == "better"
        assert self.use(-0.1, -0.11, -0.1, -0.11, -0.1).outcome == "worse"
        assert self.use(-0.1, 0.11, -0.1, 0.11, 0.1).outcome == "no difference shown"
        assert self.use(0.1, 0.11, 0.1, 0.11).outcome == "preliminary: better"
        assert self.use(0.1).outcome == "preliminary: no difference shown"

    def test_the_best_is_taken_over_the_seeds_that_all_have(self):
        five = range(5)
        candidates = {"a": dict.fromkeys(five, 0.5) | {5: 0.99}, "b": dict.fromkeys(five, 0.6)}
        assert uses.best(candidates)[0] == "b"
        assert uses.best(candidates | {"started": dict.fromkeys(range(2), 0.9)})[0] == "b"
        assert uses.best(candidates | {"late": dict.fromkeys(range(3), 0.7)})[0] == "late"
        assert uses.best({"a": {0: 0.5}, "b": {1: 0.6}})[0] == "b"

    def test_a_row_in_words(self):
        assert uses.rows([self.use(0.1, 0.1)])[-1] == (
            "| m | dropout: 50.0 % | NVRM: 60.0 % | +10.0 (+10.0 to +10.0) | 2 "
            "| preliminary: better |"
        )
        assert uses.rows([self.use(0.1, percent=False)])[-1].split(" | ")[3] == "+0.100"

    def test_without_results_there_are_no_rows(self, tmp_path):
        assert uses.moved(tmp_path) == uses.wrong(tmp_path) == []


def test_lower_losses_are_better():
    rivals = {"plain": dict.fromkeys(range(5), 0.3), "dropout": dict.fromkeys(range(5), 0.2)}
    assert uses.best(rivals, min)[0] == "dropout"
    own = {seed: 0.1 + 0.001 * seed for seed in range(5)}
    loss = {"percent": False, "lower_is_better": True}
    assert (
        uses.Use("sure", "log loss", "dropout", rivals["dropout"], "NVRM", own, **loss).outcome
        == "better"
    )
    swapped = uses.Use("sure", "log loss", "NVRM", own, "dropout", rivals["dropout"], **loss)
    assert swapped.outcome == "worse"


def test_an_ensemble_costs_more_and_is_not_compared():
    found = uses.sure(Path(__file__).parents[1] / "results")
    assert {use.baseline for use in found} <= set(uses.uncertainty_tables.METHODS.values())
    assert not any("ensemble" in use.baseline or "NVRM" in use.baseline for use in found)
    assert [len(use.gains) for use in found] == [5] * 6
