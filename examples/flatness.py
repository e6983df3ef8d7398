"""How flat are networks that were trained with and without NVRM, and what does that prove?

    python examples/flatness.py [--seeds 5] [--epochs 30] [--proof] [--out out/flatness.json]

Trains 784-1024-1024-10 with Adam and with NVRM-Adam, from the same weights and on the same batches,
and measures each: the largest b for a given δ, loss and accuracy over b, and whether the curvature
explains them. The images are the MNIST excerpt in the package. With --proof it also loads all of
MNIST, trains two epochs on it and bounds the error under noise: about ten minutes more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import neuvar
from neuvar.data import Split, load, mnist_excerpt
from neuvar.measures import curvature_check, generalization_gap
from neuvar.models import mlp

BATCH = 128
B = 0.05
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda model, seed: torch.optim.Adam(model.parameters(), lr=1e-3),
    "NVRM-Adam": lambda model, seed: neuvar.NVRMAdam(model, lr=1e-3, b=B, seed=seed),
    # For the proof: the weights stay closer to their initial values.
    "SGD": lambda model, seed: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "NVRM-SGD": lambda model, seed: neuvar.NVRMSGD(model, lr=0.01, momentum=0.9, b=B, seed=seed),
}
DELTA = 0.1
GRID = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1]
SCALES, PRIORS = [0.03, 0.05], [0.03, 0.05, 0.08]
"""Noise scales and standard deviations of the prior to choose from, fixed before training."""


def tensors(split: Split) -> tuple[Tensor, Tensor]:
    return split.images.flatten(1).float() / 255, split.labels


def train(name: str, data: tuple[Tensor, Tensor], *, epochs: int, seed: int) -> nn.Module:
    """Train from the seed's weights on the seed's batches."""
    x, y = data
    model = mlp(seed=seed)
    optimizer = OPTIMIZERS[name](model, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return model


def measure(model: nn.Module, data: Any, test: Any) -> dict[str, Any]:
    """All measures of one model."""
    largest = neuvar.largest_b(model, cross_entropy, data, delta=DELTA, draws=32, resolution=0.03)
    curve = neuvar.variability_curve(model, cross_entropy, test, b=GRID, draws=32)
    check = curvature_check(model, cross_entropy, data, b=0.001, draws=16)
    return {
        "gap": asdict(generalization_gap(model, cross_entropy, data, test)),
        "largest_b": asdict(largest),
        "curve": asdict(curve)["points"],
        "curvature": asdict(check),
    }


def prove(model: nn.Module, start: nn.Module, data: Any, test: Any) -> dict[str, Any]:
    """Bounds on the error under noise, with the prior around the weights before training."""
    best = neuvar.bounds.pac_bayes(model, data, b=SCALES, sigma=PRIORS, centre=start, draws=60)
    given = {"kl": best.bound.kl, "examples": best.bound.examples, "choices": len(PRIORS)}
    gap = generalization_gap(model, cross_entropy, data, test)
    return {
        "seeger": asdict(best),
        "mcallester": asdict(neuvar.bounds.mcallester_bound(best.upper, **given)),
        "variability": asdict(
            neuvar.bounds.variability_bound(best.clean, best.upper - best.clean, **given)
        ),
        "test_error": 1 - gap.test_accuracy.mean if gap.test_accuracy else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="networks per optimizer (default: 5)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of training (default: 30)")
    parser.add_argument(
        "--proof", action="store_true", help="also bound the error, on all of MNIST"
    )
    parser.add_argument("--out", type=Path, default=Path("out/flatness.json"), metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {"b": B, "delta": DELTA, "epochs": options.epochs, "runs": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    excerpt = mnist_excerpt()
    data, test = tensors(excerpt.train), tensors(excerpt.test)
    for seed in range(options.seeds):
        for name in ("Adam", "NVRM-Adam"):
            model = train(name, data, epochs=options.epochs, seed=seed)
            run = {"optimizer": name, "seed": seed} | measure(model, data, test)
            results["runs"].append(run)
            options.out.write_text(json.dumps(results) + "\n")
            low, high = run["largest_b"]["interval"]
            print(
                f"{name:<10} seed {seed}: test accuracy {run['gap']['test_accuracy']['mean']:.3f}, "
                f"largest b {run['largest_b']['b']:.4f} [{low:.4f}, {high:.4f}]",
                flush=True,
            )
    if options.proof:
        whole = load("mnist")
        data, test = tensors(whole.train), tensors(whole.test)
        results["proofs"] = []
        for name in ("SGD", "NVRM-SGD"):
            model = train(name, data, epochs=2, seed=0)
            proof = {"optimizer": name, "seed": 0} | prove(model, mlp(seed=0), data, test)
            results["proofs"].append(proof)
            options.out.write_text(json.dumps(results) + "\n")
            bound = proof["seeger"]["bound"]["value"]
            print(f"{name:<10}: error under noise at most {bound:.3f}", flush=True)


if __name__ == "__main__":
    main()
