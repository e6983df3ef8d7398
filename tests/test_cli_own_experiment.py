"""``neuvar run my_experiment.py``: a user's own experiment through run, resume, list and report."""

import re
import shutil
from pathlib import Path

import pytest

from neuvar.cli import main
from neuvar.cli.run_selection import find_experiments
from neuvar.engine import Results
from neuvar.engine.job import error_message
from neuvar.experiments import EXPERIMENTS, ExperimentFile
from neuvar.experiments.run_spec import as_dict
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
        (
            "mine.py",
            b"EXPERIMENT = {}",
            "mine.py must define EXPERIMENT = Experiment(...), got dict",
        ),
        ("mine.py", b"x = 1\ny = z\n", "mine.py, line 2: NameError: name 'z' is not defined"),
        ("mine.py", b"x = 1\ny = = 2\n", "mine.py, line 2: SyntaxError: invalid syntax\n"),
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


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            'data="mnist-excerp"',
            "data must be one of .*, got 'mnist-excerp'; did you mean mnist-ex",
        ),
        (
            'data="mnist", model="narow"',
            "model must be one of .*, narrow, got 'narow'; did you mean",
        ),
        ('data="mnist", optimizer="nvrm_sgd"', "optimizer must be .*; did you mean nvrm-sgd"),
        ('data="mnist", noise="gausian"', "noise must be one of .*; did you mean gaussian"),
        (
            'data="mnist", label_noise="pairs", noise_rate=0.1',
            "label_noise must be one of pair, .*; did you mean pair",
        ),
    ],
)
@pytest.mark.parametrize("option", ["", " --dry-run"])
def test_names_are_checked_before_the_first_run(here, capsys, wrong, sentence, option):
    source = 'from neuvar.models import NETWORKS\nNETWORKS["narrow"] = None\n' + SMALL
    (here / "mine.py").write_text(source.replace('data="mnist-excerpt"', wrong))
    code, out, err = neuvar(capsys, f"run mine.py --scale smoke{option}")
    assert (code, out) == (2, "")
    assert re.match(f"neuvar: {sentence}", err)
    assert err.count("\n") == 1


def test_a_name_without_its_ending_gets_a_hint(here, capsys):
    (here / "mine.py").write_text(SMALL)
    _, _, err = neuvar(capsys, "run mine")
    assert err.endswith("got 'mine'; did you mean mine.py?\n")


def test_an_error_is_placed_in_the_last_of_the_users_files(here):
    """Parts of an experiment may be in another file of its folder."""
    (here / "parts.py").write_text("def broken():\n    return 1 / 0\n")
    (here / "mine.py").write_text("import parts\n" + SMALL)
    file = ExperimentFile.read("mine.py")
    file.load()
    import parts

    with pytest.raises(ZeroDivisionError) as error:
        parts.broken()
    message = error_message(error.value, [file])
    assert message == "parts.py, line 2: ZeroDivisionError: division by zero"


def test_report_says_which_results_there_are(here, capsys):
    write_with_results(here, PARTS.replace("seed=seed", "seed=seed, lr=0.2"), "smoke")
    file = "neuvar: results/smoke.jsonl has 6 results, none of a run of"
    _, _, err = neuvar(capsys, "report mine.py --scale smoke")
    command = "neuvar run mine.py --scale smoke"
    assert err == f"{file} mine.py; were settings changed? Run it with: {command}\n"
    _, _, err = neuvar(capsys, "report --scale smoke")
    own = "neuvar report FILE.py --scale smoke"
    assert err == f"{file} the paper; for results of your own files: {own}\n"


def test_finished_runs_are_counted_with_those_that_diverged(here, capsys):
    write_with_results(here, PARTS, "smoke")
    results = Results(here / "results" / "smoke.jsonl")
    line = next(iter(results.lines().values()))
    results.remove([line["key"]])
    results.add(line | {"status": "diverged"})
    _, out, _ = neuvar(capsys, "run mine.py --scale smoke")
    assert out.startswith("all 6 runs are finished, 1 diverged; see them with: neuvar report")
    _, out, _ = neuvar(capsys, "run mine.py --scale smoke --only seed=1 b=0")
    assert out.startswith("the run is finished; see them with: neuvar report")


def test_without_settings_the_list_has_no_blank_lines(here, capsys):
    (here / "mine.py").write_text(SMALL)
    _, out, _ = neuvar(capsys, "list mine.py")
    assert "\n\nsmoke: 1 runs\ncpu: 1 runs\npaper: 1 runs\n\nruns at scale cpu\n" in out


def test_the_page_of_one_experiment_opens_with_its_title(here, capsys):
    write_with_results(here, PARTS.replace('title="t"', 'title="Lion on digits"'), "smoke")
    assert neuvar(capsys, "report mine.py")[0] == 0
    page = (here / "out" / "report" / "index.html").read_text()
    assert "<h1>Lion on digits</h1>" in page
    assert "<title>Lion on digits</title>" in page
    assert "Artificial neural variability" not in page


def test_two_files_with_one_name_are_refused(here, capsys):
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "mine.py").write_text(SMALL)
    code, _, err = neuvar(capsys, "run a/mine.py b/mine.py")
    assert code == 2
    assert err == "neuvar: b/mine.py has the name of another experiment, mine; rename the file\n"


PARTS = """
from neuvar import experiments as ex

def runs(scale, trials):
    return [ex.Training(data="mnist-excerpt", b=b, optimizer=o, seed=seed)
            for seed in range(trials or 3) for o, b in (("sgd", 0.0), ("nvrm-sgd", 0.05))]

def panels(results):
    return [ex.Panel("t", "x", "y", (ex.curve(ex.group(results, b=0.05), "test_accuracy", "m"),))]

def table(results):
    return ex.Table(("m",), ((ex.cell(ex.group(results, b=0.0), "test_accuracy"),),))

def check(results):
    two = ex.matching(results, optimizer="nvrm-sgd"), ex.matching(results, optimizer="sgd")
    return ex.judge("w", [ex.compare("c", *two, "test_accuracy")])

EXPERIMENT = ex.Experiment(title="t", sentence="s.", runs=runs, panels=panels, table=table,
    check=check)
"""


def write_with_results(here, source, scale):
    """Write mine.py, and results for all runs of ``PARTS``."""
    (here / "mine.py").write_text(PARTS)
    (experiment,) = find_experiments(["mine.py"])
    results = Results(here / "results" / f"{scale}.jsonl")
    for run in experiment.runs(scale, 0):
        accuracy = 0.8 + run.b + run.seed / 100
        record = {
            "status": "finished",
            "curves": {"test_accuracy": [accuracy]},
            "last": {"test_accuracy": accuracy},
            "best": {"test_accuracy": accuracy},
            "seconds": 1.0,
        }
        results.add({"key": run.key, "run": as_dict(run)} | record)
    (here / "mine.py").write_text(source)


def test_the_smoke_scale_checks_the_verdict_but_does_not_show_it(here, capsys):
    write_with_results(here, PARTS, "smoke")
    code, out, err = neuvar(capsys, "report mine.py")
    assert (code, err) == (0, "")
    assert "numbers only" in out
    assert "The smoke scale only tests the code." in out


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_a_method_without_results_so_far_is_no_mistake(here, capsys, scale):
    write_with_results(here, PARTS, scale)
    results = Results(here / "results" / f"{scale}.jsonl")
    lines = results.lines()
    results.remove(key for key, line in lines.items() if line["run"]["b"])
    code, out, err = neuvar(capsys, "report mine.py")
    assert (code, err) == (0, "")
    assert "numbers only" in out or "no finished trials" in out


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('*two, "test', '*two, "tset', ", line 16: metric must be one of test_accuracy, got"),
        ("results, optimizer=", "results, optimiser=", ", line 15: field must be one of data,"),
        (
            '="nvrm-sgd"',
            '="nvrm-sdg"',
            ", line 15: no run has optimizer=nvrm-sdg; optimizer is one",
        ),
        ("results, b=0.05", "results, b=1.05", ", line 9: no run has b=1.05; b is one of 0, 0.05"),
        (
            'matching(results, optimizer="nvrm-sgd")',
            'group(ex.matching(results, optimizer="nvrm-sgd"), b=1.0)',
            ", line 15: no run has b=1; b is one of 0, 0.05",
        ),
        ("return ex.judge", "return True or ex.judge", ": check must return a Verdict, such as"),
        ("return ex.judge", "return 1 / 0, ex.judge", ", line 16: ZeroDivisionError: division"),
        ("return [ex.Panel", "[ex.Panel", ": panels must return a list of Panel, got None"),
        ("return [ex.Panel", "return [1, ex.Panel", ": panels must return a list of Panel, got"),
        ("ex.Table((", "((", ": table must return a Table, got"),
        ("return [ex.T", "[ex.T", ": runs must return a list of Training or Tasks, got None"),
        ("(scale, trials)", "(scale)", ": TypeError: runs() takes 1 positional argument but"),
        ("data=", "daat=", ", line 5: TypeError: "),
    ],
)
def test_mistakes_in_its_functions_get_one_sentence(here, capsys, scale, right, wrong, sentence):
    assert right in PARTS
    write_with_results(here, PARTS.replace(right, wrong), scale)
    code, _, err = neuvar(capsys, "report mine.py")
    assert code == 2
    assert err.startswith(f"neuvar: mine.py{sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "source",
    [
        PARTS.replace("b=0.05", "b=0.07").replace(
            'sgd", 0.05', 'sgd", 0.07 if scale == "cpu" else 0.05'
        ),
        PARTS.replace("b=0.05", "b=0.07").replace("check=check", "check=check, then=then"),
        PARTS.replace("b=0.0)", "b=0.0, seed=9)"),
    ],
    ids=["planned at another scale", "may follow", "a further trial"],
)
def test_values_without_results_so_far_are_no_mistake(here, capsys, source):
    source = source.replace(
        "EXPERIMENT =", "then = lambda scale, trials, results: []\nEXPERIMENT ="
    )
    write_with_results(here, source, "smoke")
    code, _, err = neuvar(capsys, "report mine.py")
    assert (code, err) == (0, "")
