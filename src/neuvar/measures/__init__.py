"""Measures of trained models, each with a confidence interval or an error."""

from neuvar.measures.calibration import Calibration, CalibrationBin, calibration_error
from neuvar.measures.estimate import Estimate, Proportion
from neuvar.measures.image_corruptions import CORRUPTIONS, corrupt_images
from neuvar.measures.memorization import (
    GeneralizationGap,
    Memorization,
    Plateau,
    generalization_gap,
    label_memorization,
    plateau_noise_rate,
)
from neuvar.measures.robustness import (
    AdversarialAccuracy,
    CorruptionAccuracy,
    adversarial_accuracy,
    corruption_accuracy,
)
from neuvar.measures.scores import (
    AreaUnderROC,
    SelectiveAccuracy,
    brier_score,
    log_loss,
    ood_auroc,
    selective_accuracy,
)
from neuvar.measures.sharpness import (
    CurvatureCheck,
    Sharpness,
    curvature_check,
    expected_sharpness,
    hessian_trace,
    keskar_sharpness,
)
from neuvar.measures.stored_weights import Faults, Rounding, analog_noise, bit_flips, rounding
from neuvar.measures.task_accuracy import Average, Forgetting, delta_ab, forgetting_summary
from neuvar.measures.torch_kernels import quantized_copy
from neuvar.measures.variability import (
    Curve,
    LargestB,
    Variability,
    largest_b,
    neural_variability,
    variability_curve,
)

__all__ = [
    "CORRUPTIONS",
    "AdversarialAccuracy",
    "AreaUnderROC",
    "Average",
    "Calibration",
    "CalibrationBin",
    "CorruptionAccuracy",
    "CurvatureCheck",
    "Curve",
    "Estimate",
    "Faults",
    "Forgetting",
    "GeneralizationGap",
    "LargestB",
    "Memorization",
    "Plateau",
    "Proportion",
    "Rounding",
    "SelectiveAccuracy",
    "Sharpness",
    "Variability",
    "adversarial_accuracy",
    "analog_noise",
    "bit_flips",
    "brier_score",
    "calibration_error",
    "corrupt_images",
    "corruption_accuracy",
    "curvature_check",
    "delta_ab",
    "expected_sharpness",
    "forgetting_summary",
    "generalization_gap",
    "hessian_trace",
    "keskar_sharpness",
    "label_memorization",
    "largest_b",
    "log_loss",
    "neural_variability",
    "ood_auroc",
    "plateau_noise_rate",
    "quantized_copy",
    "rounding",
    "selective_accuracy",
    "variability_curve",
]
