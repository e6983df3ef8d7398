"""Carry out a run of one network through several tasks."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from neuvar.continual import EWC, MAS, SI, Penalty, Stream, Task, permuted_tasks, split_tasks
from neuvar.data import Dataset, normalization
from neuvar.data.batches import Normalization
from neuvar.experiments.place import EVALUATED_AT_ONCE, Place, first, optimizer_for, outcome
from neuvar.experiments.runs import Tasks
from neuvar.models import mlp, multi_head
from neuvar.models.perceptron import MultiHead
from neuvar.train import evaluate, fit

WIDTH = 1024


def penalty_for(run: Tasks) -> Penalty | None:
    """The penalty that a run asks for."""
    if run.penalty == "ewc":
        return EWC(run.strength, fisher=run.fisher, seed=run.seed)
    if run.penalty == "si":
        return SI(run.strength)
    if run.penalty == "mas":
        return MAS(run.strength)
    if run.penalty:
        raise ValueError(f"penalty must be ewc, si, mas or nothing, got {run.penalty!r}")
    return None


def stream_for(run: Tasks, data: Dataset) -> Stream:
    """The tasks that a run learns."""
    if run.stream == "permuted":
        return permuted_tasks(data, run.tasks, seed=run.seed)
    if run.stream == "split":
        found = split_tasks(data)
        if not 1 <= run.tasks <= len(found):
            raise ValueError(f"tasks must be from 1 to {len(found)}, got {run.tasks}")
        return found[: run.tasks]
    raise ValueError(f"stream must be permuted or split, got {run.stream!r}")


def network_for(run: Tasks, stream: Stream, pixels: int) -> nn.Module:
    """The paper's fully connected network, with a head for each task that needs one."""
    if run.model != "mlp":
        raise ValueError(f"model must be mlp for a run of tasks, got {run.model!r}")
    width = run.width or WIDTH
    if len(stream.outputs) == 1:
        return mlp((pixels, width, width, stream.outputs[0]), seed=run.seed)
    return multi_head((pixels, width, width, stream.outputs), seed=run.seed)


def carry_out_tasks(run: Tasks, place: Place) -> dict[str, Any]:
    """Learn the tasks in turn, looking at all that were learned after each."""
    outer = place.resume(run)
    data = place.dataset(run)
    stream, penalty = stream_for(run, data), penalty_for(run)
    model = place.place(network_for(run, stream, data.train.images[0].numel()), run)
    accuracies = [list(row) for row in outer.get("accuracies", [])]
    losses = list(outer.get("losses", []))
    pupil = _Pupil(run, place, model, penalty, normalization(data.train.images))
    status, reason = "finished", None
    for task in stream.tasks[len(accuracies) :]:
        found = pupil.learn(task, len(stream))
        status, reason = found.status, found.reason
        if not found.finished:
            break
        if penalty is not None and task is not stream[-1]:
            pupil.remember(task)
        losses += found.curves["loss"]
        accuracies.append([pupil.accuracy(seen) for seen in stream.tasks[: task.number + 1]])
        if place.checkpoint is not None:
            place.checkpoint.outer |= {"accuracies": accuracies, "losses": losses}
        if place.writer is not None:
            for name, values in _curves(accuracies, losses).items():
                place.writer.add_scalar(name, values[-1], task.number + 1)
    return outcome(
        status,
        reason,
        _curves(accuracies, losses),
        seconds=place.seconds(),
        accuracies=accuracies,
        noise_rate=None,
        seeds={"run": run.seed, "tasks": run.seed},
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _curves(accuracies: list[list[float]], losses: list[float]) -> dict[str, list[float]]:
    """Each metric after each task."""
    return {
        "first_task": [row[0] for row in accuracies],
        "mean_accuracy": [statistics.fmean(row) for row in accuracies],
        "new_task": [row[-1] for row in accuracies],
        "loss": losses,
    }


class _Pupil:
    """The network on its way through the tasks."""

    def __init__(
        self,
        run: Tasks,
        place: Place,
        model: nn.Module,
        penalty: Penalty | None,
        normalize: Normalization,
    ) -> None:
        self._run, self._place, self._model = run, place, model
        self._penalty, self._normalize = penalty, normalize
        self._optimizer: torch.optim.Optimizer | None = None

    def learn(self, task: Task, tasks: int) -> Any:
        run, place = self._run, self._place
        if isinstance(self._model, MultiHead):
            self._model.select(task.head)
        if self._optimizer is None or not run.keep_optimizer:
            seed = run.seed if run.keep_optimizer else run.seed * 1000 + task.number
            self._optimizer = optimizer_for(run, self._model, seed=seed)
        return fit(
            self._model,
            place.batches(
                task.train,
                run,
                run.batch,
                seed=run.seed * 1000 + task.number,
                normalize=self._normalize,
            ),
            self._optimizer,
            epochs=run.epochs,
            penalty=self._penalty,
            clip=run.clip,
            accumulate=run.accumulate,
            precision=run.precision,
            checkpoint=place.checkpoint,
            progress=lambda share: place.report((task.number + share) / tasks),
        )

    def remember(self, task: Task) -> None:
        """Let the penalty hold to the weights as they are now."""
        assert self._penalty is not None
        train = task.train
        few = first(train, min(self._run.fisher_images, len(train)), "fisher_images")
        size = self._run.batch if self._run.fisher == "squared_batch_mean" else EVALUATED_AT_ONCE
        self._penalty.after_task(
            self._model,
            self._place.batches(few, self._run, size, shuffle=False, normalize=self._normalize),
        )

    def accuracy(self, task: Task) -> float:
        batches = self._place.batches(
            task.test, self._run, EVALUATED_AT_ONCE, shuffle=False, normalize=self._normalize
        )
        head: dict[str, Any] = {"task": task.head} if isinstance(self._model, MultiHead) else {}
        return evaluate(self._model, batches, precision=self._run.precision, **head).accuracy
