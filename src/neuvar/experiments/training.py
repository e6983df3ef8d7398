"""Carry out a run of one network on one data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuvar.batchnorm import reestimate_batchnorm
from neuvar.data import Augmentation, Split, normalization
from neuvar.data.batches import Normalization
from neuvar.experiments.place import (
    EVALUATED_AT_ONCE,
    Place,
    first,
    optimizer_for,
    outcome,
)
from neuvar.experiments.runs import Training
from neuvar.labels import corrupt
from neuvar.measures import label_memorization, neural_variability
from neuvar.models import build
from neuvar.train import evaluate, fit

PERTURBED_DRAWS = 6
"""Perturbed networks whose accuracy is averaged for each scale of evaluation noise."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """The data of a run: images with the labels they are given and the labels they have."""

    train: Split
    true_labels: torch.Tensor
    held_out: Split | None
    test: Split
    classes: int
    normalize: Normalization | None
    noise_rate: float | None


def labelled(run: Training, place: Place) -> Labelled:
    """Make labels wrong as the run says, then set some images aside."""
    data = place.dataset(run)
    right, given, rate = data.train.labels, data.train.labels, None
    if run.label_noise:
        noise = corrupt(
            run.label_noise, right, run.noise_rate, classes=data.classes, seed=run.label_seed
        )
        given, rate = torch.as_tensor(noise.noisy), noise.rate
    if not 0 <= run.held_out < len(given):
        raise ValueError(f"held_out must be from 0 to {len(given) - 1}, got {run.held_out}")
    kept, images = len(given) - run.held_out, data.train.images
    return Labelled(
        train=Split(images[:kept], given[:kept]),
        true_labels=right[:kept],
        held_out=Split(images[kept:], given[kept:]) if run.held_out else None,
        test=data.test,
        classes=data.classes,
        normalize=None
        if run.normalize == "none"
        else normalization(images[:kept], mean=run.normalize),
        noise_rate=rate,
    )


def carry_out_training(run: Training, place: Place) -> dict[str, Any]:
    """Train and measure; returns what is recorded."""
    place.resume(run)
    data = labelled(run, place)
    shape = tuple(data.train.images.shape[1:])
    model = place.place(
        build(
            run.model,
            classes=data.classes,
            seed=run.seed,
            width=run.width or None,
            shape=shape if len(shape) == 3 else (1, *shape),
        ),
        run,
    )
    optimizer = optimizer_for(run, model, seed=run.seed)
    looks = _Looks(run, place, data)
    found = fit(
        model,
        place.batches(
            data.train,
            run,
            run.batch,
            seed=run.seed,
            normalize=data.normalize,
            augment=Augmentation() if run.augment else None,
        ),
        optimizer,
        epochs=run.epochs,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, run.drop_every)
        if run.drop_every
        else None,
        clip=run.clip,
        accumulate=run.accumulate,
        precision=run.precision,
        measure=looks.clean,
        measure_perturbed=looks.perturbed,
        checkpoint=place.checkpoint,
        progress=place.report,
        writer=place.writer,
    )
    end = looks.at_the_end(model) if found.finished else {}
    return outcome(
        found.status,
        found.reason,
        found.curves,
        seconds=place.seconds(),
        noise_rate=data.noise_rate,
        seeds={"run": run.seed, "labels": run.label_seed},
        parameters=sum(p.numel() for p in model.parameters()),
        **end,
    )


@dataclass
class _Looks:
    """The evaluations of a run."""

    run: Training
    place: Place
    data: Labelled

    def __post_init__(self) -> None:
        train = self.data.train
        self._looked_at = min(self.run.test_images or len(train), len(train))
        self._test = self._batches(self.data.test)
        self._train = self._batches(first(train, self._looked_at, "test_images"))
        self._held_out = self._batches(self.data.held_out) if self.data.held_out else None

    def _batches(self, split: Split) -> Any:
        return self.place.batches(
            split, self.run, EVALUATED_AT_ONCE, shuffle=False, normalize=self.data.normalize
        )

    def clean(self, model: nn.Module) -> dict[str, float]:
        """At the clean weights: test, training and held-out images."""
        test = evaluate(model, self._test, precision=self.run.precision)
        train = evaluate(model, self._train, precision=self.run.precision)
        found = {
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "train_accuracy": train.accuracy,
            "train_loss": train.loss,
        }
        if self._held_out is not None:
            held = evaluate(model, self._held_out, precision=self.run.precision)
            found |= {"held_out_accuracy": held.accuracy, "held_out_loss": held.loss}
        if self.run.label_noise:
            labels = label_memorization(
                train.predictions,
                clean=self.data.true_labels[: self._looked_at],
                noisy=self.data.train.labels[: self._looked_at],
            )
            found |= {
                "memorized": labels.noisy_memorized.value,
                "learned": labels.clean_learned.value,
            }
        return found

    def perturbed(self, model: nn.Module) -> dict[str, float]:
        """At the perturbed weights, as they stand after the last step."""
        test = evaluate(model, self._test, precision=self.run.precision)
        return {"test_accuracy_perturbed": test.accuracy}

    def at_the_end(self, model: nn.Module) -> dict[str, Any]:
        """What is measured once: under weight noise, and with new statistics."""
        found: dict[str, Any] = {}
        if self.run.eval_noise:
            found["under_noise"] = self._under_noise(model)
        if self.run.reestimate:
            reestimate_batchnorm(model, self._train)
            test = evaluate(model, self._test, precision=self.run.precision)
            found["reestimated"] = {"test_accuracy": test.accuracy}
        if self.place.writer is not None:
            self._write(found)
        return found

    def _write(self, found: dict[str, Any]) -> None:
        """Tell TensorBoard, too; there is one number for each scale of noise."""
        epochs, noisy = self.run.epochs, found.get("under_noise", {"scales": ()})
        for metric in ("test_accuracy", "expected_sharpness") if noisy["scales"] else ():
            for scale, value in zip(noisy["scales"], noisy[metric], strict=True):
                number = math.nan if value is None else value
                self.place.writer.add_scalar(f"{metric}_at_{scale:g}", number, epochs)
        if "reestimated" in found:
            value = found["reestimated"]["test_accuracy"]
            self.place.writer.add_scalar("test_accuracy_reestimated", value, epochs)

    def _under_noise(self, model: nn.Module) -> dict[str, Any]:
        """Test accuracy and rise of the training loss for each scale of noise."""
        accuracy, rise = [], []
        for scale in self.run.eval_noise:
            test, train = (
                neural_variability(
                    model, cross_entropy, s, b=scale, draws=PERTURBED_DRAWS, seed=self.run.seed
                )
                for s in (self._test, self._train)
            )
            assert test.accuracy is not None
            accuracy.append(test.accuracy.mean)
            rise.append(train.difference if math.isfinite(train.difference) else None)
        return {
            "scales": list(self.run.eval_noise),
            "test_accuracy": accuracy,
            "expected_sharpness": rise,
            "draws": PERTURBED_DRAWS,
        }
