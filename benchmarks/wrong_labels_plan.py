"""The plan of ``wrong_labels.py``: data, arms, the order of the runs, how settings are chosen."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
Setting = dict[str, float]

FIRST_SEED = 10
"""The first reported seed, as in ``cleaning.py``."""
CHOICE_SEEDS = (1000,)
"""Seeds of the runs that settings are chosen by; they are not reported."""


@dataclass(frozen=True)
class Row:
    """Data, network and labels; the first ``images`` are trained on, the next are held out."""

    title: str
    data: str
    kind: str
    rate: float = 0.4
    model: str = "mlp"
    width: int = 0
    images: int = 10_000
    held_out: int = 5_000
    epochs: int = 30
    seeds: int = 10
    precision: str = "bf16"


MNIST = {"data": "mnist"}
CIFAR: dict[str, Any] = {
    "data": "cifar10",
    "model": "resnet-10",
    "width": 16,
    "held_out": 2_000,
    "seeds": 5,
}
ROWS = {
    "mnist-pair-40": Row("MNIST, 40 % pair flips", kind="pair", **MNIST),
    "mnist-sym-40": Row("MNIST, 40 % symmetric flips", kind="symmetric", **MNIST),
    "cifar-pair-40": Row("CIFAR-10, 40 % pair flips", kind="pair", **CIFAR),
}


@dataclass(frozen=True)
class Arm:
    """A way to train. ``grid`` has the settings to choose from for each data set.

    ``cost`` is the number of gradients of the whole run, in multiples of SGD's.
    """

    grid: dict[str, tuple[Setting, ...]]
    optimizer: str = "sgd"
    half_epochs: bool = False
    cost: int = 1
    chosen_with: str = ""
    """Arm whose choice runs serve for this one as well."""


def grid(**values: Sequence[float]) -> tuple[Setting, ...]:
    """All combinations."""
    combined = itertools.product(*values.values())
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in combined)


NOTHING: dict[str, tuple[Setting, ...]] = {"mnist": ({},), "cifar10": ({},)}
DROPOUT = grid(dropout=(0.2, 0.5))
RHO = {"mnist": grid(rho=(0.05, 0.1, 0.2, 0.5)), "cifar10": grid(rho=(0.05, 0.1, 0.2, 0.5))}
IVON = (*grid(lr=(0.2,), hess_init=(0.5, 0.1, 0.05)), {"lr": 1.0, "hess_init": 0.5})
SMOOTHING = grid(smoothing=(0.1, 0.3, 0.6))
AVERAGE = grid(average=(0.99, 0.999))
ARMS = {
    "SGD": Arm(NOTHING),
    "weight decay": Arm(
        {
            "mnist": grid(weight_decay=(3e-3, 1e-2, 3e-2)),
            "cifar10": grid(weight_decay=(5e-4, 2e-3, 5e-3)),
        }
    ),
    "dropout": Arm({"mnist": DROPOUT, "cifar10": DROPOUT}),
    "NVRM-SGD": Arm(
        {"mnist": grid(b=(0.03, 0.04, 0.05, 0.07)), "cifar10": grid(b=(0.01, 0.02, 0.03, 0.05))},
        optimizer="nvrm",
    ),
    "NVRM-SGD, b = auto": Arm(NOTHING, optimizer="nvrm"),
    "dropout + NVRM-SGD": Arm(
        {
            "mnist": (*grid(dropout=(0.2,), b=(0.03, 0.04)), *grid(dropout=(0.5,), b=(0.01, 0.02))),
            "cifar10": (*grid(dropout=(0.2,), b=(0.02,)), *grid(dropout=(0.5,), b=(0.003, 0.01))),
        },
        optimizer="nvrm",
    ),
    "SAM, half the epochs": Arm(RHO, optimizer="sam", half_epochs=True),
    "SAM": Arm(RHO, optimizer="sam", cost=2, chosen_with="SAM, half the epochs"),
    "IVON": Arm({"mnist": IVON, "cifar10": IVON}, optimizer="ivon"),
    "SGD, half the epochs": Arm(NOTHING, half_epochs=True),
    "label smoothing": Arm({"mnist": SMOOTHING, "cifar10": SMOOTHING}),
    "average of the weights": Arm({"mnist": AVERAGE, "cifar10": AVERAGE}),
}


COSTLY = ("SAM", "IVON")
"""Arms that take more than twice as long as SGD."""
LATER = ("SGD, half the epochs", "label smoothing", "average of the weights")
"""Arms that were added last, and run last."""
CORE = tuple(arm for arm in ARMS if arm not in COSTLY + LATER)
WAVES = (
    ("mnist-pair-40", 5, CORE),
    ("mnist-pair-40", 5, COSTLY),
    ("mnist-sym-40", 5, CORE),
    ("mnist-sym-40", 5, COSTLY),
    ("cifar-pair-40", 5, CORE),
    ("mnist-pair-40", 10, CORE + COSTLY),
    ("mnist-sym-40", 10, CORE + COSTLY),
    ("cifar-pair-40", 5, COSTLY),
    ("mnist-pair-40", 5, LATER),
    ("mnist-sym-40", 5, LATER),
    ("cifar-pair-40", 5, LATER),
    ("mnist-pair-40", 10, LATER),
    ("mnist-sym-40", 10, LATER),
)
"""Row, number of seeds and arms, in the order in which they run."""


def choice_runs(name: str, arms: Sequence[str]) -> Iterator[Line]:
    """Runs for choosing the settings of some arms."""
    for seed in CHOICE_SEEDS:
        for arm in dict.fromkeys(ARMS[arm].chosen_with or arm for arm in arms):
            settings = ARMS[arm].grid[ROWS[name].data]
            for setting in settings if len(settings) > 1 else ():
                yield {"row": name, "arm": arm, "setting": setting, "seed": seed}


def reported_runs(name: str, count: int, arms: Sequence[str], lines: Sequence[Line]) -> list[Line]:
    """Runs with the chosen settings: all arms of one seed, then of the next."""
    settings = {arm: chosen(lines, name, arm) for arm in arms}
    return [
        {"row": name, "arm": arm, "setting": setting, "seed": seed}
        for seed in range(FIRST_SEED, FIRST_SEED + count)
        for arm, setting in settings.items()
    ]


class NotChosenError(LookupError):
    """A run that the choice depends on is missing."""


def chosen(lines: Sequence[Line], name: str, arm: str) -> Setting:
    """The setting with the lowest cross-entropy on held-out labels after the last epoch.

    The accuracy on these labels could not tell the settings apart: of 40 % pair flips, a prediction
    of the wrong class is right in 40 % of the cases. A setting that diverged in a choice run is not
    chosen. Of equal ones it is the first.
    """
    arm = ARMS[arm].chosen_with or arm
    settings = ARMS[arm].grid[ROWS[name].data]
    if len(settings) == 1:
        return settings[0]
    losses: list[float] = []
    for setting in settings:
        found = {
            line["run"]["seed"]: line["last"]["held_out_loss"] if is_finished(line) else math.inf
            for line in lines
            if belongs(line, name, arm, setting) and line["run"]["seed"] in CHOICE_SEEDS
        }
        if set(found) != set(CHOICE_SEEDS):
            raise NotChosenError(f"{name}, {arm}: the choice runs of {setting} are missing")
        losses.append(statistics.fmean(found.values()))
    if min(losses) == math.inf:
        raise NotChosenError(f"{name}, {arm}: all settings diverged")
    return settings[losses.index(min(losses))]


def belongs(line: Line, name: str, arm: str, setting: Setting) -> bool:
    return line["run"].items() >= {"row": name, "arm": arm, "setting": setting}.items()


def is_finished(line: Line) -> bool:
    return bool(line["status"] == "finished")


def left(lines: Sequence[Line]) -> str:
    """What remains to be run, one line per row."""
    parts = []
    for name, row in ROWS.items():
        choices = list(choice_runs(name, list(ARMS)))
        done = [line["run"] for line in lines if line["run"]["row"] == name]
        tried = sum(run in done for run in choices)
        reported = [run for run in done if run["seed"] not in CHOICE_SEEDS]
        parts.append(
            f"{name}: {tried} of {len(choices)} choice runs, "
            f"{len(reported)} of {len(ARMS) * row.seeds} reported runs"
        )
    return "\n".join(parts)
