"""Carries out runs, on this machine or on a Ray cluster, and records each of them once."""

from neuvar.engine.events import Event, Kind, Summary, Watch
from neuvar.engine.results import Results
from neuvar.engine.sweeps import ENGINES, sweep

__all__ = ["ENGINES", "Event", "Kind", "Results", "Summary", "Watch", "sweep"]
