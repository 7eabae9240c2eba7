"""Through the FFN: exact diagonal Jacobians and the delta method.

A feed-forward network behind a norm has A = W₂ diag(p) W₁ as its Jacobian
with respect to the norm's output: p is φ'(a) for an MLP, and for a gated one
(φ'(g)∘u, φ(g)) stacked, with W₂ repeated. Everything below follows from
p, a, W₁ and W₂; no d×d matrix per token is formed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref.support import checks
from bft_ref.support.derivatives import constant_unless, jvp
from bft_ref.support.modules import is_watched
from bft_ref.support.numerics import at_least_float32, shrink

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def value_and_slope(
    activation: Activation, a: Tensor
) -> tuple[Tensor, Tensor]:
    """φ(a) and φ'(a) of a pointwise activation; any shape.

    Closed forms for the common ones, forward-mode differentiation otherwise.
    """
    # of copies: an activation may work in place, and a is needed afterwards
    ones = torch.ones_like(a)
    if not watched(activation):
        if (name := name_of(activation)) is not None:
            return activation_and_slope(name, a)
        return jvp(lambda x: activation(x.clone()), a, ones)
    made = activation(a.clone())
    bare = cast(nn.Module, activation).forward
    value, slope = jvp(lambda x: bare(x.clone()), a, ones)
    tolerance = max(1e-4, 2 * torch.finfo(a.dtype).eps)
    apart = (made - value).abs() > tolerance * (1 + value.abs())
    if checks.anywhere(apart) == [False]:  # its hooks only look
        return made, slope
    return jvp(lambda x: activation(x.clone()), a, ones)


def activation_and_slope(name: str, a: Tensor) -> tuple[Tensor, Tensor]:
    """φ(a) and φ'(a) in closed form, for a name of :data:`ACTIVATIONS`."""
    if name == "relu":
        return F.relu(a), (a > 0).to(a.dtype)
    if name == "tanh":
        t = torch.tanh(a)
        return t, 1 - t * t
    if name == "silu":
        s = torch.sigmoid(a)
        value = a * s
        return value, torch.addcmul(s, value, 1 - s)
    cdf = torch.special.ndtr(a)
    density = torch.exp(-0.5 * a * a) * (2 * torch.pi) ** -0.5
    return a * cdf, cdf + a * density


def watched(activation: Activation) -> bool:
    """Whether an activation is a module with hooks."""
    return isinstance(activation, nn.Module) and is_watched(activation)


def name_of(activation: Activation) -> str | None:
    """The name of an activation whose second derivative is written out."""
    named: dict[Activation, str] = {
        F.gelu: "gelu",
        F.relu: "relu",
        torch.relu: "relu",
        F.silu: "silu",
        torch.tanh: "tanh",
        F.tanh: "tanh",
    }
    if not isinstance(activation, nn.Module):
        return named.get(activation)
    if isinstance(activation, nn.GELU) and activation.approximate != "none":
        return None
    modules: dict[type[nn.Module], str] = {
        nn.GELU: "gelu",
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Tanh: "tanh",
    }
    return modules.get(type(activation))


class Normalised(NamedTuple):
    """A normalised state and what its Jacobian needs.

    ``z`` (..., d) before the affine map; ``scale`` (..., 1) the standard
    deviation ς (LayerNorm) or root mean square r (RMSNorm), in state units;
    ``gamma`` (d,) and ``beta`` (d,), or None; ``centred`` is True for
    LayerNorm.
    """

    z: Tensor
    scale: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    centred: bool

    @property
    def output(self) -> Tensor:
        """γ∘z + β, (..., d)."""
        y = self.z if self.gamma is None else self.z * self.gamma
        return y if self.beta is None else y + self.beta


def normalise(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float = 1e-5,
    centred: bool = True,
) -> Normalised:
    """LayerNorm (``centred``) or RMSNorm of x (..., d), with its scale.

    A state whose square would overflow is divided by a power of two first,
    which its output and, times that power, its scale do not notice.
    """
    w, power = shrink(at_least_float32(x))
    if centred:
        w = w - w.mean(-1, keepdim=True)
    scale = (w.square().mean(-1, keepdim=True) + eps).sqrt()
    z = w / scale
    scale = scale if power is None else scale * power
    return Normalised(z, scale, gamma, beta, centred)


class FeedForward(NamedTuple):
    """An evaluated feed-forward network: output and linearisation.

    ``output`` (..., d); ``slope`` p (..., f), or (..., 2f) for a gated
    network; ``w_in`` W₁ (f or 2f, d), ``w_out`` W₂ (d, f or 2f); ``radial``
    p∘W₁(γ∘z), shaped as p, where the norm in front was given.
    """

    output: Tensor
    slope: Tensor
    w_in: Tensor
    w_out: Tensor
    radial: Tensor | None = None


def feed_forward(
    x: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: Activation,
    gated: bool = False,
    dropout_p: float = 0.0,
    norm: Normalised | None = None,
) -> FeedForward:
    """W₂φ(W₁x + b₁) + b₂, or W₂(φ(g)∘u) + b₂ with (g, u) = W₁x + b₁.

    Dropout acts on the output only: the linearisation is of the mean. With
    the ``norm`` that made x the radial part of its Jacobian comes too:
    W₁(γ∘z) is a without its constant part, W₁β + b₁.

    Shapes: ``x`` (..., d); ``w_in`` (f, d), (2f, d) if ``gated``; ``w_out``
    (d, f). Equation (7.3).
    """
    a = F.linear(x, w_in, b_in)
    shift = None if norm is None else constant_part(w_in, b_in, norm)
    hidden, slope = hidden_and_slope(a, activation, gated)
    radial = None if shift is None else slope * (a - shift)
    hidden = torch.dropout(hidden, dropout_p, dropout_p > 0)
    output = F.linear(hidden, w_out, b_out)
    return FeedForward(output, slope, w_in, tiled(w_out, gated), radial)


def hidden_and_slope(
    a: Tensor, activation: Activation, gated: bool
) -> tuple[Tensor, Tensor]:
    """What W₂ is given, (..., f), and p, (..., f) or (..., 2f) if gated."""
    if not gated:
        return value_and_slope(activation, a)
    g, u = a.chunk(2, -1)
    phi, slope = value_and_slope(activation, g)
    return phi * u, torch.cat([slope * u, phi], -1)


def tiled(w_out: Tensor, gated: bool) -> Tensor:
    """W₂ (d, f), or twice side by side (d, 2f) where p has both halves."""
    return torch.cat([w_out, w_out], 1) if gated else w_out


def constant_part(
    w_in: Tensor, b_in: Tensor | None, norm: Normalised
) -> Tensor:
    """W₁β + b₁, (f,)."""
    bias = w_in.new_zeros(w_in.shape[0]) if b_in is None else b_in
    return bias if norm.beta is None else w_in @ norm.beta + bias


def through_norm(
    w_in: Tensor, w_out: Tensor, norm: Normalised | None, exact: bool
) -> Tensor:
    """M (f, d) with p @ M the part of J·ς that is linear in p alone."""
    m = w_in * w_out.mT
    if norm is None:
        return m
    if norm.gamma is not None:
        m = m * norm.gamma
    if exact and norm.centred:  # A times γ: W₁γ is one fixed vector
        fixed = w_in.sum(1) if norm.gamma is None else w_in @ norm.gamma
        m = m - fixed[:, None] * w_out.mT / m.shape[1]
    return m


def _radial(ffn: FeedForward) -> Tensor:
    if ffn.radial is None:
        raise ValueError(
            "ffn: expected feed_forward(..., norm=norm), whose radial part "
            "the exact Jacobian behind a norm needs; got none"
        )
    return ffn.radial


def jacobian_diag(
    ffn: FeedForward, norm: Normalised | None = None, exact: bool = True
) -> Tensor:
    """J_i = ∂FFN(norm(h))_i/∂h_i, (..., d), without forming ∂FFN/∂h.

    No norm: J = p @ (W₁∘W₂ᵀ). LayerNorm: (γ_iA_ii − mean_k A_ikγ_k −
    z_i mean_k A_ikγ_kz_k)/ς; RMSNorm: the same without the middle term. The
    first two terms are one product with a fixed matrix, the third one JVP.
    ``exact=False`` keeps the first term alone: cheap, and wrong for outlier
    features (z_i² ~ d). With a norm, ``ffn`` must have been given it too.

    Units: none. Equations (7.4)–(7.7); the diagonal is the paper's, the
    closed forms are ours.
    """
    m = through_norm(ffn.w_in, ffn.w_out, norm, exact)
    first = at_least_float32(ffn.slope @ m.to(ffn.slope.dtype))
    if norm is None:
        return first
    if exact:
        radial = at_least_float32(F.linear(_radial(ffn), ffn.w_out))
        first = first - norm.z * radial / radial.shape[-1]
    return first / norm.scale


def jacobian_trace(
    ffn: FeedForward, norm: Normalised | None = None, exact: bool = True
) -> Tensor:
    """tr J/d, (..., 1): the mean of :func:`jacobian_diag`, O(f) per token.

    Only the exact norm term costs a product with W₂. Equation (7.12).
    """
    d = ffn.w_in.shape[1]
    column = through_norm(ffn.w_in, ffn.w_out, norm, exact).sum(1)
    trace = at_least_float32(ffn.slope @ column.to(ffn.slope.dtype)).unsqueeze(
        -1
    )
    if norm is None:
        return trace / d
    if exact:
        back = F.linear(norm.z.to(ffn.w_out.dtype), ffn.w_out.mT)
        radial = (at_least_float32(back) * at_least_float32(_radial(ffn))).sum(
            -1, True
        )
        trace = trace - radial / d
    return trace / norm.scale / d


def feed_forward_jacobian(
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
    """The output, and :func:`jacobian_diag` or (``token``) the trace.

    Without ``jacobian_gradient`` the latter is a constant of any derivative.
    Shapes: ``x`` (..., d), weights as :func:`feed_forward` → (..., d), and
    (..., d) or (..., 1).
    """
    exact = exact and norm is not None
    ffn = feed_forward(
        *(x, w_in, b_in, w_out, b_out, activation, gated, dropout_p),
        norm if exact else None,
    )
    jacobian = jacobian_trace if token else jacobian_diag
    return ffn.output, constant_unless(
        jacobian_gradient, lambda: jacobian(ffn, norm, exact)
    )


def feed_forward_growth(*arguments, **options) -> tuple[Tensor, Tensor]:
    """As :func:`feed_forward_jacobian`: the output, and log (1 + J)²."""
    output, j = feed_forward_jacobian(*arguments, **options)
    return output, log_square(1 + j)


def predict(
    log_precision: Tensor, log_growth: Tensor, log_process_noise: Tensor
) -> Tensor:
    """log λ'' = −log((1 + J)²/λ' + Q): precision after the FFN.

    Shapes: broadcast; ``log_growth`` is log (1 + J)². Equation (8.1); the
    paper.
    """
    return -torch.logaddexp(log_growth - log_precision, log_process_noise)


def ornstein_uhlenbeck(
    log_process_noise: Tensor, stationary_variance: float
) -> tuple[Tensor, Tensor]:
    """log φ² and log Q' of a state whose variance returns to ς².

    1/λ'' = φ²(1 + J)²/λ' + Q' with φ² = ς²/(ς² + Q) and Q' = (1 − φ²)ς²: a
    weighted mean of what is carried and of ς², so that λ'' is never below the
    lower of the two precisions, whatever Q. Q → 0: φ = 1, all is kept, and
    Q' ≈ Q as of a random walk; Q → ∞: λ'' = 1/ς², all is forgotten. It is
    φ²((1 + J)²/λ' + Q), a random walk's variance, shrunk. To
    :func:`predict` go ``log_growth`` + log φ² and log Q'; means are not
    shrunk by φ, or a layer would forget the state that a Transformer carries.

    Shapes: any, twice; log 1 and log state². Ours.
    """
    log_variance = math.log(stationary_variance)
    relative = log_process_noise - log_variance
    # each share by itself: one minus the other would cancel
    log_kept, log_replaced = F.logsigmoid(-relative), F.logsigmoid(relative)
    return log_kept, log_variance + log_replaced


def log_square(x: Tensor) -> Tensor:
    """log(x² + tiny): finite, with a finite gradient at x = 0."""
    return torch.log(x.square() + torch.finfo(x.dtype).tiny)


def normalised_variance(variance: Tensor, norm: Normalised) -> Tensor:
    """Variance of norm(h), to first order and with every cross term, O(d).

    LayerNorm: γ_i²/ς² [v_i(1 − 2(1 + z_i²)/d) + (Σv + 2z_iΣzv +
    z_i²Σz²v)/d²]; its diagonal part alone vanishes at z_i² = d − 1. RMSNorm:
    the terms without z² or z come from the mean and drop out.

    Shapes: ``variance`` broadcasts to (..., d), in state² → (..., d), in
    units of the output². Equation (9.4); ours.
    """
    z = at_least_float32(norm.z)
    v = at_least_float32(variance).expand(z.shape)
    result = _through_normalisation(v, z, norm.centred)
    if z.dtype == torch.float32:
        # little is left of the sum where one feature is all the norm sees
        lost = result < 2.0**-12 * v.amax(-1, keepdim=True)
        if checks.anywhere(lost) != [False]:
            exact = _through_normalisation(
                v.double(), z.double(), norm.centred
            )
            result = torch.where(lost, exact.float(), result)
    if norm.gamma is not None:
        result = result * norm.gamma.square()
    result = result / norm.scale.square()
    return result.clamp(min=torch.finfo(result.dtype).tiny)


def _through_normalisation(v: Tensor, z: Tensor, centred: bool) -> Tensor:
    """:func:`normalised_variance` times ς²/γ²."""
    d, zz = z.shape[-1], z.square()
    own, shared = zz, zz * (zz * v).sum(-1, True)
    if centred:
        own = own + 1
        shared = shared + v.sum(-1, True) + 2 * z * (z * v).sum(-1, True)
    return v * (1 - 2 * own / d) + shared / d**2


def normalised_precision(log_precision: Tensor, norm: Normalised) -> Tensor:
    """−log of :func:`normalised_variance`, whatever the sizes of λ and ς.

    The variance is taken relative to the token's largest, and ς in logs:
    v/ς² and its gradient overflow where a token knows nothing.

    Shapes: ``log_precision`` (..., d) or (..., 1) → (..., d). Equation (9.4).
    """
    log_variance = -at_least_float32(log_precision)
    peak = log_variance.detach().amax(-1, keepdim=True)
    unit = norm._replace(scale=torch.ones_like(norm.scale))
    relative = normalised_variance((log_variance - peak).exp(), unit)
    return 2 * norm.scale.log() - peak - relative.log()


def activation_function(
    activation: str | Activation,
) -> tuple[Activation, bool]:
    """The pointwise function and whether it gates (SwiGLU, GEGLU, ReGLU)."""
    if callable(activation):
        return activation, False
    names = [*ACTIVATIONS, *GATED]
    checks.choice("activation", activation, names)
    name = GATED.get(activation, activation)
    return ACTIVATIONS[name], activation in GATED
