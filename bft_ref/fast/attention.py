"""The numbers of :mod:`bft_ref.kriging` without a T×T matrix.

Interchangeable ways behind one function, all tested equal to the reference:

``eager``         the reference itself, the only one that returns the weights,
    gives a float mask its gradient, and can be differentiated in forward
    mode or by ``torch.func``.
``chunked``       a block of rows at a time, recomputed in the backward pass:
    exact, any device, memory linear in T. Every sum over keys that kriging
    needs is a value column, v, v² and c, and the precision is one more
    feature of queries and keys, q' = [q, 1], k' = [k, √d_h log λ̄].
``flex``          FlexAttention on CUDA, with the same columns; n_eff from two
    log-sum-exps, n = exp(2 LSE(s) − LSE(2s)).
"""

from functools import cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from bft_ref.config import Implementation
from bft_ref.fast.weighted_columns import weighted_columns
from bft_ref.kriging import AttentionMoments, kriging_attention, repeat_heads
from bft_ref.support import checks
from bft_ref.support.derivatives import reverse_mode_only
from bft_ref.support.numerics import (
    at_least_float32,
    autocast_device,
    hidden_and_bias,
    saturate,
    settle,
)

SHORT = 128 * 128  # queries × keys: dropout and masks are quick at once


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_token_precision: Tensor,
    *,
    neighbour_variance: Tensor | None = None,
    feature_weights: Tensor | None = None,
    centre: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    implementation: Implementation = "auto",
    n_eff_gradient: bool = True,
    keep_weights: bool = False,
) -> AttentionMoments:
    """:func:`bft_ref.kriging.kriging_attention`, whichever way is fastest.

    Shapes: as there; ``key_padding_mask`` (B, S), True where a key may not
    be seen, or a float added to its scores, −1e9 and below to hide it.
    ``centre`` matters for speed too: without it the dispersion is summed in
    float64 (not so in ``flex``, which keeps to the dtype of the query).
    A hidden key changes no bit of what does not see it, up to sizes of 1e30.
    Raises: ValueError where the way asked for cannot do what is asked.
    Equations (10.1), (10.3), (10.4).
    """
    checks.attention(
        query,
        key,
        value,
        log_token_precision,
        neighbour_variance,
        feature_weights,
    )
    checks.choice("implementation", implementation, get_args(Implementation))
    masks, bias = _masks(key_padding_mask, attn_mask, query, key)
    optional = (neighbour_variance, feature_weights, centre, bias)
    way = _choose(
        implementation,
        query,
        key,
        weights=[
            name
            for name, needed in [
                ("keep_weights", keep_weights),
                (
                    "the gradient of attn_mask",
                    any(x.requires_grad for x in masks),
                ),
                (
                    "forward mode or torch.func",
                    reverse_mode_only(
                        *(query, key, value, log_token_precision, *masks),
                        *(x for x in optional if x is not None),
                    ),
                ),
            ]
            if needed
        ],
        columns=[
            name
            for name, needed in [
                ("dropout_p", dropout_p > 0),
                ("attn_mask", attn_mask is not None),
            ]
            if needed
        ],
    )
    log_precision = at_least_float32(log_token_precision)
    log_precision = log_precision if bias is None else log_precision + bias
    options = _Options(
        neighbour_variance, feature_weights, centre, is_causal, dropout_p
    )
    with torch.autocast(autocast_device(query), enabled=False):
        if way == "eager":
            visible = _as_one(masks)
            result = kriging_attention(
                query,
                key,
                value,
                log_precision,
                attn_mask=visible,
                **options._asdict(),
            )
            if not keep_weights:
                result = result._replace(weights=None)
        else:
            result = _by_columns(
                KERNELS[way], query, key, value, log_precision, masks, options
            )
    if not n_eff_gradient:
        result = result._replace(n_eff=result.n_eff.detach())
    return result


class _Options(NamedTuple):
    """What :func:`kriging_attention` and the columns read alike."""

    neighbour_variance: Tensor | None
    feature_weights: Tensor | None
    centre: Tensor | None
    is_causal: bool
    dropout_p: float


def _choose(
    asked: str,
    query: Tensor,
    key: Tensor,
    weights: list[str],
    columns: list[str],
) -> str:
    """The way to go: ``weights`` and ``columns`` rule out others than these.

    Raises: ValueError if that is the one asked for.
    """
    if asked == "auto":
        short = query.shape[-2] * key.shape[-2] <= SHORT
        if weights or (columns and short):
            return "eager"
        on_gpu = query.device.type == "cuda" and not columns
        long = on_gpu and query.shape[-2] * key.shape[-2] > 1024 * 1024
        return "flex" if long else "chunked"
    if weights and asked != "eager":
        raise ValueError(
            f"implementation: {asked!r} never holds the weights, which "
            f"{', '.join(weights)} needs; use 'eager'"
        )
    if columns and asked == "flex":
        raise ValueError(
            f"implementation: 'flex' cannot do {', '.join(columns)}; use "
            "'chunked'"
        )
    return asked


def _masks(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> tuple[list[Tensor], Tensor | None]:
    """What hides (bool) or is added (float), (B or 1, H or 1, T or 1, S).

    A float for each key is handed back apart, (B, S): it adds to log λ̄.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    masks, bias = [], None
    if key_padding_mask is not None:
        padding = ("key_padding_mask", key_padding_mask)
        checks.mask(*padding, [batch, keys])
        checks.shape(*padding, [batch, keys])
        hidden = key_padding_mask
        if hidden.dtype != torch.bool:
            hidden, bias = hidden_and_bias(hidden)
        masks.append(hidden[:, None, None])
    if attn_mask is not None:
        onto = [batch, heads, queries, keys]
        checks.mask("attn_mask", attn_mask, onto, "visible")
        while attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        attn_mask = attn_mask.expand(-1, -1, -1, keys)
        if attn_mask.dtype == torch.bool:
            masks.append(~attn_mask)
        else:
            masks += hidden_and_bias(attn_mask)
    return masks, bias


def _as_one(masks: list[Tensor]) -> Tensor | None:
    """One mask for the reference: True, or a number, where visible."""
    if not masks:
        return None
    hidden = [x for x in masks if x.dtype == torch.bool]
    covered = hidden[0] if len(hidden) == 1 else hidden[0] | hidden[1]
    for bias in masks:
        if bias.dtype != torch.bool:
            return torch.where(covered, -torch.inf, bias)
    return ~covered


def _by_columns(
    kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_precision: Tensor,
    masks: list[Tensor],
    options: _Options,
) -> AttentionMoments:
    """Everything as value columns of one pass over the weights."""
    neighbours, weights, centre, is_causal, dropout_p = options
    groups = query.shape[1] // key.shape[1]
    middle = at_least_float32(
        centre if centre is not None else _first_seen(value, masks)
    )
    (u,) = saturate(at_least_float32(value) - middle)

    def squares_of(u):
        if weights is None:
            return u.square()
        w = weights.to(u.dtype).unsqueeze(-2)
        return (u.square() * w).sum(-1, True)

    def of_group(x):
        return x.unsqueeze(2).expand(-1, -1, groups, -1, -1)

    def second_of(u):
        """v² of the values of a group, weighed head by head."""
        if weights is None or groups == 1:
            return of_group(squares_of(u))
        w = weights.to(u.dtype).unflatten(0, (-1, groups))
        return (w @ u.square().mT).unsqueeze(-1)

    columns = [of_group(u), second_of(u)]
    if neighbours is not None:
        c = at_least_float32(neighbours)[:, None, :, None]
        columns.append(of_group(c.expand(-1, u.shape[1], -1, -1)))
    widths = [x.shape[-1] for x in columns]
    d, thinned = widths[0], 0
    if dropout_p > 0:  # the mean alone, and how much of the centre is in it
        columns = [columns[0], of_group(torch.ones_like(u[..., :1])), *columns]
        thinned = d + 1
    inputs = (query, key, log_precision)
    seen = (masks, is_causal)
    out, sharing = kernel(
        *inputs,
        torch.cat(columns, -1).flatten(1, 2),
        *seen,
        dropout_p=dropout_p,
        thinned=thinned,
    )
    mean, second, *rest = out[..., thinned:].split(widths, -1)
    empty = sharing == 0  # not "> 0": NaN must stay NaN
    n_eff = 1 / torch.where(empty, 1.0, sharing)
    n_eff = torch.where(empty, 0.0, n_eff.clamp(1.0, key.shape[-2]))

    def in_float64(rows):
        v = u.double()
        pair = torch.cat([of_group(v), second_of(v)], -1).flatten(1, 2)
        again, _ = kernel(*inputs, pair, *seen, rows=rows)
        first, second = again.tensor_split([v.shape[-1]], -1)
        return second - squares_of(first)

    spread = second - squares_of(mean)
    if kernel is _chunked:
        spread = settle(spread, second, n_eff, in_float64, centre is None)
    else:
        spread = spread.clamp(min=0.0)
    sees = (~empty).to(u.dtype)
    share = sees.unsqueeze(-1)
    if thinned:
        mean, share = out[..., :d], out[..., d:thinned]
    mean = mean + share * repeat_heads(middle, groups)
    said = rest[0].squeeze(-1) if rest else sees
    return AttentionMoments(mean, spread, n_eff, said, None)


def _first_seen(value: Tensor, masks: list[Tensor]) -> Tensor:
    """(B, H_kv, 1, d): the value at the first key that is not hidden.

    Zero where each query sees keys of its own.
    """
    if not masks:
        return value[:, :, :1].detach()
    if len(masks) > 1 or masks[0].shape[1:3] != (1, 1):
        return torch.zeros_like(value[:, :, :1])
    first = (~masks[0]).int().argmax(-1, keepdim=True)
    index = first.expand(len(value), value.shape[1], 1, value.shape[-1])
    return value.detach().gather(2, index)


def _chunked(
    query,
    key,
    bias,
    columns,
    masks,
    is_causal,
    *,
    dropout_p=0.0,
    thinned=0,
    rows=None,
):
    """Columns and Σα̃² by blocks of rows; q' = [q, 1], k' = [k, √d_h log λ̄]."""
    scale = query.shape[-1] ** -0.5
    query, key = saturate(at_least_float32(query), at_least_float32(key))
    q = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    b = (bias / scale)[:, None, :, None].expand(-1, key.shape[1], -1, -1)
    k = _for_each(query, torch.cat([key, b], -1))
    out, squares, _ = weighted_columns(
        *(x.flatten(0, 1) for x in (q, k, columns)),
        is_causal,
        scale,
        masks=masks,
        heads=query.shape[1],
        dropout_p=dropout_p,
        thinned=thinned,
        rows=None if rows is None else rows.flatten(0, 1),
    )
    batch = query.shape[:2]
    return out.unflatten(0, batch), squares.unflatten(0, batch)


def _flex(query, key, bias, columns, masks, is_causal, **_):
    """Columns and log-sum-exps by FlexAttention."""
    from torch.nn.attention.flex_attention import AuxRequest

    hidden = masks[0][:, 0, 0] if masks else None
    # squares leave float16, whose largest number is 65504
    kind = torch.float32 if query.dtype == torch.float16 else query.dtype
    key = _for_each(query, key)
    query, key, columns = (x.to(kind) for x in (query, key, columns))

    def score(score, b, h, q_index, k_index):
        score = score + bias[b, k_index]
        if hidden is None:
            return score
        return torch.where(hidden[b, k_index], -torch.inf, score)

    def doubled(s, b, h, q_index, k_index):
        return 2 * score(s, b, h, q_index, k_index)

    flex = _compiled_flex(query.device.type)
    block_mask = None
    if is_causal:
        block_mask = _causal_blocks(
            query.shape[-2], key.shape[-2], query.device
        )
    options = {"block_mask": block_mask, "return_aux": AuxRequest(lse=True)}
    out, aux = flex(query, key, columns, score_mod=score, **options)
    narrow = torch.zeros_like(key[..., :16])
    _, aux2 = flex(query, key, narrow, score_mod=doubled, **options)
    empty = aux.lse == -torch.inf
    lse, lse2 = (torch.where(empty, 0.0, x) for x in (aux.lse, aux2.lse))
    return at_least_float32(out), torch.where(
        empty, 0.0, (lse2 - 2 * lse).exp()
    )


def _for_each(query: Tensor, key: Tensor) -> Tensor:
    """The keys of each head of the queries."""
    return repeat_heads(key, query.shape[1] // key.shape[1])


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
        lambda b, h, q, k: q + keys - queries >= k,
        *(None, None, queries, keys),
        device=device,
    )


KERNELS = {"chunked": _chunked, "flex": _flex}
