"""Who sees noise? An optimizer created with its model, nothing else changed, in each part of torch.

Prints a table for docs/clean-weights.md, or writes it there with --write. Each row trains a network
by NVRM-SGD and looks at it after a step ("at rest"), and between a forward pass and its backward
pass ("mid-step"). The clean weights are known from the recursion θ ← θ - lr · g. "yes" means equal
to the bit on every process.
"""

from __future__ import annotations

import argparse
import copy
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD

PAGE = Path(__file__).parents[1] / "docs" / "clean-weights.md"
BEGIN, END = "<!-- made by tools/clean_at_rest.py -->", "<!-- end -->"
LR, STEPS, RANKS = 0.125, 4, 2
Look = Callable[[nn.Module], list[Tensor]]


class Net(nn.Module):
    """Layers whose weights autograd keeps by reference, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        return scores


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 6, 6, generator=generator), torch.arange(8) % 4


@dataclass
class Row:
    """A way to train: how the model is wrapped, and in which precision it runs."""

    name: str
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    autocast: Callable[[], Any] = nullcontext
    scaled: bool = False
    looks: dict[str, Look] = field(default_factory=dict)
    distributed: bool = False


def full(tensor: Tensor) -> Tensor:
    whole: Any = tensor.detach()
    return (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()


def weights(model: nn.Module) -> list[Tensor]:
    return [full(p) for p in model.parameters()]


def state(model: nn.Module) -> list[Tensor]:
    names = {name for name, _ in model.named_parameters()}
    return [full(value) for name, value in model.state_dict().items() if name in names]


def pickled(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return weights(torch.load(file, weights_only=False))


def averaged(model: nn.Module) -> list[Tensor]:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return weights(average.module)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def scripted(model: nn.Module) -> list[Tensor]:
    return weights(torch.jit.script(model))


def traced(model: nn.Module) -> list[Tensor]:
    with evaluation(model):
        return weights(torch.jit.trace(model, batch(0)[0]))


def exported(model: nn.Module) -> list[Tensor]:
    with evaluation(model):
        program = torch.export.export(model, (batch(0)[0],))
    return [p.detach() for p in program.parameters()]


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.conv, model.head):
        fully_shard(layer)
    return fully_shard(model)


def compiled(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: torch.compile(model, **options)  # type: ignore[return-value]


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def fp16() -> Any:
    return torch.autocast("cpu", torch.float16)


ROWS = [
    Row("plain torch"),
    Row("AMP, bfloat16", autocast=bf16),
    Row("AMP, float16 and a gradient scaler", autocast=fp16, scaled=True),
    Row("`torch.compile`", wrap=compiled()),
    Row("`torch.compile(fullgraph=True)`", wrap=compiled(fullgraph=True)),
    Row("DDP, two processes", wrap=nn.parallel.DistributedDataParallel, distributed=True),
    Row("FSDP2, two processes", wrap=sharded, distributed=True),
    Row("`copy.deepcopy(model)`", looks={"copy": lambda model: weights(copy.deepcopy(model))}),
    Row("`torch.save(model)`", looks={"file": pickled}),
    Row("`AveragedModel`", looks={"average": averaged}),
    Row("`torch.jit.script`", looks={"script": scripted}),
    Row("`torch.jit.trace`", looks={"trace": traced}),
    Row("`torch.export`", looks={"program": exported}),
]  # fmt: skip


def outcome(row: Row, *, known: bool = True) -> dict[str, bool]:
    """Train in one way and say what was clean; if not ``known``, the optimizer gets parameters."""
    torch._dynamo.reset()  # rows compile the same code, and there is a limit to that
    inside = network()
    model = row.wrap(inside)
    optimizer = NVRMSGD(model if known else model.parameters(), lr=LR, b=0.1, fused=False)
    scaler = torch.amp.GradScaler("cpu", enabled=row.scaled)
    theta, found = weights(model), {}
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def clean_twin() -> nn.Module:
        twin = network()
        with torch.no_grad():
            for p, value in zip(twin.parameters(), theta, strict=True):
                p.copy_(value)
            for mine, its in zip(twin.buffers(), inside.buffers(), strict=True):
                mine.copy_(its)
        return row.wrap(twin)

    def clean(moment: str) -> None:
        twin, x = clean_twin(), batch(99)[0]
        with evaluation(model), evaluation(twin), row.autocast():
            found[f"evaluation {moment}"] = torch.equal(model(x), twin(x))
        looks = row.looks or {"weights": state}
        seen = [*(look(model) for look in looks.values()), state(model)]
        found[f"weights {moment}"] = all(map(same, seen, [theta] * len(seen)))

    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step + 10 * _rank())
        with row.autocast():
            loss = cross_entropy(model(x), y)
        if step == STEPS - 1:
            clean("mid-step")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads = [full(p.grad) for p in params]
        scaler.step(optimizer)
        scaler.update()
        theta = [p.add(g, alpha=-LR) for p, g in zip(theta, grads, strict=True)]
    clean("at rest")
    twin = clean_twin()
    with row.autocast():
        found["noise in training"] = not torch.equal(model(batch(0)[0]), twin(batch(0)[0]))
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    torch.save({r.name: outcome(r) for r in ROWS if r.distributed}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def outcomes() -> dict[str, dict[str, bool]]:
    """All rows; a distributed one is clean if it is so on every process."""
    warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
    found = {row.name: outcome(row) for row in ROWS if not row.distributed}
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, (folder,), nprocs=RANKS, start_method="spawn")
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    for name in ranks[0]:
        found[name] = {key: all(rank[name][key] for rank in ranks) for key in ranks[0][name]}
    return {row.name: found[row.name] for row in ROWS}


COLUMNS = (
    "noise in training",
    "evaluation at rest",
    "weights at rest",
    "evaluation mid-step",
    "weights mid-step",
)


def table(found: dict[str, dict[str, bool]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " :---: |" * len(COLUMNS)]
    for name, row in found.items():
        cells = ("yes" if row[column] else "**no**" for column in COLUMNS)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args()
    made = table(outcomes())
    print(made)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
