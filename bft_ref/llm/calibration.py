"""A start at which the filter is visible and does no harm."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from bft_ref.belief import Belief
from bft_ref.initial_precision import MLPPrecision
from bft_ref.llm.layer import (
    BFTLlamaDecoderLayer,
    ConstantLayer,
    GateLayer,
)
from bft_ref.llm.model import BFTLlamaForCausalLM
from bft_ref.support import checks
from bft_ref.support.modules import evaluated

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
    Tokens that ``attention_mask`` (B, T) hides count for nothing.

    ``rescale`` divides W_O by ``gain`` (in a copy: the model that was patched
    keeps its own), so that attention adds, in the median, what it did. A
    second call would divide once more.

    Returns: the median gains that were reached; 1 where a control has none.
    Raises: TypeError, ValueError before anything has changed, for a gain that
    is not within (0, 1), for ids that the model does not know, for a mask
    that does not fit or hides everything, and for the neighbours' prior: there
    λ_obs moves along with τ, and no τ makes a gain.
    Equations (16.6), (16.7); ours.
    """
    _check(model, input_ids, gain, attention_mask, rescale)
    layers = model.filters()
    if model.config.bft_variant != "kalman":
        return [_start(layer, gain, rescale) for layer in layers]
    with evaluated(model):
        h, where = _entering(model, layers[0], input_ids, attention_mask)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        seen = attention_mask.bool().to(h.device)
        reached: list[float] = []
        # a copy: τ itself is about to move
        log = layers[0].entered(h).log_precision.clone()
        carried = log  # log variance without Q; not read for the first layer
        for i, layer in enumerate(layers):
            _start(layer, gain, rescale)
            for _ in range(ROUNDS):
                observed = layer.observe(Belief(h, log), *where).log_precision
                # K = 1/(1 + λ/λ_obs) is the gain that was asked for
                wanted = (
                    _median(log, seen)
                    + _median(observed - log, seen)
                    - math.log(gain / (1 - gain))
                )
                if i == 0:
                    shift = wanted - _median(log, seen)
                    _shift(layer.initial_precision, shift)
                    log = log + shift
                else:
                    own = _median(carried, seen)  # 1/λ is at least this
                    share = (-torch.expm1(own + wanted)).clamp(min=LEAST)
                    log_q = share.log() - wanted
                    layers[i - 1].process_noise.weight.copy_(log_q)
                    log = -torch.logaddexp(carried, log_q)
            observation = layer.observe(Belief(h, log), *where)
            updated, k = layer.update(Belief(h, log), observation)
            reached.append(_median(k, seen).mean().item())
            step, log_growth = layer.step_and_growth(updated)
            h = updated.mean + step
            carried = log_growth - updated.log_precision
            log = -carried
    if len(layers) > 1:
        last_but_one = layers[-2].process_noise.weight
        layers[-1].process_noise.weight.copy_(last_but_one)
    return reached


def _check(
    model: BFTLlamaForCausalLM,
    input_ids: Tensor,
    gain: float,
    mask: Tensor | None,
    rescale: bool,
) -> None:
    if not isinstance(model, BFTLlamaForCausalLM):
        raise TypeError(
            "model: expected what patch(llama) gives, got "
            f"{type(model).__name__}; calibrate before adapters and wrappers"
        )
    scale = model.config.filter.prior_scale
    if model.config.bft_variant == "kalman" and scale != "unit":
        raise ValueError(
            f"model: expected prior_scale='unit', got {scale!r}, with which "
            "λ_obs moves along with τ and no τ makes a gain"
        )
    checks.number("gain", gain, 0.0)
    if gain >= 1:
        raise ValueError(f"gain: expected one within (0, 1), got {gain}")
    checks.shape("input_ids", input_ids, ["B", "T"])
    vocabulary = model.config.vocab_size
    if input_ids.is_floating_point() or not input_ids.numel():
        raise ValueError(
            "input_ids: expected whole numbers, at least one, got "
            f"{tuple(input_ids.shape)} of {input_ids.dtype}"
        )
    least, most = input_ids.min().item(), input_ids.max().item()
    if not 0 <= least <= most < vocabulary:
        raise ValueError(
            f"input_ids: expected ids in 0…{vocabulary - 1}, got {least}…"
            f"{most}"
        )
    if mask is not None:
        checks.shape("attention_mask", mask, input_ids.shape)
        if not mask.any():
            raise ValueError(
                "attention_mask: expected a token that is seen, got none"
            )
    outputs = [layer.self_attn.o_proj for layer in model.filters()]
    if rescale and not all(isinstance(w_o, nn.Linear) for w_o in outputs):
        raise ValueError(
            "rescale: expected o_proj to be nn.Linear, got "
            f"{type(outputs[0]).__name__}; calibrate before adapters"
        )


def _start(layer: BFTLlamaDecoderLayer, gain: float, rescale: bool) -> float:
    """Divide W_O; set a control's factor, and return what it is then."""
    if rescale:
        w_o = layer.self_attn.o_proj
        for name, own in [*w_o.named_parameters(recurse=False)]:
            trained = own.requires_grad
            setattr(w_o, name, nn.Parameter(own / gain, trained))
    if isinstance(layer, ConstantLayer):
        layer.gain.weight.fill_(math.log(gain))
    elif isinstance(layer, GateLayer):
        layer.gain.weight.zero_()
        layer.gain.bias.fill_(math.log(gain / (1 - gain)))
    else:
        return 1.0
    return gain


def _shift(initial_precision: nn.Module, by: Tensor) -> None:
    """Multiply every τ, however it is made."""
    if isinstance(initial_precision, MLPPrecision):
        end = initial_precision.layers[-1].bias
    else:
        end = initial_precision.weight
    cast(Tensor, end).add_(by)


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
    return x[seen].median(0).values
