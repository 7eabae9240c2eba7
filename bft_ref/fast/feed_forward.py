"""A feed-forward network and its Jacobian in one pass over hidden units."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from bft_ref import delta
from bft_ref.delta import Activation, Normalised
from bft_ref.fast.algebra import growth
from bft_ref.fast.backward import by_plain_form, differentiated
from bft_ref.support.derivatives import reverse_mode_only
from bft_ref.support.numerics import at_least_float32, autocast_device


def feed_forward_growth(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: Activation,
    gated: bool = False,
    dropout_p: float = 0.0,
    norm: Normalised | None = None,
    exact: bool = True,
    token: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`bft_ref.delta.feed_forward_growth`, sooner on a CPU.

    For ReLU, GELU, SiLU and tanh it is one pass that keeps nothing but
    W₁x + b₁.
    """
    plain = gated or delta.watched(activation) or x.device.type != "cpu"
    name = None if plain else delta.name_of(activation)
    autocast = torch.is_autocast_enabled(autocast_device(x))
    if name is None or x.dtype != w_in.dtype or autocast:
        return delta.feed_forward_growth(
            *(x, w_in, b_in, w_out, b_out, activation, gated, dropout_p),
            *(norm, exact, token),
        )
    exact = exact and norm is not None
    columns = delta.through_norm(w_in, w_out, norm, exact)
    if token:
        columns = columns.sum(1, True)
    keep = None
    if dropout_p > 0:
        ones = x.new_ones(*x.shape[:-1], w_in.shape[0]).flatten(0, -2)
        keep = torch.dropout(ones, dropout_p, True)
    bias = w_in.new_zeros(w_in.shape[0]) if b_in is None else b_in
    shift = (
        delta.constant_part(w_in, b_in, norm)
        if norm is not None and exact
        else None
    )
    output, j, radial, _ = linearised_feed_forward(
        x.flatten(0, -2), w_in, bias, w_out, columns, shift, keep, name
    )
    output, j = output.view(x.shape), j.view(*x.shape[:-1], -1)
    if b_out is not None:
        output = output + b_out
    if norm is None:
        j = at_least_float32(j) / (x.shape[-1] if token else 1)
        return output, delta.log_square(1 + j)
    outlier = radial.view(x.shape) if exact else None
    if not token:
        return output, growth(j, outlier, norm)
    if outlier is not None:
        j = j - (norm.z * outlier).sum(-1, True) / x.shape[-1]
    return output, delta.log_square(1 + j / norm.scale / x.shape[-1])


def activated(
    name: str, a: Tensor, curvature: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ(a), φ'(a) and, if asked for, φ''(a): None where that is zero."""
    if name == "gelu":
        one = a.new_ones(()).expand_as(a)
        slope = torch.ops.aten.gelu_backward(one, a)
        if not curvature:
            return F.gelu(a), slope, None
        half = (a * a).mul_(-0.5)  # φ'' is the density times 2 − a²
        curve = half.exp().mul_(half.add_(1)).mul_((2 / torch.pi) ** 0.5)
        return F.gelu(a), slope, curve
    value, slope = delta.activation_and_slope(name, a)
    if name == "relu" or not curvature:
        return value, slope, None
    if name == "tanh":
        return value, slope, -2 * value * slope
    s = torch.sigmoid(a)  # silu: s'(2 + a(1 − 2s)), s' = s(1 − s)
    return value, slope, s * (1 - s) * (2 + a - 2 * value)


HIDDEN_BLOCK = 2**18  # hidden units at a time on a CPU,
LEAST_ROWS = 512  # but not fewer tokens


def _row_blocks(rows: int, width: int, device: torch.device):
    step = (
        max(HIDDEN_BLOCK // width, LEAST_ROWS)
        if device.type == "cpu"
        else rows
    )
    for start in range(0, rows, step):
        yield slice(start, start + step)


def linearised_feed_forward(
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
    function = _plain_feed_forward if plain else _linearised_feed_forward
    return function(*inputs, activation)


@custom_op("bft_ref::linearised_feed_forward", mutates_args=())
def _linearised_feed_forward(
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
        value, slope, _ = activated(activation, a[r])
        value = value if keep is None else value.mul_(keep[r])
        torch.mm(value, w_out.mT, out=y[r])
        torch.mm(slope, columns, out=first[r])
        if shift is not None:
            distance = torch.sub(a[r], shift, out=value)
            torch.mm(slope.mul_(distance), w_out.mT, out=radial[r])
    return y, first, radial, a


@custom_op("bft_ref::linearised_feed_forward_grad", mutates_args=())
def linearised_feed_forward_grad(
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
        value, slope, curve = activated(activation, a[r], True)
        grad_value = grad_y[r] @ w_out
        if keep is not None:
            value.mul_(keep[r])
            grad_value.mul_(keep[r])
        grad_w_out.addmm_(grad_y[r].mT, value)
        grad_columns.addmm_(slope.mT, grad_first[r])
        grad_slope = torch.mm(grad_first[r], columns.mT, out=value)
        if shift is not None:
            distance = a[r] - shift
            grad_product = grad_radial[r] @ w_out
            grad_slope.addcmul_(grad_product, distance)
            grad_value.add_(grad_product)
            grad_w_out.addmm_(grad_radial[r].mT, distance.mul_(slope))
            grad_shift -= grad_product.mul_(slope).sum(0)
        grad_a = grad_value.mul_(slope)
        if curve is not None:
            grad_a.addcmul_(grad_slope, curve)
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


@_linearised_feed_forward.register_fake
def _(x, w_in, b_in, w_out, columns, shift, keep, activation):
    return (
        # x.shape[0], unlike len(x), leaves the number of tokens open
        x.new_empty(x.shape[0], w_out.shape[0]),
        x.new_empty(x.shape[0], columns.shape[1]),
        x.new_empty(x.shape[0] if shift is not None else 0, w_out.shape[0]),
        x.new_empty(x.shape[0], w_in.shape[0]),
    )


@linearised_feed_forward_grad.register_fake
def _(gy, gf, gr, x, w_in, w_out, columns, shift, keep, a, activation):
    like = torch.empty_like
    width = x.new_empty(w_in.shape[0])
    return like(x), like(w_in), width, like(w_out), like(columns), like(width)


def _plain_feed_forward(x, w_in, b_in, w_out, columns, shift, keep, name):
    """The same four results by differentiable operations."""
    a = torch.addmm(b_in, x, w_in.mT)
    value, slope, _ = activated(name, a)
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
    if by_plain_form(grads):
        found = differentiated(
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
    grads = linearised_feed_forward_grad(
        *dense, x, w_in, w_out, columns, shift, keep, a, ctx.activation
    )
    return *grads[:5], None if shift is None else grads[5], None, None


_linearised_feed_forward.register_autograd(
    _feed_forward_backward, setup_context=_save_feed_forward
)
