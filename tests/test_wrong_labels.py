"""The benchmark of wrong labels: its choice, its tables, and a tiny run of every arm."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import wrong_labels
import wrong_labels_plan as plan
import wrong_labels_tables as tables
from neuvar.engine import Results

ROW, AUTO = "mnist-pair-40", "NVRM-SGD, b = auto"
TINY = replace(
    plan.ROWS[ROW],
    data="mnist-excerpt",
    images=300,
    held_out=100,
    width=16,
    epochs=3,
    precision="float32",
)


def line(arm, seed, setting=None, *, test=0.5, loss=1.0, auroc=0.9, status="finished"):
    """A recorded run with the given numbers."""
    numbers = {
        "test": test,
        "held_out_loss": loss,
        "held_out": 0.5,
        "memorized": 0.1,
        "fitted": 1.0,
        "epoch": 30,
    }
    score = {"auroc": auroc, "average_precision": auroc - 0.1}
    run = {"row": ROW, "arm": arm, "setting": setting or {}, "seed": seed}
    diverged = {"key": json.dumps(run), "run": run, "status": status}
    if status == "diverged":
        return diverged
    best = numbers | {"test": test + 0.1}
    finding = dict.fromkeys(tables.SCORES, score)
    return diverged | {"last": numbers, "best": best, "finding": finding}


def choices(arm="NVRM-SGD", **losses):
    """Choice runs of an arm; the loss on held-out labels of some settings."""
    return [
        line(arm, seed, setting, loss=losses.get(str(n), 1.0), test=1 - n / 10)
        for seed in plan.CHOICE_SEEDS
        for n, setting in enumerate(plan.ARMS[arm].grid["mnist"])
    ]


# Choosing.


def test_the_setting_with_the_lowest_held_out_loss_is_chosen():
    grid = plan.ARMS["NVRM-SGD"].grid["mnist"]
    assert plan.chosen(choices(**{"2": 0.6}), ROW, "NVRM-SGD") == grid[2]


def test_reported_seeds_and_test_accuracy_do_not_choose():
    grid = plan.ARMS["NVRM-SGD"].grid["mnist"]
    reported = [line("NVRM-SGD", 10, grid[0], loss=0.0, test=1.0)]
    assert plan.chosen(choices(**{"3": 0.9}) + reported, ROW, "NVRM-SGD") == grid[3]


def test_of_equal_settings_the_first_is_chosen():
    assert plan.chosen(choices(), ROW, "NVRM-SGD") == plan.ARMS["NVRM-SGD"].grid["mnist"][0]


def test_a_setting_that_diverged_is_not_chosen():
    lines = choices(**{"1": 0.1})
    diverged = lines[1]["run"]
    lines[1] = line("NVRM-SGD", diverged["seed"], diverged["setting"], status="diverged")
    assert plan.chosen(lines, ROW, "NVRM-SGD") == plan.ARMS["NVRM-SGD"].grid["mnist"][0]
    every = [
        line("NVRM-SGD", x["run"]["seed"], x["run"]["setting"], status="diverged") for x in lines
    ]
    with pytest.raises(plan.NotChosenError, match="all settings diverged"):
        plan.chosen(every, ROW, "NVRM-SGD")


def test_nothing_is_chosen_while_a_choice_run_is_missing():
    with pytest.raises(plan.NotChosenError, match=r"'b': 0.07"):
        plan.chosen(choices()[:-1], ROW, "NVRM-SGD")


def test_sam_has_the_radius_that_was_chosen_at_half_the_epochs():
    lines = choices("SAM, half the epochs", **{"1": 0.6})
    assert plan.chosen(lines, ROW, "SAM") == plan.ARMS["SAM"].grid["mnist"][1]
    runs = plan.choice_runs(ROW, ["SAM", "SAM, half the epochs"])
    assert {run["arm"] for run in runs} == {"SAM, half the epochs"}


def test_choice_runs_and_reported_runs_have_other_seeds():
    assert min(plan.CHOICE_SEEDS) > plan.FIRST_SEED + max(r.seeds for r in plan.ROWS.values())
    runs = plan.choice_runs(ROW, list(plan.ARMS))
    assert all(run["seed"] in plan.CHOICE_SEEDS for run in runs)
    reported = plan.reported_runs(ROW, 2, ["SGD", AUTO], [])
    assert [(run["seed"], run["arm"]) for run in reported] == [
        (10, "SGD"), (10, AUTO), (11, "SGD"), (11, AUTO),
    ]  # fmt: skip


def test_the_waves_cover_the_plan():
    last = {}
    for name, count, arms in plan.WAVES:
        last |= {(name, arm): count for arm in arms}
    assert last == {(name, arm): row.seeds for name, row in plan.ROWS.items() for arm in plan.ARMS}


def test_arms_that_were_added_later_run_last():
    order = [arm for _, _, arms in plan.WAVES for arm in arms]
    assert min(map(order.index, plan.LATER)) > max(
        index for index, arm in enumerate(order) if arm not in plan.LATER
    )


def test_what_is_left_is_counted():
    lines = [*choices(), line("SGD", 10), line("SGD", 11)]
    assert plan.left(lines).splitlines()[0] == (
        "mnist-pair-40: 4 of 26 choice runs, 2 of 120 reported runs"
    )


# Tables.


@pytest.fixture
def results(tmp_path):
    b = plan.ARMS["NVRM-SGD"].grid["mnist"][2]
    lines = choices(**{"2": 0.6})
    lines += choices("weight decay") + choices("dropout")
    for seed, shift in ((10, 0.0), (11, 0.02), (12, 0.04)):
        lines += [
            line("SGD", seed, test=0.5 + shift),
            line("weight decay", seed, plan.ARMS["weight decay"].grid["mnist"][0], test=0.55),
            line("dropout", seed, {"dropout": 0.2}, test=0.7 + shift, auroc=0.95),
            line("NVRM-SGD", seed, b, test=0.9 + 2 * shift, auroc=0.95 + shift),
            line("NVRM-SGD", seed, {"b": 0.03}, test=0.0),
        ]
    write(tmp_path, lines)
    return tmp_path


def write(folder, lines, name="wrong_labels.jsonl"):
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / name).write_text(text, encoding="utf-8")


def cells_of(rows, start):
    row = next(row for row in rows if row.startswith(f"| {start}"))
    cells = row.replace("\N{NO-BREAK SPACE}", " ").strip("| ").split(" | ")
    return [cell.strip() for cell in cells]


def test_accuracies_and_paired_differences(results):
    rows = tables.accuracy_tables(results)
    assert "The baseline is dropout at the best held-out epoch." in "\n".join(rows)
    sgd = cells_of(rows, "SGD")
    assert sgd[:4] == ["SGD", "1 ×", "3 of 10", "52.0 ± 2.0 %"]
    # Dropout at its best epoch has 0.8 + shift, NVRM-SGD at its last one 0.9 + 2 shift: the
    # differences are 10, 12, 14, their standard error is 2/√3, and t is 4.303.
    nvrm = cells_of(rows, "NVRM-SGD")
    assert nvrm[0] == "NVRM-SGD, b = 0.05"
    assert nvrm[3] == "94.0 ± 4.0 %"
    assert nvrm[-2:] == ["+12.0 (+7.0 to +17.0)", "+22.0 (+17.0 to +27.0)"]
    assert cells_of(rows, "dropout, p = 0.2")[-1] == "baseline"


def test_differences_use_only_seeds_that_both_have(results):
    lines = tables.read(results)
    kept = [x for x in lines if (x["run"]["arm"], x["run"]["seed"]) != ("dropout", 12)]
    write(results, kept)
    nvrm = cells_of(tables.accuracy_tables(results), "NVRM-SGD")
    assert nvrm[3] == "94.0 ± 4.0 %"
    assert nvrm[-2].startswith("+11.0 ")


def test_without_all_baselines_there_is_no_difference(results):
    kept = [x for x in tables.read(results) if x["run"]["arm"] != "dropout"]
    write(results, kept)
    rows = tables.accuracy_tables(results)
    assert cells_of(rows, "NVRM-SGD")[-2:] == ["–", "–"]
    assert "The baseline" not in "\n".join(rows)


def test_one_seed_has_no_deviation_and_no_interval(results):
    kept = [x for x in tables.read(results) if x["run"]["seed"] not in (11, 12)]
    write(results, kept)
    nvrm = cells_of(tables.accuracy_tables(results), "NVRM-SGD")
    assert nvrm[2:4] == ["1 of 10", "90.0 %"]
    assert nvrm[-1] == "+20.0"


def test_rankings_stand_beside_cleanlab(results):
    row = plan.ROWS[ROW]
    run = {"data": row.data, "label_noise": "pair", "noise_rate": 0.4, "images": 10_000}
    numbers = {"auroc": 0.65, "average_precision": 0.55}
    cleaning = [{"run": run | {"seed": seed}, "last": {"cleanlab": numbers}} for seed in (10, 11)]
    write(results, cleaning, "cleaning.jsonl")
    rows = tables.finding_tables(results)
    assert cells_of(rows, "SGD")[2] == "0.900 ± 0.000<br>0.800 ± 0.000"
    # Differences of 0, 0.02 and 0.04 to dropout's 0.95.
    assert cells_of(rows, "NVRM-SGD")[-2] == "+0.020 (-0.030 to +0.070)"
    cleanlab = cells_of(rows, "cleanlab")
    assert cleanlab[1:3] == ["2", "0.650 ± 0.000<br>0.550 ± 0.000"]
    assert cleanlab[-2] == "-0.300 (-0.300 to -0.300)"


def test_two_methods_are_compared_seed_by_seed(results):
    rows = tables.pair_tables(results)
    # 20, 22 and 24 points; AUROC 0, 0.02 and 0.04 higher.
    cells = cells_of(rows, "NVRM-SGD minus dropout")
    assert cells[1:3] == ["3", "+22.0 (+17.0 to +27.0)"]
    assert cells[4] == "+0.020 (-0.030 to +0.070)"
    assert not any("IVON" in row for row in rows)


def test_diverged_runs_are_left_out_of_means_and_counted(results):
    lines = [x for x in tables.read(results) if x["run"]["arm"] != "SGD"]
    lines += [line("SGD", 10, test=0.5), line("SGD", 11, status="diverged")]
    write(results, lines)
    sgd = cells_of(tables.accuracy_tables(results), "SGD")
    assert sgd[2:4] == ["1 of 10, 1 diverged", "50.0 %"]


def test_tried_settings_are_listed(results):
    title = "MNIST, 40 % pair flips | NVRM-SGD, b = "
    rows = tables.choice_table(results)
    assert cells_of(rows, f"{title}0.05")[2:] == ["0.600", "50.0 %", "yes"]
    assert cells_of(rows, f"{title}0.03")[2:] == ["1.000", "50.0 %", "no"]


def test_no_lines_give_empty_tables(tmp_path):
    assert tables.accuracy_tables(tmp_path) == []
    assert tables.finding_tables(tmp_path) == []


# Training.


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(plan.ROWS, ROW, TINY)
    return Results(tmp_path / "wrong_labels.jsonl")


def run_of(arm, seed=10):
    setting = plan.ARMS[arm].grid["mnist"][0]
    return {"row": ROW, "arm": arm, "setting": setting, "seed": seed}


@pytest.mark.parametrize("arm", plan.ARMS)
def test_every_arm_trains_and_is_measured(tiny, arm):
    made = wrong_labels.run_one(run_of(arm))
    assert tiny.add(made)
    epochs = 1 if plan.ARMS[arm].half_epochs else 3
    assert {len(curve) for curve in made["curves"].values()} == {epochs}
    assert made["last"]["held_out"] == pytest.approx(made["curves"]["held_out"][-1])
    # The network of the best epoch is measured at its clean weights.
    assert made["best"]["held_out"] == pytest.approx(max(made["curves"]["held_out"]))
    assert made["finding"].keys() == tables.SCORES.keys()
    assert all(0 <= s["auroc"] <= 1 for s in made["finding"].values())


def test_smoothing_and_averages_change_the_network(tiny):
    plain = wrong_labels.run_one(run_of("SGD"))
    for setting in ({"smoothing": 0.6}, {"average": 0.9}):
        other = wrong_labels.run_one(run_of("SGD") | {"setting": setting})
        assert other["last"]["held_out_loss"] != plain["last"]["held_out_loss"]
    # The training itself does not see the average.
    assert other["curves"]["running"] == plain["curves"]["running"]
    assert other["finding"]["AUM"] == plain["finding"]["AUM"]


def test_a_run_can_be_repeated(tiny):
    first, second = (wrong_labels.run_one(run_of("dropout + NVRM-SGD")) for _ in range(2))
    for part in ("curves", "last", "best", "finding"):
        assert first[part] == second[part]


def test_recorded_runs_are_skipped(tiny, monkeypatch, capsys):
    runs = [run_of("SGD"), run_of("dropout")]
    wrong_labels.run_missing(iter(runs[:1]), tiny)
    wrong_labels.run_missing(iter(runs), tiny)
    assert capsys.readouterr().out.count("started") == 2
    assert [x["run"] for x in tiny.lines().values()] == runs


def test_training_labels_are_those_of_the_cleaning_benchmark(tiny):
    parts = wrong_labels.examples(TINY, seed=10)
    run = {"kind": "pair", "rate": 0.4, "classes": 10, "seed": 10}
    train = wrong_labels.dataset("mnist-excerpt").train
    noisy = wrong_labels.corrupt(run.pop("kind"), train.labels[:300], run.pop("rate"), **run).noisy
    assert torch.equal(parts["train"].given, noisy)
    held_out = parts["held_out"]
    assert torch.equal(held_out.true, train.labels[300:400])
    assert 0.3 < (held_out.given != held_out.true).double().mean() < 0.5
    assert torch.equal(parts["test"].given, parts["test"].true)


def test_divergence_is_recorded(tiny):
    run = run_of("weight decay") | {"setting": {"weight_decay": 1e6}}
    made = wrong_labels.run_one(run)
    assert made["status"] == "diverged"
    assert "epoch" in made["reason"]


def test_a_margin_is_the_distance_to_the_best_other_class():
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert wrong_labels.margin(scores, torch.tensor([0, 1])).tolist() == [1.0, -2.0]


def test_histories_are_means_over_epochs():
    history = wrong_labels.History(torch.tensor([1]))
    for own in (0.2, 0.6):
        p = torch.full((1, 10), (1 - own) / 9)
        p[0, 1] = own
        history.add(torch.tensor([0]), p.log())
        history.epochs += 1
    suspicions = history.suspicions()
    assert suspicions["mean probability"].item() == pytest.approx(-0.4)
    assert suspicions["margin of the mean"].item() == pytest.approx(-(0.4 - 0.6 / 9))
    logs = [math.log(own / ((1 - own) / 9)) for own in (0.2, 0.6)]
    assert -suspicions["AUM"].item() / 2 == pytest.approx(sum(logs) / 2)


def test_wrong_labels_with_the_highest_scores_rank_perfectly():
    wrong = torch.tensor([False, True, False, True])
    perfect = wrong_labels.ranking(torch.tensor([0.1, 0.9, 0.2, 0.8]), wrong)
    assert perfect == {"auroc": 1.0, "average_precision": 1.0}
    assert wrong_labels.ranking(torch.zeros(4), wrong)["auroc"] == 0.5
    assert math.isnan(wrong_labels.ranking(torch.full((4,), math.nan), wrong)["auroc"])
