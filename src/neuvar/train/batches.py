"""Any iterable of batches, such as a DataLoader, as the epochs of a training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from neuvar.measures.batches import Generators


class Passes:
    """An iterable of batches, gone through once an epoch.

    Its batches cannot be asked for by number. So a training on it is saved, and resumes, only
    between two epochs, with the states of all generators that an order may be drawn from: torch's,
    NumPy's and Python's global ones, and those of a ``DataLoader`` and its samplers.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        _refuse_unusable(batches)
        self.batches = batches
        self._own = Generators(None, batches).own

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """One pass; samplers with ``set_epoch``, as for distributed training, are told its number.

        Args:
            number: of the epoch.
            start: always 0.
        """
        assert start == 0, "there is no way into the middle of a pass"
        for name in ("sampler", "batch_sampler"):
            tell = getattr(getattr(self.batches, name, None), "set_epoch", None)
            if callable(tell):
                tell(number)
        return map(_checked, self.batches)

    def refuse_checkpoint(self) -> None:
        """Refuse a loader whose next epoch depends on more than generators of this process."""
        if getattr(self.batches, "persistent_workers", False):
            raise ValueError(
                "batches must be a DataLoader with persistent_workers=False if there is a "
                "checkpoint: the random state of its workers cannot be saved"
            )

    def state_dict(self) -> dict[str, Any]:
        """States of the generators, torch's global ones left out, as plain numbers and tensors."""
        # What others draw from NumPy's global generator is kept, not used.
        _, words, *others = np.random.get_state(legacy=True)  # noqa: NPY002
        return {
            "generators": [generator.get_state() for generator in self._own],
            "numpy": [torch.from_numpy(np.asarray(words, np.int64)), *others],
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to saved states."""
        for generator, saved in zip(self._own, state["generators"], strict=True):
            generator.set_state(saved)
        words, *others = state["numpy"]
        np.random.set_state(("MT19937", words.numpy().astype(np.uint32), *others))  # noqa: NPY002
        random.setstate(state["python"])


def length(batches: Any) -> int | None:
    """Batches in an epoch, or None if that is not known, as for an ``IterableDataset``."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def _refuse_unusable(batches: Any) -> None:
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise ValueError("batches is a Dataset of single examples; put it into a DataLoader")
    if isinstance(batches, (tuple, list)) and batches and all(map(torch.is_tensor, batches)):
        raise ValueError(
            "batches must hold one tuple (inputs, labels) for each batch, got a "
            f"{type(batches).__name__} of tensors; put them into a DataLoader by TensorDataset"
        )
    unusable = isinstance(batches, (Tensor, Mapping, str, bytes))
    if unusable or not isinstance(batches, Iterable):
        raise ValueError(
            "batches must be a neuvar.data.Batches, a DataLoader or another iterable of batches, "
            f"got {type(batches).__name__}"
        )
    if isinstance(batches, Iterator):
        raise ValueError(
            f"batches is a {type(batches).__name__}, which can be gone through only once, but each "
            "epoch goes through it; give a DataLoader or a list of batches"
        )


def _checked(batch: Any) -> tuple[Tensor, ...]:
    """A batch as a tuple, if it begins with inputs and labels."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and all(map(torch.is_tensor, batch[:2])):
        return tuple(batch)
    got = type(batch).__name__
    if isinstance(batch, Mapping):
        got += f" with the keys {', '.join(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        got += f" of {', '.join(type(part).__name__ for part in batch[:4]) or 'nothing'}"
    raise ValueError(
        "batches must give tuples that begin with a tensor of inputs and a tensor of labels, got "
        f"a {got}; for a DataLoader, let its collate_fn return (inputs, labels)"
    )
