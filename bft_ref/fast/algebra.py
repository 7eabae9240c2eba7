"""Update and prediction with few passes over memory, backward by hand.

Each of the three keeps one tensor of the state's size for its backward pass,
where the plain forms keep some twenty. They can be differentiated twice.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bft_ref import delta, kalman
from bft_ref.belief import Belief
from bft_ref.support import checks
from bft_ref.support.derivatives import reverse_mode_only
from bft_ref.support.numerics import at_least_float32


def update(
    belief: Belief, innovation: Tensor, log_observation_precision: Tensor
) -> tuple[Belief, Tensor]:
    """:func:`bft_ref.kalman.update`, sooner."""
    given = (*belief, innovation, log_observation_precision)
    if reverse_mode_only(*given):
        return kalman.update(belief, innovation, log_observation_precision)
    checks.floating("mean", belief.mean)
    checks.broadcastable("innovation", innovation, "mean", belief.mean)
    mean, log_precision, k = Update.apply(
        belief.mean,
        at_least_float32(belief.log_precision),
        innovation,
        at_least_float32(log_observation_precision),
    )
    return Belief(mean, log_precision), k


def predict(
    log_precision: Tensor, log_growth: Tensor, log_process_noise: Tensor
) -> Tensor:
    """:func:`bft_ref.delta.predict`, sooner."""
    given = (log_precision, log_growth, log_process_noise)
    if reverse_mode_only(*given):
        return delta.predict(*given)
    return Predict.apply(*map(at_least_float32, given))[0]


def growth(
    first: Tensor, radial: Tensor | None, norm: delta.Normalised
) -> Tensor:
    """log (1 + J)² behind a norm, J = (first − z∘radial/d)/ς, (..., d)."""
    given = [x for x in (first, radial, norm.z, norm.scale) if x is not None]
    if reverse_mode_only(*given):
        return Growth.forward(first, radial, norm.z, norm.scale)[0]
    return Growth.apply(first, radial, norm.z, norm.scale)[0]


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40.0)  # below it, x alone is not exact


def _like(gradients, inputs) -> tuple[Tensor | None, ...]:
    """Gradients of what was broadcast, summed, in the dtype it had."""
    return tuple(
        None if g is None else g.sum_to_size(shape).to(dtype)
        for g, (shape, dtype) in zip(gradients, inputs, strict=True)
    )


def _about(tensors) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tensors]


class Update(Function):
    """h + K∘e, log(λ + λ_obs) = log λ + log(1 + λ_obs/λ), and K."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor, log: Tensor, innovation: Tensor, observed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        relative = observed - log
        k = torch.sigmoid(relative)
        dtype = torch.promote_types(mean.dtype, innovation.dtype)
        after = mean.to(dtype) + k.to(dtype) * innovation
        return after, log + _softplus(relative), k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2], output[2])
        ctx.set_materialize_grads(False)
        ctx.inputs = _about(inputs)

    @staticmethod
    def backward(ctx, grad_mean, grad_log, grad_k):
        if grad_mean is grad_log is grad_k is None:
            return None, None, None, None
        innovation, k = ctx.saved_tensors
        to_gain, to_innovation = grad_k, None
        if grad_mean is not None:
            wide = at_least_float32(grad_mean)
            to_innovation = wide * k
            through = (wide * innovation).sum_to_size(k.shape)
            to_gain = through if grad_k is None else through + grad_k
        to_observed = None if to_gain is None else to_gain * (1 - k)
        if grad_log is not None:
            known = to_observed is None
            to_observed = grad_log if known else to_observed + grad_log
        to_observed = to_observed * k
        rest = -to_observed if grad_log is None else grad_log - to_observed
        found = (grad_mean, rest, to_innovation, to_observed)
        return _like(found, ctx.inputs)


class Predict(Function):
    """−log((1 + J)²/λ' + Q) as log λ' − log (1 + J)² − log(1 + share of Q)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        log: Tensor, log_growth: Tensor, log_q: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = log - log_growth
        relative = kept + log_q
        return kept - _softplus(relative), torch.sigmoid(relative)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.set_materialize_grads(False)
        ctx.inputs = _about(inputs)

    @staticmethod
    def backward(ctx, grad, grad_share):
        if grad is grad_share is None:
            return None, None, None
        (share,) = ctx.saved_tensors
        to_q = None if grad is None else -grad * share
        if grad_share is not None:
            more = grad_share * share * (1 - share)
            to_q = more if to_q is None else to_q + more
        to_log = to_q if grad is None else to_q + grad
        return _like((to_log, -to_log, to_q), ctx.inputs)


class Growth(Function):
    """log((1 + J)² + tiny), and 1 + J."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        first: Tensor, radial: Tensor | None, z: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        inner = first
        if radial is not None:
            inner = torch.addcmul(first, z, radial, value=-1 / z.shape[-1])
        factor = 1 + inner / scale
        tiny = torch.finfo(factor.dtype).tiny
        return torch.log(factor.square() + tiny), factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, grad_factor):
        if grad is grad_factor is None:
            return None, None, None, None
        radial, z, scale, factor = ctx.saved_tensors
        to_factor = grad_factor
        if grad is not None:
            tiny = torch.finfo(factor.dtype).tiny
            through = 2 * grad * factor / (factor.square() + tiny)
            whole = grad_factor is None
            to_factor = through if whole else through + grad_factor
        to_first = to_factor / scale
        to_scale = ((1 - factor) * to_first).sum(-1, keepdim=True)
        if radial is None:
            return to_first, None, None, to_scale
        shared = to_first * (-1 / z.shape[-1])
        return to_first, shared * z, shared * radial, to_scale
