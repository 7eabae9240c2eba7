"""HSTU: pointwise attention whose weights need not sum to one."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import delta, reml
from bft_ref.belief import Belief, discount
from bft_ref.config import Dynamics, Innovation, check_dynamics
from bft_ref.kalman import update
from bft_ref.layer import LayerTrace, Observation
from bft_ref.recsys.models.base import Recommender, RecommenderConfig
from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32

TIME_BUCKETS = 129
EPSILON = 1e-6  # of the norms, as published


@dataclass(frozen=True)
class HSTUFilter:
    """What HSTU as a filter needs of a BFTConfig's options.

    Raises: TypeError for a field of another type; ValueError for a bad value.
    """

    # A precision per feature, or one per token.
    granularity: Literal["feature", "token"] = "feature"
    # What attention adds is the innovation, or an observation of the state,
    # which is subtracted.
    innovation: Innovation = "increment"
    # s₀² from the neighbours' own variances, or one.
    prior_scale: Literal["neighbours", "unit"] = "neighbours"
    prior_dof: float = 1.0  # ν₀ > 0 of the inverse-χ² prior.
    # Carry the variance through W_O into state units.
    project_variance: bool = True
    process_noise: float = 1.0  # Initial Q > 0, in state².
    # Variances grow by Q without bound, or return to a stationary one.
    dynamics: Dynamics = "random_walk"
    # ς² > 0 that ornstein_uhlenbeck returns to, in state².
    stationary_variance: float = 1.0

    def __post_init__(self):
        checks.typed(self)
        checks.number("prior_dof", self.prior_dof, 0.0)
        checks.number("process_noise", self.process_noise, 0.0)
        check_dynamics(self)


@dataclass(frozen=True)
class HSTUConfig(RecommenderConfig):
    """HSTU: pointwise attention whose weights need not sum to one."""

    model = "hstu"

    # How a state scores the items: by their product, times a temperature or
    # beside a bias of each. Vectors of unit length have no density.
    head: Literal["dot", "item_bias", "item_temperature"] = "dot"
    # The scores of states and items of unit length are divided by it.
    temperature: float = 0.05
    # Make every layer a Bayesian filter.
    bft: HSTUFilter | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.number("temperature", self.temperature, 0.0)


class HSTULayer(nn.Module):
    """One HSTU layer (Zhai et al. 2024), plain or as a Bayesian filter.

    (U, V, Q, K) = SiLU(norm(h) W), A = SiLU(QKᵀ + r)/N, N the model's
    length, e = W_O(U ∘ norm(AV)), h' = h + e; norms without affine map, no
    FFN; initial weights as published. As a filter: A is reweighted by λ̄,
    Var(AV) is the sandwich estimate, carried through the norm, U² and W_O² to
    λ_obs; then h' = h + K ∘ e, or h + K ∘ (e − h), and λ is discounted by Q
    (J = 0). Equations (11.7)–(11.14); our formulas.

    Shapes: h (B, T, d), ``relative`` r (B or 1, 1, T, T), log λ (B, T, d or
    1).
    """

    def __init__(self, config: HSTUConfig):
        super().__init__()
        c, d = config, config.d_model
        self.config = config
        self.uvqk = nn.Linear(d, 4 * d, bias=False)
        self.out = nn.Linear(d, d)
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.out.weight)
        if c.bft is not None:
            noise = torch.full((c.features,), c.bft.process_noise)
            self.log_process_noise = nn.Parameter(noise.log())

    def step(
        self, belief: Belief, relative: Tensor
    ) -> tuple[Belief, LayerTrace]:
        """What :meth:`forward` gives, and the filter's internals."""
        traces: list[LayerTrace] = []
        after = self(belief, relative, traces=traces)
        return after, traces[0]

    def forward(
        self,
        belief,
        relative: Tensor,
        *,
        traces: list[LayerTrace] | None = None,
    ):
        c = self.config
        h = belief.mean if c.bft is not None else belief
        x = delta.normalise(h, None, None, EPSILON)
        inner = self.uvqk(x.z.to(h.dtype))
        u, v, q, k = F.silu(inner).chunk(4, -1)
        v, q, k = (
            y.unflatten(-1, (c.nhead, -1)).transpose(1, 2) for y in (v, q, k)
        )
        tokens = h.shape[1]
        visible = torch.ones(
            tokens, tokens, dtype=torch.bool, device=h.device
        ).tril()
        weights = F.silu(q @ k.mT + relative) / c.max_length
        weights = weights.masked_fill(~visible, 0.0)
        if c.bft is not None:
            weights = reml.precision_weights(
                weights, belief.log_token_precision.unsqueeze(1), visible
            )
        o = (weights @ v).transpose(1, 2).flatten(-2)
        normed = delta.normalise(o, None, None, EPSILON)
        e = self.out(F.dropout(u * normed.z, c.dropout, self.training))
        if c.bft is None:
            return h + e
        log_observed, informative = self._log_precision(
            weights, v, inner, x, belief, normed, u
        )
        log_observed = torch.where(informative, log_observed, -torch.inf)
        n = weights.square().sum(-1).square() / weights.pow(4).sum(-1).clamp(
            min=torch.finfo(weights.dtype).tiny
        )
        if c.bft.innovation == "difference":
            e = e - h
        observation = Observation(e, log_observed, n, weights)
        updated, gain = self.update(belief, observation)
        kept = updated.log_precision
        log_q = at_least_float32(self.log_process_noise)
        if c.bft.dynamics == "ornstein_uhlenbeck":
            log_kept, log_q = delta.ornstein_uhlenbeck(
                log_q, c.bft.stationary_variance
            )
            kept = kept - log_kept
        log_precision = discount(kept, log_q)
        predicted = Belief(updated.mean, log_precision)
        if traces is not None:
            trace = LayerTrace(
                observation,
                gain,
                updated.log_precision,
                torch.zeros_like(log_observed),
                log_precision,
            )
            traces.append(trace)
        return predicted

    def update(
        self, belief: Belief, observation: Observation
    ) -> tuple[Belief, Tensor]:
        """The residual connection as a Kalman update, and its gain."""
        return update(
            belief, observation.innovation, observation.log_precision
        )

    def _log_precision(self, weights, v, inner, x, belief, normed, u):
        """−log Var e, (B, T, d or 1), and whether a token saw anything."""
        c = self.config
        d = c.d_model
        g = at_least_float32(self.uvqk.weight[d : 2 * d]).square().sum(1)
        before = inner[..., d : 2 * d]
        slope = delta.value_and_slope(F.silu, before)[1].square()
        own = g * at_least_float32(slope)
        if c.bft.prior_scale == "neighbours":
            spread = reml.neighbour_variance(belief.log_precision, x.scale)
            own = own * spread.unsqueeze(-1)
        own = own.unflatten(-1, (c.nhead, -1)).transpose(1, 2)
        squares = at_least_float32(weights).square()
        total = squares.sum(-1, keepdim=True)
        share = squares / torch.where(total > 0, total, 1.0)
        tiny = torch.finfo(share.dtype).tiny
        variance, informative = reml.unnormalised_variance(
            weights, v, (share @ own).clamp(min=tiny), c.bft.prior_dof
        )
        variance = variance.transpose(1, 2).flatten(-2)
        log_variance = -delta.normalised_precision(-variance.log(), normed)
        peak = log_variance.detach().amax(-1, keepdim=True)
        variance = (log_variance - peak).exp() * at_least_float32(u).square()
        if c.bft.project_variance:
            variance = variance @ at_least_float32(self.out.weight).square().mT
        if c.bft.granularity == "token":
            variance = variance.mean(-1, keepdim=True)
        saw = informative.squeeze(-1).all(1).unsqueeze(-1)
        return -(variance.clamp(min=tiny).log() + peak), saw


class HSTU(Recommender):
    """HSTU for sequences of items, with or without timestamps, ± filter.

    r_tj is a weight per distance t − j plus, where times are given, one per
    bucket ⌊ln(max(1, Δ seconds))/0.301⌋ of the gap between the event after t
    (at the end: t itself) and j. Output and items are L2-normalised, their
    product is divided by ``temperature``.
    """

    config: HSTUConfig
    reads_times = True

    def __init__(self, config: HSTUConfig, frequency=None):
        super().__init__(config, frequency)
        self.layers = nn.ModuleList(
            HSTULayer(config) for _ in range(config.num_layers)
        )
        self.distance = nn.Parameter(0.02 * torch.randn(config.max_length))
        self.bucket = nn.Parameter(0.02 * torch.randn(TIME_BUCKETS))

    def relative(self, items: Tensor, times: Tensor | None) -> Tensor:
        """r, (1 or B, 1, T, T), without unit."""
        place = torch.arange(items.shape[1], device=items.device)
        gap = (place[:, None] - place).clamp(min=0)
        r = self.distance[gap][None, None]
        if times is None:
            return r
        following = torch.cat([times[:, 1:], times[:, -1:]], 1)
        end = (items > 0).sum(1, keepdim=True) - 1
        last = place == end
        following = torch.where(last, times, following)
        elapsed = (following[:, :, None] - times[:, None]).clamp(min=1)
        bucket = (elapsed.log() / 0.301).long().clamp(0, TIME_BUCKETS - 1)
        return r + self.bucket[bucket].unsqueeze(1)

    def states(self, items, times, traces):
        h = self._embed(items)
        r = self.relative(items, times)
        if self.config.bft is None or self.tau is None:
            for layer in self.layers:
                h = layer(h, r)
            return h
        features = self.config.features
        log_tau = self.tau(items, self.items(items))
        belief = Belief(h, log_tau.expand(*h.shape[:-1], features))
        for layer in self.layers:
            belief = layer(belief, r, traces=traces)
        return belief.mean

    def query(self, hidden: Tensor) -> Tensor:
        return F.normalize(hidden, dim=-1) / self.config.temperature

    def item_embeddings(self):
        return self.head.items(F.normalize(self.items.weight, dim=-1))
