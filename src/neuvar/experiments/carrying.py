"""Carry out one run, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuvar.experiments.runs import Run, Training

if TYPE_CHECKING:
    import torch

    from neuvar.train import Checkpoint


def carry_out(
    run: Run,
    *,
    device: str | torch.device = "cpu",
    data: str | Path | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    progress: Callable[[float], None] | None = None,
    writer: Any = None,
) -> dict[str, Any]:
    """Train as a run says and measure what it asks for.

    A run that diverges has a status that says so. With a checkpoint, a run that was interrupted
    goes on and gives the very numbers that it would have given; the file is left in place.

    Args:
        run: what to do.
        device: where.
        data: folder with data sets, looked into before the cache; see :func:`neuvar.data.load`.
        checkpoint: a file to save to once a minute, and to go on from if it is there.
        progress: is called with the share of the run that is done.
        writer: has TensorBoard's ``add_scalar(tag, value, step)``.

    Returns:
        What is recorded: status, reason, curves, last and best values, realised rate of wrong
        labels, seeds, seconds; all of it JSON.

    >>> from neuvar.experiments.runs import Training
    >>> run = Training(data="mnist-excerpt", images=500, test_images=100, width=32, epochs=2)
    >>> found = carry_out(run)
    >>> found["status"], len(found["curves"]["test_accuracy"])
    ('finished', 2)
    """
    # Here, not above: ``neuvar list`` needs the experiments but not torch.
    import torch
    import torch._dynamo  # the first optimizer would import it, on the time of the run

    from neuvar.experiments.place import Place
    from neuvar.experiments.sequence import carry_out_tasks
    from neuvar.experiments.training import carry_out_training
    from neuvar.train import Checkpoint

    if isinstance(checkpoint, (str, Path)):
        checkpoint = Checkpoint(checkpoint)
    place = Place(torch.device(device), data, checkpoint, progress, writer)
    if isinstance(run, Training):
        return carry_out_training(run, place)
    return carry_out_tasks(run, place)
