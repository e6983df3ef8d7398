"""The model is left as found, all forms of data mean the same, and so do all ways to evaluate."""

import collections
import copy
import inspect
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from neuvar import NVRMSGD, bounds, neural_variability
from neuvar.measures import (
    curvature_check,
    expected_sharpness,
    hessian_trace,
    keskar_sharpness,
    largest_b,
    variability_curve,
)
from neuvar.measures.landscape import Landscape
from neuvar.measures.loss_and_accuracy import batch_accuracy
from tests.landscapes import classes, classifier
from tests.toy import same

MEASURES = {
    "variability": lambda *a, **k: neural_variability(*a, b=0.1, draws=8, **k),
    "one by one": lambda *a, **k: neural_variability(*a, b=0.1, draws=8, vectorize=False, **k),
    "together": lambda *a, **k: neural_variability(*a, b=0.1, draws=8, vectorize=True, **k),
    "reestimated": lambda *a, **k: neural_variability(
        *a, b=0.1, draws=8, batchnorm="reestimate", **k
    ),
    "hessian": lambda *a, **k: hessian_trace(*a, probes=2, **k),
    "check": lambda *a, **k: curvature_check(*a, b=0.1, draws=8, **k),
    "keskar": lambda *a, **k: keskar_sharpness(*a, steps=2, **k),
    "subspace": lambda *a, **k: keskar_sharpness(*a, steps=2, subspace=3, **k),
}


def everything(model):
    """All that a measure could leave changed, as something that can be compared."""
    return (
        [p.detach().clone() for p in model.parameters()],
        [(id(p), p._version, p.requires_grad, id(p.grad)) for p in model.parameters()],
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        [id(b) for b in model.buffers()],
        [b.clone() for b in model.buffers()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        str(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
        torch.is_grad_enabled(),
    )


def assert_as_found(before, after):
    for first, second in zip(before, after, strict=True):
        if isinstance(first, torch.Tensor):
            assert torch.equal(first, second)
        elif isinstance(first, list) and first and isinstance(first[0], torch.Tensor):
            assert same(first, second)
        else:
            assert first == second


def lived_in_model():
    """A model in the middle of somebody's work."""
    model = classifier().train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    x, y = classes()
    cross_entropy(model(x), y).backward()
    return model


@pytest.mark.parametrize("measure", MEASURES)
def test_everything_is_left_as_found(measure):
    model = lived_in_model()
    loader = DataLoader(TensorDataset(*classes()), batch_size=16, shuffle=True)
    before = everything(model)
    MEASURES[measure](model, cross_entropy, loader)
    assert_as_found(before, everything(model))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_also_after_an_error_in_the_middle(measure, error):
    model, calls = lived_in_model(), []

    def loss(outputs, targets):
        calls.append(1)
        if len(calls) > 1:
            raise error("enough")
        return cross_entropy(outputs, targets)

    before = everything(model)
    with pytest.raises(error, match="enough"):
        MEASURES[measure](model, loss, classes())
    assert_as_found(before, everything(model))


def test_a_backward_pass_may_still_be_to_come():
    model = classifier().eval()
    x, y = classes()
    pending = cross_entropy(model(x), y)
    neural_variability(model, cross_entropy, (x, y), b=0.5)
    pending.backward()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("keep", ["exact", "replay"])
def test_an_optimizers_noise_is_off_meanwhile_and_back_afterwards(known, keep):
    model, data = classifier(), classes()
    optimizer = NVRMSGD(model if known else model.parameters(), lr=0.1, b=0.3, mode=keep)
    cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    with optimizer.denoised():
        expected = neural_variability(model, cross_entropy, data, b=0.1, vectorize=False)
    noisy = [p.detach().clone() for p in model.parameters()]
    found = neural_variability(model, cross_entropy, data, b=0.1, vectorize=False)
    assert found == expected
    assert same(noisy, [p.detach() for p in model.parameters()])
    cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()  # and it goes on


Batch = collections.namedtuple("Batch", "inputs targets")


def test_all_forms_of_data_mean_the_same():
    x, y = classes(50)
    model = classifier()
    pair = neural_variability(model, cross_entropy, (x, y), b=0.1, batch_size=13)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, *, features):
            return self.inner(features)

    cuts = [slice(0, 7), slice(7, 31), slice(31, 50)]
    forms = {
        "loader": (model, DataLoader(TensorDataset(x, y), batch_size=11, shuffle=True)),
        "list": (model, [(x[c], y[c]) for c in cuts]),
        "lists": (model, [[x[c], y[c]] for c in cuts]),
        "named": (model, [Batch(x[c], y[c]) for c in cuts]),
        "dict": (Named(), [{"features": x[c], "labels": y[c]} for c in cuts]),
    }
    for form, (used, data) in forms.items():
        found = neural_variability(used, cross_entropy, data, b=0.1)
        assert found.clean == pytest.approx(pair.clean, rel=1e-6), form
        assert found.difference == pytest.approx(pair.difference, rel=1e-4), form
        assert found.clean_accuracy == pytest.approx(pair.clean_accuracy), form


def test_feed_reads_unusual_batches():
    x, y = classes(50)
    model = classifier()
    data = [{"pixels": x, "meta": "text", "answer": y}]
    found = neural_variability(
        model,
        cross_entropy,
        data,
        b=0.1,
        feed=lambda m, batch: (m(batch["pixels"]), batch["answer"]),
    )
    pair = neural_variability(model, cross_entropy, (x, y), b=0.1)
    assert found.difference == pytest.approx(pair.difference, rel=1e-6)


def test_random_data_are_the_same_in_every_pass():
    """An augmentation, and a loader that leaves out a random rest, do not blur the difference."""
    x, y = classes(50)

    class Jittered(TensorDataset):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            jitter = torch.rand(5) + random.random() + np.random.rand()  # noqa: NPY002
            return inputs + jitter, target

    loader = DataLoader(
        Jittered(x, y),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(5),
    )
    seen = []

    def loss(outputs, targets):
        seen.append(float(outputs.detach().sum()))
        return outputs.square().mean()

    state = loader.generator.get_state()
    model = nn.Linear(5, 3)
    with Landscape(model, loss, loader) as landscape:
        landscape.evaluate()
        landscape.evaluate()
    assert seen[:3] == seen[3:6] == seen[6:9]
    assert torch.equal(loader.generator.get_state(), state)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            lambda: ((x, y) for x, y in [classes()]),
            "generator, which can be iterated only once",
        ),
        (lambda: zip([1], [2], strict=True), "zip, which can be iterated only once"),
        (lambda: TensorDataset(*classes()), "put it into a DataLoader"),
        (lambda: classes()[0], "data must be a pair of tensors"),
        (lambda: 7, "data must be a pair of tensors"),
        (list, "data is empty"),
        (lambda: (torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)), "data is empty"),
        (lambda: (torch.zeros(3, 5), torch.zeros(4)), "must have the same length"),
        (lambda: [{"inputs": 1, "answers": 2}], "under one of labels, label"),
        (lambda: [torch.zeros(3, 5)], "a batch must be a tuple"),
    ],
)
def test_data_that_cannot_be_measured_on_get_a_sentence(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        neural_variability(classifier(), cross_entropy, data(), b=0.1)


def test_data_that_change_are_noticed():
    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            x, y = classes()
            return iter([(x[self.passes :], y[self.passes :])])

    with pytest.raises(ValueError, match="data must be the same in every pass"):
        neural_variability(classifier(), cross_entropy, Shrinking(), b=0.1)


def test_several_at_once_gives_the_same_as_one_by_one():
    model, data = classifier(), classes()
    one, many = (
        neural_variability(model, cross_entropy, data, b=0.1, draws=40, vectorize=vectorize)
        for vectorize in (False, True)
    )
    assert many.difference == pytest.approx(one.difference, rel=1e-4)
    assert many.stderr == pytest.approx(one.stderr, rel=1e-4)
    assert many.accuracy.mean == pytest.approx(one.accuracy.mean, abs=1e-6)


def test_batching_is_used_only_where_it_works():
    class Recurrent(nn.Module):
        """Its weights are known to it by other ways than by name."""

        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(5, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.cell(x.unsqueeze(1))[0][:, -1])

    class Branching(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum() > 0 else 2 * y

    for model in (Recurrent(), Branching(5, 3)):
        one, many = (
            neural_variability(model, cross_entropy, classes(), b=0.2, draws=8, vectorize=vectorize)
            for vectorize in (False, True)
        )
        assert many.difference == pytest.approx(one.difference, rel=1e-4)
        assert one.delta > 0


def test_weights_are_what_they_are_said_to_be():
    """The readings of a landscape are those of models with these weights, one draw for all data."""
    model, (x, y) = nn.Linear(5, 3), classes()
    own = [p.detach().clone() for p in model.parameters()]
    with Landscape(model, cross_entropy, (x, y), batch_size=9, seed=4) as landscape:
        noise = landscape.noise(1)
        (reading,) = landscape.evaluate_noisy(0.3, [1], (1, -1))
    expected = 0
    for sign in (1, -1):
        moved = [w + sign * 0.3 * noise[p] for w, p in zip(own, model.parameters(), strict=True)]
        expected += float(cross_entropy(x @ moved[0].T + moved[1], y)) / 2
    assert reading.loss == pytest.approx(expected, rel=1e-5)


def test_some_parameters_alone():
    model, data = classifier(), classes()
    named = neural_variability(
        model, cross_entropy, data, b=0.1, parameters=["0.weight", "4.weight"], vectorize=False
    )
    tensors = neural_variability(
        model,
        cross_entropy,
        data,
        b=0.1,
        parameters=[model[4].weight, model[0].weight],
        vectorize=False,
    )
    assert named == tensors
    with Landscape(model, cross_entropy, data) as every:
        noise = every.noise(3)[model[4].weight]
    with Landscape(model, cross_entropy, data, parameters=["4.weight"]) as one:
        assert torch.equal(one.noise(3)[model[4].weight], noise)
        assert list(one.slots) == [model[4].weight]


@pytest.mark.parametrize("relative_to", ["tensor", "filter"])
def test_relative_noise_on_a_linear_model_by_calculation(relative_to):
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight[1] *= 10
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    y = model(x).detach()
    w, bias = model.weight.detach(), model.bias.detach()
    rms = w.square().mean(1) if relative_to == "filter" else w.square().mean().expand(3)
    each = rms * float(x.square().sum(1).mean()) + bias.square().mean()
    found = neural_variability(model, mse_loss, (x, y), b=0.1, relative_to=relative_to, draws=2000)
    assert abs(found.difference - 0.01 * float(each.mean())) < 4 * found.stderr


def test_relative_noise_does_not_see_a_rescaling_that_changes_no_output():
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False))
    data = classes()

    def measured(relative_to):
        found = neural_variability(
            model, cross_entropy, data, b=0.1, relative_to=relative_to, vectorize=False
        )
        return found.difference

    before = {r: measured(r) for r in (None, "tensor", "filter")}
    with torch.no_grad():
        model[0].weight.mul_(16)
        model[2].weight.div_(16)
    assert measured("tensor") == pytest.approx(before["tensor"], rel=1e-3)
    assert measured("filter") == pytest.approx(before["filter"], rel=1e-3)
    assert measured(None) > 2 * before[None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype):
    model, (x, y) = classifier(), classes()
    expected = neural_variability(model, cross_entropy, (x, y), b=0.2, draws=200)
    model.to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    found = neural_variability(model, cross_entropy, (x.to(dtype), y), b=0.2, draws=200)
    assert found.difference == pytest.approx(expected.difference, rel=0.1)
    assert same(before, [p.detach() for p in model.parameters()])


def test_statistics_of_batch_normalization():
    model, data = classifier(), classes()
    kept = neural_variability(model, cross_entropy, data, b=0.3)
    anew = neural_variability(model, cross_entropy, data, b=0.3, batchnorm="reestimate")
    without = neural_variability(nn.Linear(5, 3), cross_entropy, data, b=0.3)
    assert (kept.batchnorm, anew.batchnorm, without.batchnorm) == ("keep", "reestimate", "absent")
    assert anew.clean != kept.clean
    # A shift of the first layer's weights is undone by new statistics.
    first = {"parameters": ["0.bias"], "b": 5.0}
    assert (
        neural_variability(model, cross_entropy, data, batchnorm="reestimate", **first).delta
        < 1e-5
        < neural_variability(model, cross_entropy, data, **first).delta
    )


def test_shared_and_frozen_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.head = nn.Linear(5, 3).requires_grad_(False)

        def forward(self, x):
            return self.head(self.second(self.first(x)))

    model = Tied()
    one, many = (
        neural_variability(model, cross_entropy, classes(), b=0.2, vectorize=vectorize)
        for vectorize in (False, True)
    )
    assert many.difference == pytest.approx(one.difference, rel=1e-4)


def test_a_compiled_model_is_measured_in_place():
    model, data = nn.Linear(5, 3), classes()
    compiled = torch.compile(model, backend="eager")
    plain = neural_variability(model, cross_entropy, data, b=0.2, vectorize=False)
    found = neural_variability(compiled, cross_entropy, data, b=0.2, vectorize=False)
    assert found.difference == pytest.approx(plain.difference, rel=1e-5)


class Merging(nn.Module):
    """A layer with an adapter that is merged into its weights for evaluation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.adapter = nn.Parameter(torch.randn(3, 5) / 7)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += self.adapter.data if not mode else -self.adapter.data
            self.merged = not mode
        return self

    def forward(self, x):
        return x @ (self.weight if self.merged else self.weight + self.adapter).T


def test_layers_that_act_on_a_change_of_mode():
    model = nn.Sequential(Merging()).train()
    before = [p.detach().clone() for p in model.parameters()]
    alone = Merging()
    alone.load_state_dict(model[0].state_dict())
    found = neural_variability(model, cross_entropy, classes(), b=0.1, parameters=["0.weight"])
    assert same(before, [p.detach() for p in model.parameters()])
    assert model.training
    assert model[0].training
    assert not model[0].merged
    merged = neural_variability(
        alone.eval(), cross_entropy, classes(), b=0.1, parameters=["weight"]
    )
    assert found.difference == pytest.approx(merged.difference, rel=1e-4)


@pytest.mark.parametrize("vectorize", [False, True])
def test_what_a_forward_pass_leaves_behind_is_gone(vectorize):
    class Recording(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("cache", None)
            self.last = None

        def forward(self, x):
            self.last = super().forward(x)
            self.cache = self.last.detach().mean(0)
            self.new = self.last
            return self.last

    model = Recording()
    neural_variability(model, cross_entropy, classes(), b=0.1, vectorize=vectorize)
    assert model.last is None
    assert model.cache is None
    assert not hasattr(model, "new")
    copy.deepcopy(model)


def test_weights_that_batching_would_miss_are_not_missed_at_small_scales():
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 5).double())
            self.known_elsewhere = [self.w]

        def forward(self, x):
            return x @ self.known_elsewhere[0].T

    model, (x, y) = Hiding(), classes()
    one, many = (
        neural_variability(model, cross_entropy, (x.double(), y), b=1e-3, vectorize=vectorize)
        for vectorize in (False, True)
    )
    assert many.difference == one.difference > 0


def test_accuracy_only_where_there_are_classes():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    tokens = torch.arange(42).view(6, 7) % 11
    found = neural_variability(
        Language(),
        lambda o, t: cross_entropy(o.flatten(0, 1), t.flatten()),
        (tokens, tokens),
        b=0.1,
    )
    assert found.accuracy is None
    single = neural_variability(
        nn.Linear(5, 1),
        lambda o, t: o.square().mean(),
        (torch.ones(4, 5), torch.ones(4).long()),
        b=1,
    )
    assert single.accuracy is None
    ignoring = torch.tensor([[9.0, 0], [9, 0], [9, 0]]), torch.tensor([0, 1, -100])
    assert float(batch_accuracy(*ignoring)) == 0.5


def test_randomness_in_evaluation_is_the_same_in_every_pass():
    class AlwaysDropping(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, training=True))

    model, state = AlwaysDropping(5, 3), torch.get_rng_state()
    found = neural_variability(model, cross_entropy, classes(), b=1e-6, draws=8)
    assert found.delta < 1e-5
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_of_samplers_are_left_as_found():
    generator = torch.Generator().manual_seed(3)
    x, y = classes()
    sampler = WeightedRandomSampler(torch.ones(60), 40, generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
    state = generator.get_state()
    found = neural_variability(classifier(), cross_entropy, loader, b=1e-6, draws=8)
    assert found.delta < 1e-5
    assert torch.equal(generator.get_state(), state)


def test_data_that_change_in_content_are_noticed():
    class Drifting:
        passes = 0

        def __iter__(self):
            self.passes += 1
            x, y = classes()
            return iter([(self.passes * x, y)])

    with pytest.raises(ValueError, match="data must be the same in every pass"):
        neural_variability(classifier(), cross_entropy, Drifting(), b=0.1)

    class Writing(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(0.9))

    with pytest.raises(ValueError, match="the model changes its inputs in place"):
        neural_variability(Writing(5, 3), cross_entropy, classes(), b=0.1)


def test_a_buffer_that_cannot_be_written_does_no_harm():
    model = nn.Linear(5, 3).train()
    model.register_buffer("constant", torch.ones(1).expand(5))
    neural_variability(model, cross_entropy, classes(), b=0.1)
    assert model.training


def test_an_assertion_against_batching_is_not_the_users_problem():
    class Strict(nn.Linear):
        def forward(self, x):
            assert type(self.weight) is nn.Parameter
            return super().forward(x)

    found = neural_variability(Strict(5, 3), cross_entropy, classes(), b=0.1, vectorize=True)
    assert found.delta > 0


def test_measures_and_optimizers_with_one_seed_draw_different_noise():
    model = nn.Linear(5, 3)
    optimizer = NVRMSGD(model.parameters(), lr=1e-30, b=1.0, seed=4, sampler="fresh")
    cross_entropy(model(classes()[0]), classes()[1]).backward()
    before = model.weight.detach().clone()
    optimizer.step()
    trained_with = model.weight.detach() - before
    with Landscape(model, cross_entropy, classes(), seed=4) as landscape:
        measured_with = landscape.noise(1)[model.weight]
    assert float(trained_with.abs().max()) > 0.1
    assert float((trained_with - measured_with).abs().max()) > 0.1


def test_options_are_what_they_say():
    for options, sentence in (
        ({"vectorize": "never"}, "vectorize must be True or False"),
        ({"antithetic": "no"}, "antithetic must be True or False"),
    ):
        with pytest.raises(ValueError, match=sentence):
            neural_variability(nn.Linear(5, 3), cross_entropy, classes(), b=0.1, **options)
    model = nn.Linear(5, 3)
    twice = neural_variability(
        model, cross_entropy, classes(), b=0.1, parameters=["weight", model.weight]
    )
    once = neural_variability(model, cross_entropy, classes(), b=0.1, parameters=["weight"])
    assert twice == once


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (neural_variability, {"noise": "gaussian", "parameters": None, "vectorize": None}),
        (variability_curve, {"sampler": "fresh", "seed": 0}),
        (largest_b, {"batchnorm": "keep", "relative_to": None}),
        (expected_sharpness, {"batch_size": 1024, "feed": None}),
        (curvature_check, {"noise": "gaussian"}),
        (hessian_trace, {"batch_size": 1024, "relative_to": None}),
        (bounds.pac_bayes, {"draws": 200, "loss": bounds.zero_one, "clamp": None}),
        (bounds.information, {"weight_decay": None, "paper_prior": False}),
        (bounds.certify_forgetting, {"centre": None, "batch_size": 1024}),
    ],
)
def test_help_lists_every_option_with_its_default(function, options):
    parameters = inspect.signature(function).parameters
    assert options.items() <= {name: p.default for name, p in parameters.items()}.items()
    assert "options" not in parameters
    assert ("vectorize" in parameters) == (
        function
        not in (hessian_trace, bounds.pac_bayes, bounds.information, bounds.certify_forgetting)
    )
