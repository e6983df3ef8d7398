"""Callbacks for Lightning.

Return ``neuvar.NVRMAdam(self, ...)`` from ``configure_optimizers``: training, evaluation,
checkpoints and resume need nothing else. :class:`NeuralVariability` adds ``b="auto"`` with gradient
accumulation and mixed precision, and logs b and δ. :class:`ObserveLabels` finds wrong labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from neuvar._batches import TARGET_KEYS
from neuvar.cleaning import LabelObserver
from neuvar.optim import NVRM

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError(
        'neuvar.integrations.lightning needs Lightning: pip install "neuvar[lightning]"'
    ) from missing

INDEX_KEYS = ("indices", "index")
"""Keys of the indices of examples in a batch that is a dict."""

Reader = Callable[[Any, Any], tuple[Any, Tensor, Any]]


class NeuralVariability(Callback):
    r"""Report losses to ``b="auto"``, and log b and δ.

    b and δ go to the loggers of the trainer and to the progress bar, as ``b`` and ``delta``. δ
    is what noise costs, :math:`L(\theta + \epsilon) - L(\theta)`, estimated from the gradient; see
    :meth:`neuvar.NVRM.noise_metrics`. It is computed every ``log_every_n_steps`` steps. With
    several optimizers, the names end in their number.

    Args:
        prog_bar: whether to show b and δ in the progress bar.

    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(callbacks=[NeuralVariability()], accelerator="cpu", logger=False)
    """

    def __init__(self, *, prog_bar: bool = True) -> None:
        self.prog_bar = prog_bar

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # With a gradient scaler, this loss has been multiplied by its scale.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None or scaler._scale is None else scaler._scale
        optimizers = trainer.optimizers
        for optimizer in optimizers:
            if isinstance(optimizer, NVRM) and (len(optimizers) == 1 or _awaits(optimizer)):
                optimizer.report_loss(loss, scale=scale)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # inside Lightning's own
        steps, optimizers = trainer.global_step, trainer.optimizers
        due = (steps // len(optimizers) + 1) % max(trainer.log_every_n_steps, 1) == 0
        if isinstance(optimizer, NVRM) and due:
            suffix = f"_{optimizers.index(optimizer)}" if len(optimizers) > 1 else ""
            values = {name + suffix: value for name, value in optimizer.noise_metrics().items()}
            pl_module.log_dict(values, prog_bar=self.prog_bar)


def _awaits(optimizer: NVRM) -> bool:
    """Whether one of several optimizers may use the gradients of the next backward pass.

    Others are frozen by ``toggle_optimizer``, or still hold the gradients of their last step.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    fresh = not any(p.grad is not None and p.grad.any() for p in params)
    return bool(params) and (fresh or optimizer.losses_reported > 0)


class ObserveLabels(Callback):
    """Give the logits of each training batch to a :class:`~neuvar.LabelObserver`.

    By default, ``training_step`` returns a dict with "loss" and "logits", and a batch is a tuple of
    inputs, labels and indices, or a dict with "indices" or "index", and with "labels", "label",
    "targets", "target" or "y". :class:`neuvar.IndexedDataset` adds the indices to a dataset.
    ``read`` reads anything else.

    The observer's state is saved in checkpoints and restored on resume. Call its ``label_issues()``
    after ``fit``.

    Args:
        observer: observer with the number of examples and classes.
        read: function of the output of ``training_step`` and the batch; returns indices, logits and
            labels.

    >>> observer = LabelObserver(examples=60_000, classes=10)
    >>> callback = ObserveLabels(observer)
    >>> other = ObserveLabels(observer, read=lambda out, batch: (batch[0], out["z"], batch[2]))
    """

    def __init__(self, observer: LabelObserver, read: Reader | None = None) -> None:
        self.observer, self.read = observer, read or read_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.observer.update(*self.read(outputs, batch))

    def state_dict(self) -> dict[str, Any]:
        return self.observer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.observer.load_state_dict(state_dict)


def read_step(outputs: Any, batch: Any) -> tuple[Any, Tensor, Any]:
    """Indices, logits and labels of a training step, where they are by default."""
    if not isinstance(outputs, Mapping) or "logits" not in outputs:
        raise ValueError(
            'ObserveLabels needs the logits: return {"loss": loss, "logits": logits} from '
            "training_step, or give it a function read(outputs, batch)"
        )
    if isinstance(batch, Mapping):
        indices = [batch[key] for key in INDEX_KEYS if key in batch]
        labels = [batch[key] for key in TARGET_KEYS if key in batch]
        if len(indices) == 1 and len(labels) == 1:
            return indices[0], outputs["logits"], labels[0]
    elif isinstance(batch, (tuple, list)) and len(batch) == 3:
        return batch[2], outputs["logits"], batch[1]
    raise ValueError(
        "ObserveLabels needs batches of inputs, labels and indices, or dicts with them; wrap the "
        "dataset in neuvar.IndexedDataset, or give ObserveLabels a function read(outputs, batch)"
    )
