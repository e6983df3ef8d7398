"""Equal and nearly equal examples: which are found, and which are left alone."""

import numpy as np
import pytest
import torch

from neuvar.cleaning import duplicates, find_duplicates, judge_labels
from neuvar.data import mnist_excerpt


def points(n=600, columns=12, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, columns)).astype(np.float32), rng.integers(3, size=n)


def as_lists(found):
    return [group.tolist() for group in found.groups]


def test_neighbours_are_those_of_all_distances(monkeypatch):
    monkeypatch.setattr(duplicates, "ROWS", 70)
    monkeypatch.setattr(duplicates, "COLUMNS", 110)  # blocks that do not fit
    x, _ = points(300)
    kept = np.setdiff1d(np.arange(300), [5, 17, 299])
    exact = x[kept].astype(np.float64)
    expected = np.linalg.norm(exact[:, None] - exact, axis=2)
    np.fill_diagonal(expected, np.inf)
    distances, neighbours = duplicates.nearest(torch.from_numpy(x), kept, 10)
    assert distances == pytest.approx(np.sort(expected, 1)[:, :10], rel=1e-12)
    assert np.array_equal(neighbours, np.argsort(expected, 1)[:, :10])


def test_planted_duplicates():
    x, y = points()
    x[100], y[100] = x[3] + 0.01, (y[3] + 1) % 3
    x[200], y[200] = x[4] + 0.01, y[4]
    x[300] = x[400] = x[5]
    y[[300, 400, 5]] = 0, 1, 0
    found = find_duplicates((x, y))
    assert as_lists(found) == [[3, 100], [4, 200], [5, 300, 400]]
    assert [group.tolist() for group in found.conflicts] == [[3, 100], [5, 300, 400]]
    assert found.conflicting.tolist() == [3, 5, 100, 300, 400]
    assert str(found) == (
        "7 of 600 examples are in 3 groups of duplicates; the labels of 2 groups differ"
    )


@pytest.mark.parametrize("columns", [1, 2, 5, 30])
def test_false_alarms_are_as_many_as_promised(columns):
    """30 sets with 5 expected false alarms each, in any dimension; two examples make a pair."""
    counts = [
        sum(map(len, find_duplicates(points(200, columns, seed), false_alarms=5).groups))
        for seed in range(30)
    ]
    assert 0.2 < np.mean(counts) / 5 < 4


def test_random_data_have_none():
    assert all(not find_duplicates(points(seed=seed)).groups for seed in range(10))


def test_many_equal_examples_are_one_group():
    x, y = points(100)
    x[20:80] = x[0]
    found = find_duplicates((x, y))
    assert as_lists(found) == [[0, *range(20, 80)]]
    assert find_duplicates((np.ones((30, 2)), y[:30])).groups[0].tolist() == list(range(30))


def test_few_examples():
    x = [[0.0, 0.0], [0.0, 0.0], [1.0, 3.0]]
    assert as_lists(find_duplicates((x, [0, 1, 1]))) == [[0, 1]]
    assert find_duplicates((x[1:], [0, 1])).groups == ()
    assert find_duplicates((x[1:], [0, 1])).conflicting.tolist() == []


def test_a_shift_and_a_scale_of_the_data_change_nothing():
    x, y = points()
    x[100] = x[3] + 0.01
    for other in (x + 1000, x * 1e-6, x * 1e6):
        assert as_lists(find_duplicates((other, y))) == [[3, 100]]


def test_digits_with_a_little_noise_and_another_label():
    train = mnist_excerpt().train
    x, y = train.images[:1500].numpy().reshape(-1, 28, 28), train.labels[:1500].numpy()
    rng = np.random.default_rng(0)
    copies = np.clip(x[:40] + rng.normal(0, 8, x[:40].shape), 0, 255).astype(np.uint8)
    found = find_duplicates((np.concatenate([x, copies]), np.concatenate([y, (y[:40] + 1) % 10])))
    planted = {(i, 1500 + i) for i in range(40)}
    assert planted >= {tuple(group) for group in as_lists(found)}
    assert len(found.conflicts) >= 38


def test_what_is_refused():
    x, y = points(50)
    with pytest.raises(ValueError, match="same length, got 50 and 49"):
        find_duplicates((x, y[:-1]))
    for value in (0, -1, np.nan, "many"):
        with pytest.raises(ValueError, match="false_alarms"):
            find_duplicates((x, y), false_alarms=value)


def test_uncertainty_is_the_normalized_entropy():
    issues = judge_labels([[0.5, 0.5, 0], [1, 0, 0], [1 / 3] * 3, [0, 0, 1]], [0, 0, 1, 2])
    expected = [np.log(2) / np.log(3), 0, 1, 0]
    assert issues.uncertainty == pytest.approx(expected, abs=1e-12)
