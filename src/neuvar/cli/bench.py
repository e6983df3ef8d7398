"""``neuvar bench``: what a training step with NVRM costs on this machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from neuvar.cli.command_line import aligned, positive
from neuvar.engine import check_device
from neuvar.models import NETWORKS

if TYPE_CHECKING:
    from neuvar.cli.step_costs import Cost


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar bench``."""
    parser.epilog = f"""\
Each round times a few steps of every method, in random order, and divides by the time of the plain
optimizer in the same round. The table has the median and the quartiles over all rounds. The
networks train on random inputs, mlp with Adam and the others with SGD and momentum.

networks: {", ".join(NETWORKS)}

examples:
  neuvar bench                                   the paper's perceptron
  neuvar bench --network mlp resnet-10 --rounds 50
  neuvar bench --network resnet-34 --batch 128 --device cuda --json cost.json
"""
    add = parser.add_argument
    add("--network", nargs="+", choices=NETWORKS, default=["mlp"], metavar="NAME",
        help="networks to train (default: mlp)")  # fmt: skip
    add("--batch", type=positive, default=128, metavar="N", help="batch size (default: 128)")
    add("--rounds", type=positive, default=30, metavar="N", help="number of rounds (default: 30)")
    add("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    add("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    import torch

    from neuvar.cli.step_costs import costs

    device = check_device(options.device)
    measured: dict[str, dict[str, Cost]] = {}
    for network in dict.fromkeys(options.network):
        if sys.stderr.isatty():
            print(f"{network}: {options.rounds} rounds …", file=sys.stderr, flush=True)
        methods = costs(network, batch=options.batch, rounds=options.rounds, device=device)
        measured[network] = methods
        rows = [("method", "× plain", "quartiles", "ms a step")]
        for name, cost in methods.items():
            quartiles = "" if name == "plain" else f"{cost.low:.2f} to {cost.high:.2f}"
            rows.append((name, f"{cost.ratio:.2f}", quartiles, _three_digits(cost.milliseconds)))
        setting = f"batch {options.batch}, {options.rounds} rounds, {device}"
        threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
        print(f"{network}, {setting}{threads}", *aligned(rows, right=[1, 3]), sep="\n", end="\n\n")
        sys.stdout.flush()
    if options.json:
        content = {
            "batch": options.batch,
            "rounds": options.rounds,
            "device": options.device,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "networks": measured,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=2, default=asdict)
        options.json.write_text(f"{text}\n", encoding="utf-8")
        print(f"written: {options.json}")
    return 0


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"
