"""Kernels with hand-written backward passes: same numbers, less memory moved.

Each has its plain counterpart in :mod:`bft_ref.kriging` or
:mod:`bft_ref.delta`, against which it is tested, gradients included.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


PIECE = 2**15  # numbers at a time that stay in a CPU's cache


def _in_pieces(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """An elementwise function of tensors (..., f), a few rows at a time.

    A chain of elementwise operations on large tensors waits for memory. On a
    GPU, and for a compiler that fuses the chain itself, all at once.
    """
    first = tensors[0]
    rows = max(PIECE // first.shape[-1], 1)
    if (
        first.device.type != "cpu"
        or torch.compiler.is_compiling()
        or first.numel() <= rows * first.shape[-1]
        or not all(type(t) is Tensor for t in tensors)
    ):
        return function(*tensors)
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    out = torch.empty_like(flat[0])
    for start in range(0, len(out), rows):
        piece = slice(start, start + rows)
        out[piece] = function(*(t[piece] for t in flat))
    return out.view(first.shape)


class GELU(torch.autograd.Function):
    """φ(a), φ'(a) and, with a shift, φ'(a)∘(a − shift) of the exact GELU.

    φ' = Φ + a·pdf and φ'' = pdf·(2 − a²). Shapes: ``a`` (..., f), ``shift``
    (f,) or None.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, shift: Tensor | None) -> tuple[Tensor, ...]:
        slope = torch.ops.aten.gelu_backward(torch.ones_like(a), a)
        if shift is None:
            return F.gelu(a), slope
        return F.gelu(a), slope, (a - shift) * slope

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, grad_value, grad_slope, grad_radial=None):
        a, shift, slope = ctx.saved_tensors

        def gradient(a, slope, grad_value, grad_slope, grad_radial=None):
            square = a * a
            curvature = torch.exp(-0.5 * square) * (2 - square)
            curvature = curvature * (2 * torch.pi) ** -0.5
            if grad_radial is not None:
                grad_slope = torch.addcmul(grad_slope, grad_radial, a - shift)
                grad_value = grad_value + grad_radial
            return torch.addcmul(curvature * grad_slope, grad_value, slope)

        grads = [g for g in (grad_radial,) if g is not None]
        grad = _in_pieces(gradient, a, slope, grad_value, grad_slope, *grads)
        if grad_radial is None:
            return grad, None
        return grad, -(grad_radial * slope).flatten(0, -2).sum(0)


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
BLOCK = {"cpu": 2**19, "cuda": 2**25}  # weights held at a time


@torch.library.custom_op("bft_ref::weighted_columns", mutates_args=())
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
    for n, t, s in _blocks(q, k, is_causal):
        w = torch.bmm(q[n, t], k[n, s].mT).mul_(scale)
        if is_causal:
            _hide_later_keys(w)
        top = w.amax(-1, keepdim=True)
        w.sub_(top).exp_()
        sums = torch.bmm(w, v1[n, s])
        total = sums[..., -1]
        out[n, t] = sums[..., :-1] / total.unsqueeze(-1)
        norm = torch.linalg.vector_norm(w, dim=-1) / total
        squares[n, t] = norm.square()
        lse[n, t] = top.squeeze(-1) + total.log()
    return out, squares, lse


@torch.library.custom_op("bft_ref::weighted_columns_grad", mutates_args=())
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
    """
    twice = 2 * grad_squares
    delta = (grad_out * out).sum(-1) + twice * squares
    grad_out1 = torch.cat([grad_out, -delta.unsqueeze(-1)], -1)
    v1 = _with_column(v, 1.0)
    q1 = torch.cat([q, -lse.unsqueeze(-1) / scale], -1)
    k1 = _with_column(k, 1.0)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for n, t, s in _blocks(q, k, is_causal):
        w = torch.bmm(q1[n, t], k1[n, s].mT).mul_(scale)
        if is_causal:
            _hide_later_keys(w)
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
    group = max(budget // (rows * keys), 1)
    for n in range(0, heads, group):
        for t in range(0, queries, rows):
            last = t + rows if is_causal else keys
            yield slice(n, n + group), slice(t, t + rows), slice(0, last)


def _hide_later_keys(w: Tensor) -> None:
    """The last T columns of a causal block (N, T, S) are its triangle."""
    rows = w.shape[-2]
    later = torch.ones(rows, rows, dtype=torch.bool, device=w.device).triu(1)
    w[..., -rows:].masked_fill_(later, -torch.inf)
