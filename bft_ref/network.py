"""The network of a layer as dynamics, whatever modules it is made of."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bft_ref import delta, jacobian_estimates
from bft_ref.belief import Belief
from bft_ref.support import checks
from bft_ref.support.derivatives import constant_unless, jvp
from bft_ref.support.modules import apply, apply_norm, is_linear, warn_unknown
from bft_ref.support.numerics import at_least_float32

if TYPE_CHECKING:
    from bft_ref.layer import BFTLayer


def step_and_growth(
    layer: "BFTLayer", belief: Belief
) -> tuple[Tensor, Tensor]:
    """What the network adds to the mean, (B, T, d), and log (1 + J)².

    Plain matrices go the closed way; adapters and hooks are called, and their
    effective matrices used; what has no known matrix, and what ``config`` asks
    for, is estimated by random signs.

    Raises: as the modules that are called. Equations (7.4)–(7.12), (8.1).
    """
    c = layer.config
    closed = c.jacobian != "hutchinson" and c.variance_rule == "diagonal"
    x, norm = belief.mean, None
    if layer.norm_first:
        x, norm = layer.norm("norm2", belief.mean)
    if layer.ffn is not None:
        return _estimated(layer, belief)
    token, exact = c.granularity == "token", c.jacobian == "exact"
    if closed and is_linear(layer.linear1) and is_linear(layer.linear2):
        return layer.ways.feed_forward_growth(
            x,
            *(layer.linear1.weight, layer.linear1.bias),
            *(layer.linear2.weight, layer.linear2.bias),
            *(layer.activation, layer.gated, layer.thinning),
            *(norm, exact, token, c.jacobian_gradient),
        )
    step, ffn = _through_modules(layer, x, norm)
    if ffn is None:
        return step, _estimated(layer, belief)[1]
    if closed:
        jacobian = delta.jacobian_trace if token else delta.jacobian_diag
        return step, constant_unless(
            c.jacobian_gradient,
            lambda: delta.log_square(1 + jacobian(ffn, norm, exact)),
        )
    return step, constant_unless(
        c.jacobian_gradient,
        lambda: _growth(
            layer,
            belief,
            lambda v: jacobian_estimates.jacobian_product(ffn, v, norm),
        ),
    )


def _through_modules(
    layer: "BFTLayer", x: Tensor, norm: delta.Normalised | None
) -> tuple[Tensor, delta.FeedForward | None]:
    """The network's step, linearised where its modules are matrices."""
    a, w_in = apply(layer.linear1, x)
    hidden, slope = delta.hidden_and_slope(a, layer.activation, layer.gated)
    step, w_out = apply(layer.linear2, layer.drop(hidden))
    if w_in is None or w_out is None:
        if layer.config.jacobian != "hutchinson":
            warn_unknown("linear1" if w_in is None else "linear2")
        return step, None
    radial = None
    if norm is not None:
        z = norm.output if norm.beta is None else norm.output - norm.beta
        radial = slope * F.linear(z.to(w_in.dtype), w_in)
    w_out = delta.tiled(w_out, layer.gated)
    return step, delta.FeedForward(step, slope, w_in, w_out, radial)


def _growth(
    layer: "BFTLayer", belief: Belief, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """log (1 + J)² by random signs; ``product`` maps a vector v to Jv."""
    mean, log_precision = belief
    signs = layer.signs(mean, 0)
    if layer.config.variance_rule == "row":
        return jacobian_estimates.row_growth(log_precision, signs, product)
    token = layer.config.granularity == "token"
    growth = jacobian_estimates.probed_growth(
        product, signs, layer.signs(mean, 1), token
    )
    return torch.log(growth + torch.finfo(growth.dtype).tiny)


def _estimated(layer: "BFTLayer", belief: Belief) -> tuple[Tensor, Tensor]:
    """The step and log (1 + J)² of modules that are no matrices."""
    mean = belief.mean.contiguous()  # jvp refuses expanded memory
    steps = []

    def network(h: Tensor) -> Tensor:
        """As a function of the state; no dropout of the layer."""
        if layer.norm_first:
            h, _ = apply_norm(
                *("norm2", layer.norm2, h, delta.normalise), hooks=False
            )
        if layer.ffn is not None:
            # of a copy: it may work in place
            made = layer.ffn(h.clone())
            return checks.shape("ffn: output", made, h.shape)
        a = layer.linear1(h)
        hidden, _ = delta.hidden_and_slope(a, layer.activation, layer.gated)
        return layer.linear2(hidden)

    def product(vector: Tensor) -> Tensor:
        step, along = jvp(network, mean, vector.to(mean.dtype))
        steps.append(step)
        return at_least_float32(along)

    gradient = layer.config.jacobian_gradient
    if not gradient:  # the step has one all the same
        steps.append(network(mean))
    log_growth = constant_unless(
        gradient, lambda: _growth(layer, belief, product)
    )
    return steps[0], log_growth
