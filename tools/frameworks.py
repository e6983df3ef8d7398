"""Which frameworks were tried, and what works: runs the tests and writes a table of them.

Each cell of the table names tests. It says "yes" if all of them pass, "**no**" if one fails, or a
number that leads to a sentence below the table. Run it in the environment of ``make integrations``:
``python tools/frameworks.py --write``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- made by tools/frameworks.py -->", "<!-- end -->"
COLUMNS = ("evaluation", "checkpoint", "resume", "accumulation", "clipping", "AMP", "auto")
LIGHTNING = "test_evaluation_and_checkpoints_are_clean"
TRAINER = "test_every_evaluation_and_checkpoint_is_clean"
ACCELERATE = "test_evaluation_and_saved_weights_are_clean"
SKORCH = FASTAI = "test_every_evaluation_is_clean"
RAY = "test_evaluation_and_checkpoints_are_clean_also_after_a_restart"


@dataclass(frozen=True)
class Why:
    """Why a cell is not "yes"."""

    sentence: str


OWN_LOOP = Why("The loop is your own: call `optimizer.report_loss(loss)` before the backward pass.")
RAY_LOOP = Why("The loop is your own: as in plain torch.")
PEFT = Why("Lightning, the Trainer or Accelerate trains the model: see their rows.")


@dataclass(frozen=True)
class Row:
    """A framework: its package, the file of its tests, and for each column the tests or a reason.

    A test is the beginning of a name such as "test_resume" or "test_resume[bf16"; one in another
    file is "test_file::test_resume".
    """

    name: str
    package: str
    file: str
    cells: dict[str, list[str] | Why]


ROWS = [
    Row(
        "plain torch",
        "torch",
        "tests/test_optim_model.py",
        {
            "evaluation": ["test_everybody_sees_clean_weights"],
            "checkpoint": ["test_everybody_sees_clean_weights"],
            "resume": ["test_resume["],
            "accumulation": ["test_micro_batches_share_the_noise_of_a_step"],
            "clipping": ["tests/test_optim_auto.py::test_micro_batches_scaling_and_clipping"],
            "AMP": ["tests/test_clean_at_rest.py::test_every_row_is_clean[AMP"],
            "auto": ["tests/test_optim_auto.py::test_micro_batches_scaling_and_clipping"],
        },
    ),
    Row(
        "Lightning",
        "lightning",
        "tests/integrations/test_lightning.py",
        {
            "evaluation": [
                f"{LIGHTNING}[automatic",
                f"{LIGHTNING}[manual",
                "test_test_and_predict",
            ],
            "checkpoint": [f"{LIGHTNING}[automatic", "test_checkpoints_between_epochs"],
            "resume": ["test_resume_equals_an_uninterrupted_run"],
            "accumulation": [f"{LIGHTNING}[accumulation", f"{LIGHTNING}[manual, accumulation"],
            "clipping": [f"{LIGHTNING}[clipping"],
            "AMP": [f"{LIGHTNING}[bf16", f"{LIGHTNING}[16-mixed"],
            "auto": ["test_auto_needs_no_callback", "test_b_and_delta_are_logged"],
        },
    ),
    Row(
        "Hugging Face Trainer",
        "transformers",
        "tests/integrations/test_huggingface.py",
        {
            "evaluation": [f"{TRAINER}[plain"],
            "checkpoint": [f"{TRAINER}[plain", "test_load_best_model_at_end_loads_clean_weights"],
            "resume": ["test_resumed_run_equals_an_uninterrupted_one"],
            "accumulation": [f"{TRAINER}[accumulation"],
            "clipping": [f"{TRAINER}[clipping"],
            "AMP": [f"{TRAINER}[bf16"],
            "auto": [TRAINER, "test_b_is_in_the_loggers"],
        },
    ),
    Row(
        "Accelerate",
        "accelerate",
        "tests/integrations/test_accelerate.py",
        {
            "evaluation": [ACCELERATE],
            "checkpoint": [ACCELERATE],
            "resume": ["test_a_loaded_state_continues_to_the_bit"],
            "accumulation": [ACCELERATE],
            "clipping": [ACCELERATE],
            "AMP": [f"{ACCELERATE}[0.05-bf16", f"{ACCELERATE}[auto-bf16"],
            "auto": OWN_LOOP,
        },
    ),
    Row(
        "PEFT, LoRA",
        "peft",
        "tests/integrations/test_peft.py",
        {
            "evaluation": ["test_saved_adapters_are_clean", "test_merged_model_is_clean"],
            "checkpoint": ["test_saved_adapters_are_clean"],
            **dict.fromkeys(("resume", "accumulation", "clipping", "AMP", "auto"), PEFT),
        },
    ),
    Row(
        "skorch",
        "skorch",
        "tests/integrations/test_skorch.py",
        {
            "evaluation": [f"{SKORCH}[plain", "test_grid_search_scores_clean_weights"],
            "checkpoint": [f"{SKORCH}[plain", "test_checkpoint_loads_the_best_weights_clean"],
            "resume": ["test_load_init_state_continues_to_the_bit"],
            "accumulation": [f"{SKORCH}[accumulation"],
            "clipping": [f"{SKORCH}[clipping"],
            "AMP": [f"{SKORCH}[bf16"],
            "auto": [SKORCH],
        },
    ),
    Row(
        "fastai",
        "fastai",
        "tests/integrations/test_fastai.py",
        {
            "evaluation": [f"{FASTAI}[plain", f"{FASTAI}[one cycle"],
            "checkpoint": ["test_saved_and_exported_models_are_clean"],
            "resume": ["test_loaded_learner_continues_to_the_bit"],
            "accumulation": [f"{FASTAI}[accumulation"],
            "clipping": [f"{FASTAI}[clipping"],
            "AMP": Why("fastai has mixed precision for CUDA only, and our tests run on a CPU."),
            "auto": [FASTAI],
        },
    ),
    Row(
        "Ray Train",
        "ray",
        "tests/integrations/test_ray_train.py",
        {
            "evaluation": [RAY],
            "checkpoint": [RAY],
            "resume": [RAY, "test_auto_is_alike_on_both_workers_also_after_a_restart"],
            "accumulation": RAY_LOOP,
            "clipping": [RAY],
            "AMP": RAY_LOOP,
            "auto": OWN_LOOP,
        },
    ),
]


def place(row: Row, test: str) -> tuple[str, str]:
    """File and beginning of the name of a test."""
    file, separator, name = test.rpartition("::")
    return (file, name) if separator else (row.file, test)


def tests_of(rows: list[Row]) -> list[tuple[str, str]]:
    """File and beginning of the name of all tests."""
    cells = [(row, cell) for row in rows for cell in row.cells.values()]
    return [place(row, test) for row, cell in cells if isinstance(cell, list) for test in cell]


def outcomes(tests: list[tuple[str, str]]) -> dict[str, dict[str, bool]]:
    """Whether each test passed, by file and name."""
    found: dict[str, dict[str, bool]] = {}
    for file in sorted({file for file, _ in tests}):
        names = sorted({name.partition("[")[0] for other, name in tests if other == file})
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", file, "-k", " or ".join(names)]
            subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False)  # noqa: S603
            cases = ET.parse(report).iter("testcase")  # noqa: S314 - we have just written it
            bad = ("failure", "error", "skipped")
            found[file] = {
                case.get("name", ""): all(case.find(kind) is None for kind in bad) for case in cases
            }
    return found


def table(rows: list[Row], found: dict[str, dict[str, bool]]) -> str:
    """The table, and below it the sentences of what does not work."""
    lines = ["| | version | " + " | ".join(COLUMNS) + " |"]
    lines.append("| --- | --- |" + " :---: |" * len(COLUMNS))
    reasons: list[str] = []
    for row in rows:
        cells = []
        for column in COLUMNS:
            cell = row.cells[column]
            if isinstance(cell, Why):
                if cell.sentence not in reasons:
                    reasons.append(cell.sentence)
                cells.append(f"({reasons.index(cell.sentence) + 1})")
                continue
            results = []
            for file, start in (place(row, test) for test in cell):
                named = [ok for name, ok in found[file].items() if name.startswith(start)]
                results.append(bool(named) and all(named))
            cells.append("yes" if all(results) else "**no**")
        release = version(row.package).partition("+")[0]
        lines.append(f"| {row.name} | {release} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {sentence}" for number, sentence in enumerate(reasons, 1)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the document")
    options = parser.parse_args()
    made = table(ROWS, outcomes(tests_of(ROWS)))
    print(made)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
