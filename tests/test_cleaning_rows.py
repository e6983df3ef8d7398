"""The benchmark of all cleaning methods: its plan, one small row, and that it continues."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("cleanlab")
import cleaning_rows as rows  # noqa: E402
from neuvar.engine import Results  # noqa: E402

OPTIONS = {"cifar10n": None, "hausa": None, "workers": 1}


def test_every_row_has_every_method_with_every_seed():
    jobs = rows.jobs(list(rows.ROWS), 5)
    of_texts = sum(row.data in rows.TEXTS for row in rows.ROWS.values())
    per_seed = len(rows.ROWS) * len(rows.METHODS) - of_texts * len(rows.NOT_FOR_TEXT)
    assert len(jobs) == per_seed * 5
    assert {job["row"] for job in jobs[:per_seed]} == set(rows.ROWS)
    tiny = rows.jobs(["wine"], 1, tiny=True)
    assert tiny[0] not in rows.jobs(["wine"], 1)  # small runs are not taken for real ones


def test_one_row_by_all_methods(tmp_path):
    results = Results(tmp_path / "cleaning_rows.jsonl")
    for job in rows.jobs(["wine"], 1, tiny=True):
        line = rows.run_job(job, OPTIONS)
        last = line["last"]
        assert 0 <= last["average_precision"] <= 1
        assert last["wrong"] == pytest.approx(0.15, abs=0.02)
        assert np.isnan(last["stated_precision"]) == (
            job["method"] in ("cleanlab", "AUM", "neighbours")
        )
        results.add(line)
    table = rows.table(results.path)
    assert table.count("| wine, pair 15% |") == len(rows.METHODS) + 1
    assert "**" in table


def test_finished_jobs_are_skipped(tmp_path, monkeypatch):
    jobs = rows.jobs(["wine"], 1, tiny=True)[-1:]
    results = Results(tmp_path / "cleaning_rows.jsonl")
    results.add(rows.run_job(jobs[0], OPTIONS))
    monkeypatch.setattr(rows, "run_job", lambda *_: pytest.fail("it runs again"))
    rows.run_missing(jobs, results, OPTIONS)
    assert len(results.lines()) == 1


def test_neighbours_do_not_see_the_label_of_an_example_itself():
    job = rows.jobs(["wine"], 1, tiny=True)[0]
    row = rows.ROWS["wine"]
    task = rows.read_task(row, job["seed"], OPTIONS)
    issues, trainings = rows.with_neighbours(task, row, {})
    assert trainings == 0
    assert issues.probabilities.sum(1) == pytest.approx(1)
    own = issues.probabilities[np.arange(len(issues)), issues.labels]
    assert own.min() < 0.05
