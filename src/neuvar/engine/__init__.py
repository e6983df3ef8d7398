"""Sweeps: many runs, on this machine or on a Ray cluster, each recorded once."""

from neuvar.engine.job import ENGINES, Event, Kind, Summary, SweepSpec, Watch, check_device
from neuvar.engine.results_file import Results
from neuvar.engine.sweeps import sweep

__all__ = [
    "ENGINES",
    "Event",
    "Kind",
    "Results",
    "Summary",
    "SweepSpec",
    "Watch",
    "check_device",
    "sweep",
]
