"""The layer: observe, update, predict. Belief in, Belief out."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import checks, delta, reml
from bft_ref.belief import Belief, cast_on, log_mean_exp, wide
from bft_ref.cache import KeyValueCache, all_or_nothing
from bft_ref.fast.attention import IMPLEMENTATIONS, attend
from bft_ref.kalman import update
from bft_ref.kriging import hidden_and_bias
from bft_ref.linear_maps import apply, is_linear, is_watched, squared_map
from bft_ref.rotary import rotate


@dataclass(frozen=True)
class BFTConfig:
    """What the paper leaves open, and our choices; chosen at construction.

    granularity: ``feature`` (a precision per feature) or ``token`` (one per
        token).
    observation: what the observation precision is a precision of: one more
        value as kriging predicts it (``prediction``), the local ``mean``, or
        a ``value`` around a known mean.
    prior_scale: s₀² from the ``neighbours``' own variances, or ``unit``.
    prior_dof: ν₀ > 0 of the inverse-χ² prior.
    project: carry the variance through W_O into state units; otherwise
        feature i of the concatenated heads speaks for feature i of the state.
    jacobian: ``exact``, ``first`` (first norm term only) or ``hutchinson``,
        which is also what is used where a network's matrices are unknown.
    variance_rule: ``diagonal`` (the paper's) or ``row`` (one-probe estimate
        of the exact first-order variance, feature granularity only).
    process_noise: initial Q > 0, in state².
    implementation: of attention: ``materialised`` (forms the T×T weights),
        ``blocked``, ``flex`` (CUDA), or ``auto``, which chooses.
    n_eff_gradient: False drops the gradient through n_eff, which is cheaper.
    """

    granularity: str = "feature"
    observation: str = "prediction"
    prior_scale: str = "neighbours"
    prior_dof: float = 1.0
    project: bool = True
    jacobian: str = "exact"
    variance_rule: str = "diagonal"
    process_noise: float = 1.0
    implementation: str = "auto"
    n_eff_gradient: bool = True

    def __post_init__(self):
        checks.typed(self)
        for name, allowed in [
            ("granularity", ("feature", "token")),
            ("observation", reml.READINGS),
            ("prior_scale", ("neighbours", "unit")),
            ("jacobian", ("exact", "first", "hutchinson")),
            ("variance_rule", ("diagonal", "row")),
            ("implementation", ("auto", *IMPLEMENTATIONS)),
        ]:
            checks.choice(name, getattr(self, name), allowed)
        checks.number("prior_dof", self.prior_dof, 0.0)
        checks.number("process_noise", self.process_noise, 0.0)
        if self.variance_rule == "row" and self.granularity == "token":
            raise ValueError(
                "variance_rule: 'row' needs granularity='feature', got 'token'"
            )


class Observation(NamedTuple):
    """What attention adds to the state, and how precisely it is known.

    ``innovation`` e (B, T, d), state; ``log_precision`` log λ_obs (B, T, d)
    or (B, T, 1), −inf where a token saw nothing; ``n_eff`` (B, H, T) and
    ``weights`` α̃ (B, H, T, S) where they were kept.
    """

    innovation: Tensor
    log_precision: Tensor
    n_eff: Tensor | None = None
    weights: Tensor | None = None


class LayerTrace(NamedTuple):
    """A layer's internals, for plots and tests.

    ``observation``: all of what :meth:`BFTLayer.observe` found. With last
    dimension d (or 1 for token granularity): ``gain``,
    ``log_updated_precision`` λ', ``log_growth`` log (1 + J)²,
    ``log_predicted_precision`` λ''.
    """

    observation: Observation
    gain: Tensor
    log_updated_precision: Tensor
    log_growth: Tensor
    log_predicted_precision: Tensor

    @property
    def weights(self) -> Tensor | None:
        """α̃, (B, H, T, S)."""
        return self.observation.weights

    @property
    def n_eff(self) -> Tensor:
        """n, (B, H, T)."""
        return cast(Tensor, self.observation.n_eff)

    @property
    def log_observation_precision(self) -> Tensor:
        """log λ_obs, (B, T, d) or (B, T, 1)."""
        return self.observation.log_precision


class BFTLayer(nn.Module):
    """One Transformer layer read as a Bayesian filter.

    Arguments and parameter names are those of
    ``torch.nn.TransformerEncoderLayer``, whose state dict it loads, with three
    differences: it maps a Belief to a Belief, ``batch_first`` is True by
    default, and ``is_causal=True`` masks by itself. In addition:

    config: :class:`BFTConfig`. num_kv_heads: fewer key/value heads than
    heads (grouped queries). rotary_base: base of rotary positions, None for
    none. norm: ``layernorm`` or ``rmsnorm``. activation: a pointwise
    function, its name, or ``reglu``, ``geglu``, ``swiglu``. ffn: a module
    (..., d) → (..., d) in place of the built-in network; its Jacobian is
    estimated (``hutchinson``).

    Adds one parameter, ``log_process_noise``, (d,) or (1,).

    ``linear1``, ``linear2``, ``out_proj`` and the norms are called as the
    modules they are: adapters, hooks, parametrisations and quantised layers
    work. What the variances need of their matrices is the effective one; the
    Jacobian of a network whose matrices are unknown is estimated, with a
    warning. A hook or adapter on ``self_attn`` itself, which is a bag of
    parameters and never called, is refused.

    Raises: ValueError for sizes and options that do not fit together.
    Equations (9.1)–(9.3); source: the paper, options as marked in BFTConfig.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        config: BFTConfig | None = None,
        num_kv_heads: int | None = None,
        rotary_base: float | None = None,
        norm: str = "layernorm",
        ffn: nn.Module | None = None,
    ):
        super().__init__()
        kv_heads = nhead if num_kv_heads is None else num_kv_heads
        for name, value in [
            ("d_model", d_model),
            ("nhead", nhead),
            ("dim_feedforward", dim_feedforward),
            ("num_kv_heads", kv_heads),
        ]:
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name}: expected a positive integer, got {value!r}"
                )
        if d_model % nhead:
            raise ValueError(
                f"d_model: expected a multiple of nhead={nhead}, got {d_model}"
            )
        if nhead % kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of nhead={nhead}, "
                f"got {kv_heads}"
            )
        if rotary_base is not None and (d_model // nhead) % 2:
            raise ValueError(
                "rotary_base: rotary positions need an even head size, got "
                f"{d_model // nhead}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected [0, 1), got {dropout!r}")
        if config is not None and not isinstance(config, BFTConfig):
            raise TypeError(
                "config: expected a BFTConfig, such as "
                f"BFTConfig(granularity='token'), got {config!r}"
            )
        self.config = config or BFTConfig()
        checks.choice("norm", norm, ("layernorm", "rmsnorm"))
        self.d_model, self.nhead, self.num_kv_heads = d_model, nhead, kv_heads
        self.head_dim = d_model // nhead
        self.dropout_p = dropout
        self.batch_first, self.norm_first = batch_first, norm_first
        self.rotary_base = rotary_base
        self.activation, self.gated = delta.activation_function(activation)
        at = {"device": device, "dtype": dtype}
        self.self_attn = _AttentionParameters(
            d_model, self.head_dim * kv_heads, bias, at
        )
        centred = norm == "layernorm"
        norm_class = nn.LayerNorm if centred else nn.RMSNorm
        with_bias = {"bias": bias} if centred else {}
        if ffn is None:
            width = dim_feedforward * (2 if self.gated else 1)
            self.linear1 = nn.Linear(d_model, width, bias=bias, **at)
            self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **at)
            self.ffn = None
        else:
            self.ffn = ffn
        self.norm1 = norm_class(d_model, layer_norm_eps, **with_bias, **at)
        self.norm2 = norm_class(d_model, layer_norm_eps, **with_bias, **at)
        features = d_model if self.config.granularity == "feature" else 1
        log_q = torch.full((features,), self.config.process_noise, **at).log()
        self.log_process_noise = nn.Parameter(log_q)
        # no buffer: it would be garbage on a layer that was first built on the
        # meta device and then loaded
        self._signs = _signs((2, d_model), seed=0)
        self.register_load_state_dict_pre_hook(_keep_process_noise)

    @classmethod
    def from_torch(
        cls,
        layer: nn.TransformerEncoderLayer,
        config: BFTConfig | None = None,
    ) -> "BFTLayer":
        """A BFT layer with sizes, options and weights of a plain layer.

        Raises: TypeError for anything but PyTorch's own layer made of its own
        modules; ValueError for one whose dropouts differ or are 1.
        """
        if type(layer) is not nn.TransformerEncoderLayer:
            raise TypeError(
                "layer: expected nn.TransformerEncoderLayer, got "
                f"{type(layer).__name__}"
            )
        attn = layer.self_attn
        for name, expected in [
            ("self_attn", nn.MultiheadAttention),
            ("linear1", nn.Linear),
            ("linear2", nn.Linear),
            ("norm1", nn.LayerNorm),
            ("norm2", nn.LayerNorm),
            ("dropout", nn.Dropout),
            ("dropout1", nn.Dropout),
            ("dropout2", nn.Dropout),
        ]:
            module: nn.Module = getattr(layer, name)
            if type(module) is not expected or is_watched(module):
                raise TypeError(
                    f"layer.{name}: expected {expected.__name__} without "
                    f"hooks, got {module}; add adapters and hooks afterwards"
                )
        if attn.bias_k is not None or attn.add_zero_attn:
            raise TypeError(
                "layer.self_attn: expected keys of tokens only, got "
                "add_bias_kv or add_zero_attn"
            )
        rates = [layer.dropout.p, layer.dropout1.p, layer.dropout2.p]
        rates.append(attn.dropout)
        if len(set(rates)) > 1:
            raise ValueError(
                f"layer: expected one dropout rate, got {sorted(set(rates))}"
            )
        weight = layer.linear1.weight
        result = cls(
            attn.embed_dim,
            attn.num_heads,
            layer.linear1.out_features,
            rates[0],
            copy.deepcopy(layer.activation),
            layer.norm1.eps,
            attn.batch_first,
            layer.norm_first,
            layer.linear1.bias is not None,
            weight.device,
            weight.dtype,
            config=config,
        )
        result.norm2.eps = layer.norm2.eps
        result.load_state_dict(layer.state_dict())
        theirs = dict(layer.named_parameters())
        for name, parameter in result.named_parameters():
            if name in theirs:
                parameter.requires_grad_(theirs[name].requires_grad)
        return result.train(layer.training)

    def forward(
        self,
        belief: Belief,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
        trace: bool = False,
    ) -> Belief | tuple[Belief, LayerTrace]:
        """Belief → Belief, and the layer's internals with ``trace=True``.

        Shapes: ``belief.mean`` (B, T, d) (or (T, B, d) without
        ``batch_first``), ``belief.log_precision`` the same or with last
        dimension 1. Masks as in ``nn.TransformerEncoderLayer``: ``src_mask``
        (T, S) or (B·H, T, S), ``src_key_padding_mask`` (B, S), True where a
        token may *not* be seen, or floats added to the scores. With a
        ``cache`` the tokens given are the newest, and S counts the cached
        ones too. A token that may see nothing keeps its mean.

        Whatever stands at a token hidden by ``src_key_padding_mask`` changes
        nothing that is visible; NaN and infinity there become zeros.

        Raises: TypeError, ValueError for shapes and dtypes; NaN and infinity
        are reported in eager mode only. A cache grows only if all went well.
        """
        if is_causal is not None and not isinstance(is_causal, bool):
            raise TypeError(
                "is_causal: expected True or False, got "
                f"{type(is_causal).__name__}; a mask is a src_mask"
            )
        belief = self._checked(belief, src_key_padding_mask)
        if not self.batch_first:
            belief = Belief(*(x.transpose(0, 1) for x in belief))
        with all_or_nothing([] if cache is None else [cache]):
            seen = self.observe(
                belief, src_mask, src_key_padding_mask, is_causal, cache, trace
            )
            updated, k = self.update(belief, seen)
            predicted, log_growth = self.predict(updated)
        if not self.batch_first:
            predicted = Belief(*(x.transpose(0, 1) for x in predicted))
        if not trace:
            return predicted
        return predicted, LayerTrace(
            seen,
            k,
            updated.log_precision,
            log_growth,
            predicted.log_precision,
        )

    def observe(
        self,
        belief: Belief,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: KeyValueCache | None = None,
        keep_weights: bool = False,
    ) -> Observation:
        """Attention as kriging: the innovation and its precision.

        Through W_O with independence, Equation (6.12), if ``project``.
        """
        c, attn = self.config, self._attention()
        batch, tokens, _ = belief.mean.shape
        # before the cache grows: a call that fails must not change it
        keys = tokens + (0 if cache is None else cache.length)
        attn_mask = self._score_mask(src_mask, batch, tokens, keys)
        if src_key_padding_mask is not None:
            padding = ("src_key_padding_mask", src_key_padding_mask)
            checks.mask(*padding, (batch, keys))
            checks.shape(*padding, (batch, keys))
        # read once: they may be parametrised
        w_in, b_in = attn.in_proj_weight, attn.in_proj_bias
        value_rows = self.num_kv_heads * self.head_dim
        w_v = w_in[-value_rows:]
        b_v = None if b_in is None else b_in[-value_rows:]
        x = belief.mean
        spread = None
        if self.norm_first:
            x, norm = self._norm("norm1", belief.mean)
            spread = norm.scale
        q, k, v = F.linear(x, w_in, b_in).split(
            [self.d_model, value_rows, value_rows], -1
        )
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (q, k, v)
        )
        if self.rotary_base is not None:
            start = 0 if cache is None else cache.length
            q = rotate(q, self.rotary_base, start)
            k = rotate(k, self.rotary_base, start)
        log_token_precision = belief.log_token_precision
        neighbours = None
        if c.prior_scale == "neighbours":
            neighbours = reml.neighbour_variance(belief.log_precision, spread)
        if cache is not None:
            joined = cache.joined(k, v, log_token_precision, neighbours)
            k, v, log_token_precision, neighbours = joined
        feature_weights = None
        known = is_linear(attn.out_proj) or not c.project
        if c.granularity == "token" and known:
            feature_weights = (
                wide(attn.out_proj.weight).square().mean(0)
                if c.project
                else wide(q).new_full((self.d_model,), 1 / self.d_model)
            ).unflatten(0, (self.nhead, self.head_dim))
        kriging = attend(
            q,
            k,
            v,
            log_token_precision,
            neighbour_variance=neighbours,
            feature_weights=feature_weights,
            center=self._value_of_nothing(w_v, b_v),
            key_padding_mask=src_key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.dropout_p if self.training else 0.0,
            implementation=c.implementation,
            n_eff_gradient=c.n_eff_gradient,
            keep_weights=keep_weights,
        )
        flat = kriging.mean.transpose(1, 2).flatten(-2).to(x.dtype)
        branch, w_out = apply(attn.out_proj, flat)
        prior = self._prior_scale(
            w_v, kriging.neighbour_variance, feature_weights
        )
        variance = reml.observation_variance(
            kriging.dispersion,
            kriging.n_eff.unsqueeze(-1),
            prior,
            c.prior_dof,
            c.observation,
        )
        if feature_weights is not None:
            variance = variance.sum(1)
        else:
            variance = variance.transpose(1, 2).flatten(-2)
            if c.project:
                variance = self._through_out_proj(variance, w_out, flat)
            if c.granularity == "token":
                variance = variance.mean(-1, keepdim=True)
        tiny = torch.finfo(variance.dtype).tiny
        log_precision = -variance.clamp(min=tiny).log()
        # an observation needs all its heads
        saw = (kriging.n_eff > 0).all(1).unsqueeze(-1)
        log_precision = torch.where(saw, log_precision, -torch.inf)
        if cache is not None:
            cache.keep(joined)
        return Observation(
            self._drop(branch), log_precision, kriging.n_eff, kriging.weights
        )

    def update(
        self, belief: Belief, seen: Observation
    ) -> tuple[Belief, Tensor]:
        """The residual connection as a Kalman update, and its gain.

        Equation (6.4); the paper. What attention adds is read as e.
        """
        updated, k = update(belief, seen.innovation, seen.log_precision)
        if not self.norm_first:
            updated = self._through_norm("norm1", updated)
        return updated, k

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """The FFN as dynamics, by the delta method; log (1 + J)² with it."""
        c, mean = self.config, belief.mean
        x, norm = mean, None
        if self.norm_first:
            x, norm = self._norm("norm2", mean)
        closed = c.jacobian != "hutchinson" and c.variance_rule == "diagonal"
        if self.ffn is not None:
            step, log_growth = self._estimated(belief)
        elif closed and is_linear(self.linear1) and is_linear(self.linear2):
            step, j = delta.feed_forward_jacobian(
                x,
                self.linear1.weight,
                self.linear1.bias,
                self.linear2.weight,
                self.linear2.bias,
                self.activation,
                self.gated,
                self.dropout_p if self.training else 0.0,
                norm,
                c.jacobian == "exact",
                c.granularity == "token",
            )
            log_growth = delta.log_square(1 + j)
        else:
            step, ffn = self._through_modules(x, norm)
            if ffn is None:
                _, log_growth = self._estimated(belief)
            elif closed:
                token = c.granularity == "token"
                jacobian = (
                    delta.jacobian_trace if token else delta.jacobian_diag
                )
                j = jacobian(ffn, norm, c.jacobian == "exact")
                log_growth = delta.log_square(1 + j)
            else:
                log_growth = self._probed(
                    belief, lambda v: delta.jacobian_product(ffn, v, norm)
                )
        log_precision = delta.predict(
            belief.log_precision, log_growth, wide(self.log_process_noise)
        )
        predicted = Belief(mean + self._drop(step), log_precision)
        if not self.norm_first:
            predicted = self._through_norm("norm2", predicted)
        return predicted, log_growth

    def _through_modules(
        self, x: Tensor, norm: delta.Normalised | None
    ) -> tuple[Tensor, delta.FeedForward | None]:
        """The network's step, linearised where its modules are matrices."""
        a, w_in = apply(self.linear1, x)
        hidden, slope = delta.hidden_and_slope(a, self.activation, self.gated)
        step, w_out = apply(self.linear2, self._drop(hidden))
        if w_in is None or w_out is None:
            if self.config.jacobian != "hutchinson":
                _warn_unknown("linear1" if w_in is None else "linear2")
            return step, None
        radial = None
        if norm is not None:
            z = norm.output if norm.beta is None else norm.output - norm.beta
            radial = slope * F.linear(z.to(w_in.dtype), w_in)
        w_out = delta.tiled(w_out, self.gated)
        return step, delta.FeedForward(step, slope, w_in, w_out, radial)

    def _probed(
        self, belief: Belief, product: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """log (1 + J)² by random signs; ``product`` maps a vector v to Jv."""
        mean, log_precision = belief
        if self.config.variance_rule == "row":
            return delta.row_growth(
                log_precision, self._probe(mean, 0), product
            )
        r1, r2 = self._probe(mean, 0), self._probe(mean, 1)
        token = self.config.granularity == "token"
        growth = delta.probed_growth(product, r1, r2, token)
        return torch.log(growth + torch.finfo(growth.dtype).tiny)

    def _estimated(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """The step and log (1 + J)² of modules that are no matrices."""
        mean = belief.mean.contiguous()  # jvp refuses expanded memory
        steps = []

        def product(vector: Tensor) -> Tensor:
            step, along = delta.jvp(self._step, mean, vector.to(mean.dtype))
            steps.append(step)
            return wide(along)

        log_growth = self._probed(belief, product)
        return steps[0], log_growth

    def _step(self, h: Tensor) -> Tensor:
        """The network as a function of the state; no dropout of the layer."""
        if self.norm_first:
            h, _ = self._norm("norm2", h, fused=False)
        if self.ffn is not None:
            # of a copy: it may work in place
            return checks.shape("ffn: output", self.ffn(h.clone()), h.shape)
        a = self.linear1(h)
        hidden, _ = delta.hidden_and_slope(a, self.activation, self.gated)
        return self.linear2(hidden)

    def _through_out_proj(
        self, variance: Tensor, weight: Tensor | None, like: Tensor
    ) -> Tensor:
        """Σ_k W_O[i,k]² v_k, (B, T, d): Equation (6.12)."""
        if weight is None:
            _warn_unknown("self_attn.out_proj")
            signs = self._probe(like, 0).to(like.dtype)
            return squared_map(self.self_attn.out_proj, variance, signs)
        with torch.autocast(cast_on(variance), enabled=False):
            return variance @ wide(weight).square().mT

    def _value_of_nothing(self, w_v: Tensor, b_v: Tensor | None) -> Tensor:
        """W_V β + b_V, (H_kv, 1, d_h): the value of a state of zeros.

        Values are centred there before they are squared. It depends on no
        token; it is detached, since the dispersion does not depend on it.
        """
        with torch.no_grad():
            value = wide(w_v).new_zeros(len(w_v))
            beta = getattr(self.norm1, "bias", None)
            if self.norm_first and beta is not None:
                value = value + wide(w_v) @ wide(beta)
            if b_v is not None:
                value = value + b_v
            return value.view(self.num_kv_heads, 1, self.head_dim)

    def _attention(self) -> "_AttentionParameters":
        """``self_attn``, unless it is more than is read of it."""
        attn = self.self_attn
        if not isinstance(attn, _AttentionParameters) or is_watched(attn):
            raise TypeError(
                "self_attn: expected the layer's own parameters, unwrapped "
                f"and without hooks, got {type(attn).__name__}; they are read "
                "and never called, so that an adapter or a hook there would "
                "do nothing: use self_attn.out_proj, or parametrise "
                "in_proj_weight"
            )
        return attn

    def _probe(self, like: Tensor, index: int) -> Tensor:
        """Random signs: fresh in training, fixed in evaluation."""
        if self.training:
            bits = torch.randint_like(like, 2, dtype=torch.float32)
            return wide(bits * 2 - 1)
        return self._signs[index].to(like.device).expand(like.shape)

    def _prior_scale(
        self, w_v: Tensor, neighbours: Tensor, feature_weights: Tensor | None
    ) -> Tensor:
        """s₀² = g_i Σ_j α̃_tj c_j, g_i = Σ_k (W_V[i,k] γ_k)², per head."""
        if self.norm_first and self.norm1.weight is not None:
            w_v = w_v * self.norm1.weight
        g = wide(w_v).square().sum(-1).unflatten(0, (-1, self.head_dim))
        g = g.repeat_interleave(self.nhead // self.num_kv_heads, 0)
        if feature_weights is not None:
            g = (g * feature_weights).sum(-1, True)
        return g.unsqueeze(-2) * neighbours.unsqueeze(-1)

    def _score_mask(
        self, mask: Tensor | None, batch: int, queries: int, keys: int
    ) -> Tensor | None:
        """``src_mask`` in the convention of scaled_dot_product_attention."""
        if mask is None:
            return None
        rows = batch * self.nhead
        checks.mask("src_mask", mask, (rows, queries, keys))
        want = [[queries, keys], [rows, queries, keys]][mask.dim() == 3]
        checks.shape("src_mask", mask, want)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.nhead))
        return ~mask if mask.dtype == torch.bool else mask

    def _norm(
        self, name: str, x: Tensor, fused: bool = True
    ) -> tuple[Tensor, delta.Normalised]:
        """The output of the norm of that name, and what made it."""
        module = getattr(self, name)
        forward = getattr(type(module), "forward", None)
        if forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward):
            raise TypeError(
                f"{name}: expected nn.LayerNorm or nn.RMSNorm, through which "
                f"precision goes in closed form, got {type(module).__name__}"
            )
        checks.shape(f"{name}: input", x[0, 0], module.normalized_shape)
        watched = fused and is_watched(module)
        # first: a hook may set the weight, as pruning does
        made = module(x).to(x.dtype) if watched else None
        eps = module.eps
        norm = delta.normalise(
            x,
            module.weight,
            getattr(module, "bias", None),
            torch.finfo(x.dtype).eps if eps is None else eps,
            forward is nn.LayerNorm.forward,
            fused,
        )
        output = norm.output.to(x.dtype)
        if made is not None:
            apart = (wide(made) - wide(output)).abs()
            tolerance = max(1e-4, 2 * torch.finfo(x.dtype).eps)
            changed = apart > tolerance * (1 + wide(output).abs())
            said = (
                f"{name}: expected hooks that only look, got one that changes "
                "the output, which precision cannot follow"
            )
            if not checks.values_can_be_read():
                torch._assert_async(~changed.any(), said)
            elif checks.anywhere(changed) == [True]:
                raise ValueError(said)
            output = made
        return output, norm

    def _through_norm(self, name: str, belief: Belief) -> Belief:
        mean, norm = self._norm(name, belief.mean)
        log = delta.normalised_precision(belief.log_precision, norm)
        if self.config.granularity == "token":
            log = -log_mean_exp(-log)
        return Belief(mean, log)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_p, self.training)

    def _checked(
        self, belief: Belief, padding: Tensor | None = None
    ) -> Belief:
        """The belief, NaN emptied where hidden; raises if it is bad."""
        if not isinstance(belief, Belief):
            raise TypeError(
                "belief: expected a Belief (see Belief.of), got "
                f"{type(belief).__name__}"
            )
        mean, log = belief
        checks.shape("belief.mean", mean, ["B", "T", self.d_model])
        if 0 in mean.shape:
            raise ValueError(
                f"belief.mean: expected at least one token, got shape "
                f"{tuple(mean.shape)}"
            )
        checks.floating("belief.mean", mean)
        checks.floating("belief.log_precision", log)
        weight = self._attention().in_proj_weight
        autocast = torch.is_autocast_enabled(cast_on(mean))
        if mean.dtype != weight.dtype and not autocast:
            raise TypeError(
                f"belief.mean: expected {weight.dtype}, the dtype of the "
                f"layer's weights, got {mean.dtype}; convert one with .to"
            )
        *rest, last = log.shape
        if rest != list(mean.shape[:2]) or last not in (1, self.d_model):
            raise ValueError(
                "belief.log_precision: expected shape "
                f"{(*mean.shape[:2], self.d_model)} or "
                f"{(*mean.shape[:2], 1)}, got {tuple(log.shape)}"
            )
        if padding is not None:
            sound = mean.isfinite().all(-1) & log.isfinite().all(-1)
            lost = (self._hidden(padding, mean) & ~sound).unsqueeze(-1)
            mean, log = mean.masked_fill(lost, 0.0), log.masked_fill(lost, 0.0)
        checks.finite("belief.mean", mean)
        checks.finite("belief.log_precision", log)
        log = wide(log)
        if self.config.granularity == "token" and last != 1:
            log = -log_mean_exp(-log)
        elif self.config.granularity == "feature" and last == 1:
            log = log.expand(mean.shape)
        return Belief(mean, log)

    def _hidden(self, padding: Tensor, mean: Tensor) -> Tensor:
        """Which of the tokens given are hidden, shaped as mean without d."""
        name = "src_key_padding_mask"
        batch, tokens = mean.shape[:2]
        if not self.batch_first:
            batch, tokens = tokens, batch
        checks.shape(name, padding, ["B", "S"])
        keys = max(padding.shape[1], tokens)  # more, with a cache
        checks.mask(name, padding, (batch, keys))
        checks.shape(name, padding, (batch, keys))
        hidden = padding[:, keys - tokens :]  # the newest
        if hidden.dtype != torch.bool:
            hidden = hidden_and_bias(hidden)[0]
        return hidden if self.batch_first else hidden.mT

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, nhead={self.nhead}, {self.config}"


class _AttentionParameters(nn.Module):
    """The parameters of ``nn.MultiheadAttention``, under the same names."""

    def __init__(self, d_model: int, kv_dim: int, bias: bool, at: dict):
        super().__init__()
        rows = d_model + 2 * kv_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, d_model, **at))
        self.in_proj_bias = (
            nn.Parameter(torch.zeros(rows, **at)) if bias else None
        )
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **at)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)


def _signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random signs on the CPU, whatever the default device is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    bits = torch.randint(0, 2, shape, generator=generator, device="cpu")
    return 2.0 * bits - 1.0


def _keep_process_noise(module, state_dict, prefix, *_):
    """A plain Transformer layer has no Q: keep ours, or start one."""
    if prefix + "linear1.weight" in state_dict or module.ffn is not None:
        ours = module.log_process_noise.detach()
        if ours.is_meta:
            ours = torch.full_like(
                ours, module.config.process_noise, device="cpu"
            ).log()
        state_dict.setdefault(prefix + "log_process_noise", ours)


def _warn_unknown(name: str) -> None:
    if checks.values_can_be_read():  # a warning would break the graph
        warnings.warn(
            f"BFTLayer: what {name} does is not known to be Wx + b (a hook?); "
            "what the variances need of it is estimated by random signs",
            stacklevel=5,
        )
