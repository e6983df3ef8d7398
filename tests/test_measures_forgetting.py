"""Forgetting against matrices worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from neuvar.measures.task_accuracy import Average, delta_ab, forgetting_summary

NAN = math.nan
MATRIX = [
    [0.90, NAN, NAN, NAN],
    [0.80, 0.70, NAN, NAN],
    [0.95, 0.60, 0.80, NAN],
    [0.50, 0.65, 0.85, 0.99],
]
SECOND = [
    [1.0, NAN, NAN, NAN],
    [0.9, 0.9, NAN, NAN],
    [0.8, 0.8, 0.8, NAN],
    [0.7, 0.7, 0.7, 0.7],
]


def means(averages):
    return [a.mean for a in averages]


def test_one_trial_by_hand():
    found = forgetting_summary(MATRIX)
    assert found.average_accuracy.mean == pytest.approx((0.50 + 0.65 + 0.85 + 0.99) / 4)
    assert found.backward_transfer.mean == pytest.approx((-0.40 - 0.05 + 0.05) / 3)
    # The first task was best after the third, and the third never forgotten.
    assert found.forgetting.mean == pytest.approx((0.45 + 0.05 - 0.05) / 3)
    assert found.first_task.mean == 0.50
    assert means(found.first_task_curve) == [0.90, 0.80, 0.95, 0.50]
    seen = [0.90, 0.75, (0.95 + 0.60 + 0.80) / 3, found.average_accuracy.mean]
    assert means(found.seen_tasks_curve) == pytest.approx(seen)
    assert found.forward_transfer is None


def test_one_trial_has_no_error():
    found = forgetting_summary(MATRIX).forgetting
    assert found.n == 1
    assert math.isnan(found.std)
    assert math.isnan(found.stderr)


def test_two_trials_by_hand():
    found = forgetting_summary([MATRIX, SECOND])
    for name, first, second in (
        ("average_accuracy", 0.7475, 0.7),
        ("backward_transfer", -0.4 / 3, -0.2),
        ("forgetting", 0.15, 0.2),
        ("first_task", 0.5, 0.7),
    ):
        average = getattr(found, name)
        assert average.n == 2
        assert average.mean == pytest.approx((first + second) / 2)
        assert average.std == pytest.approx(abs(first - second) / math.sqrt(2))
        assert average.stderr == pytest.approx(abs(first - second) / 2)
    assert found.first_task_curve[-1] == found.first_task
    assert found.seen_tasks_curve[-1] == found.average_accuracy
    assert means(found.first_task_curve) == pytest.approx([0.95, 0.85, 0.875, 0.6])
    assert found.first_task_curve[1].stderr == pytest.approx(0.05)


def test_trials_of_shape_one_are_one_trial():
    one, other = forgetting_summary([MATRIX]), forgetting_summary(MATRIX)
    assert one.forgetting.mean == other.forgetting.mean
    assert one.forgetting.n == 1


def test_nothing_forgotten():
    found = forgetting_summary(np.full((3, 5, 5), 0.8))
    assert found.backward_transfer == found.forgetting == Average(0, 0, 0, 3)
    assert found.average_accuracy.mean == pytest.approx(0.8)


def test_everything_forgotten():
    found = forgetting_summary(np.eye(4))
    assert found.backward_transfer.mean == -1
    assert found.forgetting.mean == 1
    assert found.average_accuracy.mean == 0.25


def test_two_tasks_forget_what_is_not_transferred():
    found = forgetting_summary([[0.9, NAN], [0.6, 0.8]])
    assert found.backward_transfer.mean == pytest.approx(-0.3)
    assert found.forgetting.mean == pytest.approx(0.3)


def test_best_time_may_be_before_the_task_was_learned():
    """As in the definition, if such accuracies are given; else the best since then."""
    full = [[0.9, 0.95, 0.1], [0.8, 0.7, 0.1], [0.7, 0.6, 0.9]]
    assert forgetting_summary(full).forgetting.mean == pytest.approx((0.2 + 0.35) / 2)
    full[0][1] = NAN
    assert forgetting_summary(full).forgetting.mean == pytest.approx((0.2 + 0.1) / 2)


def test_forward_transfer_by_hand():
    full = [[0.9, 0.3, 0.1], [0.8, 0.7, 0.4], [0.7, 0.6, 0.9]]
    found = forgetting_summary([full, full], baseline=[NAN, 0.1, 0.25])
    assert found.forward_transfer.mean == pytest.approx(((0.3 - 0.1) + (0.4 - 0.25)) / 2)
    assert found.forward_transfer.stderr == 0
    full[0][2] = NAN  # not just above the diagonal
    again = forgetting_summary(full, baseline=torch.tensor([0.0, 0.1, 0.25]))
    assert again.forward_transfer.mean == pytest.approx(found.forward_transfer.mean)


@pytest.mark.parametrize("convert", [np.array, torch.tensor, lambda m: np.array(m).tolist()])
def test_accepts_arrays_and_tensors(convert):
    assert forgetting_summary(convert([MATRIX, SECOND])).forgetting.mean == pytest.approx(0.175)


def test_argument_is_not_changed():
    matrix = torch.tensor([MATRIX, SECOND])
    before = matrix.clone()
    forgetting_summary(matrix)
    assert torch.equal(matrix.nan_to_num(-1), before.nan_to_num(-1))


def test_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        forgetting_summary(MATRIX).forgetting = None


def change(i, j, value):
    matrix = np.array(MATRIX)
    matrix[i, j] = value
    return matrix


@pytest.mark.parametrize(
    ("accuracy", "sentence"),
    [
        (change(2, 1, NAN), "got nan for task 1 after task 2 in trial 0"),
        (change(3, 3, NAN), "got nan for task 3 after task 3 in trial 0"),
        (np.stack([change(0, 1, NAN), change(3, 0, NAN)]), "task 0 after task 3 in trial 1"),
        (change(1, 0, 1.01), "accuracy must be between 0 and 1, got 1.01"),
        (change(1, 0, 80.0), "accuracy must be between 0 and 1, got 80.0"),
        (change(0, 1, -0.1), "accuracy must be between 0 and 1, got -0.1"),
        (change(0, 1, math.inf), "accuracy must be between 0 and 1, got inf"),
        (np.ones((3, 2)), r"shape \(T, T\) or \(trials, T, T\) .* got \(3, 2\)"),
        (torch.ones(2, 3, 2), r"shape \(T, T\) or \(trials, T, T\) .* got \(2, 3, 2\)"),
        (np.ones((1, 1)), r"at least two tasks, got \(1, 1\)"),
        (np.ones((0, 3, 3)), r"got \(0, 3, 3\)"),
        (np.ones(4), r"got \(4,\)"),
        (0.5, r"got \(\)"),
        ([[0.1], [0.2, 0.3]], "accuracy must be .* numbers, got list"),
        (None, "accuracy must be .* numbers, got NoneType"),
        ("no", "accuracy must be .* numbers, got str"),
    ],
)
def test_forgetting_refuses(accuracy, sentence):
    with pytest.raises(ValueError, match=sentence):
        forgetting_summary(accuracy)


@pytest.mark.parametrize(
    ("baseline", "sentence"),
    [
        ([0.1, 0.1], r"baseline must have shape \(3,\), .* got \[0.1, 0.1\]"),
        (0.1, r"baseline must have shape \(3,\), .* got 0.1"),
        ([0.1, NAN, 0.1], r"without nan, got \[0.1, nan, 0.1\]"),
        ([0.1, 10.0, 0.1], "baseline must be between 0 and 1, got 10.0"),
    ],
)
def test_forward_transfer_refuses(baseline, sentence):
    with pytest.raises(ValueError, match=sentence):
        forgetting_summary(np.full((3, 3), 0.5), baseline=baseline)


def test_forward_transfer_needs_what_is_above_the_diagonal():
    with pytest.raises(ValueError, match="got nan just above the diagonal"):
        forgetting_summary(MATRIX, baseline=[0.1] * 4)


# --- delta_ab ---


def test_delta_of_two_losses():
    found = delta_ab(before=0.2, after=1.0)
    assert found.mean == pytest.approx(0.8)
    assert found.n == 1
    assert math.isnan(found.std)
    assert math.isnan(found.stderr)
    assert delta_ab(1.0, 0.2).mean == pytest.approx(-0.8)
    assert delta_ab(torch.tensor(0.25), np.float32(0.5)).mean == 0.25


def test_delta_of_examples_is_paired():
    generator = torch.Generator().manual_seed(0)
    before = torch.rand(500, generator=generator, requires_grad=True)
    after = before + 0.1 + 0.01 * torch.randn(500, generator=generator)
    found = delta_ab(before, after)
    t = stats.ttest_rel(after.detach().double(), before.detach().double())
    assert found.n == 500
    assert found.mean / found.stderr == pytest.approx(t.statistic)
    assert found.stderr == pytest.approx(found.std / math.sqrt(500))
    # Unpaired, the spread of the losses themselves would drown it.
    assert found.stderr < 0.001


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ([0.1, 0.2], [0.1], r"same examples, got shapes \(2,\) and \(1,\)"),
        (0.1, [0.1], r"same examples, got shapes \(\) and \(1,\)"),
        (NAN, 0.1, "before must be finite, got nan"),
        ([0.1, 0.2], [0.1, math.inf], "after must be finite, got inf"),
        ([[0.1]], [[0.2]], r"before must be one loss or one per example, got shape"),
        ([], [], r"before must be one loss .* got shape \(0,\)"),
        ("a", 0.1, "before must be .* numbers, got str"),
    ],
)
def test_delta_refuses(before, after, sentence):
    with pytest.raises(ValueError, match=sentence):
        delta_ab(before, after)
