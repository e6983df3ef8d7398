"""Predictions averaged over weight noise, and how uncertain they are."""

from neuvar.prediction.averaging import predict
from neuvar.prediction.predictor import AveragedPredictor
from neuvar.prediction.uncertainty import Prediction

__all__ = ["AveragedPredictor", "Prediction", "predict"]
