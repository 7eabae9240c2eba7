"""What W_V and W_O make of variances, found once while they are the same."""

import torch
from torch import Tensor

from bft_ref.support.numerics import at_least_float32, autocast_device
from bft_ref.support.weights import of_weights


def prior_scale(
    w_in: Tensor,
    gamma: Tensor | None,
    neighbours: Tensor,
    sizes: tuple[int, int, int],
    feature_weights: Tensor | None = None,
) -> Tensor:
    """s₀² = g_i Σ_j α̃_tj c_j, g_i = Σ_k (W_V[i,k] γ_k)², head by head.

    Shapes: ``sizes`` are H, H_kv and d_h; W_V is the last H_kv·d_h rows of
    ``w_in`` (…, d), ``gamma`` (d,) of the norm in front; ``neighbours``
    Σ_j α̃_tj c_j (B, H, T); ``feature_weights`` (H, d_h) adds a head's
    features up → (B, H, T, d_h or 1), in value². Equation (5.12); ours.
    """
    heads, kv_heads, head_dim = sizes

    def squares() -> Tensor:
        w_v = w_in[-kv_heads * head_dim :]
        if gamma is not None:
            w_v = w_v * gamma
        g = at_least_float32(w_v).square().sum(-1)
        g = g.unflatten(0, (-1, head_dim))
        return g.repeat_interleave(heads // kv_heads, 0)

    g = of_weights(("prior_scale", *sizes), [w_in, gamma], squares)
    if feature_weights is not None:
        g = (g * feature_weights).sum(-1, True)
    return g.unsqueeze(-2) * neighbours.unsqueeze(-1)


def mean_square(w_out: Tensor) -> Tensor:
    """Σ_i W_O[i,k]²/d: what a token's mean variance takes of feature k.

    Shapes: (d, m) → (m,).
    """
    return of_weights(
        "mean_square",
        [w_out],
        lambda: at_least_float32(w_out).square().mean(0),
    )


def through(w_out: Tensor, variance: Tensor) -> Tensor:
    """Σ_k W_O[i,k]² v_k, features taken as independent.

    Shapes: ``w_out`` (d, m), ``variance`` (..., m) → (..., d), in state².
    Equation (6.16).
    """
    with torch.autocast(autocast_device(variance), enabled=False):
        squares = of_weights(
            *("square", [w_out]), lambda: at_least_float32(w_out).square()
        )
        return variance @ squares.mT
