"""What the benchmark found: the figures, their table, and whether the targets are met."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from contenders import CONTENDERS, PEERS
from networks import Case

OURS = "NVRM"
"""The contender that the targets of time are about."""

MEMORY_TARGETS = {"NVRM": 1, "NVRM fresh": 1, "NVRM replay": 0, "NVRM parameters": 1}
TOLERANCE = 0.02
"""What counters and the like may take, in multiples of the parameters."""

LEGEND = """\
First line: time of a full training step, divided by that of torch's default optimizer; the median
over rounds. Second line: its quartiles. Third line: the same divided by that of torch's fused
optimizer. Fourth line: memory beyond the default optimizer's, in multiples of the parameters, at
rest between steps / at the peak of a step. Plain is a second copy of torch's default optimizer
against the first: what differs from 1 there is noise of the measurement. NVRM is the named form,
created with the model; naive and SAM are around the fused optimizer. IVON takes the inner
optimizer's place, so its memory is its own state less the inner's."""


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles over rounds of a contender's time divided by the plain one's."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """What a contender costs; memory in multiples of the parameters, beyond the plain one's."""

    ratio: Ratio
    to_fused: Ratio
    milliseconds: float
    steady: float
    peak: float


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    case: Case
    parameters: int
    rounds: int
    costs: dict[str, Cost]


@dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it is met."""

    case: str
    target: str
    measured: str
    met: bool


def verdicts(result: Result) -> list[Verdict]:
    """Hold a row against its targets."""
    name, costs = result.case.name, result.costs
    found = []
    for base, ratio, target in zip(
        ("default", "fused"),
        (costs[OURS].ratio, costs[OURS].to_fused),
        result.case.targets,
        strict=True,
    ):
        measured = f"{ratio.median:.3f}×, quartiles {quartiles(ratio)}"
        what = f"time at most {target:.2f}× of the {base} optimizer"
        found.append(Verdict(name, what, measured, ratio.median <= target))
    time = costs[OURS].ratio.median
    rival = min(PEERS, key=lambda peer: costs[peer].ratio.median)
    best = costs[rival].ratio.median
    against = f"{time:.3f}× against {best:.3f}× of {rival}"
    found.append(Verdict(name, "faster than every peer", against, time < best))
    for contender, multiple in MEMORY_TARGETS.items():
        cost = costs[contender]
        met = max(cost.steady, cost.peak) <= multiple + TOLERANCE
        measured = f"{cost.steady:.2f}× at rest, {cost.peak:.2f}× at the peak"
        found.append(Verdict(name, f"{contender}: memory {multiple}×", measured, met))
    return found


def quartiles(ratio: Ratio) -> str:
    return f"{ratio.low:.2f}–{ratio.high:.2f}"


def header() -> list[list[str]]:
    """Heading of each column, as lines."""
    return [["network"], *(name.split() for name in CONTENDERS)]


def row(result: Result) -> list[list[str]]:
    """Cells of a row, as lines."""
    case = result.case
    title = [
        case.title,
        f"batch {case.batch}, {result.parameters / 1e6:.2f} M parameters",
        f"{result.costs['plain'].milliseconds:.1f} ms plain, {result.rounds} rounds",
    ]
    cells = [
        [
            f"{cost.ratio.median:.3f}×",
            quartiles(cost.ratio),
            f"{cost.to_fused.median:.3f}×",
            # Adding 0.0 turns a rounded -0.0 into 0.0.
            f"{round(cost.steady, 2) + 0.0:.2f}/{round(cost.peak, 2) + 0.0:.2f}",
        ]
        for cost in result.costs.values()
    ]
    return [title, *cells]


def text_table(results: Sequence[Result]) -> str:
    """The table for a terminal."""
    rows = [header(), *map(row, results)]
    columns = zip(*rows, strict=True)
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    rule = "  ".join("─" * width for width in widths)
    lines = []
    for cells in rows:
        for parts in zip_longest(*cells, fillvalue=""):
            first, *others = zip(parts, widths, strict=True)
            lines.append("  ".join([f"{first[0]:<{first[1]}}", *(f"{p:>{w}}" for p, w in others)]))
        lines.append(rule)
    return "\n".join(lines)


def text_report(results: Sequence[Result], table_bytes: int) -> str:
    """All that the benchmark prints."""
    every = [verdict for result in results for verdict in verdicts(result)]
    width = max(len(f"{v.case}: {v.target}") for v in every)
    closing = [
        f"  {f'{v.case}: {v.target}':<{width}}  {'met' if v.met else 'NOT MET'}  ({v.measured})"
        for v in every
    ]
    parts = [text_table(results), LEGEND, table_note(table_bytes), "Targets", *closing]
    return "\n".join(parts)


def markdown_report(results: Sequence[Result], table_bytes: int) -> str:
    """The same for the documentation."""

    def line(cells: Sequence[Sequence[str]], join: str) -> str:
        return "| " + " | ".join(join.join(cell) for cell in cells) + " |"

    columns = header()
    every = [verdict for result in results for verdict in verdicts(result)]
    lines = [
        line(columns, " "),
        "| --- |" + " ---: |" * (len(columns) - 1),
        *(line(row(result), "<br>") for result in results),
        "", LEGEND, table_note(table_bytes), "",
        "| network | target | measured | |", "| --- | --- | --- | --- |",
        *(f"| {v.case} | {v.target} | {v.measured} | {'met' if v.met else 'not met'} |"
          for v in every),
        "", f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def table_note(table_bytes: int) -> str:
    return (
        f"sampler='table' adds one table of {table_bytes / 2**20:.1f} MiB for the whole process, "
        "whatever the network."
    )


def as_json(
    results: Sequence[Result], table_bytes: int, *, quick: bool, load: float
) -> dict[str, Any]:
    """Everything that the documentation may want to cite."""
    packages = ("torch", "neuvar", "ivon-opt", "pytorch_optimizer")
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "load": load,
        },
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "table_bytes": table_bytes,
        "networks": {
            result.case.name: {
                "title": result.case.title,
                "batch": result.case.batch,
                "parameters": result.parameters,
                "rounds": result.rounds,
                "contenders": {name: asdict(cost) for name, cost in result.costs.items()},
                "targets": [asdict(verdict) for verdict in verdicts(result)],
            }
            for result in results
        },
    }


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
