"""Sharpness-aware minimization against its formula, and as an optimizer among others."""

import copy
import math
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from neuvar.baselines import PSGD, SAM
from neuvar.optim import NVRM
from tests.toy import backward, network, same, weights

INNERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def steps(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.climb()
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


def by_formula(model, inner, rho, numbers):
    """θ − η ∇L(θ + ρ g / ‖g‖), with autograd and torch alone."""
    params = list(model.parameters())
    for number in numbers:
        inner.zero_grad()
        backward(model, number)
        g = [p.grad.clone() for p in params]
        norm = math.sqrt(sum(float(x.square().sum()) for x in g))
        start = weights(model)
        with torch.no_grad():
            for p, x in zip(params, g, strict=True):
                p.copy_(p + rho * x / norm)
        inner.zero_grad()
        backward(model, number)
        with torch.no_grad():
            for p, before in zip(params, start, strict=True):
                p.copy_(before)
        inner.step()


class TestFormula:
    @pytest.mark.parametrize("inner", INNERS)
    @pytest.mark.parametrize("rho", [0.01, 0.05, 2.0])
    def test_two_passes_in_float64(self, inner, rho):
        ours, theirs = network(dtype=torch.float64), network(dtype=torch.float64)
        steps(ours, SAM(INNERS[inner](ours.parameters()), rho=rho), range(5))
        by_formula(theirs, INNERS[inner](theirs.parameters()), rho, range(5))
        for a, b in zip(weights(ours), weights(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)

    def test_a_quadratic(self):
        """For ½ h θ² the step is θ − η h (θ + ρ sign θ)."""
        p = torch.nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
        optimizer = SAM(torch.optim.SGD([p], lr=0.1), rho=0.3)
        for _ in range(2):
            if _:
                optimizer.climb()
                assert p.item() == pytest.approx(1.0)
            optimizer.zero_grad()
            (2.0 * p.square()).sum().backward()
        optimizer.step()
        assert p.item() == pytest.approx(0.7 - 0.1 * 4 * 1.0)

    @pytest.mark.parametrize("inner", INNERS)
    def test_without_a_radius_it_is_the_inner_optimizer(self, inner):
        ours, theirs = network(), network()
        steps(ours, SAM(INNERS[inner](ours.parameters()), rho=0.0), range(4))
        plain = INNERS[inner](theirs.parameters())
        for number in range(4):
            plain.zero_grad()
            backward(theirs, number)
            plain.step()
        assert same(weights(ours), weights(theirs))

    def test_each_group_has_its_radius_but_the_norm_is_one(self):
        model = network(dtype=torch.float64)
        first, *others = model.parameters()
        groups = [{"params": [first], "rho": 0.0}, {"params": others}]
        optimizer = SAM(torch.optim.SGD(groups, lr=0.1), rho=0.5)
        before = weights(model)
        backward(model, 0)
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        optimizer.climb()
        assert torch.equal(first, before[0])
        for p, start in zip(others, before[1:], strict=True):
            torch.testing.assert_close(p.detach() - start, 0.5 * p.grad / norm)

    @pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf])
    def test_a_gradient_that_is_zero_or_not_finite_climbs_nowhere(self, wrong):
        model = network()
        optimizer, before = SAM(torch.optim.SGD(model.parameters(), lr=0.1)), weights(model)
        for p in model.parameters():
            p.grad = torch.full_like(p, wrong)
        optimizer.climb()
        assert same(weights(model), before)
        optimizer.state_dict()  # it has not climbed

    def test_without_gradients(self):
        model = network()
        optimizer, before = SAM(torch.optim.SGD(model.parameters(), lr=0.1)), weights(model)
        optimizer.climb()
        optimizer.step()
        assert same(weights(model), before)

    def test_half_precision(self):
        model = network(dtype=torch.bfloat16)
        optimizer, before = (
            SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=1.0),
            weights(model),
        )
        backward(model, 0)
        optimizer.climb()
        moved = torch.cat(
            [(a - b).float().flatten() for a, b in zip(weights(model), before, strict=True)]
        )
        assert moved.norm().item() == pytest.approx(1.0, rel=0.05)


class TestWayBack:
    def test_the_weights_come_back_to_the_bit(self):
        model = network()
        optimizer, before = (
            SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=3.0),
            weights(model),
        )
        backward(model, 0)
        optimizer.climb()
        assert not same(weights(model), before)
        optimizer.descend()
        assert same(weights(model), before)
        optimizer.descend()
        assert same(weights(model), before)

    def test_climbing_twice_begins_at_the_same_place(self):
        model = network()
        optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=3.0)
        backward(model, 0)
        optimizer.climb()
        once = weights(model)
        optimizer.climb()
        assert same(weights(model), once)

    def test_a_step_without_a_climb_is_the_inner_ones(self):
        ours, theirs = network(), network()
        for model, optimizer in (
            (ours, SAM(torch.optim.SGD(ours.parameters(), lr=0.1))),
            (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)),
        ):
            backward(model, 0)
            optimizer.step()
        assert same(weights(ours), weights(theirs))


class TestAsAnOptimizer:
    @pytest.mark.parametrize("inner", INNERS)
    def test_the_state_goes_into_a_fresh_one(self, inner):
        model, other = network(), network(seed=1)
        optimizer = SAM(INNERS[inner](model.parameters()), rho=0.2)
        steps(model, optimizer, range(3))
        fresh = SAM(INNERS[inner](other.parameters()), rho=0.7)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert fresh.param_groups is fresh.inner.param_groups
        assert fresh.state is fresh.inner.state
        assert fresh.param_groups[0]["rho"] == 0.2
        steps(model, optimizer, range(3, 6))
        steps(other, fresh, range(3, 6))
        assert same(weights(model), weights(other))

    def test_a_plain_optimizers_state_has_no_radius(self):
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.3)
        optimizer = SAM(torch.optim.SGD(network().parameters(), lr=0.1), rho=0.7)
        optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["rho"] == 0.7
        assert optimizer.inner.param_groups[0]["lr"] == 0.3

    def test_loading_ends_a_climb(self):
        model = network()
        optimizer, before = (
            SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=3.0),
            weights(model),
        )
        saved = optimizer.state_dict()
        backward(model, 0)
        optimizer.climb()
        optimizer.load_state_dict(saved)
        assert same(weights(model), before)

    def test_no_state_between_climb_and_step(self):
        model = network()
        optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model, 0)
        optimizer.climb()
        for save in (optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
            with pytest.raises(RuntimeError, match="SAM has climbed"):
                save()

    def test_a_scheduler_reaches_the_inner_optimizer(self):
        model = network()
        optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = StepLR(optimizer, 1)
        steps(model, optimizer, [0])
        schedule.step()
        assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.01)
        optimizer.load_state_dict(optimizer.state_dict())
        steps(model, optimizer, [1])
        schedule.step()
        assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.001)

    def test_a_new_group_is_trained(self):
        model, more = network(), torch.nn.Parameter(torch.ones(3))
        optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)
        optimizer.add_param_group({"params": [more], "lr": 1.0})
        group = optimizer.inner.param_groups[1]
        assert (group["lr"], group["rho"]) == (1.0, 0.5)
        more.square().sum().backward()
        optimizer.climb()
        assert more.detach().norm().item() == pytest.approx(math.sqrt(3) + 0.5)
        optimizer.step()
        assert torch.allclose(more.detach(), torch.full((3,), -1.0))
        with pytest.raises(ValueError, match="rho must be"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(more)], "rho": -1})
        assert len(optimizer.param_groups) == 2

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    @pytest.mark.parametrize("inner", INNERS)
    def test_copies_go_on_alike(self, how, inner):
        model = network()
        optimizer = SAM(INNERS[inner](model.parameters()), rho=0.2)
        steps(model, optimizer, range(2))
        both = (model, optimizer)
        other, copied = (
            copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
        )
        steps(model, optimizer, range(2, 4))
        steps(other, copied, range(2, 4))
        assert same(weights(model), weights(other))
        assert copied.param_groups is copied.inner.param_groups
        assert copied.param_groups[0]["params"][0] is next(other.parameters())

    def test_hooks_see_steps(self):
        model, seen = network(), []
        optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        steps(model, optimizer, range(3))
        assert len(seen) == 3


class TestBadInput:
    @pytest.mark.parametrize("rho", [-0.1, math.nan, math.inf, "1", None])
    def test_the_radius(self, rho):
        inner = torch.optim.SGD(network().parameters(), lr=0.1)
        with pytest.raises(ValueError, match="rho must be a finite number >= 0"):
            SAM(inner, rho=rho)
        assert "rho" not in inner.param_groups[0]

    def test_the_radius_of_a_group(self):
        inner = torch.optim.SGD([{"params": network().parameters(), "rho": -1.0}], lr=0.1)
        with pytest.raises(ValueError, match="rho must be"):
            SAM(inner)

    def test_the_inner_optimizer(self):
        params = list(network().parameters())
        plain = torch.optim.SGD(params, lr=0.1)
        for inner in (
            NVRM(plain, b=0.1),
            PSGD(params, lr=0.1, b=0.1),
            SAM(torch.optim.Adam(params)),
        ):
            with pytest.raises(ValueError, match="inner must not perturb weights itself, got"):
                SAM(inner)
        with pytest.raises(ValueError, match="inner must evaluate the loss once per step"):
            SAM(torch.optim.LBFGS(params))
        with pytest.raises(ValueError, match=r"inner must be a torch.optim.Optimizer, got list"):
            SAM(params)

    def test_a_closure(self):
        with pytest.raises(ValueError, match="SAM takes no closure"):
            SAM(torch.optim.SGD(network().parameters(), lr=0.1)).step(lambda: None)
