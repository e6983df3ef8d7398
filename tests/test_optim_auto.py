"""b that sets itself: what noise costs, where b goes, what it survives, and what is refused."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from neuvar import NVRM, NVRMSGD, NVRMAdam
from neuvar.baselines import PSGD, SGLD
from neuvar.noise import FAMILIES, std_from_b
from neuvar.optim import auto_b
from neuvar.optim.auto_b import AutoB, inner_product
from neuvar.schedule import BSchedule, Constant
from tests.toy import same

RISEN = auto_b.WAIT + auto_b.SECOND_RISE
"""Looks after which b follows its cost alone."""


class Bowl(nn.Module):
    """The loss is h |w|² / 2: noise of scale b raises it by b² h d / 2."""

    def __init__(self, d=4000, h=1.0):
        super().__init__()
        self.w, self.h = nn.Parameter(torch.ones(d // 2, 2)), h

    def forward(self):
        return self.h * self.w.square().sum() / 2


def problem(seed=0):
    """A small classifier and its data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model, x, y


def worth(loss, value):
    """A loss with the same gradient and another value."""
    return loss + (value - loss.detach())


def train(model, optimizer, x, y, steps, *, factor=1.0):
    """An ordinary loop; returns b after each step."""
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = factor * cross_entropy(model(x), y)
        optimizer.report_loss(loss)
        loss.backward()
        optimizer.step()
        scales.append(optimizer.param_groups[0]["b"])
    return scales


def products(model, optimizer, count):
    """Noise times gradient, at weights that stay where they are, under fresh noise each time."""
    found = []
    for _ in range(count):
        optimizer.resample()
        optimizer.zero_grad()
        model().backward()
        eps = optimizer._weights.eps
        found.append(
            sum(float(inner_product(t, p.grad)) for p, t in eps.items() if p.grad is not None)
        )
    return torch.tensor(found, dtype=torch.float64)


class TestTheCost:
    @pytest.mark.parametrize("noise", FAMILIES)
    def test_it_is_how_the_risk_rises_with_b(self, noise):
        """E[ε·g] = b dE[L]/db, which is d h std² for a bowl, whatever the family."""
        model = Bowl(h=3.0)
        optimizer = NVRMSGD(model.parameters(), lr=0.1, std=0.2, noise=noise)
        found = products(model, optimizer, 200)
        assert abs(found.mean() - 4000 * 3 * 0.04) < 4 * found.std() / math.sqrt(200)

    def test_it_is_nothing_for_a_gradient_that_does_not_know_of_the_noise(self):
        model = Bowl()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.3)
        fixed = torch.randn(2000, 2, generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(400):
            optimizer.resample()
            found.append(float(inner_product(optimizer._weights.eps[model.w], fixed)))
        t = torch.tensor(found) / (0.3 * fixed.norm())
        assert abs(t.mean()) < 4 / math.sqrt(400)
        assert abs(t.std() - 1) < 4 / math.sqrt(800)

    @pytest.mark.parametrize("sampler", ["table", "fresh"])
    def test_by_hand_with_turned_noise_and_a_gradient_that_lies_otherwise(self, sampler):
        model = Bowl()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.3, sampler=sampler)
        optimizer.resample()
        optimizer.resample(antithetic=True)
        model.w.grad = torch.randn(2, 2000, generator=torch.Generator().manual_seed(1)).t()
        eps = model.w.detach() - optimizer.clean_copy(model.w)
        found = float(inner_product(optimizer._weights.eps[model.w], model.w.grad))
        assert found == pytest.approx(float((eps * model.w.grad).sum()), rel=1e-3)


class TestControl:
    def test_the_rule(self):
        def change(cost, loss=0.3, updates=RISEN):
            return AutoB(first=2.3, loss=loss, cost=cost, updates=updates).change

        budget, fastest = (
            auto_b.SHARE * math.sqrt(2.0 * 2.3),
            auto_b.SPEED * auto_b.MAX_LOG_RATIO,
        )
        assert (
            change(0.999 * budget)
            == change(budget / 2)
            == change(1.001 * budget / auto_b.BAND)
            == 0
        )
        assert change(0.0) == change(-50.0) == fastest
        assert change(math.e * budget) == pytest.approx(-auto_b.SPEED)
        assert change(budget / auto_b.BAND / math.e) == pytest.approx(auto_b.SPEED)
        assert change(1e9) == -fastest
        assert change(0.0, loss=2.3) == change(-1.0, loss=9.0) == -fastest  # nothing learned
        # A network that noise has blinded pays nothing for it, and its loss falls by chance.
        assert change(0.0, loss=2.28) == change(0.0, loss=2.28, updates=auto_b.WAIT) == -fastest
        assert change(0.0, loss=2.27) == fastest
        assert change(0.0, loss=9.3) == change(0.0, loss=9.3, updates=1) == math.log(auto_b.SHRINK)

    def test_the_rises(self):
        def change(updates, cost):
            return AutoB(first=2.3, loss=0.3, cost=cost, updates=updates).change

        for cost in (0.0, 1e9):
            first = sum(change(k, cost) for k in range(1, auto_b.FIRST_RISE + 1))
            assert first == pytest.approx(math.log(auto_b.FIRST_RISE))
            assert {change(k, cost) for k in range(auto_b.FIRST_RISE, auto_b.WAIT)} == {0}
        budget = auto_b.SHARE * math.sqrt(2.0 * 2.3)
        second = sum(change(k, 0.99 * budget) for k in range(auto_b.WAIT, RISEN + 1))
        assert second == pytest.approx(-math.log(auto_b.FIRST_HEIGHT))
        for k in range(auto_b.WAIT, RISEN):  # where noise costs too much there is none
            assert change(k, math.e * budget) == pytest.approx(-auto_b.SPEED)

    def test_the_running_means(self):
        control = AutoB(first=9.0)
        for k, z in enumerate([1.0, 2.0, 6.0]):
            control = control.update(z, -z)
            assert control.updates == k + 1
        assert (control.cost, control.loss) == pytest.approx((3.0, -3.0))  # few weigh the same
        for _ in range(200):
            control = control.update(5.0, 1.0)
        assert (control.cost, control.loss) == pytest.approx((5.0, 1.0))
        expected = auto_b.DECAY * 5 + (1 - auto_b.DECAY) * 10
        assert control.update(10.0, 1.0).cost == pytest.approx(expected)

    def test_the_first_loss_is_the_first_that_is_a_number(self):
        control = AutoB()
        for loss in (math.nan, math.inf, 2.0, 1.0):
            assert control.due == math.isinf(control.first)
            control = control.update(0.0, loss)
        assert (control.first, control.loss, control.updates) == (2.0, 1.0, 1)

    def test_the_first_loss_is_not_that_of_weights_that_are_too_large(self):
        """While the loss comes from their size it is not taken, but not for ever."""
        control = AutoB()
        for loss in (50.0, -50.0):
            assert control.update(0.0, loss, 0.51 * 50) == control
            assert control.update(0.0, loss, 0.49 * 50).first == loss
        assert control.update(0.0, 50.0, -1e9).first == 50
        late = AutoB(steps=auto_b.LATEST_FIRST_LOSS)
        assert late.update(0.0, 50.0, 1e9).first == 50

    def test_a_last_layer_that_is_too_large(self):
        """Its first loss says nothing about what there is to learn: that is log 4."""
        model, x, y = problem()
        with torch.no_grad():
            model[2].weight.mul_(100)
        optimizer = NVRMAdam(model.parameters(), lr=0.1, b="auto")
        start = optimizer.param_groups[0]["b"]
        before = float(cross_entropy(model(x), y).detach())
        scales = train(model, optimizer, x, y, 1)
        assert AutoB(*optimizer.param_groups[0]["auto"]).first == math.inf
        scales += train(model, optimizer, x, y, 149)
        control = AutoB(*optimizer.param_groups[0]["auto"])
        assert control.first < before / 5
        assert scales[: scales.count(start)] == [start] * scales.count(start)  # it waits, then goes
        assert 1 < scales.count(start) < 150
        again, x, y = problem()
        ordinary = NVRMAdam(again.parameters(), lr=0.1, b="auto")
        first = float(cross_entropy(again(x), y).detach())
        train(again, ordinary, x, y, 1)
        assert AutoB(*ordinary.param_groups[0]["auto"]).first == first

    def test_b_stays_where_it_can_come_back_from(self):
        seen = AutoB(first=2.0, updates=RISEN, start=0.1)
        down, up = (seen._replace(loss=loss) for loss in (3.0, 1.0))
        b = 0.1
        for _ in range(1000):
            b = down.applied(b)
        assert b == pytest.approx(1e-4)
        for _ in range(1000):
            b = up.applied(b)
        assert b == pytest.approx(100)

    @pytest.mark.parametrize("start", [1e-3, 1.0, 30.0])
    def test_a_bowl_from_any_start(self, start):
        """Where weights stay, b comes to where the cost, d h b², is near its budget or below."""
        model = Bowl(d=20_000, h=0.01)
        optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=1e-12), b="auto")
        optimizer.param_groups[0]["b"] = auto_b.FIRST_HEIGHT * start / auto_b.FIRST_RISE
        for step in range(4000):
            optimizer.zero_grad()
            # It began at 2000 and is at 100, but for noise, which adds half of its cost.
            loss = model() if step else worth(model(), 2000.0)
            optimizer.report_loss(loss)
            loss.backward()
            optimizer.step()
        cost = 200 * optimizer.param_groups[0]["b"] ** 2
        budget = auto_b.SHARE * math.sqrt((1900 - cost / 2) * 2000)
        expected = {1e-3: budget / auto_b.BAND, 1.0: 200, 30.0: budget}[start]
        assert cost == pytest.approx(expected, rel=0.15)

    def test_where_it_begins(self):
        """The noise of all layers adds up to the same, whatever they are."""
        for model in (
            nn.Sequential(nn.Linear(9000, 50), nn.ReLU(), nn.Linear(50, 7)),
            nn.Sequential(nn.Conv2d(900, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 7)),
        ):
            optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
            layers = [p[0].numel() for p in model.parameters() if p.ndim > 1]
            group = optimizer.param_groups[0]
            start = AutoB(*group["auto"]).start
            assert group["b"] == pytest.approx(auto_b.FIRST_HEIGHT * start / auto_b.FIRST_RISE)
            assert sum(start * math.sqrt(n / 2) for n in layers) == pytest.approx(
                auto_b.TOTAL_NOISE
            )
            other = NVRMSGD(model.parameters(), lr=0.1, b="auto", noise="laplace")
            assert other.param_groups[0]["b"] == pytest.approx(group["b"] / math.sqrt(2))
        for small in (nn.Linear(3, 2), nn.BatchNorm1d(5)):
            group = NVRMSGD(small.parameters(), lr=0.1, b="auto").param_groups[0]
            assert AutoB(*group["auto"]).start == auto_b.LARGEST_STD

    def test_only_weights_that_carry_noise_count(self):
        def start(*groups, **options):
            return AutoB(*NVRMSGD(groups, b="auto", **options).param_groups[0]["auto"]).start

        wide, other, frozen = nn.Linear(9000, 50), nn.Linear(5000, 7), nn.Linear(6000, 9)
        frozen.requires_grad_(False)
        table, token = nn.Parameter(torch.zeros(1, 400, 900)), nn.Parameter(torch.zeros(1, 1, 9000))
        one = start({"params": [wide.weight]})
        assert one == auto_b.TOTAL_NOISE / math.sqrt(4500)
        assert start({"params": [wide.weight, frozen.weight]}) == one
        assert start({"params": [wide.weight, table, token]}) == one
        quiet = {"params": [other.weight], "b": 0.0}
        assert start({"params": [wide.weight]}, quiet) == one
        assert start({"params": [wide.weight]}, {"params": [other.weight], "std": 0.1}) == one
        both = start({"params": [wide.weight, other.weight]})
        assert both == start({"params": [wide.weight]}, {"params": [other.weight]}) < one
        one_output = nn.Linear(9000, 1)  # is a layer
        assert start({"params": [wide.weight, one_output.weight]}) == pytest.approx(one / 2)

    def test_families_under_one_control_have_the_same_deviation(self):
        def deviations():
            return [std_from_b(g["noise"], g["b"]) for g in optimizer.param_groups]

        model, x, y = problem()
        layers = [list(model[0].parameters()), [model[2].weight]]
        groups = [{"params": layers[0], "noise": "laplace"}, {"params": layers[1]}]
        optimizer = NVRMSGD(groups, lr=0.1, b="auto")
        expected = auto_b.FIRST_HEIGHT * auto_b.LARGEST_STD / auto_b.FIRST_RISE
        assert deviations() == pytest.approx([expected] * 2)
        train(model, optimizer, x, y, 40)
        optimizer.add_param_group({"params": [model[2].bias], "noise": "uniform"})
        train(model, optimizer, x, y, 40)
        found = deviations()
        assert found == pytest.approx([found[0]] * 3)
        assert found[0] > 2 * expected

    def test_gradients_of_another_scale_give_the_same_b(self):
        found = []
        for factor in (1.0, 64.0):
            model, x, y = problem()
            optimizer = NVRM(torch.optim.Adam(model.parameters(), 1e-2, eps=0.0), b="auto")
            found.append(train(model, optimizer, x, y, 60, factor=factor))
        assert found[0] == pytest.approx(found[1], rel=1e-3)

    def test_groups_with_a_number_keep_it_and_the_others_share_one(self):
        model, x, y = problem()
        groups = [
            {"params": [model[0].weight]},
            {"params": [model[0].bias], "b": 0.0},
            {"params": [model[2].weight, model[2].bias]},
        ]
        optimizer = NVRMSGD(groups, lr=0.1, b="auto")
        train(model, optimizer, x, y, 40)
        scales = [group["b"] for group in optimizer.param_groups]
        assert scales[1] == 0
        assert scales[0] == scales[2] > 0
        assert "auto" not in optimizer.param_groups[1]
        optimizer.eval()
        one = NVRMSGD([{"params": [p], "b": "auto"} for p in model.parameters()], lr=0.1, b=0.0)
        assert all("auto" in group for group in one.param_groups)

    def test_a_group_that_is_added(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model[0].parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, 12)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        first, second = optimizer.param_groups
        assert (first["b"], first["auto"]) == (second["b"], second["auto"])
        train(model, optimizer, x, y, 12)
        assert first["b"] == second["b"]

    def test_what_cannot_be_looked_at_changes_nothing(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.0, b="auto")
        before = optimizer.param_groups[0]["b"]
        assert set(train(model, optimizer, x, y, 10)) == {before}  # steps that are none
        optimizer = NVRMSGD(model.parameters(), lr=1e-9, b="auto")
        train(model, optimizer, x, y, 9)
        b = optimizer.param_groups[0]["b"]
        for _ in range(10):
            optimizer.zero_grad()
            loss = worth(cross_entropy(model(x), y), math.nan)
            optimizer.report_loss(loss)
            loss.backward()
            optimizer.step()
            assert optimizer.param_groups[0]["b"] == b

    @pytest.mark.parametrize("factor", [1, 3])
    @pytest.mark.parametrize("known", [True, False])
    @pytest.mark.parametrize(
        "how", ["divided first", "divided later", "scaled", "clipped", "closure"]
    )
    def test_micro_batches_scaling_and_clipping_make_no_difference(self, how, known, factor):
        """Also if the initial weights are too large, so that the first loss is taken later."""
        found = []
        for parts in (1, 8):
            model, x, y = problem()
            with torch.no_grad():
                model[2].weight *= factor
            optimizer = NVRMSGD(model if known else model.parameters(), lr=0.1, b="auto")
            scaler = torch.amp.GradScaler("cpu", enabled=how == "scaled", growth_interval=10)

            def gradients(model=model, optimizer=optimizer, scaler=scaler, parts=parts, x=x, y=y):
                optimizer.zero_grad()
                for rows in torch.arange(64).split(64 // parts):
                    loss = cross_entropy(model(x[rows]), y[rows])
                    loss = loss / parts if how == "divided first" else loss
                    optimizer.report_loss(loss)
                    loss = loss if how == "divided first" else loss / parts
                    scaler.scale(loss).backward()
                return loss

            for _ in range(40):
                if how == "closure":
                    optimizer.step(gradients)
                    continue
                gradients()
                if how == "clipped" and parts > 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e3)
                scaler.step(optimizer)
                scaler.update()
            control = AutoB(*optimizer.param_groups[0]["auto"])
            found.append([optimizer.param_groups[0]["b"], control.first, control.loss])
            assert control.begun
        assert found[0] == pytest.approx(found[1], rel=1e-3)

    def test_a_closure_with_several_backward_passes_and_one_loss_is_refused(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")

        def closure():
            for rows in torch.arange(64).split(16):
                loss = cross_entropy(model(x[rows]), y[rows]) / 4
                loss.backward()
            return loss

        weights = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"more than once and returned one loss; call"):
            optimizer.step(closure)
        assert all(map(torch.equal, model.parameters(), weights))

    @pytest.mark.parametrize("parts", [1, 8])
    def test_a_closure_that_zeroes_the_gradients_itself(self, parts):
        """As torch's documentation writes closures, and as Lightning does."""
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        other, *_ = problem()
        second = NVRMSGD(other, lr=0.1, b="auto")

        def closure():
            optimizer.zero_grad()
            for rows in torch.arange(64).split(64 // parts):
                loss = cross_entropy(model(x[rows]), y[rows]) / parts
                loss.backward()
            return loss

        if parts > 1:
            with pytest.raises(RuntimeError, match="more than once and returned one loss"):
                optimizer.step(closure)
            return
        for _ in range(60):
            optimizer.step(closure)
        train(other, second, x, y, 60)
        assert optimizer.param_groups[0]["b"] == pytest.approx(second.param_groups[0]["b"])
        assert AutoB(*optimizer.param_groups[0]["auto"]).cost > 0

    def test_only_the_last_micro_batch_reported_is_refused(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        cross_entropy(model(x[:32]), y[:32]).backward()
        with pytest.raises(RuntimeError, match="gradients of one that was not reported"):
            optimizer.report_loss(cross_entropy(model(x[32:]), y[32:]))

    @pytest.mark.parametrize("reported", [(0,), (0, 1, 2, 3), (0, 2, 4, 6)])
    @pytest.mark.parametrize("closure", [True, False])
    def test_only_some_micro_batches_reported_are_refused(self, reported, closure):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        weights = [p.detach().clone() for p in model.parameters()]

        def gradients():
            for k, rows in enumerate(torch.arange(64).split(8)):
                loss = cross_entropy(model(x[rows]), y[rows]) / 8
                if k in reported:
                    optimizer.report_loss(loss)
                loss.backward()
            return loss

        step = partial(optimizer.step, gradients) if closure else optimizer.step
        if not closure:
            gradients()
        with pytest.raises(RuntimeError, match="on more losses than were reported"):
            step()
        assert all(map(torch.equal, model.parameters(), weights))

    def test_a_loss_whose_gradient_is_taken_twice_counts_once(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        x.requires_grad_()
        loss = cross_entropy(model(x), y)
        optimizer.report_loss(loss)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        assert AutoB(*optimizer.param_groups[0]["auto"]).first == pytest.approx(loss.item())

    def test_a_layer_that_is_checkpointed_twice_is_no_second_loss(self):
        """Its weight has two gradients, one from each segment."""
        first, shared, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        model = nn.ModuleList([first, shared, last])
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        hidden = first(torch.ones(6, 4))
        for _ in range(2):
            hidden = checkpoint(shared, hidden, use_reentrant=True)
        loss = cross_entropy(last(hidden), torch.arange(6) % 3)
        optimizer.report_loss(loss)
        loss.backward()
        optimizer.step()
        assert AutoB(*optimizer.param_groups[0]["auto"]).first == pytest.approx(loss.item())

    def test_skipped_steps_do_not_add_up(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.1, b="auto")
        for _ in range(3):  # the step is left out twice
            model.zero_grad()
            loss = cross_entropy(model(x), y)
            optimizer.report_loss(loss)
            loss.backward()
        optimizer.step()
        assert AutoB(*optimizer.param_groups[0]["auto"]).first == pytest.approx(loss.item())
        assert not any(p._backward_hooks for p in model.parameters())

    def test_losses_do_not_add_up_over_steps_without_a_rate(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model, lr=0.0, b="auto")
        for step in range(4):
            model.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1 if step == 3 else 0.0
            loss = cross_entropy(model(x), y)
            optimizer.report_loss(loss)
            loss.backward()
            optimizer.step()
        assert AutoB(*optimizer.param_groups[0]["auto"]).first == pytest.approx(loss.item())

    def test_clipping_does_not_change_what_was_reported_before_it(self):
        found = []
        for clip in (False, True):
            model = Bowl()
            optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=1e-9), b="auto")
            for step in range(60):
                optimizer.zero_grad()
                loss = model() if step else worth(model(), 4e4)
                optimizer.report_loss(loss)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            found.append(optimizer.param_groups[0]["b"])
        assert found[0] == pytest.approx(found[1], rel=1e-5)

    def test_reports_of_a_skipped_step_are_dropped(self):
        """As by a gradient scaler, after an overflow."""
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, 9)
        both = copy.deepcopy((model, optimizer))
        optimizer.zero_grad()
        loss = worth(cross_entropy(model(x), y), math.inf)
        optimizer.report_loss(loss)
        loss.backward()
        optimizer.zero_grad()
        assert train(model, optimizer, x, y, 20) == train(*both, x, y, 20)

    def test_the_loss_must_be_known(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        weights = [p.detach().clone() for p in model.parameters()]
        for when in ("never", "late"):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if when == "late":
                with pytest.raises(RuntimeError, match="gradients of one that was not reported"):
                    optimizer.report_loss(loss)
            with pytest.raises(RuntimeError, match=r"report_loss\(loss\) before loss.backward"):
                optimizer.step()
            assert all(map(torch.equal, model.parameters(), weights))
        for wrong in (cross_entropy(model(x), y, reduction="none"), 1.5, torch.tensor(1.5)):
            with pytest.raises(ValueError, match="the tensor of one number that backward"):
                optimizer.report_loss(wrong)
        train(model, optimizer, x, y, 1)
        with pytest.raises(RuntimeError, match="report_loss"):  # it was the loss of that step
            optimizer.step()

    def test_a_closure_that_clips_needs_no_care(self):
        found = []
        for clips in (False, True):
            model = Bowl()
            optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=1e-9), b="auto")

            def closure(step, clips=clips, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model() if step else worth(model(), 4e4)
                loss.backward()
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            for step in range(400):
                optimizer.step(lambda step=step, closure=closure: closure(step))
            found.append(optimizer.param_groups[0]["b"])
        assert found[0] == pytest.approx(found[1], rel=1e-5)

    @pytest.mark.parametrize("antithetic", [False, True])
    def test_parts_under_different_noise_are_refused(self, antithetic):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, 3)
        optimizer.zero_grad()
        for part in range(2):
            if part:
                optimizer.resample(antithetic=antithetic)
            loss = cross_entropy(model(x), y) / 2
            optimizer.report_loss(loss)
            loss.backward()
        with pytest.raises(RuntimeError, match="one draw of noise for the whole gradient"):
            optimizer.step()

    @pytest.mark.parametrize("start", [1e-6, 100.0])
    def test_it_learns_from_any_start(self, start):
        model, x, y = problem()
        optimizer = NVRMAdam(model.parameters(), lr=1e-2, b="auto")
        optimizer.param_groups[0]["b"] = start
        scales = train(model, optimizer, x, y, 2500)
        with optimizer.denoised():
            assert float((model(x).argmax(1) == y).double().mean()) > 0.75  # by chance: a quarter
        assert 0.01 < scales[-1] < 1


class TestResuming:
    @pytest.mark.parametrize("mode", ["exact", "replay"])
    @pytest.mark.parametrize("stop", [1, 7, 10, 23])
    def test_to_the_bit(self, tmp_path, mode, stop):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, momentum=0.9, b="auto", mode=mode)
        train(model, optimizer, x, y, stop)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "state.pt")
        expected = train(model, optimizer, x, y, 30)
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        again, *_ = problem(seed=1)
        other = NVRMSGD(again.parameters(), lr=0.1, momentum=0.9, b="auto", mode=mode, seed=9)
        again.load_state_dict(loaded["model"])
        other.load_state_dict(loaded["optimizer"])
        assert train(again, other, x, y, 30) == expected
        assert same(again.parameters(), model.parameters())

    @pytest.mark.parametrize("stop", [0, 4, 6])
    def test_between_the_parts_of_a_batch(self, stop):
        def part(model, optimizer, rows):
            loss = cross_entropy(model(x[rows]), y[rows]) / 2
            optimizer.report_loss(loss)
            loss.backward()

        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, stop)
        optimizer.zero_grad()
        part(model, optimizer, slice(32))
        again, *_ = problem(seed=1)
        other = NVRMSGD(again.parameters(), lr=0.1, b="auto")
        again.load_state_dict(copy.deepcopy(model.state_dict()))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(again.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        found = []
        for m, o in ((model, optimizer), (again, other)):
            part(m, o, slice(32, None))
            o.step()
            found.append(train(m, o, x, y, 10))
        assert found[0] == found[1]
        assert same(again.parameters(), model.parameters())

    def test_a_copy_goes_its_own_way(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, 12)
        both = copy.deepcopy((model, optimizer))
        expected = train(model, optimizer, x, y, 20)
        assert train(*both, x, y, 20) == expected

    def test_a_state_that_is_none(self):
        model, x, y = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        train(model, optimizer, x, y, 3)
        state = optimizer.state_dict()
        state["param_groups"][0]["auto"] = ("x", 1)
        with pytest.raises(ValueError, match="not the state of b='auto'"):
            optimizer.load_state_dict(state)


class TestWhatIsRefused:
    def test_who_has_no_control(self):
        model, *_ = problem()
        for make in (
            lambda: PSGD(model.parameters(), lr=0.1, b="auto"),
            lambda: NVRMSGD(model.parameters(), lr=0.1, b="automatic"),
            lambda: NVRMSGD(model.parameters(), lr=0.1, std="auto"),
            lambda: SGLD(
                [{"params": list(model.parameters()), "b": "auto"}], lr=0.1, temperature=1.0
            ),
        ):
            with pytest.raises(ValueError, match="auto"):
                make()

    def test_a_schedule_of_what_sets_itself(self):
        model, *_ = problem()
        optimizer = NVRMSGD(model.parameters(), lr=0.1, b="auto")
        with pytest.raises(ValueError, match="got b='auto'"):
            BSchedule(optimizer, Constant())
