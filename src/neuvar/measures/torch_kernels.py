"""Copies of a model with torch's own quantized linear layers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuvar import _validate

KERNEL_BITS = (8, 4)
"""Bits per weight for which torch has CPU kernels."""

GROUP = 32
"""Number of weights of a row that share a scale at 4 bits."""


def quantized_copy(model: nn.Module, *, bits: int) -> nn.Module:
    """Copy a model to the CPU with its linear layers quantized by torch itself.

    With 8 bits the layers are those of ``torch.ao.quantization.quantize_dynamic``: signed integers
    with one scale per tensor; activations are rounded to 8 bits, too. With 4 bits they use torch's
    kernel for int4 weights: groups of 32 weights of a row share a scale and an offset. Only
    ``nn.Linear`` layers are quantized; convolutions, embeddings and all others are not changed.

    Args:
        model: A module in single precision with ``nn.Linear`` layers.
        bits: 8 or 4.

    >>> model = nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> quantized_copy(model, bits=4)(torch.ones(3, 40)).shape
    torch.Size([3, 2])
    """
    _validate.one_of("bits", bits, KERNEL_BITS)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {type(model).__name__}")
    if not any(type(module) is nn.Linear for module in model.modules()):
        raise ValueError("model has no nn.Linear layers, for which torch has quantized kernels")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError("model must be in single precision")
    copied = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    quantize = _int8_linear if bits == 8 else Int4Linear
    if type(copied) is nn.Linear:
        return quantize(copied)
    layers = {m: quantize(m) for m in copied.modules() if type(m) is nn.Linear}
    for module in list(copied.modules()):
        for name, child in module._modules.items():  # a layer may have several names
            if child in layers:
                module._modules[name] = layers[child]
        if isinstance(module, nn.TransformerEncoderLayer):
            # The fused kernel of this layer reads the weights of its linear layers. torch uses it
            # for these two activations only.
            module.activation_relu_or_gelu = 0
    return copied


def _int8_linear(linear: nn.Linear) -> nn.Module:
    from torch.ao import quantization

    with warnings.catch_warnings():  # torch plans to move this to torchao
        warnings.simplefilter("ignore")
        dynamic: Any = quantization.quantize_dynamic
        quantized: nn.Module = dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)[0]
    return quantized


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, computed by torch's CPU kernel."""

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        # The kernel needs sizes that are multiples of these.
        pad = (0, -self.inputs % GROUP, 0, -self.outputs % 16)
        groups = F.pad(linear.weight.detach(), pad).unflatten(1, (-1, GROUP))
        low, high = groups.amin(2), groups.amax(2)
        step = ((high - low) / 15).clamp(min=1e-12)
        levels = ((groups - low[..., None]) / step[..., None]).round().clamp(0, 15)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.register_buffer("packed", pack(levels.flatten(1).int(), 1))
        # The kernel computes (level - 8) * step + offset.
        scales = torch.stack([step, low + 8 * step], -1).transpose(0, 1).contiguous()
        self.register_buffer("scales", scales)
        self.bias: Tensor | None = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the quantized weights."""
        rows = F.pad(x.flatten(0, -2), (0, -self.inputs % GROUP))
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        product: Tensor = multiply(rows.contiguous(), self.packed, GROUP, self.scales)
        outputs: Tensor = product[:, : self.outputs].unflatten(0, x.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias
