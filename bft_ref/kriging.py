"""Kriging, and attention as kriging: the readable reference.

Everything here holds the T×T weights in memory and says what it means;
:mod:`bft_ref.fast.attention` computes the same numbers without them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref import checks
from bft_ref.belief import wide


class KrigingPrediction(NamedTuple):
    """What kriging says at m points: all fields (m,), ``weights`` (m, n).

    ``mean`` in units of the values, ``variance`` (of the error of predicting
    a new value) in their square; ``multiplier`` is the Lagrange multiplier
    of ordinary kriging, zero for simple kriging.
    """

    mean: Tensor
    variance: Tensor
    weights: Tensor
    multiplier: Tensor


def _kriging_input(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    point_variance: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Cholesky factor of the checked covariance, and c₀ as a tensor."""
    checks.finite("values", values)
    checks.shape("values", values, ["n"])
    n = len(values)
    if n == 0:
        raise ValueError("values: expected at least one, got none")
    checks.finite("covariance", covariance)
    checks.shape("covariance", covariance, [n, n])
    checks.finite("cross_covariance", cross_covariance)
    checks.shape("cross_covariance", cross_covariance, ["m", n])
    for name, x in [
        ("covariance", covariance),
        ("cross_covariance", cross_covariance),
    ]:
        if x.dtype != values.dtype:
            raise TypeError(
                f"{name}: expected {values.dtype} as the values, got {x.dtype}"
            )
    if not torch.allclose(covariance, covariance.mT):
        raise ValueError("covariance: expected a symmetric matrix")
    c0 = torch.as_tensor(
        point_variance, dtype=values.dtype, device=values.device
    )
    checks.not_negative("point_variance", c0)
    if c0.dim() > 0:
        checks.shape("point_variance", c0, [len(cross_covariance)])
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info.any():
        raise ValueError(
            "covariance: expected a positive definite matrix, got one whose "
            f"leading minor of order {int(info)} is not positive (are two "
            "points the same?)"
        )
    return factor, c0


def simple_kriging(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    mean: float | Tensor,
    point_variance: float | Tensor,
) -> KrigingPrediction:
    """The best linear prediction when the mean of the field is known.

    w = C⁻¹c, prediction m + wᵀ(v − m), variance c₀ − cᵀC⁻¹c.

    Shapes: ``covariance`` C (n, n) of the observed values;
    ``cross_covariance`` c (m, n) with the points asked for; ``values`` (n,);
    ``mean`` a scalar; ``point_variance`` c₀ = Var of the value predicted,
    scalar or (m,).
    Units: values, and values² for covariances.
    Raises: TypeError for dtypes that differ; ValueError for wrong shapes,
    NaN, a negative variance, a covariance that is not symmetric and positive
    definite. Equations (3.2), (3.3).
    """
    factor, c0 = _kriging_input(
        covariance, cross_covariance, values, point_variance
    )
    known = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
    checks.shape("mean", checks.finite("mean", known), [])
    weights = torch.cholesky_solve(cross_covariance.mT, factor).mT
    prediction = mean + weights @ (values - mean)
    variance = c0 - (weights * cross_covariance).sum(-1)
    return KrigingPrediction(
        prediction, variance, weights, torch.zeros_like(prediction)
    )


def ordinary_kriging(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    point_variance: float | Tensor,
) -> KrigingPrediction:
    """The best linear unbiased prediction when the mean is unknown.

    Minimises the error variance under Σw = 1; ψ is the multiplier of that
    constraint: w = C⁻¹(c + ψ1), ψ = (1 − 1ᵀC⁻¹c)/(1ᵀC⁻¹1), and the variance
    is c₀ − wᵀc + ψ.

    Shapes, units, errors: as :func:`simple_kriging`, without the mean.
    Equations (3.6)–(3.8).
    """
    factor, c0 = _kriging_input(
        covariance, cross_covariance, values, point_variance
    )
    ones = torch.ones_like(values)
    solved = torch.cholesky_solve(cross_covariance.mT, factor).mT
    solved_ones = torch.cholesky_solve(ones[:, None], factor).squeeze(-1)
    multiplier = (1 - solved @ ones) / solved_ones.sum()
    weights = solved + multiplier[:, None] * solved_ones
    variance = c0 - (weights * cross_covariance).sum(-1) + multiplier
    return KrigingPrediction(weights @ values, variance, weights, multiplier)


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
    scores = wide(checks.floating("scores", scores))
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


def hidden_and_bias(mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a float mask hides, and what it adds elsewhere, shaped as it.

    Hidden is −1e9 and below, as people write it, and the lowest number of
    the mask's dtype, which in float16 is higher; the bias is 0 there.
    """
    x = wide(mask)
    hidden = x <= max(-0.99e9, torch.finfo(mask.dtype).min)
    return hidden, x.masked_fill(hidden, 0.0)


def saturate(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each within ±2⁵⁸ (float64: ±2⁵⁰⁰), so that its square is a number.

    Where a token is so large, others that do not see it must not be touched:
    a weight of zero times infinity is NaN.
    """
    bound = 2.0 ** (500 if tensors[0].dtype == torch.float64 else 58)
    if checks.surely_within(bound, *tensors):
        return tensors
    return tuple(x.clamp(-bound, bound) for x in tensors)


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
    weights: Tensor, values: Tensor, center: Tensor | None = None
) -> Tensor:
    """D = Σ α̃ v² − (Σ α̃ v)², the expanded square, about a fixed centre.

    D is unchanged when a constant is added to v, so ``center``, any constant
    near the values, is taken off first: without it float32 cancels where the
    mean is much larger than the spread.

    Shapes: ``weights`` (..., T, S), ``values`` (..., S, d), ``center``
    broadcasts with the values (..., 1, d) → (..., T, d) ≥ 0, in value².
    Equation (4.1); the paper.
    """
    v = wide(values) if center is None else wide(values) - wide(center)
    return (weights @ v.square() - (weights @ v).square()).clamp(min=0.0)


class Kriging(NamedTuple):
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
    center: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Kriging:
    """Attention as kriging: mean, dispersion and effective sample size.

    With equal precisions the mean is ``F.scaled_dot_product_attention``.
    Dropout thins the weights of the mean only: dispersion and n_eff need
    weights that sum to one.

    Shapes: ``query`` (B, H, T, d_h); ``key``, ``value`` (B, H_kv, S, d_h),
    H a multiple of H_kv (grouped queries); ``log_token_precision`` and
    ``neighbour_variance`` c (B, S), default 1; ``feature_weights`` (H, d_h)
    contracts the dispersion to (B, H, T, 1), Σ_k w_k D_k; ``attn_mask`` as in
    :func:`kriging_weights`, broadcasting to (B, H, T, S). ``center``, which
    broadcasts with the values, is a constant near them that does not depend
    on hidden tokens; without it the dispersion is summed in float64. Scores'
    factors and centred values saturate at 2⁵⁸ in float32.
    Raises: TypeError and ValueError for dtypes and shapes that do not fit.
    Equations (3.15), (4.1), (4.2).
    """
    check_attention(
        query,
        key,
        value,
        log_token_precision,
        neighbour_variance,
        feature_weights,
    )
    groups = query.shape[1] // key.shape[1]
    query, key, value = wide(query), wide(key), wide(value)
    if center is None:
        middle = value[:, :, :1].detach()
        middle = middle if attn_mask is None else torch.zeros_like(middle)
    else:
        middle = wide(center)
    query, key, u = saturate(query, key, value - middle)
    u, key = (repeat_heads(x, groups) for x in (u, key))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = kriging_weights(
        scores, log_token_precision.unsqueeze(1), attn_mask, is_causal
    )
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
    spread = settle(spread, second, n_eff, in_float64, center is None)
    sees = neighbours = (n_eff > 0).to(weights.dtype)
    if neighbour_variance is not None:
        c = wide(neighbour_variance)[:, None, :, None]
        neighbours = (weights @ c).squeeze(-1)
    middle = repeat_heads(middle, groups)
    if dropout_p > 0:
        mean = torch.dropout(weights, dropout_p, True) @ (u + middle)
    else:
        mean = mean + sees.unsqueeze(-1) * middle
    return Kriging(mean, spread, n_eff, neighbours, weights)


def settle(
    spread: Tensor,
    second: Tensor,
    n_eff: Tensor,
    in_float64: Callable[[Tensor], Tensor],
    everywhere: bool = False,
) -> Tensor:
    """D ≥ 0 from the difference ``spread`` of two moments.

    In float32 little is left of it where the values are much closer to one
    another than to the centre, all features taken together: there
    ``in_float64``, given the rows (...), does it again. One effective value
    has no dispersion.

    Shapes: ``spread`` and the ``second`` moment (..., d), ``n_eff`` (...).
    """
    if spread.dtype == torch.float32:
        with torch.no_grad():
            rows = spread.sum(-1) < 2.0**-12 * second.sum(-1)
            rows = (
                torch.ones_like(rows) if everywhere else rows & (n_eff > 1.01)
            )
        if checks.anywhere(rows) != [False]:
            exact = in_float64(rows).float()
            spread = torch.where(rows.unsqueeze(-1), exact, spread)
    none = (spread <= 0) | (n_eff <= 1).unsqueeze(-1)
    return spread.masked_fill(none, 0.0)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """``x`` (..., H_kv, S, d) once for each of a group of queries."""
    if groups == 1 or x.dim() < 3:
        return x
    return x.repeat_interleave(groups, -3)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_token_precision: Tensor,
    neighbour_variance: Tensor | None = None,
    feature_weights: Tensor | None = None,
) -> None:
    """Raise unless query, key, value and what goes with them fit."""
    for name, x in [("query", query), ("key", key), ("value", value)]:
        checks.floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected shape (batch, heads, tokens, features), "
                f"got {tuple(x.shape)}"
            )
    batch, heads, queries, features = query.shape
    _, kv_heads, keys, _ = key.shape
    if not queries or not keys:
        raise ValueError(
            f"query, key: expected at least one token each, got {queries} "
            f"queries and {keys} keys"
        )
    checks.shape("key", key, [batch, kv_heads, keys, features])
    checks.shape("value", value, [batch, kv_heads, keys, value.shape[-1]])
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query: expected a number of heads that is a multiple of the "
            f"{kv_heads} key heads, got {heads}"
        )
    for name, x in [("key", key), ("value", value)]:
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected {query.dtype} as the query, got {x.dtype}; "
                f"convert it with {name}.to(query.dtype)"
            )
    checks.floating("log_token_precision", log_token_precision)
    checks.shape("log_token_precision", log_token_precision, [batch, keys])
    if neighbour_variance is not None:
        checks.shape("neighbour_variance", neighbour_variance, [batch, keys])
    if feature_weights is not None:
        width = value.shape[-1]
        checks.shape("feature_weights", feature_weights, [heads, width])
    checks.finite("log_token_precision", log_token_precision)
