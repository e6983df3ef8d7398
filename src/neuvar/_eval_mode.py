"""Evaluation mode inside a ``with`` block, with everything restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from neuvar._batches import Generators
from neuvar.optim.layout import local
from neuvar.optim.noisy_parameters import held_clean


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            if _overrides_train(module) and module.training != mode:
                module.train(mode)
        for module, mode in modes.items():
            module.training = mode


def _overrides_train(module: nn.Module) -> bool:
    """Whether a module does more when its mode changes, such as merge adapters into weights."""
    return type(module).train is not nn.Module.train


@contextmanager
def clean_eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without weight noise; also restores attributes, buffers and generators."""
    # Evaluation may be random too, for example with dropout that is always on.
    generators = Generators(next((p.device for p in model.parameters()), None))
    with held_clean(model.parameters()):
        restorers = [_restorer(module) for module in model.modules()]
        keep_weights = any(map(_overrides_train, model.modules()))
        weights = [(p, local(p).clone()) for p in model.parameters()] if keep_weights else []
        try:
            with eval_mode(model):
                yield
        finally:
            generators.restore()
            for p, content in weights:
                local(p.data).copy_(content)
            for restore in restorers:
                restore()


def _restorer(module: nn.Module) -> Callable[[], None]:
    """A function that restores a module's attributes and buffers to what they are now."""
    attributes, buffers = dict(module.__dict__), dict(module._buffers)
    contents = [(b, b.clone()) for b in buffers.values() if b is not None]

    def restore() -> None:
        present = module.__dict__
        for name in present.keys() - attributes.keys():  # added by ``forward``
            del present[name]
        for name, value in attributes.items():
            if name != "training" and present.get(name) is not value:
                present[name] = value
        module._buffers.clear()
        module._buffers.update(buffers)
        for buffer, content in contents:
            if not (buffer.is_meta or torch.equal(buffer, content)):
                buffer.data.copy_(content)

    return restore
