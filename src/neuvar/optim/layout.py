"""Where parameters lie: plain tensors and shards of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from neuvar.noise import Slot, whole_slot


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor, of which this process holds a part."""
    # Asked of every parameter in every step: the import alone would cost seconds at start.
    return type(p).__name__ == "DTensor" or hasattr(p, "_local_tensor")


def local(p: Tensor) -> Tensor:
    """The weights that this process holds, as a plain tensor that shares their memory."""
    found: Tensor = p.detach()
    return found.to_local() if is_sharded(found) else found  # type: ignore[attr-defined]


def slots(params: Sequence[Tensor]) -> dict[Tensor, Slot]:
    """Place parameters one after another; a shard lies where its elements lie in the whole."""
    found, start = {}, 0
    for index, p in enumerate(params):
        slot = whole_slot(tuple(p.shape), index=index, start=start)
        if is_sharded(p):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shape, offset = compute_local_shape_and_global_offset(
                p.shape, p.device_mesh, p.placements  # type: ignore[attr-defined]
            )
            slot = slot._replace(offset=tuple(offset), local_shape=tuple(shape))
        found[p] = slot
        start += p.numel()
    return found


def check_parameters(params: Sequence[Tensor]) -> None:
    """Refuse parameters whose weights cannot be perturbed, with a sentence that names the first."""
    seen: dict[int, int] = {}
    for index, p in enumerate(params):
        what = f"parameter {index} of shape {tuple(p.shape)}"
        if not p.is_floating_point():
            raise ValueError(f"{what} has dtype {p.dtype}; noise needs real floating point weights")
        if p.layout is not torch.strided:
            raise ValueError(f"{what} has layout {p.layout}; noise needs dense weights")
        if is_sharded(p) and any(place.is_partial() for place in p.placements):  # type: ignore[attr-defined]
            raise ValueError(f"{what} is a partial sum over processes; noise needs whole or sharded weights")
        if p.device.type == "meta" or not local(p).numel():
            continue
        address = local(p).data_ptr()
        if address in seen:
            raise ValueError(
                f"{what} shares its memory with parameter {seen[address]}; "
                "tie weights by using one Parameter in both places"
            )
        seen[address] = index
