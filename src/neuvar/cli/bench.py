"""``neuvar bench``: what a training step with NVRM costs on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.columns import aligned
from neuvar.cli.parsing import Commands, add_command, counted
from neuvar.cli.ready import checked_device
from neuvar.models import NETWORKS

if TYPE_CHECKING:
    from neuvar.cli.step_costs import Cost


def add_bench(commands: Commands) -> None:
    """Add ``neuvar bench``."""
    parser = add_command(
        commands,
        "bench",
        "measure what a training step with NVRM costs on this machine",
        f"""\
Each round times a few steps of every method, in a new order; a ratio is to the plain optimizer of
the same round. Shown are the median and the quartiles over all rounds. The networks train on
random inputs, mlp with Adam and the others with SGD and momentum.

networks: {", ".join(NETWORKS)}

examples:
  neuvar bench                                   the paper's perceptron
  neuvar bench --network mlp resnet-10 --rounds 50
  neuvar bench --network resnet-34 --batch 128 --device cuda --json cost.json
""",
    )
    add = parser.add_argument
    add("--network", nargs="+", choices=NETWORKS, default=["mlp"], metavar="NAME",
        help="what is trained (default: mlp)")  # fmt: skip
    add("--batch", type=counted, default=128, metavar="N", help="inputs in a batch (default: 128)")
    add("--rounds", type=counted, default=30, metavar="N", help="how many (default: 30)")
    add("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    add("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    import torch

    from neuvar.cli.step_costs import costs

    device = checked_device(options.device)
    found: dict[str, dict[str, Cost]] = {}
    for network in dict.fromkeys(options.network):
        if sys.stderr.isatty():
            print(f"{network}: {options.rounds} rounds …", file=sys.stderr, flush=True)
        found[network] = costs(network, batch=options.batch, rounds=options.rounds, device=device)
        rows = [("method", "× plain", "quartiles", "ms a step")]
        for name, cost in found[network].items():
            quartiles = "" if name == "plain" else f"{cost.low:.2f} to {cost.high:.2f}"
            rows.append((name, f"{cost.ratio:.2f}", quartiles, _digits(cost.milliseconds)))
        setting = f"batch {options.batch}, {options.rounds} rounds, {device}"
        threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
        print(f"{network}, {setting}{threads}", *aligned(rows, right=[1, 3]), sep="\n", end="\n\n")
        sys.stdout.flush()
    if options.json:
        _write(options, found)
    return 0


def _digits(number: float) -> str:
    """Three digits that count."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def _write(options: argparse.Namespace, found: dict[str, dict[str, Cost]]) -> None:
    import torch

    content = {
        "batch": options.batch,
        "rounds": options.rounds,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "networks": {
            network: {name: asdict(cost) for name, cost in methods.items()}
            for network, methods in found.items()
        },
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written: {options.json}")
