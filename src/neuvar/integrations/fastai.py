"""A callback for fastai, needed only for ``b="auto"``.

Pass the model to the optimizer:
``opt_func=partial(OptimWrapper, opt=partial(neuvar.NVRMAdam, model=model, b=0.05))``.
"""

from __future__ import annotations

from neuvar.optim import optimizer_of

try:
    from fastai.callback.core import Callback
    from fastai.callback.fp16 import MixedPrecision
except ImportError as missing:
    raise ImportError(
        'neuvar.integrations.fastai needs fastai: pip install "neuvar[fastai]"'
    ) from missing


class ReportLoss(Callback):
    """Reports each loss to ``b="auto"``."""

    order = MixedPrecision.order - 1  # a loss is reported before it is scaled
    run_valid = False

    def before_backward(self) -> None:
        optimizer_of(self.model).report_loss(self.learn.loss_grad)
