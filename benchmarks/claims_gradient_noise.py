"""Claim S with 10,000 images; see claims.py."""

from claims import experiment

EXPERIMENT = experiment("gradient-noise")
