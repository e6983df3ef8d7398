"""Evaluation mode inside a ``with`` block, with everything restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
    """Whether a module acts when its mode changes, for example merges adapters into weights."""
    return type(module).train is not nn.Module.train


@contextmanager
def clean_eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without weight noise; also restores attributes, buffers and generators."""
    # Evaluation may be random too, for example with dropout that is always on.
    generators = Generators(next((p.device for p in model.parameters()), None))
    with held_clean(model.parameters()):
        states = [_ModuleState(module) for module in model.modules()]
        keep_weights = any(map(_overrides_train, model.modules()))
        weights = [(p, local(p).clone()) for p in model.parameters()] if keep_weights else []
        try:
            with eval_mode(model):
                yield
        finally:
            generators.restore()
            for p, content in weights:
                local(p.data).copy_(content)
            for state in states:
                state.restore()


class _ModuleState:
    """Attributes and buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, Any] = dict(module.__dict__)
        self.buffers: dict[str, Tensor | None] = dict(module._buffers)
        self.contents = {n: b.clone() for n, b in module._buffers.items() if b is not None}

    def restore(self) -> None:
        """Restore the objects and their contents, and remove what ``forward`` has added."""
        present = self.module.__dict__
        for name in [name for name in present if name not in self.attributes]:
            del present[name]
        for name, value in self.attributes.items():
            if name != "training" and present.get(name) is not value:
                present[name] = value
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for name, content in self.contents.items():
            buffer = self.buffers[name]
            assert buffer is not None
            if not (buffer.is_meta or torch.equal(buffer, content)):
                buffer.data.copy_(content)
