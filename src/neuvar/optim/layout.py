"""The layout of parameters: wrapped models, shards, positions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from neuvar.noise import Slot, shard_slot, whole_slot


def bare(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel or torch.compile, with its own parameter names."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner  # torch.compile's OptimizedModule; importing that class takes seconds
        else:
            return model


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor, of which this process holds a part."""
    # The import takes longer than that of torch; if nobody imported it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(p, module.DTensor)


def sharding(p: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Device mesh and placements of a sharded parameter."""
    tensor: Any = p
    return tensor.device_mesh, tensor.placements


def local(p: Tensor) -> Tensor:
    """The weights of this process, as a plain tensor that shares their memory."""
    tensor: Any = p.detach()
    weights: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return weights


def reshard(params: Iterable[Tensor]) -> None:
    """Let FSDP2 gather weights again after their shards were written to.

    After a forward pass without a backward pass, its outermost module keeps the gathered weights
    and would use them again.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not any(map(is_sharded, params)):
        return
    from torch.distributed._composable_state import _module_state_mapping

    for module in list(_module_state_mapping):
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def relative_size(p: Tensor, weights: Tensor, relative_to: str | None) -> Tensor | None:
    """Factor by which relative noise is scaled; None if the noise is absolute.

    It is the root mean square of the whole ``"tensor"`` or of each ``"filter"`` (a slice along the
    first axis; a vector is one filter), or each ``"weight"`` itself.

    Args:
        p: the parameter, which may be sharded.
        weights: its clean weights in this process.
        relative_to: one of ``RELATIVE_TO``, or None or "" for absolute noise.
    """
    if not relative_to or relative_to == "weight":
        return weights if relative_to else None
    dtype = torch.promote_types(weights.dtype, torch.float32)
    rows = weights.flatten(1) if weights.ndim > 1 else weights.view(1, -1)
    # Sums over filters in double precision hardly depend on how a tensor is sharded.
    squares: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double().square()
    by_filter = relative_to == "filter" and weights.ndim > 1
    squares = squares if by_filter else squares.sum()
    if is_sharded(p):
        mesh, placements = sharding(p)
        for dim, placement in enumerate(placements):
            if placement.is_shard() and not (by_filter and placement.is_shard(0)):
                torch.distributed.all_reduce(squares, group=mesh.get_group(dim))
    count = math.prod(p.shape[1:]) if by_filter else p.numel()
    size = (squares / max(count, 1)).sqrt().to(dtype)
    return size.view(-1, *[1] * (weights.ndim - 1)) if by_filter else size


def slots(params: Sequence[Tensor]) -> dict[Tensor, Slot]:
    """Position of each parameter, one after another; a shard is positioned inside the whole."""
    result, start = {}, 0
    for number, p in enumerate(params):
        shape = tuple(p.shape)
        if is_sharded(p):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            part, offset = compute_local_shape_and_global_offset(p.shape, *sharding(p))
            result[p] = shard_slot(shape, offset, part, number=number, start=start)
        else:
            result[p] = whole_slot(shape, number=number, start=start)
        start += p.numel()
    return result


def check_parameters(params: Sequence[Tensor]) -> None:
    """Raise a ValueError for the first parameter that cannot be perturbed."""
    seen: dict[int, int] = {}
    for index, p in enumerate(params):
        if is_lazy(p):
            raise ValueError(
                f"parameter {index} is not initialized; run the model once before you make the "
                "optimizer"
            )
        what = f"parameter {index} of shape {tuple(p.shape)}"
        if not p.is_floating_point():
            raise ValueError(f"{what} has dtype {p.dtype}; noise needs real floating-point weights")
        if p.layout is not torch.strided:
            raise ValueError(f"{what} has layout {p.layout}; noise needs dense weights")
        if is_sharded(p) and any(place.is_partial() for place in sharding(p)[1]):
            raise ValueError(
                f"{what} is a partial sum over processes; noise needs whole or sharded weights"
            )
        if p.device.type == "meta" or not local(p).numel():
            continue
        address = local(p).data_ptr()
        if address in seen and p is params[seen[address]]:
            raise ValueError(f"{what} is in the optimizer twice")
        if address in seen:
            raise ValueError(
                f"{what} shares its memory with parameter {seen[address]}; "
                "tie weights by using one Parameter in both places"
            )
        seen[address] = index
