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
        z, scale, *_ = LayerNorm.apply(w, eps)
    else:
        scale = (w.square().mean(-1, keepdim=True) + eps).sqrt()
        z = F.rms_norm(w, w.shape[-1:], eps=eps)
    scale = scale if power is None else scale * power
    return delta.Normalised(z, scale, gamma, beta, centred)


class LayerNorm(torch.autograd.Function):
    """z = (x − mean)/ς and ς, (..., 1); ∂ς/∂x = z/d."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, ...]:
        shape = x.shape[-1:]
        z, mean, inverse = torch.native_layer_norm(x, shape, None, None, eps)
        return z, inverse.reciprocal(), mean, inverse

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, _, mean, inverse = output
        ctx.save_for_backward(inputs[0], z, mean, inverse)
        ctx.mark_non_differentiable(mean, inverse)

    @staticmethod
    def backward(ctx, grad_z, grad_scale, *_):
        x, z, mean, inverse = ctx.saved_tensors
        kernel = torch.ops.aten.native_layer_norm_backward
        shape = x.shape[-1:]
        needed = [True, False, False]
        grad, *_ = kernel(grad_z, x, shape, mean, inverse, None, None, needed)
        return torch.addcmul(grad, z, grad_scale / shape[0]), None
