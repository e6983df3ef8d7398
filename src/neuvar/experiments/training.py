"""Runs that train one network on one dataset, whose labels may be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar.batchnorm import reestimate_batchnorm
from neuvar.data import Augmentation, Dataset, Split, normalization
from neuvar.data.batches import Normalization
from neuvar.experiments.run_spec import Training
from neuvar.experiments.runner import EVALUATION_BATCH, RunContext
from neuvar.labels import corrupt
from neuvar.measures import label_memorization, neural_variability
from neuvar.models import build
from neuvar.train import evaluate, fit

PERTURBED_DRAWS = 6
"""Noise draws that are averaged for each scale in ``eval_noise``."""


@dataclass(frozen=True, eq=False)
class NoisyDataset:
    """The data of a run, with the labels it trains on and the true ones."""

    train: Split
    true_labels: torch.Tensor
    held_out: Split | None
    test: Split
    normalize: Normalization | None
    noise_rate: float | None


def noisy_dataset(run: Training, data: Dataset) -> NoisyDataset:
    """Corrupt the labels, then set held-out images aside."""
    images, true, labels, rate = data.train.images, data.train.labels, data.train.labels, None
    if run.label_noise:
        noise = corrupt(
            run.label_noise, true, run.noise_rate, classes=data.classes, seed=run.label_seed
        )
        labels, rate = torch.as_tensor(noise.noisy), noise.rate
    if run.held_out >= len(labels):
        raise ValueError(f"held_out must be from 0 to {len(labels) - 1}, got {run.held_out}")
    kept = len(labels) - run.held_out
    scaling = None if run.normalize == "none" else normalization(images[:kept], mean=run.normalize)
    return NoisyDataset(
        train=Split(images[:kept], labels[:kept]),
        true_labels=true[:kept],
        held_out=Split(images[kept:], labels[kept:]) if run.held_out else None,
        test=data.test,
        normalize=scaling,
        noise_rate=rate,
    )


def run_training(run: Training, context: RunContext) -> dict[str, Any]:
    """Train and measure; returns what is recorded."""
    data = noisy_dataset(run, context.data)
    shape = tuple(data.train.images.shape[1:])
    network = build(
        run.model,
        classes=context.data.classes,
        seed=run.seed,
        width=run.width or None,
        shape=shape if len(shape) == 3 else (1, *shape),
    )
    model = context.prepare(network)
    optimizer = context.optimizer(model, seed=run.seed)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, run.drop_every) if run.drop_every else None
    evaluations = Evaluations(run, context, data)
    fitted = fit(
        model,
        context.batches(
            data.train,
            run.batch,
            seed=run.seed,
            normalize=data.normalize,
            augment=Augmentation() if run.augment else None,
        ),
        optimizer,
        schedule=steps,
        measure=evaluations.clean,
        measure_perturbed=evaluations.perturbed,
        progress=context.report,
        writer=context.writer,
        **context.fit_options,
    )
    return context.outcome(
        fitted.status,
        fitted.reason,
        fitted.curves,
        noise_rate=data.noise_rate,
        seeds={"run": run.seed, "labels": run.label_seed},
        parameters=sum(p.numel() for p in model.parameters()),
        **(evaluations.final(model) if fitted.finished else {}),
    )


class Evaluations:
    """The evaluations of a run: after each epoch, and at the end."""

    def __init__(self, run: Training, context: RunContext, data: NoisyDataset) -> None:
        self._run, self._writer, train = run, context.writer, data.train
        count = run.test_images or len(train)
        self._noisy, self._true = train.labels[:count], data.true_labels[:count]
        splits = {"test": data.test, "train": Split(train.images[:count], self._noisy)}
        if data.held_out is not None:
            splits["held_out"] = data.held_out
        self._batches = {
            name: context.batches(split, EVALUATION_BATCH, shuffle=False, normalize=data.normalize)
            for name, split in splits.items()
        }

    def clean(self, model: nn.Module) -> dict[str, float]:
        """Metrics at the clean weights, on test, training and held-out images."""
        metrics: dict[str, float] = {}
        results = {
            name: evaluate(model, batches, precision=self._run.precision)
            for name, batches in self._batches.items()
        }
        for name, result in results.items():
            metrics |= {f"{name}_accuracy": result.accuracy, f"{name}_loss": result.loss}
        if self._run.label_noise:
            predictions = results["train"].predictions
            labels = label_memorization(predictions, clean=self._true, noisy=self._noisy)
            metrics["memorized"] = labels.noisy_memorized.value
            metrics["learned"] = labels.clean_learned.value
        return metrics

    def perturbed(self, model: nn.Module) -> dict[str, float]:
        """Test accuracy at the perturbed weights of the last step."""
        test = evaluate(model, self._batches["test"], precision=self._run.precision)
        return {"test_accuracy_perturbed": test.accuracy}

    def final(self, model: nn.Module) -> dict[str, Any]:
        """Metrics of the trained network: under weight noise, and with new BatchNorm statistics."""
        run, test, train = self._run, self._batches["test"], self._batches["train"]
        metrics: dict[str, Any] = {}
        scalars: dict[str, float] = {}
        if run.eval_noise:
            noise: dict[str, Any] = {"draws": PERTURBED_DRAWS, "seed": run.seed}
            accuracy, rise = [], []
            for scale in run.eval_noise:
                tested = neural_variability(model, cross_entropy, test, b=scale, **noise)
                trained = neural_variability(model, cross_entropy, train, b=scale, **noise)
                assert tested.accuracy is not None
                accuracy.append(tested.accuracy.mean)
                rise.append(trained.difference)
                scalars[f"test_accuracy_at_{scale:g}"] = accuracy[-1]
                scalars[f"expected_sharpness_at_{scale:g}"] = rise[-1]
            metrics["under_noise"] = {
                "scales": list(run.eval_noise),
                "test_accuracy": accuracy,
                "expected_sharpness": [x if math.isfinite(x) else None for x in rise],
                "draws": PERTURBED_DRAWS,
            }
        if run.reestimate:
            reestimate_batchnorm(model, train)
            accuracy_again = evaluate(model, test, precision=run.precision).accuracy
            metrics["reestimated"] = {"test_accuracy": accuracy_again}
            scalars["test_accuracy_reestimated"] = accuracy_again
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, run.epochs)
        return metrics
