"""What runs are called on the screen: what tells each from the others, in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from neuvar.experiments.run_spec import NOT_IN_KEY, Run, Training

FIRST = ("data", "stream", "model", "optimizer")
"""Fields that a label begins with, in this order; it ends with the seed."""

TELLING = {
    *FIRST,
    *("b", "noise", "label_noise", "noise_rate", "penalty", "strength", "fisher", "seed"),
}
"""Fields that a label has whenever they differ; others only if it would not be enough."""

USUAL = {"noise": "gaussian", "fisher": "exact"}
"""Values that go without saying, like those that are 0, false or empty."""

SELF_EVIDENT = {*FIRST, "noise", "penalty", "fisher", "label_noise"}
"""Fields whose values need no name beside them."""


def fields_of(runs: Iterable[Run]) -> list[str]:
    """The fields that these runs have, in the order of a label."""
    kinds = dict.fromkeys(type(run) for run in runs)
    names = dict.fromkeys(field.name for kind in kinds for field in fields(kind))
    inner = [name for name in names if name not in FIRST and name != "seed"]
    return [*(name for name in FIRST if name in names), *inner, "seed"]


def written(value: Any) -> str:
    """The value of a field as it is read and typed.

    >>> written(0.03), written(True), written(""), written((0.01, 0.02))
    ('0.03', 'true', 'none', '0.01/0.02')
    """
    if isinstance(value, tuple):
        return "/".join(map(written, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "none"


def differing(runs: Sequence[Run]) -> list[str]:
    """The fields that not all of the runs which have them agree on, in the order of a label.

    If some have tasks and others do not, ``stream`` is among them.
    """
    found = []
    for name in fields_of(runs):
        values = {getattr(run, name) for run in runs if hasattr(run, name)}
        lacking = name == "stream" and any(isinstance(run, Training) for run in runs)
        if name not in NOT_IN_KEY and (len(values) > 1 or lacking):
            found.append(name)
    return found


def label(run: Run, names: Iterable[str]) -> str:
    """A run in a few words: its optimizer, what ``names`` tells of it, and its seed.

    What is usual, 0, false or empty goes without saying.

    >>> label(Training(data="mnist", optimizer="nvrm-sgd", b=0.05, seed=4), ["b", "label_noise"])
    'nvrm-sgd b=0.05 seed=4'
    """
    wanted = {*names, "optimizer", "seed"}
    words = []
    for name in fields_of([run]):
        value = getattr(run, name)
        if name not in wanted or (name != "seed" and value in (USUAL.get(name), 0, "", ())):
            continue
        if value is True:
            words.append(name)
        else:
            words.append(written(value) if name in SELF_EVIDENT else f"{name}={written(value)}")
    return " ".join(words)


def labels(runs: Sequence[Run]) -> dict[str, str]:
    """A label for each run's key: no longer than it takes to tell these runs apart."""
    unique = list({run.key: run for run in runs}.values())
    different = differing(unique)
    names = [name for name in different if name in TELLING]
    count = _distinct(unique, names)
    for name in different:
        if name not in TELLING and count < len(unique):
            more = _distinct(unique, [*names, name])
            names, count = ([*names, name], more) if more > count else (names, count)
    return {run.key: label(run, names) for run in unique}


def _distinct(runs: Sequence[Run], names: Sequence[str]) -> int:
    return len({label(run, names) for run in runs})
