"""Kernels with hand-written backward passes: same numbers, less memory moved.

Each has its plain counterpart in :mod:`bft_ref.kriging` or
:mod:`bft_ref.delta`, against which it is tested, gradients included. They
have a first derivative in reverse mode; for a second one the backward pass is
the plain form's, and :func:`reverse_mode_only` says where they cannot go.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import custom_op


def _inside_torch_func() -> bool:
    return torch._C._are_functorch_transforms_active()


def reverse_mode_only(*tensors: Tensor) -> bool:
    """Whether a derivative is being taken that the kernels do not have.

    That is one in forward mode, whose tangents a custom operator would drop
    without a word, or a transform of ``torch.func``.
    """
    if _inside_torch_func():
        return True
    if forward_ad._current_level < 0:
        return False
    return torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def _by_plain_form(grads: Iterable[Tensor | None]) -> bool:
    """Whether a backward pass is itself differentiated, or many at once."""
    if torch.compiler.is_compiling():
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor
    return (
        torch.is_grad_enabled()
        or _inside_torch_func()
        or any(batched(g) for g in grads if g is not None)
    )


def _differentiated(inputs: Iterable, plain, grads) -> tuple:
    """Gradients that can be differentiated again: those of the plain form."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # of views: one input may have been computed from another, and what
        # flows back through that is added where it was computed
        inputs = [x if x is None else x.view_as(x) for x in inputs]
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        outputs = plain(*inputs)
    pairs = [
        (y, g)
        for y, g in zip(outputs, grads, strict=True)
        if g is not None and y.requires_grad
    ]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            leaves,
            [g for _, g in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return tuple(
        next(found) if x is not None and x.requires_grad else None
        for x in inputs
    )


def bend(name: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """φ(a) and φ'(a)."""
    if name == "relu":
        return F.relu(a), (a > 0).to(a.dtype)
    if name == "tanh":
        t = torch.tanh(a)
        return t, 1 - t * t
    if name == "silu":
        s = torch.sigmoid(a)
        value = a * s
        return value, torch.addcmul(s, value, 1 - s)
    return F.gelu(a), torch.ops.aten.gelu_backward(torch.ones_like(a), a)


def curvature(
    name: str, a: Tensor, value: Tensor, slope: Tensor
) -> Tensor | None:
    """φ''(a), None where it is zero almost everywhere."""
    if name == "relu":
        return None
    if name == "tanh":
        return -2 * value * slope
    if name == "silu":  # s'(2 + a(1 − 2s)), s' = s(1 − s)
        s = torch.sigmoid(a)
        return s * (1 - s) * (2 + a - 2 * value)
    square = a * a
    density = torch.exp(-0.5 * square).mul_((2 * torch.pi) ** -0.5)
    return density.mul_(square.neg_().add_(2))


BENDS = ("gelu", "relu", "silu", "tanh")
HIDDEN_BLOCK = 2**19  # hidden units at a time on a CPU


def _row_blocks(rows: int, width: int, device: torch.device):
    step = max(HIDDEN_BLOCK // width, 64) if device.type == "cpu" else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)


def bent_feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W₂(keep∘φ(a)), φ'(a) @ columns, W₂(φ'(a)∘(a − shift)), and a.

    a = W₁x + b₁ is all that is kept for the backward pass. Shapes: ``x``
    (R, d), ``w_in`` (f, d), ``w_out`` (d, f), ``columns`` (f, c), ``shift``
    (f,) or None (the third result is then empty), ``keep`` (R, f) or None.
    """
    inputs = (x, w_in, b_in, w_out, columns, shift, keep)
    plain = reverse_mode_only(*(y for y in inputs if y is not None))
    function = _plain_feed_forward if plain else _bent_feed_forward
    return function(*inputs, activation)


@custom_op("bft_ref::bent_feed_forward", mutates_args=())
def _bent_feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = torch.addmm(b_in, x, w_in.mT)
    y = x.new_empty(len(x), len(w_out))
    first = x.new_empty(len(x), columns.shape[1])
    radial = x.new_empty(y.shape if shift is not None else (0, len(w_out)))
    for r in _row_blocks(len(x), len(w_in), x.device):
        value, slope = bend(activation, a[r])
        y[r] = (value if keep is None else value * keep[r]) @ w_out.mT
        first[r] = slope @ columns
        if shift is not None:
            radial[r] = slope.mul_(a[r] - shift) @ w_out.mT
    return y, first, radial, a


@custom_op("bft_ref::bent_feed_forward_grad", mutates_args=())
def bent_feed_forward_grad(
    grad_y: Tensor,
    grad_first: Tensor,
    grad_radial: Tensor,
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    a: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W₁, b₁, W₂, the columns and the shift."""
    grad_x = torch.empty_like(x)
    grad_w_in, grad_w_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
    grad_b_in = x.new_zeros(len(w_in))
    grad_columns, grad_shift = torch.zeros_like(columns), grad_b_in.clone()
    for r in _row_blocks(len(x), len(w_in), x.device):
        value, slope = bend(activation, a[r])
        bent = curvature(activation, a[r], value, slope)
        grad_value = grad_y[r] @ w_out
        if keep is not None:
            value = value * keep[r]
            grad_value.mul_(keep[r])
        grad_w_out.addmm_(grad_y[r].mT, value)
        grad_columns.addmm_(slope.mT, grad_first[r])
        grad_slope = grad_first[r] @ columns.mT
        if shift is not None:
            distance = a[r] - shift
            grad_product = grad_radial[r] @ w_out
            grad_w_out.addmm_(grad_radial[r].mT, slope * distance)
            grad_slope.addcmul_(grad_product, distance)
            grad_value.add_(grad_product)
            grad_shift -= (grad_product.mul_(slope)).sum(0)
        grad_a = grad_value.mul_(slope)
        if bent is not None:
            grad_a.addcmul_(grad_slope, bent)
        torch.mm(grad_a, w_in, out=grad_x[r])
        grad_w_in.addmm_(grad_a.mT, x[r])
        grad_b_in += grad_a.sum(0)
    return (
        grad_x,
        grad_w_in,
        grad_b_in,
        grad_w_out,
        grad_columns,
        grad_shift,
    )


@_bent_feed_forward.register_fake
def _(x, w_in, b_in, w_out, columns, shift, keep, activation):
    return (
        # x.shape[0], unlike len(x), leaves the number of tokens open
        x.new_empty(x.shape[0], w_out.shape[0]),
        x.new_empty(x.shape[0], columns.shape[1]),
        x.new_empty(x.shape[0] if shift is not None else 0, w_out.shape[0]),
        x.new_empty(x.shape[0], w_in.shape[0]),
    )


@bent_feed_forward_grad.register_fake
def _(gy, gf, gr, x, w_in, w_out, columns, shift, keep, a, activation):
    like = torch.empty_like
    width = x.new_empty(w_in.shape[0])
    return like(x), like(w_in), width, like(w_out), like(columns), like(width)


def _plain_feed_forward(x, w_in, b_in, w_out, columns, shift, keep, name):
    """The same four results by differentiable operations."""
    a = torch.addmm(b_in, x, w_in.mT)
    value, slope = bend(name, a)
    y = (value if keep is None else value * keep) @ w_out.mT
    radial = x.new_empty(0, w_out.shape[0])
    if shift is not None:
        radial = (slope * (a - shift)) @ w_out.mT
    return y, slope @ columns, radial, a


def _save_feed_forward(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors, output[-1])
    ctx.set_materialize_grads(False)  # a zero gradient of a is large
    ctx.shapes = [y.shape for y in output[:3]]


def _feed_forward_backward(ctx, *grads):
    # unpacked once: checkpointing does so but once
    *inputs, a = ctx.saved_tensors
    if _by_plain_form(grads):
        found = _differentiated(
            inputs,
            lambda *x: _plain_feed_forward(*x, ctx.activation),
            grads,
        )
        return *found, None
    x, w_in, _, w_out, columns, shift, keep = inputs
    dense = (
        x.new_zeros(shape) if g is None else g.contiguous()
        for g, shape in zip(grads, ctx.shapes, strict=False)
    )
    grads = bent_feed_forward_grad(
        *dense, x, w_in, w_out, columns, shift, keep, a, ctx.activation
    )
    return *grads[:5], None if shift is None else grads[5], None, None


_bent_feed_forward.register_autograd(
    _feed_forward_backward, setup_context=_save_feed_forward
)


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
            "implementation='materialised')"
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
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, scale, masks, heads, kind)
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
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, scale, masks, heads, kind)
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
        _add_product(grad_k[n, s], grad.mT, q[n, t].to(kind))
    return grad_q.mul_(scale), grad_k.mul_(scale), grad_v


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
    if _by_plain_form((grad_out, grad_squares)):
        found = _differentiated(
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
    q, k, v = q.to(kind), k.to(kind), v.to(kind)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    squares = q.new_zeros(q.shape[:2])
    for i, (n, t, s) in enumerate(_blocks(q, k, is_causal, rows)):
        if rows is not None and not rows[n, t].any():
            continue
        w = _scores(q, k, n, t, s, is_causal, scale, masks, heads, kind)
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
    scale: float,
    masks: Sequence[Tensor],
    heads: int,
    kind: torch.dtype,
) -> Tensor:
    """Scores of a block, −inf where a key is hidden."""
    w = torch.bmm(q[n, t].to(kind), k[n, s].mT.to(kind)).mul_(scale)
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
