"""``neuvar run my_experiment.py``: a user's own experiment through run, resume, list and report."""

import shutil
from pathlib import Path

import pytest

from neuvar.cli import main
from neuvar.cli.run_selection import find_experiments
from neuvar.engine import Results
from neuvar.experiments import EXPERIMENTS, ExperimentFile
from neuvar.models import NETWORKS

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_experiment.py"
SMALL = """
from neuvar.experiments import Experiment, Table, Training, Verdict
EXPERIMENT = Experiment(
    title="t", sentence="s", runs=lambda scale, trials: [Training(data="mnist-excerpt")],
    table=lambda results: Table((), ()), check=lambda results: Verdict("undecided", "why"),
)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder; networks that a file registers are removed again."""
    monkeypatch.chdir(tmp_path)
    known = dict(NETWORKS)
    yield tmp_path
    NETWORKS.clear()
    NETWORKS.update(known)


def neuvar(capsys, words):
    code = main(words.split())
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_the_example_is_run_resumed_listed_and_reported(here, capsys):
    """Workers are processes of their own, and know the network that the file registers."""
    shutil.copy(EXAMPLE, here / "my_experiment.py")
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    some = "run my_experiment.py --scale smoke --only seed=0,1 --workers 2"
    code, out, err = neuvar(capsys, some)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2].startswith("4 finished, in ")
    assert out.endswith("see them with: neuvar report my_experiment.py --scale smoke\n")
    lines = Results(here / "results" / "smoke.jsonl").lines()
    assert {line["run"]["model"] for line in lines.values()} == {"narrow"}
    assert {line["parameters"] for line in lines.values()} == {784 * 64 + 64 + 64 * 10 + 10}
    code, out, err = neuvar(capsys, "run my_experiment.py --scale smoke --workers 1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2].startswith("2 finished, 4 finished before, in ")
    assert neuvar(capsys, "run my_experiment.py --scale smoke")[1].startswith("all 6 runs")
    _, out, _ = neuvar(capsys, "list my_experiment.py --scale smoke")
    assert out.startswith("my_experiment: A narrow network and wrong labels\n")
    assert out.splitlines()[-1].split() == ["nvrm-sgd", "b=0.05", "3", "3"]
    code, out, _ = neuvar(capsys, "report my_experiment.py --scale smoke")
    assert code == 0
    assert "my_experiment" in out
    page = (here / "out" / "report" / "index.html").read_text()
    assert "With 40 % wrong labels, NVRM-SGD has a higher test accuracy than SGD." in page
    assert "neuvar run my_experiment.py --scale smoke" in page
    assert (here / "out" / "report" / "figures" / "my_experiment-smoke.svg").exists()
    document = here / "mine.md"
    document.write_text(
        "<!-- begin results my_experiment smoke --><!-- end results my_experiment smoke -->"
    )
    code, out, _ = neuvar(capsys, "report my_experiment.py --scale smoke --into mine.md")
    assert (code, "updated: mine.md" in out) == (0, True)


def test_its_name_comes_from_the_file(here):
    (here / "deep").mkdir()
    (here / "deep" / "mine.py").write_text(SMALL)
    (experiment,) = find_experiments(["deep/mine.py", "deep/mine.py"])
    assert (experiment.name, experiment.command("smoke")) == (
        "mine",
        "neuvar run deep/mine.py --scale smoke",
    )
    every = find_experiments(["all", "deep/mine.py"])
    assert [e.name for e in every] == [*EXPERIMENTS, "mine"]
    assert "mine" not in EXPERIMENTS


def test_it_may_import_its_neighbours_and_is_executed_once(here):
    (here / "beside_it.py").write_text("TIMES = []\n")
    source = "from beside_it import TIMES\nTIMES.append(1)\n" + SMALL
    path = here / "mine.py"
    path.write_text(source)
    for _ in range(3):
        ExperimentFile.read("mine.py").load()
    import beside_it

    assert beside_it.TIMES == [1]
    path.write_text(source + "\n# changed\n")
    ExperimentFile.read("mine.py").load()
    assert beside_it.TIMES == [1, 1]


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("mine.py", None, "could not read the experiment file mine.py: No such file"),
        ("mine.py", b"\xff\xfe", "could not read the experiment file mine.py: "),
        ("mine.py", b"x = 1\n", "mine.py must define EXPERIMENT = Experiment(...)"),
        ("mine.py", b"x = 1\ny = z\n", "mine.py, line 2: NameError: name 'z' is not defined"),
        ("mine.py", b"x = 1\ny = = 2\n", "mine.py, line 2: SyntaxError: "),
        ("mine.py", b"import not_here\n", "mine.py, line 1: ModuleNotFoundError: "),
        ("split.py", SMALL.encode(), "split.py has the name of another experiment, split"),
    ],
)
def test_mistakes_get_one_sentence(here, capsys, name, source, sentence):
    if source is not None:
        (here / name).write_bytes(source)
    code, out, err = neuvar(capsys, f"run {name} --scale smoke")
    assert (code, out) == (2, "")
    assert err.startswith(f"neuvar: {sentence}")
    assert err.count("\n") == 1
    assert not (here / "results").exists()


def test_two_files_with_one_name_are_refused(here, capsys):
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "mine.py").write_text(SMALL)
    code, _, err = neuvar(capsys, "run a/mine.py b/mine.py")
    assert code == 2
    assert err == "neuvar: b/mine.py has the name of another experiment, mine; rename the file\n"
