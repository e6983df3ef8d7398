"""Which b? The place on a known curve, what is left alone, and what is refused."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import neuvar
from neuvar import find_b, find_label_issues
from neuvar.data import Batches, Split
from neuvar.measures.variability import Curve
from neuvar.models import mlp
from neuvar.optim.auto_b import SHARE
from neuvar.train import range_test
from neuvar.train.range_test import first_examples
from tests.toy import same


def problem(n=2000):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def curve(height, scales):
    points = [SimpleNamespace(b=b, perturbed=height(b)) for b in scales]
    return Curve(tuple(points))


class TestThePlace:
    def test_in_closed_form(self):
        """For L = a + c b², the cost 2 c b² is the budget at one b."""
        first, a, c = 2.3, 0.5, 4.0
        scales = [0.02 * 1.05**k for k in range(80)]
        b, because = range_test._choose(curve(lambda b: a + c * b * b, scales), first)
        expected = 0.0
        for _ in range(100):
            budget = SHARE * math.sqrt((first - a - c * expected**2) * first)
            expected = math.sqrt(budget / (2 * c))
        assert b == pytest.approx(expected, rel=1e-3)
        assert f"{b:.2g}" in because

    def test_a_curve_without_a_budget_and_one_that_is_too_steep_from_the_start(self):
        scales = [0.01, 0.02, 0.04]
        assert range_test._choose(curve(lambda _: 0.5, scales), 2.0)[0] == 0.04
        b, _ = range_test._choose(curve(lambda b: {0.01: 0.5}.get(b, math.inf), scales), 2.0)
        assert 0.0099 < b < 0.0142  # before the middle of the first step up
        steep, _ = range_test._choose(curve(lambda b: 100 * b, scales), 2.0)
        assert 0.0099 < steep < 0.02

    def test_the_result_is_printed_without_the_points_of_the_curve(self):
        result = range_test.FoundB(0.05, curve(lambda b: b, [0.1]), 2.0, 30, "because")
        assert repr(result) == "FoundB(b=0.05, first=2.0, steps=30, because='because')"

    def test_nothing_learned(self):
        with pytest.raises(ValueError, match=r"nothing was learned: the loss was 2 before"):
            range_test._choose(curve(lambda _: 2.5, [0.1, 0.2]), 2.0)


class TestTheWhole:
    def test_it_finds_the_same_b_for_every_kind_of_data(self):
        x, y = problem()
        model = mlp((6, 32, 4), seed=0)
        before, state = copy.deepcopy(model), torch.get_rng_state()
        result = find_b(model, cross_entropy, (x, y), epochs=20)
        assert 16 <= result.steps < 20 * 16 // 10  # the curve costs the rest of a tenth
        assert 0.001 < result.b < 2
        assert result.curve.b[0] < result.b < result.curve.b[-1]
        assert result.first == pytest.approx(math.log(4), abs=0.5)
        assert same(model.parameters(), before.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        again = find_b(model, cross_entropy, (x, y), epochs=20)
        assert again.b == result.b
        assert find_b(model, cross_entropy, (x.numpy(), y.numpy()), epochs=20).b == result.b
        loader = DataLoader(TensorDataset(x, y), batch_size=128)
        batches = list(loader)
        by_loader = find_b(model, cross_entropy, loader, epochs=20)
        assert by_loader.b == find_b(model, cross_entropy, batches, epochs=20).b
        assert by_loader.b == pytest.approx(result.b, rel=0.7)  # the order is another

    def test_batches_of_other_forms(self):
        """Dicts, and tuples of more than two parts, go to the model as everywhere."""

        class Parts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp((6, 32, 4), seed=0)

            def forward(self, left, right):
                return self.net(torch.cat([left, right], 1))

        x, y = problem()
        pairs = list(zip(x.split(128), y.split(128), strict=True))
        expected = find_b(mlp((6, 32, 4), seed=0), cross_entropy, pairs, epochs=20).b
        triples = [(a[:, :2], a[:, 2:], b) for a, b in pairs]
        dicts = [{"right": a[:, 2:], "labels": b, "left": a[:, :2]} for a, b in pairs]
        for batches in (triples, dicts):
            result = find_b(Parts(), cross_entropy, batches, epochs=20)
            assert result.b == pytest.approx(expected, rel=1e-3)

    def test_only_so_many_examples_are_looked_at(self):
        x, y = problem(700)
        result = first_examples(iter([(x[:250], y[:250], 3), (x[250:], y[250:], 3)]), 300)
        assert [(len(a), len(b), c) for a, b, c in result] == [(250, 250, 3), (50, 50, 3)]
        assert torch.equal(result[1][0], x[250:300])
        (only,) = first_examples(iter([{"x": x, "y": y, "name": "z"}]), 300)
        assert (len(only["x"]), len(only["y"]), only["name"]) == (300, 300, "z")

    @pytest.mark.parametrize("own", [False, True])
    def test_it_depends_on_its_seed_alone(self, own):
        x, y = problem(600)
        model = mlp((6, 32, 4), seed=0)
        model = torch.nn.Sequential(torch.nn.Dropout(0.2), model)
        result = {}
        for seed, state in ((0, 1), (0, 2), (3, 1)):
            torch.manual_seed(state)
            generator = torch.Generator().manual_seed(state) if own else None
            data = TensorDataset(x, y)
            loader = DataLoader(data, batch_size=64, shuffle=True, generator=generator)
            before = torch.get_rng_state(), generator and generator.get_state()
            b = find_b(model, cross_entropy, loader, seed=seed).b
            assert result.setdefault(seed, b) == b
            assert torch.equal(torch.get_rng_state(), before[0])
            assert not own or torch.equal(generator.get_state(), before[1])
        assert result[0] != result[3]

    def test_each_pass_over_a_shuffled_loader_has_its_order(self):
        seen = []

        def loss(outputs, targets):
            if outputs.requires_grad:
                seen.append(tuple(targets.tolist()))
            return cross_entropy(outputs, targets % 4)

        x, _ = problem(200)
        loader = DataLoader(TensorDataset(x, torch.arange(200)), batch_size=200, shuffle=True)
        result = find_b(mlp((6, 32, 4), seed=0), loss, loader, epochs=200)
        assert len(set(seen)) == result.steps > 9

    def test_a_split(self):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(1000) % 4
        images = torch.randint(0, 60, (1000, 3, 3), generator=generator, dtype=torch.uint8)
        images[:, 0, 0] = (60 * y).byte()
        split = Split(images, y)
        model = torch.nn.Sequential(torch.nn.Flatten(), mlp((9, 32, 4), seed=0))
        result = find_b(model, cross_entropy, split, epochs=40)
        batches = Batches(split, 128, seed=0)
        assert find_b(model, cross_entropy, batches, epochs=40).b == result.b
        assert batches.next_epoch == 0
        with pytest.raises(ValueError, match=r"does not support uint8 inputs.* images / 255"):
            find_b(model, cross_entropy, (images, y))

    def test_data_that_is_gone_after_one_pass(self):
        class Once:
            def __init__(self):
                self.left = iter([problem(50)] * 5)

            def __iter__(self):
                return self.left

        with pytest.raises(ValueError, match="empty in a second pass"):
            find_b(mlp((6, 16, 4), seed=0), cross_entropy, Once())

    def test_an_optimizer_of_ones_own(self):
        x, y = problem()
        made = []

        def adam(params):
            made.append(torch.optim.Adam(params, lr=1e-2))
            return made[0]

        result = find_b(
            mlp((6, 32, 4), seed=0), cross_entropy, (x, y), optimizer=adam, noise="uniform"
        )
        assert len(made[0].state) == 4
        assert {point.noise for point in result.curve.points} == {"uniform"}

    def test_the_plot_shows_the_place(self):
        x, y = problem(500)
        result = find_b(mlp((6, 16, 4), seed=0), cross_entropy, (x, y))
        ax = result.plot()
        assert any(list(line.get_xdata()) == [result.b, result.b] for line in ax.lines)
        assert ax.get_xscale() == "log"
        assert f"b = {result.b:.2g}" in [text.get_text() for text in ax.texts]
        assert result.because.startswith(f"After {result.steps} steps")

    @pytest.mark.parametrize(
        ("data", "options", "word"),
        [
            (problem(50), {"epochs": 0}, "epochs"),
            ([], {}, "data is empty"),
            (problem(50), {"noise": "cauchy"}, "cauchy"),
            (problem(50), {"optimizer": lambda p: torch.optim.SGD(p, lr=1e30)}, "not finite"),
            (
                problem(500),
                {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-9)},
                "nothing was learned",
            ),
        ],
        ids=["epochs", "empty", "noise", "diverged", "nothing"],
    )
    def test_a_sentence(self, data, options, word):
        with pytest.raises(ValueError, match=word):
            find_b(mlp((6, 16, 4), seed=0), cross_entropy, data, **options)

    def test_the_top_of_the_library(self):
        assert neuvar.find_b is find_b


class TestWhatIsPerturbed:
    @pytest.mark.parametrize("how", ["frozen", "b of its group", "not in the optimizer"])
    def test_weights_without_noise_in_training_have_none_in_the_curve(self, how):
        moved = []

        class Still(nn.Linear):
            def forward(self, x):
                moved.append(not torch.equal(self.weight, self.start))
                return super().forward(x)

        torch.manual_seed(0)
        still = Still(6, 32)
        still.register_buffer("start", still.weight.detach().clone())
        still.requires_grad_(how != "frozen")

        def sgd(params):
            weight, bias, *others = params
            groups = [{"params": others, "lr": 0.1}]
            if how != "not in the optimizer":
                groups = [{"params": [weight, bias], "lr": 0.0, "b": 0.0}, *groups]
            return torch.optim.SGD(groups)

        model = nn.Sequential(still, nn.ReLU(), nn.Linear(32, 4))
        own = None if how == "frozen" else sgd
        result = find_b(model, cross_entropy, problem(), optimizer=own)
        assert result.curve.points[-1].difference > 0
        assert moved
        assert not any(moved)

    def test_a_model_under_noise_is_copied_without_it(self):
        x, y = problem(600)
        model = mlp((6, 32, 4), seed=0)
        expected = find_b(model, cross_entropy, (x, y)).b
        optimizer = neuvar.NVRMSGD(model.parameters(), lr=1e-30, b=0.5)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        noisy = copy.deepcopy(list(model.parameters()))
        assert find_b(model, cross_entropy, (x, y)).b == expected
        assert same(model.parameters(), noisy)
        optimizer.eval()

    def test_layers_that_are_made_by_their_first_input(self):
        model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(4))
        one, again = (find_b(model, cross_entropy, problem(600)).b for _ in range(2))
        assert one == again
        assert nn.parameter.is_lazy(model[0].weight)

    def test_nothing_to_train(self):
        x, y = problem(600)
        for model in (mlp((6, 8, 4), seed=0).requires_grad_(False), nn.Identity()):
            with pytest.raises(ValueError, match="model has nothing to train"):
                find_b(model, cross_entropy, (x, y))
        with pytest.raises(ValueError, match="model has nothing to train"):
            find_label_issues(nn.Linear(6, 4).requires_grad_(False), (x, y))
        with pytest.raises(ValueError, match="no trained weights with b="):
            find_b(
                mlp((6, 8, 4), seed=0),
                cross_entropy,
                (x, y),
                optimizer=lambda p: torch.optim.SGD([{"params": list(p), "b": 0.1}], lr=0.1),
            )


class TestPairs:
    def test_of_every_kind(self):
        x, y = problem(600)
        model = mlp((6, 32, 4), seed=0)
        expected = find_b(model, cross_entropy, (x, y)).b
        fixed = x.numpy().copy()
        fixed.flags.writeable = False
        for pair in (
            (x.double().numpy(), y.numpy()),
            (x.numpy(), y.int().numpy()),
            (x.numpy().astype(">f4"), y.numpy().astype(np.uint16)),
            [fixed, y],
            (x, y.numpy()),
            (x.double(), y.byte()),
            (x, y.tolist()),
            (x.tolist(), y.tolist()),
        ):
            assert find_b(model, cross_entropy, pair).b == expected

    def test_the_model_keeps_its_precision(self):
        x, y = problem(600)
        seen = set()

        def loss(outputs, targets):
            seen.add(outputs.dtype)
            return cross_entropy(outputs, targets)

        find_b(mlp((6, 32, 4), seed=0).double(), loss, (x, y))
        assert seen == {torch.float64}

    def test_of_numbers_to_predict(self):
        x, _ = problem(600)
        y = x[:, :1] - x[:, 1:2]
        model = mlp((6, 32, 1), seed=0)
        expected = find_b(model, mse_loss, (x, y)).b
        assert find_b(model, mse_loss, (x.numpy(), y.double().numpy())).b == expected
        assert find_b(model, mse_loss, (x.tolist(), y.tolist())).b == expected

    def test_two_batches_are_no_pair(self):
        x, y = problem(600)
        model = mlp((6, 32, 4), seed=0)
        tuples = [(x[:300], y[:300]), (x[300:], y[300:])]
        expected = find_b(model, cross_entropy, tuples, epochs=100)
        lists = tuple(map(list, tuples))
        assert find_b(model, cross_entropy, lists, epochs=100).b == expected.b

    def test_of_no_numbers(self):
        x, y = problem(50)
        with pytest.raises(ValueError, match="data must be numbers, got an array of <U"):
            find_b(mlp((6, 8, 4), seed=0), cross_entropy, (x, y.numpy().astype(str)))
        with pytest.raises(ValueError, match="must have the same length"):
            find_b(mlp((6, 8, 4), seed=0), cross_entropy, (x.numpy(), y[:9]))

    def test_no_last_batch_of_one(self):
        x, y = problem(577)
        model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        assert find_b(model, cross_entropy, (x, y), batch_size=32).b > 0
        images = (40 * x.abs()).clamp(max=255).byte().view(577, 2, 3)
        split = Split(images, (images[:, 0, 0] > 30).long())
        flat = nn.Sequential(nn.Flatten(), model)
        assert find_b(flat, cross_entropy, split, batch_size=32, epochs=100).b > 0


@pytest.mark.parametrize(("n", "epochs", "most"), [(500, 30, 0.17), (2000, 20, 0.105)])
def test_what_it_costs(n, epochs, most):
    """In passes over an example; to go back costs two."""
    passes = []

    class Counted(nn.Sequential):
        def forward(self, x):
            passes.append((3 if torch.is_grad_enabled() else 1) * len(x))
            return super().forward(x)

    model = Counted(mlp((6, 128, 128, 4), seed=0))
    find_b(model, cross_entropy, problem(n), epochs=epochs)
    assert 0.09 < sum(passes) / (3 * n * epochs) < most
