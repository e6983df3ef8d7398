"""Measures of trained models, each with a confidence interval or an error."""

from neuvar.measures.calibration import Calibration, CalibrationBin, calibration_error
from neuvar.measures.curvature import CurvatureCheck, curvature_check, hessian_trace
from neuvar.measures.curve import Curve, LargestB, largest_b, variability_curve
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.memorization import Memorization, label_memorization
from neuvar.measures.plateau import Plateau, plateau_noise_rate
from neuvar.measures.sharpness import Sharpness, keskar_sharpness
from neuvar.measures.task_accuracy import Average, Forgetting, delta_ab, forgetting
from neuvar.measures.train_test_gap import GeneralizationGap, generalization_gap
from neuvar.measures.variability import Variability, expected_sharpness, neural_variability

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
