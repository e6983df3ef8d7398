"""Neural variable optimizers."""

from neuvar.optim.groups import split_parameters
from neuvar.optim.named import NVRMSGD, NVRMAdam, NVRMAdamW
from neuvar.optim.nvrm import NVRM, optimizer_of
from neuvar.optim.rounding_noise import round_weights, rounding_parameters, update_rounding_noise

__all__ = [
    "NVRM",
    "NVRMSGD",
    "NVRMAdam",
    "NVRMAdamW",
    "optimizer_of",
    "round_weights",
    "rounding_parameters",
    "split_parameters",
    "update_rounding_noise",
]
