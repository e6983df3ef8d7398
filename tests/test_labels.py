"""Label noise: its counts to the label, its seeds, its book-keeping."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from neuvar import labels
from neuvar.labels import noisy_labels as transitions
from neuvar.labels.kinds import _flip_probabilities

BALANCED = torch.arange(1000) % 10
"""100 labels of each of ten classes."""

TEN = {"classes": 10, "seed": 0}


def matrix_of(sizes, transition):
    return np.asarray(sizes)[:, None] * np.asarray(transition)


def off_diagonal(matrix):
    return np.asarray(matrix) * (1 - np.eye(len(matrix), dtype=np.int64))


def labels_of(sizes, seed=0):
    """Labels with so many of each class, in random order."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.Generator(np.random.PCG64(seed)).permutation(y)


# Closed forms.


def test_pair_goes_to_the_next_class():
    result = labels.pair(BALANCED, 0.4, classes=10, seed=0)
    assert torch.equal(
        result.counts, 60 * torch.eye(10).long() + 40 * torch.eye(10).long().roll(1, 1)
    )
    assert result.rate == 0.4
    wrong = result.mask
    assert torch.equal(result.noisy[wrong], (result.clean[wrong] + 1) % 10)


def test_symmetric_goes_to_every_other_class_alike():
    result = labels.symmetric(BALANCED, 0.45, classes=10, seed=0)
    assert torch.equal(result.counts, 50 * torch.eye(10).long() + 5)
    assert result.rate == 0.45


def test_symmetric_including_self_is_wrong_less_often():
    result = labels.symmetric_including_self(BALANCED, 0.5, classes=10, seed=0)
    assert torch.equal(result.counts, 50 * torch.eye(10).long() + 5)
    assert result.rate == 0.45  # rate · (K - 1) / K


def test_semantic_flips_five_classes_once():
    """Cats that became dogs stay dogs."""
    result = labels.semantic(BALANCED, 0.3, seed=0)
    numbers = {
        "airplane": 0,
        "automobile": 1,
        "bird": 2,
        "cat": 3,
        "deer": 4,
        "dog": 5,
        "horse": 7,
        "truck": 9,
    }
    confused = {
        "truck": "automobile",
        "bird": "airplane",
        "deer": "horse",
        "cat": "dog",
        "dog": "cat",
    }
    expected = 100 * torch.eye(10).long()
    for one, other in confused.items():
        i, j = numbers[one], numbers[other]
        expected[i, i], expected[i, j] = 70, 30
    assert torch.equal(result.counts, expected)
    assert result.rate == 0.15


def test_superclass_goes_round_its_superclass():
    coarse = [4, 1, 14, 8, 0, 4, 1, 14, 8, 0, 4, 1, 14, 8, 0]
    result = labels.superclass(torch.arange(150) % 15, 0.2, coarse=coarse, seed=0)
    ahead = torch.arange(15).add(5) % 15  # here relatives stand five apart
    expected = 8 * torch.eye(15).long()
    expected[torch.arange(15), ahead] = 2
    assert torch.equal(result.counts, expected)


def test_superclass_stays_inside_it():
    coarse = torch.from_numpy(labels_of([5] * 20))
    result = labels.superclass(torch.arange(5000) % 100, 0.3, coarse=coarse, seed=0)
    assert torch.equal(coarse[result.noisy], coarse[result.clean])
    assert result.rate == 0.3
    assert (off_diagonal(result.counts) > 0).sum(0).tolist() == [1] * 100  # each is the next of one


def test_flip_takes_any_matrix():
    transition = torch.tensor([[0.5, 0.25, 0.25], [0, 1, 0], [1, 0, 0]])
    result = labels.flip(labels_of([8, 3, 4]), transition, seed=0)
    assert result.counts.tolist() == [[4, 2, 2], [0, 3, 0], [4, 0, 0]]
    assert result.matrix.tolist() == transition.tolist()


def test_largest_remainder():
    """Hamilton's method on its textbook example: 10 seats for 100 votes."""
    votes = np.array([47, 16, 15, 12, 6, 4]) * transitions.UNIT // 10
    assert transitions.apportion(votes, 10, np.arange(6)).tolist() == [5, 2, 1, 1, 1, 0]


def test_ties_go_to_who_is_behind_and_then_to_chance():
    half = np.full(4, transitions.UNIT // 2)
    assert transitions.apportion(half, 2, np.array([3, 0, 2, 1])).tolist() == [0, 1, 0, 1]
    behind = np.array([0, 0, 5, 9])
    assert transitions.apportion(half, 2, np.array([3, 0, 2, 1]), behind).tolist() == [0, 0, 1, 1]


# Exact counts, for whatever sizes and rates.

SIZES = st.lists(st.integers(0, 60), min_size=2, max_size=12).filter(any)
RATES = st.floats(0, 1, exclude_max=True)
SEEDS = st.integers(0, 2**32 - 1)


def check_exact(result, transition):
    """All counts are their expectations, rounded: in total, by class, from class to class."""
    counts = result.counts.numpy()
    expected = matrix_of(counts.sum(1), transition)
    wrong, share = off_diagonal(counts), off_diagonal(expected)
    assert abs(wrong.sum() - share.sum()) <= 0.5 + 1e-6
    assert np.abs(wrong.sum(1) - share.sum(1)).max() < 1 + 1e-6
    assert np.abs(counts - expected).max() < 1 + 1e-6
    assert (wrong[share < 1e-10] == 0).all()
    assert result.rate == wrong.sum() / len(result)


@settings(deadline=None, max_examples=150)
@given(sizes=SIZES, rate=RATES, seed=SEEDS)
def test_realized_rates_are_exact_to_one_label(sizes, rate, seed):
    k, y = len(sizes), labels_of(sizes)
    eye = np.eye(k)
    check_exact(
        labels.pair(y, rate, classes=k, seed=seed), (1 - rate) * eye + rate * np.roll(eye, 1, 1)
    )
    others = (1 - eye) / (k - 1)
    check_exact(labels.symmetric(y, rate, classes=k, seed=seed), (1 - rate) * eye + rate * others)
    check_exact(
        labels.symmetric_including_self(y, rate, classes=k, seed=seed), (1 - rate) * eye + rate / k
    )


@settings(deadline=None, max_examples=150)
@given(sizes=SIZES, seed=SEEDS, data=st.data())
def test_any_matrix_is_exact_to_one_label(sizes, seed, data):
    k = len(sizes)
    row = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7]), min_size=k, max_size=k).filter(any)
    raw = np.array(data.draw(st.lists(row, min_size=k, max_size=k)), dtype=np.float64)
    transition = raw / raw.sum(1, keepdims=True)
    check_exact(labels.flip(labels_of(sizes), transition, seed=seed), transition)


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
def test_symmetric_favours_no_target(rate):
    """With 100 classes nearly every cell is a tie; class 0 must not win them all."""
    result = labels.symmetric(torch.arange(50000) % 100, rate, classes=100, seed=0)
    assert result.rate == rate
    assert np.abs(off_diagonal(result.counts).sum(0) - 500 * rate).max() <= 1


@pytest.mark.parametrize("count", [1, 2, 7, 10, 333, 50000])
@pytest.mark.parametrize("rate", [0.0, 0.07, 0.29, 0.3, 0.57, 0.999])
def test_products_that_floating_point_misses(count, rate):
    """0.29 · 100 is 28.999999999999996, which is 29 labels."""
    y = torch.arange(count) % 10
    result = labels.pair(y, rate, classes=10, seed=0)
    assert int(result.mask.sum()) == int(np.floor(round(rate * count, 6) + 0.5))


def test_rate_zero_changes_nothing():
    for exact in (True, False):
        options = {"seed": 0, "exact": exact}
        x = torch.ones(1000, 2)
        for result in (
            labels.pair(BALANCED, 0, classes=10, **options),
            labels.symmetric(BALANCED, 0.0, classes=10, **options),
            labels.semantic(BALANCED, 0.0, **options),
            labels.instance(BALANCED, 0.0, features=x, classes=10, **options),
        ):
            assert torch.equal(result.noisy, BALANCED)
            assert result.rate == 0


def test_low_rates_are_part_of_higher_ones():
    masks = [labels.pair(BALANCED, r, classes=10, seed=3).mask for r in (0.1, 0.2, 0.3, 0.4)]
    for low, high in pairwise(masks):
        assert (high | ~low).all()


def test_every_label_has_the_same_chance():
    """Over seeds, each of 50 labels is flipped with probability 0.3: binomial counts."""
    y, seeds = torch.arange(50) % 5, 2000
    times = sum(labels.pair(y, 0.3, classes=5, seed=s).mask.double() for s in range(seeds))
    error = (times / seeds - 0.3) / np.sqrt(0.3 * 0.7 / seeds)
    assert error.abs().max() < 4.5
    # Exact counts correlate labels of a class a little: 3 of 10, so the sum of squares is 9/10.
    assert abs(error.square().mean() - 1) < 0.8


# Independent flips.


def test_independent_flips_have_the_expected_matrix():
    transition = np.array([[0.7, 0.2, 0.1, 0], [0, 0.5, 0, 0.5], [0.25] * 4, [0, 0, 0, 1]])
    result = labels.flip(torch.arange(40000) % 4, transition, seed=1, exact=False)
    error = (result.matrix.numpy() - transition) / np.sqrt(
        transition * (1 - transition) / 1e4 + 1e-30
    )
    assert np.abs(error).max() < 4.5
    assert result.counts[transition == 0].tolist() == [0] * int((transition == 0).sum())
    assert result.provenance["exact"] is False


def test_independent_flips_scatter_as_a_binomial():
    rates = [
        labels.symmetric(BALANCED, 0.3, classes=10, seed=s, exact=False).rate for s in range(400)
    ]
    assert abs(np.mean(rates) - 0.3) < 4.5 * np.sqrt(0.3 * 0.7 / 1000 / 400)
    ratio = np.var(rates) / (0.3 * 0.7 / 1000)
    assert abs(ratio - 1) < 4.5 * np.sqrt(2 / 400)


# Seeds.

GOLDEN = {
    "pair": "a769b66dded83ff9",
    "pair, seed 1": "fa8f883c7ff4fb77",
    "pair, independent": "0f72907541bc388e",
    "symmetric": "f4599ad99a602c20",
    "including self": "2cd4a8db40e35efd",
    "semantic": "2841dfb4eefcea43",
    "superclass": "94d617ab3bf0517a",
    "matrix": "4559ad55bd23687b",
    "matrix, independent": "a200bb767b35eb4f",
    "instance": "41fd0bc0cf956be2",
    "instance, independent": "2ad620790020f850",
}


def golden_cases():
    """One case of each kind, on uneven classes and on features that are exact in float64."""
    y = (np.arange(3000) ** 2 // 7) % 10
    x = ((np.arange(3000 * 4) * 37 % 101) - 50).reshape(3000, 2, 2) / 64
    coarse = [0, 1, 2, 3, 4] * 2
    transition = np.eye(10) * 0.5 + 0.05
    return {
        "pair": labels.pair(y, 0.4, classes=10, seed=0),
        "pair, seed 1": labels.pair(y, 0.4, classes=10, seed=1),
        "pair, independent": labels.pair(y, 0.4, classes=10, seed=0, exact=False),
        "symmetric": labels.symmetric(y, 0.37, classes=10, seed=0),
        "including self": labels.symmetric_including_self(y, 0.37, classes=10, seed=0),
        "semantic": labels.semantic(y, 0.2, seed=2**32 - 1),
        "superclass": labels.superclass(y, 0.2, coarse=coarse, seed=5),
        "matrix": labels.flip(y, transition, seed=0),
        "matrix, independent": labels.flip(y, transition, seed=0, exact=False),
        "instance": labels.instance(y, 0.3, features=x, **TEN),
        "instance, independent": labels.instance(y, 0.3, features=x, **TEN, exact=False),
    }


def digest(tensor):
    return hashlib.sha256(tensor.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def test_the_same_seed_gives_the_same_labels_on_any_machine():
    digests = {name: digest(result.noisy) for name, result in golden_cases().items()}
    assert digests == GOLDEN


def test_raw_words_are_those_of_pcg64():
    """The generator written out: the labels depend on nothing else of NumPy."""
    key = hashlib.blake2b(b"labels/order/7", digest_size=16).digest()
    state = np.random.PCG64(int.from_bytes(key, "little")).state["state"]
    lcg, increment, result = state["state"], state["inc"], []
    for _ in range(5):
        lcg = (lcg * 0x2360ED051FC65DA44385DF649FCCF645 + increment) % 2**128
        word, turn = (lcg >> 64 ^ lcg) % 2**64, lcg >> 122
        result.append((word >> turn | word << (64 - turn)) % 2**64)
    assert transitions.random_words(7, "order", 5).tolist() == result


def test_different_seeds_differ():
    for make in (labels.pair, labels.symmetric):
        for exact in (True, False):
            result = [make(BALANCED, 0.4, classes=10, seed=s, exact=exact) for s in range(20)]
            assert len({digest(f.noisy) for f in result}) == 20
            assert len({f.hash for f in result}) == 20
    big = [labels.pair(BALANCED, 0.4, classes=10, seed=s) for s in (0, 2**16, 2**31, 2**32 - 1)]
    assert len({digest(f.noisy) for f in big}) == 4


def test_uniforms_are_uniform_and_inside():
    u = transitions.random_uniforms(0, "test", 20000)
    assert stats.kstest(u, "uniform").pvalue > 0.01
    assert u.min() > 0
    assert u.max() < 1


def test_global_generators_are_left_alone():
    torch.manual_seed(0)
    before, numpys = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    golden_cases()
    assert torch.equal(torch.get_rng_state(), before)
    after = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(numpys, after, strict=True))


# Labels that depend on the image.


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2, 0.333, 0.5, 0.9, 0.99])
def test_instance_rate_is_exact(rate):
    x = torch.randn(1000, 3, 2, generator=torch.Generator().manual_seed(0))
    result = labels.instance(BALANCED, rate, features=x, classes=10, seed=0)
    assert int(result.mask.sum()) == round(rate * 1000)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.93])
def test_instance_odds_average_to_the_rate(rate):
    """The truncated normal is symmetric about the rate: its mean is the rate, its reach [0, 1]."""
    q = _flip_probabilities(40000, rate, 0)
    assert q.min() >= 0
    assert q.max() <= 1
    assert abs(q.mean() - rate) < 4.5 * q.std() / 200
    reach = min(rate, 1 - rate) / 0.1
    law = stats.truncnorm(-reach, reach, loc=rate, scale=0.1)
    assert stats.kstest(q, law.cdf).pvalue > 0.01


def test_independent_instance_flips_have_the_rate():
    x = torch.randn(40000, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40000) % 4
    result = labels.instance(y, 0.05, features=x, classes=4, seed=0, exact=False)
    assert abs(result.rate - 0.05) < 4.5 * np.sqrt(0.05 * 0.95 / 40000)


@pytest.mark.parametrize("exact", [True, False])
def test_instance_flips_follow_their_flip_probabilities(exact):
    """Labels with higher odds are flipped more often, in proportion."""
    count, rate = 100_000, 0.3
    x, y = torch.ones(count, 1), torch.zeros(count, dtype=torch.int64)
    mask = labels.instance(y, rate, features=x, classes=2, seed=4, exact=exact).mask.numpy()
    q = _flip_probabilities(count, rate, 4)
    for low, high in [(0, 0.2), (0.2, 0.3), (0.3, 0.4), (0.4, 1)]:
        part = (q >= low) & (q < high)
        mean = q[part].mean()
        assert abs(mask[part].mean() - mean) < 4.5 * np.sqrt(mean * (1 - mean) / part.sum())


def test_instance_targets_are_the_softmax_of_a_linear_map():
    count, classes, true = 60_000, 5, 2
    x = np.array([0.5, -1.0, 0.25])
    y = np.full(count, true)
    result = labels.instance(
        y, 0.5, features=np.tile(x, (count, 1)), classes=classes, seed=3, exact=False
    )
    level = transitions.random_uniforms(3, f"map/{true}", 3 * classes).reshape(3, classes)
    scores = x @ stats.norm.ppf(level)
    p = np.exp(scores)
    p[true] = 0
    p /= p.sum()
    wrong = result.noisy[result.mask].numpy()
    seen = np.bincount(wrong, minlength=classes) / len(wrong)
    assert seen[true] == 0
    keep = p > 0
    assert (np.abs(seen - p)[keep] < 4.5 * np.sqrt(p * (1 - p) / len(wrong))[keep]).all()


def test_long_features_decide_the_wrong_class():
    """Equal images of a class get equal wrong labels; the map depends on the class."""
    generator = torch.Generator().manual_seed(0)
    kinds = 1000 * torch.randn(8, 6, generator=generator)
    which = torch.arange(8000) % 8
    y = torch.arange(8000) // 8 % 5
    result = labels.instance(y, 0.5, features=kinds[which], classes=5, seed=0)
    targets = set()
    for kind in range(8):
        for label in range(5):
            got = result.noisy[result.mask & (which == kind) & (y == label)].unique()
            assert len(got) == 1
            targets.add((label, int(got)))
    assert len(targets) > 8


def test_instance_flips_do_not_depend_on_the_type_of_features():
    x = torch.arange(4000).view(1000, 4) % 64
    forms = (x, x.double(), x.to(torch.uint8), x.to(torch.bfloat16), x.numpy(), x.view(1000, 2, 2))
    result = [labels.instance(BALANCED, 0.3, features=f, classes=10, seed=0) for f in forms]
    assert len({digest(f.noisy) for f in result}) == 1


# Book-keeping.


def test_result_is_consistent():
    y = labels_of([50, 0, 30, 20])
    result = labels.symmetric(y, 0.3, classes=4, seed=0)
    assert result.noisy.dtype == result.clean.dtype == result.counts.dtype == torch.int64
    assert torch.equal(result.mask, result.noisy != result.clean)
    assert result.rate == result.mask.double().mean().item()
    oracle = np.zeros((4, 4), dtype=int)
    np.add.at(oracle, (y, result.noisy.numpy()), 1)
    assert result.counts.tolist() == oracle.tolist()
    assert result.matrix.sum(1).tolist() == pytest.approx([1, 0, 1, 1])
    assert result.matrix[1].tolist() == [0] * 4
    assert len(result) == 100
    with pytest.raises(FrozenInstanceError):
        result.rate = 0.0


def test_forms_of_labels_are_all_alike():
    forms = [
        BALANCED, BALANCED.to(torch.int32), BALANCED.to(torch.uint8), BALANCED.numpy(),
        BALANCED.numpy().astype(np.uint16), BALANCED.tolist(), tuple(BALANCED.tolist()),
        BALANCED.repeat_interleave(2)[::2],
    ]  # fmt: skip
    assert len({labels.pair(form, 0.3, classes=10, seed=0).hash for form in forms}) == 1


def test_input_is_neither_changed_nor_shared():
    y = BALANCED.clone()
    result = labels.pair(y, 0.4, classes=10, seed=0)
    assert torch.equal(y, BALANCED)
    y.zero_()
    assert torch.equal(result.clean, BALANCED)
    given_ = BALANCED.clone()
    kept = labels.from_array(given_, classes=10)
    given_.zero_()
    assert torch.equal(kept.noisy, BALANCED)


def test_provenance_is_plain_and_hashed():
    result = labels.pair(BALANCED, 0.4, classes=10, seed=5)
    facts = result.provenance
    assert json.loads(json.dumps(facts)) == facts
    text = json.dumps(facts, sort_keys=True).encode()
    assert result.hash == hashlib.sha256(text).hexdigest()
    assert (facts["kind"], facts["rate"], facts["seed"], facts["exact"]) == ("pair", 0.4, 5, True)
    assert (facts["classes"], facts["count"]) == (10, 1000)


def test_hash_tells_apart():
    x = torch.ones(1000, 2)
    other = BALANCED.flip(0)
    results = [
        labels.pair(BALANCED, 0.4, classes=10, seed=0),
        labels.pair(BALANCED, 0.4, classes=10, seed=0, exact=False),
        labels.pair(BALANCED, 0.4, classes=10, seed=1),
        labels.pair(BALANCED, 0.4, classes=11, seed=0),
        labels.pair(BALANCED, 0.4001, classes=10, seed=0),  # the same labels, another wish
        labels.pair(other, 0.4, classes=10, seed=0),
        labels.symmetric(BALANCED, 0.4, classes=10, seed=0),
        labels.superclass(BALANCED, 0.4, coarse=[0] * 10, seed=0),
        labels.instance(BALANCED, 0.4, features=x, classes=10, seed=0),
        labels.instance(BALANCED, 0.0, features=x, classes=10, seed=0),
        labels.instance(BALANCED, 0.0, features=2 * x, classes=10, seed=0),
        labels.from_array(BALANCED, classes=10),
        labels.from_array(BALANCED, classes=10, clean=BALANCED),
        labels.from_array(BALANCED, classes=10, source="worker 7"),
    ]
    assert len({result.hash for result in results}) == len(results)
    # With one superclass, the next of it is the next of all: the same labels, made otherwise.
    assert torch.equal(results[7].noisy, results[0].noisy)


def test_corrupt_calls_the_kind_by_its_name():
    x = torch.arange(2000).view(1000, 2)
    needs = {
        "pair": {"classes": 10},
        "symmetric": {"classes": 10},
        "symmetric_including_self": {"classes": 10},
        "semantic": {},
        "superclass": {"coarse": [0, 1] * 5},
        "instance": {"classes": 10, "features": x},
    }
    for kind, options in needs.items():
        for exact in (True, False):
            result = labels.corrupt(kind, BALANCED, 0.3, seed=2, exact=exact, **options)
            direct = getattr(labels, kind)(BALANCED, 0.3, seed=2, exact=exact, **options)
            assert result.hash == direct.hash
            assert result.provenance["kind"] == kind


# Labels that others made.

NOISY, CLEAN = [0, 2, 1, 2, 0], [0, 1, 1, 2, 2]


def write(path):
    columns = {"clean_label": np.array(CLEAN), "worse_label": np.array(NOISY)}
    if path.suffix == ".npy":
        np.save(path, np.array(NOISY, dtype=np.uint8))
    elif path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".pt":
        torch.save({**columns, "as_tensor": torch.tensor(NOISY)}, path)
    elif path.suffix == ".csv":
        rows = [f"{c},{n},w{c}" for c, n in zip(CLEAN, NOISY, strict=True)]
        path.write_text("\n".join(["clean_label,worse_label,worker", *rows]) + "\n")
    else:
        path.write_text("0 2 1\n2 0\n")
    return path


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a.npy", None), ("a.npz", "worse_label"), ("a.pt", "worse_label"), ("a.pt", "as_tensor"),
        ("a.csv", "worse_label"), ("a.txt", None),
    ],
)  # fmt: skip
def test_from_file_reads_every_format(tmp_path, name, key):
    path = write(tmp_path / name)
    result = labels.from_file(path, key=key, classes=3, clean=CLEAN)
    assert result.noisy.tolist() == NOISY
    assert result.mask.tolist() == [False, True, False, False, True]
    assert result.rate == 0.4
    assert result.provenance["source"] == (name if key is None else f"{name}:{key}")
    unknown = labels.from_file(str(path), key=key, classes=3, count=5)
    assert unknown.noisy.tolist() == NOISY
    nothing = (unknown.clean, unknown.mask, unknown.counts, unknown.matrix, unknown.rate)
    assert nothing == (None,) * 5
    assert unknown.hash != result.hash


def test_from_file_takes_tables_without_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0\n2\n1\n")
    assert labels.from_file(path, classes=3, count=3).noisy.tolist() == [0, 2, 1]
    path.write_text("5,0\n6,2\n7,1\n")
    assert labels.from_file(path, key="1", classes=3, count=3).noisy.tolist() == [0, 2, 1]
    path.write_text("label\n0\n2\n")
    assert labels.from_file(path, classes=3, count=2).noisy.tolist() == [0, 2]


def test_from_file_reads_arrays_of_older_numpy(tmp_path):
    """As the published human annotations of CIFAR are: pickled by NumPy 1."""
    path = tmp_path / "CIFAR-10_human.pt"
    torch.save({"worse_label": np.array(NOISY)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"cnumpy.core.multiarray\n" in data
    path.write_bytes(data)
    before = torch.serialization.get_safe_globals()
    result = labels.from_file(path, key="worse_label", classes=3, count=5)
    assert result.noisy.tolist() == NOISY
    assert set(torch.serialization.get_safe_globals()) == set(before)


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_nothing_in_a_file_is_executed(tmp_path, suffix):
    path, mark = tmp_path / f"a{suffix}", tmp_path / "mark"
    if suffix == ".pt":
        torch.save({"a": Touch(mark)}, path)
    else:
        np.save(path, np.array([Touch(mark)], dtype=object))
    with pytest.raises(
        ValueError, match=f"a{suffix} (has objects other than arrays|is not a valid)"
    ):
        labels.from_file(path, key="a" if suffix == ".pt" else None, classes=3, count=1)
    assert not mark.exists()
    path.write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(
        ValueError, match=f"a{suffix} (has objects other than arrays|is not a valid)"
    ):
        labels.from_file(path, classes=3, count=2)


def test_from_file_refuses_what_does_not_fit(tmp_path):
    path = write(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"key must be one of clean_label, worse_label, got None"):
        labels.from_file(path, classes=3, count=5)
    with pytest.raises(ValueError, match=r"key must be one of .*, got 'better'"):
        labels.from_file(path, key="better", classes=3, count=5)
    with pytest.raises(ValueError, match=r"a.npz must have 6 labels, got 5"):
        labels.from_file(path, key="worse_label", classes=3, count=6)
    with pytest.raises(ValueError, match=r"a.npz must have 4 labels, got 5"):
        labels.from_file(path, key="worse_label", classes=3, clean=CLEAN[:4])
    with pytest.raises(ValueError, match=r"a.npz must be from 0 to 1 for 2 classes, got 2"):
        labels.from_file(path, key="worse_label", classes=2, count=5)
    with pytest.raises(ValueError, match="count or clean must be given"):
        labels.from_file(path, key="worse_label", classes=3)
    with pytest.raises(ValueError, match=r"path must end in .npy, .*, got 'a.pkl'"):
        labels.from_file(tmp_path / "a.pkl", classes=3, count=5)
    with pytest.raises(ValueError, match=r"path must be a file, got .*b.npy"):
        labels.from_file(tmp_path / "b.npy", classes=3, count=5)
    with pytest.raises(ValueError, match=r"key must be None, because a.txt has no names"):
        labels.from_file(write(tmp_path / "a.txt"), key="x", classes=3, count=5)
    for text, sentence in [("0 1 x", "'x'"), ("0.5", "0.5"), ("", r"must have the shape \(n,\)")]:
        (tmp_path / "b.txt").write_text(text)
        with pytest.raises(ValueError, match=sentence):
            labels.from_file(tmp_path / "b.txt", classes=3, count=3)
    for text in ("", "a,b\n1\n"):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(ValueError, match="its lines differ in length, or there are none"):
            labels.from_file(tmp_path / "b.csv", classes=3, count=3)
    np.save(tmp_path / "b.npy", np.zeros(5))
    with pytest.raises(ValueError, match=r"b.npy must be integers, got torch.float64"):
        labels.from_file(tmp_path / "b.npy", classes=3, count=5)


def test_from_file_reads_the_one_column_of_integers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("image,label\na.png,0\nb.png,2\n")
    assert labels.from_file(path, classes=3, count=2).noisy.tolist() == [0, 2]
    path.write_text("image,label\n7,0\n8,2\n")
    with pytest.raises(ValueError, match="key must be one of image, label, got None"):
        labels.from_file(path, classes=3, count=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("image,label\n1,2\n2,\n3,0\n", "integers in column 'label', got '' in row 3"),
        ("image,label\n1,2.0\n2,1.0\n", r"integers in column 'label', got '2\.0' in row 2"),
        ("image,label\n1,cat\n", "integers in column 'label', got 'cat' in row 2"),
        ("image,label\n", "a.csv is not a valid .csv file: its only line is a header"),
        ("label,label\n1,2\n", "a.csv is not a valid .csv file: it has two columns .* 'label'"),
        ("a" * 200_000 + ",label\n1,2\n", "a.csv is not a valid .csv file: field larger"),
    ],
)
def test_tables_with_bad_cells_get_a_sentence(tmp_path, text, sentence):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        labels.from_file(path, key="label", classes=3, count=3)


@pytest.mark.parametrize("shape", [(10**12,), (4,)])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_header_that_says_more_than_there_is(tmp_path, shape, suffix):
    header = io.BytesIO()
    facts = {"descr": "<i8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    content, path = header.getvalue() + bytes(24), tmp_path / f"a{suffix}"
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", content)
    else:
        path.write_bytes(content)
    says = 8 * shape[0]
    with pytest.raises(ValueError, match=f"a{suffix} .*says {says} bytes, but there are 24"):
        labels.from_file(path, classes=3, count=3)


@pytest.mark.parametrize("kind", ["a.npy", "a.npz", "packed.npz", "a.pt", "old.pt"])
def test_damaged_files_get_a_sentence_that_names_them(tmp_path, kind):
    """A few bytes changed or the end cut off, in a hundred ways."""
    path, values = tmp_path / kind, np.arange(300) % 3
    writers = {
        "a.npy": lambda: np.save(path, values),
        "a.npz": lambda: np.savez(path, a=values),
        "packed.npz": lambda: np.savez_compressed(path, a=values),
        "a.pt": lambda: torch.save({"a": torch.from_numpy(values)}, path),
        "old.pt": lambda: torch.save(
            torch.from_numpy(values), path, _use_new_zipfile_serialization=False
        ),
    }
    writers[kind]()
    whole, rng, sentences = path.read_bytes(), np.random.default_rng(0), []
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.integers(min(len(whole), 400))] = rng.integers(256)
        cut = len(whole) if rng.random() < 0.7 else int(rng.integers(len(whole)))
        path.write_bytes(bytes(damaged[:cut]))
        try:
            labels.from_file(path, classes=3, count=300)
        except ValueError as error:
            sentences.append(str(error))
    assert len(sentences) > 30
    assert all(sentence.startswith((kind, "key must")) for sentence in sentences)
    assert not any("\n" in sentence for sentence in sentences)


# Sentences.

X, Y = torch.ones(1000, 2), BALANCED


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: labels.pair(Y, 1.0, **TEN), "rate must be a finite number >= 0 and < 1, got 1.0"),
        (lambda: labels.pair(Y, -0.1, **TEN), "rate must .* got -0.1"),
        (lambda: labels.symmetric(Y, float("nan"), **TEN), "rate must .* got nan"),
        (lambda: labels.semantic(Y, "0.2", seed=0), "rate must .* got '0.2'"),
        (lambda: labels.semantic(Y, True, seed=0), "rate must .* got True"),
        (lambda: labels.pair(Y, None, **TEN), "rate must .* got None"),
        (
            lambda: labels.pair(Y, 0.2, classes=9, seed=0),
            "labels must be from 0 to 8 for 9 classes, got 9",
        ),
        (
            lambda: labels.pair([0, -1], 0.2, classes=9, seed=0),
            "labels must be from 0 to 8 .* got -1",
        ),
        (lambda: labels.pair(Y, 0.2, classes=1, seed=0), "classes must be .* from 2 .*, got 1"),
        (lambda: labels.pair(Y, 0.2, classes=10.0, seed=0), "classes must be an int.* got 10.0"),
        (lambda: labels.pair(Y, 0.2, classes=10, seed=0.5), "seed must be an int.* got 0.5"),
        (lambda: labels.pair(Y, 0.2, classes=10, seed=-1), "seed must be .* from 0 to .* got -1"),
        (lambda: labels.flip([0], [[1, 0], [0, 1]], seed=2**32), "seed must be .* to 4294967295"),
        (lambda: labels.pair(Y, 0.2, classes=10, seed=None), "seed must be an int.* got None"),
        (lambda: labels.pair([], 0.2, **TEN), "labels must have the shape"),
        (
            lambda: labels.pair([[0, 1]], 0.2, **TEN),
            r"labels must have the shape \(n,\) with n > 0, got \(1, 2\)",
        ),
        (lambda: labels.pair([0.0, 1.0], 0.2, **TEN), "labels must be integers, got torch.float64"),
        (lambda: labels.pair([True, False], 0.2, **TEN), "labels must be integers, got torch.bool"),
        (lambda: labels.pair(["cat"], 0.2, **TEN), "labels must be a list of integers, got .*cat"),
        (lambda: labels.pair([[0], [1, 2]], 0.2, **TEN), "labels must be a list of integers"),
        (lambda: labels.semantic(Y, 0.2, classes=100, seed=0), "classes must be 10 .* got 100"),
        (
            lambda: labels.superclass(Y, 0.2, coarse=[0] * 9 + [1], seed=0),
            "coarse must have at least two classes in each superclass, got only class 9 in 1",
        ),
        (lambda: labels.superclass(Y, 0.2, coarse=[0] * 4, seed=0), "labels must be from 0 to 3"),
        (lambda: labels.superclass(Y, 0.2, coarse=[0.5, 0.5], seed=0), "coarse must be integers"),
        (
            lambda: labels.flip([0], [[0.5, 0.4], [0, 1]], seed=0),
            "rows that sum to 1, got 0.9 in row 0",
        ),
        (lambda: labels.flip([0], [[1.5, -0.5], [0, 1]], seed=0), r"entries in \[0, 1\], got 1.5"),
        (
            lambda: labels.flip([0], [[float("nan"), 1], [0, 1]], seed=0),
            r"entries in \[0, 1\], got nan",
        ),
        (lambda: labels.flip([0], [[1, 0]], seed=0), r"matrix must be square, .* \(1, 2\)"),
        (lambda: labels.flip([0], [[1]], seed=0), "matrix must be square, 2×2 or larger"),
        (
            lambda: labels.flip([0], "diag", seed=0),
            "matrix must be a square of numbers, got 'diag'",
        ),
        (
            lambda: labels.flip([2], [[1, 0], [0, 1]], seed=0),
            "labels must be from 0 to 1 for 2 classes",
        ),
        (lambda: labels.instance(Y, 0.2, features=X[:9], **TEN), "one row for each of 1000 labels"),
        (
            lambda: labels.instance(Y, 0.2, features=X[:, 0], **TEN),
            "one row for each of 1000 labels",
        ),
        (lambda: labels.instance(Y, 0.2, features=X / 0, **TEN), "features must be finite"),
        (lambda: labels.instance(Y, 0.2, features="x", **TEN), "features must be numbers"),
        (lambda: labels.instance(Y, 1, features=X, **TEN), "rate must"),
        (
            lambda: labels.instance(Y, 0.2, features=X.double() * 1e308, **TEN),
            r"features must be small enough for finite scores in float64, got .* 1e\+308",
        ),
        (
            lambda: labels.pair(Y, 0.2, classes=10**7, seed=0),
            "classes must be .* to 10000, got 10000000",
        ),
        (
            lambda: labels.from_array([0], classes=10**7, clean=[0]),
            "classes must be .* to 10000, got 10000000",
        ),
        (
            lambda: labels.superclass(Y, 0.2, coarse=Y % 2, seed=0),
            "not for each label, got 1000 for labels from 0 to 9",
        ),
        (
            lambda: labels.superclass(Y, 0.2, coarse=[0] * 10**6, seed=0),
            "not for each label, got 1000000 for labels from 0 to 9",
        ),
        (
            lambda: labels.from_array([0, 3], classes=3),
            "noisy must be from 0 to 2 for 3 classes, got 3",
        ),
        (
            lambda: labels.from_array([0, 1], classes=3, clean=[0, 5]),
            "clean must be from 0 to 2 .* got 5",
        ),
        (lambda: labels.from_array([0, 1], classes=3, clean=[0]), "the same length, got 2 and 1"),
        (
            lambda: labels.corrupt("pairs", Y, 0.2, seed=0),
            "kind must be one of pair, .* got 'pairs'",
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_a_sentence(act, sentence):
    with pytest.raises(ValueError, match=sentence):
        act()


def test_noisy_labels_print_as_one_line():
    noisy = labels.pair([0, 1, 2, 0, 1, 2], 0.5, classes=3, seed=0)
    assert repr(noisy) == f"NoisyLabels(6 labels, 3 of them wrong, hash {noisy.hash[:8]})"
