"""Weight noise and wrong labels in skorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from neuvar.cleaning import IndexedDataset, LabelObserver
from neuvar.optim import NVRM

try:
    from skorch import NeuralNet
except ImportError as missing:
    raise ImportError(
        'neuvar.integrations.skorch needs skorch: pip install "neuvar[skorch]"'
    ) from missing


class NVRMNet(NeuralNet):
    """Net that gives its modules to NVRM optimizers, so that evaluation uses clean weights.

    Combine it with another class of skorch: ``class Net(NVRMNet, NeuralNetClassifier): ...``, and
    choose the optimizer: ``Net(module, optimizer=neuvar.NVRMAdam, optimizer__b="auto")``. Other
    optimizers work as usual.

    Args:
        *args: arguments of the net.
        observer: gets the predictions for each training example. Its indices are those of the data
            given to ``fit``.
        **kwargs: keyword arguments of the net.
    """

    def __init__(self, *args: Any, observer: LabelObserver | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observer = observer

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> Any:
        """Get the arguments of an optimizer; an NVRM optimizer also gets the modules."""
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)
        kind = getattr(self, prefix)
        if isinstance(kind, type) and issubclass(kind, NVRM):
            parts = [getattr(self, f"{name}_") for name in (*self._modules, *self._criteria)]
            modules = [part for part in parts if isinstance(part, nn.Module)]
            kwargs["model"] = nn.ModuleList(modules)
        return args, kwargs

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss; in training, report it to ``b="auto"``."""
        loss: Tensor = super().get_loss(y_pred, y_true, *args, **kwargs)
        if loss.requires_grad:
            for optimizer in self._nvrm_optimizers():
                optimizer.report_loss(loss)
        return loss

    def train_step_single(self, batch: Any, **fit_params: Any) -> Any:
        """Compute gradients; report predictions to the observer."""
        if self.observer is None:
            return super().train_step_single(batch, **fit_params)
        (inputs, indices), labels = batch
        step = super().train_step_single((inputs, labels), **fit_params)
        scores = step["y_pred"][0] if isinstance(step["y_pred"], tuple) else step["y_pred"]
        probabilities = self._get_predict_nonlinearity()(scores.detach())
        logits = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
        self.observer.update(indices, logits, labels)
        return step

    def on_epoch_end(self, net: Any, *args: Any, **kwargs: Any) -> None:
        """Write b to the history."""
        super().on_epoch_end(net, *args, **kwargs)
        for optimizer in self._nvrm_optimizers():
            self.history.record("b", optimizer.param_groups[0]["b"])

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Get a data loader; for the observer, with the indices of training examples."""
        if training and self.observer is not None:
            dataset = _IndexedInputs(dataset)
        return super().get_iterator(dataset, training=training)

    def _nvrm_optimizers(self) -> list[NVRM]:
        """The NVRM optimizers, which Accelerate may have wrapped."""
        optimizers = [getattr(self, f"{name}_") for name in self._optimizers]
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        return [optimizer for optimizer in optimizers if isinstance(optimizer, NVRM)]


class _IndexedInputs(IndexedDataset):
    """Adds the index to the inputs, because skorch needs pairs; in a subset, that of the whole."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.dataset[index]
        data: Any = self.dataset
        while isinstance(data, Subset):
            index, data = int(data.indices[index]), data.dataset
        return (inputs, index), label
