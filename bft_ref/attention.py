"""The numbers of :mod:`bft_ref.kriging` without a T×T matrix.

Interchangeable ways behind one function, all tested equal to the reference:

``materialised``  the reference itself, the only one with dropout on the
    weights, per-query masks or weights returned.
``blocked``       a block of rows at a time, recomputed in the backward pass:
    exact, any device, memory linear in T. Every sum over keys that kriging
    needs is a value column, v, v² and c, and the precision is one more
    feature of queries and keys, q' = [q, 1], k' = [k, √d_h log λ̄].
``flex``          FlexAttention on CUDA, with the same columns; n_eff from two
    log-sum-exps, n = exp(2 LSE(s) − LSE(2s)).
"""

from functools import cache

import torch
from torch import Tensor

from bft_ref import checks
from bft_ref.belief import wide
from bft_ref.fused import weighted_columns
from bft_ref.kriging import Kriging, check_attention, kriging_attention

IMPLEMENTATIONS = ("materialised", "blocked", "flex")
HIDDEN = -1e6  # log precision of a hidden key, relative to the best one


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_token_precision: Tensor,
    *,
    neighbour_variance: Tensor | None = None,
    feature_weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    implementation: str = "auto",
    n_eff_gradient: bool = True,
    keep_weights: bool = False,
) -> Kriging:
    """:func:`bft_ref.kriging.kriging_attention`, whichever way is fastest.

    Shapes: as there; ``key_padding_mask`` (B, S), True (or −inf) where a key
    may not be seen. Values are centred at the first key that may be seen,
    which leaves every result unchanged but for rounding.
    Raises: ValueError where the way asked for cannot do what is asked.
    Equations (10.1), (10.3), (10.4).
    """
    check_attention(
        query,
        key,
        value,
        log_token_precision,
        neighbour_variance,
        feature_weights,
    )
    checks.choice("implementation", implementation, ("auto", *IMPLEMENTATIONS))
    padding = _key_bias(key_padding_mask, key)
    needs_weights = [
        name
        for name, needed in [
            ("dropout_p", dropout_p > 0),
            ("attn_mask", attn_mask is not None),
            ("keep_weights", keep_weights),
            ("is_causal", is_causal and query.shape[-2] != key.shape[-2]),
        ]
        if needed
    ]
    if implementation == "auto":
        implementation = _choose(query, key, bool(needs_weights))
    elif implementation != "materialised" and needs_weights:
        raise ValueError(
            f"implementation: {implementation!r} never holds the weights, "
            f"which {', '.join(needs_weights)} needs; use 'materialised'"
        )
    # One batch-wide centre would do; one per sequence is closer. It is
    # detached: D does not depend on it.
    center = _first_seen(value, padding)
    options = {
        "neighbour_variance": neighbour_variance,
        "feature_weights": feature_weights,
    }
    with torch.autocast(query.device.type, enabled=False):
        if implementation == "materialised":
            return _materialised(
                query,
                key,
                value,
                log_token_precision,
                padding,
                attn_mask,
                center=center,
                is_causal=is_causal,
                dropout_p=dropout_p,
                n_eff_gradient=n_eff_gradient,
                keep_weights=keep_weights,
                **options,
            )
        return _by_columns(
            KERNELS[implementation],
            query,
            key,
            value,
            log_token_precision,
            padding,
            center,
            is_causal,
            n_eff_gradient,
            **options,
        )


def _choose(query: Tensor, key: Tensor, needs_weights: bool) -> str:
    if needs_weights:
        return "materialised"
    long = query.shape[-2] * key.shape[-2] > 1024 * 1024
    return "flex" if query.device.type == "cuda" and long else "blocked"


def _key_bias(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Float (B, S): what is added to the scores of each key."""
    if mask is None:
        return None
    checks.mask("key_padding_mask", mask, [key.shape[0], key.shape[-2]])
    checks.shape("key_padding_mask", mask, [key.shape[0], key.shape[-2]])
    bias = torch.zeros(mask.shape, dtype=wide(key).dtype, device=key.device)
    if mask.dtype == torch.bool:
        return bias.masked_fill(mask, -torch.inf)
    hidden = mask <= torch.finfo(mask.dtype).min
    # a finite bias stays far above that of a hidden key
    return (bias + wide(mask).clamp(min=HIDDEN / 10)).masked_fill(
        hidden, -torch.inf
    )


def _first_seen(value: Tensor, padding: Tensor | None) -> Tensor:
    """(B, H_kv, 1, d): the value at the first key that is not hidden."""
    if padding is None:
        return value[:, :, :1].detach()
    first = (padding > -torch.inf).int().argmax(-1)
    index = first[:, None, None, None].expand(
        -1, value.shape[1], 1, value.shape[-1]
    )
    return value.detach().gather(2, index)


def _materialised(
    query,
    key,
    value,
    log_precision,
    padding,
    attn_mask,
    *,
    n_eff_gradient,
    keep_weights,
    **options,
) -> Kriging:
    if padding is not None:
        seen = (padding > -torch.inf)[:, None, None]
        # a float bias shifts the log precision; hidden keys are masked
        log_precision = log_precision + padding.clamp(min=HIDDEN)
        if attn_mask is None:
            attn_mask = seen
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & seen
        else:
            attn_mask = torch.where(seen, attn_mask, -torch.inf)
    result = kriging_attention(
        query, key, value, log_precision, attn_mask=attn_mask, **options
    )
    if not n_eff_gradient:
        result = result._replace(n_eff=result.n_eff.detach())
    return result if keep_weights else result._replace(weights=None)


def _by_columns(
    kernel,
    query,
    key,
    value,
    log_precision,
    padding,
    center,
    is_causal,
    n_eff_gradient,
    neighbour_variance,
    feature_weights,
) -> Kriging:
    """Everything as value columns of one fused pass, n_eff by a second."""
    heads = query.shape[1]
    groups = heads // key.shape[1]
    key, value, center = (
        x.repeat_interleave(groups, 1) if groups > 1 else x
        for x in (key, value, center)
    )
    bias = wide(log_precision)
    hidden = None
    if padding is not None:
        hidden = padding == -torch.inf
        bias = bias + padding.masked_fill(hidden, 0.0)
        best = bias.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
        bias = bias - best.detach().clamp(min=torch.finfo(bias.dtype).min)
        bias = bias.masked_fill(hidden, HIDDEN)
    else:
        bias = bias - bias.detach().amax(-1, keepdim=True)
    u = wide(value) - wide(center)
    if feature_weights is None:
        squares = u.square()
    else:
        w = wide(feature_weights).unsqueeze(-2)
        squares = (u.square() * w).sum(-1, True)
    columns = [u, squares]
    if neighbour_variance is not None:
        c = wide(neighbour_variance)[:, None, :, None]
        columns.append(c.expand(-1, heads, -1, -1))
    widths = [x.shape[-1] for x in columns]
    out, squares = kernel(
        query, key, bias, torch.cat(columns, -1), is_causal, n_eff_gradient
    )
    mean, spread, *rest = out[..., : sum(widths)].split(widths, -1)
    if feature_weights is None:
        spread = spread - mean.square()
    else:
        spread = spread - (mean.square() * w).sum(-1, True)
    n_eff = (1 / squares).clamp(1.0, key.shape[-2])
    mean = mean + wide(center)
    neighbours = rest[0].squeeze(-1) if rest else torch.ones_like(n_eff)
    if hidden is not None:
        empty = _sees_nothing(~hidden, query.shape[-2], is_causal)
        n_eff = n_eff.masked_fill(empty, 0.0)
        mean = mean.masked_fill(empty.unsqueeze(-1), 0.0)
        spread = spread.masked_fill(empty.unsqueeze(-1), 0.0)
        neighbours = neighbours.masked_fill(empty, 0.0)
    return Kriging(mean, spread.clamp(min=0.0), n_eff, neighbours, None)


def _sees_nothing(visible: Tensor, queries: int, is_causal: bool) -> Tensor:
    """(B, 1, T): rows without a visible key, in O(T)."""
    if is_causal:
        return (visible.cumsum(-1) == 0).unsqueeze(1)
    return ~visible.any(-1, keepdim=True).unsqueeze(1).expand(-1, 1, queries)


def _blocked(query, key, bias, columns, is_causal, n_eff_gradient):
    """Columns and Σα̃² by blocks of rows; q' = [q, 1], k' = [k, √d_h log λ̄]."""
    scale = query.shape[-1] ** -0.5
    q = torch.cat([wide(query), torch.ones_like(wide(query[..., :1]))], -1)
    b = (bias / scale)[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    k = torch.cat([wide(key), b], -1)
    flat = (x.flatten(0, 1) for x in (q, k, columns))
    out, squares, _ = weighted_columns(*flat, is_causal, scale)
    if not n_eff_gradient:
        squares = squares.detach()
    batch = query.shape[:2]
    return out.unflatten(0, batch), squares.unflatten(0, batch)


def _flex(query, key, bias, columns, is_causal, n_eff_gradient):
    """Columns and log-sum-exps by FlexAttention."""

    def weighted(score, b, h, q_index, k_index):
        return score + bias[b, k_index]

    def doubled(score, b, h, q_index, k_index):
        return 2 * (score + bias[b, k_index])

    flex = _compiled_flex(query.device.type)
    block_mask = (
        _causal_blocks(query.shape[-2], key.shape[-2], query.device)
        if is_causal
        else None
    )
    kind = query.dtype
    out, lse = flex(
        query,
        key,
        columns.to(kind),
        score_mod=weighted,
        block_mask=block_mask,
        return_lse=True,
    )
    if not n_eff_gradient:
        query, key, bias, lse = (x.detach() for x in (query, key, bias, lse))
    _, lse2 = flex(
        query,
        key,
        torch.zeros_like(key[..., :16]),
        score_mod=doubled,
        block_mask=block_mask,
        return_lse=True,
    )
    return wide(out), (lse2 - 2 * lse).exp()


@cache
def _compiled_flex(device_type: str):
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention


@cache
def _causal_blocks(queries: int, keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda b, h, q, k: q >= k, None, None, queries, keys, device=device
    )


KERNELS = {"blocked": _blocked, "flex": _flex}
