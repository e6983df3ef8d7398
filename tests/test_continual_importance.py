"""Fisher information and sensitivity: closed forms, a plain loop, and a model left unchanged."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, one_hot

from neuvar import NVRM
from neuvar.continual import diagonal_fisher, importance, output_sensitivity
from neuvar.continual.importance import (
    FISHERS,
    Problem,
    by_layers,
    by_loop,
    by_vmap,
    choose_method,
)
from neuvar.data import mnist_excerpt

KINDS = ["exact", "sampled", "empirical", "squared_batch_mean"]


def filled(model, seed=0):
    """Give a model weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def samples(n=12, inputs=(5,), classes=4, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *inputs, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(classes, (n,), generator=generator)


def by_hand(model, x, y, kind):
    """The plain loop: one sample and one class after another, by ``backward``."""
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        classes = range(model(x[i : i + 1]).shape[1]) if kind == "exact" else [int(y[i])]
        for k in classes:
            model.zero_grad(set_to_none=False)
            out = model(x[i : i + 1])
            score = out.square().sum() if kind == "mas" else out.log_softmax(1)[0, k]
            score.backward()
            weight = out.detach().softmax(1)[0, k] if kind == "exact" else 1.0
            for name, p in model.named_parameters():
                if p.grad is not None:
                    power = p.grad.abs() if kind == "mas" else p.grad.square()
                    totals[name] += weight * power / len(x)
    model.zero_grad()
    return totals


def close(result, expected, rtol=1e-9):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=rtol, atol=rtol)
    return True


class TestClosedForms:
    """Softmax regression: the gradient of log p(y) by W[k, j] is (1[y = k] - p[k]) x[j]."""

    @pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
    def setting(self, request):
        model = filled(nn.Linear(5, 4).to(request.param))
        x, y = samples(50, dtype=request.param)
        p = model(x).softmax(1).detach().double()
        return model, x, y, p, x.double()

    def check(self, result, weight, bias):
        assert (result["weight"].double() - weight).abs().max() < 1e-6
        assert (result["bias"].double() - bias).abs().max() < 1e-6

    def test_exact(self, setting):
        model, x, y, p, x64 = setting
        variance = p * (1 - p)
        result = diagonal_fisher(model, (x, y))
        self.check(result, variance.T @ x64.square() / 50, variance.mean(0))
        assert result["weight"].mean() > 0.01  # 1e-6 is small beside it

    def test_empirical(self, setting):
        model, x, y, p, x64 = setting
        squares = (one_hot(y, 4) - p).square()
        result = diagonal_fisher(model, (x, y), kind="empirical")
        self.check(result, squares.T @ x64.square() / 50, squares.mean(0))

    def test_sampled_is_right_on_average(self, setting):
        model, x, _, p, x64 = setting
        draws = torch.stack(
            [diagonal_fisher(model, x, kind="sampled", seed=s)["weight"] for s in range(200)]
        ).double()
        expected = (p * (1 - p)).T @ x64.square() / 50
        error = draws.std(0) / 200**0.5
        assert ((draws.mean(0) - expected) / error).abs().max() < 4
        assert not torch.equal(draws[0], draws[1])

    def test_sampled_takes_the_label_that_its_seed_draws(self, setting):
        model, x, _, p, x64 = setting
        generator = torch.Generator().manual_seed(7)
        y = torch.multinomial(p.to(x.dtype), 1, generator=generator)[:, 0]
        squares = (one_hot(y, 4) - p).square()
        result = diagonal_fisher(model, x, kind="sampled", seed=7)
        self.check(result, squares.T @ x64.square() / 50, squares.mean(0))

    def test_squared_batch_mean(self, setting, monkeypatch):
        model, x, y, p, x64 = setting
        monkeypatch.setattr("neuvar.continual.importance.SQUARED_BATCH", 25)
        residual = (one_hot(y, 4) - p).view(2, 25, 4)
        mean = residual.transpose(1, 2) @ x64.view(2, 25, 5) / 25
        result = diagonal_fisher(model, (x, y), kind="squared_batch_mean")
        self.check(result, mean.square().mean(0), residual.mean(1).square().mean(0))
        assert (
            result["weight"].sum()
            < diagonal_fisher(model, (x, y), kind="empirical")["weight"].sum() / 5
        )

    def test_sensitivity(self, setting):
        """The gradient of the squared norm of f = Wx + b is 2 f[k] x[j]."""
        model, x, _, _, x64 = setting
        f = 2 * model(x).detach().double().abs()
        result = output_sensitivity(model, x)
        expected = f.T @ x64.abs() / 50
        torch.testing.assert_close(result["weight"].double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result["bias"].double(), f.mean(0), rtol=1e-6, atol=1e-6)


class Twice(nn.Module):
    """One linear layer used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.first(self.first(x).tanh()).tanh())


class Borrowed(nn.Module):
    """A weight that is also used outside of its layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(linear(self.first(x).tanh(), self.first.weight.T))


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).tanh()).tanh())


class Sequence(nn.Module):
    """Linear layers on several rows a sample."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.first(torch.stack([x, 2 * x, x - 1], 1)).tanh().mean(1))


class Branching(nn.Module):
    """Looks at values, which vmap cannot do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        rows = [self.first(row).tanh() if row[0] > 0 else self.first(-row) for row in x]
        return self.last(torch.stack(rows))


class Centred(nn.Module):
    """Samples of a batch touch each other; alone, each is taken as it is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.first(x)
        return self.last(h - h.mean(0) if len(h) > 1 else h)


class Keyword(nn.Module):
    """Calls a layer in an unusual way."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        return self.last(input=x)


def mlp():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def replaced():
    """A layer whose forward pass was replaced."""
    model = mlp()
    layer = model[2]
    layer.forward = lambda x: 2 * linear(x, layer.weight, layer.bias)
    return model


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 3, 3),
        nn.BatchNorm1d(3),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(9, 32, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(32, 4),
    )


NETWORKS = {
    "mlp": mlp,
    "in place": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)),
    "convolutional": convolutional,
    "convolutional alone": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    ),
    "twice": Twice,
    "borrowed": Borrowed,
    "shared": Shared,
    "sequence": Sequence,
    "branching": Branching,
    "centred": Centred,
    "keyword": Keyword,
    "replaced": replaced,
}
FAST = {"mlp", "in place", "convolutional"}


def build(name):
    return filled(NETWORKS[name]()).double().eval()


@pytest.mark.parametrize("name", NETWORKS)
class TestAnyNetwork:
    def test_exact_is_the_loop_over_samples_and_classes(self, name):
        x, y = samples(dtype=torch.float64)
        model = build(name)
        assert close(diagonal_fisher(model, x), by_hand(model, x, y, "exact"))

    def test_empirical_is_the_loop_over_samples(self, name):
        x, y = samples()
        model = build(name)
        result = diagonal_fisher(model, (x, y), kind="empirical")
        assert close(result, by_hand(model, x, y, "empirical"))

    def test_sensitivity_is_the_loop_over_samples(self, name):
        x, y = samples()
        model = build(name)
        assert close(output_sensitivity(model, x), by_hand(model, x, y, "mas"))

    def test_takes_the_fast_way_only_where_it_is_right(self, name):
        x, y = samples()
        model = build(name)
        weights = {n: p.detach() for n, p in model.named_parameters()}
        problem = Problem(model, {}, FISHERS["exact"], 2)
        changed = [m for m in model.modules() if "forward" in vars(m)]
        way = choose_method(problem, weights, x, y)
        assert [m for m in model.modules() if "forward" in vars(m)] == changed
        if name in FAST:
            assert isinstance(way, partial)
            assert way.func is by_layers
        else:
            assert way is (by_loop if name == "branching" else by_vmap)


class Tied(nn.Module):
    """One weight for the whole network; for black inputs its first use has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).relu())


class Gated(nn.Module):
    """A second use of a weight that is off for some samples."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        gate = (x[:, :1] > 0).to(x.dtype)
        return self.last(x) + 3 * gate * linear(x, self.last.weight)


class Sometimes(nn.Module):
    """A second use of a weight, but only in batches of one kind."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 4)

    def forward(self, x):
        if torch._C._functorch.is_batchedtensor(x):
            return self.both(x)
        return self.both(x) if (x[:, 0] > 0).any() else self.last(x)

    def both(self, x):
        gate = (x[:, :1] > 0).to(x.dtype)
        return self.last(x) + 3 * gate * linear(x, self.last.weight)


class Bypassed(nn.Module):
    """A weight that is only used outside of its layer, which is never called."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return linear(x, self.last.weight)


@pytest.mark.parametrize("make", [Tied, Gated, Sometimes, Bypassed])
@pytest.mark.parametrize("compared", [2, 8])
def test_uses_of_a_weight_that_the_first_samples_do_not_show(make, compared, monkeypatch):
    """In chunks of four samples the first are harmless; the computation itself is looked at."""
    monkeypatch.setattr(importance, "COMPARED", compared)
    model, (x, y) = filled(make()).double(), samples(40)
    x[:, 0] = x[:, 0].abs()
    if make is Tied:
        x[:2] = 0
    else:
        x[:20, 0] *= -1
    assert close(diagonal_fisher(model, x), by_hand(model, x, y, "exact"))
    monkeypatch.setattr(importance, "_chunk_size", lambda size, inputs: 4)
    assert close(diagonal_fisher(model, x), by_hand(model, x, y, "exact"))
    batches = [x[:20], x[20:40], x[:0]]
    assert close(diagonal_fisher(model, batches), by_hand(model, x, y, "exact"))


def test_a_layer_used_twice_in_later_batches_only():
    """The first batch takes the fast way; the later one may not, and is right all the same."""
    model, (x, y) = filled(Sometimes()).double(), samples(20)
    x[:, 0] = x[:, 0].abs()
    x[:10, 0] *= -1
    problem = Problem(model, {}, FISHERS["exact"], 2)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    way = choose_method(problem, weights, x[:10], y[:10])
    assert isinstance(way, partial)
    assert way.func is by_layers
    with pytest.raises(RuntimeError, match=r"'last.weight' is used outside of its layer"):
        importance.layer_sums(problem, weights, x[10:], y[10:])
    result = way(problem, weights, x[10:], y[10:])
    assert close({n: t / 10 for n, t in result.items()}, by_hand(model, x[10:], y[10:], "exact"))


class Mixing(nn.Module):
    """Samples touch each other, unless their first feature is negative."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        h, gate = self.first(x), (x[:, :1] > 0).to(x.dtype)
        return self.last(h - gate * h.mean(0) if len(h) > 1 else h)


def test_the_comparison_looks_at_samples_all_over_the_data():
    model, (x, y) = filled(Mixing()).double(), samples(40)
    x[:, 0] = x[:, 0].abs()
    x[:5, 0] *= -1
    assert close(diagonal_fisher(model, x), by_hand(model, x, y, "exact"))


def test_sums_that_are_zero_are_no_agreement():
    zero, one = torch.zeros(3), torch.ones(3)
    assert not importance._agree(zero, zero)
    assert not importance._agree(one, zero)
    assert importance._agree(one * (1 + 1e-5), one)
    assert not importance._agree(one * 1.01, one)


@pytest.mark.parametrize("memory", [1, 500, 3000, 20000])
def test_chunks_do_not_matter(memory, monkeypatch):
    """Down to one sample and one class at a time."""
    model, (x, y) = build("convolutional alone"), samples()
    expected = by_hand(model, x, y, "exact")
    monkeypatch.setitem(importance.MEMORY, "cpu", memory)
    assert close(diagonal_fisher(model, x), expected)
    mlp = build("mlp")
    assert close(diagonal_fisher(mlp, x), by_hand(mlp, x, y, "exact"))


@pytest.mark.parametrize(("gradients", "expected"), [(24, 24), (3, 3), (0.5, 1)])
def test_memory_of_a_chunk_is_bounded(gradients, expected, monkeypatch):
    """Six samples with four classes each; part of the classes of one; at least one gradient."""
    model, (x, _) = build("convolutional alone"), samples(40)
    size = sum(p.nbytes for p in model.parameters())
    monkeypatch.setitem(importance.MEMORY, "cpu", int(gradients * size))
    rows = []
    monkeypatch.setattr(
        importance, "_power_", lambda g, power: rows.append(g.shape[:2]) or g.pow(power)
    )
    diagonal_fisher(model, x)
    assert max(n * k for n, k in rows) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_data_may_come_in_batches(kind):
    model, (x, y) = build("mlp"), samples(12)
    whole = diagonal_fisher(model, (x, y), kind=kind)
    pieces = [(x[:5], y[:5]), [x[5:11], y[5:11]], (x[11:], y[11:])]
    if kind == "squared_batch_mean":
        pieces = [[x, y], (x[:0], y[:0])]
    assert close(diagonal_fisher(model, pieces, kind=kind), whole)
    assert close(diagonal_fisher(model, iter(pieces), kind=kind), whole)


def test_frozen_parameters_are_left_out():
    model, (x, y) = build("mlp"), samples()
    expected = by_hand(model, x, y, "exact")
    model[0].requires_grad_(False)
    result = diagonal_fisher(model, x)
    assert close(result, {n: v for n, v in expected.items() if n.startswith("2.")})
    model[2].weight.requires_grad_(False)
    assert close(diagonal_fisher(model, x), {"2.bias": expected["2.bias"]})


class Heads(nn.Module):
    """A trunk and two heads, one of which answers."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x, head=0):
        return self.heads[head](self.trunk(x).tanh())


@pytest.mark.parametrize("head", [0, 1])
def test_arguments_reach_the_forward_pass(head):
    model, (x, y) = filled(Heads()).double(), samples()
    alone = nn.Sequential(model.trunk, nn.Tanh(), model.heads[head])
    expected = by_hand(alone, x, y, "exact")
    result = diagonal_fisher(model, x, head=head)
    assert torch.allclose(result["trunk.weight"], expected["0.weight"])
    assert torch.allclose(result[f"heads.{head}.weight"], expected["2.weight"])
    assert not result[f"heads.{1 - head}.weight"].any()


def test_half_precision_is_summed_in_single():
    model, (x, y) = filled(nn.Linear(5, 4)), samples(400, dtype=torch.float32)
    expected = diagonal_fisher(model, (x, y))["weight"]
    result = diagonal_fisher(model.bfloat16(), (x.bfloat16(), y))["weight"]
    assert result.dtype == torch.float32
    assert (result / expected - 1).abs().max() < 0.05


def test_half_precision_is_summed_in_single_from_batches_too(monkeypatch):
    """Many small terms after a large one: bfloat16 would lose every one of them."""
    monkeypatch.setattr("neuvar.continual.importance.SQUARED_BATCH", 1)
    model = filled(nn.Linear(5, 4))
    x, y = samples(600, dtype=torch.float32)
    expected = diagonal_fisher(model, (x, y), kind="squared_batch_mean")["weight"]
    model.bfloat16()
    result = diagonal_fisher(model, (x.bfloat16(), y), kind="squared_batch_mean")["weight"]
    assert result.dtype == torch.float32
    assert (result / expected - 1).abs().max() < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_labels_may_be_a_list(kind):
    model, (x, y) = build("mlp"), samples()
    expected = diagonal_fisher(model, (x, y), kind=kind)
    assert close(diagonal_fisher(model, [x, y], kind=kind), expected, rtol=0)
    assert close(diagonal_fisher(model, [x, y.int()], kind=kind), expected, rtol=0)


def measure(model, data, kind):
    if kind == "sensitivity":
        return output_sensitivity(model, data)
    return diagonal_fisher(model, data, kind=kind)


class Counting(nn.Module):
    """Writes to a buffer in every mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return x


def whole_state(model):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: (t.detach().clone(), t.data_ptr()) for name, t in tensors.items()}
    more = [
        [(m.training, dict(m._forward_hooks)) for m in model.modules()],
        [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        torch.get_rng_state(),
    ]
    return state, more


def same_state(a, b):
    assert a[0].keys() == b[0].keys()
    for name, (tensor, address) in a[0].items():
        assert torch.equal(tensor, b[0][name][0]), name
        assert address == b[0][name][1]
    assert a[1][0] == b[1][0]
    for (trained, grad), (trained_too, grad_too) in zip(a[1][1], b[1][1], strict=True):
        assert trained == trained_too
        assert (grad is None) == (grad_too is None)
        assert grad is None or torch.equal(grad, grad_too)
    assert torch.equal(a[1][2], b[1][2])
    return True


@pytest.mark.parametrize("kind", [*KINDS, "sensitivity"])
@pytest.mark.parametrize("noise", ["none", "nvrm", "known"])
class TestLeavesTheModelAsFound:
    def setting(self, noise):
        model = nn.Sequential(*convolutional().double(), Counting()).train()
        filled(model)
        model[3].eval()
        model[6].weight.requires_grad_(False)
        x, y = samples()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if noise != "none":
            optimizer = NVRM(optimizer, b=0.1, model=model if noise == "known" else None)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model, optimizer, x, y

    def test_in_every_respect(self, kind, noise):
        model, optimizer, x, y = self.setting(noise)
        before, state = whole_state(model), optimizer.state_dict()
        loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), 5, shuffle=True)
        measure(model, (x, y), kind)
        diagonal_fisher(model, loader, kind="empirical")
        assert same_state(before, whole_state(model))
        assert str(optimizer.state_dict()) == str(state)

    def test_also_after_an_error(self, kind, noise):
        model, _, x, y = self.setting(noise)
        before = whole_state(model)

        def broken():
            yield x, y
            raise KeyError("gone")

        with pytest.raises(KeyError):
            measure(model, broken(), kind)
        assert same_state(before, whole_state(model))

    def test_looks_at_clean_weights_in_evaluation_mode(self, kind, noise):
        model, optimizer, x, y = self.setting(noise)
        result = measure(model, (x, y), kind)
        if noise != "none":
            optimizer.eval()
        model.eval()
        assert close(result, measure(model, (x, y), kind), rtol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "sensitivity"])
def test_gradients_need_not_be_enabled(kind):
    model, data = build("convolutional"), samples()
    expected = measure(model, data, kind)
    with torch.no_grad():
        assert close(measure(model, data, kind), expected)
        assert not torch.is_grad_enabled()


class TestBadInput:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("last", [nn.Linear(5, 1), nn.Unflatten(1, (5, 1))])
    def test_outputs_that_are_no_logits(self, kind, last):
        """With one logit the Fisher information would be 0, and nothing would be held."""
        model = nn.Sequential(nn.Linear(5, 5), last)
        with pytest.raises(
            ValueError, match=r"model must return logits .* for at least two classes"
        ):
            diagonal_fisher(model, (torch.ones(2, 5), torch.zeros(2).long()), kind=kind)

    def test_kind(self):
        with pytest.raises(ValueError, match=r"kind must be one of exact, .* got 'true'"):
            diagonal_fisher(mlp(), torch.ones(2, 5), kind="true")

    @pytest.mark.parametrize("kind", ["empirical", "squared_batch_mean"])
    def test_labels_are_missing(self, kind):
        with pytest.raises(ValueError, match="data has inputs only"):
            diagonal_fisher(mlp(), torch.ones(2, 5), kind=kind)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("data", [[], (torch.ones(0, 5), torch.ones(0))])
    def test_no_data(self, kind, data):
        with pytest.raises(ValueError, match="data is empty"):
            diagonal_fisher(mlp(), data, kind=kind)

    def test_lengths_differ(self):
        with pytest.raises(ValueError, match="data has 3 inputs but 2 labels in a batch"):
            diagonal_fisher(mlp(), (torch.ones(3, 5), torch.ones(2).long()))

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({"x": torch.ones(3, 5)}, "iterable of these, got dict"),
            (torch.ones(3, 5).numpy(), "iterable of these, got ndarray"),
            (mnist_excerpt().test, "iterable of these, got Split"),
            (3, "iterable of these, got int"),
            ("x", "iterable of these, got str"),
            (
                [{"x": torch.ones(3, 5)}],
                r"pair of tensors \(inputs, labels\), got dict with the keys x",
            ),
            ([(torch.ones(3, 5),) * 3], "got tuple of Tensor, Tensor, Tensor"),
            ((torch.ones(3, 5), [0, 1, 2]), "got tuple of Tensor, list"),
            ([torch.ones(3, 5).numpy()], "got ndarray"),
            ([torch.ones(3, 5), torch.ones(3, 5)], "not be a list of two batches"),
            (torch.tensor(1.0), "one row per example, got a tensor with 0 dimensions"),
        ],
    )
    def test_forms_of_data(self, data, words):
        with pytest.raises(ValueError, match="^data must.*" + words):
            diagonal_fisher(mlp(), data)

    @pytest.mark.parametrize("kind", ["empirical", "squared_batch_mean"])
    @pytest.mark.parametrize("labels", [torch.zeros(3), torch.zeros(3, 4).long()])
    def test_labels_that_are_no_classes(self, kind, labels):
        with pytest.raises(ValueError, match="data must have integer labels of shape"):
            diagonal_fisher(mlp(), (torch.ones(3, 5), labels), kind=kind)

    def test_nothing_is_trained(self):
        with pytest.raises(ValueError, match="no trained parameter"):
            diagonal_fisher(mlp().requires_grad_(False), torch.ones(3, 5))

    def test_an_error_of_the_model_itself_is_shown(self):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            diagonal_fisher(mlp(), torch.ones(3, 9))
