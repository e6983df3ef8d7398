"""Batches: exact statistics, exact crops, and an order that depends on seed and epoch alone."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from neuvar.data import Augmentation, Batches, Normalization, Split, normalization
from neuvar.data.batches import _Cropper, crop_and_flip


def images(n=50, channels=3, height=8, width=8, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8))


def split(n=50):
    return Split(images(n), torch.arange(n) % 10)


def pixels(batch):
    """A batch without normalization as whole numbers again."""
    return (batch * 255).round().to(torch.uint8)


class TestCropAndFlip:
    def test_every_place_and_both_sides_equal_the_plain_way(self):
        """All cuts of a padded image, one after another, against slicing."""
        pad, x = 2, images(1, height=5, width=7)
        padded = F.pad(x, (pad,) * 4)
        for top in range(2 * pad + 1):
            for left in range(2 * pad + 1):
                for flip in (False, True):
                    expected = padded[:, :, top : top + 5, left : left + 7]
                    expected = expected.flip(-1) if flip else expected
                    where = torch.tensor([top]), torch.tensor([left]), torch.tensor([flip])
                    assert torch.equal(crop_and_flip(x, *where, pad=pad), expected)

    def test_each_image_has_its_own_place(self):
        n, pad, x = 200, 4, images(200, height=32, width=32)
        g = torch.Generator().manual_seed(0)
        top, left = torch.randint(0, 9, (2, n), generator=g)
        flip = torch.rand(n, generator=g) < 0.5
        result = crop_and_flip(x, top, left, flip, pad=pad)
        padded = F.pad(x, (pad,) * 4)
        for i in range(n):
            one = padded[i, :, top[i] : top[i] + 32, left[i] : left[i] + 32]
            assert torch.equal(result[i], one.flip(-1) if flip[i] else one)

    @pytest.mark.parametrize("pad", [0, 1, 4])
    def test_the_quick_way_on_a_cpu_equals_the_readable_one(self, pad):
        x = images(200, height=5, width=7)
        cropper = _Cropper((64, 3, 5, 7), pad)
        rng = np.random.default_rng(0)
        for some in x.split(64):  # the last one is not full, and buffers are used again
            top, left = rng.integers(0, 2 * pad + 1, (2, len(some)))
            flip = rng.integers(0, 2, len(some)).astype(bool)
            places = [torch.from_numpy(draw) for draw in (top, left, flip)]
            expected = crop_and_flip(some, *places, pad=pad)
            assert torch.equal(cropper(some, top, left, flip), expected)

    def test_the_middle_without_flip_changes_nothing(self):
        x, middle = images(), torch.full((50,), 3)
        assert torch.equal(crop_and_flip(x, middle, middle, torch.zeros(50).bool(), pad=3), x)

    def test_flipping_twice_changes_nothing(self):
        x, zero, flip = images(), torch.zeros(50, dtype=torch.int64), torch.ones(50).bool()
        once = crop_and_flip(x, zero, zero, flip, pad=0)
        assert not torch.equal(once, x)
        assert torch.equal(crop_and_flip(once, zero, zero, flip, pad=0), x)


class TestNormalization:
    @pytest.mark.parametrize("n", [1, 50, 5000])
    def test_channels_equal_float64(self, n):
        x = images(n)
        result = normalization(x)
        mean, std = x.double().mean((0, 2, 3)) / 255, x.double().std((0, 2, 3), correction=0) / 255
        torch.testing.assert_close(result.mean.flatten(), mean.float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(result.std.flatten(), std.float(), rtol=1e-6, atol=0)

    def test_pixels_have_their_own_mean_and_the_channels_deviation(self):
        x = images()
        result = normalization(x, mean="pixel")
        torch.testing.assert_close(result.mean, (x.double().mean(0) / 255).float())
        assert torch.equal(result.std, normalization(x).std)

    def test_grey_images_have_one_channel(self):
        x = images(channels=1)
        assert torch.equal(normalization(x[:, 0]).mean, normalization(x).mean)
        assert normalization(x[:, 0], mean="pixel").mean.shape == (1, 8, 8)

    def test_normalized_training_data_have_mean_0_and_deviation_1(self):
        x = images(400)
        labels = torch.zeros(400)
        (result, _) = next(
            Batches((x, labels), 400, shuffle=False, normalize=normalization(x)).epoch(0)
        )
        torch.testing.assert_close(result.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
        torch.testing.assert_close(
            result.std((0, 2, 3), correction=0), torch.ones(3), rtol=1e-5, atol=0
        )
        (result, _) = next(
            Batches(
                (x, labels), 400, shuffle=False, normalize=normalization(x, mean="pixel")
            ).epoch(0)
        )
        torch.testing.assert_close(result.mean(0), torch.zeros(3, 8, 8), rtol=0, atol=1e-5)

    def test_an_image_that_is_the_same_everywhere_stays_finite(self):
        x = torch.full((3, 1, 4, 4), 7, dtype=torch.uint8)
        (result,) = next(Batches((x,), 3, shuffle=False, normalize=normalization(x)).epoch(0))
        assert result.abs().max() < 1e-6

    @pytest.mark.parametrize(
        ("call", "sentence"),
        [
            (lambda: normalization(images(), mean="image"), "mean must be one of channel, pixel"),
            (lambda: normalization(images().float()), "images must be uint8 of shape"),
            (lambda: normalization(images()[0, 0]), r"got torch.uint8 of shape \(8, 8\)"),
            (lambda: normalization(images()[:0]), "images must not be empty"),
            (lambda: Normalization(torch.zeros(1), torch.zeros(1)), "std must be positive"),
            (
                lambda: Normalization(torch.tensor(torch.inf), torch.ones(1)),
                "mean must be finite",
            ),
            (
                lambda: Normalization(torch.zeros(1), torch.tensor(float("nan"))),
                "std must be positive",
            ),
        ],
    )
    def test_bad_input_gets_a_sentence(self, call, sentence):
        with pytest.raises(ValueError, match=sentence):
            call()


class TestBatches:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("size", [1, 7, 25, 50, 64])
    def test_an_epoch_shows_every_image_once(self, size, drop_last):
        data = split()
        index = torch.arange(50)
        batches = Batches((data.images, data.labels, index), size, seed=1, drop_last=drop_last)
        seen = []
        for x, y, i in batches.epoch(0):
            assert x.dtype == torch.float32
            assert torch.equal(pixels(x), data.images[i])
            assert torch.equal(y, data.labels[i])
            seen.append(i)
        assert len(seen) == len(batches)
        assert [len(i) for i in seen[:-1]] == [size] * (len(seen) - 1)
        shown = torch.cat(seen) if seen else torch.empty(0)
        assert len(shown.unique()) == len(shown) == (50 // size * size if drop_last else 50)
        assert torch.equal(shown, batches.order(0)[: len(shown)])

    def test_images_are_in_0_to_1_without_normalization(self):
        data = split()
        x, _ = next(Batches(data, 50, shuffle=False).epoch(0))
        torch.testing.assert_close(x, data.images.float() / 255)

    def test_normalization_is_the_formula(self):
        data = split()
        result = normalization(data.images)
        x, _ = next(Batches(data, 50, shuffle=False, normalize=result).epoch(0))
        expected = (data.images.float() / 255 - result.mean) / result.std
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)

    def test_in_order_without_a_seed(self):
        data = split()
        batches = Batches(data, 16, shuffle=False)
        for _ in range(2):
            assert torch.equal(torch.cat([y for _, y in batches]), data.labels)

    def test_seed_and_epoch_alone_decide(self):
        data, augment = split(), Augmentation(pad=2)

        def stream(seed, *epochs):
            batches = Batches(data, 16, seed=seed, augment=augment)
            return torch.cat([x for number in epochs for x, _ in batches.epoch(number)])

        assert torch.equal(stream(0, 3), stream(0, 0, 1, 2, 3)[150:])
        assert not torch.equal(stream(0, 3), stream(0, 2))
        assert not torch.equal(stream(0, 3), stream(1, 3))
        # Seed 0 of epoch 1 and seed 1 of epoch 0 are different streams.
        assert not torch.equal(stream(0, 1), stream(1, 0))

    def test_iteration_goes_through_the_epochs(self):
        batches, again = (Batches(split(), 16, seed=5, augment=Augmentation()) for _ in range(2))
        for number in range(3):
            result = torch.cat([x for x, _ in batches])
            assert torch.equal(result, torch.cat([x for x, _ in again.epoch(number)]))
        assert batches.next_epoch == 3
        again.next_epoch = 2
        assert torch.equal(torch.cat([x for x, _ in again]), result)

    @pytest.mark.parametrize("start", [0, 1, 3, 4])
    def test_an_epoch_may_begin_in_the_middle(self, start):
        batches = Batches(split(), 16, seed=5, augment=Augmentation())
        whole, rest = list(batches.epoch(2)), list(batches.epoch(2, start=start))
        assert len(rest) == 4 - start
        for one, other in zip(whole[start:], rest, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def test_augmentation_does_not_change_the_order(self):
        plain = Batches(split(), 16, seed=5)
        changed = Batches(split(), 16, seed=5, augment=Augmentation())
        for (_, a), (_, b) in zip(plain.epoch(1), changed.epoch(1), strict=True):
            assert torch.equal(a, b)

    def test_order_and_augmentation_have_streams_of_their_own(self):
        batches = Batches(split(), 16, seed=5, augment=Augmentation())
        top, left, _ = batches._draws(0)
        shared = batches._random(0, 0).integers(0, 9, (2, 50))
        assert (shared != np.stack([top, left])).any()

    def test_the_global_generator_is_left_alone(self):
        torch.manual_seed(0)
        before, state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        list(Batches(split(), 16, seed=5, augment=Augmentation()))
        assert torch.equal(torch.get_rng_state(), before)
        assert (np.random.get_state()[1] == state).all()  # noqa: NPY002

    def test_the_data_are_left_alone(self):
        data = split()
        before = data.images.clone()
        for x, y in Batches(data, 16, seed=5, normalize=normalization(data.images)):
            x.zero_()
            y.zero_()
        assert torch.equal(data.images, before)
        assert data.labels.any()

    def test_augmentation_is_uniform_over_places_and_sides(self):
        """Where one white pixel ends up: each of 9×9 places, and each side, equally often."""
        n, pad = 40_500, 4
        x = torch.zeros(n, 1, 9, 9, dtype=torch.uint8)
        x[:, :, 4, 4] = 255
        labels = torch.zeros(n)
        batches = Batches((x, labels), 4096, seed=3, augment=Augmentation(pad=pad, flip=False))
        counts = sum(result.sum(0)[0] for result, _ in batches.epoch(0))
        assert counts.sum() == n
        expected, error = n / 81, (n / 81 * (1 - 1 / 81)) ** 0.5
        assert (counts - expected).abs().max() < 4.5 * error
        side = torch.zeros(n, 1, 1, 2, dtype=torch.uint8)
        side[..., 0] = 255
        batches = Batches((side, labels), 4096, seed=3, augment=Augmentation(pad=0))
        left = sum(result[..., 0].sum() for result, _ in batches.epoch(0))
        assert abs(left - n / 2) < 4.5 * (n / 4) ** 0.5

    def test_places_and_sides_are_independent(self):
        n = 20_000
        batches = Batches(
            (torch.zeros(n, 1, 8, 8, dtype=torch.uint8),), n, seed=0, augment=Augmentation()
        )
        draws = torch.from_numpy(np.stack(batches._draws(0)).astype(float))
        correlation = torch.corrcoef(draws) - torch.eye(3)
        assert correlation.abs().max() < 4.5 / n**0.5

    def test_grey_images_get_a_channel(self):
        data = Split(images(channels=1)[:, 0], torch.zeros(50))
        x, _ = next(Batches(data, 10, seed=0, augment=Augmentation()).epoch(0))
        assert x.shape == (10, 1, 8, 8)

    def test_batches_may_be_made_anywhere(self):
        """The meta device has no values, but it refuses whatever stays behind on the CPU."""
        data = split()
        batches = Batches(
            data,
            16,
            seed=0,
            augment=Augmentation(),
            normalize=normalization(data.images),
            device="meta",
        )
        shapes = [(x.device.type, y.device.type, *x.shape) for x, y in batches]
        assert shapes == [("meta", "meta", n, 3, 8, 8) for n in (16, 16, 16, 2)]

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
            ({"batch_size": 2.0}, r"batch_size must be an integer >= 1, got 2\.0"),
            ({"batch_size": True}, "batch_size must be an integer >= 1, got True"),
            ({"seed": None}, "seed must be an integer from 0 to 4294967295, got None"),
            ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
            ({"seed": 1.5}, r"seed must be an integer from 0 to .*, got 1\.5"),
            ({"seed": 1 << 32}, "seed must be an integer .*, got 4294967296"),
            ({"seed": True}, "seed must be an integer .*, got True"),
            ({"seed": None, "shuffle": False, "augment": Augmentation()}, "seed must be"),
            ({"seed": -1, "shuffle": False}, "seed must be"),
            ({"data": (images(), torch.zeros(49))}, "data must be tensors of the same length"),
            ({"data": (images().float(), torch.zeros(50))}, "images must be uint8"),
            ({"data": ("ab", torch.zeros(2))}, "images must be uint8"),
            ({"data": ()}, "images must be uint8"),
            (
                {"normalize": Normalization(torch.zeros(4, 1, 1), torch.ones(4, 1, 1))},
                r"normalize must fit images of shape \(3, 8, 8\)",
            ),
            (
                {"normalize": Normalization(torch.zeros(2, 3, 8, 8), torch.ones(1))},
                r"normalize must fit images of shape \(3, 8, 8\)",
            ),
        ],
    )
    def test_bad_input_gets_a_sentence(self, change, sentence):
        arguments = {"data": split(), "batch_size": 16, "seed": 0} | change
        with pytest.raises(ValueError, match=sentence):
            Batches(**arguments)

    @pytest.mark.parametrize("number", [-1, 1.0, None, True])
    def test_an_epoch_must_be_a_number(self, number):
        with pytest.raises(ValueError, match="number must be an integer from 0 to"):
            Batches(split(), 16, seed=0).epoch(number)

    @pytest.mark.parametrize("start", [-1, 5, 1.0])
    def test_a_start_must_be_in_the_epoch(self, start):
        with pytest.raises(ValueError, match="start must be an integer from 0 to 4"):
            Batches(split(), 16, seed=0).epoch(0, start=start)

    @pytest.mark.parametrize("pad", [-1, 1.5, None])
    def test_augmentation_checks_its_pad(self, pad):
        with pytest.raises(ValueError, match="pad must be an integer >= 0"):
            Augmentation(pad=pad)

    @pytest.mark.parametrize("flip", [0.5, 1, None, "no"])
    def test_augmentation_checks_its_flip(self, flip):
        with pytest.raises(ValueError, match="flip must be True or False, got"):
            Augmentation(flip=flip)

    def test_a_batch_may_be_larger_than_the_data(self):
        x, y = next(Batches(split(), 10**9, seed=1, augment=Augmentation()).epoch(0))
        same, _ = next(Batches(split(), len(y), seed=1, augment=Augmentation()).epoch(0))
        assert torch.equal(x, same)

    def test_seeds_epochs_and_purposes_do_not_collide(self):
        """numpy pads seeds with zeros and lays them end to end; none of these may be equal."""
        edges = (0, 1, (1 << 32) - 1)
        result = {
            tuple(Batches(split(), 16, seed=seed)._random(number, purpose).integers(0, 1 << 62, 2))
            for seed in edges
            for number in edges
            for purpose in (0, 1)
        }
        assert len(result) == 18
        for call in (Batches(split(), 16, seed=0).order, Batches(split(), 16, seed=0).epoch):
            with pytest.raises(ValueError, match=r"number must be .* from 0 to 4294967295"):
                call(1 << 32)

    def test_no_images_are_no_batches(self):
        empty = Split(images()[:0], torch.zeros(0))
        assert len(Batches(empty, 16, seed=0)) == 0
        assert list(Batches(empty, 16, seed=0, augment=Augmentation())) == []
