"""Any iterable of batches, such as a DataLoader, as the epochs of a training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar._batches import check_iterable, describe, loader_generators

ACCEPTED = "a neuvar.data.Batches, a DataLoader or another iterable of batches"


class Passes:
    """An iterable of batches with one pass per epoch.

    Its batches have no numbers. So a training can be saved and resumed only between two epochs,
    with the states of all generators that the order may depend on: torch's, NumPy's and Python's
    global ones, and those of a ``DataLoader`` and its samplers.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if isinstance(batches, (tuple, list)) and batches and all(map(torch.is_tensor, batches)):
            raise ValueError(
                "batches must hold one tuple (inputs, labels) per batch, got "
                f"{describe(batches)}; put the tensors into a DataLoader with TensorDataset"
            )
        check_iterable("batches", batches, ACCEPTED)
        self.batches = batches
        self._generators = loader_generators(batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """One pass; calls ``set_epoch`` of samplers that have it, as for distributed training."""
        assert start == 0, "a pass can only start at its first batch"
        for name in ("sampler", "batch_sampler"):
            set_epoch = getattr(getattr(self.batches, name, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(number)
        return map(_as_tuple, self.batches)

    def refuse_checkpoint(self) -> None:
        """Refuse a loader whose workers keep random state that cannot be saved."""
        if getattr(self.batches, "persistent_workers", False):
            raise ValueError(
                "batches must be a DataLoader with persistent_workers=False if there is a "
                "checkpoint: the random state of its workers cannot be saved"
            )

    def state_dict(self) -> dict[str, Any]:
        """States of the generators except torch's global ones, as plain numbers and tensors."""
        # Datasets may draw from NumPy's global generator; we only save its state.
        _, words, *others = np.random.get_state(legacy=True)  # noqa: NPY002
        return {
            "generators": [generator.get_state() for generator in self._generators],
            "numpy": [torch.from_numpy(np.asarray(words, np.int64)), *others],
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to saved states."""
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        words, *others = state["numpy"]
        np.random.set_state(("MT19937", words.numpy().astype(np.uint32), *others))  # noqa: NPY002
        random.setstate(state["python"])


def length(batches: Any) -> int | None:
    """Batches per epoch, or None if unknown, as for an ``IterableDataset``."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def _as_tuple(batch: Any) -> tuple[Tensor, ...]:
    """A batch as a tuple that begins with inputs and labels."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and all(map(torch.is_tensor, batch[:2])):
        return tuple(batch)
    raise ValueError(
        "batches must give tuples that begin with a tensor of inputs and a tensor of labels, got "
        f"{describe(batch)}; for a DataLoader, let its collate_fn return (inputs, labels)"
    )
