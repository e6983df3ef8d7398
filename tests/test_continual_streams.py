import pickle

import numpy as np
import pytest
import torch

from neuvar.continual import permuted_tasks, rotated_tasks, split_tasks
from neuvar.continual.streams import rotate
from neuvar.data import Dataset, Split


def data(shape=(4, 6), classes=6, seed=0):
    """A data set of random images whose every pixel can be told from the others."""
    rng = np.random.default_rng(seed)
    train, test = (
        Split(
            torch.from_numpy(rng.integers(0, 256, (n, *shape), dtype=np.uint8)),
            torch.from_numpy(rng.permutation(np.arange(n) % classes)),
        )
        for n in (60, 24)
    )
    return Dataset("random", classes, train, test)


def equal(a, b):
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


class TestPermuted:
    def test_every_image_is_permuted_alike(self):
        source = data()
        stream = permuted_tasks(source, 3, seed=5)
        for k, task in enumerate(stream):
            order = self.order_of(stream, k)
            for result, given in ((task.train, source.train), (task.test, source.test)):
                assert torch.equal(result.labels, given.labels)
                assert result.images.shape == given.images.shape
                assert torch.equal(result.images.flatten(1), given.images.flatten(1)[:, order])

    @staticmethod
    def order_of(stream, number):
        """The permutation, from an image in which each pixel has a value of its own."""
        image = torch.arange(24, dtype=torch.uint8).view(1, 4, 6)
        probe = Split(image, torch.zeros(1, dtype=torch.int64))
        return stream[number]._view(probe).images.flatten().long()

    def test_all_tasks_differ_and_the_first_is_permuted_too(self):
        stream = permuted_tasks(data(), 5)
        orders = [tuple(self.order_of(stream, k).tolist()) for k in range(5)]
        assert len({*orders, tuple(range(24))}) == 6
        assert all(sorted(order) == list(range(24)) for order in orders)

    def test_permutations_depend_on_seed_and_number_alone(self):
        state = torch.get_rng_state()
        short, long, other = (
            permuted_tasks(data(), n, seed=s) for n, s in ((2, 1), (7, 1), (2, 2))
        )
        assert all(equal(short[k].train, long[k].train) for k in range(2))
        assert not equal(short[0].train, other[0].train)
        assert torch.equal(torch.get_rng_state(), state)

    def test_permutation_is_the_same_in_every_release(self):
        """Results of a stored run can be made again only if its tasks can."""
        stream = permuted_tasks(data(), 1, seed=0)
        assert self.order_of(stream, 0).tolist() == PINNED

    def test_channels_share_the_permutation(self):
        source = data((3, 4, 6))
        task = permuted_tasks(source, 1)[0]
        order = self.order_of(permuted_tasks(data(), 1), 0)
        assert torch.equal(task.test.images.flatten(2), source.test.images.flatten(2)[..., order])

    def test_describes_its_tasks(self):
        stream = permuted_tasks(data(), 3)
        assert (stream.name, len(stream), stream.outputs) == ("permuted-random", 3, (6,))
        assert [(t.number, t.head, t.classes) for t in stream] == [
            (k, 0, (0, 1, 2, 3, 4, 5)) for k in range(3)
        ]

    def test_source_is_neither_copied_nor_changed(self):
        source = data()
        before = source.train.images.clone()
        stream = permuted_tasks(source, 2)
        assert all(task._data is source for task in stream)
        stream[0].train.images.zero_()
        assert torch.equal(source.train.images, before)
        assert stream[0].train.images.any()

    @pytest.mark.parametrize("tasks", [0, -1, 2.5, True, None])
    def test_refuses_numbers_of_tasks(self, tasks):
        with pytest.raises(ValueError, match="tasks must be an integer >= 1, got"):
            permuted_tasks(data(), tasks)

    @pytest.mark.parametrize("seed", [-1, 0.5, "a"])
    def test_refuses_seeds(self, seed):
        with pytest.raises(ValueError, match=r"seed must be an integer from 0 .*, got"):
            permuted_tasks(data(), seed=seed)

    def test_no_two_seeds_share_a_permutation(self):
        """NumPy reads (5 + 3·2³², 0) as (5, 3, 0), so that seed's first task was 5's fourth."""
        with pytest.raises(ValueError, match="seed must be an integer from 0 to 4294967295, got"):
            permuted_tasks(data(), 1, seed=5 + 3 * 2**32)
        assert len(permuted_tasks(data(), 1, seed=2**32 - 1)) == 1


PINNED = [18, 4, 21, 10, 11, 2, 22, 6, 23, 3, 20, 8, 0, 16, 12, 19, 13, 7, 5, 17, 14, 9, 1, 15]


class TestSplit:
    def test_pairs_by_default_each_with_its_head(self):
        stream = split_tasks(data())
        assert [task.classes for task in stream] == [(0, 1), (2, 3), (4, 5)]
        assert [task.head for task in stream] == [0, 1, 2]
        assert stream.outputs == (2, 2, 2)

    def test_odd_class_out_is_a_task_alone(self):
        stream = split_tasks(data(classes=5))
        assert [task.classes for task in stream] == [(0, 1), (2, 3), (4,)]
        assert stream.outputs == (2, 2, 1)

    @pytest.mark.parametrize("scenario", ["task", "domain", "class"])
    def test_tasks_divide_the_data(self, scenario):
        source = data()
        seen = []
        for task in split_tasks(source, [[5, 0], [3], [1, 2, 4]], scenario=scenario):
            wanted = torch.tensor([int(y) in task.classes for y in source.train.labels])
            assert torch.equal(task.train.images, source.train.images[wanted])
            original = task.train.labels
            if scenario != "class":
                assert original.unique().tolist() == list(range(len(task.classes)))
                original = torch.tensor(task.classes)[original]
            assert torch.equal(original, source.train.labels[wanted])
            assert original.dtype == torch.int64
            seen.append(len(task.train))
        assert sum(seen) == len(source.train)

    def test_heads_and_outputs_by_scenario(self):
        groups = [[0, 1, 2], [3, 4]]
        result = {s: split_tasks(data(), groups, scenario=s) for s in ("task", "domain", "class")}
        assert {s: stream.outputs for s, stream in result.items()} == {
            "task": (3, 2),
            "domain": (3,),
            "class": (6,),
        }
        assert [t.head for t in result["domain"]] == [t.head for t in result["class"]] == [0, 0]

    @pytest.mark.parametrize(
        "groups",
        [
            [], [[]], [[0, 0]], [[0], [0]], [[0, 6]], [[-1]], [0, 1], 3, "01",
            [[0.9, 1.2], ["3"]], [[0.0, 1.0]], [["3"]], [[True]], [[None]],
        ],
    )  # fmt: skip
    def test_refuses_groups(self, groups):
        with pytest.raises(
            ValueError, match="groups must be lists of different classes from 0 to 5"
        ):
            split_tasks(data(), groups)

    def test_takes_integers_of_any_kind(self):
        groups = [np.array([0, 1]), torch.tensor([3, 2])]
        stream = split_tasks(data(), groups)
        assert [task.classes for task in stream] == [(0, 1), (3, 2)]
        assert {type(k) for task in stream for k in task.classes} == {int}

    def test_refuses_scenarios(self):
        with pytest.raises(
            ValueError, match="scenario must be one of task, domain, class, got 'x'"
        ):
            split_tasks(data(), scenario="x")


class TestRotated:
    @pytest.mark.parametrize("quarters", [0, 1, 2, 3, 4, -1])
    def test_quarter_turns_move_pixels_only(self, quarters):
        images = data((5, 5)).train.images
        assert torch.equal(rotate(images, 90.0 * quarters), images.rot90(quarters, (1, 2)))

    def test_half_turn_of_an_oblong_image_with_channels(self):
        images = data((3, 4, 6)).train.images
        assert torch.equal(rotate(images, 180.0), images.flip(-1, -2))

    def test_interpolates_between_neighbours(self):
        """At 45 degrees the middle of the right edge comes from a point amid four pixels."""
        images = data((3, 3)).train.images
        x, w = images.double(), 0.5**0.5  # the point lies w right of the centre and w below it
        expected = (
            x[:, 1, 1] * (1 - w) ** 2 + (x[:, 1, 2] + x[:, 2, 1]) * w * (1 - w) + x[:, 2, 2] * w**2
        )
        assert (rotate(images, 45.0)[:, 1, 2] - expected).abs().max() <= 0.5 + 1e-3

    def test_comes_from_outside_as_black(self):
        images = torch.full((1, 9, 9), 255, dtype=torch.uint8)
        turned = rotate(images, 45.0)
        assert turned[0, 0, 0] == 0
        assert turned[0, 4, 4] == 255

    def test_chunks_do_not_matter(self, monkeypatch):
        images = data((5, 5)).train.images
        whole = rotate(images, 30.0)
        monkeypatch.setattr("neuvar.continual.streams.ROTATED_AT_ONCE", 7)
        assert torch.equal(rotate(images, 30.0), whole)

    def test_tasks(self):
        source = data((5, 5))
        stream = rotated_tasks(source, [0, 90])
        assert equal(stream[0].train, source.train)
        assert torch.equal(stream[1].test.images, source.test.images.rot90(1, (1, 2)))
        assert torch.equal(stream[1].test.labels, source.test.labels)
        assert stream[1].train.images.dtype == torch.uint8

    @pytest.mark.parametrize("angles", [[], [float("nan")], [0.0, float("inf")]])
    def test_refuses_angles(self, angles):
        with pytest.raises(ValueError, match="angles must be at least one finite number"):
            rotated_tasks(data(), angles)


def test_slice_of_a_stream_is_a_stream():
    stream = split_tasks(data())
    tail = stream[1:]
    assert [task.number for task in tail] == [1, 2]
    assert tail.outputs == stream.outputs  # the network must still have all heads
    assert stream[-1] is stream.tasks[2]
    assert stream[2] in tail
    with pytest.raises(IndexError):
        stream[3]


@pytest.mark.parametrize(
    "make", [permuted_tasks, split_tasks, lambda d: rotated_tasks(d, [0.0, 20.0])]
)
def test_streams_travel_to_other_processes(make):
    stream = make(data())
    for task, copy in zip(stream, pickle.loads(pickle.dumps(stream)), strict=True):
        assert equal(task.train, copy.train)
