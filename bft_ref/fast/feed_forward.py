"""A feed-forward network and its Jacobian in one pass over hidden units."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from bft_ref import delta
from bft_ref.delta import Activation, Normalised
from bft_ref.fast.algebra import growth
from bft_ref.fast.backward import by_plain_form, differentiated
from bft_ref.support.derivatives import constant_unless, reverse_mode_only
from bft_ref.support.numerics import at_least_float32, autocast_device
from bft_ref.support.weights import of_weights


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
    jacobian_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """:func:`bft_ref.delta.feed_forward_growth`, sooner on a CPU.

    For ReLU, GELU, SiLU and tanh, and networks gated by them, it is one pass
    that keeps nothing but W₁x + b₁.
    """
    plain = delta.watched(activation) or x.device.type != "cpu"
    name = None if plain else delta.name_of(activation)
    autocast = torch.is_autocast_enabled(autocast_device(x))
    if name is None or x.dtype != w_in.dtype or autocast:
        return delta.feed_forward_growth(
            *(x, w_in, b_in, w_out, b_out, activation, gated, dropout_p),
            *(norm, exact, token, jacobian_gradient),
        )
    exact = exact and norm is not None
    gamma, beta = (None, None) if norm is None else norm[2:4]

    def fixed() -> tuple[Tensor, Tensor | None]:
        """The columns M, their sum for a token, and W₁β + b₁ unless 0."""
        m = delta.through_norm(w_in, delta.tiled(w_out, gated), norm, exact)
        shift = None
        if norm is not None and exact and not b_in is beta is None:
            shift = delta.constant_part(w_in, b_in, norm)
        return m.sum(1, True) if token else m, shift

    columns, shift = of_weights(
        ("feed_forward", gated, norm and norm.centred, exact, token),
        (w_in, b_in, w_out, gamma, beta),
        lambda: constant_unless(jacobian_gradient, fixed),
    )
    keep = None
    if dropout_p > 0:
        ones = x.new_ones(*x.shape[:-1], w_out.shape[1]).flatten(0, -2)
        keep = torch.dropout(ones, dropout_p, True)
    output, j, radial, _ = linearised_feed_forward(
        x.flatten(0, -2), w_in, b_in, w_out, columns, shift, keep, name, exact
    )
    output, j = output.view(x.shape), j.view(*x.shape[:-1], -1)
    outlier = radial.view(x.shape) if exact else None
    if b_out is not None:
        output = output + b_out
    return output, constant_unless(
        jacobian_gradient, lambda: _growth(j, outlier, norm, x.shape[-1])
    )


def _growth(
    j: Tensor, radial: Tensor | None, norm: Normalised | None, width: int
) -> Tensor:
    """log (1 + J)² from p @ M and from the radial part, if there is one."""
    token = j.shape[-1] != width or width == 1
    if norm is None:
        j = at_least_float32(j) / (width if token else 1)
        return delta.log_square(1 + j)
    if not token:
        return growth(j, radial, norm)
    if radial is not None:
        j = j - (norm.z * radial).sum(-1, True) / width
    return delta.log_square(1 + j / norm.scale / width)


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
LEAST_ROWS = 512  # but not fewer tokens,
GATED_ROWS = 128  # where nothing is summed over them


def _row_blocks(rows: int, width: int, device: torch.device, least: int):
    step = max(HIDDEN_BLOCK // width, least) if device.type == "cpu" else rows
    for start in range(0, rows, step):
        yield slice(start, start + step)


def units(
    name: str, parts: Sequence[Tensor], curvature: bool = False
) -> tuple[Tensor, list[Tensor], list[list[Tensor | None]]]:
    """φ(a), or φ(g)∘u of parts g and u, with gradient and Hessian in them.

    The Hessian only if asked for; None where it is zero.
    """
    a, *rest = parts
    value, slope, curve = activated(name, a, curvature)
    if not rest:
        return value, [slope], [[curve]]
    (u,) = rest
    bent = None if curve is None else curve * u
    return value * u, [slope * u, value], [[bent, slope], [slope, None]]


def _at_once(
    name: str, parts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """:func:`units` without the Hessian, in fewer passes; no derivatives."""
    a, *rest = parts
    if not rest:
        return units(name, parts)[:2]
    (u,), aten = rest, torch.ops.aten
    value = delta.ACTIVATIONS[name](a)
    slope = {
        "relu": lambda: aten.threshold_backward(u, a, 0),
        "gelu": lambda: aten.gelu_backward(u, a),
        "silu": lambda: aten.silu_backward(u, a),
        "tanh": lambda: aten.tanh_backward(u, value),
    }[name]()
    return value * u, [slope, value]


def _distances(
    parts: Sequence[Tensor], shift: Tensor | None
) -> Sequence[Tensor]:
    """a − shift, of each of its parts."""
    if shift is None:
        return parts
    centres = shift.chunk(len(parts))
    return [x - s for x, s in zip(parts, centres, strict=True)]


def _count(w_in: Tensor, w_out: Tensor) -> int:
    return w_in.shape[0] // w_out.shape[1]


def linearised_feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    activation: str,
    radial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W₂(keep∘φ(a)), p @ columns, W₂(p∘(a − shift)), and a.

    a = W₁x + b₁ is all that is kept for the backward pass. It is (g, u) where
    W₁ has twice the rows for which W₂ has columns: then φ(g)∘u stands for
    φ(a), and p∘(a − shift) is summed over both. Shapes: ``x`` (R, d),
    ``w_in`` (f or 2f, d), ``w_out`` (d, f), ``columns`` (f or 2f, c),
    ``shift`` (f or 2f,) or None for 0, ``keep`` (R, f) or None; without
    ``radial`` the third result is empty.
    """
    inputs = (x, w_in, b_in, w_out, columns, shift, keep)
    plain = reverse_mode_only(*(y for y in inputs if y is not None))
    function = _plain_feed_forward if plain else _linearised_feed_forward
    return function(*inputs, activation, radial)


def _hidden(x: Tensor, w_in: Tensor, b_in: Tensor | None) -> Tensor:
    if b_in is None:
        return torch.mm(x, w_in.mT)
    return torch.addmm(b_in, x, w_in.mT)


@custom_op("bft_ref::linearised_feed_forward", mutates_args=())
def _linearised_feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    activation: str,
    radial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = _count(w_in, w_out)
    a = _hidden(x, w_in, b_in)
    y = x.new_empty(len(x), len(w_out))
    first = x.new_zeros(len(x), columns.shape[1])
    outlier = x.new_empty(len(x) if radial else 0, len(w_out))
    least = LEAST_ROWS if count == 1 else GATED_ROWS
    for r in _row_blocks(len(x), w_out.shape[1], x.device, least):
        parts = a[r].chunk(count, 1)
        value, slopes = _at_once(activation, parts)
        for p, m in zip(slopes, columns.chunk(count), strict=True):
            first[r].addmm_(p, m)
        value = value if keep is None else value.mul_(keep[r])
        torch.mm(value, w_out.mT, out=y[r])
        if radial:
            distances = _distances(parts, shift)
            torch.mul(slopes[0], distances[0], out=value)
            for p, distance in zip(slopes[1:], distances[1:], strict=True):
                value.addcmul_(p, distance)
            torch.mm(value, w_out.mT, out=outlier[r])
    return y, first, outlier, a


@custom_op("bft_ref::linearised_feed_forward_grad", mutates_args=())
def linearised_feed_forward_grad(
    grad_y: Tensor,
    grad_first: Tensor | None,
    grad_radial: Tensor | None,
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    columns: Tensor,
    shift: Tensor | None,
    keep: Tensor | None,
    a: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W₁, b₁, W₂, the columns and the shift.

    None where the Jacobian has no gradient: then it costs nothing, and what
    it alone has a gradient from is empty.
    """
    count = _count(w_in, w_out)
    grad_x = torch.empty_like(x)
    grad_w_in, grad_w_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
    moved = grad_radial is not None and shift is not None
    grad_b_in, grad_columns, grad_shift = (
        torch.zeros_like(y) if y is not None and given else x.new_empty(0)
        for y, given in [
            (b_in, True),
            (columns, grad_first is not None),
            (shift, moved),
        ]
    )
    for r in _row_blocks(len(x), w_out.shape[1], x.device, LEAST_ROWS):
        parts = a[r].chunk(count, 1)
        hessian: list[list[Tensor | None]] = [[]] * count
        if grad_first is None:
            value, slopes = _at_once(activation, parts)
        else:
            value, slopes, hessian = units(activation, parts, True)
        grad_value = grad_y[r] @ w_out
        if keep is not None:
            value.mul_(keep[r])
            grad_value.mul_(keep[r])
        grad_w_out.addmm_(grad_y[r].mT, value)
        grad_slopes: list[Tensor] = []
        if grad_first is not None:
            for p, g in zip(slopes, grad_columns.chunk(count), strict=True):
                g.addmm_(p.mT, grad_first[r])
            grad_slopes = [grad_first[r] @ m.mT for m in columns.chunk(count)]
        if grad_radial is not None:
            grad_product = grad_radial[r] @ w_out
            grad_value.add_(grad_product)
            value.zero_()
            distances = _distances(parts, shift)
            for i, (p, distance) in enumerate(
                zip(slopes, distances, strict=True)
            ):
                grad_slopes[i].addcmul_(grad_product, distance)
                value.addcmul_(p, distance)
                if moved:
                    shifted = grad_shift.chunk(count)[i]
                    shifted.sub_((grad_product * p).sum(0))
            grad_w_out.addmm_(grad_radial[r].mT, value)
        grad_a = torch.empty_like(a[r])
        for p, bends, g in zip(
            slopes, hessian, grad_a.chunk(count, 1), strict=True
        ):
            torch.mul(grad_value, p, out=g)
            for grad_slope, bend in zip(grad_slopes, bends, strict=False):
                if bend is not None:
                    g.addcmul_(grad_slope, bend)
        torch.mm(grad_a, w_in, out=grad_x[r])
        grad_w_in.addmm_(grad_a.mT, x[r])
        if b_in is not None:
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
def _(x, w_in, b_in, w_out, columns, shift, keep, activation, radial):
    return (
        # x.shape[0], unlike len(x), leaves the number of tokens open
        x.new_empty(x.shape[0], w_out.shape[0]),
        x.new_empty(x.shape[0], columns.shape[1]),
        x.new_empty(x.shape[0] if radial else 0, w_out.shape[0]),
        x.new_empty(x.shape[0], w_in.shape[0]),
    )


@linearised_feed_forward_grad.register_fake
def _(gy, gf, gr, x, w_in, b_in, w_out, columns, shift, keep, a, activation):
    def like(y, given=True):
        return (
            x.new_empty(0) if y is None or not given else torch.empty_like(y)
        )

    return (
        *(like(x), like(w_in), like(b_in), like(w_out)),
        *(like(columns, gf is not None), like(shift, gr is not None)),
    )


def _plain_feed_forward(
    x, w_in, b_in, w_out, columns, shift, keep, name, radial
):
    """The same four results by differentiable operations."""
    a = _hidden(x, w_in, b_in)
    count = _count(w_in, w_out)
    value, slopes, _ = units(name, a.chunk(count, 1))
    y = (value if keep is None else value * keep) @ w_out.mT
    slope = torch.cat(slopes, 1)
    outlier = x.new_empty(0, w_out.shape[0])
    if radial:
        product = slope * (a if shift is None else a - shift)
        outlier = sum(product.chunk(count, 1)) @ w_out.mT
    return y, slope @ columns, outlier, a


def _save_feed_forward(ctx, inputs, output):
    *tensors, ctx.activation, ctx.radial = inputs
    ctx.save_for_backward(*tensors, output[-1])
    ctx.set_materialize_grads(False)  # a zero gradient of a is large
    ctx.shapes = [y.shape for y in output[:3]]


def _feed_forward_backward(ctx, *grads):
    # unpacked once: checkpointing does so but once
    *inputs, a = ctx.saved_tensors
    if by_plain_form(grads):
        found = differentiated(
            inputs,
            lambda *x: _plain_feed_forward(*x, ctx.activation, ctx.radial),
            grads,
        )
        return *found, None, None
    x, *weights = inputs
    flat = not any(g is not None for g in grads[1:3])
    dense = [
        x.new_zeros(shape) if g is None else g.contiguous()
        for g, shape in zip(grads, ctx.shapes, strict=False)
    ]
    found = linearised_feed_forward_grad(
        dense[0],
        None if flat else dense[1],
        dense[2] if ctx.radial and not flat else None,
        *(x, *weights, a, ctx.activation),
    )
    known = (True, True, weights[1] is not None, True, not flat)
    moved = weights[4] is not None and ctx.radial and not flat
    return *(
        g if is_known else None
        for g, is_known in zip(found, (*known, moved), strict=True)
    ), *[None] * 3


_linearised_feed_forward.register_autograd(
    _feed_forward_backward, setup_context=_save_feed_forward
)
