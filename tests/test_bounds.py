"""Bounds against torch.distributions, scipy and simulation."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD, bounds, neural_variability
from tests.landscapes import classes, classifier
from tests.toy import network


def linear(seed=0):
    model = nn.Linear(5, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return model


@pytest.mark.parametrize("b", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("sigma", [0.1, 0.3, 5.0])
@pytest.mark.parametrize("centred", [False, True])
def test_divergence_is_that_of_torch(b, sigma, centred):
    model, other = network(dtype=torch.float64), network(seed=1, dtype=torch.float64)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    origin = torch.cat([p.detach().flatten() for p in other.parameters()])
    origin = origin if centred else torch.zeros_like(theta)
    spread = torch.ones_like(theta)
    expected = kl_divergence(
        Independent(Normal(theta, b * spread), 1), Independent(Normal(origin, sigma * spread), 1)
    )
    found = bounds.kl_to_prior(model, b=b, sigma=sigma, centre=other if centred else None)
    assert found == pytest.approx(float(expected), rel=1e-12)
    state = other.state_dict() if centred else None
    assert bounds.kl_to_prior(model, b=b, sigma=sigma, centre=state) == found


def test_divergence_is_of_the_clean_weights():
    model = linear()
    before = bounds.kl_to_prior(model, b=0.1, sigma=1)
    optimizer = NVRMSGD(model.parameters(), lr=1e-30, b=1.0)
    cross_entropy(model(classes()[0]), classes()[1]).backward()
    optimizer.step()
    noisy = [p.detach().clone() for p in model.parameters()]
    assert float(noisy[0].norm()) != pytest.approx(linear().weight.norm().item(), rel=0.01)
    assert bounds.kl_to_prior(model, b=0.1, sigma=1) == before
    assert all(torch.equal(x, p.detach()) for x, p in zip(noisy, model.parameters(), strict=True))


def test_a_centre_of_another_shape_gets_a_sentence():
    with pytest.raises(ValueError, match=r"centre has no weights of shape \(3, 5\) for weight"):
        bounds.kl_to_prior(linear(), b=1, sigma=1, centre=nn.Linear(4, 3))


@given(st.floats(0, 1), st.floats(0, 1))
def test_binary_divergence_is_scipys(q, p):
    expected = special.rel_entr(q, p) + special.rel_entr(1 - q, 1 - p)
    assert bounds.binary_kl(q, p) == pytest.approx(max(float(expected), 0), rel=1e-9, abs=1e-12)


@given(st.floats(0, 0.99), st.floats(1e-6, 20))
def test_the_inverse_is_the_root_that_scipy_finds(q, divergence):
    found = bounds.inverse_kl(q, divergence)
    assert found >= q
    if found < 1:
        root = optimize.brentq(
            lambda p: bounds.binary_kl(q, p) - divergence, q, 1 - 1e-16, xtol=1e-15
        )
        assert found == pytest.approx(root, abs=1e-9)
        # It may be rounded up, since it is to be an upper bound, but not down.
        assert bounds.binary_kl(q, found) >= divergence * (1 - 1e-12)


def test_limits_of_the_inverse():
    assert bounds.inverse_kl(0.3, 0.0) == 0.3
    assert bounds.inverse_kl(1.0, 0.1) == 1
    assert bounds.inverse_kl(0.0, 0.1) == pytest.approx(1 - math.exp(-0.1))
    for q, c in ((-0.1, 1), (1.1, 1), (math.nan, 1), (0.5, -1), (0.5, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            bounds.inverse_kl(q, c)


def test_formulas_by_hand():
    m, kl, failure = 1000, 25.0, 0.05
    root = 4 * math.sqrt((25 + math.log(2 * m / failure)) / m)
    lemma = bounds.mcallester_bound(0.1, kl, examples=m, failure=failure)
    assert lemma.value == pytest.approx(0.1 + root)
    assert (lemma.risk, lemma.kl, lemma.failure) == (0.1, 25, 0.05)
    assert lemma.complexity == pytest.approx(root)
    theorem = bounds.variability_bound(0.1, 0.02, kl, examples=m, failure=failure)
    assert theorem.value == pytest.approx(0.12 + root)
    seeger = bounds.seeger_bound(0.1, kl, examples=m, failure=failure)
    divergence = (25 + math.log(2 * math.sqrt(m) / failure)) / m
    assert bounds.binary_kl(0.1, seeger.value) == pytest.approx(divergence)
    information = bounds.information_bound(25.0, 0.02, examples=m, sub_gaussian=0.5)
    assert information.value == pytest.approx(math.sqrt(2 * 0.25 * 25 / m) + 0.02)
    forgetting = bounds.forgetting_bound(0.1, 0.05, kl, examples=m, failure=failure)
    assert forgetting.value == pytest.approx(0.15 + root)
    squared = bounds.forgetting_information_bound(25.0, examples=m, failure=failure).value ** 2
    assert squared == pytest.approx(16 / m * (25 + math.log(2 * m / failure)))


def test_theorem_one_falls_with_b_up_to_sigma_and_is_lowest_there():
    sigma, grid = 2.0, np.geomspace(1e-3, 20, 60)
    values = [
        bounds.variability_bound(
            0.1,
            0.01,
            bounds.gaussian_kl(count=50, squared_distance=3.0, b=b, sigma=sigma),
            examples=1000,
        ).value
        for b in grid
    ]
    falling = np.diff(values)[grid[1:] <= sigma]
    assert (falling < 0).all()
    assert (np.diff(values)[grid[:-1] >= sigma] > 0).all()
    kl = [
        bounds.gaussian_kl(count=50, squared_distance=3.0, b=b, sigma=sigma)
        for b in (1.99, 2, 2.01)
    ]
    assert kl[1] < min(kl[0], kl[2])
    assert kl[1] == pytest.approx(3 / 8)


@pytest.mark.parametrize("bound", [bounds.variability_bound, bounds.forgetting_bound])
def test_help_lists_the_options_of_mcallester(bound):
    parameters = inspect.signature(bound).parameters
    assert parameters["examples"].default is inspect.Parameter.empty
    assert (parameters["failure"].default, parameters["choices"].default) == (0.05, 1)


def test_vacuous_is_said():
    big = bounds.variability_bound(0.0, 0.0, kl=1e7, examples=60_000)
    assert big.vacuous
    assert big.value > 50
    assert "vacuous" in str(big)
    small = bounds.seeger_bound(0.05, kl=100.0, examples=60_000)
    assert not small.vacuous
    assert "of at most 1" in str(small)
    assert bounds.information_bound(1e9, 0.0, examples=100, sub_gaussian=0.5).vacuous


@given(st.floats(0, 1), st.floats(0, 1e5), st.integers(8, 10**6))
def test_seegers_bound_is_never_above_mcallesters(risk, kl, m):
    seeger = bounds.seeger_bound(risk, kl, examples=m).value
    assert risk <= seeger <= 1
    assert seeger <= bounds.mcallester_bound(risk, kl, examples=m).value + 1e-12


@given(st.floats(0.1, 50), st.floats(0, 1))
def test_a_ceiling_scales_everything(ceiling, share):
    unit = bounds.seeger_bound(share, 20.0, examples=500)
    scaled = bounds.seeger_bound(share * ceiling, 20.0, examples=500, ceiling=ceiling)
    assert scaled.value == pytest.approx(unit.value * ceiling)
    assert bounds.mcallester_bound(
        share * ceiling, 20.0, examples=500, ceiling=ceiling
    ).value == pytest.approx(ceiling * bounds.mcallester_bound(share, 20.0, examples=500).value)


def test_choices_pay():
    one, many = (
        bounds.seeger_bound(0.1, 20.0, examples=500, failure=0.05, choices=k) for k in (1, 10)
    )
    assert many.value > one.value
    assert many.value == bounds.seeger_bound(0.1, 20.0, examples=500, failure=0.005).value
    assert many.failure == 0.05


def test_the_monte_carlo_correction_fails_as_seldom_as_it_says():
    rng = np.random.default_rng(0)
    for truth, draws in ((0.02, 50), (0.3, 20)):
        means = rng.binomial(1, truth, (5000, draws)).mean(1)
        held = [bounds.monte_carlo_risk(m, draws=draws, failure=0.1) >= truth for m in means]
        assert np.mean(held) >= 0.9 - 3 * math.sqrt(0.09 / 5000)
    exact = stats.binomtest(3, 100, alternative="less").proportion_ci(0.99).high
    assert bounds.monte_carlo_risk(0.03, draws=100, failure=0.01) >= exact


def test_priors_from_weight_decay():
    assert bounds.prior_sigma(1e-4, examples=None) == pytest.approx(100)
    assert bounds.prior_sigma(1e-4, examples=10_000) == pytest.approx(1)
    model, data = linear(), classes(400)
    ours = bounds.pac_bayes(model, data, b=0.1, weight_decay=0.01, draws=4)
    papers = bounds.pac_bayes(model, data, b=0.1, weight_decay=0.01, paper_prior=True, draws=4)
    assert (ours.sigma, papers.sigma) == (pytest.approx(0.5), pytest.approx(10))
    assert ours.bound.kl == pytest.approx(bounds.kl_to_prior(model, b=0.1, sigma=0.5))


@pytest.mark.parametrize("form", ["seeger", "mcallester", "variability"])
def test_a_certificate_is_made_of_what_it_shows(form):
    model, (x, y) = linear(), classes(400)
    found = bounds.pac_bayes(model, (x, y), b=0.2, sigma=0.5, draws=50, form=form, failure=0.1)
    clean = float((model(x).argmax(1) != y).double().mean())
    assert found.clean == pytest.approx(clean, abs=1e-6)
    upper = bounds.monte_carlo_risk(found.perturbed.mean, draws=50, failure=0.05)
    assert found.upper == pytest.approx(upper)
    kl = bounds.kl_to_prior(model, b=0.2, sigma=0.5)
    if form == "variability":
        rest = 1 - bounds.monte_carlo_risk(1 - found.perturbed.mean, draws=50, failure=0.05)
        delta = max(upper - clean, clean - rest)
        expected = bounds.variability_bound(clean, delta, kl, examples=400, failure=0.05)
    else:
        formula = getattr(bounds, f"{form}_bound")
        expected = formula(upper, kl, examples=400, failure=0.05)
    assert found.bound.value == pytest.approx(expected.value, abs=1e-6)
    assert (found.bound.failure, found.b, found.sigma, found.choices) == (0.1, 0.2, 0.5, 1)


def test_the_best_of_several_pays_for_having_been_chosen():
    model, data = linear(), classes(400)
    sigmas, scales = [0.3, 1.0, 3.0], [0.1, 0.2]
    best = bounds.pac_bayes(model, data, b=scales, sigma=sigmas, draws=20)
    alone = bounds.pac_bayes(model, data, b=best.b, sigma=best.sigma, draws=20)
    assert best.choices == 6
    assert best.bound.value > alone.bound.value
    upper = bounds.monte_carlo_risk(best.perturbed.mean, draws=20, failure=0.025 / 2)
    assert best.upper == pytest.approx(upper)
    kl = bounds.kl_to_prior(model, b=best.b, sigma=best.sigma)
    expected = bounds.seeger_bound(upper, kl, examples=400, failure=0.025, choices=3)
    assert best.bound.value == pytest.approx(expected.value)
    every = [
        bounds.pac_bayes(model, data, b=scales, sigma=[s] * 3, draws=20).bound.value for s in sigmas
    ]
    assert best.bound.value == pytest.approx(min(every))


@pytest.mark.slow
def test_bounds_hold_for_models_fitted_to_noise():
    """With labels at random the risk is known: one half. No bound may be below it."""
    values = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(200, 20, generator=generator)
        y = torch.randint(0, 2, (200,), generator=generator)
        model, start = nn.Linear(20, 2), nn.Linear(20, 2)
        with torch.no_grad():
            for p in (*model.parameters(), *start.parameters()):
                p.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(100):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        found = bounds.pac_bayes(
            model, (x, y), b=[0.1, 0.3], sigma=[0.1, 0.3, 1.0], centre=start, draws=50
        )
        assert found.clean < 0.45  # it has learned some of it by heart
        values.append(found.bound.value)
    assert min(values) > 0.5


def test_other_losses_must_be_clamped():
    model, (x, y) = linear(), classes(400)
    with pytest.raises(ValueError, match="pass clamp="):
        bounds.pac_bayes(model, (x, y), b=0.1, sigma=1, loss=cross_entropy)
    with pytest.raises(ValueError, match="the 0-1 loss needs no clamp"):
        bounds.pac_bayes(model, (x, y), b=0.1, sigma=1, clamp=2.0)
    found = bounds.pac_bayes(model, (x, y), b=0.1, sigma=1, loss=cross_entropy, clamp=2.0, draws=20)
    each = cross_entropy(model(x), y, reduction="none").detach()
    assert found.clean == pytest.approx(float(each.clamp(0, 2).mean()), rel=1e-5)
    assert found.clean < float(each.mean())
    assert found.bound.ceiling == 2
    assert found.bound.value <= 2


def test_what_no_bound_holds_for_gets_a_sentence():
    with pytest.raises(ValueError, match="batch normalization"):
        bounds.pac_bayes(classifier(), classes(), b=0.1, sigma=1)
    with pytest.raises(ValueError, match="0-1 loss needs logits"):
        bounds.pac_bayes(nn.Linear(5, 1), (torch.ones(3, 5), torch.ones(3, 1)), b=0.1, sigma=1)
    for norm in (nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5)):
        with pytest.raises(ValueError, match="batch normalization"):
            bounds.pac_bayes(nn.Sequential(norm, nn.Linear(5, 3)), classes(), b=0.1, sigma=1)
    data = classes()
    with pytest.raises(ValueError, match="sigma must be a finite number"):
        bounds.information(linear(), data, b=0.1, sigma=[1.0, 2.0])
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]))
    with pytest.raises(ValueError, match="mean of the losses of single examples"):
        bounds.pac_bayes(linear(), data, b=0.1, sigma=1, loss=weighted, clamp=2.0)
    for options, sentence in (
        ({"sigma": 1, "paper_prior": True}, "paper_prior needs weight_decay"),
        ({}, "either sigma or weight_decay"),
        ({"sigma": 1, "weight_decay": 1}, "either sigma or weight_decay"),
        ({"sigma": 0}, "sigma must be a finite number > 0"),
        ({"sigma": []}, "sigma must have at least one value"),
        ({"sigma": 1, "form": "catoni"}, "form must be one of"),
        ({"sigma": 1, "draws": 1}, "draws must be an integer >= 2"),
        ({"sigma": 1, "failure": 0}, "failure must be a finite number > 0 and < 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bounds.pac_bayes(linear(), data, b=0.1, **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bounds.mcallester_bound(1.5, 1.0, examples=10), "risk must be between 0 and"),
        (lambda: bounds.mcallester_bound(-0.1, 1.0, examples=10), "risk must be between 0 and"),
        (lambda: bounds.mcallester_bound(0.1, -1.0, examples=10), "kl must be a finite number"),
        (lambda: bounds.mcallester_bound(0.1, math.inf, examples=10), "kl must be a finite number"),
        (lambda: bounds.mcallester_bound(0.1, 1.0, examples=0), "examples must be an integer"),
        (lambda: bounds.mcallester_bound(0.1, 1.0, examples=9, failure=2), "failure must be"),
        (lambda: bounds.mcallester_bound(0.1, 1.0, examples=9, choices=0), "choices must be"),
        (lambda: bounds.seeger_bound(0.1, 1.0, examples=7), "examples must be an integer >= 8"),
        (lambda: bounds.forgetting_bound(0.1, math.nan, 1.0, examples=9), "delta_ab must be"),
        (lambda: bounds.prior_sigma(0, examples=5), "weight_decay must be a finite number > 0"),
        (lambda: bounds.gaussian_kl(count=0, squared_distance=0, b=1, sigma=1), "count must be"),
        (lambda: bounds.binary_kl(2, 0.5), "q must be a finite number >= 0 and <= 1"),
    ],
)
def test_numbers_that_make_no_sense_get_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_information_of_a_model():
    model, data = linear(), classes(400)
    found = bounds.information(model, data, b=0.2, sigma=0.5)
    kl = bounds.kl_to_prior(model, b=0.2, sigma=0.5)
    delta = found.bound.risk
    assert found.bound.value == pytest.approx(math.sqrt(2 * 0.25 * kl / 400) + delta)
    assert delta >= abs(found.perturbed.mean - found.clean)
    assert found.bound.failure == pytest.approx(0.05)


def test_forgetting_of_a_model():
    after, before, data = linear(1), linear(0), classes(400)
    found = bounds.certify_forgetting(after, before, data, b=0.2, sigma=0.5, draws=60, failure=0.1)
    assert found.delta_ab.mean == pytest.approx(found.after.mean - found.before.mean)
    upper = bounds.monte_carlo_risk(found.after.mean, draws=60, failure=0.05)
    assert found.bound.risk == pytest.approx(upper)
    kl = bounds.kl_to_prior(after, b=0.2, sigma=0.5)
    expected = bounds.mcallester_bound(upper, kl, examples=400, failure=0.05)
    assert found.bound.value == pytest.approx(expected.value)
    state = bounds.certify_forgetting(
        after, before.state_dict(), data, b=0.2, sigma=0.5, draws=60, failure=0.1
    )
    assert state == found
    nothing = bounds.certify_forgetting(before, before, data, b=0.2, sigma=0.5, draws=10)
    assert nothing.delta_ab.mean == 0


def test_rounding_at_the_ceiling_is_no_error():
    model, data = linear(), classes(400)
    for form in ("seeger", "mcallester", "variability"):
        found = bounds.pac_bayes(
            model, data, b=0.1, sigma=1, loss=cross_entropy, clamp=0.1, form=form, draws=4
        )
        assert found.clean <= 0.1
    part = 0.05618729096989966
    bounds.forgetting_bound(part, 0.6 - part, 1.0, examples=10, ceiling=0.6)


def test_a_compiled_model_is_at_its_own_centre():
    model = linear()
    compiled = torch.compile(model, backend="eager")
    assert bounds.kl_to_prior(compiled, b=0.1, sigma=0.1, centre=model) == 0


def test_bounds_have_draws_of_their_own():
    """Whoever finds b by the measures must not find the same draws again in the bound."""
    model, data = linear(), classes(400)
    found = bounds.pac_bayes(model, data, b=0.2, sigma=1, draws=20)
    measured = neural_variability(model, bounds.zero_one, data, b=0.2, draws=20, antithetic=False)
    assert found.clean == pytest.approx(measured.clean)
    assert found.perturbed.mean != pytest.approx(measured.perturbed, abs=1e-9)
