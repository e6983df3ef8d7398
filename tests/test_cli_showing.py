"""``neuvar list``, ``report`` and ``demo``."""

import os
import re
import subprocess
import sys
import webbrowser

import pytest

from neuvar.cli import main
from neuvar.cli import run as run_command
from neuvar.engine import Results
from tests.cli_experiments import MADE, alone
from tests.test_cli_run import Engine, line


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Only the tiny experiments, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with alone():
        yield tmp_path


def neuvar(capsys, *arguments):
    """Exit code and what was said on both streams."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


def measured(run, accuracy):
    found = {"test_accuracy": [accuracy]}
    return line(run) | {"curves": found, "last": {"test_accuracy": accuracy}, "best": {}}


@pytest.fixture
def results(here):
    """Half of the results of one experiment, at two scales."""
    for scale in ("smoke", "cpu"):
        file = Results(here / "results" / f"{scale}.jsonl")
        for run in MADE["labels"].runs(scale, 2)[1:]:
            file.add(measured(run, 0.5 + run.b + run.seed / 10))
    return here / "results"


def test_list_counts_what_is_finished(capsys, results):
    code, out, err = neuvar(capsys, "list")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["name", "number", "title", "smoke", "cpu", "paper"]
    assert rows[0].split() == ["labels", "8", "The", "title", "of", "labels", "3/4", "3/6", "0/20"]
    assert rows[1].split()[-3:] == ["0/3", "0/4", "0/11"]  # the shared run is the missing one
    assert len({len(row) for row in [head, *rows[: len(MADE)]]}) == 1
    _, out, _ = neuvar(capsys, "list", "--results", "elsewhere")
    assert "0/4" in out
    assert "3/4" not in out


def test_list_shows_one_in_full(capsys, results):
    code, out, _ = neuvar(capsys, "list", "labels", "--scale", "smoke")
    assert code == 0
    for words in (
        "labels (8): The title of labels\n",
        "The claim of labels.\n(section 9)\n",
        "\nsmoke: 4 runs\n  tiny smoke networks\n\ncpu: 6 runs\n  tiny cpu networks\n",
        "all with data=mnist-excerpt model=mlp images=200 ",
    ):
        assert words in out
    *_, head, plain, noisy = out.splitlines()
    assert head.split() == ["trials", "finished"]
    assert plain.split() == ["sgd", "2", "1"]
    assert noisy.split() == ["nvrm-sgd", "b=0.05", "2", "2"]
    assert "seed" not in out
    assert "label_noise=pair noise_rate=0.4" in " ".join(out.split())
    assert neuvar(capsys, "list", "labels", "tasks")[1].count("runs at scale cpu") == 2
    code, _, err = neuvar(capsys, "list", "label")
    assert code == 2
    assert err.count("\n") == 1


def test_core_commands_need_no_rich(capsys, results, monkeypatch):
    for name in ("rich", "rich.console", "rich.progress", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    assert neuvar(capsys, "list")[0] == 0
    assert neuvar(capsys, "report")[0] == 0
    monkeypatch.setattr(run_command, "sweep", Engine())
    assert neuvar(capsys, "run", "labels")[0] == 0


def test_report_tells_verdicts_and_names_the_page(capsys, results, here):
    code, out, err = neuvar(capsys, "report")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["no.", "experiment", "verdict", "scale", "n", "because"]
    assert lines[1].startswith("8    labels      (?) preliminary: undecided so far  cpu    1–2  ")
    assert lines[1].endswith("3 results say little.")
    assert "not run" in lines[2]
    assert lines[-1] == "written: out/report/index.html"
    assert (here / "out" / "report" / "index.html").exists()


def test_report_of_some_scales_elsewhere(capsys, results, here):
    options = "report labels --scale smoke cpu --out page --results results"
    code, out, _ = neuvar(capsys, *options.split())
    assert code == 0
    rows = out.splitlines()[1:3]
    assert ["undecided so far  cpu " in rows[0], "numbers only" in rows[1]] == [True, True]
    assert "  smoke  " in rows[1]
    assert len(out.splitlines()) == 4
    assert (here / "page" / "index.html").exists()


def test_report_renews_documents(capsys, results, here):
    document = here / "README.md"
    document.write_text(
        "# x\n<!-- begin results labels cpu -->\nold\n<!-- end results labels cpu -->\n"
        "<!-- begin results tasks cpu -->\n<!-- end results tasks cpu -->\n"
    )
    code, out, _ = neuvar(capsys, "report", "labels", "--into", "README.md")
    assert code == 0
    assert "updated: README.md\n" in out
    text = document.read_text()
    assert "| nvrm-sgd |" in text
    assert "old" not in text
    assert "neuvar run tasks --scale cpu" in text
    assert "unchanged: README.md" in neuvar(capsys, "report", "--into", "README.md")[1]
    code, _, err = neuvar(capsys, "report", "--into", "missing.md")
    assert code == 2
    assert "missing.md" in err


def test_report_opens_a_browser_if_asked(capsys, results, here, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    neuvar(capsys, "report")
    assert opened == []
    neuvar(capsys, "report", "--open")
    assert opened == [(here / "out" / "report" / "index.html").as_uri()]


def test_report_without_results_says_how_to_get_some(capsys, here):
    code, out, err = neuvar(capsys, "report", "tasks")
    assert (code, out) == (2, "")
    assert err == "neuvar: results has no results to report; run them with: neuvar run tasks\n"
    assert neuvar(capsys, "report", "--results", "no")[2].endswith("neuvar run all\n")
    assert neuvar(capsys, "report", "tasks", "--scale", "smoke")[2].endswith(
        "tasks --scale smoke\n"
    )
    assert not (here / "out").exists()


def test_a_missing_package_gets_a_sentence(capsys, results, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = neuvar(capsys, "report")
    assert code == 2
    assert err.startswith("neuvar: ")
    assert 'pip install "neuvar[plot]"' in err
    assert err.count("\n") == 1


class Measuring(Engine):
    """Stands in for the engine and records accuracies."""

    def __call__(self, runs, results, spec, **options):
        summary = super().__call__(runs, results, spec, **options)
        keys = [run.key for run in runs]
        results.remove(keys)
        for run in runs:
            results.add(measured(run, 0.5 + run.b))
        return summary


def test_demo_shows_both_results_and_names_the_page(capsys, here, monkeypatch):
    engine = Measuring()
    monkeypatch.setattr(run_command, "sweep", engine)
    code, out, err = neuvar(capsys, "demo", "--workers", "1", "--trials", "2")
    assert (code, err) == (0, "")
    assert engine.options["workers"] == 1
    assert {run.data for run in engine.runs} == {"mnist-excerpt"}
    assert "training 6 small networks" in out
    for name in ("forgetting", "pair-flips"):
        assert f"\nThe title of {name}\n" in out
    rows = [row.split() for row in out.splitlines()]
    assert ["nvrm-sgd", "55.0", "±", "0.0", "%", "2"] in rows
    assert ["sgd", "50.0", "±", "0.0", "%", "2"] in rows
    assert out.endswith("written: out/demo/index.html; open it in a browser\n")
    assert (here / "out" / "demo" / "index.html").exists()
    assert len(Results(here / "out" / "demo" / "results" / "smoke.jsonl").lines()) == 6

    engine.runs = []
    code, out, _ = neuvar(capsys, "demo")
    assert (code, engine.runs) == (0, [])
    assert "these are earlier results; neuvar demo --fresh trains again\n" in out
    assert "55.0 ± 0.0 %" in out
    code, out, _ = neuvar(capsys, "demo", "--fresh", "--out", "out/demo")
    assert (code, len(engine.runs)) == (0, 6)
    assert "earlier" not in out


def test_a_demo_that_is_stopped_goes_on(capsys, monkeypatch):
    engine = Measuring()
    engine.stop_after = 2
    monkeypatch.setattr(run_command, "sweep", engine)
    code, _, err = neuvar(capsys, "demo", "--fresh")
    assert code == 130
    assert err.endswith("Resume with: neuvar demo\n")


@pytest.mark.slow
def test_the_real_demo_needs_nothing_but_the_package(here):
    """It shows both effects and writes the page; the second time it only shows them."""
    nowhere = os.environ | {"NEUVAR_CACHE": str(here / "cache"), "NO_PROXY": "", "COLUMNS": "100"}
    command = [sys.executable, "-m", "neuvar", "demo", "--trials", "1"]
    done = [
        subprocess.run(command, env=nowhere, cwd=here, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (found.stdout for found in done)
    assert [found.stderr for found in done] == ["", ""]
    assert "4 finished, in " in first
    assert "started" not in second
    table = first[first.index("\n\n") + 1 : first.index("\nwritten:")]
    assert table in second
    for method in ("Adam ", "NVRM-Adam, b = 0.03", "SGD ", "NVRM-SGD, b = 0.05"):
        assert method in table
    for words in (
        "Accuracy on the first task after all five:",
        "Wrong labels that were memorized:",
    ):
        said = rf"\n  {words} ([\d.]+ %) without noise, ([\d.]+ %) with noise\.\n"
        plain, noisy = re.search(said, table).groups()
        assert any(plain in row and "NVRM" not in row for row in table.split("\n  "))
        assert any(noisy in row and "NVRM" in row for row in table.split("\n  "))
    assert (here / "out" / "demo" / "index.html").stat().st_size > 10_000
    assert not (here / "cache").exists()
    # Over 6 seeds and 2 instruction sets, noise adds 0.19 ± 0.02 despite the wrong labels.
    lines = Results(here / "out" / "demo" / "results" / "smoke.jsonl").lines().values()
    plain, noisy = sorted(
        (line["run"]["b"], line["last"]["test_accuracy"])
        for line in lines
        if "test_accuracy" in line["last"]
    )
    assert noisy[1] > plain[1] + 0.05
