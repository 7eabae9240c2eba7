"""Kernels with hand-written backward passes: same numbers, less memory moved.

Each has its plain counterpart in :mod:`bft_ref.kriging` or
:mod:`bft_ref.delta`, against which it is tested, gradients included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op


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


@custom_op("bft_ref::bent_feed_forward", mutates_args=())
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


@bent_feed_forward.register_fake
def _(x, w_in, b_in, w_out, columns, shift, keep, activation):
    return (
        x.new_empty(len(x), len(w_out)),
        x.new_empty(len(x), columns.shape[1]),
        x.new_empty(len(x) if shift is not None else 0, len(w_out)),
        x.new_empty(len(x), len(w_in)),
    )


@bent_feed_forward_grad.register_fake
def _(gy, gf, gr, x, w_in, w_out, columns, shift, keep, a, activation):
    like = torch.empty_like
    width = x.new_empty(len(w_in))
    return like(x), like(w_in), width, like(w_out), like(columns), like(width)


def _save_feed_forward(ctx, inputs, output):
    x, w_in, _, w_out, columns, shift, keep, ctx.activation = inputs
    a = output[-1]
    ctx.save_for_backward(x, w_in, w_out, columns, shift, keep, a)
    ctx.set_materialize_grads(False)  # a zero gradient of a is large
    ctx.shapes = [y.shape for y in output[:3]]


def _feed_forward_backward(ctx, *grads):
    saved = ctx.saved_tensors  # once: checkpointing unpacks but once
    x = saved[0]
    dense = (
        x.new_zeros(shape) if g is None else g.contiguous()
        for g, shape in zip(grads, ctx.shapes, strict=False)
    )
    grads = bent_feed_forward_grad(
        *dense,
        *saved,
        ctx.activation,
    )
    shift = saved[4]
    return *grads[:5], None if shift is None else grads[5], None, None


bent_feed_forward.register_autograd(
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


@custom_op("bft_ref::weighted_columns", mutates_args=())
def weighted_columns(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax-weighted columns, Σα̃² and log Σ exp, block of rows by block.

    Shapes: ``q`` (N, T, d), ``k`` (N, S, d), ``v`` (N, S, c) → (N, T, c),
    (N, T), (N, T). ``is_causal`` needs T = S. Never holds T×S.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    squares = q.new_empty(q.shape[:2])
    lse = q.new_empty(q.shape[:2])
    v1 = _with_column(v, 1.0)  # the row sums come with the product
    later = _later(q)
    for n, t, s in _blocks(q, k, is_causal):
        w = torch.bmm(q[n, t], k[n, s].mT).mul_(scale)
        if is_causal:
            _hide_later_keys(w, later)
        top = w.amax(-1, keepdim=True)
        w.sub_(top).exp_()
        sums = torch.bmm(w, v1[n, s])
        total = sums[..., -1]
        out[n, t] = sums[..., :-1] / total.unsqueeze(-1)
        norm = torch.linalg.vector_norm(w, dim=-1) / total
        squares[n, t] = norm.square()
        lse[n, t] = top.squeeze(-1) + total.log()
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: dS = α̃∘(dO vᵀ + 2g α̃ − δ), recomputing α̃.

    δ = Σ dO∘O + 2g Σα̃² needs no pass over the weights; it and the
    log-sum-exp ride along as one more column of the products.
    Equation (10.5).
    """
    twice = 2 * grad_squares
    delta = (grad_out * out).sum(-1) + twice * squares
    grad_out1 = torch.cat([grad_out, -delta.unsqueeze(-1)], -1)
    v1 = _with_column(v, 1.0)
    q1 = torch.cat([q, -lse.unsqueeze(-1) / scale], -1)
    k1 = _with_column(k, 1.0)
    later = _later(q)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for n, t, s in _blocks(q, k, is_causal):
        w = torch.bmm(q1[n, t], k1[n, s].mT).mul_(scale)
        if is_causal:
            _hide_later_keys(w, later)
        w.exp_()
        grad_v[n, s].baddbmm_(w.mT, grad_out[n, t])
        grad = torch.bmm(grad_out1[n, t], v1[n, s].mT)
        grad.addcmul_(w, twice[n, t].unsqueeze(-1)).mul_(w)
        grad_q[n, t] = torch.bmm(grad, k[n, s])
        grad_k[n, s].baddbmm_(grad.mT, q[n, t])
    return grad_q.mul_(scale), grad_k.mul_(scale), grad_v


@weighted_columns.register_fake
def _(q, k, v, is_causal, scale):
    rows = q.shape[:2]
    return (
        q.new_empty(*rows, v.shape[-1]),
        q.new_empty(rows),
        q.new_empty(rows),
    )


@weighted_columns_grad.register_fake
def _(grad_out, grad_squares, q, k, v, *_):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad_out, grad_squares, _):
    grads = weighted_columns_grad(
        grad_out.contiguous(),
        grad_squares,
        *ctx.saved_tensors,
        ctx.is_causal,
        ctx.scale,
    )
    return *grads, None, None


weighted_columns.register_autograd(_backward, setup_context=_save)


def _with_column(x: Tensor, value: float) -> Tensor:
    return torch.cat([x, torch.full_like(x[..., :1], value)], -1)


def _blocks(q: Tensor, k: Tensor, is_causal: bool):
    """Slices of heads, of queries, and of the keys those may see."""
    heads, queries = q.shape[:2]
    keys = k.shape[1]
    budget = BLOCK.get(q.device.type, BLOCK["cuda"])
    rows = min(max(budget // keys, 16), ROWS, queries)
    group = max(budget // (rows * keys), HEADS)
    for n in range(0, heads, group):
        for t in range(0, queries, rows):
            last = t + rows if is_causal else keys
            yield slice(n, n + group), slice(t, t + rows), slice(0, last)


def _later(q: Tensor) -> Tensor:
    """The triangle of later keys in a causal block."""
    return q.new_ones(ROWS, ROWS, dtype=torch.bool).triu(1)


def _hide_later_keys(w: Tensor, later: Tensor) -> None:
    """The last T columns of a causal block (N, T, S) are its triangle."""
    rows = w.shape[-2]
    w[..., -rows:].masked_fill_(later[:rows, :rows], -torch.inf)
