"""The benchmark of b for many networks: its gains, its table and picture, and a tiny run."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import valleys


def line(problem="mlp", labels="clean", seed=0, scale="none", b=0.0, test=None):
    run = {"problem": problem, "labels": labels, "seed": seed, "scale": scale, "b": b}
    last = {} if test is None else {"test": test, "fitted": 1.0}
    return {"key": valleys.key(run), "run": run, "last": last}


LINES = [
    line(test=0.9),
    line(seed=1, test=0.8),
    line(scale="filter", b=0.1, test=0.92),
    line(scale="filter", b=0.1, seed=1, test=0.81),
    line(scale="filter", b=0.4, test=None),
    line("fine-tuned", test=0.7),
    line("fine-tuned", scale="filter", b=0.1, test=0.6),
    line("fine-tuned", scale="filter", b=0.4, test=None),
    line("lstm", scale="filter", b=0.1, test=0.5),  # there is nothing to compare it with
]


def test_gains_are_paired_by_seed_and_a_diverged_run_has_the_accuracy_of_chance():
    found = valleys.gains(LINES)["clean", "filter"]
    assert found["mlp"][0.1] == pytest.approx([2.0, 1.0])
    assert found["mlp"][0.4] == pytest.approx([-80.0])
    assert found["fine-tuned"][0.4] == pytest.approx([-50.0])  # one of five classes
    assert "lstm" not in found


def test_the_table_names_the_worst_network():
    rows = valleys.table(LINES).splitlines()[2:]
    assert rows == [
        "| clean | filter | 0.1 | -4.2 | ResNet-10, fine-tuned -10.0 | 1 |",
        "| clean | filter | 0.4 | -65.0 | MLP -80.0 | 1 |",
    ]


def test_the_picture_is_drawn(tmp_path):
    valleys.draw(LINES, tmp_path / "valleys.png")
    assert (tmp_path / "valleys.png").stat().st_size > 10_000


def test_every_run_is_planned_once():
    runs = [valleys.key(run) for run in valleys.planned()]
    assert len(set(runs)) == len(runs) == 3 * 7 * 2 * 21


@pytest.mark.parametrize("scale", ["none", *valleys.SCALES])
@pytest.mark.parametrize("name", ["mlp", "lstm", "transformer"])
def test_a_tiny_run(name, scale):
    small = {"data": "mnist-excerpt", "images": 60, "test_images": 20, "epochs": 1}
    problems = {name: replace(valleys.PROBLEMS[name], **small)}
    run = {"problem": name, "labels": "pair", "seed": 0, "scale": scale, "b": 0.01}
    found = valleys.run_one(run | ({"b": 0.0} if scale == "none" else {}), problems)
    assert found["status"] == "finished"
    assert 0 <= found["last"]["test"] <= 1
