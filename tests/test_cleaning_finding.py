"""Finding wrong labels by one training run: what it finds, and what it leaves alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

import neuvar
from neuvar import NVRMSGD, find_label_issues
from neuvar.baselines import SAM
from neuvar.cleaning import find, read_examples, training
from neuvar.cleaning.training import History, make_batches, network_for, predict, train_once
from neuvar.data import Split, mnist_excerpt
from neuvar.labels import corrupt
from neuvar.models import mlp
from neuvar.train import fit
from neuvar.train.model_setup import avoid_single
from tests.toy import same

QUICK = {"epochs": 6, "batch_size": 32, "lr": 0.05}


def blobs(n=300, classes=3, rate=0.2, seed=0):
    """Points around corners, some of which have the label of the next one."""
    rng = np.random.default_rng(seed)
    true = rng.integers(classes, size=n)
    x = rng.normal(size=(n, 5)) * 0.5
    x[np.arange(n), true] += 3
    given = corrupt("pair", true, rate, classes=classes, seed=seed)
    return x.astype(np.float32), given.noisy.numpy(), given.mask.numpy()


def network(classes=3):
    return mlp((5, 32, classes), seed=0)


def found_in(data, **options):
    return find_label_issues(network(), data, **(QUICK | {"b": 0.05} | options))


class TestWhatIsFound:
    @pytest.mark.parametrize("b", [0.05, "auto"])
    def test_planted_errors(self, b):
        x, y, wrong = blobs()
        found = found_in((x, y), b=b)
        assert (found.flagged == wrong).mean() > 0.97
        assert wrong[found.ranked[: wrong.sum()]].mean() > 0.95
        assert (found.suggested == (y - wrong) % 3).mean() > 0.97
        assert found.noise_rate.low < 0.2 < found.noise_rate.high
        assert found.transition.matrix == pytest.approx(
            np.array([[0.8, 0.2, 0], [0, 0.8, 0.2], [0.2, 0, 0.8]]), abs=0.1
        )

    @pytest.mark.slow
    def test_on_digits_one_run_is_better_than_chance_by_far(self):
        train = mnist_excerpt().train
        given = corrupt("pair", train.labels, 0.4, classes=10, seed=0)
        data = train.images, given.noisy
        found = find_label_issues(mlp((784, 256, 256, 10), seed=0), data, epochs=12)
        wrong = given.mask.numpy()
        assert wrong[found.flagged].mean() > 0.75
        assert found.flagged[wrong].mean() > 0.75
        assert abs(found.noise_rate.value - 0.4) < 0.08

    def test_the_seed_decides(self):
        x, y, _ = blobs()
        one, again, other = (found_in((x, y), seed=seed) for seed in (0, 0, 1))
        assert (one.probabilities == again.probabilities).all()
        assert (one.probabilities != other.probabilities).any()

    def test_the_scale_of_the_noise_at_the_end(self):
        x, y, _ = blobs()
        assert found_in((x, y), b=0.05).b == 0.05
        alone = found_in((x, y), b="auto")
        assert 0 < alone.b < 1
        assert find_label_issues(alone.probabilities, y).b is None

    def test_the_kinds_of_data_agree(self):
        x, y, _ = blobs()
        tensors = torch.from_numpy(x), torch.from_numpy(y)
        first = found_in((x, y))
        for data in (
            tensors,
            TensorDataset(*tensors),
            read_examples((x, y)),
            (x.tolist(), list(y)),
        ):
            assert (found_in(data).probabilities == first.probabilities).all()
        split = mnist_excerpt().train
        few = Split(split.images[:100], split.labels[:100])
        model = mlp((784, 8, 10), seed=0)
        one = find_label_issues(model, few, b=0.01, epochs=9)
        other = find_label_issues(model, (few.images, few.labels), b=0.01, epochs=9)
        assert (one.probabilities == other.probabilities).all()

    def test_names(self):
        x, y, _ = blobs()
        words = np.array(["ant", "bee", "cow"])
        assert found_in((x, words[y])).names == ("ant", "bee", "cow")
        assert found_in((x, y), names=["A", "B", "C"]).names == ("A", "B", "C")
        assert (found_in((x, words[y])).labels == y).all()

    def test_a_trained_model_is_taken_as_it_is(self):
        x, y, wrong = blobs()
        examples = read_examples((x, y))
        model = train_once(
            network(), examples, b=0.05, momentum=0.9, weight_decay=0.0, seed=0, device="cpu",
            precision="float32", **QUICK,
        ).model  # fmt: skip
        found = find_label_issues(model, (x, y), trained=True)
        with torch.no_grad():
            p = torch.softmax(model(torch.from_numpy(x)).double(), 1).numpy()
        assert found.probabilities == pytest.approx(p, abs=1e-6)
        assert (found.flagged == wrong).mean() > 0.95

    def test_probabilities_from_elsewhere(self):
        p, y = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1]
        for data in (y, np.array(y), torch.tensor(y)):
            found = find_label_issues(np.array(p), data)
            assert found.flagged.tolist() == [False, True, False]
        inputs = np.zeros((3, 2), dtype=np.float32)
        assert find_label_issues(torch.tensor(p), (inputs, y)).flagged.tolist() == [
            False,
            True,
            False,
        ]

    def test_networks_of_another_precision_compute_in_float32(self):
        x, y, wrong = blobs()
        plain = found_in((x, y), b=0.05)
        for dtype in (torch.float64, torch.bfloat16):
            model = network().to(dtype)
            found = find_label_issues(model, (x, y), b=0.05, **QUICK)
            assert (found.flagged == wrong).mean() > 0.95
            assert next(model.parameters()).dtype == dtype
            ready = nn.Linear(5, 3, bias=False).to(dtype)
            nn.init.eye_(ready.weight)
            assert (find_label_issues(ready, (x, y), trained=True).flagged == wrong).mean() > 0.9
        again = find_label_issues(network().double(), (x, y), b=0.05, **QUICK)
        assert (again.probabilities == plain.probabilities).all()

    def test_layers_that_are_made_by_their_first_input(self):
        x, y, wrong = blobs()
        model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(3))
        one, again = (find_label_issues(model, (x, y), b=0.05, **QUICK) for _ in range(2))
        assert (one.flagged == wrong).mean() > 0.95
        assert (one.probabilities == again.probabilities).all()
        assert nn.parameter.is_lazy(model[0].weight)

    def test_whole_numbers_are_words_for_a_network_that_embeds_them(self):
        rng = np.random.default_rng(0)
        y = rng.integers(2, size=200)
        words = rng.integers(10, size=(200, 6)) + 10 * y[:, None]
        given = np.where(np.arange(200) < 20, 1 - y, y)

        class Bag(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.last = nn.Embedding(20, 8), nn.Linear(8, 2)

            def forward(self, x):
                return self.last(self.table(x).mean(1))

        torch.manual_seed(0)
        found = find_label_issues(Bag(), (words, given), b=0.01, epochs=10, batch_size=20)
        assert (found.flagged == (given != y)).mean() > 0.95
        features = find_label_issues(mlp((6, 16, 2), seed=0), (words, given), b=0.01, lr=0.01)
        assert len(features) == 200

    def test_names_of_examples_that_have_them_are_refused(self):
        x, y, _ = blobs(n=30)
        with pytest.raises(ValueError, match="names"):
            find_label_issues(network(), read_examples((x, y)), names=["a", "b", "c"])

    def test_numbers_that_leave_classes_out(self):
        """They are the numbers of columns, or of scores, not of the classes that occur."""
        p = np.full((6, 10), 0.02)
        labels = np.array([0, 5, 9, 0, 5, 9])
        p[np.arange(6), labels] = 0.82
        x = np.zeros((6, 4), np.float32)
        p, labels, x = (np.concatenate([part, part]) for part in (p, labels, x))
        tensors = TensorDataset(*map(torch.from_numpy, (x, labels)))
        for data in (labels, (x, labels), [x, labels], tensors):
            found = find_label_issues(p, data)
            assert not found.flagged.any()
            assert sorted(set(found.labels.tolist())) == [0, 5, 9]
        x, y, wrong = blobs(n=200)
        model = mlp((5, 32, 7), seed=0)
        found = find_label_issues(model, (x, 2 * y), b=0.05, **QUICK)
        assert sorted(set(found.labels.tolist())) == [0, 2, 4]
        assert (found.flagged == wrong).mean() > 0.95
        named = find_label_issues(model, (x, y), names=list("abcdefg"), b=0.05, **QUICK)
        assert named.names == tuple("abcdefg")

    def test_text_with_probabilities(self):
        p, words = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], ["yes", "no", "no"]
        assert find_label_issues(p, words, names=["yes", "no"]).flagged.tolist() == [
            False, False, True,
        ]  # fmt: skip
        assert find_label_issues(p, words).names == ("no", "yes")

    @pytest.mark.parametrize("values", [[0, 1, 2], [1, 2, 3], [-1, 1, 7], ["c", "a", "b"]])
    def test_cleaned_labels_are_those_that_were_given(self, values):
        """The values of classes, and of the cleaned labels, in every way to hand them over."""
        x, y, wrong = blobs()
        given = np.array(values)[y]
        items = ConcatDataset([list(zip(torch.from_numpy(x), given.tolist(), strict=True))])
        for data in ((x, given), (x, given.tolist()), items):
            found = found_in(data)
            assert found.values.tolist() == sorted(values)
            assert found.values[found.labels].tolist() == given.tolist()
            assert (found.cleaned == given).mean() == pytest.approx(1 - found.sure().mean())
            right = found.sure() & wrong
            assert right.any()
            assert (
                found.cleaned[right].tolist() == np.array(values)[(y - wrong) % 3][right].tolist()
            )
        assert found.cleaned.dtype == (np.dtype("U1") if values[0] == "c" else np.int64)
        assert found.labels.dtype == found.suggested.dtype == np.int64

    def test_values_with_names_and_of_other_types(self):
        x, y, _ = blobs()
        words = np.array(["ant", "bee", "cow"])
        assert found_in((x, y), names=words).values.tolist() == [0, 1, 2]
        assert found_in((x, y.astype(float)), names=words).values.dtype == np.int64
        assert found_in((x, words[y]), names=words[::-1]).values.tolist() == ["cow", "bee", "ant"]
        assert found_in(read_examples((x, words[y]))).values.tolist() == [0, 1, 2]
        assert found_in((x, y > 0), names=words).values.tolist() == [False, True, 2]
        large = np.array([5, 2**63, 2**63 + 1], np.uint64)
        assert found_in((x, large[y])).values.tolist() == large.tolist()

    def test_values_of_classes_without_examples(self):
        p = np.full((9, 4), 0.25)
        assert find_label_issues(p, [1, 3, 3] * 3).values.tolist() == [0, 1, 2, 3]
        names = ["a", "b", "c", "d"]
        assert find_label_issues(p, ["b", "d", "d"] * 3, names=names).values.tolist() == names

    def test_values_may_be_any_objects(self):
        p = np.array([[0.99, 0.01], [0.01, 0.99], [0.01, 0.99]] * 60)
        given = [(1, 2), (3,), (1, 2)] * 60
        items = ConcatDataset([[(torch.zeros(2), label) for label in given]])
        found = find_label_issues(p, items)
        assert found.values.tolist() == [(1, 2), (3,)]
        assert found.cleaned.tolist() == [(1, 2), (3,), (3,)] * 60
        assert find_label_issues(p, [False, True, False] * 60).cleaned.tolist() == [0, 1, 1] * 60

    def test_a_folder_has_its_files_and_the_names_of_its_folders(self, tmp_path):
        image = pytest.importorskip("PIL.Image")
        for k, name in enumerate(("day", "night")):
            (tmp_path / name).mkdir()
            for i in range(20):
                grey = 255 * (k == (i == 7)) * np.ones((4, 4), np.uint8)
                image.fromarray(grey).save(tmp_path / name / f"{i:02}.png")
        model = nn.Sequential(nn.Flatten(), mlp((16, 8, 2), seed=0))
        found = find_label_issues(model, tmp_path, b=0.01, **QUICK)
        assert {found.files[i] for i in found.worst} == {"day/07.png", "night/07.png"}
        assert found.values.tolist() == ["day", "night"]
        assert found.values[found.suggested[found.files.index("day/07.png")]] == "night"
        again = find_label_issues(found.probabilities, str(tmp_path))
        assert again.files == found.files
        assert (again.labels == found.labels).all()
        assert find_label_issues(found.probabilities, found.labels).files == ()

    def test_a_data_set_is_gone_through_once(self):
        x, y, _ = blobs()

        class Counted(TensorDataset):
            seen = 0

            def __getitem__(self, index):
                Counted.seen += 1
                return super().__getitem__(index)

        data = Counted(*map(torch.from_numpy, (x, y)))
        find_label_issues(mlp((5, 32, 7), seed=0), data, b=0.05, **QUICK)
        assert Counted.seen == len(y)
        find_label_issues(np.eye(3)[y], data)
        assert Counted.seen == 2 * len(y)


def found_in_model(model, x, y):
    return find_label_issues(model, (x, y), b=0.01, **QUICK)


class TestHowItTrains:
    def test_dropout_depends_on_the_seed_alone(self):
        x, y, _ = blobs()
        model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
        state = torch.get_rng_state()
        one = find_label_issues(model, (x, y), b=0.01, **QUICK)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        other = find_label_issues(model, (x, y), b=0.01, **QUICK)
        assert (one.probabilities == other.probabilities).all()

    def test_batch_normalization_and_one_example_too_many(self):
        x, y, _ = blobs(n=65)
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        found = find_label_issues(model, (x, y), b=0.01, **QUICK)
        assert len(found) == 65

    def test_noise_on_the_model_is_not_taken_for_its_weights(self):
        x, y, _ = blobs()
        model = train_once(
            network(), read_examples((x, y)), b=0.05, momentum=0.9, weight_decay=0.0, seed=0,
            device="cpu", precision="float32", **QUICK,
        ).model  # fmt: skip
        clean = find_label_issues(model, (x, y), trained=True)
        copied = found_in_model(model, x, y)
        optimizer = neuvar.NVRMSGD(model.parameters(), lr=1e-30, b=0.5)
        nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        assert (find_label_issues(model, (x, y), trained=True).quality == clean.quality).all()
        assert (found_in_model(model, x, y).quality == copied.quality).all()
        optimizer.eval()

    def test_the_history_is_the_mean_of_what_was_seen(self):
        history = History(4, 2, torch.device("cpu"))
        batch = (None, None, torch.tensor([2, 0]))
        history(batch, torch.tensor([[20.0, -20.0], [10.0, -10.0]]))
        history((None, None, torch.tensor([2, 1, 3])), torch.full((3, 2), 1.0))
        found = history.mean()
        assert found[[1, 3]] == pytest.approx(0.5)
        assert found[2] == pytest.approx([0.75, 0.25])
        assert found[0] == pytest.approx([1, 0], abs=1e-8)

    def test_every_example_is_seen_once_in_each_epoch(self, monkeypatch):
        seen = []
        original = History.__call__

        def spy(self, batch, scores):
            seen.append(batch[2])
            original(self, batch, scores)

        monkeypatch.setattr(History, "__call__", spy)
        x, y, _ = blobs(n=50)
        found_in((x, y), epochs=3, batch_size=16)
        epochs = [torch.cat(seen[k : k + 4]) for k in range(0, len(seen), 4)]
        assert len(epochs) == 3
        assert all(sorted(e.tolist()) == list(range(50)) for e in epochs)
        assert not torch.equal(epochs[0], epochs[1])

    def test_the_model_and_the_generators_are_left_alone(self):
        x, y, _ = blobs()
        model = network()
        before, state = copy.deepcopy(model), torch.get_rng_state()
        find_label_issues(model, (x, y), b=0.05, **QUICK)
        assert same(model.parameters(), before.parameters())
        assert model.training
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)

    def test_progress(self):
        told = []
        x, y, _ = blobs()
        found_in((x, y), progress=told.append)
        assert told == sorted(told)
        assert told[-1] == 1

    def test_batches_of_features_and_of_images(self):
        x, y, _ = blobs(n=10)
        examples = read_examples((x, y))
        inputs, labels, numbers = next(
            iter(make_batches(examples, 4, device="cpu", seed=3).epoch(0))
        )
        assert torch.equal(inputs, examples.inputs[numbers])
        assert labels.tolist() == y[numbers].tolist()
        part = list(make_batches(examples, 4, device="cpu", seed=3).epoch(0, start=1))
        assert len(part) == 2
        images = read_examples((np.arange(160, dtype=np.uint8).reshape(10, 4, 4), y))
        pixels = torch.cat(
            [b[0] for b in make_batches(images, 4, device="cpu", shuffle=False).epoch(0)]
        )
        assert pixels.shape == (10, 1, 4, 4)
        assert float(pixels.mean()) == pytest.approx(0, abs=1e-5)

    def test_whatever_is_evaluated_is_in_its_order(self):
        x, y, _ = blobs(n=1100)
        model = network()
        found = predict(model, read_examples((x, y)))
        with torch.no_grad():
            p = torch.softmax(model(torch.from_numpy(x)).double(), 1).numpy()
        assert found == pytest.approx(p, abs=1e-6)


class TestNetworks:
    @pytest.mark.parametrize(
        ("inputs", "kind"),
        [
            (np.zeros((6, 7), np.float32), "mlp"),
            (np.zeros((6, 28, 28), np.uint8), "mlp"),
            (np.zeros((6, 1, 32, 32), np.uint8), "mlp"),
            (np.zeros((6, 64, 64), np.uint8), "resnet"),
            (np.zeros((6, 3, 32, 32), np.uint8), "resnet"),
        ],
    )
    def test_one_for_each_kind_of_data(self, inputs, kind):
        examples = read_examples((inputs, [0, 1, 2, 0, 1, 2]))
        model = network_for(examples, seed=0)
        first = next(iter(make_batches(examples, 6, device="cpu", shuffle=False).epoch(0)))[0]
        assert model(first).shape == (6, 3)
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert bool(convolutions) == (kind == "resnet")
        assert same(model.parameters(), network_for(examples, seed=0).parameters())


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("model", "options", "word"),
        [
            (network(2), {}, r"one logit for each of 3 classes, shape \(2, 3\) .* got \(2, 2\)"),
            (network(), {"epochs": 0}, "epochs"),
            (network(), {"b": -1.0}, "b must be"),
            (network(), {"b": "best"}, "b must be"),
            (network(), {"batch_size": 0}, "batch_size"),
            (network(), {"precision": "int8"}, "precision"),
            (network(), {"names": ["a"]}, "names"),
            (network(), {"lr": 1e30, "b": 0.0, "epochs": 9}, "diverged"),
        ],
        ids=["scores", "epochs", "b", "b word", "batch", "precision", "names", "lr"],
    )
    def test_a_sentence(self, model, options, word):
        x, y, _ = blobs(n=60)
        with pytest.raises(ValueError, match=word):
            find_label_issues(model, (x, y), **({"b": 0.01, "epochs": 1} | options))

    def test_data_before_the_model(self):
        x, y, _ = blobs(n=60)
        with pytest.raises(ValueError, match=r"find_label_issues\(model, data\)"):
            find_label_issues((x, y), nn.Linear(x.shape[1], 3))

    def test_a_network_that_learned_nothing(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(400, 5)).astype(np.float32)
        y = rng.integers(3, size=400)
        with pytest.raises(ValueError, match="learned nothing about the labels: their mean"):
            find_label_issues(network(), (1e-6 * x, y), b=0.5, **QUICK)

    def test_a_rare_class_is_not_taken_for_nothing_learned(self):
        rng = np.random.default_rng(0)
        y = (np.arange(1000) < 20).astype(int)
        x = (rng.normal(size=(1000, 5)) + 2.5 * y[:, None]).astype(np.float32)
        given = np.where(rng.random(1000) < 0.01, 1 - y, y)
        found = find_label_issues(nn.Linear(5, 2), (x, given), b=0.01, epochs=20)
        wrong = given != y
        assert wrong[found.ranked[:5]].mean() > 0.5

    def test_no_last_batch_of_one(self):
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        x, y, _ = blobs(n=21)
        assert len(find_label_issues(model, (x, y), b=0.0, epochs=9, batch_size=4)) == 21
        assert avoid_single(16_513, 128) == 130
        assert avoid_single(3, 2) == 3
        assert avoid_single(5, 1) == 1

    def test_inputs_that_the_model_does_not_take(self):
        x, y, _ = blobs()
        with pytest.raises(ValueError, match=r"model does not take inputs of shape \(2, 4\): "):
            find_label_issues(nn.Sequential(nn.Linear(5, 3)), (x[:, :4], y))

    def test_options_that_would_be_ignored(self):
        x, y, _ = blobs(n=30)
        with pytest.raises(ValueError, match="epochs has no effect with a trained model"):
            find_label_issues(network(), (x, y), trained=True, epochs=3)
        p = np.full((30, 3), 1 / 3)
        for wrong in ({"trained": True}, {"precision": "bf16"}, {"b": 0.1}, {"device": "cuda"}):
            with pytest.raises(ValueError, match="has no effect with probabilities"):
                find_label_issues(p, y, **wrong)

    def test_one_class(self):
        with pytest.raises(ValueError, match="class"):
            found_in((np.zeros((5, 5), np.float32), [1] * 5))

    def test_the_top_of_the_library(self):
        assert neuvar.find_label_issues is find_label_issues
        assert neuvar.cleaning.NVRMClassifier.__name__ == "NVRMClassifier"
        with pytest.raises(AttributeError, match="has no attribute 'Other'"):
            _ = neuvar.cleaning.Other


def test_by_default_sam_takes_as_many_gradients_as_noise(monkeypatch):
    """Half of the epochs with two gradients each, at the radius that is asked for."""
    asked = []

    def watched(network, batches, optimizer, **options):
        asked.append((optimizer, options["epochs"]))
        return fit(network, batches, optimizer, **options)

    monkeypatch.setattr(training, "fit", watched)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = x + 4 * torch.eye(4)[torch.arange(60) % 3], torch.arange(60) % 3
    for options, epochs in (({}, 3), ({"rho": 0.2}, 3), ({"b": 0.01}, 5), ({"b": "auto"}, 5)):
        find_label_issues(nn.Linear(4, 3), data, epochs=5, lr=0.5, **options)
        optimizer, ran = asked.pop()
        assert ran == epochs
        assert isinstance(optimizer, NVRMSGD if "b" in options else SAM)
        if "b" not in options:
            assert optimizer.param_groups[0]["rho"] == options.get("rho", 0.1)
    with pytest.raises(ValueError, match="rho has no effect with b"):
        find_label_issues(nn.Linear(4, 3), data, rho=0.2, b=0.01)
    with pytest.raises(ValueError, match="rho must be"):
        find_label_issues(nn.Linear(4, 3), data, rho=-1)


def test_a_training_that_is_too_short_is_warned_about():
    train = mnist_excerpt().train
    data, model = (train.images[:300], train.labels[:300]), mlp((784, 256, 256, 10), seed=0)
    with pytest.warns(UserWarning, match=r"may not have learned enough: .* try more epochs"):
        find_label_issues(model, data, epochs=4)
    find_label_issues(model, data, epochs=30)  # warnings are errors


@pytest.mark.parametrize(("classes", "rate"), [(2, 0.4), (10, 0.6), (100, 0.6)])
def test_many_wrong_labels_alone_are_not_warned_about(classes, rate):
    """A network that has learned everything, and is as unsure as the labels are wrong."""
    p = np.full((50, classes), rate / (classes - 1))
    p[:, 0] = 1 - rate
    find._warn_if_unlearned(p)
    with pytest.warns(UserWarning, match="learned enough"):
        find._warn_if_unlearned(np.full((50, classes), 1 / classes))


def test_arguments_in_the_wrong_order_are_explained():
    x, y, _ = blobs()
    p = np.full((300, 3), 1 / 3)
    with pytest.raises(ValueError, match="an instance, got the class Linear"):
        find_label_issues(nn.Linear, (x, y))
    for labels in (y, y.tolist(), torch.from_numpy(y)):
        with pytest.raises(ValueError, match="probabilities must be the first argument"):
            find_label_issues(labels, p)
