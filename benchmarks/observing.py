"""What an observer of labels and an average of weights add to a training step.

Run it as ``python benchmarks/observing.py [--rounds N]``. The contenders take turns; each ratio is
the median over rounds, with its quartiles. The network is 784-1024-1024-10, the batch 256.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

# Threads that spin while they wait slow everything down as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from neuvar import LabelObserver, NVRMAdam

EXAMPLES, CLASSES, BATCH, TURN = 60_000, 10, 256, 5


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    return nn.Sequential(*layers)


def training() -> dict[bool, Callable[[], float]]:
    """Seconds of one step of NVRM-Adam, by whether it is observed.

    Both are steps of one network: two networks of the same kind differ by two percent, depending on
    where their weights lie in memory.
    """
    net, observer = network(), LabelObserver(EXAMPLES, CLASSES)
    optimizer = NVRMAdam(net, lr=1e-3, b=0.05)
    inputs, labels = torch.rand(EXAMPLES // 60, 784), torch.arange(EXAMPLES) % CLASSES
    order = torch.Generator().manual_seed(0)

    def turn(observed: bool) -> float:
        begin = time.perf_counter()
        for _ in range(TURN):
            i = torch.randint(EXAMPLES, (BATCH,), generator=order)
            logits = net(inputs[i % len(inputs)])
            if observed:
                observer.update(i, logits, labels[i])
            optimizer.zero_grad()
            cross_entropy(logits, labels[i]).backward()
            optimizer.step()
        return (time.perf_counter() - begin) / TURN

    return {observed: functools.partial(turn, observed) for observed in (False, True)}


def averaging(*, kind: str) -> Callable[[], float]:
    """Seconds of one update of an EMA, of a network trained in one of three ways."""
    net = network()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    if kind == "Adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = NVRMAdam(net if kind == "NVRM" else net.parameters(), lr=1e-3, b=0.05)
    inputs, labels = torch.rand(BATCH, 784), torch.arange(BATCH) % CLASSES

    def turn() -> float:
        optimizer.zero_grad()
        cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        begin = time.perf_counter()
        if kind == "NVRM, denoised()":
            with optimizer.denoised():
                average.update_parameters(net)
        else:
            average.update_parameters(net)
        return time.perf_counter() - begin

    return turn


def compare(base: Callable[[], float], other: Callable[[], float], rounds: int) -> str:
    for turn in (base, other):
        turn()
    pairs = []
    for k in range(rounds):
        first, second = (base, other) if k % 2 else (other, base)
        times = first(), second()
        pairs.append(times if k % 2 else times[::-1])
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    seconds = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
    return (
        f"{middle:.3f} [{low:.3f}, {high:.3f}]  ({seconds[0]:.2f} ms and {seconds[1]:.2f} ms, "
        f"{rounds} rounds)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    step = training()
    print("step without an observer, to itself:   ", compare(step[False], step[False], rounds))
    print("step with an observer, to one without: ", compare(step[False], step[True], rounds))
    adam = averaging(kind="Adam")
    for kind in ("NVRM", "NVRM, denoised()"):
        print(f"update of an EMA, {kind}, to Adam: ", compare(adam, averaging(kind=kind), rounds))


if __name__ == "__main__":
    main()
