"""The benchmark of flat minima: what is measured, and the table."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import flatness
import moved_weights
from neuvar.data import mnist_excerpt
from neuvar.engine import Results


def line(method, seed, b):
    run = {"method": method, "setting": {}, "seed": seed}
    last = {"b": b, "relative_b": 10 * b, "train": 1.0, "test": 0.95}
    return {"key": moved_weights.key(run), "run": run, "status": "finished", "last": last}


def test_table_pairs_methods_by_seed(tmp_path):
    results = Results(tmp_path / "flatness_methods.jsonl")
    for seed in range(2):
        results.add(line("Adam", seed, 0.05 + 0.01 * seed))
        results.add(line("NVRM-Adam", seed, 0.08 + 0.02 * seed))
    results.add(line("SAM", 0, 0.06))
    results.add(line("SAM", 7, 0.06))
    text = "\n".join(flatness.table(tmp_path))
    assert "| Adam | 1 × | 2 | 0.0550 ± 0.0071 | 0.550 ± 0.071 | 100.0 ± 0.0 % | 95.0" in text
    assert "| SAM | 2 × | 2 | 0.0600 ± 0.0000 | 0.600 ± 0.000 |" in text
    assert "| SAM | +0.0200 | +0.200 |" in text
    assert "| Adam | +0.0350 (" in text
    assert "dropout" not in text


def test_a_run_measures_the_trained_network(monkeypatch):
    excerpt = mnist_excerpt().train
    part = excerpt.images[:60].flatten(1) / 255, excerpt.labels[:60]
    monkeypatch.setattr(flatness, "images", lambda: {"train": part, "test": part})
    monkeypatch.setattr(moved_weights, "EPOCHS", 2)
    monkeypatch.setattr(flatness, "DRAWS", 4)
    found = flatness.run_one({"method": "Adam", "setting": {}, "seed": 0})["last"]
    assert found["train"] == pytest.approx(found["test"])
    assert 0 < found["b"] < found["relative_b"]
