"""Neural variable optimizers."""

from neuvar.optim.groups import split_parameters
from neuvar.optim.named import NVRMSGD, NVRMAdam, NVRMAdamW
from neuvar.optim.nvrm import NVRM, optimizer_of

__all__ = ["NVRM", "NVRMSGD", "NVRMAdam", "NVRMAdamW", "optimizer_of", "split_parameters"]
