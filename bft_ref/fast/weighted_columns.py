"""Softmax-weighted sums over keys, without the T×S weights: an operator."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from bft_ref.fast.backward import by_plain_form, differentiated
from bft_ref.support.derivatives import reverse_mode_only

ROWS = 128  # queries at a time; a causal block skips the keys after them
HEADS = 4  # at least so many at a time: threads share them
BLOCK = {"cpu": 2**19, "cuda": 2**25}  # weights held at a time


def weighted_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    *,
    masks: Sequence[Tensor] = (),
    heads: int = 1,
    dropout_p: float = 0.0,
    thinned: int = 0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax-weighted columns, Σα̃² and log Σ exp, block of rows by block.

    Never holds T×S. A query that may see nothing gets zeros. ``is_causal``:
    query t sees keys up to t + S − T. ``masks`` (B or 1, H or 1, T or 1, S),
    N = B·H with H ``heads``, hide a key (boolean, True) or are added to the
    scores (float, finite, without gradient). ``dropout_p`` thins the weights
    of the first ``thinned`` columns. With ``rows`` (N, T) all is summed and
    returned in float64, and blocks without a row marked True are left out.

    Shapes: ``q`` (N, T, d), ``k`` (N, S, d), ``v`` (N, S, c) → (N, T, c),
    (N, T), (N, T).
    Raises: ValueError inside forward mode or ``torch.func``.
    """
    if reverse_mode_only(q, k, v, *masks):
        raise ValueError(
            "weighted_columns: expected derivatives in reverse mode, got a "
            "transform of torch.func or forward mode; use attend(..., "
            "implementation='eager')"
        )
    seed = None
    if thinned and dropout_p > 0:
        seed = torch.randint(2**62, (), device="cpu")
    return _weighted_columns(
        *(q, k, v, is_causal, scale),
        *(list(masks), heads, dropout_p, thinned, seed, rows),
    )


@custom_op("bft_ref::weighted_columns", mutates_args=())
def _weighted_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    masks: Sequence[Tensor],
    heads: int,
    dropout_p: float,
    thinned: int,
    seed: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = q.dtype if rows is None else torch.float64
    made = q.new_empty if rows is None else q.new_zeros
    out = made(*q.shape[:2], v.shape[-1], dtype=kind)
    squares, lse = (made(q.shape[:2], dtype=kind) for _ in range(2))
    v1 = _with_column(v[..., thinned:], 1.0)  # the row sums come along
    lowest = torch.finfo(q.dtype).min
    q = q.to(kind) * scale
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, masks, heads)
        top = w.amax(-1, keepdim=True).clamp_(min=lowest)
        w.sub_(top).exp_()
        sums = torch.bmm(w, v1[n, s].to(kind))
        total = sums[..., -1]
        some = torch.where(total > 0, total, 1.0)  # else it sees nothing
        out[n, t, thinned:] = sums[..., :-1] / some.unsqueeze(-1)
        norm = torch.linalg.vector_norm(w, dim=-1) / some
        squares[n, t] = norm.square()
        lse[n, t] = top.squeeze(-1) + some.log()
        if seed is not None:
            kept = _kept(w, seed, i, dropout_p)
            few = torch.bmm(w.mul_(kept), v[n, s, :thinned])
            out[n, t, :thinned] = few / some.unsqueeze(-1)
    return out, squares, lse


@custom_op("bft_ref::weighted_columns_grad", mutates_args=())
def weighted_columns_grad(
    grad_out: Tensor,
    grad_squares: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    squares: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    masks: Sequence[Tensor],
    heads: int,
    dropout_p: float,
    thinned: int,
    seed: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: dS = α̃∘(dO vᵀ + 2g α̃ − δ), recomputing α̃.

    δ = Σ dO∘O + 2g Σα̃² needs no pass over the weights; it rides along as
    one more column of the product. Equation (10.5).
    """
    kind = out.dtype
    twice = 2 * grad_squares
    delta = (grad_out * out).sum(-1) + twice * squares
    grad_out1 = torch.cat([grad_out[..., thinned:], -delta.unsqueeze(-1)], -1)
    v1 = _with_column(v[..., thinned:], 1.0)
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    q = q.to(kind) * scale
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, masks, heads)
        w.sub_(lse[n, t].unsqueeze(-1)).exp_()
        _add_product(grad_v[n, s, thinned:], w.mT, grad_out[n, t, thinned:])
        grad = torch.bmm(grad_out1[n, t], v1[n, s].mT.to(kind))
        grad.addcmul_(w, twice[n, t].unsqueeze(-1))
        if seed is not None:
            kept = _kept(w, seed, i, dropout_p)
            few = grad_out[n, t, :thinned]
            grad.addcmul_(kept, torch.bmm(few, v[n, s, :thinned].mT))
            grad_v[n, s, :thinned] += torch.bmm(kept.mul_(w).mT, few)
        grad.mul_(w)
        grad_q[n, t] = torch.bmm(grad, k[n, s].to(kind))
        _add_product(grad_k[n, s], grad.mT, q[n, t])
    return grad_q.mul_(scale), grad_k, grad_v


@_weighted_columns.register_fake
def _(q, k, v, *options):
    kind = q.dtype if options[-1] is None else torch.float64
    out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=kind)
    return out, *(q.new_empty(q.shape[:2], dtype=kind) for _ in range(2))


@weighted_columns_grad.register_fake
def _(grad_out, grad_squares, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, ctx.is_causal, ctx.scale, masks, *ctx.rest, seed, rows = inputs
    ctx.save_for_backward(q, k, v, *output, seed, rows, *masks)
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad_out, grad_squares, _):
    q, k, v, out, squares, lse, seed, rows, *masks = ctx.saved_tensors
    options = (ctx.is_causal, ctx.scale, masks, *ctx.rest, seed, rows)
    none = (None, None, [None] * len(masks), *[None] * 5)
    if by_plain_form((grad_out, grad_squares)):
        found = differentiated(
            (q, k, v),
            lambda *x: _plain_columns(*x, *options),
            (grad_out, grad_squares),
        )
        return *found, *none
    grads = weighted_columns_grad(
        *(grad_out.contiguous(), grad_squares),
        *(q, k, v, out, squares, lse, *options),
    )
    return *grads, *none


_weighted_columns.register_autograd(_backward, setup_context=_save)


def _plain_columns(
    q, k, v, is_causal, scale, masks, heads, dropout_p, thinned, seed, rows
):
    """Columns and Σα̃² by differentiable operations, the same blocks."""
    kind = q.dtype if rows is None else torch.float64
    q, k, v = q.to(kind) * scale, k.to(kind), v.to(kind)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    squares = q.new_zeros(q.shape[:2])
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, masks, heads)
        top = w.detach().amax(-1, keepdim=True)
        w = (w - top.clamp(min=torch.finfo(kind).min)).exp()
        total = w.sum(-1, keepdim=True)
        w = w / torch.where(total > 0, total, 1.0)
        squares[n, t] = w.square().sum(-1)
        kept = 1.0 if seed is None else _kept(w, seed, i, dropout_p)
        out[n, t] = torch.cat(
            [(w * kept) @ v[n, s, :thinned], w @ v[n, s, thinned:]], -1
        )
    return out, squares


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)


def _with_column(x: Tensor, value: float) -> Tensor:
    return torch.cat([x, torch.full_like(x[..., :1], value)], -1)


def _blocks(
    q: Tensor, k: Tensor, is_causal: bool, wanted: Tensor | None
) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of heads, of queries, and of the keys those may see.

    Small ones where only some rows are ``wanted``: most can be left out.
    """
    heads, queries = q.shape[:2]
    keys = k.shape[1]
    budget = BLOCK.get(q.device.type, BLOCK["cuda"])
    rows = min(max(budget // keys, 16), ROWS, queries)
    group = max(budget // (rows * keys), HEADS) if wanted is None else HEADS
    for n in range(0, heads, group):
        for t in range(0, queries, rows):
            end = min(t + rows, queries)
            last = max(end + keys - queries, 1) if is_causal else keys
            yield slice(n, min(n + group, heads)), slice(t, end), slice(last)


def _scores(
    q: Tensor,
    k: Tensor,
    n: slice,
    t: slice,
    s: slice,
    is_causal: bool,
    masks: Sequence[Tensor],
    heads: int,
) -> Tensor:
    """Scores of a block, in the dtype of q, −inf where a key is hidden."""
    w = torch.bmm(q[n, t], k[n, s].mT.to(q.dtype))
    for mask in masks:
        part = mask[:, :, t if mask.shape[2] > 1 else slice(None), s]
        if mask.shape[0] == mask.shape[1] == 1:
            part = part[0]
        else:
            row = torch.arange(n.start, n.stop, device=mask.device)
            batch = row // heads if mask.shape[0] > 1 else 0 * row
            part = part[batch, row % heads if mask.shape[1] > 1 else 0 * row]
        if mask.dtype == torch.bool:
            w.masked_fill_(part, -torch.inf)
        else:
            w.add_(part)
    if is_causal:
        first = t.start + k.shape[1] - q.shape[1]  # the first query's last key
        tail = w[..., max(first + 1, 0) :]
        later = torch.ones_like(tail[0], dtype=torch.bool)
        tail.masked_fill_(later.triu(min(first + 1, 0)), -torch.inf)
    return w


def _kept(w: Tensor, seed: Tensor, block: int, p: float) -> Tensor:
    """1/(1 − p) where a weight of the block survives dropout, else 0."""
    generator = torch.Generator(w.device).manual_seed(int(seed) + block)
    kept = torch.rand(w.shape, generator=generator, device=w.device) >= p
    return kept.to(w.dtype).mul_(1 / (1 - p))
