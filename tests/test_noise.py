"""The noise has the distributions it claims, and depends on nothing but its arguments."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

from neuvar import b_from_std, noise, std_from_b
from neuvar.noise import Draw, shard_slot, standard_noise, table, whole_slot

CPU = torch.device("cpu")
N = 300_000
samplers = pytest.mark.parametrize("sampler", noise.SAMPLERS)
families = pytest.mark.parametrize("family", noise.FAMILIES)

CDF = {
    "gaussian": stats.norm.cdf,
    "laplace": stats.laplace.cdf,
    "uniform": stats.uniform(-1, 2).cdf,
}


def draws(numbers, size=1000, *, sampler="table", family="gaussian", seed=0, index=0, start=0):
    """Noise of one parameter, a row for each draw, standardised."""
    slot = whole_slot((size,), number=index, start=start)
    rows = [standard_noise(slot, Draw(n, 1, family, seed, sampler)) for n in numbers]
    return torch.stack(rows).double() / noise.FAMILIES[family].std


@samplers
@families
def test_marginal_distribution(sampler, family):
    slot = whole_slot((N,))
    z = standard_noise(slot, Draw(1, 1, family, 0, sampler)).double()
    assert stats.kstest(z.numpy(), CDF[family]).pvalue > 1e-3
    std = noise.FAMILIES[family].std
    assert abs(z.mean()) < 4 * std / math.sqrt(N)
    kurtosis = {"gaussian": 3, "laplace": 6, "uniform": 1.8}[family]
    assert abs(z.square().mean() / std**2 - 1) < 4 * math.sqrt((kurtosis - 1) / N)


@samplers
@families
def test_one_weight_over_draws(sampler, family):
    z = draws(range(1, 2001), size=3, sampler=sampler, family=family) * noise.FAMILIES[family].std
    for weight in z.T:
        assert stats.kstest(weight.numpy(), CDF[family]).pvalue > 1e-4


@samplers
def test_no_correlation_across_weights(sampler):
    z = draws([1], size=N, sampler=sampler)[0]
    for lag in (1, 2, 7, 64, 1024, 65_536):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4.5 / math.sqrt(N - lag), lag


@samplers
def test_no_correlation_of_neighbours_over_draws(sampler):
    z = draws(range(1, 4001), size=8, sampler=sampler)
    correlation = z.T @ z / len(z) - torch.eye(8)
    assert correlation.fill_diagonal_(0).abs().max() < 4.5 / math.sqrt(len(z))


@samplers
def test_no_correlation_across_parameters(sampler):
    first = draws([1], size=N, sampler=sampler)[0]
    second = draws([1], size=N, sampler=sampler, index=1, start=N)[0]
    for lag in (0, 1, 10, 1000):
        assert abs((first[lag:] * second[: N - lag]).mean()) < 4.5 / math.sqrt(N - lag)


@samplers
def test_no_correlation_across_steps_and_seeds(sampler):
    z = draws(range(1, 41), size=20_000, sampler=sampler)
    other = draws(range(1, 41), size=20_000, sampler=sampler, seed=1)
    for a, b in ((z[1:], z[:-1]), (z[7:], z[:-7]), (z, other)):
        assert abs((a * b).mean()) < 4.5 / math.sqrt(a.numel())
        assert (a * b).mean(1).abs().max() < 5.5 / math.sqrt(a.shape[1])


@samplers
def test_is_a_pure_function(sampler):
    slot, draw = whole_slot((70_000,), number=3, start=11), Draw(5, 1, "gaussian", 9, sampler)
    state = torch.get_rng_state()
    first = standard_noise(slot, draw)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(standard_noise(slot, draw), first)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(standard_noise(slot, draw), first)
    standard_noise(slot, draw._replace(number=6))
    assert torch.equal(standard_noise(slot, draw), first)
    for change in ({"number": 6}, {"seed": 10}, {"rank": 1}):
        assert not torch.equal(standard_noise(slot, draw._replace(**change)), first)


@samplers
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_does_not_depend_on_sharding(sampler, data):
    rows, columns = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    low = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    high = data.draw(st.integers(low[0], rows)), data.draw(st.integers(low[1], columns))
    shape = (high[0] - low[0], high[1] - low[1])
    draw = Draw(3, 1, "gaussian", 1, sampler)
    start = data.draw(st.integers(0, 3 * noise.TABLE_SIZE))
    whole = standard_noise(whole_slot((rows, columns), number=2, start=start), draw)
    part = standard_noise(shard_slot((rows, columns), low, shape, number=2, start=start), draw)
    assert torch.equal(part, whole[low[0] : high[0], low[1] : high[1]])


@samplers
@given(cuts=st.lists(st.integers(0, 1500), max_size=4).map(sorted))
@settings(max_examples=30, deadline=None)
def test_rows_can_be_cut_anywhere(sampler, cuts):
    """Within blocks of the fresh sampler and across them, and across the table's end."""
    shape, draw = (1500, 103), Draw(3, 1, "gaussian", 1, sampler)
    start = 2 * noise.TABLE_SIZE - 70_000
    whole = standard_noise(whole_slot(shape, number=2, start=start), draw)
    for low, high in pairwise([0, *cuts, 1500]):
        part = shard_slot(shape, (low, 0), (high - low, 103), number=2, start=start)
        assert torch.equal(standard_noise(part, draw), whole[low:high])


@families
def test_table_is_standardised(family):
    entries = table(family, CPU, noise.TABLE_SIZE).double()
    assert abs(entries.mean()) < 1e-8
    assert abs(entries.std(correction=0) / noise.FAMILIES[family].std - 1) < 1e-7
    level = (torch.arange(len(entries)).double() + 0.5) / len(entries)
    assert (torch.from_numpy(CDF[family](entries.sort().values.numpy())) - level).abs().max() < 1e-5


@pytest.fixture
def small_table(monkeypatch):
    """A table of numbered entries, small enough to see every one."""
    monkeypatch.setattr(noise, "TABLE_SIZE", 100)
    monkeypatch.setattr(noise, "table", lambda noise, device, size: torch.arange(float(size)))


def read(sizes, number, seed=0):
    """Which entries parameters of these sizes read in one draw."""
    found, start = [], 0
    for index, size in enumerate(sizes):
        slot = whole_slot((size,), number=index, start=start)
        found.append(standard_noise(slot, Draw(number, seed=seed)))
        start += size
    return found


def test_no_two_weights_share_an_entry(small_table):
    for number in range(1, 200):
        entries = torch.cat(read([30, 1, 45, 24], number))
        assert len(entries.unique()) == 100


def test_offsets_are_uniform_and_wrap_around(small_table):
    first = torch.tensor([read([3], n)[0].tolist() for n in range(1, 20_001)])
    assert (first.diff(dim=1) % 100 == 1).all()
    assert (first[:, 2] < first[:, 0]).any()
    counts = torch.bincount(first[:, 0].long(), minlength=100)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_a_model_larger_than_the_table_goes_round_with_new_offsets(small_table):
    laps = [read([250, 50], n) for n in range(1, 2001)]
    for big, small in laps:
        every = torch.cat([big, small]).view(3, 100)
        assert all(len(lap.unique()) == 100 for lap in every)
    shift = torch.stack([(big[0] - big[100]) % 100 for big, _ in laps])
    assert len(shift.unique()) > 90  # which weights share an entry changes with every draw


def test_laps_do_not_correlate_over_draws(monkeypatch):
    monkeypatch.setattr(noise, "TABLE_SIZE", 1 << 10)
    z = torch.stack([draws([n], size=2048)[0] for n in range(1, 3001)])
    pairs = (z[:, :1024:50].T @ z[:, 1024::50]) / len(z)
    assert pairs.abs().max() < 5 / math.sqrt(len(z))


def test_standard_deviation_and_b():
    assert std_from_b("gaussian", 0.5) == 0.5
    assert std_from_b("laplace", 0.5) == pytest.approx(0.5 * math.sqrt(2))
    assert std_from_b("uniform", 0.5) == pytest.approx(0.5 / math.sqrt(3))
    for family in noise.FAMILIES:
        assert std_from_b(family, b_from_std(family, 0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "0.1", None, True, 1j])
def test_bad_scale_gets_a_sentence(value):
    with pytest.raises(ValueError, match="b must be a finite number >= 0, got"):
        std_from_b("gaussian", value)


def test_unknown_family_gets_a_sentence():
    with pytest.raises(ValueError, match="noise must be one of gaussian, laplace, uniform"):
        std_from_b("cauchy", 1.0)
