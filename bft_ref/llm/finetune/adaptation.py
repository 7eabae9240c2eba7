"""Which model is fitted: a plain Llama, a filter, or a rival of the filter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from bft_ref.llm.calibration import calibrate
from bft_ref.llm.config import Initial, Variant
from bft_ref.llm.finetune.known import Known, KnownPrecision
from bft_ref.llm.model import is_added, patch
from bft_ref.support import checks

MATRICES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True)
class Adaptation:
    """What of a Llama is trained, and what its layers are made into.

    Raises: TypeError for a field of another type; ValueError for a value out
    of its range or one that the variant does not read.
    """

    # What the residual connection of attention becomes in the upper layers;
    # bft_ref.llm.patch says what each is.
    variant: Variant = "plain"
    top: int = 8  # Upper layers that are trained; what is below stays.
    # Rank of LoRA's matrices in the upper layers; 0: their weights are
    # trained themselves.
    lora_rank: int = 0
    # Calibrated median gain in each layer, the output projection divided by
    # it, so that the start is harmless; of a plain model, a fixed factor
    # after the output projection, which is divided by it.
    gain: float = 1.0
    # One learned log τ, or each token's by a network from its state.
    initial_precision: Initial = "constant"

    def __post_init__(self):
        checks.typed(self)
        checks.count("top", self.top, 1)
        checks.count("lora_rank", self.lora_rank)
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain: expected in (0, 1], got {self.gain}")
        if self.variant == "kalman" and self.gain == 1:
            raise ValueError(
                "gain: expected < 1 of a filter, whose gain never reaches 1"
            )
        if self.variant == "plain" and self.initial_precision != "constant":
            raise ValueError(
                "initial_precision: expected 'constant' of a plain model, "
                f"which has no precision; got {self.initial_precision!r}"
            )


class Scaled(nn.Module):
    """A linear map divided by a factor, times that factor: the same map.

    Only how it learns differs: an adaptive step of the weights counts
    ``factor`` times.
    """

    def __init__(self, inner: nn.Linear, factor: float):
        super().__init__()
        self.inner, self.factor = inner, factor
        with torch.no_grad():
            inner.weight /= factor

    def forward(self, x: Tensor) -> Tensor:
        """The map's value."""
        return self.factor * self.inner(x)


def adapt(
    model: Any,
    config: Adaptation,
    calibration: Sequence[Sequence[int]] = (),
    *,
    known: Known | None = None,
) -> LlamaForCausalLM:
    """The model with its upper layers as asked, they alone to be trained.

    ``calibration``: prompts of equal length, of the training data, on which
    the gains are set; ``known``: what its precision is to be told. The given
    model is used up. Raises: ValueError for more layers than the model has,
    and for a precision to be told to a model without.
    """
    layers = model.config.num_hidden_layers
    if config.top > layers:
        raise ValueError(
            f"top: expected at most the model's {layers} layers, got "
            f"{config.top}"
        )
    upper = range(layers - config.top, layers)
    if config.variant != "plain":
        model = patch(
            model,
            layers=upper,
            variant=config.variant,
            initial_precision=config.initial_precision,
        )
        if config.gain < 1:
            calibrate(
                model,
                torch.tensor(calibration),
                gain=config.gain,
                rescale=True,
            )
        if known is not None and known.role == "precision":
            first = model.filters()[0]
            first.initial_precision = KnownPrecision(first.initial_precision)
    elif known is not None and known.role == "precision":
        raise ValueError(
            "known: expected a bias for a plain model, which has no precision"
        )
    elif config.gain < 1:
        for i in upper:
            attention = model.model.layers[i].self_attn
            attention.o_proj = Scaled(attention.o_proj, config.gain)
    model.requires_grad_(False)
    if config.lora_rank:
        _add_lora(model, upper, config.lora_rank)
    for name, p in model.named_parameters():
        inside = any(name.startswith(f"model.layers.{i}.") for i in upper)
        if is_added(name) or (inside and not config.lora_rank):
            p.requires_grad_(True)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by their names."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _add_lora(model: LlamaForCausalLM, upper: range, rank: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(
        LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=list(MATRICES),
            layers_to_transform=list(upper),
            layers_pattern="layers",
        ),
        model,
    )
