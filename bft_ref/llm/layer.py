"""A Llama's layer as a Bayesian filter: observe, update, predict."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bft_ref import delta, fast
from bft_ref.belief import Belief
from bft_ref.initial_precision import MLPPrecision
from bft_ref.layer import LayerTrace, Observation
from bft_ref.llm.attention import BFTLlamaAttention
from bft_ref.llm.config import BFTLlamaConfig
from bft_ref.llm.widened import narrow, widen
from bft_ref.support.derivatives import constant_unless
from bft_ref.support.modules import apply, is_linear, is_watched
from bft_ref.support.numerics import at_least_float32
from bft_ref.support.weights import of_weights


class LogParameter(nn.Module):
    """A positive number, or one a feature, kept as its logarithm.

    A module of its own, so that peft's ``modules_to_save`` finds it. What
    has a ``start`` is set to it by transformers too.
    Shapes: ``forward(like)`` → (n,), whatever ``like`` is.
    """

    def __init__(self, size: int, start: float):
        super().__init__()
        self.start = math.log(start)
        self.weight = nn.Parameter(torch.empty(size))
        nn.init.constant_(self.weight, self.start)

    def forward(self, like: Tensor | None = None) -> Tensor:
        return at_least_float32(self.weight)


class BFTLlamaDecoderLayer(LlamaDecoderLayer):
    """observe → update → predict, on a hidden state that carries log λ.

    Parameters are a LlamaDecoderLayer's, and ``process_noise.weight``, log Q,
    (1,) or (d,). The first layer that filters takes h (B, T, d), and adds
    ``initial_precision``; the last one gives h back; between them states are
    [h, log λ]. Equations (9.1)–(9.3).
    """

    self_attn: BFTLlamaAttention
    process_noise: LogParameter

    def __init__(self, config: BFTLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.config = config
        self.d_model = config.hidden_size
        self.filter, filtering = config.filter, config.filtering
        token = self.filter.granularity == "token"
        size = 1 if token else self.d_model
        self.self_attn = BFTLlamaAttention(config, layer_idx)
        self.is_first = layer_idx == filtering[0]
        self.is_last = layer_idx == filtering[-1]
        if self.is_first:
            self.initial_precision = self._initial_precision(size)
        self.add_parameters(size)
        # transformers' own modules hide which function they are
        self.activation = delta.ACTIVATIONS.get(
            config.hidden_act, self.mlp.act_fn
        )
        #: filled by :func:`bft_ref.llm.trace`
        self.traces: list[LayerTrace] | None = None

    def add_parameters(self, size: int) -> None:
        """What the variant has beside a Llama's parameters."""
        self.process_noise = LogParameter(size, self.filter.process_noise)

    def _initial_precision(self, size: int) -> nn.Module:
        tau = self.config.bft_tau
        if self.config.bft_initial_precision == "constant":
            return LogParameter(size, tau)
        made = MLPPrecision(self.d_model, size, initial=tau)
        last: Any = made.layers[-1]
        last.start = math.log(tau)
        return made

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,  # its name before transformers 5.24
        **_: Any,
    ) -> Tensor:
        belief = self.entered(hidden_states)
        observation = self.observe(
            belief,
            position_embeddings,
            attention_mask,
            past_key_values if cache is None else cache,
        )
        updated, gain = self.update(belief, observation)
        predicted, log_growth = self.predict(updated)
        if self.traces is not None:
            after = updated.log_precision, log_growth, predicted.log_precision
            # only the last: generate calls a layer for every token
            self.traces[:] = [LayerTrace(observation, gain, *after)]
        return predicted.mean if self.is_last else widen(predicted)

    def entered(self, hidden_states: Tensor) -> Belief:
        """The belief that a hidden state is."""
        if not self.is_first:
            return narrow(hidden_states, self.d_model)
        log = self.initial_precision(hidden_states)
        log = log.expand(*hidden_states.shape[:-1], log.shape[-1])
        return Belief(hidden_states, log)

    def observe(
        self,
        belief: Belief,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Observation:
        """Attention as kriging: the innovation and its precision."""
        norm = self.normalised(self.input_layernorm, belief.mean)
        return self.self_attn(
            belief,
            norm,
            position_embeddings,
            attention_mask,
            cache,
            self.traces is not None,
        )

    def update(
        self, belief: Belief, observation: Observation
    ) -> tuple[Belief, Tensor]:
        """The residual connection as a Kalman update, Equation (6.4).

        h' = h + (1 − δ(1 − K))∘e with the dial δ: 1 is the filter, 0 the
        plain residual. Precision is the filter's at any dial.
        """
        e, dial = observation.innovation, self.config.bft_dial
        updated, gain = self.ways.update(belief, e, observation.log_precision)
        if dial < 1:
            mean = belief.mean + _dialled(gain, dial).to(e.dtype) * e
            updated = updated._replace(mean=mean)
        return updated, gain

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """SwiGLU as dynamics, Equations (7.9), (8.1); log (1 + J)² with it."""
        step, log_growth = self.step_and_growth(belief)
        log_precision = self.ways.predict(
            belief.log_precision, log_growth, self.process_noise()
        )
        return Belief(belief.mean + step, log_precision), log_growth

    @property
    def ways(self) -> fast.Steps:
        """The readable functions or the fast ones."""
        return fast.steps(self.filter.implementation)

    def normalised(self, module: nn.Module, x: Tensor) -> delta.Normalised:
        """RMSNorm's output, and what its Jacobian needs."""
        if is_watched(module):
            module(x)  # hooks may look, and pruning sets the weight
        gamma, eps = module.weight, module.variance_epsilon
        if gamma.is_meta and not x.is_meta:
            raise ValueError(
                "device_map: expected layers that filter on a device, got "
                "one offloaded to the CPU or the disk, whose weights are not "
                "there to be squared"
            )
        return self.ways.normalise(x, gamma, None, eps, centred=False)

    def step_and_growth(self, belief: Belief) -> tuple[Tensor, Tensor]:
        mlp, c = self.mlp, self.filter
        norm = self.normalised(self.post_attention_layernorm, belief.mean)
        x = norm.output.to(belief.mean.dtype)
        token, exact = c.granularity == "token", c.jacobian == "exact"
        parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if all(is_linear(part) and part.bias is None for part in parts):
            w_g, w_u, w_d = (part.weight for part in parts)
            return self.ways.feed_forward_growth(
                x,
                _joined(w_g, w_u),
                None,
                w_d,
                None,
                self.activation,
                gated=True,
                norm=norm,
                exact=exact,
                token=token,
                jacobian_gradient=c.jacobian_gradient,
            )
        (g, w_g), (u, w_u) = (apply(part, x) for part in parts[:2])
        a = torch.cat([g, u], -1)
        hidden, slope = delta.hidden_and_slope(a, self.activation, gated=True)
        step, w_d = apply(mlp.down_proj, hidden)
        if w_g is None or w_u is None or w_d is None:
            raise ValueError(
                "mlp: expected linear maps, of whose matrices the Jacobian is "
                "made; their hooks leave one unknown"
            )
        w_in = torch.cat([w_g, w_u])
        radial = slope * nn.functional.linear(x.to(w_in.dtype), w_in)
        ffn = delta.FeedForward(
            step, slope, w_in, delta.tiled(w_d, True), radial
        )
        jacobian = delta.jacobian_trace if token else delta.jacobian_diag
        return step, constant_unless(
            c.jacobian_gradient,
            lambda: delta.log_square(1 + jacobian(ffn, norm, exact)),
        )


def _joined(w_g: Tensor, w_u: Tensor) -> Tensor:
    """Both matrices in one; in evaluation made once, as a parameter is."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([w_g, w_u])
    return of_weights(
        *("joined", [w_g, w_u]),
        lambda: nn.Parameter(torch.cat([w_g, w_u]), requires_grad=False),
    )


class PlainLayer(BFTLlamaDecoderLayer):
    """h + e, as a Llama has it: the first of the controls, which filter not.

    Precision stays what it is at the start. A control shows whether what a
    filter gains is gained by something simpler.
    """

    def add_parameters(self, size: int) -> None:
        pass

    def observe(
        self,
        belief: Belief,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Observation:
        """Attention as it is."""
        x = self.input_layernorm(belief.mean)
        innovation = self.self_attn.plain(
            x, position_embeddings, attention_mask, cache
        )
        return Observation(innovation, torch.zeros_like(belief.log_precision))

    def factor(self, h: Tensor) -> Tensor | float:
        """What stands in the gain's place."""
        return 1.0

    def update(
        self, belief: Belief, observation: Observation
    ) -> tuple[Belief, Tensor]:
        """h + factor∘e."""
        h, e = belief.mean, observation.innovation
        factor = torch.as_tensor(self.factor(h), device=h.device)
        step = _dialled(factor, self.config.bft_dial).to(e.dtype) * e
        return Belief(h + step, belief.log_precision), factor

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """The network, and no growth."""
        h, log = belief
        step = self.mlp(self.post_attention_layernorm(h))
        return Belief(h + step, log), torch.zeros_like(log)


class ConstantLayer(PlainLayer):
    """One learned factor a layer in the gain's place."""

    gain: LogParameter

    def add_parameters(self, size: int) -> None:
        self.gain = LogParameter(1, 1.0)

    def factor(self, h: Tensor) -> Tensor:
        return self.gain().exp()


class GateLayer(PlainLayer):
    """σ(W h + b) for each feature: LiGR's gate, arXiv 2502.03417."""

    gain: Any

    def add_parameters(self, size: int) -> None:
        self.gain = nn.Linear(self.d_model, self.d_model)
        self.gain.start = 4.0

    def factor(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.gain(h))


class TauBiasLayer(PlainLayer):
    """log τ in the scores of every layer, and a plain residual."""

    observe = BFTLlamaDecoderLayer.observe


LAYERS: dict[str, type[BFTLlamaDecoderLayer]] = {
    "kalman": BFTLlamaDecoderLayer,
    "plain": PlainLayer,
    "constant": ConstantLayer,
    "gate": GateLayer,
    "tau_bias": TauBiasLayer,
}


def _dialled(factor: Tensor, dial: float) -> Tensor:
    return 1 - dial * (1 - factor)
