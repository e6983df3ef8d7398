"""Predictions averaged over weight noise, and how uncertain they are."""

from neuvar.prediction.averaging import AveragedPredictor, predict
from neuvar.prediction.uncertainty import Prediction

__all__ = ["AveragedPredictor", "Prediction", "predict"]
