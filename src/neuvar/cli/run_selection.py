"""Which runs a command line selects, and the label of each run on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import Experiment, ExperimentFile, Scale
from neuvar.experiments.run_spec import NOT_IN_KEY, Run, Training, format_value, no_run_has

FIRST = ("data", "stream", "model", "optimizer")
"""Fields that a label begins with, in this order; it ends with the seed."""
PREFERRED = {
    *FIRST,
    *("b", "noise", "label_noise", "noise_rate", "penalty", "strength", "fisher", "seed"),
}
"""Fields that a label has whenever they differ; others only if runs would look the same."""
DEFAULTS = {"noise": "gaussian", "fisher": "exact"}
"""Values that a label leaves out, like those that are 0, false or empty."""
WITHOUT_NAME = {*FIRST, "noise", "penalty", "fisher", "label_noise"}
"""Fields whose value a label shows without the name."""


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name or by file (.py), each once; the paper's for ``all`` or for no name."""
    names = [*names] or ["all"]
    chosen = dict(EXPERIMENTS) if "all" in names else {}
    for name in names:
        if name.endswith(".py"):
            experiment = ExperimentFile.read(name).load()
            other = EXPERIMENTS.get(experiment.name) or chosen.get(experiment.name, experiment)
            if other.file != experiment.file:
                raise ValueError(
                    f"{name} has the name of another experiment, {experiment.name}; rename the file"
                )
            chosen[experiment.name] = experiment
        elif name in EXPERIMENTS:
            chosen[name] = EXPERIMENTS[name]
        elif name != "all":
            known = ", ".join(EXPERIMENTS)
            hint = f"; did you mean {name}.py?" if Path(f"{name}.py").exists() else ""
            raise ValueError(
                f"EXPERIMENT must be a .py file, all or one of {known}, got {name!r}{hint}"
            )
    return list(chosen.values())


def runs_of(
    experiments: Iterable[Experiment],
    scale: Scale,
    trials: int,
    lines: Mapping[str, dict[str, Any]] | None = None,
) -> list[Run]:
    """The runs of experiments, each once: first all runs of trial 1, then of trial 2, and so on.

    So an interrupted sweep has finished runs of every setting. ``lines`` are the recorded lines by
    key.
    """
    unique: dict[str, tuple[int, Run]] = {}
    for experiment in experiments:
        runs = experiment.planned(scale, trials, lines)
        trial = {seed: number for number, seed in enumerate(dict.fromkeys(r.seed for r in runs))}
        for run in runs:
            unique.setdefault(run.key, (trial[run.seed], run))
    return [run for _, run in sorted(unique.values(), key=lambda pair: pair[0])]


def only(runs: Sequence[Run], conditions: Sequence[str]) -> list[Run]:
    """The runs that meet all conditions, each FIELD=VALUE or FIELD=VALUE,VALUE."""
    selected, known = list(runs), fields_of(runs)
    for condition in conditions:
        field, sign, text = condition.partition("=")
        if not sign:
            raise ValueError(f"--only must be FIELD=VALUE, such as seed=0, got {condition!r}")
        if field not in known:
            raise ValueError(f"--only: FIELD must be one of {', '.join(known)}, got {field!r}")
        existing = {getattr(run, field) for run in runs if hasattr(run, field)}
        wanted = set()
        for part in text.split(","):
            matching = {value for value in existing if matches(part, value)}
            if not matching:
                raise ValueError(f"--only: {no_run_has(field, part, existing)}")
            wanted |= matching
        selected = [r for r in selected if hasattr(r, field) and getattr(r, field) in wanted]
    if runs and not selected:
        raise ValueError(f"--only: no run has all of {' '.join(conditions)}")
    return selected


def matches(text: str, value: object) -> bool:
    """Whether text from the command line stands for the value of a field.

    >>> [matches(*pair) for pair in ((".050", 0.05), ("", ""), ("none", ""), ("1", True))]
    [True, True, True, False]
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text in (format_value(value), value)


def fields_of(runs: Iterable[Run]) -> list[str]:
    """The fields that these runs have, in the order of a label."""
    kinds = dict.fromkeys(type(run) for run in runs)
    names = dict.fromkeys(field.name for kind in kinds for field in fields(kind))
    inner = [name for name in names if name not in FIRST and name != "seed"]
    return [*(name for name in FIRST if name in names), *inner, "seed"]


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """The fields in which runs differ, in the order of a label.

    ``stream`` is among them if some runs have tasks and others do not.
    """
    differing = []
    for name in fields_of(runs):
        values = {getattr(run, name) for run in runs if hasattr(run, name)}
        mixed = name == "stream" and any(isinstance(run, Training) for run in runs)
        if name not in NOT_IN_KEY and (len(values) > 1 or mixed):
            differing.append(name)
    return differing


def label(run: Run, names: Iterable[str]) -> str:
    """A run in a few words: its optimizer, the fields ``names``, and its seed.

    Defaults and values that are 0, false or empty are left out.

    >>> label(Training(data="mnist", optimizer="nvrm-sgd", b=0.05, seed=4), ["b", "label_noise"])
    'nvrm-sgd b=0.05 seed=4'
    """
    shown = {*names, "optimizer", "seed"}
    words = []
    for name in fields_of([run]):
        value = getattr(run, name)
        if name not in shown or (name != "seed" and value in (DEFAULTS.get(name), 0, "", ())):
            continue
        text = name if value is True else format_value(value)
        words.append(text if value is True or name in WITHOUT_NAME else f"{name}={text}")
    return " ".join(words)


def run_labels(runs: Sequence[Run]) -> dict[str, str]:
    """A label for each run's key, as short as possible while all labels are different."""
    unique = {run.key: run for run in runs}
    differing = differing_fields(list(unique.values()))
    names = [name for name in differing if name in PREFERRED]
    shortest = {key: label(run, names) for key, run in unique.items()}
    for name in differing:
        if name not in PREFERRED and len(set(shortest.values())) < len(unique):
            longer = {key: label(run, [*names, name]) for key, run in unique.items()}
            if len(set(longer.values())) > len(set(shortest.values())):
                names, shortest = [*names, name], longer
    return shortest
