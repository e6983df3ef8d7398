"""Train and measure one run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, and the run's time would include that
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuvar._eval_mode import clean_eval_mode
from neuvar._validate import one_of, returned
from neuvar.batchnorm import reestimate_batchnorm
from neuvar.continual import PENALTIES, STREAMS, Penalty, Stream
from neuvar.data import (
    LOADERS,
    NAMES,
    Augmentation,
    Batches,
    Dataset,
    Normalization,
    Split,
    load,
    normalization,
)
from neuvar.experiments.run_spec import Run, Tasks, Training
from neuvar.labels import KINDS, corrupt
from neuvar.measures import label_memorization, neural_variability
from neuvar.models import NETWORKS, MultiHead, build, multi_head
from neuvar.noise import FAMILIES
from neuvar.train import OPTIMIZERS, Checkpoint, evaluate, fit, make_optimizer

EVALUATION_BATCH = 500
WIDTH = 1024
"""Default number of units in each hidden layer of a network with several heads."""
PERTURBED_DRAWS = 6
"""Noise draws that are averaged for each scale in ``eval_noise``."""
LOWER_IS_BETTER = ("loss", "memorized")
"""Suffixes of metrics whose best value is the lowest."""


def run_one(
    run: Run,
    *,
    device: str | torch.device = "cpu",
    data: str | Path | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    progress: Callable[[float], None] | None = None,
    writer: Any = None,
) -> dict[str, Any]:
    """Train one run and return its record.

    Resumes if the checkpoint file exists, with the same numbers as an uninterrupted run. The file
    is not removed.

    Args:
        run: a :class:`Training` or :class:`Tasks`.
        device: where the network is trained.
        data: folder with datasets, searched before the cache; see :func:`neuvar.data.load`.
        checkpoint: a file to save to once a minute.
        progress: called with the fraction of the run that is done, first before the training.
        writer: an object with TensorBoard's ``add_scalar(tag, value, step)``.

    Returns:
        A JSON object: status ("finished" or "diverged"), reason, curves, last and best values,
        realized rate of wrong labels, seeds, seconds.

    >>> from neuvar.experiments import Training
    >>> run = Training(data="mnist-excerpt", images=500, test_images=100, width=32, epochs=2)
    >>> outcome = run_one(run)
    >>> outcome["status"], len(outcome["curves"]["test_accuracy"])
    ('finished', 2)
    """
    start = time.perf_counter()
    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    if checkpoint is not None:
        # Precision is not part of the key, but a run must not change it halfway.
        identity = {"key": run.key, "precision": run.precision}
        if not checkpoint.read():
            checkpoint.outer = identity
        elif not identity.items() <= checkpoint.outer.items():
            raise ValueError(
                f"{checkpoint.path} is the checkpoint of another run, or of this one in another "
                "precision; remove it"
            )
        start -= float(checkpoint.outer.get("seconds", 0.0))
    if progress is not None:
        progress(float(checkpoint.outer.get("done", 0.0)) if checkpoint else 0.0)
    whole = load(run.data, folder=data)
    splits = []
    for split, field in ((whole.train, "images"), (whole.test, "test_images")):
        count = getattr(run, field) or len(split)
        if count > len(split):
            raise ValueError(f"{field} must be from 0 to {len(split)}, got {count}")
        splits.append(Split(split.images[:count], split.labels[:count]))
    dataset = replace(whole, train=splits[0], test=splits[1])
    context = RunContext(run, dataset, torch.device(device), start, checkpoint, progress, writer)
    return run_training(run, context) if isinstance(run, Training) else run_tasks(run, context)


def check_names(runs: Iterable[Run]) -> None:
    """Check the names of all parts: networks, datasets, optimizers and so on."""
    known = {
        "data": [*dict.fromkeys([*NAMES, *LOADERS])],
        "model": [*NETWORKS],
        "optimizer": [*OPTIMIZERS],
        "noise": [*FAMILIES],
        "label_noise": [*KINDS],
        "stream": [*STREAMS],
        "penalty": [*PENALTIES],
    }
    for run in runs:
        for field, names in known.items():
            if name := getattr(run, field, ""):
                one_of(field, name, names)


@dataclass(frozen=True)
class RunContext:
    """The arguments of :func:`run_one`, with the data loaded, and what both kinds of runs share."""

    run: Run
    data: Dataset
    device: torch.device
    start: float  # moved back by the time that the run took before it was interrupted
    checkpoint: Checkpoint | None = None
    progress: Callable[[float], None] | None = None
    writer: Any = None

    def report(self, fraction: float, done: int = 0, of: int = 1) -> None:
        """Report the finished fraction of a part of the run, after ``done`` of ``of`` parts."""
        total = (done + fraction) / of
        if self.checkpoint is not None:
            self.checkpoint.outer |= {"seconds": time.perf_counter() - self.start, "done": total}
        if self.progress is not None:
            self.progress(total)

    def network(self, classes: int) -> nn.Module:
        """The network of the run, with this number of outputs."""
        image = self.data.test.images[:1]
        image = image if image.dim() == 4 else image[:, None]
        model = build(
            self.run.model,
            classes=classes,
            seed=self.run.seed,
            width=self.run.width or None,
            shape=image.shape[1:],
        )
        with clean_eval_mode(model), torch.no_grad():
            scores = model(image.float())
        function = f'the network of NETWORKS["{self.run.model}"]'
        returned(function, scores, Tensor, "tensor")
        if scores.shape != (1, classes):
            raise ValueError(
                f"{function} must return {classes} scores for each image, "
                f"got the shape {tuple(scores.shape)} for one image"
            )
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move a network to the device; set its memory format and compile it if the run says so."""
        model = model.to(self.device)
        if self.run.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.run.compile:
            model.compile()
        return model

    def batches(self, split: Split, size: int, **options: Any) -> Batches:
        """Batches on the device, in the memory format of the run."""
        kind = ChannelsLast if self.run.channels_last else Batches
        return kind(split, size, device=self.device, **options)

    def optimizer(self, model: nn.Module, *, seed: int) -> torch.optim.Optimizer:
        """The optimizer of the run."""
        run = self.run
        return make_optimizer(
            run.optimizer,
            model,
            lr=run.lr,
            momentum=run.momentum,
            weight_decay=run.weight_decay,
            b="auto" if run.auto_b else run.b,
            noise=run.noise,
            rho=run.rho,
            seed=seed,
        )

    @property
    def fit_options(self) -> dict[str, Any]:
        """What both kinds of runs pass to :func:`neuvar.train.fit`."""
        names = ("epochs", "clip", "accumulate", "precision")
        return {name: getattr(self.run, name) for name in names} | {"checkpoint": self.checkpoint}

    def outcome(
        self, status: str, reason: str | None, curves: dict[str, list[float]], **others: Any
    ) -> dict[str, Any]:
        """What is recorded of a run: six significant digits, and None for what is not finite."""
        rounded = {
            name: [float(f"{x:.6g}") if math.isfinite(x) else None for x in values]
            for name, values in curves.items()
        }
        finite = {n: [x for x in v if x is not None] for n, v in rounded.items()}
        best = {n: (min if n.endswith(LOWER_IS_BETTER) else max)(v) for n, v in finite.items() if v}
        return {
            "status": status,
            "reason": reason,
            "curves": rounded,
            "last": {name: values[-1] for name, values in rounded.items() if values},
            "best": best,
            "seconds": round(time.perf_counter() - self.start, 2),
        } | others


class ChannelsLast(Batches):
    """Batches with images in the channels-last memory format."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Batches of one epoch."""
        batches = super().epoch(number, start=start)
        return ((x.contiguous(memory_format=torch.channels_last), *y) for x, *y in batches)


@dataclass(frozen=True, eq=False)
class NoisyDataset:
    """The data of a run, with the labels it trains on and the true ones."""

    train: Split
    true_labels: Tensor
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
    model = context.prepare(context.network(context.data.classes))
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


def run_tasks(run: Tasks, context: RunContext) -> dict[str, Any]:
    """Learn the tasks in turn; after each, measure the accuracy on all tasks learned so far."""
    stream, network, penalty = _setup(run, context)
    model = context.prepare(network)
    normalize = normalization(context.data.train.images)
    saved: dict[str, Any] = context.checkpoint.outer if context.checkpoint else {}
    accuracies: list[list[float]] = saved.setdefault("accuracies", [])
    losses: list[float] = saved.setdefault("losses", [])
    batches_in_order: Any = partial(context.batches, shuffle=False, normalize=normalize)
    status, reason, optimizer = "finished", None, None
    for task in stream.tasks[len(accuracies) :]:
        train, seed = task.train, run.seed * 1000 + task.number
        if isinstance(model, MultiHead):
            model.select(task.head)
        if optimizer is None or not run.keep_optimizer:
            optimizer = context.optimizer(model, seed=run.seed if run.keep_optimizer else seed)
        fitted = fit(
            model,
            context.batches(train, run.batch, seed=seed, normalize=normalize),
            optimizer,
            penalty=penalty,
            progress=partial(context.report, done=task.number, of=len(stream)),
            **context.fit_options,
        )
        status, reason = fitted.status, fitted.reason
        if not fitted.finished:
            break
        if penalty is not None and task is not stream[-1]:
            count = run.fisher_images or len(train)
            split = Split(train.images[:count], train.labels[:count])
            size = run.batch if run.fisher == "squared_batch_mean" else EVALUATION_BATCH
            penalty.after_task(model, batches_in_order(split, size))
        row = []
        for seen in stream.tasks[: task.number + 1]:
            head: dict[str, Any] = {"task": seen.head} if isinstance(model, MultiHead) else {}
            test = batches_in_order(seen.test, EVALUATION_BATCH)
            row.append(evaluate(model, test, precision=run.precision, **head).accuracy)
        accuracies.append(row)
        losses += fitted.curves["loss"]
        if context.writer is not None:
            for name, values in _curves(accuracies, losses).items():
                context.writer.add_scalar(name, values[-1], task.number + 1)
    return context.outcome(
        status,
        reason,
        _curves(accuracies, losses),
        accuracies=accuracies,
        noise_rate=None,
        seeds={"run": run.seed, "tasks": run.seed},
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _setup(run: Tasks, context: RunContext) -> tuple[Stream, nn.Module, Penalty | None]:
    """The tasks, a network with the heads that they need, and the penalty."""
    make_stream = STREAMS[one_of("stream", run.stream, STREAMS)]
    stream = make_stream(context.data, run.tasks, seed=run.seed)
    returned(f'STREAMS["{run.stream}"]', stream, Stream, "neuvar.continual.Stream")
    network: nn.Module
    if len(stream.outputs) == 1:
        network = context.network(stream.outputs[0])
    elif run.model == "mlp":
        pixels, width = math.prod(context.data.train.images.shape[1:]), run.width or WIDTH
        network = multi_head([pixels, width, width, stream.outputs], seed=run.seed)
    else:
        raise ValueError(f"model must be mlp for tasks with several heads, got {run.model!r}")
    penalty = None
    if run.penalty:
        make = PENALTIES[one_of("penalty", run.penalty, PENALTIES)]
        penalty = make(run.strength, fisher=run.fisher, seed=run.seed)
        returned(f'PENALTIES["{run.penalty}"]', penalty, Penalty, "neuvar.continual.Penalty")
    return stream, network, penalty


def _curves(accuracies: list[list[float]], losses: list[float]) -> dict[str, list[float]]:
    """Each metric after each task."""
    return {
        "first_task": [row[0] for row in accuracies],
        "mean_accuracy": [statistics.fmean(row) for row in accuracies],
        "new_task": [row[-1] for row in accuracies],
        "loss": losses,
    }
