"""The scale of the noise and what it costs, for the loggers of frameworks."""

from __future__ import annotations

import torch

from neuvar.optim import NVRM
from neuvar.optim.auto_b import inner_product


def noise_metrics(optimizer: NVRM) -> dict[str, float]:
    r"""b, and an estimate of δ, between the backward pass and the step.

    δ is the rise of the loss that the noise causes, :math:`L(\theta + \epsilon) - L(\theta)`. It is
    estimated from the gradient at the perturbed weights, without another forward pass:

    .. math:: \delta \approx \tfrac12\, \epsilon \cdot \nabla L(\theta + \epsilon).

    For a quadratic loss its mean over noise is that of δ, :math:`\tfrac12 b^2\,\mathrm{tr}\,H`. The
    value of one step is noisy. Gradients must be unscaled and not yet clipped. b is that of the
    first parameter group.
    """
    terms = optimizer._weights.eps.items()
    parts = [inner_product(term, p.grad) for p, term in terms if p.grad is not None]
    delta = 0.5 * float(torch.stack(parts).sum()) if parts else 0.0
    return {"b": float(optimizer.param_groups[0]["b"]), "delta": delta}
