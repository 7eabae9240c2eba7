"""The algebra of precision with few passes, and a backward pass by hand.

Each function keeps no more of the state's size than it must for its backward
pass, where the plain forms together keep some twenty. They can be
differentiated twice. Odds are kept, not shares: where one share is all but 1,
the other would be lost.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function

from bft_ref import delta, kalman, reml
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
    mean, log_precision, k, _ = Update.apply(
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


def observation_variance(
    dispersion: Tensor,
    n_eff: Tensor,
    prior_scale: Tensor,
    prior_dof: float = 1.0,
    reading: reml.Reading = "prediction",
) -> Tensor:
    """:func:`bft_ref.reml.observation_variance`, sooner."""
    given = (dispersion, n_eff, prior_scale)
    if reverse_mode_only(*given):
        return reml.observation_variance(*given, prior_dof, reading)
    checks.choice("reading", reading, reml.READINGS)
    checks.number("prior_dof", prior_dof, 0.0)
    tensors = map(at_least_float32, given)
    return Variance.apply(*tensors, prior_dof, reading)


def log_precision(variance: Tensor) -> Tensor:
    """:func:`bft_ref.reml.log_precision`, which keeps its result alone."""
    if reverse_mode_only(variance):
        return reml.log_precision(variance)
    return LogPrecision.apply(variance)


def growth(
    first: Tensor, radial: Tensor | None, norm: delta.Normalised
) -> Tensor:
    """log (1 + J)² behind a norm, J = (first − z∘radial/d)/ς, (..., d).

    The last steps of :func:`bft_ref.delta.jacobian_diag` and
    :func:`bft_ref.delta.feed_forward_growth`. Shapes: ``first`` and ``radial``
    (..., d). Equations (7.5) to (7.7).
    """
    given = [x for x in (first, radial, norm.z, norm.scale) if x is not None]
    if reverse_mode_only(*given):
        return Growth.forward(first, radial, norm.z, norm.scale)[0]
    return Growth.apply(first, radial, norm.z, norm.scale)[0]


def _like(gradients, inputs) -> tuple[Tensor | None, ...]:
    """Gradients of what was broadcast, summed, in the dtype it had."""
    return tuple(
        None if g is None else g.sum_to_size(shape).to(dtype)
        for g, (shape, dtype) in zip(gradients, inputs, strict=True)
    )


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Of two gradients of which either may be missing."""
    return b if a is None else a if b is None else a + b


def _about(tensors) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in tensors]


class Update(Function):
    """h + K∘e, log(λ + λ_obs), K, and its logit, from which 1 − K is exact."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor, log: Tensor, innovation: Tensor, observed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logit = observed - log
        k = torch.sigmoid(logit)
        dtype = torch.promote_types(mean.dtype, innovation.dtype)
        after = mean.to(dtype) + k.to(dtype) * innovation
        return after, torch.logaddexp(log, observed), k, logit

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2], output[3])
        ctx.set_materialize_grads(False)
        ctx.inputs = _about(inputs)

    @staticmethod
    def backward(ctx, grad_mean, grad_log, grad_k, grad_logit):
        innovation, logit = ctx.saved_tensors
        k, rest = torch.sigmoid(logit), torch.sigmoid(-logit)
        to_innovation, to_k = None, grad_k
        if grad_mean is not None:
            known = at_least_float32(grad_mean)
            to_innovation = known * k
            to_k = _sum((known * innovation).sum_to_size(k.shape), grad_k)
        to_logit = _sum(grad_logit, None if to_k is None else to_k * k * rest)
        to_log = None if to_logit is None else -to_logit
        to_observed = to_logit
        if grad_log is not None:
            to_log = _sum(grad_log * rest, to_log)
            to_observed = _sum(grad_log * k, to_logit)
        found = (grad_mean, to_log, to_innovation, to_observed)
        return _like(found, ctx.inputs)


class Predict(Function):
    """−log((1 + J)²/λ' + Q), and log of the former over Q."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        log: Tensor, log_growth: Tensor, log_q: Tensor
    ) -> tuple[Tensor, Tensor]:
        carried = log_growth - log
        return -torch.logaddexp(carried, log_q), carried - log_q

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.set_materialize_grads(False)
        ctx.inputs = _about(inputs)

    @staticmethod
    def backward(ctx, grad, grad_ratio):
        (ratio,) = ctx.saved_tensors
        to_log = to_q = None if grad_ratio is None else -grad_ratio
        if grad is not None:
            # each share by itself: one minus the other would cancel
            to_log = _sum(grad * torch.sigmoid(ratio), to_log)
            to_q = _sum(-grad * torch.sigmoid(-ratio), to_q)
        back = None if to_log is None else -to_log
        return _like((to_log, back, to_q), ctx.inputs)


class Variance(Function):
    """A s₀² + B D, with A and B functions of n: (5.8) to (5.10)."""

    generate_vmap_rule = True

    @staticmethod
    def factors(n: Tensor, prior_dof: float, reading: str) -> list[Tensor]:
        """A, B, and their slopes in n: none where a row saw nothing."""
        n, more = torch.where(n < 1, 1.0, n), (n >= 1).to(n.dtype)
        dof = prior_dof + n - 1
        wider, slope = {
            "prediction": ((n + 1) / n, -1 / n.square()),
            "mean": (1 / n, -1 / n.square()),
            "value": (torch.ones_like(n), torch.zeros_like(n)),
        }[reading]
        prior, data = prior_dof / dof, n / dof
        slopes = (
            slope * prior - wider * prior / dof,
            slope * data + wider * (prior_dof - 1) / dof.square(),
        )
        return [wider * prior, wider * data, *(more * x for x in slopes)]

    @staticmethod
    def forward(
        dispersion: Tensor,
        n: Tensor,
        prior_scale: Tensor,
        prior_dof: float,
        reading: str,
    ) -> Tensor:
        a, b, *_ = Variance.factors(n, prior_dof, reading)
        found = torch.addcmul(a * prior_scale, b, dispersion)
        return found.clamp_(min=torch.finfo(found.dtype).tiny)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.prior_dof, ctx.reading = inputs
        ctx.save_for_backward(*tensors)
        ctx.inputs = _about(tensors)

    @staticmethod
    def backward(ctx, grad):
        dispersion, n, prior_scale = ctx.saved_tensors
        a, b, slope_a, slope_b = Variance.factors(
            n, ctx.prior_dof, ctx.reading
        )
        # as of the plain form: no gradient where the smallest number stands
        exact = torch.addcmul(a * prior_scale, b, dispersion)
        grad = grad.masked_fill(exact < torch.finfo(exact.dtype).tiny, 0.0)
        along = torch.addcmul(slope_a * prior_scale, slope_b, dispersion)
        found = (grad * b, grad * along, grad * a)
        return *_like(found, ctx.inputs), None, None


class LogPrecision(Function):
    """−log of a variance, at least the smallest number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(variance: Tensor) -> Tensor:
        tiny = torch.finfo(variance.dtype).tiny
        return variance.clamp(min=tiny).log_().neg_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (log,) = ctx.saved_tensors
        info = torch.finfo(log.dtype)
        clamped = log > -math.log(info.tiny) * (1 - info.eps)
        return -grad * log.exp().masked_fill(clamped, 0.0)


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
            to_factor = _sum(through, grad_factor)
        to_first = to_factor / scale
        to_scale = ((1 - factor) * to_first).sum(-1, keepdim=True)
        if radial is None:
            return to_first, None, None, to_scale
        shared = to_first * (-1 / z.shape[-1])
        return to_first, shared * z, shared * radial, to_scale
