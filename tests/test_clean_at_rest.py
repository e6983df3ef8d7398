"""The table of who sees noise, with the real parts of torch."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import clean_at_rest

PAGE = clean_at_rest.PAGE.read_text()
SINGLE = [row for row in clean_at_rest.ROWS if not row.distributed]
quiet = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)


@pytest.fixture(scope="module")
def found():
    """What each row of this process shows, worked out once: the two that compile take seconds."""
    return {}


@pytest.fixture
def outcome(found, monkeypatch):
    """The program's own function, which remembers what it found."""
    work_out = clean_at_rest.outcome

    def remembered(row):
        if row.name not in found:
            found[row.name] = work_out(row)
        return found[row.name]

    monkeypatch.setattr(clean_at_rest, "outcome", remembered)
    return remembered


@quiet
@pytest.mark.parametrize("row", SINGLE, ids=lambda row: row.name)
def test_every_row_is_clean(row, outcome):
    assert all(outcome(row).values())


@quiet
@pytest.mark.distributed
def test_the_page_has_the_table_that_the_program_prints(outcome, monkeypatch, capsys):
    """Rows of several processes are worked out here, by processes that the program starts."""
    monkeypatch.setattr(sys, "argv", [clean_at_rest.__file__])
    clean_at_rest.main()
    made = capsys.readouterr().out.strip()
    assert "no" not in made.replace("noise", "")
    assert made in PAGE


def test_the_program_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [clean_at_rest.__file__, "--help"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(clean_at_rest.__file__, run_name="__main__")
    assert end.value.code == 0
    assert "--write" in capsys.readouterr().out


@quiet
def test_the_table_can_say_no():
    found = clean_at_rest.outcome(SINGLE[0], known=False)
    assert not any(found[key] for key in found if key != "noise in training")
