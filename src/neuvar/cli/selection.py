"""Which runs a command line means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neuvar.cli.naming import fields_of, written
from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.experiment import Experiment, Scale
from neuvar.experiments.run_spec import Run


def experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, each once; all of them for ``all`` or for no name."""
    if not names or "all" in names:
        return list(EXPERIMENTS.values())
    for name in names:
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise ValueError(f"EXPERIMENT must be all or one of {known}, got {name!r}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)]


def runs_of(chosen: Iterable[Experiment], scale: Scale, trials: int) -> list[Run]:
    """The runs of experiments, a shared one once: those of the first trial, of the second, and on.

    So whatever has been finished at some moment can be compared.
    """
    found: dict[str, tuple[int, Run]] = {}
    for experiment in chosen:
        runs = experiment.runs(scale, trials)
        trial = {seed: number for number, seed in enumerate(dict.fromkeys(r.seed for r in runs))}
        for run in runs:
            found.setdefault(run.key, (trial[run.seed], run))
    return [run for _, run in sorted(found.values(), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Wanted:
    """One field of ``--only``, and the values that it may have."""

    field: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.field}={','.join(self.values)}"

    def fits(self, run: Run) -> bool:
        """Whether a run has the field, with one of the values."""
        if not hasattr(run, self.field):
            return False
        return any(same(text, getattr(run, self.field)) for text in self.values)


def same(text: str, value: object) -> bool:
    """Whether what was typed is the value of a field.

    >>> same(".050", 0.05), same("sgd", "sgd"), same("", ""), same("none", ""), same("1", True)
    (True, True, True, True, False)
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text in (written(value), value)


def only(runs: Sequence[Run], conditions: Sequence[str]) -> list[Run]:
    """The runs that meet all conditions, each FIELD=VALUE or FIELD=VALUE,VALUE."""
    wanted = [_understood(runs, condition) for condition in conditions]
    found = [run for run in runs if all(condition.fits(run) for condition in wanted)]
    if runs and not found:
        raise ValueError(f"--only: no run has all of {' '.join(map(str, wanted))}")
    return found


def _understood(runs: Sequence[Run], condition: str) -> Wanted:
    field, sign, text = condition.partition("=")
    if not sign:
        raise ValueError(f"--only must be FIELD=VALUE, such as seed=0, got {condition!r}")
    known = fields_of(runs)
    if field not in known:
        raise ValueError(f"--only: FIELD must be one of {', '.join(known)}, got {field!r}")
    had = {getattr(run, field): None for run in runs if hasattr(run, field)}
    wanted = Wanted(field, tuple(text.split(",")))
    for value in wanted.values:
        if not any(same(value, other) for other in had):
            values = ", ".join(written(other) for other in sorted(had))
            raise ValueError(f"--only: no run has {field}={value}; {field} is one of {values}")
    return wanted
