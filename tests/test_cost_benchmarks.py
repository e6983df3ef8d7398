"""The benchmarks of variability and of predictions share one command."""

import json
import sys
from pathlib import Path

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import predicting
import variability


@pytest.mark.parametrize("benchmark", [variability, predicting])
def test_a_row_is_measured_without_a_contender(benchmark, monkeypatch, capsys, tmp_path):
    case = variability.Case("tiny", lambda: nn.Linear(4, 10), (8, 4), 1e9, without=("together",))
    other = variability.Case("other", lambda: pytest.fail("not asked for"), (8, 4))
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--only", "tiny", "--out", str(path)])
    timed = variability.contenders(benchmark.plain, benchmark.loop, benchmark.ours)
    variability.command("", [case, other], timed)
    (title, found), *others = json.loads(path.read_text())["cases"].items()
    assert (title, others) == ("tiny", [])
    assert found["rounds"] >= 5
    assert found["met"] is True
    assert list(found["ratios"]) == ["loop", "one by one", "ours"]
    head, _, row = capsys.readouterr().out.splitlines()
    names = [name.strip() for name in head.split("|")]
    cells = [cell.strip() for cell in row.split("|")]
    assert len(cells) == len(names)
    assert cells[names.index("together")] == ""
    assert "×" in cells[names.index("ours")]
