"""Which runs a command line means, and what they are called."""

from dataclasses import replace

import pytest

from neuvar.cli.run_selection import (
    differing_fields,
    find_experiments,
    label,
    matches,
    only,
    run_labels,
    runs_of,
)
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import SCALES
from neuvar.experiments.run_spec import Tasks, Training, format_value
from tests.cli_experiments import MADE, TINY, alone


@pytest.fixture
def made():
    with alone():
        yield MADE


def test_experiments_by_name_each_once(made):
    assert [e.name for e in find_experiments(["tasks", "labels", "tasks"])] == ["tasks", "labels"]
    for names in ([], ["all"], ["tasks", "all"]):
        assert find_experiments(names) == list(made.values())
    with pytest.raises(ValueError, match=r"all or one of labels, tasks, .*, got 'task'"):
        find_experiments(["task"])


def test_runs_go_trial_by_trial_and_a_shared_one_is_done_once(made):
    runs = runs_of([made["labels"], made["tasks"]], "cpu", 2)
    assert [run.seed for run in runs] == [0, 0, 0, 1, 1, 1]
    assert [type(run) for run in runs] == [Training, Training, Tasks] * 2
    assert len({run.key for run in runs}) == len(runs)
    # Within a trial they are in the order in which the experiment lists them.
    assert [run.optimizer for run in runs[:2]] == ["sgd", "nvrm-sgd"]
    assert len(runs_of([made["labels"]], "cpu", 0)) == 6


def test_a_trial_is_a_place_and_not_a_seed(made):
    """Seeds that begin at 100 are no later trials than those that begin at 0."""
    late = [replace(TINY, seed=seed, width=9) for seed in (101, 100)]
    other = replace(made["labels"], runs=lambda scale, trials: late)
    runs = runs_of([made["labels"], other], "smoke", 2)
    assert [run.seed for run in runs] == [0, 0, 101, 1, 1, 100]


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ([], 7),
        (["seed=0"], 3),
        (["seed=0,2"], 5),
        (["optimizer=nvrm-sgd", "b=.05"], 3),
        (["b=0.050,0"], 7),
        (["noise_rate=0.4", "seed=1"], 2),
        (["stream=permuted"], 1),
        (["label_noise=pair", "stream=permuted"], None),
        (["penalty=none"], 1),
        (["penalty="], 1),
        (["augment=false"], 6),
        (["eval_noise=none"], 6),
    ],
)
def test_only_keeps_runs_with_the_values(made, conditions, count):
    runs = [*MADE["labels"].runs("cpu", 3), Tasks(data="mnist")]
    if count is None:
        with pytest.raises(ValueError, match="no run has all of label_noise=pair stream=permuted"):
            only(runs, conditions)
    else:
        assert len(only(runs, conditions)) == count


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ("seed", "must be FIELD=VALUE, such as seed=0, got 'seed'"),
        ("sed=0", "FIELD must be one of data, model, optimizer, .*, seed, got 'sed'"),
        ("stream=split", "FIELD must be one of"),
        ("seed=0,7", "no run has seed=7; seed is one of 0, 1, 2$"),
        ("b=high", "no run has b=high; b is one of 0, 0.05$"),
        ("seed=", "no run has seed=; seed is one of"),
        ("optimizer=SGD", "no run has optimizer=SGD; optimizer is one of nvrm-sgd, sgd$"),
    ],
)
def test_only_says_what_is_known(condition, sentence):
    with pytest.raises(ValueError, match=sentence):
        only(MADE["labels"].runs("cpu", 3), [condition])


def test_values_are_typed_as_they_are_written():
    for value in (3, 0.05, 1e-4, "sgd", "", True, False, (), (0.01, 0.02)):
        assert matches(format_value(value), value)
    assert not matches("1", True)
    assert not matches("nan", 0.0)
    assert not matches("0.05", "0.050")


def test_a_label_says_what_tells_runs_apart():
    runs = MADE["labels"].runs("cpu", 2)
    assert differing_fields(runs) == ["optimizer", "b", "label_seed", "seed"]
    assert list(run_labels(runs).values()) == [
        "sgd seed=0",
        "sgd seed=1",
        "nvrm-sgd b=0.05 seed=0",
        "nvrm-sgd b=0.05 seed=1",
    ]


def test_a_label_is_no_longer_than_it_takes():
    seeds = [replace(TINY, seed=s, label_seed=s, images=100 + s) for s in (0, 1)]
    assert list(run_labels(seeds).values()) == ["sgd seed=0", "sgd seed=1"]
    same_seed = [replace(TINY, images=100, label_seed=s, clip=0.5) for s in (1, 2)]
    assert list(run_labels(same_seed).values()) == [
        "sgd label_seed=1 seed=0",
        "sgd label_seed=2 seed=0",
    ]
    sizes = [replace(TINY, images=n, test_images=n) for n in (100, 200)]
    assert list(run_labels(sizes).values()) == ["sgd images=100 seed=0", "sgd images=200 seed=0"]
    assert list(run_labels([TINY, TINY]).values()) == ["sgd seed=0"]


def test_a_label_tells_tasks_from_others():
    runs = [TINY, Tasks(data="mnist-excerpt", images=200, test_images=100, width=8, batch=50)]
    assert list(run_labels(runs).values()) == ["sgd seed=0", "permuted sgd seed=0"]


def test_a_label_of_flags_and_lists():
    run = replace(TINY, augment=True, eval_noise=(0.01, 0.02), epochs=3)
    names = ["augment", "eval_noise", "epochs", "data"]
    assert label(run, names) == "mnist-excerpt sgd epochs=3 augment eval_noise=0.01/0.02 seed=0"


@pytest.mark.parametrize("scale", SCALES)
def test_labels_of_all_experiments_are_different(scale):
    """Of each by itself, and of all at once."""
    every = runs_of(EXPERIMENTS.values(), scale, 2)
    for runs in [every, *(e.runs(scale, 2) for e in EXPERIMENTS.values())]:
        keys = {run.key for run in runs}
        assert len(set(run_labels(runs).values())) == len(keys)
