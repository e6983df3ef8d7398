"""Corruptions by what they do to known images, and PGD on linear models."""

import io
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from neuvar import AveragedPredictor
from neuvar.measures import (
    CORRUPTIONS,
    adversarial_accuracy,
    corrupt_images,
    corruption_accuracy,
)
from neuvar.measures.robustness import Ball


def images(n=6, channels=1, size=16, seed=0):
    """Smooth blobs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, (size, size), mode="bilinear")


# --- corruptions ---


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_corruption(kind, channels):
    x = images(channels=channels)
    versions = [corrupt_images(x, kind, severity, seed=1) for severity in range(1, 6)]
    for version in versions:
        assert version.shape == x.shape
        assert version.dtype == x.dtype
        assert 0 <= version.min() <= version.max() <= 1
        if (kind, channels) == ("saturate", 1):
            assert torch.equal(version, x)
            return
        assert not torch.equal(version, x)
    changes = [float((version - x).square().mean()) for version in versions]
    assert changes[0] < changes[2] < changes[4]
    assert torch.equal(versions[2], corrupt_images(x, kind, 3, seed=1))
    assert torch.equal(x, images(channels=channels))  # the input is not written to


RANDOM = {
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur",
    "fog", "stripe", "elastic", "rotate", "shear", "translate", "snow", "spatter", "dotted_line",
    "zigzag",
}  # fmt: skip


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_seed_matters_where_there_is_chance(kind):
    x = images(20)
    one, other = (corrupt_images(x, kind, 3, seed=seed) for seed in (0, 1))
    assert torch.equal(one, other) == (kind not in RANDOM)
    state = torch.get_rng_state()
    corrupt_images(x, kind, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_has_its_strength():
    grey = torch.full((50, 1, 20, 20), 0.5)
    assert corrupt_images(grey, "gaussian_noise", 2).std() == pytest.approx(0.1, rel=0.05)
    assert corrupt_images(grey, "speckle_noise", 2).std() == pytest.approx(0.1, rel=0.05)
    # A Poisson count with mean 25/2 has this deviation, in units of 25.
    assert corrupt_images(grey, "shot_noise", 2).std() == pytest.approx(0.5**0.5 / 5, rel=0.05)
    changed = corrupt_images(grey, "impulse_noise", 5)
    assert (changed == 0).double().mean() == pytest.approx(0.125, rel=0.1)
    assert (changed == 1).double().mean() == pytest.approx(0.125, rel=0.1)


@pytest.mark.parametrize("kind", ["gaussian_blur", "defocus_blur", "pixelate", "contrast"])
def test_constant_images_stay_constant(kind):
    grey = torch.full((2, 3, 12, 12), 0.4)
    assert torch.allclose(corrupt_images(grey, kind, 4), grey, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian_blur", "defocus_blur", "motion_blur"])
def test_blur_of_a_point_keeps_its_sum(kind):
    point = torch.zeros(1, 1, 41, 41)
    point[0, 0, 20, 20] = 1
    blurred = corrupt_images(point, kind, 3)
    assert float(blurred.sum()) == pytest.approx(1, abs=1e-4)
    assert float(blurred.max()) < 0.6


def test_colours_by_hand():
    x = images()
    assert torch.allclose(corrupt_images(x, "brightness", 1), (x + 0.1).clamp(0, 1))
    mean = x.mean((1, 2, 3), keepdim=True)
    assert torch.allclose(corrupt_images(x, "contrast", 3), mean + 0.3 * (x - mean), atol=1e-6)


@pytest.mark.parametrize(("severity", "quality"), [(1, 75), (3, 30), (5, 8)])
def test_jpeg_is_that_of_pillow(severity, quality):
    Image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(256, (60, 60), dtype=torch.uint8, generator=torch.Generator())
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "jpeg", quality=quality)
    theirs = torch.from_numpy(np.array(Image.open(file)))
    ours = 255 * corrupt_images(pixels[None], "jpeg", severity)[0]
    # In some blocks a coefficient close to a half is rounded the other way.
    assert (ours - theirs).abs().median() < 1


def test_saturation_keeps_the_mean_of_the_channels():
    x = 0.4 + 0.05 * images(channels=3)
    saturated = corrupt_images(x, "saturate", 2)
    grey = x.mean(1, keepdim=True)
    assert torch.allclose(saturated - grey, 2 * (x - grey), atol=1e-6)


def test_shares_that_are_covered():
    black = torch.zeros(40, 1, 32, 32)
    blots = corrupt_images(black, "spatter", 4)
    assert (blots > 0).double().mean() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(blots.unique(), torch.tensor([0, 0.6]))
    flakes = corrupt_images(black, "snow", 4)
    assert 0.1 < (flakes > 0.1).double().mean() < 0.4


@pytest.mark.parametrize("kind", ["dotted_line", "zigzag"])
def test_lines_reach_from_edge_to_edge(kind):
    drawn = corrupt_images(torch.zeros(10, 2, 32, 32), kind, 1)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(drawn[:, 0], drawn[:, 1])  # the same in all channels
    columns = drawn[:, 0].amax(1)  # whether there is a white pixel in each column
    gaps = (columns == 0).sum(1)
    # A zigzag may leave the image for a while.
    assert (gaps == 16).all() if kind == "dotted_line" else (gaps < 6).all()


def test_edges_of_a_square():
    square = torch.zeros(1, 1, 24, 24)
    square[..., 8:16, 8:16] = 1
    found = corrupt_images(square, "edges", 5)[0, 0]
    assert found[9:15, 6:10].amax(1).min() == 1  # its left side
    assert found[11:13, 11:13].max() == 0  # nothing inside
    assert found[:5].max() == 0  # nothing outside
    grey = torch.full((1, 1, 9, 9), 0.5)
    assert not corrupt_images(grey, "edges", 5).any()


def test_geometry_by_hand():
    point = torch.zeros(30, 1, 31, 31)
    point[:, 0, 15, 25] = 1  # ten pixels to the right of the centre
    ys, xs = torch.meshgrid(torch.arange(31.0), torch.arange(31.0), indexing="ij")

    def place(version):
        total = version.sum((1, 2, 3))
        return torch.stack([(version[:, 0] * g).sum((1, 2)) / total for g in (xs - 15, ys - 15)], 1)

    moved = place(corrupt_images(point, "translate", 4)) - torch.tensor([10.0, 0])
    assert torch.allclose(moved.norm(dim=1), torch.full((30,), 4.0), atol=0.3)
    turned = place(corrupt_images(point, "rotate", 4))
    assert torch.allclose(turned[:, 0], torch.full((30,), 10 * 3**0.5 / 2), atol=0.3)
    assert torch.allclose(turned[:, 1].abs(), torch.full((30,), 5.0), atol=0.3)
    assert len(turned[:, 1].sign().unique()) == 2
    small = place(corrupt_images(point, "shrink", 5))
    assert torch.allclose(small, torch.tensor([5.0, 0]).expand(30, 2), atol=0.3)


def test_bytes_and_images_without_channels():
    x = (255 * images()).byte()
    one = corrupt_images(x[:, 0], "fog", 3)
    assert one.shape == (6, 16, 16)
    assert torch.equal(one, corrupt_images(x.float() / 255, "fog", 3)[:, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((images() * 2, "fog", 1), "from 0 to 1"),
        ((images()[0, 0], "fog", 1), "images must have the shape"),
        (("cat", "fog", 1), "got str"),
        ((images(), "frost", 1), "kind must be one of"),
        ((images(), "fog", 6), "severity must be an integer from 1 to 5"),
    ],
)
def test_bad_images(arguments, message):
    with pytest.raises(ValueError, match=message):
        corrupt_images(*arguments)


class Bright(nn.Module):
    """Class 1 if the mean of an image is above 0.5."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        mean = self.scale * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-mean, mean], 1)


def test_corruption_accuracy_by_hand():
    grey = torch.tensor([0.3, 0.44, 0.6, 0.7]).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    labels = torch.tensor([0, 0, 1, 1])
    model = Bright().train()
    found = corruption_accuracy(
        model, (grey, labels), kinds=["brightness", "contrast"], severities=[1, 4], batch_size=3
    )
    assert found.clean.value == 1
    # Adding 0.1 turns 0.44 bright; adding 0.3 turns 0.3 bright, too. Contrast keeps the mean.
    assert [p.value for p in found.accuracies["brightness"]] == [0.75, 0.5]
    assert [p.value for p in found.accuracies["contrast"]] == [1, 1]
    assert found.mean.mean == pytest.approx((0.75 + 0.5 + 1 + 1) / 4)
    assert found.mean.samples == 4
    assert model.training
    assert "clean 1" in str(found)


def test_seed_of_the_corruptions():
    """The same seed gives the same images, also within later batches; another gives others."""
    grey, labels = torch.full((4, 1, 8, 8), 0.5), torch.zeros(4).long()

    def corrupted(seed):
        seen = []

        def record(x):
            seen.append(x.clone())
            return x

        options = {"kinds": "gaussian_noise", "severities": 3, "batch_size": 2, "seed": seed}
        corruption_accuracy(Bright(), (grey, labels), transform=record, **options)
        return seen[1::2]  # every other one is the original

    (first, second), again, other = corrupted(0), corrupted(0), corrupted(1)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, other[0])


def test_corruption_accuracy_of_averaged_predictions_and_transforms():
    x, y = images(40), torch.arange(40) % 2
    model = nn.Linear(256, 2)
    averaged = AveragedPredictor(model, b=0.1, draws=4)
    options = {"kinds": ["fog"], "transform": lambda x: (x - 0.5).flatten(1)}
    plain, mean = (corruption_accuracy(m, (x, y), **options) for m in (model, averaged))
    assert plain.clean.of == mean.clean.of == 40
    again = corruption_accuracy(averaged, [(x, y)], **options)
    assert again == mean
    assert len(corruption_accuracy(model, (x, y), transform=options["transform"]).accuracies) == 25


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((images(), torch.zeros(6)), {}, "labels must be one integer"),
        ((images(), torch.full((6,), 7)), {}, "label 7"),
        ([images()], {}, "batches \\(inputs, labels\\)"),
        ([], {}, "data is empty"),
        ((images(), torch.zeros(6).long()), {"kinds": ["frost"]}, "kinds must be one of"),
        ((images()[:0], torch.zeros(0).long()), {}, r"images must not be empty, got shape \(0, 1"),
        ((images(), torch.zeros(6).long()), {"kinds": []}, "kinds must have at least one value"),
        ((images(), torch.zeros(6).long()), {"kinds": "frost"}, "kinds must be one of .* 'frost'"),
        ((images(), torch.zeros(6).long()), {"severities": ()}, "severities must have at least"),
        ((images(), torch.zeros(6).long()), {"severities": 6}, "severities must be"),
        ((images(), torch.zeros(6).long()), {"severities": [0]}, "severities must be"),
    ],
)
def test_bad_corruption_arguments(data, options, message):
    with pytest.raises(ValueError, match=message):
        corruption_accuracy(Bright(), data, **options)


def test_one_kind_and_one_severity():
    data = images(), torch.zeros(6).long()
    one = corruption_accuracy(Bright(), data, kinds="fog", severities=2)
    assert one == corruption_accuracy(Bright(), data, kinds=["fog"], severities=[2])


class SometimesNan(nn.Module):
    """Always class 0, but with a nan score for inputs with a mean above 0.5."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x):
        mean = x.flatten(1).mean(1, keepdim=True)
        scores = self.bias + 0 * mean
        return torch.where(mean > 0.5, torch.tensor([torch.nan, 0.0]), scores)


def test_nan_scores_count_as_wrong():
    grey = torch.tensor([0.1, 0.2, 0.7, 0.9]).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    data = grey, torch.zeros(4).long()
    found = corruption_accuracy(SometimesNan(), data, kinds="brightness", severities=5)
    assert found.clean.value == 0.5
    assert found.accuracies["brightness"][0].value == 0.25  # adding 0.4 makes 0.2 bright
    attacked = adversarial_accuracy(SometimesNan(), data, epsilon=0.01)
    assert attacked.clean.value == attacked.attacked.value == 0.5


def test_nan_gradients_are_no_attack():
    class Root(nn.Module):
        """The gradient of 0 · √(x - x) is nan."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([1.0, 0.0]))

        def forward(self, x):
            return self.bias + 0 * (x - x.detach()).abs().sqrt().mean(1, keepdim=True)

    data = torch.rand(5, 3), torch.zeros(5).long()
    for norm in ("inf", "2"):
        assert adversarial_accuracy(Root(), data, epsilon=0.1, norm=norm).attacked.value == 1


# --- PGD ---


def linear(classes=2, features=6, seed=0):
    """A linear model and inputs that it classifies mostly as labelled."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(features, classes).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        model.bias.sub_(model(torch.full((1, features), 0.5, dtype=torch.float64))[0])
    x = torch.rand(300, features, generator=generator, dtype=torch.float64)
    y = model(x).argmax(1)
    y[::10] = (y[::10] + 1) % classes
    return model, x, y


def margins(model, x, y, epsilon, norm):
    """Smallest margin over all classes and all changes of size epsilon: exact if linear."""
    w, scores = model.weight.detach(), model(x).detach()
    differences = w[y][:, None] - w  # (n, classes, features)
    length = differences.abs().sum(2) if norm == "inf" else differences.norm(dim=2)
    gaps = scores.gather(1, y[:, None]) - scores - epsilon * length
    return gaps.masked_fill(one_hot(y, w.shape[0]).bool(), torch.inf).amin(1)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.2])
def test_two_linear_classes_exactly(norm, epsilon):
    model, x, y = linear()
    exact = margins(model, x, y, epsilon, norm)
    assert exact.abs().min() > 1e-6  # no example on the boundary
    # A step of ε halves the part of the change that goes aside, along the sphere.
    options = {"norm": norm, "clip": None, "batch_size": 70, "steps": 30, "step_size": epsilon}
    found = adversarial_accuracy(model, (x, y), epsilon=epsilon, **options)
    assert found.attacked.count == int((exact > 0).sum())
    assert found.clean.count == 270
    assert found.attacked.of == 300
    assert (found.attacked.count < 260) == (epsilon > 0)
    found = adversarial_accuracy(model, (x, y), epsilon=epsilon, norm=norm, clip=None)
    assert found.attacked.count == int((exact > 0).sum())  # with the default steps as well


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_more_linear_classes_are_bounded_by_the_exact_accuracy(norm):
    """A local search may end at a worse class; restarts close most of the gap."""
    model, x, y = linear(classes=4)
    exact = (margins(model, x, y, 0.1, norm) > 0).sum()
    found = [
        adversarial_accuracy(
            model, (x, y), epsilon=0.1, norm=norm, clip=None, restarts=restarts
        ).attacked.count
        for restarts in (1, 5)
    ]
    assert exact <= found[1] <= found[0] <= exact + 6


def test_valid_inputs_are_clipped_exactly():
    """Within [0, 1] each number moves until ε or the edge, against the sign of its weight."""
    model, x, y = linear()
    w = model.weight.detach()
    direction = (w[1 - y] - w[y]).sign()
    worst = (x + 0.3 * direction).clamp(0, 1)
    expected = int(((model(worst).argmax(1) == y) & (model(x).argmax(1) == y)).sum())
    found = adversarial_accuracy(model, (x, y), epsilon=0.3, steps=30)
    assert found.attacked.count == expected


def test_inputs_outside_of_clip_are_refused():
    """Clipping alone would move them, by more than ε."""
    model, x, y = linear()
    normalized = (x - 0.5) / 0.25
    message = r"within clip=\(0\.0, 1\.0\), got -.* to .*transform=.*clip=None"
    with pytest.raises(ValueError, match=message):
        adversarial_accuracy(model, (normalized, y), epsilon=0.1)
    with pytest.raises(ValueError, match="got nan"):
        adversarial_accuracy(model, (x * torch.nan, y), epsilon=0.1)
    found = adversarial_accuracy(model, (normalized, y), epsilon=0.1, clip=(-2, 2))
    assert found.attacked.of == 300
    by_rounding = x.clone()
    by_rounding[0, 0] = 1 + 1e-7
    assert adversarial_accuracy(model, (by_rounding, y), epsilon=0.1).attacked.of == 300
    with pytest.raises(ValueError, match="data is empty"):
        adversarial_accuracy(model, (x[:0], y[:0]), epsilon=0.1)


def test_the_norm_may_be_a_number():
    model, data = nn.Linear(2, 2), (torch.rand(6, 2), torch.arange(6) % 2)
    for number, name in ((2, "2"), (2.0, "2"), (math.inf, "inf")):
        assert adversarial_accuracy(model, data, epsilon=0.1, norm=number).norm == name
    with pytest.raises(ValueError, match="norm must be one of inf, 2, got 1"):
        adversarial_accuracy(model, data, epsilon=0.1, norm=1)


def test_large_scores_do_not_hide_the_gradient():
    """The cross entropy of such scores has the gradient 0 in float32."""
    model, x, y = linear()
    options = {"epsilon": 0.2, "clip": None, "steps": 30}
    before = adversarial_accuracy(model, (x, y), **options).attacked
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e4)
    assert adversarial_accuracy(model.float(), (x.float(), y), **options).attacked == before


def test_steps_are_the_steepest():
    gradient = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    assert Ball(1, "inf", None).step(gradient).tolist() == [[1, -1], [0, 0]]
    expected = torch.tensor([[0.6, -0.8], [0, 0]])
    assert torch.allclose(Ball(1, "2", None).step(gradient), expected)
    centre, far = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    assert Ball(1, "inf", None).project(far, centre).tolist() == [[1, 1]]
    assert torch.allclose(Ball(1, "2", None).project(far, centre), torch.tensor([[0.6, 0.8]]))
    assert Ball(9, "2", (0, 0.5)).project(far, centre).tolist() == [[0.5, 0.5]]
    generator = torch.Generator().manual_seed(0)
    for norm, order in (("inf", torch.inf), ("2", 2)):
        random = Ball(0.3, norm, None).random(torch.zeros(100, 5), generator)
        assert 0.1 < random.norm(order, dim=1).max() <= 0.3 + 1e-6


def test_attack_leaves_the_model_alone():
    model, x, y = linear()
    model.train()
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    one, same = (adversarial_accuracy(model, (x, y), epsilon=0.1, seed=1) for _ in range(2))
    assert one == same
    assert all(map(torch.equal, model.parameters(), weights))
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert "inf norm, 20 steps" in str(one)


def test_attack_on_the_average():
    model, x, y = linear()
    averaged = AveragedPredictor(model, b=0.3, draws=4)
    found = adversarial_accuracy(averaged, (x, y), epsilon=0.1, transform=lambda x: x + 0.0)
    assert found.attacked.count < found.clean.count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -1}, "epsilon must be"),
        ({"norm": "1"}, "norm must be one of inf, 2"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"restarts": 0}, "restarts must be"),
        ({"step_size": -0.1}, "step_size must be"),
        ({"clip": (1, 0)}, "clip must be"),
    ],
)
def test_bad_attack_arguments(options, message):
    model, x, y = linear()
    with pytest.raises(ValueError, match=message):
        adversarial_accuracy(model, (x, y), **{"epsilon": 0.1, **options})


def test_an_attack_needs_numbers_and_gradients():
    model, x, y = linear()
    with pytest.raises(ValueError, match="inputs must be floating-point numbers, got"):
        adversarial_accuracy(model, (x.byte(), y), epsilon=0.1)
    with pytest.raises(ValueError, match="is transform differentiable"):
        adversarial_accuracy(model, (x, y), epsilon=0.1, transform=torch.Tensor.detach)
    for clip in (1.0, (0, 1, 2), (1, 0)):
        with pytest.raises(ValueError, match="clip must be an increasing pair of numbers or None"):
            adversarial_accuracy(model, (x, y), epsilon=0.1, clip=clip)


def test_an_attack_inside_inference_mode():
    model, x, y = linear()
    outside = adversarial_accuracy(model, (x, y), epsilon=0.1)
    with torch.inference_mode():
        inside = adversarial_accuracy(model, (x * 1, y * 1), epsilon=0.1)
    assert inside == outside
