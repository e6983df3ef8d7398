"""The training recipe that the experiments on images share, at each scale."""

from __future__ import annotations

import math
from typing import Any

from neuvar.experiments.experiment import Scale
from neuvar.experiments.run_spec import Training

PAPER_B = 0.05
GRID = (0.01, 0.02, 0.03, PAPER_B)
TRIALS: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 10}
DROPS = 3
"""The learning rate is divided by ten after each third of the training."""

SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {
        "data": "mnist-excerpt", "images": 600, "held_out": 100, "test_images": 200, "epochs": 3,
    },
    "cpu": {
        "data": "cifar10", "images": 3000, "held_out": 300, "test_images": 1500, "epochs": 24,
        "batch": 32, "precision": "bf16", "channels_last": True,
    },
    "paper": {"data": "cifar10", "epochs": 300, "augment": True},
}  # fmt: skip

IMAGE_NETWORKS: dict[Scale, dict[str, dict[str, Any]]] = {
    "smoke": {
        "resnet": {"model": "resnet-10", "width": 4},
        "vgg": {"model": "mlp", "width": 64},
        "mobilenet": {"model": "mobilenet-v2", "width": 4},
    },
    "cpu": {
        "resnet": {"model": "resnet-10", "width": 16, "lr": 0.03},
        "vgg": {"model": "vgg-11", "width": 16},
        "mobilenet": {"model": "mobilenet-v2", "width": 8, "images": 1500, "held_out": 150},
    },
    "paper": {
        "resnet": {"model": "resnet-34"},
        "vgg": {"model": "vgg-16"},
        "mobilenet": {"model": "mobilenet-v2"},
    },
}
MOMENTUM = {"resnet": 0.9, "vgg": 0.0, "mobilenet": 0.0}
DATA_NAMES = {
    "mnist-excerpt": "MNIST excerpt",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
FAMILY_TITLES = {"resnet": "ResNet", "vgg": "VGG", "mobilenet": "MobileNetV2"}


def image_run(
    scale: Scale, family: str, b: float, seed: int, *, drops: int = DROPS, **others: Any
) -> Training:
    """Train one network on images, with SGD, or with NVRM-SGD if b is not 0."""
    fields: dict[str, Any] = {
        "optimizer": "nvrm-sgd" if b else "sgd",
        "b": b,
        "lr": 0.1,
        "momentum": MOMENTUM[family],
        "weight_decay": 1e-4,
        "batch": 128,
        "seed": seed,
    }
    fields |= SIZES[scale] | IMAGE_NETWORKS[scale][family] | others
    fields.setdefault("drop_every", math.ceil(fields["epochs"] / drops))
    return Training(**fields)


def flipped_run(scale: Scale, b: float, seed: int, **others: Any) -> Training:
    """Train a ResNet with 40 % of the labels moved to the next class."""
    fields: dict[str, Any] = {"label_noise": "pair", "noise_rate": 0.4, "label_seed": seed}
    return image_run(scale, "resnet", b, seed, **(fields | others))


def compared_run(scale: Scale, b: float, seed: int, **others: Any) -> Training:
    """A run with pair flips and held-out images to choose b."""
    fields: dict[str, Any] = {"reestimate": True} | ({"held_out": 5000} if scale == "paper" else {})
    return flipped_run(scale, b, seed, **(fields | others))


PAPER_NAMES = {"resnet": "ResNet-34", "vgg": "VGG-16", "mobilenet": "MobileNetV2"}
SMALLER = {
    "resnet": "ResNet-10 of width 16 instead of ResNet-34",
    "vgg": "VGG-11 of width 16 instead of VGG-16",
    "mobilenet": "MobileNetV2 of width 8 instead of 32, with 1,500 images",
}
COMMON = (
    "SGD and NVRM-SGD with weight decay 0.0001, momentum 0.9 for ResNet and 0 for the others. "
    "Accuracies are measured at clean weights, in evaluation mode. "
)


def recipe(
    scale: Scale,
    families: tuple[str, ...] = ("resnet",),
    *,
    drops: int = DROPS,
    rates: tuple[float, ...] = (),
) -> str:
    """Describe the training at a scale, and what is smaller than in the paper."""
    if scale == "smoke":
        return "600 images of the MNIST excerpt, 3 epochs, tiny networks: a test of the code. "
    every = math.ceil(SIZES[scale]["epochs"] / drops)
    rates_text = "learning rate 0.1"
    if rates:
        rates_text = f"learning rates {', '.join(f'{x:g}' for x in rates)}"
    if scale == "paper":
        return (
            f"The paper's settings: {', '.join(PAPER_NAMES[f] for f in families)}, all images, "
            f"300 epochs, {rates_text}, divided by ten every {every} epochs, "
            f"batch size 128, random crops and flips, ten trials. {COMMON}"
        )
    smaller = "; ".join(SMALLER[f] for f in families)
    if "resnet" in families and not rates:
        several = len(families) > 1
        rates_text = f"learning rate {'0.1, for ResNet 0.03' if several else '0.03 instead of 0.1'}"
    return (
        "Smaller than in the paper: 3,000 training images instead of 50,000, of which 300 are held "
        "out to choose b; 1,500 test images instead of 10,000; training accuracy on the first "
        "1,500 training images; 24 epochs instead of 300; "
        f"{rates_text}, divided by ten every {every} epochs instead of every "
        f"{300 // drops}; no random crops and flips; batch size 32 instead of 128; {smaller}; "
        f"three trials instead of ten; CIFAR-10 only; bf16 mixed precision. {COMMON}"
    )
