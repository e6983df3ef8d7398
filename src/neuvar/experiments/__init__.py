"""The paper's claims: one file each, with its runs, its figure and its check."""

from neuvar.experiments import (
    denoising,
    ewc,
    flips,
    generalization,
    gradient_noise,
    noise_types,
    permuted,
    robustness,
    split,
)
from neuvar.experiments.carrying import carry_out
from neuvar.experiments.experiment import SCALES, Experiment, Scale
from neuvar.experiments.findings import Result
from neuvar.experiments.runs import Run, Tasks, Training

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        robustness.EXPERIMENT,
        generalization.EXPERIMENT,
        flips.PAIR,
        flips.SYMMETRIC,
        permuted.EXPERIMENT,
        ewc.EXPERIMENT,
        split.EXPERIMENT,
        denoising.EXPERIMENT,
        noise_types.EXPERIMENT,
        gradient_noise.EXPERIMENT,
    )
}
"""Every claim that is put to the test, in the order of the paper."""

__all__ = [
    "EXPERIMENTS",
    "SCALES",
    "Experiment",
    "Result",
    "Run",
    "Scale",
    "Tasks",
    "Training",
    "carry_out",
]
