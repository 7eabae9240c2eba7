"""Attention as kriging: the readable reference.

Everything here holds the T×T weights in memory and says what it means;
:mod:`bft_ref.fast.attention` computes the same numbers without them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref.support import checks
from bft_ref.support.numerics import (
    at_least_float32,
    hidden_and_bias,
    saturate,
    settle,
)


def kriging_weights(
    scores: Tensor,
    log_token_precision: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """α̃ = softmax(scores + log λ̄): attention weighted by precision.

    α̃_tj = α_tj λ̄_j / Σ_j α_tj λ̄_j: a log-precision bias on the logits. A
    row that may see nothing gets zero weights, not NaN.

    Shapes: ``scores`` (..., T, S), without unit; ``log_token_precision``
    (..., S), broadcast over queries; ``attn_mask`` broadcasts to (..., T, S):
    boolean, True where a key may be seen, or a float added to the scores,
    which hides a key at −1e9 and below, or at the lowest of its dtype.
    With ``is_causal`` query t sees keys up to t + S − T.
    Returns: (..., T, S), float32 or wider; rows sum to 1 (or to 0).
    Raises: TypeError, ValueError for dtypes and shapes that do not fit, log
    precisions that are not finite, NaN in the mask.
    Equation (3.15); the paper.
    """
    scores = at_least_float32(checks.floating("scores", scores))
    checks.shape(
        "log_token_precision",
        log_token_precision,
        [*[None] * (log_token_precision.dim() - 1), scores.shape[-1]],
    )
    checks.finite("log_token_precision", log_token_precision)
    logits = scores + log_token_precision.unsqueeze(-2)
    seen = None
    if attn_mask is not None:
        checks.mask("attn_mask", attn_mask, scores.shape, "visible")
        if attn_mask.dtype == torch.bool:
            seen = attn_mask
        else:
            hidden, bias = hidden_and_bias(attn_mask)
            logits, seen = logits + bias, ~hidden
    if is_causal:
        queries, keys = scores.shape[-2:]
        causal = scores.new_ones(queries, keys, dtype=torch.bool).tril(
            keys - queries
        )
        seen = causal if seen is None else seen & causal
    if seen is None:
        return logits.softmax(-1)
    # The lowest finite number keeps a row that sees nothing finite, gradient
    # included; the zeros are put in afterwards.
    lowest = torch.finfo(logits.dtype).min
    weights = logits.masked_fill(~seen, lowest).softmax(-1)
    return weights.masked_fill(~seen, 0.0)


def effective_sample_size(weights: Tensor) -> Tensor:
    """n = 1/Σ_j α̃_tj², Kish's effective sample size; 0 for an empty row.

    Shapes: ``weights`` (..., T, S), rows summing to 1 → (..., T), in [1, S].
    Equation (4.2); the paper names n_eff, the formula is our choice.
    """
    squares = weights.square().sum(-1)
    empty = squares == 0  # not "> 0": NaN must stay NaN
    n = 1 / torch.where(empty, 1.0, squares)
    n = n.clamp(1.0, max(weights.shape[-1], 1))
    return torch.where(empty, 0.0, n)


def dispersion(
    weights: Tensor, values: Tensor, centre: Tensor | None = None
) -> Tensor:
    """D = Σ α̃ v² − (Σ α̃ v)², the expanded square, about a fixed centre.

    D is unchanged when a constant is added to v, so ``centre``, any constant
    near the values, is taken off first: without it float32 cancels where the
    mean is much larger than the spread.

    Shapes: ``weights`` (..., T, S), ``values`` (..., S, d), ``centre``
    broadcasts with the values (..., 1, d) → (..., T, d) ≥ 0, in value².
    Equation (4.1); the paper.
    """
    v = (
        at_least_float32(values)
        if centre is None
        else at_least_float32(values) - at_least_float32(centre)
    )
    return (weights @ v.square() - (weights @ v).square()).clamp(min=0.0)


class AttentionMoments(NamedTuple):
    """What attention saw, head by head (H heads of size d_h).

    ``mean`` μ (B, H, T, d_h) in value units; ``dispersion`` D, the same shape
    in value², or (B, H, T, 1) where it was contracted with feature weights;
    ``n_eff`` (B, H, T), 0 where a row saw nothing; ``neighbour_variance``
    Σ_j α̃_tj c_j (B, H, T); ``weights`` α̃ (B, H, T, S), None where they were
    never formed.
    """

    mean: Tensor
    dispersion: Tensor
    n_eff: Tensor
    neighbour_variance: Tensor
    weights: Tensor | None


def kriging_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_token_precision: Tensor,
    *,
    neighbour_variance: Tensor | None = None,
    feature_weights: Tensor | None = None,
    centre: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> AttentionMoments:
    """Attention as kriging: mean, dispersion and effective sample size.

    With equal precisions the mean is ``F.scaled_dot_product_attention``.
    Dropout thins the weights of the mean only: dispersion and n_eff need
    weights that sum to one.

    Shapes: ``query`` (B, H, T, d_h); ``key``, ``value`` (B, H_kv, S, d_h),
    H a multiple of H_kv (grouped queries); ``log_token_precision`` and
    ``neighbour_variance`` c (B, S), default 1; ``feature_weights`` (H, d_h)
    contracts the dispersion to (B, H, T, 1), Σ_k w_k D_k; ``attn_mask`` as in
    :func:`kriging_weights`, broadcasting to (B, H, T, S). ``centre``, which
    broadcasts with the values, is a constant near them that does not depend
    on hidden tokens; without it the dispersion is summed in float64. Scores'
    factors and centred values saturate at 2⁵⁸ in float32.
    Raises: TypeError and ValueError for dtypes and shapes that do not fit.
    Equations (3.15), (4.1), (4.2).
    """
    checks.attention(
        query,
        key,
        value,
        log_token_precision,
        neighbour_variance,
        feature_weights,
    )
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        at_least_float32(query),
        at_least_float32(key),
        at_least_float32(value),
    )
    if centre is None:
        middle = value[:, :, :1].detach()
        middle = middle if attn_mask is None else torch.zeros_like(middle)
    else:
        middle = at_least_float32(centre)
    query, key, u = saturate(query, key, value - middle)
    u, key = (repeat_heads(x, groups) for x in (u, key))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    log = log_token_precision.unsqueeze(1).to(query.dtype)  # may be wider
    weights = kriging_weights(scores, log, attn_mask, is_causal)
    n_eff = effective_sample_size(weights)

    def moments(weights, u):
        """Σα̃v, Σα̃v², and from them D, contracted if asked for."""
        mean, second = weights @ u, weights @ u.square()
        around = mean.square()
        if feature_weights is not None:
            w = feature_weights.to(u.dtype).unsqueeze(-2)
            second, around = ((x * w).sum(-1, True) for x in (second, around))
        return mean, second, second - around

    def in_float64(_):
        exact = weights.double()
        exact = exact / exact.sum(-1, True).clamp(min=torch.finfo().tiny)
        return moments(exact, u.double())[-1]

    mean, second, spread = moments(weights, u)
    spread = settle(spread, second, n_eff, in_float64, centre is None)
    sees = neighbours = (n_eff > 0).to(weights.dtype)
    if neighbour_variance is not None:
        c = neighbour_variance.to(weights.dtype)[:, None, :, None]
        neighbours = (weights @ c).squeeze(-1)
    middle = repeat_heads(middle, groups)
    if dropout_p > 0:
        mean = torch.dropout(weights, dropout_p, True) @ (u + middle)
    else:
        mean = mean + sees.unsqueeze(-1) * middle
    return AttentionMoments(mean, spread, n_eff, neighbours, weights)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """``x`` (..., H_kv, S, d) once for each of a group of queries."""
    if groups == 1 or x.dim() < 3:
        return x
    return x.repeat_interleave(groups, -3)
