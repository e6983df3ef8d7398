"""Experiments: the paper's claims, one file each, and what a user's own experiment is made of."""

from typing import TYPE_CHECKING

from neuvar.experiments import (
    denoising,
    ewc,
    flips,
    generalization,
    gradient_noise,
    noise_types,
    permuted,
    split,
    weight_noise,
)
from neuvar.experiments.experiment import SCALES, Experiment, ExperimentFile, Scale
from neuvar.experiments.findings import Case, Cell, Line, Panel, Result, Table, Verdict, judge
from neuvar.experiments.results_query import (
    against,
    best,
    cell,
    compare,
    curve,
    curves,
    group,
    last,
    make_table,
    matching,
    values,
)
from neuvar.experiments.run_spec import Run, Tasks, Training
from neuvar.lazy import attach

if TYPE_CHECKING:
    from neuvar.experiments.runner import run_one

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        weight_noise.EXPERIMENT,
        generalization.EXPERIMENT,
        flips.PAIR,
        flips.SYMMETRIC,
        permuted.EXPERIMENT,
        ewc.EXACT,
        ewc.BATCH_MEAN,
        split.EXPERIMENT,
        denoising.EXPERIMENT,
        noise_types.EXPERIMENT,
        gradient_noise.EXPERIMENT,
    )
}
"""The paper's experiments by name, in the order of the paper."""


# It imports torch, which ``neuvar list`` does not need.
__getattr__, __dir__ = attach(__name__, runner="run_one")

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Case",
    "Cell",
    "Experiment",
    "ExperimentFile",
    "Line",
    "Panel",
    "Result",
    "Run",
    "Scale",
    "Table",
    "Tasks",
    "Training",
    "Verdict",
    "against",
    "best",
    "cell",
    "compare",
    "curve",
    "curves",
    "group",
    "judge",
    "last",
    "make_table",
    "matching",
    "run_one",
    "values",
]
