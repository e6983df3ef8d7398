"""EWC, SI and MAS: values and gradients in closed form, limits, checkpoints, any optimizer."""

import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar import NVRM, NVRMSGD, NVRMAdam
from neuvar.baselines import PSGD
from neuvar.continual import EWC, MAS, SI, diagonal_fisher, output_sensitivity, split_tasks
from neuvar.continual.penalties import QuadraticTerm
from neuvar.data import mnist_excerpt
from neuvar.models import multi_head
from tests import toy

METHODS = {"ewc": EWC, "si": SI, "mas": MAS}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-4),
    "nvrm": lambda p: NVRMAdam(p, lr=0.01, weight_decay=1e-4, b=0.05),
    "replay": lambda p: NVRM(torch.optim.RMSprop(p, lr=0.005), b=0.05, mode="replay"),
    "psgd": lambda p: PSGD(p, lr=0.1, b=0.01),
}


def moved(model, seed):
    """Change all weights by a random amount."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def inputs(seed, n=20, dtype=torch.float64):
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def named(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def penalty_of_tasks(method, model, tasks=3, **options):
    """A penalty after some tasks, and for each its weights and importances."""
    penalty, result = method(40.0, **options), []
    for task in range(tasks):
        moved(model, task)
        x = inputs(task)
        penalty.after_task(model, x)
        measure = output_sensitivity if method is MAS else diagonal_fisher
        result.append((named(model), measure(model, x)))
    return penalty, result


class TestValueAndGradient:
    def check(self, penalty, model, terms):
        """Compare with ½·λ·Σ Ω (θ - θ*)², written down term by term."""
        moved(model, 99)
        params = dict(model.named_parameters())
        expected = 20.0 * sum(
            (omega[n] * (params[n] - anchor[n]).square()).sum()
            for anchor, omega in terms
            for n in omega
        )
        result = penalty(model)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
        slopes = [torch.autograd.grad(v, list(params.values())) for v in (result, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14)
        assert result > 1

    def test_ewc_holds_to_every_task_by_itself(self):
        model = toy.network(dtype=torch.float64)
        penalty, terms = penalty_of_tasks(EWC, model)
        assert penalty.tasks == 3
        self.check(penalty, model, terms)

    @pytest.mark.parametrize("gamma", [1.0, 0.7, 0.0])
    def test_ewc_online_fades_and_follows(self, gamma):
        model = toy.network(dtype=torch.float64)
        penalty, terms = penalty_of_tasks(EWC, model, mode="online", gamma=gamma)
        (_, one), (_, two), (last, three) = terms
        omega = {n: gamma**2 * one[n] + gamma * two[n] + three[n] for n in last}
        self.check(penalty, model, [(last, omega)])

    def test_mas_adds_up_and_follows(self):
        model = toy.network(dtype=torch.float64)
        penalty, terms = penalty_of_tasks(MAS, model)
        last = terms[-1][0]
        self.check(penalty, model, [(last, {n: sum(t[1][n] for t in terms) for n in last})])

    @pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical", "squared_batch_mean"])
    def test_ewc_takes_the_fisher_it_is_told(self, fisher):
        model, x = toy.network(dtype=torch.float64), inputs(0)
        y = torch.arange(20) % 3
        penalty = EWC(40.0, fisher=fisher, seed=5)
        penalty.after_task(model, (x, y))
        expected = diagonal_fisher(model, (x, y), kind=fisher, seed=5)
        self.check(penalty, model, [(named(model), expected)])

    def test_sampled_labels_are_new_for_each_task(self):
        model, x = toy.network(dtype=torch.float64), inputs(0)
        penalty = EWC(40.0, fisher="sampled")
        penalty.after_task(model, x)
        penalty.after_task(model, x)
        one = diagonal_fisher(model, x, kind="sampled", seed=0)["0.weight"]
        two = diagonal_fisher(model, x, kind="sampled", seed=1)["0.weight"]
        assert torch.allclose(penalty.state_dict()["importance"]["0.weight"], one + two)

    def test_weights_that_do_not_matter_are_free(self):
        """Also where no task cares: nothing is divided by zero."""
        model = toy.network(dtype=torch.float64)
        with torch.no_grad():
            model[2].weight[:, 0] = 0  # what enters hidden unit 0 cannot matter
        penalty = EWC(40.0)
        for task in range(2):
            penalty.after_task(model, inputs(task))
        with torch.no_grad():
            model[0].weight[0] += 3
        assert penalty(model).item() == 0
        assert all(torch.isfinite(t).all() for t in penalty.state_dict()["anchor"].values())

    def test_is_differentiable_twice(self):
        generator = torch.Generator().manual_seed(0)
        p, anchor, omega = (
            torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(3)
        )

        def term(p):
            return QuadraticTerm.apply(p, p.detach(), anchor, omega.abs())

        p.requires_grad_()
        assert torch.autograd.gradcheck(term, p)
        assert torch.autograd.gradgradcheck(term, p)

    def test_half_precision(self):
        model = toy.network(dtype=torch.bfloat16)
        penalty = EWC(40.0)
        penalty.after_task(model, inputs(0, dtype=torch.bfloat16))
        penalty.after_task(model, inputs(1, dtype=torch.bfloat16))
        moved(model, 1)
        penalty(model).backward()
        assert model[0].weight.grad.dtype == torch.bfloat16
        assert model[0].weight.grad.any()


def test_stiffness_is_the_limit_of_plain_gradient_descent():
    """The penalty alone: below 2 / stiffness the weights come back, above they fly apart."""
    model = toy.network(dtype=torch.float64)
    penalty, _ = penalty_of_tasks(EWC, model, tasks=1)
    start, ends = named(moved(model, 5)), []
    for rate in (1.9, 2.1):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate / penalty.stiffness)
        values = []
        for _ in range(100):
            optimizer.zero_grad()
            values.append(penalty(model))
            values[-1].backward()
            optimizer.step()
        ends.append((values[-1] / values[0]).item())
    assert ends[0] < 0.5
    assert ends[1] > 100


class TestPath:
    """SI's importances."""

    def steps(self, model, optimizer, penalty, count, target=0.0):
        """Train on a quadratic, and note the task's own gradient and the clean weights."""
        x, slopes = inputs(3), []
        places = [self.place(model, optimizer)]
        for _ in range(count):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            names = dict(model.named_parameters())
            slopes.append(torch.autograd.grad(loss, list(names.values()), retain_graph=True))
            (loss + penalty(model)).backward()
            optimizer.step()
            penalty.after_step(model)
            places.append(self.place(model, optimizer))
        return places, slopes

    @staticmethod
    def place(model, optimizer):
        return toy.clean(model, optimizer) if isinstance(optimizer, NVRM) else toy.weights(model)

    @staticmethod
    def path(places, slopes):
        """Sum of minus gradient times displacement, for each weight."""
        return [
            -sum(g[i] * (b[i] - a[i]) for g, a, b in zip(slopes, places, places[1:], strict=False))
            for i in range(len(places[0]))
        ]

    def test_sum_of_a_slow_path_is_the_fall_of_the_loss(self):
        """Gradient flow: the integral of -g dθ is L(start) - L(end)."""
        model, x = toy.network(dtype=torch.float64), inputs(3)
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=1e-4), SI(1.0)
        before = model(x).square().mean().item()
        self.steps(model, optimizer, penalty, 400)
        fall = before - model(x).square().mean().item()
        total = sum(path.sum().item() for path in penalty.state_dict()["path"].values())
        assert fall > 0.01
        assert total == pytest.approx(fall, rel=1e-3)

    @pytest.mark.parametrize("at", ["perturbed", "clean"])
    @pytest.mark.parametrize("name", ["sgd", "adam", "nvrm", "replay"])
    def test_importances_over_two_tasks(self, name, at):
        """The second task's path leaves the penalty's gradient out; noise is no displacement."""
        model = toy.network(dtype=torch.float64)
        optimizer, penalty = OPTIMIZERS[name](model.parameters()), SI(5.0, damping=0.2, at=at)
        expected = [torch.zeros_like(p) for p in model.parameters()]
        for target in (0.0, 2.0):
            places, slopes = self.steps(model, optimizer, penalty, 12, target)
            path = self.path(places, slopes)
            result = penalty.state_dict()["path"].values()
            torch.testing.assert_close(list(result), path, rtol=1e-9, atol=1e-10)
            for i, total in enumerate(expected):
                apart = places[-1][i] - places[0][i]
                total += path[i].clamp(min=0) / (apart.square() + 0.2)
            penalty.after_task(model)
            state = penalty.state_dict()
            torch.testing.assert_close(
                list(state["importance"].values()), expected, rtol=1e-9, atol=1e-9
            )
            torch.testing.assert_close(list(state["anchor"].values()), places[-1])
            assert not state["path"]
        assert penalty.share(1.0) > 0

    def test_live_weights_would_give_another_path(self):
        """What the test above is worth: the noise is a large part of the live displacements."""
        model = toy.network(dtype=torch.float64)
        optimizer, penalty = OPTIMIZERS["nvrm"](model.parameters()), SI(5.0)
        x, live, slopes = inputs(3), [toy.weights(model)], []
        for _ in range(12):
            optimizer.zero_grad()
            (model(x).square().mean() + penalty(model)).backward()
            slopes.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            penalty.after_step(model)
            live.append(toy.weights(model))
        wrong = self.path(live, slopes)
        right = list(penalty.state_dict()["path"].values())
        assert (wrong[0] - right[0]).norm() > 0.5 * right[0].norm()

    @pytest.mark.parametrize("clip", ["norm", "value"])
    @pytest.mark.parametrize("name", ["sgd", "nvrm"])
    def test_clipped_gradients_that_were_noted_before(self, name, clip):
        """The path is that of the whole gradient of the task, though the step was shorter."""
        model, x = toy.network(dtype=torch.float64), inputs(3)
        optimizer, penalty = OPTIMIZERS[name](model.parameters()), SI(300.0)
        for target in (0.0, 2.0):
            places, slopes = [self.place(model, optimizer)], []
            for _ in range(12):
                optimizer.zero_grad()
                loss = (model(x) - target).square().mean()
                params = list(model.parameters())
                slopes.append(torch.autograd.grad(loss, params, retain_graph=True))
                (loss + penalty(model)).backward()
                penalty.before_clip(model)
                if clip == "norm":
                    assert nn.utils.clip_grad_norm_(params, 0.05) > 0.05
                else:
                    nn.utils.clip_grad_value_(params, 0.01)
                optimizer.step()
                penalty.after_step(model)
                places.append(self.place(model, optimizer))
            result = list(penalty.state_dict()["path"].values())
            torch.testing.assert_close(result, self.path(places, slopes), rtol=1e-9, atol=1e-10)
            penalty.after_task(model)

    def test_what_was_noted_serves_one_step(self):
        model = toy.network(dtype=torch.float64)
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.1), SI(1.0)
        with pytest.raises(ValueError, match="before_clip must follow a loss"):
            penalty.before_clip(model)
        penalty(model)
        with pytest.raises(ValueError, match="before_clip must come after backward"):
            penalty.before_clip(model)
        (model(inputs(3)).square().mean() + penalty(model)).backward()
        penalty.before_clip(model)
        moved(model, 1)  # a step that nobody looked at; the next one starts anew
        before = penalty.state_dict()["path"]
        places, slopes = self.steps(model, optimizer, penalty, 3)
        after = penalty.state_dict()["path"]
        added = [after[name] - before[name] for name in before]
        torch.testing.assert_close(added, self.path(places, slopes), rtol=1e-9, atol=1e-10)

    def test_weights_that_went_uphill_have_no_importance(self):
        model, penalty = nn.Linear(1, 1, bias=False), SI(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)).square().sum() + penalty(model)).backward()
        optimizer.step()
        penalty.after_step(model)
        assert penalty.state_dict()["path"]["weight"] < 0
        penalty.after_task(model)
        assert penalty.state_dict()["importance"]["weight"] == 0

    def test_a_skipped_step_adds_nothing(self):
        """As a gradient scaler does when it meets an overflow."""
        model = toy.network(dtype=torch.float64)
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.1), SI(1.0)
        self.steps(model, optimizer, penalty, 2)
        before = penalty.state_dict()["path"]
        penalty(model)
        for p in model.parameters():
            p.grad = torch.full_like(p, float("inf"))
        penalty.after_step(model)
        after = penalty.state_dict()["path"]
        assert all(torch.equal(before[n], after[n]) for n in before)

    def test_half_precision_keeps_small_terms(self):
        model = toy.network(dtype=torch.bfloat16)
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.05), SI(1.0)
        x = inputs(3, dtype=torch.bfloat16)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x).square().mean() + penalty(model)).backward()
            optimizer.step()
            penalty.after_step(model)
        assert all(path.dtype == torch.float32 for path in penalty.state_dict()["path"].values())
        penalty.after_task(model)
        moved(model, 1)
        penalty(model).backward()
        assert model[0].weight.grad.any()

    def test_reading_the_value_is_no_step(self):
        model, x = toy.network(dtype=torch.float64), inputs(3)
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.1), SI(1.0)
        (model(x).square().mean() + penalty(model)).backward()
        optimizer.step()
        with torch.no_grad():
            penalty(model)
        penalty.after_step(model)
        assert penalty.state_dict()["path"]["0.weight"].any()

    def test_refuses_what_would_give_importances_of_zero(self):
        model = toy.network()
        optimizer, penalty = torch.optim.SGD(model.parameters(), lr=0.1), SI(1.0)
        with pytest.raises(ValueError, match="after_task needs at least one step"):
            penalty.after_task(model)
        with pytest.raises(ValueError, match="after_step must follow a step"):
            penalty.after_step(model)
        (toy.backward(model, 0) + penalty(model)).item()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="after_step must come before zero_grad"):
            penalty.after_step(model)
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        penalty.after_step(model)
        with pytest.raises(ValueError, match="after_step got only zero gradients"):
            penalty.after_task(model)


class Wobbly(nn.Module):
    """Batch normalization, and dropout, which reads the global generator."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.body(x)


def task_data(task, n=96):
    """Blobs at the corners of a cube, with other labels in each task."""
    generator = torch.Generator().manual_seed(50 + task)
    x = torch.randn(n, 5, generator=generator)
    y = ((x[:, task] > 0).long() + (x[:, (task + 1) % 5] > 0.3).long()) % 3
    return x, y


def learn(model, optimizer, penalty, tasks, *, epochs=1, resume=None, stop=None):
    """An ordinary loop; it may stop after some steps, or go on from there."""
    step = 0
    for task in tasks:
        x, y = task_data(task)
        for epoch in range(epochs):
            for index in torch.arange(len(x)).roll(7 * epoch).split(16):
                step += 1
                if resume is not None and step <= resume:
                    continue
                optimizer.zero_grad()
                loss = cross_entropy(model(x[index]), y[index])
                if penalty is not None:
                    loss = loss + penalty(model)
                loss.backward()
                optimizer.step()
                if penalty is not None:
                    penalty.after_step(model)
                if step == stop:
                    return loss
        if penalty is not None and (resume is None or step > resume):
            penalty.after_task(model, (x, y))
    return loss


def begin(seed=0):
    torch.manual_seed(seed)
    return Wobbly()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["sgd", "adam", "nvrm"])
def test_strength_zero_changes_nothing_to_the_bit(method, name):
    result = []
    for penalty in (None, METHODS[method](0.0)):
        model = begin()
        optimizer = OPTIMIZERS[name](model.parameters())
        learn(model, optimizer, penalty, [0, 1, 2])
        tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
        moments = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        result.append([t.detach().clone() for t in tensors + moments])
    assert penalty.tasks == 3
    assert toy.same(*result)


@pytest.mark.parametrize("method", METHODS)
def test_strength_zero_is_zero_even_where_the_quadratic_overflows(method):
    model, penalty = begin(), METHODS[method](0.0)
    learn(model, OPTIMIZERS["sgd"](model.parameters()), penalty, [0])
    with torch.no_grad():
        model.body[0].weight.fill_(1e30)
    value = penalty(model)
    assert value.item() == 0
    assert not value.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_is_exactly_zero_before_the_first_task(method):
    model, penalty = begin(), METHODS[method](100.0)
    value = penalty(model)
    assert value.item() == 0
    assert not value.requires_grad
    assert penalty.share(torch.tensor(1.0)) == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_less_is_forgotten_with_any_optimizer(method, name):
    """Loss on the first task after two more; strengths are those that make a difference."""
    strength = {"ewc": 10.0, "si": 10.0, "mas": 0.3}[method]
    losses = []
    for penalty in (None, METHODS[method](strength)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
        optimizer = OPTIMIZERS[name](model.parameters())
        learn(model, optimizer, penalty, [0], epochs=15)
        learn(model, optimizer, penalty, [1, 2], epochs=8)
        if isinstance(optimizer, NVRM):
            optimizer.eval()
        x, y = task_data(0)
        with torch.no_grad():
            losses.append(cross_entropy(model(x), y).item())
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["adam", "nvrm"])
@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_killed_run_goes_on_as_if_it_had_not_been(method, name, stop):
    """In the first task, between two tasks, and in the second task."""
    tasks = [0, 1, 2]
    whole = begin()
    never_killed = OPTIMIZERS[name](whole.parameters())
    learn(whole, never_killed, METHODS[method](10.0), tasks)

    model, penalty = begin(), METHODS[method](10.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    learn(model, optimizer, penalty, tasks, stop=stop)
    if stop == 6:
        penalty.after_task(model, task_data(0))
    parts = {"model": model, "optimizer": optimizer, "penalty": penalty}
    file = io.BytesIO()
    states = {key: part.state_dict() for key, part in parts.items()}
    torch.save(states | {"generator": torch.get_rng_state()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    other = begin(seed=1)
    again = {"model": other, "optimizer": OPTIMIZERS[name](other.parameters())}
    again["penalty"] = METHODS[method](10.0)
    for key, part in again.items():
        part.load_state_dict(saved[key])
    torch.set_rng_state(saved["generator"])
    learn(other, again["optimizer"], again["penalty"], tasks, resume=stop)
    assert toy.same(whole.parameters(), other.parameters())
    assert toy.same(whole.buffers(), other.buffers())


class TestCheckpoints:
    @pytest.mark.parametrize("method", METHODS)
    def test_state_is_a_copy(self, method):
        model, penalty = begin(), METHODS[method](10.0)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        learn(model, optimizer, penalty, [0, 1], stop=9)
        state = penalty.state_dict()
        frozen = str(state)
        other = METHODS[method](10.0)
        other.load_state_dict(state)
        learn(model, optimizer, penalty, [2])
        assert str(state) == frozen == str(other.state_dict())

    def test_refuses_the_state_of_another_method(self):
        with pytest.raises(ValueError, match="must be one of EWC, got one of 'MAS'"):
            EWC(1.0).load_state_dict(MAS(1.0).state_dict())
        with pytest.raises(ValueError, match="must be one of SI, got one of None"):
            SI(1.0).load_state_dict({})

    def test_refuses_the_state_of_another_mode(self):
        online, separate = EWC(1.0, mode="online"), EWC(1.0)
        for a, b in [(online, separate), (separate, online)]:
            with pytest.raises(ValueError, match=f"of mode '{a.mode}', got '{b.mode}'"):
                a.load_state_dict(b.state_dict())
            a.load_state_dict(type(a)(2.0, mode=a.mode).state_dict())

    def test_an_unfinished_task_follows_the_model_to_another_device(self):
        model, penalty = toy.network(), SI(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for stop in (False, True):
            (model(inputs(3).float()).square().mean() + penalty(model)).backward()
            optimizer.step()
            penalty.after_step(model)
            if not stop:
                penalty.after_task(model)
        other = SI(1.0)
        other.load_state_dict(penalty.state_dict())
        there = toy.network().to("meta")
        other(there)
        for p in there.parameters():
            p.grad = torch.zeros_like(p)
        gathered = [other._start, other._path, other._before, other._anchor]
        assert {t.device.type for part in gathered for t in part.values()} == {"meta"}
        assert {t.device.type for t in penalty._path.values()} == {"cpu"}

    def test_an_unfinished_task_is_of_one_model(self):
        model, penalty = toy.network(), SI(1.0)
        penalty(model)
        with pytest.raises(ValueError, match=r"belongs to another model: .* '0.weight' of shape"):
            penalty(nn.Sequential(nn.Linear(5, 6)))

    def test_refuses_a_state_that_lacks_something(self):
        state = SI(1.0).state_dict()
        del state["path"]
        with pytest.raises(ValueError, match=r"must have the keys .*'path'"):
            SI(1.0).load_state_dict(state)
        state = EWC(1.0).state_dict() | {"anchor": {"x": torch.ones(1)}}
        with pytest.raises(ValueError, match="importance and anchor of different parameters"):
            EWC(1.0).load_state_dict(state)


class TestCleanWeights:
    """Under NVRM."""

    def perturbed(self, **options):
        model = toy.network(dtype=torch.float64)
        optimizer = NVRM(torch.optim.SGD(model.parameters(), lr=0.1), b=0.3, **options)
        toy.train(model, optimizer, range(3))
        return model, optimizer

    @pytest.mark.parametrize("mode", ["exact", "replay"])
    @pytest.mark.parametrize("method", [EWC, MAS])
    def test_holds_to_clean_weights_by_their_own_importance(self, method, mode):
        model, optimizer = self.perturbed(mode=mode)
        noisy = toy.weights(model)
        penalty, x = method(40.0), inputs(0)
        penalty.after_task(model, x)
        torch.testing.assert_close(toy.weights(model), noisy)
        state = penalty.state_dict()
        measure = output_sensitivity if method is MAS else diagonal_fisher
        with optimizer.denoised():
            torch.testing.assert_close(state["anchor"], named(model))
            torch.testing.assert_close(state["importance"], measure(model, x))
        assert not torch.allclose(state["anchor"]["0.weight"], noisy[0], atol=0.1)

    @pytest.mark.parametrize("at", ["perturbed", "clean"])
    def test_is_taken_at_the_weights_it_is_told(self, at):
        model, optimizer = self.perturbed()
        penalty = EWC(40.0, at=at)
        penalty.after_task(model, inputs(0))
        toy.train(model, optimizer, range(3, 5))
        noisy, clean = toy.weights(model), toy.clean(model, optimizer)
        state = penalty.state_dict()
        names = list(state["anchor"])
        optimizer.zero_grad()
        value = penalty(model)
        value.backward()
        chosen = clean if at == "clean" else noisy
        apart = [w - state["anchor"][n] for n, w in zip(names, chosen, strict=True)]
        pulls = [40.0 * state["importance"][n] * d for n, d in zip(names, apart, strict=True)]
        torch.testing.assert_close([p.grad for p in model.parameters()], pulls)
        expected = sum((g * d).sum() for g, d in zip(pulls, apart, strict=True)) / 2
        torch.testing.assert_close(value.detach(), expected)
        assert toy.same(noisy, toy.weights(model))

    def test_both_pull_the_same_way_on_average(self):
        """The gradient is linear, so the mean over noise is the gradient at the clean weights."""
        model, optimizer = self.perturbed()
        penalty, quiet = EWC(40.0), EWC(40.0, at="clean")
        penalty.after_task(model, inputs(0))
        quiet.load_state_dict(penalty.state_dict())
        toy.train(model, optimizer, range(3, 5))
        params = list(model.parameters())
        expected = torch.autograd.grad(quiet(model), params)[0]
        draws = []
        for _ in range(2000):
            optimizer.resample()
            draws.append(torch.autograd.grad(penalty(model), params)[0])
        result = torch.stack(draws)
        error = result.std(0) / 2000**0.5
        assert ((result.mean(0) - expected) / error).abs().max() < 4.5

    @pytest.mark.parametrize("method", [EWC, SI])
    def test_a_known_model_is_pulled_as_one_that_carries_its_noise(self, method):
        result = []
        for known in (True, False):
            model, penalty = toy.network(dtype=torch.float64), method(40.0)
            optimizer = NVRMSGD(model if known else model.parameters(), lr=0.01, b=0.1)
            for task in range(2):
                for step in range(4):
                    optimizer.zero_grad()
                    x, y = toy.batch(step, torch.float64)
                    loss = (model(x) - y).square().mean() + penalty(model)
                    loss.backward()
                    optimizer.step()
                    penalty.after_step(model)
                penalty.after_task(model, inputs(task))
            value = penalty(model).item()
            with optimizer.denoised():
                assert penalty(model).item() < value
                result.append([*toy.weights(model), torch.tensor(value)])
        assert toy.same(*result)


class Heads(nn.Module):
    """A trunk and a head for each task."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x, head):
        return self.heads[head](self.trunk(x).relu())

    def train_only(self, head):
        for number, module in enumerate(self.heads):
            module.requires_grad_(number == head)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", ["separate", "online"])
def test_heads_that_are_frozen_in_turn(method, mode):
    torch.manual_seed(0)
    model = Heads()
    penalty = EWC(10.0, mode=mode) if method == "ewc" else METHODS[method](10.0)
    for task in range(3):
        x, y = task_data(task)
        model.train_only(task)
        optimizer = NVRMAdam([p for p in model.parameters() if p.requires_grad], lr=0.01, b=0.02)
        for _ in range(5):
            optimizer.zero_grad()
            (cross_entropy(model(x, task), y) + penalty(model)).backward()
            optimizer.step()
            penalty.after_step(model)
        penalty.after_task(model, x, head=task)
        optimizer.eval()
        names = penalty.state_dict()["anchor"].keys()
        assert {n for n in names if n.startswith("heads")} == {
            f"heads.{k}.{leaf}" for k in range(task + 1) for leaf in ("weight", "bias")
        }
    anchors = penalty.state_dict()["anchor"]
    assert torch.equal(anchors["heads.0.weight"], model.heads[0].weight)
    assert float(penalty.last) > 0


def test_split_mnist_with_the_multi_head_network():
    """Stream, network and penalty fit together: heads stay as their task left them."""
    stream = split_tasks(mnist_excerpt())[:3]
    model = multi_head((784, 24, 2), tasks=5, seed=0)
    penalty, left = EWC(100.0), []
    for task in stream:
        model.select(task.head)
        split = task.train
        x, y = split.images[:200].float() / 255, split.labels[:200]
        optimizer = NVRMAdam(model.parameters(), lr=3e-3, b=0.01)
        for index in torch.arange(200).split(20):
            optimizer.zero_grad()
            (cross_entropy(model(x[index]), y[index]) + penalty(model)).backward()
            optimizer.step()
            penalty.after_step(model)
        penalty.after_task(model, x)
        optimizer.eval()
        left.append(model.heads[task.head].weight.detach().clone())
    with torch.no_grad():
        for task, weight in zip(stream, left, strict=True):
            assert torch.equal(model.heads[task.head].weight, weight)
            guesses = model(task.test.images.float() / 255, task=task.head).argmax(1)
            assert (guesses == task.test.labels).float().mean() > 0.85


class TestBadInput:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("strength", [-1.0, float("nan"), float("inf"), "much", None, True])
    def test_strength(self, method, strength):
        with pytest.raises(ValueError, match="strength must be a finite number >= 0, got"):
            METHODS[method](strength)

    @pytest.mark.parametrize("method", METHODS)
    def test_weights(self, method):
        with pytest.raises(ValueError, match="at must be one of clean, perturbed, got 'noisy'"):
            METHODS[method](1.0, at="noisy")

    def test_fisher(self):
        with pytest.raises(ValueError, match=r"fisher must be one of exact, .*, got 'diagonal'"):
            EWC(1.0, fisher="diagonal")

    def test_mode(self):
        with pytest.raises(ValueError, match="mode must be one of separate, online, got 'both'"):
            EWC(1.0, mode="both")

    def test_gamma(self):
        with pytest.raises(ValueError, match=r"gamma must be 1 unless mode is 'online', got 0\.5"):
            EWC(1.0, gamma=0.5)
        with pytest.raises(ValueError, match=r"gamma must be .* >= 0 and <= 1, got 1\.5"):
            EWC(1.0, gamma=1.5, mode="online")

    @pytest.mark.parametrize("seed", [-1, 1.5, True])
    def test_seed(self, seed):
        with pytest.raises(ValueError, match=r"seed must be an integer from 0 .*, got"):
            EWC(1.0, seed=seed)

    @pytest.mark.parametrize("damping", [0.0, -1.0, float("nan")])
    def test_damping(self, damping):
        with pytest.raises(ValueError, match="damping must be a finite number"):
            SI(1.0, damping=damping)

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (
                nn.Sequential(nn.Linear(5, 7), nn.Tanh()),
                "'2.weight' of shape .* this model has none",
            ),
            (
                nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
                r"'0.weight' of shape \(7, 5\), this model has \(6, 5\)",
            ),
        ],
    )
    def test_another_model(self, other, words):
        penalty = EWC(1.0)
        penalty.after_task(toy.network(), inputs(0, dtype=torch.float32))
        before = str(penalty.state_dict())
        for act in (lambda: penalty(other), lambda: penalty.after_task(other, inputs(0).float())):
            with pytest.raises(ValueError, match="the penalty belongs to another model.*" + words):
                act()
        assert str(penalty.state_dict()) == before

    def test_no_parameters(self):
        with pytest.raises(ValueError, match="model has no parameters"):
            EWC(1.0)(nn.ReLU())

    def test_importances_that_are_not_finite(self):
        model, penalty = toy.network(), EWC(1.0)
        with pytest.raises(ValueError, match=r"importance of parameter '0\.weight' is not"):
            penalty.after_task(model, torch.full((2, 5), float("nan")))
        assert penalty.tasks == 0
