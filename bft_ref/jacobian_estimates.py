"""Jacobians by random signs: Hutchinson's diagonal and the row rule.

For networks whose matrices are not known, and for the exact first-order
variance that the diagonal rule underestimates.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bft_ref.delta import FeedForward, Normalised
from bft_ref.support.derivatives import jvp
from bft_ref.support.numerics import at_least_float32

Product = Callable[[Tensor], Tensor]


def jacobian_product(
    ffn: FeedForward, vector: Tensor, norm: Normalised | None = None
) -> Tensor:
    """J x, (..., d), the exact Jacobian of FFN∘norm times x (..., d)."""
    if norm is not None:
        inner = vector - norm.z * (norm.z * vector).mean(-1, keepdim=True)
        if norm.centred:
            inner = inner - vector.mean(-1, keepdim=True)
        vector = inner / norm.scale
        if norm.gamma is not None:
            vector = vector * norm.gamma
    forward = F.linear(vector.to(ffn.w_in.dtype), ffn.w_in)
    return at_least_float32(F.linear(ffn.slope * forward, ffn.w_out))


def hutchinson_growth(
    function: Product, x: Tensor, probes: Tensor, token: bool = False
) -> tuple[Tensor, Tensor]:
    """f(x), and :func:`probed_growth` of it by forward-mode derivatives.

    Shapes: ``x`` (..., d), ``probes`` (2, ..., d) of ±1 → f(x) (..., d) and
    the estimate (..., d), (..., 1) for a token.
    """
    made = []

    def product(probe: Tensor) -> Tensor:
        y, along = jvp(function, x, probe)
        made.append(y)
        return at_least_float32(along)

    growth = probed_growth(product, probes[0], probes[1], token)
    return made[0], growth


def probed_growth(
    product: Product, r1: Tensor, r2: Tensor, token: bool = False
) -> Tensor:
    """An estimate of (1 + J)², J = diag ∂f/∂x.

    r∘Jr is unbiased for J when r has random signs. Two independent probes
    are multiplied: one, squared, would estimate Σ_k(δ_ik + J_ik)² instead.
    The product is unbiased; where it is negative, it is taken as 0, which
    biases it upwards. ``token`` estimates (1 + tr J/d)² instead.

    Shapes: ``product`` maps r to Jr; ``r1`` and ``r2`` (..., d) of ±1 →
    (..., d), (..., 1) for a token. Equation (7.9); ours.
    """
    j1, j2 = r1 * product(r1), r2 * product(r2)
    if token:
        j1, j2 = j1.mean(-1, keepdim=True), j2.mean(-1, keepdim=True)
    return ((1 + j1) * (1 + j2)).clamp(min=0.0)


def row_variance(
    log_precision: Tensor, probe: Tensor, product: Product
) -> Tensor:
    """Estimate of Σ_k (δ_ik + J_ik)²/λ_k, (..., d), from one JVP.

    E[((I + J) λ^{−½} r)_i²] over random signs r: the exact first-order
    variance, which the diagonal rule underestimates.

    Shapes: ``log_precision`` broadcasts with ``probe`` (..., d), signs;
    ``product`` maps x to Jx. Units: state². Equation (7.11); ours.
    """
    x = (-0.5 * log_precision).exp() * probe
    return (x + product(x)).square()


def row_growth(
    log_precision: Tensor, probe: Tensor, product: Product
) -> Tensor:
    """log of :func:`row_variance` times λ, whatever the size of λ.

    The growth does not change when λ is multiplied by a constant, so λ is
    taken relative to the token's smallest. Shapes: as there.
    Equation (7.11); ours.
    """
    log = log_precision - log_precision.detach().amin(-1, keepdim=True)
    variance = row_variance(log, probe, product)
    return torch.log(variance + torch.finfo(variance.dtype).tiny) + log
