"""Runs are data: their keys, the runs of each claim, and the paper's settings to the letter."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook

from neuvar.data import Dataset, Split
from neuvar.experiments import EXPERIMENTS, SCALES, run_one, runner
from neuvar.experiments.run_spec import NORMALIZE, NOT_IN_KEY, Tasks, Training, as_dict, from_dict

NAMES = [
    "robustness", "generalization", "pair-flips", "symmetric-flips", "forgetting", "ewc",
    "ewc-batch-mean", "split", "denoising", "noise-types", "gradient-noise",
]  # fmt: skip
TRIALS = {"smoke": 3, "cpu": 3, "paper": 10}


def every_run(scale="paper", trials=1):
    return {run.key: run for e in EXPERIMENTS.values() for run in e.runs(scale, trials)}


class TestKeys:
    def test_they_are_what_they_were(self):
        """Recorded results are found by these keys: they must never change."""
        one = Training(
            data="cifar10", model="resnet-34", optimizer="nvrm-sgd", b=0.05, momentum=0.9,
            epochs=300, augment=True, label_noise="pair", noise_rate=0.4, drop_every=100,
        )  # fmt: skip
        other = Tasks(
            data="mnist", optimizer="nvrm-adam", lr=1e-3, b=0.03, batch=256, keep_optimizer=True,
            penalty="ewc", strength=300.0, fisher_images=5000,
        )  # fmt: skip
        assert (one.key, other.key) == ("3bc4a40c1c99e64a", "991dd7a84b9ad2b7")

    @pytest.mark.parametrize(
        "plain",
        [
            Training(data="mnist", label_noise="pair", noise_rate=0.4),
            Tasks(data="mnist", penalty="ewc", strength=1.0),
        ],
        ids=["training", "tasks"],
    )
    def test_they_depend_on_every_field_but_how(self, plain):
        kind, keys = type(plain), {plain.key}
        for field in dataclasses.fields(kind):
            value = getattr(plain, field.name)
            other = {
                str: "pixel" if field.name == "normalize" else f"{value}x",
                bool: not value,
                int: 7,
                float: 0.123,
                tuple: (0.5,),
            }[type(value)]
            changed = dataclasses.replace(plain, **{field.name: other})
            assert changed != plain
            assert (changed.key == plain.key) == (field.name in NOT_IN_KEY)
            keys.add(changed.key)
        assert len(keys) == 1 + len(dataclasses.fields(kind)) - len(NOT_IN_KEY)

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ({"lr": "fast"}, "lr must be a finite number >= 0, got 'fast'"),
            ({"b": float("nan")}, "b must be a finite number >= 0, got nan"),
            ({"label_noise": "pair", "noise_rate": 2}, "noise_rate must be .* <= 1, got 2"),
            ({"eval_noise": (0.1, -0.1)}, "eval_noise must be a finite number >= 0, got -0.1"),
        ],
    )
    def test_numbers_are_checked_before_anything_runs(self, wrong, words):
        with pytest.raises(ValueError, match=words):
            Training(data="mnist", **wrong)

    def test_equal_runs_have_equal_keys(self):
        assert Training(data="x", lr=1, b=0).key == Training(data="x", lr=1.0, b=0.0).key
        assert Training(data="x", eval_noise=[1]) == Training(data="x", eval_noise=(1.0,))
        assert Training(data="mnist").key != Tasks(data="mnist").key
        assert all(c in "0123456789abcdef" for c in Training(data="x").key)
        assert len(Training(data="x").key) == 16


def of_type(field):
    numbers = st.floats(0, 1 if field.name == "noise_rate" else None, allow_infinity=False)
    if field.name == "normalize":
        return st.sampled_from(NORMALIZE)
    return {
        "str": st.text(), "int": st.integers(1), "float": numbers, "bool": st.booleans(),
        "tuple[float, ...]": st.lists(numbers).map(tuple),
    }[field.type]  # fmt: skip


def runs_of(kind):
    def made(**values):
        """Of what goes together, all or nothing."""
        if kind is Training and not (values["label_noise"] and values["noise_rate"]):
            values |= {"label_noise": "", "noise_rate": 0.0}
        if values["auto_b"]:
            values |= {"b": 0.0}
        if kind is Tasks and not values["penalty"]:
            values |= {"strength": 0.0, "fisher_images": 0}
        if kind is Tasks:
            values |= {"penalty": "ewc"} if values["penalty"] else {"fisher": "exact"}
        return kind(**values)

    return st.builds(made, **{field.name: of_type(field) for field in dataclasses.fields(kind)})


class TestAsJSON:
    @given(st.one_of(runs_of(Training), runs_of(Tasks)))
    def test_there_and_back(self, run):
        text = json.dumps(as_dict(run), allow_nan=False)
        assert from_dict(json.loads(text)) == run
        assert from_dict(json.loads(text)).key == run.key
        assert type(from_dict(json.loads(text))) is type(run)

    @pytest.mark.parametrize(
        ("wrong", "word"),
        [
            ({"data": "mnist"}, "kind must be one of training, tasks, got None"),
            ({"kind": "other", "data": "mnist"}, "got 'other'"),
            ({"kind": "training", "data": "mnist", "color": 1}, "a run has no field 'color'"),
            ({"kind": "tasks", "data": "mnist", "augment": True}, "a run has no field 'augment'"),
            ({"kind": "training"}, "a run needs 'data'"),
        ],
    )
    def test_what_is_no_run_is_refused(self, wrong, word):
        with pytest.raises(ValueError, match=word):
            from_dict(wrong)


class TestEveryExperiment:
    def test_all_of_them(self):
        assert list(EXPERIMENTS) == NAMES
        numbers = [e.number for e in EXPERIMENTS.values()]
        assert numbers == ["1", "2", "3", "3 S", "4a", "4b", "4b B", "4c", "5", "6", "S"]
        for name, experiment in EXPERIMENTS.items():
            assert experiment.name == name
            assert experiment.title
            assert experiment.sentence
            assert experiment.source

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("name", NAMES)
    def test_its_runs(self, name, scale):
        experiment = EXPERIMENTS[name]
        by_default = experiment.runs(scale, 0)
        trials = {run.seed for run in by_default}
        expected = 1 if name.startswith("ewc") and scale == "smoke" else TRIALS[scale]
        assert trials == set(range(expected))
        assert len({run.key for run in by_default}) == len(by_default)
        # Each trial has the same runs but for its seeds.
        for seed in trials:
            own = [r for r in by_default if r.seed == seed]
            assert len(own) == len(by_default) / expected
            assert all(getattr(r, "label_seed", seed) in (seed, 0) for r in own)
        one, three = experiment.runs(scale, 1), experiment.runs(scale, 3)
        assert {r.key for r in one} < {r.key for r in three}
        assert {r.key for r in one} == {r.key for r in three if r.seed == 0}
        assert len(three) == 3 * len(one)
        for run in one:
            assert run.optimizer.startswith(("nvrm", "psgd")) == (run.b > 0)
        assert len(experiment.settings(scale)) > 50

    @pytest.mark.parametrize("name", ["pair-flips", "symmetric-flips", "denoising", "noise-types"])
    def test_wrong_labels_differ_from_trial_to_trial(self, name):
        for run in EXPERIMENTS[name].runs("cpu", 3):
            assert run.label_seed == run.seed

    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize(
        "name",
        [
            "denoising",
            "noise-types",
            "pair-flips",
            "symmetric-flips",
            "robustness",
            "generalization",
        ],
    )
    def test_where_b_is_chosen_images_are_held_out(self, name, scale):
        runs = [r for r in EXPERIMENTS[name].runs(scale, 1) if r.optimizer == "nvrm-sgd"]
        for run in runs:
            like_it = [dataclasses.replace(r, b=run.b) == run for r in runs]
            assert run.held_out > 0 or like_it.count(True) == 1


class TestThePapersSettings:
    """Section 3 of the specification; decisions where the paper is silent."""

    def test_images(self):
        for name in ("robustness", "generalization", "pair-flips", "symmetric-flips", "denoising",
                     "noise-types", "gradient-noise"):  # fmt: skip
            for run in EXPERIMENTS[name].runs("paper", 2):
                assert isinstance(run, Training)
                assert (run.batch, run.epochs, run.weight_decay) == (128, 300, 1e-4)
                assert run.augment
                assert (run.images, run.test_images, run.width) == (0, 0, 0)
                # Where b is chosen it is on a tenth of the training images, never on the test.
                chooses = name in ("denoising", "noise-types", "robustness", "generalization")
                assert run.held_out == (5000 if chooses else 0)
                assert run.momentum == (0.9 if run.model == "resnet-34" else 0.0)
                assert run.drop_every == (60 if name == "gradient-noise" else 100)
                assert run.lr == 0.1 or name == "gradient-noise"
                assert (run.clip, run.accumulate, run.rho) == (0, 1, 0)
                assert run.optimizer in ("sgd", "nvrm-sgd", "psgd")
                assert run.precision == "float32"

    def test_robustness(self):
        runs = EXPERIMENTS["robustness"].runs("paper", 1)
        assert {r.eval_noise for r in runs} == {(0.01, 0.012, 0.014, 0.016, 0.018, 0.02)}
        networks = {(r.model, r.data) for r in runs}
        assert networks == {
            (m, d) for m in ("resnet-34", "vgg-16", "mobilenet-v2") for d in ("cifar10", "cifar100")
        }
        assert not any(r.label_noise for r in runs)
        for network in networks:
            optimizers = {r.optimizer for r in runs if (r.model, r.data) == network}
            assert optimizers == {"sgd", "nvrm-sgd"}

    def test_generalization(self):
        runs = EXPERIMENTS["generalization"].runs("paper", 1)
        assert {r.model for r in runs} == {"vgg-16", "mobilenet-v2"}
        assert {r.data for r in runs} == {"cifar10", "cifar100"}
        assert all(r.reestimate and not r.label_noise for r in runs)

    @pytest.mark.parametrize(
        ("kind", "rates"), [("pair", (0.1, 0.2, 0.3, 0.4)), ("symmetric", (0.2, 0.4, 0.6, 0.8))]
    )
    def test_wrong_labels(self, kind, rates):
        runs = EXPERIMENTS[f"{kind}-flips"].runs("paper", 1)
        found = sorted((r.data, r.noise_rate, r.optimizer, r.b) for r in runs)
        assert found == sorted(
            (data, rate, *method)
            for data in ("cifar10", "cifar100")
            for rate in rates
            for method in (("sgd", 0.0), ("nvrm-sgd", 0.05))
        )
        assert {(r.model, r.label_noise) for r in runs} == {("resnet-34", kind)}

    def test_denoising_noise_types_and_gradient_noise(self):
        for name in ("denoising", "noise-types", "gradient-noise"):
            runs = EXPERIMENTS[name].runs("paper", 1)
            found = {(r.model, r.data, r.label_noise, r.noise_rate) for r in runs}
            assert found == {("resnet-34", "cifar10", "pair", 0.4)}
        kinds = {r.optimizer for r in EXPERIMENTS["denoising"].runs("paper", 1)}
        assert kinds == {"sgd", "psgd", "nvrm-sgd"}
        noisy = [r for r in EXPERIMENTS["noise-types"].runs("paper", 1) if r.b]
        for noise in ("gaussian", "laplace", "uniform"):
            assert {0.01, 0.03, 0.05} <= {r.b for r in noisy if r.noise == noise}
        pairs = {(r.lr, r.b) for r in EXPERIMENTS["gradient-noise"].runs("paper", 1)}
        assert pairs == {(lr, b) for lr in (0.1, 0.3, 1.0, 3.0) for b in (0.0, 0.05)}

    def test_tasks(self):
        for name in ("forgetting", "ewc", "ewc-batch-mean", "split"):
            for run in EXPERIMENTS[name].runs("paper", 2):
                assert isinstance(run, Tasks)
                assert (run.data, run.images, run.test_images) == ("mnist", 0, 0)
                assert (run.model, run.width, run.tasks) == ("mlp", 0, 5)
                assert (run.lr, run.batch, run.epochs) == (1e-3, 256, 1)
                assert run.optimizer == ("nvrm-adam" if run.b else "adam")
                assert run.weight_decay == (0.0 if name == "split" else 1e-4)
                assert run.stream == ("split" if name == "split" else "permuted")
                assert (run.penalty == "ewc") == name.startswith("ewc")
                assert (run.clip, run.accumulate, run.noise) == (0, 1, "gaussian")

    def test_forgetting(self):
        runs = EXPERIMENTS["forgetting"].runs("paper", 1)
        kept = {r.b for r in runs if r.keep_optimizer}
        assert {0.0, 0.01, 0.03, 0.05} <= kept
        assert {r.b for r in runs if not r.keep_optimizer} == {0.0, 0.03}

    def test_split_has_a_new_optimizer_for_each_task(self):
        runs = EXPERIMENTS["split"].runs("paper", 1)
        assert not any(r.keep_optimizer for r in runs)
        assert {0.0, 0.03} <= {r.b for r in runs}

    @pytest.mark.parametrize(
        ("name", "fisher"), [("ewc", "exact"), ("ewc-batch-mean", "squared_batch_mean")]
    )
    def test_ewc(self, name, fisher):
        runs = EXPERIMENTS[name].runs("paper", 1)
        assert {r.strength for r in runs} == {30.0, 300.0, 1000.0}
        assert {r.fisher for r in runs} == {fisher}
        assert {0.0, 0.03} <= {r.b for r in runs}

    def test_the_words_agree_with_the_runs(self):
        """What is said to be smaller is what is smaller."""
        text, run = (
            EXPERIMENTS["denoising"].settings("cpu"),
            EXPERIMENTS["denoising"].runs("cpu", 1)[0],
        )
        for count in (run.images, run.held_out, run.test_images, run.epochs, run.drop_every):
            assert f"{count:,} " in text
        assert "every 60 epochs" in EXPERIMENTS["gradient-noise"].settings("paper")
        assert "every 100" not in EXPERIMENTS["gradient-noise"].settings("cpu")
        for name in ("forgetting", "split"):
            run, text = EXPERIMENTS[name].runs("smoke", 1)[0], EXPERIMENTS[name].settings("smoke")
            assert f"{['one epoch', 'two epochs'][run.epochs - 1]} per task" in text
            assert f"of {run.width} units, batch size {run.batch}" in text
            assert "one epoch per task" in EXPERIMENTS[name].settings("cpu")


def configurations():
    """The paper's runs that differ in more than a rate, a strength or a scale of noise."""
    found = {}
    for run in every_run().values():
        same = {"b": 0.05 if run.b else 0.0, "lr": 0.1, "seed": 0}
        if isinstance(run, Training):
            same |= {"noise_rate": 0.4 if run.label_noise else 0.0, "drop_every": 100}
        else:
            same |= {"strength": 30.0 if run.penalty else 0.0}
        found.setdefault(dataclasses.replace(run, **same).key, run)
    return list(found.values())


def named(run):
    kind = getattr(run, "label_noise", "") or getattr(run, "stream", "clean")
    penalty = f"{run.penalty}-{run.fisher}" if isinstance(run, Tasks) and run.penalty else ""
    return "-".join(filter(None, (run.data, run.model, run.optimizer, run.noise, kind, penalty)))


def few_images(run):
    """Random images of the right shape: as many as make two steps."""
    generator = torch.Generator().manual_seed(0)
    digits = run.data == "mnist"
    shape, classes = ((28, 28), 10) if digits else ((3, 32, 32), {"cifar10": 10}.get(run.data, 100))

    def split(n):
        pixels = torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)
        return Split(pixels, torch.arange(n) % classes)

    count = 2 * run.batch * (5 if isinstance(run, Tasks) and run.stream == "split" else 1)
    count += getattr(run, "held_out", 0)
    return Dataset(run.data, classes, split(count), split(10 if digits else 2))


@pytest.mark.slow
@pytest.mark.parametrize("run", configurations(), ids=named)
def test_two_steps_of_every_configuration_of_the_paper(run, monkeypatch):
    """The whole path at full width: two steps, then everything that is measured."""
    small = {"epochs": 1}
    if isinstance(run, Training):
        small |= {"batch": 2, "held_out": min(run.held_out, 1), "eval_noise": run.eval_noise[:1]}
        monkeypatch.setattr(runner, "PERTURBED_DRAWS", 4)
    else:
        small |= {"fisher_images": min(run.fisher_images, 20)}
    short = dataclasses.replace(run, **small)
    monkeypatch.setattr(runner, "load", lambda *_, **__: few_images(short))
    steps = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: steps.append(type(optimizer).__name__)
    )
    try:
        found = run_one(short)
    finally:
        handle.remove()
    inner = "Adam" if "adam" in run.optimizer else "SGD"
    assert steps.count(inner) == 2 * (run.tasks if isinstance(run, Tasks) else 1)
    assert found["status"] == "finished", found["reason"]
    json.dumps(found, allow_nan=False)
    assert found["parameters"] > 1_000_000
    metric = "mean_accuracy" if isinstance(run, Tasks) else "test_accuracy"
    assert math.isfinite(found["last"][metric])
    assert ("under_noise" in found) == bool(getattr(run, "eval_noise", ()))
    assert ("reestimated" in found) == getattr(run, "reestimate", False)
