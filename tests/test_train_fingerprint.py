"""A checkpoint is resumed by the training that made it, and refused by any other."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from neuvar import NVRMSGD
from neuvar.continual import EWC
from neuvar.data import Augmentation, Batches, mnist_excerpt, normalization
from neuvar.data.batches import digest
from neuvar.experiments.runner import ChannelsLast
from neuvar.schedule import BSchedule, Linear
from neuvar.train import Checkpoint, fit
from neuvar.train.checkpoint import options_fingerprint
from tests.toy import same
from tests.trainings import Chunks, StoppedError, network, optimizer, state

TRAIN = mnist_excerpt().train


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power fails here


class Others(Chunks):
    """Chunks that differ from them in one thing."""

    def __init__(self, *, label=False, number=False, order=0, **options):
        super().__init__(**options)
        self.order = order
        first = torch.randperm(26, generator=torch.Generator().manual_seed(100 + order))[0]
        self.labels[first] = (self.labels[first] + label) % 3
        self.inputs[first, 0] += float(number)

    def epoch(self, number, *, start=0):
        return super().epoch(number + self.order, start=start)


class Trained:
    """A training whose parts can be exchanged."""

    def __init__(self, **changes):
        get = changes.pop
        self.model = get("model", network)()
        name = get("name", "nvrm-sgd")
        self.optimizer = optimizer(name, self.model, **get("options", {}))
        schedule = get("schedule", lambda opt: StepLR(opt, 1, gamma=0.7))
        self.arguments = {
            "epochs": 3,
            "schedule": schedule(self.optimizer),
            "penalty": get("penalty", lambda: EWC(2.0))(),
            "clip": 0.5,
        } | {key: get(key) for key in ("clip", "precision", "loss", "epochs") if key in changes}
        self.batches = get("batches", Chunks)()
        assert not changes

    def fit(self, checkpoint=None):
        return fit(
            self.model, self.batches, self.optimizer, checkpoint=checkpoint, **self.arguments
        )


def other_weights():
    model = network()
    with torch.no_grad():
        model[0].weight[3, 2] += 1e-3
    return model


CHANGES = {
    "lr": ({"options": {"lr": 0.06}}, "lr 0.05, not 0.06"),
    "momentum": ({"options": {"momentum": 0.8}}, "momentum 0.9, not 0.8"),
    "weight decay": ({"options": {"weight_decay": 0.0}}, "weight_decay 0.01, not 0.0"),
    "b": ({"options": {"b": 0.2}}, "b 0.1, not 0.2"),
    "auto": ({"options": {"b": "auto"}}, "b 0.1, not 'auto'"),
    "noise": ({"options": {"noise": "laplace"}}, "noise 'gaussian', not 'laplace'"),
    "seed": ({"options": {"seed": 4}}, "seed of the noise 3, not 4"),
    "clip": ({"clip": 0.4}, "clip 0.5, not 0.4"),
    "precision": ({"precision": "bf16"}, "precision 'float32', not 'bf16'"),
    "loss": ({"loss": nn.CrossEntropyLoss()}, "loss 'cross_entropy', not 'CrossEntropyLoss'"),
    "smoothing": (
        {"loss": functools.partial(cross_entropy, label_smoothing=0.1)},
        "label_smoothing of the loss None, not 0.1",
    ),
    "class weights": (
        {"loss": functools.partial(cross_entropy, weight=torch.ones(3))},
        "other weight of the loss",
    ),
    "gamma": (
        {"schedule": lambda opt: StepLR(opt, 1, gamma=0.6)},
        "gamma of the schedule 0.7, not 0.6",
    ),
    "schedule": (
        {"schedule": lambda opt: CosineAnnealingLR(opt, 3)},
        "schedule 'StepLR', not 'CosineAnnealingLR'",
    ),
    "strength": ({"penalty": lambda: EWC(3.0)}, "strength of the penalty 2.0, not 3.0"),
    "one label": ({"batches": lambda: Others(label=True)}, "other first batch"),
    "one input": ({"batches": lambda: Others(number=True)}, "other first batch"),
    "order": ({"batches": lambda: Others(order=1)}, "other first batch"),
    "weights": ({"model": other_weights}, "other initial weights"),
}


class TestAnotherTraining:
    @pytest.mark.parametrize("finished", [True, False])
    @pytest.mark.parametrize("change", CHANGES)
    def test_it_is_refused_before_anything_changes(self, tmp_path, change, finished):
        path = tmp_path / "c.pt"
        if finished:
            Trained().fit(Checkpoint(path, every=0))
        else:
            with pytest.raises(StoppedError):
                Trained(batches=lambda: Chunks(stop=9)).fit(Checkpoint(path, every=0))
        changes, words = CHANGES[change]
        other, file, generator = Trained(**changes), path.read_bytes(), torch.get_rng_state()
        weights, groups = state(other.model), [dict(g) for g in other.optimizer.param_groups]
        with pytest.raises(ValueError, match="is of another training") as error:
            other.fit(path)
        assert words in str(error.value)
        assert "strict=False" in str(error.value)
        assert same(state(other.model), weights)
        assert [dict(g) for g in other.optimizer.param_groups] == groups
        assert not other.optimizer.state
        assert path.read_bytes() == file
        assert torch.equal(torch.get_rng_state(), generator)

    def test_all_differences_are_named(self, tmp_path):
        Trained().fit(Checkpoint(tmp_path / "c.pt", every=0))
        other = Trained(options={"lr": 0.5, "b": 0.0}, clip=0.0)
        with pytest.raises(ValueError, match=r"lr 0\.05, not 0\.5; b 0\.1, not 0\.0; .*clip 0\.5"):
            other.fit(tmp_path / "c.pt")

    def test_options_of_sam_and_of_several_groups(self, tmp_path):
        def run(rho=0.1, lr=0.2):
            model = network()
            opt = optimizer("sam-sgd", model, rho=rho)
            opt.param_groups[0]["params"] = list(model[0].parameters())
            opt.add_param_group({"params": list(model[2].parameters()), "lr": lr})
            return fit(model, Chunks(), opt, epochs=1, checkpoint=Checkpoint(path, every=0))

        path = tmp_path / "c.pt"
        assert run() == run()
        with pytest.raises(ValueError, match=r"rho of parameter group 0 0\.1, not 0\.3"):
            run(rho=0.3)
        with pytest.raises(ValueError, match=r"lr of parameter group 1 0\.2, not 0\.1"):
            run(lr=0.1)

    def test_parts_of_losses_and_schedules(self, tmp_path):
        def run(weight=1.0, start=0.1, milestone=1):
            def schedule(opt):
                return SequentialLR(opt, [LinearLR(opt, start), StepLR(opt, 1)], [milestone])

            loss = nn.CrossEntropyLoss(torch.tensor([1.0, weight, 1.0]))
            return Trained(schedule=schedule, loss=loss).fit(Checkpoint(path, every=0))

        path = tmp_path / "c.pt"
        assert run() == run()
        with pytest.raises(ValueError, match="other buffers of the loss"):
            run(weight=2.0)
        with pytest.raises(ValueError, match=r"start_factor of part 0 of the schedule 0\.1"):
            run(start=0.2)
        with pytest.raises(ValueError, match=r"milestones of the schedule \[1\], not \[2\]"):
            run(milestone=2)

    def test_losses_of_any_kind(self, tmp_path):
        class Smooth:
            def loss(self, scores, labels):
                return cross_entropy(scores, labels)

        one, other = Smooth().loss, Smooth().loss
        path = tmp_path / "c.pt"
        assert Trained(loss=one).fit(Checkpoint(path, every=0)) == Trained(loss=other).fit(path)
        with pytest.raises(ValueError, match="loss 'loss', not 'cross_entropy'"):
            Trained().fit(path)

    def test_numbers_of_numpy_can_be_saved(self, tmp_path):
        path = tmp_path / "c.pt"
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        group, rate = opt.param_groups[0], np.float64(0.1)
        result = options_fingerprint(opt, {"loss": cross_entropy, "schedule": None})
        group["lr"] = rate
        again = options_fingerprint(opt, {"loss": cross_entropy, "schedule": None})
        torch.save(again, path)
        assert torch.load(path, weights_only=True) == result

    def test_strict_is_yes_or_no(self, tmp_path):
        with pytest.raises(ValueError, match="strict must be True or False, got 'no'"):
            Checkpoint(tmp_path / "c.pt", strict="no")

    def test_a_refused_checkpoint_is_not_used_up(self, tmp_path):
        """Whoever asks again is refused again, and does not overwrite the file."""
        path = tmp_path / "c.pt"
        expected = Trained().fit(Checkpoint(path, every=0))
        saved = Checkpoint(path, every=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="another training"):
                Trained(options={"lr": 0.5}).fit(saved)
        assert Trained().fit(saved) == expected

    def test_one_checkpoint_for_several_models_is_no_resume_of_the_first(self, tmp_path):
        """A program that trains two models in turn and is run again."""
        path = tmp_path / "c.pt"
        saved = Checkpoint(path, every=0)
        Trained().fit(saved)
        Trained(model=other_weights).fit(saved)
        with pytest.raises(ValueError, match="other initial weights"):
            Trained().fit(Checkpoint(path, every=0))

    def test_not_strict(self, tmp_path):
        path = tmp_path / "c.pt"
        first = Trained()
        expected = first.fit(Checkpoint(path, every=0))
        other = Trained(options={"lr": 0.5}, model=other_weights)
        assert other.fit(Checkpoint(path, strict=False)) == expected
        assert same(state(other.model), state(first.model))
        assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.7**3)
        wide = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        with pytest.raises(ValueError, match=r"another model: '0\.weight'"):
            Trained(model=lambda: wide).fit(Checkpoint(path, strict=False))


class TestTheSameTraining:
    """What may be otherwise when a training resumes."""

    @pytest.mark.parametrize("stop", [2, 9])
    def test_more_epochs(self, tmp_path, stop):
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            Trained(batches=lambda: Chunks(stop=stop)).fit(Checkpoint(path, every=0))
        Trained().fit(Checkpoint(path, every=0))
        undisturbed, again = Trained(epochs=5), Trained(epochs=5)
        assert again.fit(path) == undisturbed.fit()
        assert same(state(again.model), state(undisturbed.model))

    @pytest.mark.parametrize(
        ("options", "schedule"),
        [
            ({"b": "auto"}, lambda opt: StepLR(opt, 1)),
            ({}, lambda opt: LinearLR(opt, 0.1)),
            ({}, lambda opt: SequentialLR(opt, [LinearLR(opt, 0.1), StepLR(opt, 1)], [1])),
        ],
        ids=["auto", "warm-up", "sequence"],
    )
    @pytest.mark.parametrize("stop", [2, 9, 14])
    def test_options_that_change_on_the_way(self, tmp_path, options, schedule, stop):
        changes = {"options": options, "schedule": schedule}
        path, undisturbed = tmp_path / "c.pt", Trained(**changes)
        with pytest.raises(StoppedError):
            Trained(**changes, batches=lambda: Chunks(stop=stop)).fit(Checkpoint(path, every=0))
        again = Trained(**changes)
        assert again.fit(path) == undisturbed.fit()
        assert same(state(again.model), state(undisturbed.model))

    @pytest.mark.parametrize("name", ["nvrm-sgd", "sam-sgd", "adam"])
    def test_the_very_same_objects_after_an_interruption(self, tmp_path, name):
        """As in a notebook whose cell is stopped and run again, with a few steps since saved."""
        path, undisturbed, ours = tmp_path / "c.pt", Trained(name=name), Trained(name=name)
        saved = Checkpoint(path, every=0)
        saved.due = lambda: ours.batches.stop < 0 or not path.exists()
        for ours.batches.stop in (9, 11):
            with pytest.raises(StoppedError):
                ours.fit(saved if ours.batches.stop == 9 else path)
        ours.batches.stop = -1
        assert ours.fit(path) == undisturbed.fit()
        assert same(state(ours.model), state(undisturbed.model))

    def test_weights_that_were_set_anew_in_the_same_model(self, tmp_path):
        ours = Trained()
        ours.fit(Checkpoint(tmp_path / "c.pt", every=0))
        with torch.no_grad():
            ours.model[0].weight.mul_(2)
        with pytest.raises(ValueError, match="other initial weights"):
            ours.fit(tmp_path / "c.pt")

    def test_tasks_in_turn(self, tmp_path):
        """The second one begins with weights that a new process does not have."""

        def run(stop=-1, checkpoint=None):
            model = network()
            opt = NVRMSGD(model.parameters(), lr=0.05, b=0.1)
            rule = BSchedule(opt, Linear(9))
            if checkpoint is not None:
                checkpoint.read()
            done = 0 if checkpoint is None else checkpoint.outer.get("done", 0)
            for task in range(done, 3):
                batches = Others(order=10 * task, stop=stop if task == 1 else -1)
                batches.stop += 70 if batches.stop >= 0 else 0
                fit(model, batches, opt, epochs=2, b_schedule=rule, checkpoint=checkpoint)
                if checkpoint is not None:
                    checkpoint.outer["done"] = task + 1
            return state(model)

        path = tmp_path / "c.pt"
        for stop in (1, 8, 12):
            with pytest.raises(StoppedError):
                run(stop, Checkpoint(path, every=0))
        assert torch.load(path, weights_only=True)["outer"] == {"done": 1}
        assert same(run(checkpoint=Checkpoint(path, every=0)), run())


def parts(n=30, label=0):
    """Float inputs and labels, of which one may be otherwise."""
    x, y = torch.arange(5.0 * n).view(n, 5) / 100, torch.arange(n) % 3
    y[7] += label
    return x, y


def loader(n=30, *, label=0, seed=0, **options):
    """A loader with an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    options = {"batch_size": 5, "shuffle": True, "generator": generator} | options
    return DataLoader(TensorDataset(*parts(n, label)), **options)


class Kept(torch.utils.data.Dataset):
    """A dataset with an array and a list, as torchvision's have them."""

    def __init__(self, label=0):
        x, y = parts(30, label)
        self.data, self.targets, self.transform = x.numpy(), y.tolist(), None

    def __getitem__(self, index):
        return torch.from_numpy(self.data[index]), self.targets[index]

    def __len__(self):
        return len(self.targets)


class TestData:
    @pytest.mark.parametrize(
        "other",
        [
            lambda: loader(label=1),
            lambda: loader(seed=1),
            lambda: loader(29),
            lambda: loader(drop_last=True),
            lambda: loader(shuffle=False),
            lambda: list(loader()),
            lambda: DataLoader(Subset(TensorDataset(*parts()), range(29, -1, -1)), batch_size=5),
            lambda: DataLoader(ConcatDataset([TensorDataset(*parts(15))] * 2), batch_size=5),
        ],
    )  # fmt: skip
    def test_of_a_loader(self, tmp_path, other):
        def run(batches):
            model = network()
            saved = Checkpoint(tmp_path / "c.pt", every=0)
            return fit(model, batches, optimizer("sgd", model), epochs=2, checkpoint=saved)

        assert run(loader()) == run(loader())
        with pytest.raises(ValueError, match="another training"):
            run(other())

    @pytest.mark.parametrize(
        "make",
        [
            lambda label: DataLoader(Kept(label), batch_size=5),
            lambda label: DataLoader(Subset(Kept(label), range(30)), batch_size=5),
            lambda label: DataLoader(ConcatDataset([Kept(), Kept(label)]), batch_size=5),
            lambda label: list(loader(label=label)),
        ],
    )  # fmt: skip
    def test_one_other_label(self, tmp_path, make):
        def run(label):
            model = network()
            saved = Checkpoint(tmp_path / "c.pt", every=0)
            return fit(model, make(label), optimizer("sgd", model), epochs=1, checkpoint=saved)

        assert run(0) == run(0)
        with pytest.raises(ValueError, match="other data"):
            run(1)

    def test_of_our_batches(self):
        plain = {"seed": 0, "normalize": normalization(TRAIN.images), "augment": Augmentation()}
        first = Batches(TRAIN, 100, **plain).fingerprint()
        assert Batches(TRAIN, 100, **plain).fingerprint() == first
        assert ChannelsLast(TRAIN, 100, **plain).fingerprint() == first
        labels, images = TRAIN.labels.clone(), TRAIN.images.clone()
        labels[4321] += 1
        images[-1] = 0
        for data, size, change in (
            (TRAIN, 101, {}),
            (TRAIN, 100, {"seed": 1}),
            (TRAIN, 100, {"shuffle": False}),
            (TRAIN, 100, {"drop_last": True}),
            (TRAIN, 100, {"augment": None}),
            (TRAIN, 100, {"augment": Augmentation(pad=3)}),
            (TRAIN, 100, {"normalize": None}),
            (dataclasses.replace(TRAIN, labels=labels), 100, {}),
            (dataclasses.replace(TRAIN, images=images), 100, {}),
        ):
            other = Batches(data, size, **(plain | change)).fingerprint()
            assert sum(other[key] != value for key, value in first.items()) == 1

    def test_a_hash_looks_at_values_shapes_and_types(self):
        x = torch.arange(12.0)
        known = {digest([t]) for t in (x, x + 1, x.view(3, 4), x.half(), x.bfloat16(), x.int())}
        assert len(known) == 6
        assert digest([x.view(3, 4).T]) == digest([x.view(3, 4).T.contiguous()])
        assert digest([x[0]]) != digest([x[1]])
        for shape in ((3, 2, 2, 1), (3, 1, 2, 2), (12, 1, 1, 1), (1, 12, 1, 1)):
            image = x.view(shape)
            last = image.to(memory_format=torch.channels_last)
            assert digest([image]) == digest([last]) != digest([last + 1])
        assert digest([x[:, None][:1, 0]]) == digest([x[:1]]) == digest([x[::4][:1]])
        assert digest([x[:0]]) != digest([x[:0].view(0, 3)])
        assert digest([x]) != digest([x.numpy()])  # no promise, but both can be
