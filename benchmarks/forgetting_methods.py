"""The methods of the forgetting benchmark, their candidate settings, and the rule of choice."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgetting_training import Setting

CHOICE_SEEDS = (1000,)
"""Seeds for choosing: other permutations and weights than those of the results."""

SEEDS = {5: 10, 10: 5, 20: 5}
"""Planned seeds of the results, from 0, for each number of tasks."""


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        candidates: settings to choose from.
        without_noise: for NVRM, the name of the same method without it.
        simple: whether it is a simple baseline: no penalty, no noise.
    """

    name: str
    candidates: tuple[Setting, ...]
    without_noise: str = ""
    simple: bool = False


def chosen(method: Method, lines: Iterable[dict[str, Any]]) -> Setting:
    """The candidate with the highest mean accuracy on held-out images; the first one on a tie."""
    return max(method.candidates, key=lambda setting: held_out_accuracy(setting, method, lines))


def tried(methods: Mapping[str, Method], lines: Sequence[dict[str, Any]]) -> dict[str, Method]:
    """The methods whose settings can be chosen: each candidate has been run to choose."""
    runs = {(setting_of(line), line["seed"]) for line in lines if line["role"] == "choice"}
    return {
        name: method
        for name, method in methods.items()
        if all((setting, seed) in runs for setting in method.candidates for seed in CHOICE_SEEDS)
    }


def held_out_accuracy(setting: Setting, method: Method, lines: Iterable[dict[str, Any]]) -> float:
    means = {
        line["seed"]: line["mean"]
        for line in lines
        if line["role"] == "choice" and setting_of(line) == setting
    }
    if missing := set(CHOICE_SEEDS) - means.keys():
        raise SystemExit(
            f"{method.name}: {setting} was not tried with seeds {sorted(missing)}; "
            "run with --choose first"
        )
    return statistics.mean(means[seed] for seed in CHOICE_SEEDS)


def setting_of(line: dict[str, Any]) -> Setting:
    """The setting of a line; fields that are younger than the line have their defaults."""
    return Setting(**line["setting"])


def varied(setting: Setting, field: str, values: Sequence[Any]) -> tuple[Setting, ...]:
    return tuple(replace(setting, **{field: value}) for value in values)


SGD, MOMENTUM, ADAM = (Setting(name, 0.1) for name in ("sgd", "momentum", "adam"))
STABLE = Setting("sgd", 0.3, dropout=0.25, task_decay=0.7)
"""Mirzadeh et al. 2020, Understanding the role of training regimes in continual learning."""

STABLE_LINEAR = replace(STABLE, lr=0.2, within="linear", batch=128)
LINEAR = Setting("adam", 0.002, within="linear", batch=128)
EWC = replace(LINEAR, penalty="ewc", strength=300.0)
SI = replace(LINEAR, penalty="si")
MAS = replace(LINEAR, penalty="mas", strength=0.03)
SGD_EWC = replace(SGD, lr=0.2, within="linear", batch=128, penalty="ewc")

METHODS = {
    method.name: method
    for method in (
        Method("SGD", varied(SGD, "lr", (0.03, 0.1, 0.3)), simple=True),
        Method("NVRM-SGD", varied(SGD, "b", (0.003, 0.01)), without_noise="SGD"),
        Method("SGD with momentum", varied(MOMENTUM, "lr", (0.003, 0.01)), simple=True),
        Method(
            "NVRM-SGD with momentum",
            varied(replace(MOMENTUM, b=0.01), "lr", (0.003, 0.01)),
            without_noise="SGD with momentum",
        ),
        Method("Adam", varied(ADAM, "lr", (3e-5, 1e-4, 3e-4)), simple=True),
        Method(
            "NVRM-Adam",
            (
                replace(ADAM, lr=1e-4, b=0.02),
                replace(ADAM, lr=3e-4, b=0.03),
                replace(ADAM, lr=1e-3, b=0.05),
            ),
            without_noise="Adam",
        ),
        Method("SGD + dropout", varied(SGD, "dropout", (0.25, 0.5)), simple=True),
        Method(
            "stable SGD",
            (*varied(STABLE, "task_decay", (0.5, 0.7)), STABLE_LINEAR),
            simple=True,
        ),
        Method(
            "NVRM, stable SGD",
            varied(STABLE_LINEAR, "b", (0.003, 0.01)),
            without_noise="stable SGD",
        ),
        Method("Adam + SI", varied(SI, "strength", (30.0, 100.0))),
        Method("Adam + MAS", varied(MAS, "strength", (0.01, 0.03, 0.1))),
        Method("NVRM-Adam + MAS", varied(MAS, "b", (0.003, 0.01)), without_noise="Adam + MAS"),
        Method(
            "Adam + EWC",
            (
                *varied(EWC, "strength", (100.0, 300.0, 1000.0)),
                replace(EWC, lr=0.001, batch=64),
                replace(EWC, lr=0.001),
                replace(EWC, lr=0.003, batch=256),
            ),
        ),
        Method(
            "NVRM-Adam + EWC",
            (
                *varied(EWC, "b", (0.003, 0.01)),
                replace(EWC, lr=0.001, batch=64, b=0.01),
                replace(EWC, lr=0.003, batch=256, b=0.01),
            ),
            without_noise="Adam + EWC",
        ),
        Method("Adam + EWC + dropout", varied(EWC, "dropout", (0.25,))),
        # What the falling rate does without a penalty, and penalties on other methods.
        Method("Adam, falling rate", varied(LINEAR, "lr", (2e-4, 5e-4, 0.002)), simple=True),
        Method(
            "NVRM-Adam, falling rate",
            (replace(LINEAR, lr=5e-4, b=0.02), replace(LINEAR, lr=0.002, b=0.03)),
            without_noise="Adam, falling rate",
        ),
        Method(
            "NVRM-Adam + SI",
            varied(replace(SI, strength=30.0), "b", (0.003, 0.01)),
            without_noise="Adam + SI",
        ),
        Method("SGD + EWC", varied(SGD_EWC, "strength", (30.0, 100.0, 300.0))),
        Method(
            "NVRM-SGD + EWC",
            varied(replace(SGD_EWC, strength=100.0), "b", (0.003, 0.01)),
            without_noise="SGD + EWC",
        ),
    )
}
LONG = ("stable SGD", "Adam + MAS", "NVRM-Adam + MAS", "Adam + EWC", "NVRM-Adam + EWC")
"""Methods that are also run on longer streams."""
LATER = (
    "Adam, falling rate",
    "NVRM-Adam, falling rate",
    "NVRM-Adam + SI",
    "SGD + EWC",
    "NVRM-SGD + EWC",
)
"""Methods that were added last, and run last."""
