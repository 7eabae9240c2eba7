"""LayerNorm and RMSNorm with their scale, by PyTorch's kernels."""

import torch
import torch.nn.functional as F
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
    if centred:
        z, scale = LayerNorm.apply(w, eps)
    else:
        scale = (w.square().mean(-1, keepdim=True) + eps).sqrt()
        z = F.rms_norm(w, w.shape[-1:], eps=eps)
    scale = scale if power is None else scale * power
    return delta.Normalised(z, scale, gamma, beta, centred)


class LayerNorm(torch.autograd.Function):
    """z = (x − mean)/ς and ς, (..., 1), of which z alone is kept.

    ∂ς/∂x = z/d, and ∂z/∂x takes off the parts along 1 and along z.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        shape = x.shape[-1:]
        z, _, inverse = torch.native_layer_norm(x, shape, None, None, eps)
        return z, inverse.reciprocal()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx, grad_z, grad_scale):
        z, scale = ctx.saved_tensors
        along = (grad_z * z).mean(-1, keepdim=True)
        along = along / scale - grad_scale / z.shape[-1]
        across = grad_z - grad_z.mean(-1, keepdim=True)
        return torch.addcmul(across / scale, z, along, value=-1), None
