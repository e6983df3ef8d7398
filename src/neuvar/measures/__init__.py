"""Measures of trained models, each with a confidence interval or an error."""

from neuvar.measures.calibration import Calibration, CalibrationBin, calibration_error
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.memorization import (
    GeneralizationGap,
    Memorization,
    Plateau,
    generalization_gap,
    label_memorization,
    plateau_noise_rate,
)
from neuvar.measures.sharpness import (
    CurvatureCheck,
    Sharpness,
    curvature_check,
    expected_sharpness,
    hessian_trace,
    keskar_sharpness,
)
from neuvar.measures.task_accuracy import Average, Forgetting, delta_ab, forgetting
from neuvar.measures.variability import (
    Curve,
    LargestB,
    Variability,
    largest_b,
    neural_variability,
    variability_curve,
)

__all__ = [
    "Average",
    "Calibration",
    "CalibrationBin",
    "CurvatureCheck",
    "Curve",
    "Estimate",
    "Forgetting",
    "GeneralizationGap",
    "LargestB",
    "Memorization",
    "Plateau",
    "Proportion",
    "Sharpness",
    "Variability",
    "calibration_error",
    "curvature_check",
    "delta_ab",
    "expected_sharpness",
    "forgetting",
    "generalization_gap",
    "hessian_trace",
    "keskar_sharpness",
    "label_memorization",
    "largest_b",
    "neural_variability",
    "plateau_noise_rate",
    "variability_curve",
]
