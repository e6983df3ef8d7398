"""Runs in which one network learns several tasks in turn."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from torch import nn

from neuvar.continual import EWC, MAS, SI, Penalty, Stream, permuted_tasks, split_tasks
from neuvar.data import Split, normalization
from neuvar.experiments.run_spec import Tasks
from neuvar.experiments.runner import EVALUATION_BATCH, RunContext
from neuvar.models import mlp, multi_head
from neuvar.models.perceptron import MultiHead
from neuvar.train import evaluate, fit

WIDTH = 1024


def run_tasks(run: Tasks, context: RunContext) -> dict[str, Any]:
    """Learn the tasks in turn; after each, measure the accuracy on all tasks learned so far."""
    stream, network, penalty = _setup(run, context)
    model = context.prepare(network)
    normalize = normalization(context.data.train.images)
    saved: dict[str, Any] = context.checkpoint.outer if context.checkpoint else {}
    accuracies = [list(row) for row in saved.get("accuracies", [])]
    losses = list(saved.get("losses", []))
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
        saved |= {"accuracies": accuracies, "losses": losses}
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
    """The tasks, the paper's fully connected network with the heads that they need, the penalty."""
    if run.model != "mlp":
        raise ValueError(f"model must be mlp for a run of tasks, got {run.model!r}")
    if run.stream == "permuted":
        stream = permuted_tasks(context.data, run.tasks, seed=run.seed)
    elif run.stream == "split":
        stream = split_tasks(context.data)
        if run.tasks > len(stream):
            raise ValueError(f"tasks must be from 1 to {len(stream)}, got {run.tasks}")
        stream = stream[: run.tasks]
    else:
        raise ValueError(f"stream must be permuted or split, got {run.stream!r}")
    layers = [context.data.train.images[0].numel(), *[run.width or WIDTH] * 2]
    network: nn.Module
    if len(stream.outputs) == 1:
        network = mlp([*layers, *stream.outputs], seed=run.seed)
    else:
        network = multi_head([*layers, stream.outputs], seed=run.seed)
    penalty: Penalty | None = None
    if run.penalty == "ewc":
        penalty = EWC(run.strength, fisher=run.fisher, seed=run.seed)
    elif run.penalty in ("si", "mas"):
        penalty = (SI if run.penalty == "si" else MAS)(run.strength)
    elif run.penalty:
        raise ValueError(f"penalty must be ewc, si, mas or empty, got {run.penalty!r}")
    return stream, network, penalty


def _curves(accuracies: list[list[float]], losses: list[float]) -> dict[str, list[float]]:
    """Each metric after each task."""
    return {
        "first_task": [row[0] for row in accuracies],
        "mean_accuracy": [statistics.fmean(row) for row in accuracies],
        "new_task": [row[-1] for row in accuracies],
        "loss": losses,
    }
