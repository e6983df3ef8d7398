"""Wrong labels: find, rank, correct, show."""

from typing import Any

from neuvar.cleaning.finding import find_label_issues
from neuvar.cleaning.inputs import Examples, read_examples
from neuvar.cleaning.issues import LabelIssues, NoiseRate, Transition
from neuvar.cleaning.judging import judge_labels
from neuvar.cleaning.networks import network_for

__all__ = [
    "Examples",
    "LabelIssues",
    "NoiseRate",
    "Transition",
    "find_label_issues",
    "judge_labels",
    "network_for",
    "read_examples",
]


def __getattr__(name: str) -> Any:
    """The classifier for scikit-learn, which is imported only when it is asked for."""
    if name == "NVRMClassifier":
        from neuvar.cleaning.estimator import NVRMClassifier

        return NVRMClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
