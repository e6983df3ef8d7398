"""Neural variable optimizers, and the baselines they are compared with."""

from neuvar.optim.groups import split_parameters
from neuvar.optim.injected import PSGD, SGLD
from neuvar.optim.named import NVRMSGD, AntiPGD, NVRMAdam, NVRMAdamW, SmoothOut
from neuvar.optim.nvrm import NVRM, optimizer_of
from neuvar.optim.sam import SAM

__all__ = [
    "NVRM",
    "NVRMSGD",
    "PSGD",
    "SAM",
    "SGLD",
    "AntiPGD",
    "NVRMAdam",
    "NVRMAdamW",
    "SmoothOut",
    "optimizer_of",
    "split_parameters",
]
