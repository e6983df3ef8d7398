"""What the processes of the distributed tests do; run as a program, it starts them.

Each check runs on all ranks, in a process group of its own, so that one that fails does not spoil
the others. It returns tensors and plain values, which the tests compare.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from neuvar import NVRM

WORLDS = (2, 1, 3)
"""Numbers of ranks, in the order in which they run: one and three resume what two have saved."""

STEPS, FIRST, REST = 8, range(2), range(2, 4)
SETTINGS: dict[str, Any] = {"b": 0.3, "seed": 11}
INNERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01),
}


# Models, data, training.


def network(seed: int = 0) -> nn.Sequential:
    """Layers whose rows no two or three ranks share evenly, the last with fewer than three.

    The first one's columns can be shared evenly, as FSDP2 demands of all dimensions but the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 3)
    return model


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step; parts are for ranks that shall see different data."""
    generator = torch.Generator().manual_seed(1000 * part + step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 2, generator=generator, dtype=torch.float64)


def backward(model: nn.Module, step: int, part: int = 0) -> None:
    x, y = batch(step, part)
    (model(x) - y).square().mean().backward()


def train(model: nn.Module, optimizer: NVRM, steps: Iterable[int], part: int = 0) -> None:
    for step in steps:
        backward(model, step, part)
        optimizer.step()
        optimizer.zero_grad()


def _line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _grid() -> Any:
    shape = (dist.get_world_size(), 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _by_layer(model: nn.Sequential, mesh: Any, **arguments: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh)


def _columns_of_the_first(p: Tensor) -> Shard | None:
    return Shard(1) if tuple(p.shape) == (7, 6) else None


WRAPS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp": lambda model: _by_layer(model, _line()),
    "fsdp at once": lambda model: fully_shard(model, mesh=_line()),
    "fsdp by columns": lambda model: _by_layer(
        model, _line(), shard_placement_fn=_columns_of_the_first
    ),
    "fsdp of replicas": lambda model: _by_layer(model, _grid()),
}


def build(
    wrap: str, inner: str = "momentum", *, start: int = 0, known: bool = False, **arguments: Any
) -> tuple[nn.Module, NVRM]:
    """A wrapped network and its optimizer, which may know the network."""
    model = WRAPS[wrap](network(start))
    given = {"model": model} if known else {}
    return model, NVRM(INNERS[inner](model.parameters()), **SETTINGS, **given, **arguments)


# What is looked at.


def full(tensor: Tensor) -> Tensor:
    """Copy of a whole tensor, wherever its parts lie."""
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


def parameters(optimizer: NVRM) -> list[Tensor]:
    """The optimizer's parameters; in the model FSDP2 at times puts gathered ones in their place."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def weights(optimizer: NVRM) -> list[Tensor]:
    return [full(p) for p in parameters(optimizer)]


def clean(optimizer: NVRM) -> list[Tensor]:
    with optimizer.denoised():
        return weights(optimizer)


def draws(optimizer: NVRM) -> int:
    """How many times noise was drawn."""
    return optimizer.param_groups[0]["drawn"][0]


def snapshot(optimizer: NVRM) -> dict[str, Any]:
    found = {"perturbed": weights(optimizer), "clean": clean(optimizer)}
    return found | {"draws": draws(optimizer)}


def noise(optimizer: NVRM) -> list[Tensor]:
    """The noise to the bit: what perturbed weights hold if the clean ones are 0. Ends a run."""
    with torch.no_grad(), optimizer.denoised():
        for p in parameters(optimizer):
            p.zero_()
    return weights(optimizer)


# Checks. The folder is the same for all ranks and for all numbers of ranks.


def same_data(folder: Path, **how: Any) -> Any:
    """Train all ranks on the same data."""
    model, optimizer = build(**how)
    train(model, optimizer, range(STEPS))
    return snapshot(optimizer) | {"noise": [] if how.get("known") else noise(optimizer)}


def different_data(folder: Path, **how: Any) -> Any:
    """Train each rank on its own data, and keep the gradients."""
    model, optimizer = build("ddp", **how)
    gradients = []
    for step in range(STEPS):
        backward(model, step, dist.get_rank())
        gradients.append([full(p.grad) for p in parameters(optimizer)])
        optimizer.step()
        optimizer.zero_grad()
    found = snapshot(optimizer) | {"gradients": gradients}
    return found | {"noise": [] if how.get("known") else noise(optimizer)}


def controlled(folder: Path, ranks: str) -> Any:
    """Train each rank on its own data, with a scale of noise that sets itself."""
    model = WRAPS["ddp"](network())
    optimizer = NVRM(INNERS["sgd"](model.parameters()), b="auto", seed=11, ranks=ranks)
    scales = []
    for step in range(20):  # with four looks
        x, y = batch(step, dist.get_rank())
        loss = (model(x) - y).square().mean()
        optimizer.report_loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.param_groups[0]["b"])
    return snapshot(optimizer) | {"scales": scales}


def evaluated(folder: Path, wrap: str) -> Any:
    """Evaluate between steps, clean and perturbed, and draw anew between the parts of a batch."""
    model, optimizer = build(wrap)
    outputs = []
    for step in FIRST:
        backward(model, step)
        optimizer.resample()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            with optimizer.denoised():
                outputs.append(model(batch(step)[0]))
            outputs.append(model(batch(step)[0]))
    return snapshot(optimizer) | {"outputs": outputs}


def changed(folder: Path, wrap: str) -> Any:
    """Write to perturbed weights and go on; return the complaint."""
    model, optimizer = build(wrap)
    train(model, optimizer, FIRST)
    with torch.no_grad():
        parameters(optimizer)[0].add_(1)
    try:
        train(model, optimizer, REST)
    except RuntimeError as error:
        return str(error)
    return ""


def refused(folder: Path) -> Any:
    """Ask for what sharded weights cannot have; return the complaints."""
    found = []
    model = WRAPS["fsdp"](network())
    for wrong in ({"b": 0.1, "ranks": "per_rank"}, {"b": "auto"}):
        try:
            NVRM(INNERS["sgd"](model.parameters()), **wrong)
        except ValueError as error:
            found.append(str(error))
    return found


def at_rest(folder: Path, **how: Any) -> Any:
    """Look at a known model between steps, and between a forward pass and its backward pass."""
    model, optimizer = build(known=True, **how)
    twin, other = build(known=True, **how)
    x, y = batch(7)
    found: dict[str, Any] = {}
    for net, opt in ((twin, other), (model, optimizer)):
        train(net, opt, FIRST)
        if net is model:
            found["theta"] = weights(optimizer)
        loss = (net(x) - y).square().mean()
        if net is model:
            found["mid"] = [full(value) for value in model.state_dict().values()]
            with torch.no_grad():
                found["evaluated"] = model.eval()(x)
            model.train()
        loss.backward()
        opt.step()
    found["later"] = weights(optimizer)
    state = model.state_dict()
    found["kinds"] = sorted({type(value).__name__ for value in state.values()})
    found["state"] = [full(value) for value in state.values()]
    found["undisturbed"] = weights(other)
    plain, alone = build("plain", mode=how["mode"])
    train(plain, alone, FIRST)
    with torch.no_grad(), alone.denoised():
        found["expected"] = plain(x)
    return found


def from_rank_0(folder: Path, denoised: bool) -> Any:
    """Resume on every rank from what rank 0 alone has saved."""
    rank, path = dist.get_rank(), folder / f"{dist.get_world_size()}-{denoised}.pt"
    model, optimizer = build("ddp", "adam", ranks="per_rank")
    train(model, optimizer, FIRST, rank)
    with optimizer.denoised() if denoised else nullcontext():
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    twin, other = build("ddp", "adam", ranks="per_rank", start=1)
    for step in FIRST:  # having seen gradients once, DDP adds them up in another order
        backward(twin, step)
    other.zero_grad()
    found = torch.load(path, weights_only=True)
    twin.load_state_dict(found["model"])
    other.load_state_dict(found["optimizer"])
    train(model, optimizer, REST, rank)
    train(twin, other, REST, rank)
    return {"resumed": snapshot(other), "went on": snapshot(optimizer)}


def materialised(folder: Path, wrap: str, inner: str, mode: str) -> Any:
    """Ask for the state of a fresh optimizer, and again in mid-training."""
    model, optimizer = build(wrap, inner, mode=mode)
    moments = []
    for steps in (FIRST, REST):
        before = weights(optimizer), draws(optimizer)
        get_state_dict(model, optimizer)
        moments.append({"before": before, "after": (weights(optimizer), draws(optimizer))})
        train(model, optimizer, steps)
    twin = WRAPS[wrap](network())
    plain = INNERS[inner](twin.parameters())
    get_state_dict(twin, plain)  # because of which Adam counts a step, wrapped or not
    other = NVRM(plain, **SETTINGS, mode=mode)
    train(twin, other, [*FIRST, *REST])
    return {"moments": moments, "went on": snapshot(optimizer), "never asked": snapshot(other)}


def checkpoint(folder: Path, flatten: bool, denoised: bool, **how: Any) -> Any:
    """Save in torch's way, load into a fresh model and optimizer, and train both on."""
    model, optimizer = build(**how)
    train(model, optimizer, FIRST)
    path = _path(folder, dist.get_world_size(), flatten, denoised, **how)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with optimizer.denoised() if denoised else nullcontext():
        states = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    train(model, optimizer, REST)
    return {
        "resumed": _resumed(path, flatten, **how),
        "went on": snapshot(optimizer),
        "never saved": never_saved(**how),
    }


def resharded(folder: Path, flatten: bool, saved: str, wrap: str, **how: Any) -> Any:
    """Resume what two ranks have saved while perturbed."""
    path = _path(folder, 2, flatten, False, wrap=saved, **how)
    return _resumed(path, flatten, wrap=wrap, **how)


def gathered(folder: Path, **how: Any) -> Any:
    """Give rank 0 the whole state, and spread it from there."""
    model, optimizer = build(**how)
    train(model, optimizer, FIRST)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    train(model, optimizer, REST)
    twin, other = build(start=1, **how)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(twin, states[0], options=options)
    set_optimizer_state_dict(twin, other, states[1], options=options)
    train(twin, other, REST)
    return {"resumed": snapshot(other), "went on": snapshot(optimizer)}


def _path(folder: Path, *what: Any, **how: Any) -> Path:
    return folder / "-".join(map(str, [*what, *how.values()]))


def _resumed(path: Path, flatten: bool, **how: Any) -> dict[str, Any]:
    model, optimizer = build(start=1, **how)
    for step in FIRST:  # having seen gradients once, DDP adds them up in another order
        backward(model, step)
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    states = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
    )
    train(model, optimizer, REST)
    return snapshot(optimizer)


@functools.cache
def never_saved(**how: Any) -> dict[str, Any]:
    model, optimizer = build(**how)
    train(model, optimizer, [*FIRST, *REST])
    return snapshot(optimizer)


# The plan, and how it is carried out.

Check = tuple[Callable[..., Any], dict[str, Any], tuple[int, ...]]
"""What to do, with which options, on how many ranks."""


def _each(
    check: Callable[..., Any], *, worlds: tuple[int, ...] = WORLDS, **how: Any
) -> list[Check]:
    """A check with every combination of its options; those that are lists are choices."""
    choices = [value if isinstance(value, list) else [value] for value in how.values()]
    options = [dict(zip(how, chosen, strict=True)) for chosen in itertools.product(*choices)]
    return [(check, chosen, worlds) for chosen in options]


BOTH, MODES, SAMPLERS, WRAPPED = (
    [False, True],
    ["exact", "replay"],
    ["table", "fresh"],
    ["ddp", "fsdp"],
)
PLAN = [
    *_each(different_data, mode=MODES, sampler=SAMPLERS, ranks="shared"),
    *_each(different_data, mode="exact", sampler=SAMPLERS, ranks="per_rank"),
    *_each(different_data, mode="exact", sampler="table", ranks=["shared", "per_rank"], known=True),
    *_each(same_data, wrap="fsdp", mode=MODES, sampler="table", known=True),
    *_each(same_data, wrap="fsdp", mode=MODES, sampler=SAMPLERS),
    *_each(same_data, wrap="fsdp by columns", mode="exact", sampler=SAMPLERS),
    *_each(same_data, wrap="fsdp by columns", mode="replay", sampler="table"),
    *_each(same_data, wrap="fsdp of replicas", mode=MODES, sampler="table"),
    *_each(
        same_data, wrap=["fsdp", "fsdp by columns"], known=True, relative_to=["tensor", "filter"]
    ),
    *_each(same_data, worlds=(2,), wrap="fsdp", known=True, relative_to="weight"),
    *_each(controlled, ranks=["shared", "per_rank"]),
    *_each(evaluated, wrap=[*WRAPPED, "fsdp at once"]),
    *_each(refused),
    *_each(changed, wrap=WRAPPED),
    *_each(at_rest, wrap=[*WRAPPED, "fsdp at once"], mode=MODES),
    *_each(from_rank_0, denoised=BOTH),
    *_each(materialised, worlds=(2,), wrap=WRAPPED, inner=["sgd", "adam"], mode=MODES),
    *_each(gathered, worlds=(2,), wrap=WRAPPED, inner="adam", mode=MODES),
    *_each(
        checkpoint,
        worlds=(2,),
        flatten=BOTH,
        denoised=BOTH,
        wrap=WRAPPED,
        inner=["sgd", "momentum", "adam"],
        mode="exact",
    ),
    *_each(
        checkpoint,
        worlds=(2,),
        flatten=BOTH,
        denoised=BOTH,
        wrap=WRAPPED,
        inner="sgd",
        mode="replay",
    ),
    *_each(checkpoint, worlds=(1, 3), flatten=True, denoised=False, wrap=WRAPPED, mode=MODES),
    *_each(checkpoint, flatten=False, denoised=BOTH, wrap="ddp", inner="sgd", ranks="per_rank"),
    *_each(
        checkpoint,
        worlds=(2,),
        flatten=False,
        denoised=False,
        wrap=WRAPPED,
        inner="adam",
        mode=MODES,
        known=True,
    ),
    *_each(
        checkpoint,
        worlds=(2,),
        flatten=BOTH,
        denoised=False,
        wrap=WRAPPED,
        known=True,
        relative_to="filter",
    ),
    *_each(
        resharded,
        worlds=(1, 3),
        flatten=False,
        saved=WRAPPED,
        wrap=WRAPPED,
        inner="adam",
        mode="exact",
    ),
    *_each(
        resharded,
        worlds=(1, 3),
        flatten=True,
        saved=WRAPPED,
        wrap=WRAPPED,
        inner="sgd",
        mode="replay",
    ),
]


def label(check: Callable[..., Any], how: dict[str, Any]) -> str:
    return ", ".join([check.__name__, *(f"{key}={value}" for key, value in how.items())])


def _work(rank: int, world: int, folder: Path) -> None:
    """Carry out the plan as one of the ranks, and write down what was found."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    reports = {}
    for number, (check, how, worlds) in enumerate(PLAN):
        if world not in worlds:
            continue
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting-{world}-{number}",
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=30),
        )
        try:
            reports[label(check, how)] = {"found": check(folder, **how)}
            dist.barrier()
        except Exception:  # noqa: BLE001
            reports[label(check, how)] = {"error": traceback.format_exc()}
            gc.collect()  # what the check built keeps connections open, on which others wait
        finally:
            dist.destroy_process_group()
    torch.save(reports, folder / f"reports-{world}-{rank}.pt")


def main(folder: Path) -> None:
    # Torch is imported once and no thread runs yet, so forking is quick and safe.
    method = "fork" if sys.platform == "linux" else "spawn"
    for world in WORLDS:
        mp.start_processes(_work, (world, folder), nprocs=world, start_method=method)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
