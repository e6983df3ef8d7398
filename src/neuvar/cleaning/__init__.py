"""Find, rank and correct wrong labels."""

from typing import Any

from neuvar.cleaning.duplicates import Duplicates, find_duplicates
from neuvar.cleaning.examples import Examples, read_examples
from neuvar.cleaning.export import export_cleanlab, export_label_studio
from neuvar.cleaning.find import find_label_issues
from neuvar.cleaning.observer import IndexedDataset, LabelObserver
from neuvar.cleaning.score import LabelIssues, NoiseRate, Transition, judge_labels
from neuvar.cleaning.training import network_for

__all__ = [
    "Duplicates",
    "Examples",
    "IndexedDataset",
    "LabelIssues",
    "LabelObserver",
    "NoiseRate",
    "Transition",
    "export_cleanlab",
    "export_label_studio",
    "find_duplicates",
    "find_label_issues",
    "judge_labels",
    "network_for",
    "read_examples",
]


def __getattr__(name: str) -> Any:
    """Import scikit-learn only when NVRMClassifier is used."""
    if name == "NVRMClassifier":
        from neuvar.cleaning.sklearn import NVRMClassifier

        return NVRMClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
