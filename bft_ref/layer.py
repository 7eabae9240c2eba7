"""The layer: observe, update, predict. Belief in, Belief out."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import delta, fast, projections, reml
from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.kriging import AttentionMoments
from bft_ref.network import step_and_growth
from bft_ref.rotary import rotate
from bft_ref.support import checks, door
from bft_ref.support.cache import KeyValueCache, all_or_nothing
from bft_ref.support.modules import (
    apply,
    apply_norm,
    is_linear,
    squared_map,
    warn_unknown,
)
from bft_ref.support.numerics import (
    at_least_float32,
    log_mean_exp,
)
from bft_ref.support.transplant import keep_process_noise, layer_like


class Observation(NamedTuple):
    """What attention adds to the state, and how precisely it is known.

    ``innovation`` e (B, T, d), state, or z − h if the config says
    ``difference``: what is added but for the gain; ``log_precision`` log λ_obs
    (B, T, d) or (B, T, 1), −inf where a token saw nothing; ``n_eff`` (B, H, T)
    and ``weights`` α̃ (B, H, T, S) where they were kept.
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
        door.sizes(
            *(d_model, nhead, dim_feedforward, kv_heads),
            *(rotary_base, dropout),
        )
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
        factory_kwargs = {"device": device, "dtype": dtype}
        self.self_attn = AttentionParameters(
            d_model, self.head_dim * kv_heads, bias, factory_kwargs
        )
        self.ffn = ffn
        if ffn is None:
            width = dim_feedforward * (2 if self.gated else 1)
            self.linear1 = nn.Linear(d_model, width, bias, **factory_kwargs)
            self.linear2 = nn.Linear(
                dim_feedforward, d_model, bias, **factory_kwargs
            )
        centred = norm == "layernorm"
        norm_class = nn.LayerNorm if centred else nn.RMSNorm
        options = factory_kwargs | ({"bias": bias} if centred else {})
        self.norm1 = norm_class(d_model, layer_norm_eps, **options)
        self.norm2 = norm_class(d_model, layer_norm_eps, **options)
        features = d_model if self.config.granularity == "feature" else 1
        start = torch.full(
            (features,), self.config.process_noise, **factory_kwargs
        )
        self.log_process_noise = nn.Parameter(start.log())
        # no buffer: it would be garbage on a layer that was first built on the
        # meta device and then loaded
        self._signs = _fixed_signs((2, d_model), seed=0)
        self.register_load_state_dict_pre_hook(keep_process_noise)

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
        return layer_like(cls, layer, config)

    def step(
        self, belief: Belief, *arguments, **options
    ) -> tuple[Belief, LayerTrace]:
        """What :meth:`forward` gives, and the layer's internals.

        FSDP2 has to know it where a loss is of the trace alone:
        ``register_fsdp_forward_method(layer, "step")``.
        """
        traces: list[LayerTrace] = []
        after = self(belief, *arguments, traces=traces, **options)
        return after, traces[0]

    def forward(
        self,
        belief: Belief,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
        traces: list[LayerTrace] | None = None,
    ) -> Belief:
        """Belief → Belief: observe, update, predict.

        Shapes: ``belief.mean`` (B, T, d) (or (T, B, d) without
        ``batch_first``), ``belief.log_precision`` the same or with last
        dimension 1. Masks as in ``nn.TransformerEncoderLayer``: ``src_mask``
        (T, S) or (B·H, T, S), ``src_key_padding_mask`` (B, S), True where a
        token may *not* be seen, or floats added to the scores. With a
        ``cache`` the tokens given are the newest, and S counts the cached
        ones too. A token that may see nothing keeps its mean. The layer's
        internals are appended to ``traces``; :meth:`step` hands them back.

        Whatever stands at a token hidden by ``src_key_padding_mask`` changes
        nothing that is visible; NaN and infinity there become zeros.

        Raises: TypeError, ValueError for shapes and dtypes; NaN and infinity
        are reported in eager mode only. A cache grows only if all went well.
        """
        door.is_causal(is_causal)
        door.traces(traces)
        belief = self._entered(belief, src_key_padding_mask)
        masks = (src_mask, src_key_padding_mask, is_causal)
        keep_weights = traces is not None
        with all_or_nothing([] if cache is None else [cache]):
            observation = self.observe(belief, *masks, cache, keep_weights)
            updated, k = self.update(belief, observation)
            predicted, log_growth = self.predict(updated)
        if traces is not None:
            after = updated.log_precision, log_growth, predicted.log_precision
            traces.append(LayerTrace(observation, k, *after))
        return self._oriented(predicted)

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

        Through W_O with independence, Equation (6.16), if the config says
        ``project_variance``. With ``innovation="difference"`` attention's
        output is the observation z, of which h is subtracted (ours).
        """
        c, attn = self.config, self._attention()
        batch, tokens, _ = belief.mean.shape
        # before the cache grows: a call that fails must not change it
        start = 0 if cache is None else cache.length
        keys = start + tokens
        attn_mask = door.score_mask(src_mask, batch, self.nhead, tokens, keys)
        if src_key_padding_mask is not None:
            door.padding_mask(src_key_padding_mask, batch, keys)
        # read once: they may be parametrised
        w_in, b_in = attn.in_proj_weight, attn.in_proj_bias
        x, scale = belief.mean, None
        if self.norm_first:
            x, norm = self.norm("norm1", belief.mean)
            scale = norm.scale
        kv_width = self.num_kv_heads * self.head_dim
        q, k, v = F.linear(x, w_in, b_in).split(
            [self.d_model, kv_width, kv_width], -1
        )
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (q, k, v)
        )
        if self.rotary_base is not None:
            q = rotate(q, self.rotary_base, start)
            k = rotate(k, self.rotary_base, start)
        log_token_precision = belief.log_token_precision
        neighbours = None
        if c.prior_scale == "neighbours":
            neighbours = reml.neighbour_variance(belief.log_precision, scale)
        if cache is not None:
            joined = cache.joined(k, v, log_token_precision, neighbours)
            k, v, log_token_precision, neighbours = joined
        w_v = w_in[-kv_width:]
        b_v = None if b_in is None else b_in[-kv_width:]
        feature_weights = self._feature_weights(attn)
        moments = self.ways.attend(
            q,
            k,
            v,
            log_token_precision,
            neighbour_variance=neighbours,
            feature_weights=feature_weights,
            centre=self._value_of_nothing(w_v, b_v),
            key_padding_mask=src_key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.thinning,
            implementation=c.implementation,
            n_eff_gradient=c.n_eff_gradient,
            keep_weights=keep_weights,
        )
        flat = moments.mean.transpose(1, 2).flatten(-2).to(x.dtype)
        innovation, w_out = apply(attn.out_proj, flat)
        log_precision = observed_log_precision(
            *(self.ways, c, moments),
            projections.prior_scale(
                w_in,
                self.norm1.weight if self.norm_first else None,
                moments.neighbour_variance,
                (self.nhead, self.num_kv_heads, self.head_dim),
                feature_weights,
            ),
            feature_weights is not None,
            lambda variance: self._through_out_proj(variance, w_out, flat),
        )
        if cache is not None:
            cache.keep(joined)
        innovation = self.drop(innovation)
        if c.innovation == "difference":
            innovation = innovation - belief.mean
        return Observation(
            innovation,
            log_precision,
            moments.n_eff,
            moments.weights,
        )

    def update(
        self, belief: Belief, observation: Observation
    ) -> tuple[Belief, Tensor]:
        """The residual connection as a Kalman update, and its gain.

        Equation (6.4); the paper. What attention adds is read as e, or, by
        the config's ``innovation``, as z.
        """
        updated, k = self.ways.update(
            belief, observation.innovation, observation.log_precision
        )
        if not self.norm_first:
            updated = self._through_norm("norm1", updated)
        return updated, k

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """The FFN as dynamics, by the delta method; log (1 + J)² with it.

        Equation (8.1); the paper. Other ``dynamics`` are ours.
        """
        c = self.config
        step, log_growth = step_and_growth(self, belief)
        carried = log_growth
        log_q = at_least_float32(self.log_process_noise)
        if c.dynamics == "ornstein_uhlenbeck":
            log_kept, log_q = delta.ornstein_uhlenbeck(
                log_q, c.stationary_variance
            )
            carried = log_growth + log_kept
        log_precision = self.ways.predict(belief.log_precision, carried, log_q)
        predicted = Belief(belief.mean + self.drop(step), log_precision)
        if not self.norm_first:
            predicted = self._through_norm("norm2", predicted)
        return predicted, log_growth

    @property
    def ways(self) -> fast.Steps:
        """The readable functions or the fast ones: the one seam to them."""
        return fast.steps(self.config.implementation)

    @property
    def thinning(self) -> float:
        """The probability of dropout: none in evaluation."""
        return self.dropout_p if self.training else 0.0

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, in training."""
        return F.dropout(x, self.dropout_p, self.training)

    def norm(self, name: str, x: Tensor) -> tuple[Tensor, delta.Normalised]:
        """The output of the norm of that name, and what made it."""
        return apply_norm(name, getattr(self, name), x, self.ways.normalise)

    def signs(self, like: Tensor, index: int) -> Tensor:
        """Random signs: fresh in training, fixed in evaluation."""
        if self.training:
            bits = torch.randint_like(like, 2, dtype=torch.float32)
            return at_least_float32(bits * 2 - 1)
        return self._signs[index].to(like.device).expand(like.shape)

    def _entered(
        self, belief: Belief, padding: Tensor | None = None
    ) -> Belief:
        """The belief, checked, batch first, with the layer's granularity."""
        if not isinstance(belief, Belief):
            raise TypeError(
                "belief: expected a Belief (see Belief.of), got "
                f"{type(belief).__name__}"
            )
        dtype = self._attention().in_proj_weight.dtype
        mean, log = door.belief(
            *belief, self.d_model, dtype, padding, self.batch_first
        )
        log = at_least_float32(log)
        if self.config.granularity == "token" and log.shape[-1] != 1:
            log = -log_mean_exp(-log)
        elif self.config.granularity == "feature":
            log = log.expand(mean.shape)
        return self._oriented(Belief(mean, log))

    def _oriented(self, belief: Belief) -> Belief:
        """Batch and tokens exchanged, where the layer is asked for that."""
        if self.batch_first:
            return belief
        return Belief(*(x.transpose(0, 1) for x in belief))

    def _attention(self) -> "AttentionParameters":
        found = door.unwrapped(self.self_attn, AttentionParameters)
        return cast(AttentionParameters, found)

    def _feature_weights(self, attn: "AttentionParameters") -> Tensor | None:
        """Σ_i W_O[i,k]²/d: what a token's mean variance takes of feature k.

        (H, d_h); None where each feature keeps its own, or W_O is unknown.
        """
        c, w_out = self.config, attn.out_proj
        if c.granularity != "token":
            return None
        if not c.project_variance:
            like = at_least_float32(attn.in_proj_weight)
            weights = like.new_full((self.d_model,), 1 / self.d_model)
        elif is_linear(w_out):
            weights = projections.mean_square(w_out.weight)
        else:
            return None
        return weights.unflatten(0, (self.nhead, self.head_dim))

    def _through_out_proj(
        self, variance: Tensor, weight: Tensor | None, like: Tensor
    ) -> Tensor:
        """Σ_k W_O[i,k]² v_k, (B, T, d): Equation (6.16)."""
        if weight is None:
            warn_unknown("self_attn.out_proj")
            signs = self.signs(like, 0).to(like.dtype)
            return squared_map(self.self_attn.out_proj, variance, signs)
        return projections.through(weight, variance)

    def _value_of_nothing(self, w_v: Tensor, b_v: Tensor | None) -> Tensor:
        """W_V β + b_V, (H_kv, 1, d_h): the value of a state of zeros.

        Values are centred there before they are squared. It depends on no
        token; it is detached, since the dispersion does not depend on it.
        """
        with torch.no_grad():
            w = at_least_float32(w_v)
            value = w.new_zeros(len(w))
            beta = getattr(self.norm1, "bias", None)
            if self.norm_first and beta is not None:
                value = value + w @ at_least_float32(beta)
            if b_v is not None:
                value = value + b_v
            return value.view(self.num_kv_heads, 1, self.head_dim)

    def _through_norm(self, name: str, belief: Belief) -> Belief:
        mean, norm = self.norm(name, belief.mean)
        log = delta.normalised_precision(belief.log_precision, norm)
        if self.config.granularity == "token":
            log = -log_mean_exp(-log)
        return Belief(mean, log)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, nhead={self.nhead}, {self.config}"


class AttentionParameters(nn.Module):
    """The parameters of ``nn.MultiheadAttention``, under the same names."""

    def __init__(
        self, d_model: int, kv_width: int, bias: bool, factory_kwargs: dict
    ):
        super().__init__()
        rows = d_model + 2 * kv_width
        empty = torch.empty(rows, d_model, **factory_kwargs)
        self.in_proj_weight = nn.Parameter(empty)
        self.in_proj_bias = (
            nn.Parameter(torch.zeros(rows, **factory_kwargs)) if bias else None
        )
        self.out_proj = nn.Linear(d_model, d_model, bias, **factory_kwargs)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)


def observed_log_precision(
    ways: fast.Steps,
    config: BFTConfig,
    moments: AttentionMoments,
    prior_scale: Tensor,
    added_up: bool,
    through: Callable[[Tensor], Tensor],
) -> Tensor:
    """log λ_obs of what attention saw, heads taken as independent.

    ``added_up``: features of a head were weighed and added up already, by
    ``feature_weights``. Else they are carried ``through`` W_O, if the config
    says ``project_variance``, and averaged for one precision a token.

    Shapes: ``prior_scale`` s₀² (B, H, T, d_h or 1); ``through`` maps variances
    (B, T, H·d_h) → (B, T, d) → (B, T, d) or (B, T, 1), −inf where a token saw
    nothing in some head.
    """
    variance = ways.observation_variance(
        moments.dispersion,
        moments.n_eff.unsqueeze(-1),
        prior_scale,
        config.prior_dof,
        config.reading,
    )
    if added_up:
        variance = variance.sum(1)
    else:
        variance = variance.transpose(1, 2).flatten(-2)
        if config.project_variance:
            variance = through(variance)
        if config.granularity == "token":
            variance = variance.mean(-1, keepdim=True)
    log_precision = ways.log_precision(variance)
    # an observation needs all its heads
    saw = (moments.n_eff > 0).all(1).unsqueeze(-1)
    return torch.where(saw, log_precision, -torch.inf)


def _fixed_signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random signs on the CPU, whatever the default device is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    bits = torch.randint(0, 2, shape, generator=generator, device="cpu")
    return 2.0 * bits - 1.0
