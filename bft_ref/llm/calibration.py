"""A start at which the filter is visible and does no harm."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bft_ref.belief import Belief
from bft_ref.initial_precision import MLPPrecision
from bft_ref.llm.layer import (
    BFTLlamaDecoderLayer,
    ConstantLayer,
    GateLayer,
    LogParameter,
)
from bft_ref.llm.model import BFTLlamaForCausalLM
from bft_ref.support import checks

ROUNDS = 4  # λ_obs depends on the precision that comes in, but little
LEAST = 1e-6  # share of a layer's incoming variance that Q has at least


@torch.no_grad()
def calibrate(
    model: BFTLlamaForCausalLM,
    input_ids: Tensor,
    gain: float = 0.9,
    attention_mask: Tensor | None = None,
    *,
    rescale: bool = False,
) -> list[float]:
    """Set τ and each layer's Q so that its median gain is ``gain``.

    In one pass over ``input_ids`` (B, T): τ makes the first layer's gain, and
    the Q of each layer the next one's, by 1/λ'' = (1 + J)²/λ' + Q. What is
    carried through a layer may be vaguer than that by itself: then its Q is
    almost nothing, and the next gain is higher. The last Q, which reaches no
    layer, is set as the one before. A control's factor starts at ``gain``.

    ``rescale`` divides W_O by ``gain`` (in a copy: the model that was patched
    keeps its own), so that attention adds, in the median, what it did.

    Returns: the median gains that were reached.
    Raises: ValueError for a gain that is not within (0, 1).
    Equations (16.6), (16.7); ours.
    """
    if not 0 < gain < 1:
        raise ValueError(f"gain: expected one within (0, 1), got {gain}")
    checks.shape("input_ids", input_ids, [None, None])
    layers, training = model.filters(), model.training
    for layer in layers:
        _start(layer, gain, rescale)
    if model.config.bft_variant != "kalman":
        return [gain] * len(layers)
    model.eval()
    h, where = _entering(model, layers[0], input_ids, attention_mask)
    seen = (
        torch.ones_like(input_ids)
        if attention_mask is None
        else (attention_mask)
    )
    logit, reached = math.log(gain / (1 - gain)), []
    set_previous = _shift_initial(layers[0].initial_precision)
    log = layers[0].entered(h).log_precision.clone()
    carried = torch.full_like(log, -torch.inf)  # log variance without Q
    for layer in layers:
        for _ in range(ROUNDS):
            observed = layer.observe(Belief(h, log), *where).log_precision
            wanted = _median(log, seen) + _median(observed - log, seen) - logit
            log = set_previous(log, carried, wanted, seen)
        observation = layer.observe(Belief(h, log), *where)
        updated, k = layer.update(Belief(h, log), observation)
        reached.append(_median(k, seen).mean().item())
        step, log_growth = layer.step_and_growth(updated)
        h = updated.mean + step
        carried = log_growth - updated.log_precision
        log = -carried
        set_previous = _set_noise(layer.process_noise)
    if len(layers) > 1:
        last, before = (each.process_noise.weight for each in layers[:-3:-1])
        last.copy_(before)
    model.train(training)
    return reached


def _set_noise(noise: LogParameter) -> Any:
    """A function that sets Q, and returns the log λ that comes of it."""

    def set_it(log, carried, wanted, seen):
        own = _median(carried, seen)  # 1/λ is at least this
        share = (-torch.expm1(own + wanted)).clamp(min=LEAST)
        log_q = share.log() - wanted
        noise.weight.copy_(log_q)
        return -torch.logaddexp(carried, log_q)

    return set_it


def _shift_initial(module: nn.Module) -> Any:
    """A function that moves log τ, and returns the log λ that comes of it."""
    mlp = isinstance(module, MLPPrecision)
    end = module.layers[-1].bias if mlp else module.weight
    assert isinstance(end, Tensor)

    def set_it(log, carried, wanted, seen):
        shift = wanted - _median(log, seen)
        end.add_(shift.to(end.dtype))
        return log + shift

    return set_it


def _start(layer: BFTLlamaDecoderLayer, gain: float, rescale: bool) -> None:
    if isinstance(layer, ConstantLayer):
        layer.gain.weight.fill_(math.log(gain))
    elif isinstance(layer, GateLayer):
        layer.gain.bias.fill_(math.log(gain / (1 - gain)))
    if rescale:
        w_o = getattr(layer.self_attn.o_proj, "base_layer", None)
        w_o = layer.self_attn.o_proj if w_o is None else w_o
        trained = w_o.weight.requires_grad
        w_o.weight = nn.Parameter(w_o.weight / gain, requires_grad=trained)


class _Reached(Exception):
    """The layer was reached that was waited for."""


def _entering(
    model: BFTLlamaForCausalLM,
    layer: BFTLlamaDecoderLayer,
    input_ids: Tensor,
    attention_mask: Tensor | None,
) -> tuple[Tensor, tuple[Any, Any]]:
    """The state that enters the layer; its position embeddings and mask."""
    found: list[Any] = []

    def keep(_, arguments, options):
        found.append(arguments[0] if arguments else options["hidden_states"])
        names = ("position_embeddings", "attention_mask")
        found.append(tuple(options[name] for name in names))
        raise _Reached

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model.model(input_ids, attention_mask=attention_mask, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    state, where = found
    return state, where


def _median(x: Tensor, seen: Tensor) -> Tensor:
    """Of each feature over the tokens that are seen, (n,)."""
    return x[seen.bool()].median(0).values
