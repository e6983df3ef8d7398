"""Weight noise and wrong labels in the Trainer of Hugging Face.

``Trainer(optimizers=(neuvar.NVRMAdamW(model, ...), None))`` needs nothing from here.
:class:`NVRMTrainer` adds ``b="auto"``, b and δ in the logs, and an observer of the labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuvar.cleaning import IndexedDataset, LabelObserver
from neuvar.optim import NVRM

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as missing:
    raise ImportError(
        'neuvar.integrations.huggingface needs transformers: pip install "neuvar[huggingface]"'
    ) from missing

INDEX = "index"
"""Key under which IndexedDataset puts the index of an example."""
OBSERVER_FILE = "label_observer.pt"
"""The observer's state in the folder of a checkpoint."""


class NVRMTrainer(Trainer):
    """Trainer with weight noise and an observer of labels.

    With another Trainer class: ``class MyTrainer(NVRMTrainer, Seq2SeqTrainer): ...``

    Args:
        *args: arguments of the Trainer.
        b: scale of the noise, or "auto", for the optimizer that the Trainer makes from its
            ``TrainingArguments``. By default this optimizer has no noise. The noise has the
            Trainer's seed.
        observer: gets the logits of each training example. Its indices are those of
            ``train_dataset``. It is saved in the Trainer's checkpoints.
        **kwargs: keyword arguments of the Trainer. If ``optimizers`` has an NVRM optimizer, leave
            out ``b``.
    """

    optimizer: Any
    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        b: float | str | None = None,
        observer: LabelObserver | None = None,
        **kwargs: Any,
    ) -> None:
        self.b, self.observer = b, observer
        self._noise: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        if b is not None and self.optimizer is not None:
            raise ValueError("b is for the Trainer's own optimizer; leave out b or optimizers")
        if observer is not None:
            self.train_dataset = IndexedDataset(self.train_dataset)
            self.add_callback(_SaveObserver(observer))

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer of the Trainer, with noise if b is given."""
        if self.optimizer is None and self.b is not None:
            noisy = self.model if model is None else model
            plain = super().create_optimizer(model)
            self.optimizer = NVRM(plain, model=noisy, b=self.b, seed=self.args.seed)
        return super().create_optimizer(model)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Compute the loss; in training, report it to the optimizer and logits to the observer."""
        indices, labels = inputs.pop(INDEX, None), inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and torch.is_grad_enabled():
            if (optimizer := self._nvrm()) is not None:
                optimizer.report_loss(loss)
            if self.observer is not None:
                if indices is None:
                    raise ValueError(f"the data collator must keep {INDEX!r} for the observer")
                logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
                self.observer.update(indices, logits.detach(), labels)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients; before they are clipped, measure b and δ for the logs."""
        loss: Tensor = super().training_step(*args, **kwargs)
        step, every = self.state.global_step + 1, max(self.state.logging_steps, 1)
        due = step % every == 0 or (step == 1 and self.args.logging_first_step)
        optimizer = self._nvrm()
        if optimizer is not None and due and self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            self._noise = optimizer.noise_metrics()
            self._noise["delta"] /= 1.0 if scaler is None else scaler.get_scale()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log b and δ with the training loss."""
        if "loss" in logs:
            logs |= self._noise
        super().log(logs, *args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; when resuming, also restore the observer."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if self.observer is not None and folder:
            state = torch.load(Path(folder) / OBSERVER_FILE, weights_only=True)
            self.observer.load_state_dict(state)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _nvrm(self) -> NVRM | None:
        """The NVRM optimizer, which Accelerate wraps."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer if isinstance(optimizer, NVRM) else None

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.observer is not None and INDEX not in self._signature_columns:
            self._signature_columns.append(INDEX)


class _SaveObserver(TrainerCallback):
    """Saves the observer in each checkpoint of the Trainer."""

    def __init__(self, observer: LabelObserver) -> None:
        self.observer = observer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.observer.save(folder / OBSERVER_FILE)
