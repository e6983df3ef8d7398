"""Which b? The place on a known curve, what is left alone, and what is refused."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import neuvar
from neuvar import find_b
from neuvar.measures.curve import Curve
from neuvar.models import mlp
from neuvar.optim.auto import SHARE
from neuvar.train import range_test
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
        """For L = a + c b², the cost 2 c b² is the price at one b."""
        first, a, c = 2.3, 0.5, 4.0
        scales = [0.02 * 1.05**k for k in range(80)]
        b, because = range_test._chosen(curve(lambda b: a + c * b * b, scales), first)
        expected = 0.0
        for _ in range(100):
            price = SHARE * math.sqrt((first - a - c * expected**2) * first)
            expected = math.sqrt(price / (2 * c))
        assert b == pytest.approx(expected, rel=1e-3)
        assert f"{b:.2g}" in because

    def test_a_curve_without_a_price_and_one_that_is_too_steep_from_the_start(self):
        scales = [0.01, 0.02, 0.04]
        assert range_test._chosen(curve(lambda _: 0.5, scales), 2.0)[0] == 0.04
        b, _ = range_test._chosen(curve(lambda b: {0.01: 0.5}.get(b, math.inf), scales), 2.0)
        assert 0.0099 < b < 0.0142  # before the middle of the first step up
        steep, _ = range_test._chosen(curve(lambda b: 100 * b, scales), 2.0)
        assert 0.0099 < steep < 0.02

    def test_nothing_learned(self):
        with pytest.raises(ValueError, match=r"nothing was learned: the loss was 2 before"):
            range_test._chosen(curve(lambda _: 2.5, [0.1, 0.2]), 2.0)


class TestTheWhole:
    def test_it_finds_the_same_b_for_every_kind_of_data(self):
        x, y = problem()
        model = mlp((6, 32, 4), seed=0)
        before, state = copy.deepcopy(model), torch.get_rng_state()
        found = find_b(model, cross_entropy, (x, y), epochs=20)
        assert found.steps == 20 * 16 // 10
        assert 0.001 < found.b < 2
        assert found.curve.b[0] < found.b < found.curve.b[-1]
        assert found.first == pytest.approx(math.log(4), abs=0.5)
        assert same(model.parameters(), before.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        again = find_b(model, cross_entropy, (x, y), epochs=20)
        assert again.b == found.b
        assert find_b(model, cross_entropy, (x.numpy(), y.numpy()), epochs=20).b == found.b
        loader = DataLoader(TensorDataset(x, y), batch_size=128)
        batches = list(loader)
        by_loader = find_b(model, cross_entropy, loader, epochs=20)
        assert by_loader.b == find_b(model, cross_entropy, batches, epochs=20).b
        assert by_loader.b == pytest.approx(found.b, rel=0.7)  # the order is another

    def test_an_optimizer_of_ones_own(self):
        x, y = problem()
        made = []

        def adam(params):
            made.append(torch.optim.Adam(params, lr=1e-2))
            return made[0]

        found = find_b(
            mlp((6, 32, 4), seed=0), cross_entropy, (x, y), optimizer=adam, noise="uniform"
        )
        assert len(made[0].state) == 4
        assert {point.noise for point in found.curve.points} == {"uniform"}

    def test_the_plot_shows_the_place(self):
        x, y = problem(500)
        found = find_b(mlp((6, 16, 4), seed=0), cross_entropy, (x, y))
        ax = found.plot()
        assert any(list(line.get_xdata()) == [found.b, found.b] for line in ax.lines)
        assert ax.get_xscale() == "log"
        assert f"b = {found.b:.2g}" in [text.get_text() for text in ax.texts]
        assert found.because.startswith(f"After {found.steps} steps")

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
