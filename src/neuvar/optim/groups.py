"""Parameter groups with and without noise."""

from __future__ import annotations

from typing import Any

from torch import nn


def split_parameters(
    model: nn.Module, *, biases: bool = False, norms: bool = False
) -> list[dict[str, Any]]:
    """Parameter groups without noise on biases and normalization layers.

    Args:
        model: any module.
        biases: also add noise to parameters whose name contains "bias".
        norms: also add noise to normalization layers: modules with "Norm" in their class's name.

    Returns:
        A group with noise and a group with ``b=0``; an empty group is left out. You may add options
        such as ``weight_decay`` to each.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> [(len(group["params"]), group.get("b")) for group in split_parameters(model)]
    [(2, None), (4, 0.0)]
    """
    noisy: list[nn.Parameter] = []
    quiet: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        is_norm = any("Norm" in kind.__name__ for kind in type(module).__mro__)
        for name, p in module.named_parameters(recurse=False):
            if p in seen:
                continue
            seen.add(p)
            has_noise = (biases or "bias" not in name) and (norms or not is_norm)
            (noisy if has_noise else quiet).append(p)
    groups: list[dict[str, Any]] = [{"params": noisy}, {"params": quiet, "b": 0.0}]
    return [group for group in groups if group["params"]]
