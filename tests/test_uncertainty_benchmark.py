"""The benchmark of uncertainty: equal cost, settings chosen as it says, tables from lines."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import uncertainty
import uncertainty_tables
from neuvar.engine import Results

ROW = replace(
    uncertainty.tiny(uncertainty.ROWS["mnist"]), data="mnist-excerpt", strange="mnist-excerpt"
)
DECAY = {"weight_decay": 1e-4}


def run(arm, setting, **changes):
    return {"row": "mnist", "arm": arm, "setting": setting, "seed": 0, "choice": False} | changes


WAYS = {
    "plain": ["clean"],
    "nvrm": ["clean", "averaged"],
    "dropout": ["clean", "averaged"],
    "sam": ["clean"],
    "ivon": ["clean", "averaged"],
    "swa": ["clean"],
    "ensemble": ["mean"],
}


@pytest.mark.parametrize("arm", uncertainty.ARMS)
def test_one_run(arm):
    if arm == "ivon":
        pytest.importorskip("ivon")
    setting = DECAY | uncertainty.ARMS[arm].grid[0]
    line = uncertainty.run_one(run(arm, setting), {"mnist": ROW})
    assert line["status"] == "finished"
    assert list(line["predictions"]) == list(line["held_out"]) == WAYS[arm]
    assert all(0 <= own["accuracy"] <= 1 for own in line["predictions"].values())
    if "averaged" in WAYS[arm]:
        assert line["held_out"]["averaged"] != line["held_out"]["clean"]
    if arm == "ensemble":
        assert "weights" not in line
    else:
        assert len(line["weights"]["bits"]["row"]) == len(uncertainty.BITS)


def test_arms_take_equally_many_gradients():
    data = uncertainty.Images(replace(ROW, epochs=4))
    gradients = {
        arm: uncertainty.train(data.row, arm, setting | DECAY, 0, data).gradients
        for arm, setting in (
            ("plain", {}), ("nvrm", {"b": 0.01}), ("dropout", {"dropout": 0.5}),
            ("sam", {"rho": 0.05}), ("swa", {}),
        )
    }  # fmt: skip
    assert len(set(gradients.values())) == 1


@pytest.mark.parametrize("name", uncertainty.ROWS)
def test_dropout_is_before_linear_layers(name):
    row = uncertainty.ROWS[name]
    plain, dropped = (uncertainty.network(row, rate, 0) for rate in (0.0, 0.5))
    layers = [m for m in dropped.modules() if isinstance(m, (nn.Dropout, nn.Linear))]
    kinds = [type(layer).__name__ for layer in layers]
    assert "Dropout" in kinds
    assert kinds[-2:] == ["Dropout", "Linear"]
    shape = (2, 3, 32, 32) if name == "cifar10" else (2, 1, 28, 28)
    x = torch.rand(shape)
    assert torch.equal(plain.eval()(x), dropped.eval()(x))


def test_swa_is_the_mean_of_the_last_epochs(monkeypatch):
    seen, average = [], torch.optim.swa_utils.AveragedModel.update_parameters

    def update(self, model):
        seen.append([p.detach().clone() for p in model.parameters()])
        average(self, model)

    monkeypatch.setattr(torch.optim.swa_utils.AveragedModel, "update_parameters", update)
    data = uncertainty.Images(replace(ROW, epochs=8))
    model = uncertainty.train(data.row, "swa", DECAY, 0, data).model
    assert len(seen) == 2
    for p, *parts in zip(model.parameters(), *seen, strict=True):
        assert torch.allclose(p, torch.stack(parts).mean(0), atol=1e-6)


def choice_line(arm, setting, held_out, **changes):
    own = {"row": "mnist", "arm": arm, "setting": setting, "seed": 1000, "choice": True}
    return {"run": own, "status": "finished", "held_out": held_out} | changes


PLAIN = [
    choice_line("plain", {"weight_decay": decay}, {"clean": loss})
    for decay, loss in ((0.0, 0.3), (1e-4, 0.2), (1e-3, 0.4))
]


def test_settings_are_chosen_by_the_arms_own_prediction():
    def line(b, clean, averaged, decay=1e-4, **changes):
        losses = {"clean": clean, "averaged": averaged}
        return choice_line("nvrm", {"b": b, "weight_decay": decay}, losses, **changes)

    lines = [*PLAIN, line(0.01, 0.1, 0.5), line(0.02, 0.3, 0.4), line(0.03, 0.01, None)]
    lines.append(line(0.05, 0.0, 0.0, status="diverged"))
    lines.append(line(0.05, 0.0, 0.0, decay=0.0))  # not the weight decay of plain training
    assert uncertainty.chosen(ROW, "nvrm", lines) == {"b": 0.02, "weight_decay": 1e-4}


def test_all_arms_have_the_weight_decay_of_plain_training():
    for arm in uncertainty.ARMS:
        for own in uncertainty.choice_runs(ROW, arm, PLAIN) if arm != "plain" else ():
            assert own["setting"]["weight_decay"] == 1e-4


def test_temperature_scaling_undoes_overconfidence():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=generator, dtype=torch.float64)
    labels = logits.softmax(1).multinomial(1, generator=generator).squeeze(1)
    overconfident = (2.5 * logits).softmax(1)
    temperature = uncertainty.best_temperature(overconfident, labels)
    assert temperature == pytest.approx(2.5, rel=0.1)
    assert torch.allclose(uncertainty.scale(overconfident, 2.5), logits.softmax(1))


def test_runs_come_in_order_and_have_every_arm_and_seed(tmp_path):
    results = Results(tmp_path / "lines.jsonl")
    seen = []
    while left := uncertainty.left_runs(ROW, results):
        seen.append(left)
        for own in left:
            line = {"run": own, "status": "finished", "held_out": {"clean": 0.1}}
            results.add({"key": uncertainty.key(own)} | line)
    plain, others, runs = seen
    assert {own["arm"] for own in plain} == {"plain"}
    assert all(own["choice"] for own in plain + others)
    assert len(runs) == len(uncertainty.ARMS) * len(ROW.seeds)
    assert {own["arm"] for own in runs} == set(uncertainty.ARMS)
    assert len({uncertainty.key(own) for own in runs}) == len(runs)
    assert uncertainty.CHOICE_SEED not in {own["seed"] for own in runs}
    same = {own["arm"]: own["setting"] for own in runs}
    assert same["swa"] == same["ensemble"] == same["plain"]


def synthetic(ours, plain, dropout):
    """Lines with given log losses, one per seed."""
    lines = []
    for arm, way, values in (
        ("nvrm", "averaged", ours), ("plain", "clean", plain), ("dropout", "averaged", dropout)
    ):  # fmt: skip
        for seed, value in enumerate(values):
            numbers = dict.fromkeys(uncertainty_tables.PREDICTION_COLUMNS, 0.5)
            numbers |= {"log_loss": value, "bins": [[0.5, 0.5, 10]], "coverage": [0.9] * 17}
            predictions = {way: numbers}
            lines.append({"run": run(arm, {}, seed=seed), "status": "finished"})
            lines[-1]["predictions"] = predictions
    return lines


def test_tables_and_differences(tmp_path):
    lines = synthetic([0.10, 0.11, 0.12], [0.20, 0.21, 0.22], [0.10, 0.11, 0.13])
    text = uncertainty_tables.tables(lines, {"mnist": ROW})
    assert "| NVRM, averaged | 50.0 ± 0.0 | 0.5000 ± 0.0000 | 0.110 ± 0.010 |" in text
    same, ours = "+0.0000 (+0.0000 to +0.0000)", "-0.0033 (-0.0177 to +0.0110)"
    assert f"| MC dropout | {same} | {ours} | {same} | {same} | {same} |" in text
    assert "| **-0.1000 (-0.1000 to -0.1000)** |" in text  # the same difference for every seed
    assert "n = 3.\n" in text
    more = uncertainty_tables.tables(lines, {"mnist": replace(ROW, seeds=(0, 1, 2, 3, 4))})
    assert "n = 3; preliminary, 5 are planned.\n" in more
    short = uncertainty_tables.compared(lines, {"mnist": ROW})
    assert "| NVRM, averaged | 0.5000 ± 0.0000 | 0.110 ± 0.010 |" in short
    assert "| plain | 0.5000 ± 0.0000 | **0.210 ± 0.010** |" in short
    assert "| MC dropout | 0.5000 ± 0.0000 | 0.113 ± 0.015 |" in short
    assert "| SAM | – | – |" in short
    uncertainty_tables.pictures(lines, {"mnist": ROW}, tmp_path)
    assert (tmp_path / "uncertainty-mnist.png").stat().st_size > 10_000


def test_differences_of_weights_are_paired_by_seed():
    """Lines may come in any order."""
    lines = synthetic([0.1, 0.2], [0.1, 0.2], [0.1, 0.2])
    for line in lines:
        seed, arm = line["run"]["seed"], line["run"]["arm"]
        value = 0.5 + 0.2 * seed + (0.05 if arm == "nvrm" else 0)
        line["weights"] = {
            "attacked": value,
            "bits": {"tensor": [value] * 7, "row": [value] * 7},
            "kernels": {"8": value, "4": value},
            "bit_flips": [value, 0.5],
            "analog": {"multiplicative": value, "additive": value},
        }
    text = uncertainty_tables.tables(lines[::-1][:3] + lines[:3], {"mnist": ROW})
    gain, none = "**+5.0 (+5.0 to +5.0)**", "+0.0 (+0.0 to +0.0)"
    cells = [gain] * 9 + [none] + [gain] * 2
    assert f"| NVRM minus plain | {' | '.join(cells)} |" in text
    assert f"| NVRM | {' | '.join(['65.0 ± 14.1'] * 9)} | 50.0 ± 0.0 |" in text


def test_committed_tables_are_those_of_the_lines():
    path = uncertainty.RESULTS / "uncertainty.jsonl"
    lines = list(Results(path).lines().values())
    text = uncertainty_tables.tables(lines, uncertainty.ROWS)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == text
