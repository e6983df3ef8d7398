"""The table of who sees noise, with the real parts of torch."""

from __future__ import annotations

import subprocess
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


@quiet
@pytest.mark.parametrize("row", SINGLE, ids=lambda row: row.name)
def test_every_row_is_clean(row):
    assert all(clean_at_rest.outcome(row).values())


@pytest.mark.distributed
def test_the_page_has_the_table_that_the_program_prints():
    command = [sys.executable, clean_at_rest.__file__]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert "no" not in made.replace("noise", "")
    assert made in PAGE


@quiet
def test_the_table_can_say_no():
    found = clean_at_rest.outcome(SINGLE[0], known=False)
    assert not any(found[key] for key in found if key != "noise in training")
