"""Runs in which one network learns several tasks in turn."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from neuvar.continual import EWC, MAS, SI, Penalty, Stream, Task, permuted_tasks, split_tasks
from neuvar.data import Dataset, normalization
from neuvar.data.batches import Normalization
from neuvar.experiments.run_spec import Tasks
from neuvar.experiments.runner import EVALUATION_BATCH, RunContext, first_images
from neuvar.models import mlp, multi_head
from neuvar.models.perceptron import MultiHead
from neuvar.train import evaluate, fit

WIDTH = 1024


def run_tasks(run: Tasks, context: RunContext) -> dict[str, Any]:
    """Learn the tasks in turn; after each, measure the accuracy on all tasks learned so far."""
    outer = context.resume(run)
    data = context.dataset(run)
    stream = _stream(run, data)
    network = _network(run, stream, data.train.images[0].numel())
    learner = TaskLearner(run, context, network, normalization(data.train.images))
    accuracies = [list(row) for row in outer.get("accuracies", [])]
    losses = list(outer.get("losses", []))
    status, reason = "finished", None
    for task in stream.tasks[len(accuracies) :]:
        fitted = learner.learn(task, len(stream))
        status, reason = fitted.status, fitted.reason
        if not fitted.finished:
            break
        if learner.penalty is not None and task is not stream[-1]:
            learner.consolidate(task)
        losses += fitted.curves["loss"]
        accuracies.append([learner.accuracy(seen) for seen in stream.tasks[: task.number + 1]])
        if context.checkpoint is not None:
            context.checkpoint.outer |= {"accuracies": accuracies, "losses": losses}
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
        parameters=sum(p.numel() for p in learner.model.parameters()),
    )


def _penalty(run: Tasks) -> Penalty | None:
    if run.penalty == "ewc":
        return EWC(run.strength, fisher=run.fisher, seed=run.seed)
    if run.penalty == "si":
        return SI(run.strength)
    if run.penalty == "mas":
        return MAS(run.strength)
    if run.penalty:
        raise ValueError(f"penalty must be ewc, si, mas or empty, got {run.penalty!r}")
    return None


def _stream(run: Tasks, data: Dataset) -> Stream:
    if run.stream == "permuted":
        return permuted_tasks(data, run.tasks, seed=run.seed)
    if run.stream != "split":
        raise ValueError(f"stream must be permuted or split, got {run.stream!r}")
    stream = split_tasks(data)
    if not 1 <= run.tasks <= len(stream):
        raise ValueError(f"tasks must be from 1 to {len(stream)}, got {run.tasks}")
    return stream[: run.tasks]


def _network(run: Tasks, stream: Stream, pixels: int) -> nn.Module:
    """The paper's fully connected network, with one head per task if the tasks need that."""
    if run.model != "mlp":
        raise ValueError(f"model must be mlp for a run of tasks, got {run.model!r}")
    width = run.width or WIDTH
    if len(stream.outputs) == 1:
        return mlp((pixels, width, width, stream.outputs[0]), seed=run.seed)
    return multi_head((pixels, width, width, stream.outputs), seed=run.seed)


def _curves(accuracies: list[list[float]], losses: list[float]) -> dict[str, list[float]]:
    """Each metric after each task."""
    return {
        "first_task": [row[0] for row in accuracies],
        "mean_accuracy": [statistics.fmean(row) for row in accuracies],
        "new_task": [row[-1] for row in accuracies],
        "loss": losses,
    }


class TaskLearner:
    """A network that learns one task after another."""

    def __init__(
        self, run: Tasks, context: RunContext, network: nn.Module, normalize: Normalization
    ) -> None:
        self._run, self._context, self._normalize = run, context, normalize
        self.model, self.penalty = context.prepare(network, run), _penalty(run)
        self._optimizer: torch.optim.Optimizer | None = None

    def learn(self, task: Task, tasks: int) -> Any:
        """Train on a task."""
        run, context, seed = self._run, self._context, self._run.seed * 1000 + task.number
        if isinstance(self.model, MultiHead):
            self.model.select(task.head)
        if self._optimizer is None or not run.keep_optimizer:
            own = run.seed if run.keep_optimizer else seed
            self._optimizer = context.optimizer(run, self.model, seed=own)
        return fit(
            self.model,
            context.batches(task.train, run, run.batch, seed=seed, normalize=self._normalize),
            self._optimizer,
            epochs=run.epochs,
            penalty=self.penalty,
            clip=run.clip,
            accumulate=run.accumulate,
            precision=run.precision,
            checkpoint=context.checkpoint,
            progress=lambda fraction: context.report((task.number + fraction) / tasks),
        )

    def consolidate(self, task: Task) -> None:
        """Add a learned task to the penalty."""
        assert self.penalty is not None
        run, train = self._run, task.train
        split = first_images(train, min(run.fisher_images, len(train)), "fisher_images")
        size = run.batch if run.fisher == "squared_batch_mean" else EVALUATION_BATCH
        self.penalty.after_task(self.model, self._evaluated(split, size))

    def accuracy(self, task: Task) -> float:
        """Test accuracy on a task."""
        head: dict[str, Any] = {"task": task.head} if isinstance(self.model, MultiHead) else {}
        batches = self._evaluated(task.test, EVALUATION_BATCH)
        return evaluate(self.model, batches, precision=self._run.precision, **head).accuracy

    def _evaluated(self, split: Any, size: int) -> Any:
        return self._context.batches(
            split, self._run, size, shuffle=False, normalize=self._normalize
        )
