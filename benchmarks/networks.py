"""The networks that the benchmark trains, each with its inner optimizer and synthetic data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

CLASSES = 10
VOCABULARY = 256
SEQUENCE = 64


@dataclass(frozen=True)
class Case:
    """One row of the table: what is trained, with which optimizer, and how it is timed.

    ``steps`` training steps are timed together; ``settle`` ones before them, not timed, bring the
    contender's own weights back into the caches. ``seconds`` is what the timing may take.
    ``targets`` are the largest ratios to torch's default and to its fused optimizer.
    """

    name: str
    title: str
    network: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    inner: type[torch.optim.Optimizer]
    options: dict[str, Any]
    targets: tuple[float, float]
    steps: int
    settle: int
    seconds: float

    def build(self) -> nn.Module:
        """Build the network, with the same weights each time."""
        torch.manual_seed(0)
        return self.network()

    def batch_of_data(self) -> tuple[Tensor, Tensor]:
        """Make inputs and targets, the same each time."""
        torch.manual_seed(1)
        return self.data(self.batch)


def mlp() -> nn.Module:
    """Perceptron of the paper's MNIST experiments."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.shortcut(x))


def resnet(width: int, blocks: tuple[int, ...]) -> nn.Module:
    """ResNet for images of 32×32: a 3×3 stem, and stages that double the width."""
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not index else 1))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers, *head)


class Transformer(nn.Module):
    """Causal language model over bytes, without dropout, whose cost would hide the optimizer's."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.randn(SEQUENCE, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.token(tokens) + self.place, mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)


def vectors(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 784), torch.randint(CLASSES, (batch,))


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))


def texts(batch: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch, SEQUENCE + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}

CASES = [
    Case(
        name="mlp", title="784-1024-1024-10, Adam", network=mlp, data=vectors, batch=256,
        inner=torch.optim.Adam, options={"lr": 1e-3}, targets=(0.90, 1.05),
        steps=3, settle=1, seconds=80,
    ),
    Case(
        name="resnet-10", title="ResNet-10, width 16, SGD",
        network=lambda: resnet(16, (1, 1, 1, 1)), data=images, batch=128,
        inner=torch.optim.SGD, options=SGD, targets=(1.03, 1.03),
        steps=1, settle=0, seconds=80,
    ),
    Case(
        name="resnet-34", title="ResNet-34, SGD",
        network=lambda: resnet(64, (3, 4, 6, 3)), data=images, batch=32,
        inner=torch.optim.SGD, options=SGD, targets=(1.03, 1.03),
        steps=1, settle=0, seconds=140,
    ),
    Case(
        name="transformer", title="Transformer, AdamW", network=Transformer, data=texts, batch=32,
        inner=torch.optim.AdamW, options={"lr": 1e-3}, targets=(1.03, 1.03),
        steps=1, settle=0, seconds=80,
    ),
]  # fmt: skip
