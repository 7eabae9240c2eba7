"""LayerNorm and RMSNorm with their scale, by PyTorch's kernels."""

import torch
from torch import Tensor

from bft_ref import delta
from bft_ref.support.derivatives import reverse_mode_only
from bft_ref.support.numerics import at_least_float32, shrink


def normalise(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float = 1e-5,
    centred: bool = True,
) -> delta.Normalised:
    """:func:`bft_ref.delta.normalise`, sooner.

    Not in forward mode: there the kernel's derivative has a wrong gradient
    (torch 2.13).
    """
    if reverse_mode_only(x):
        return delta.normalise(x, gamma, beta, eps, centred)
    w, power = shrink(at_least_float32(x))
    z, scale = Standardise.apply(w, eps, centred)
    scale = scale if power is None else scale * power
    return delta.Normalised(z, scale, gamma, beta, centred)


class Standardise(torch.autograd.Function):
    """z = (x − mean)/ς and ς, or x/r and r, (..., 1), of which z is kept.

    ∂ς/∂x = z/d, and ∂z/∂x takes off the part along z, and that along 1.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        shape = x.shape[-1:]
        if centred:
            z, _, inverse = torch.native_layer_norm(x, shape, None, None, eps)
            return z, inverse.reciprocal()
        scale = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x / scale, scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.centred = inputs[2]
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx, grad_z, grad_scale):
        z, scale = ctx.saved_tensors
        along = (grad_z * z).mean(-1, keepdim=True)
        along = along / scale - grad_scale / z.shape[-1]
        across = grad_z
        if ctx.centred:
            across = grad_z - grad_z.mean(-1, keepdim=True)
        return torch.addcmul(across / scale, z, along, value=-1), None, None
