"""A Llama whose layers filter, for everything that transformers does."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.utils.generic import can_return_tuple

from bft_ref.config import BFTConfig
from bft_ref.llm.config import BFTLlamaConfig, Initial, Variant
from bft_ref.llm.layer import LAYERS, BFTLlamaDecoderLayer, LogParameter

SPLIT = LlamaModel._no_split_modules
#: log τ and log Q need more than the eight bits of bfloat16
PRECISE = {"process_noise", "initial_precision"}
#: what a plain Llama does not have
ADDED = (*sorted(PRECISE), "gain")


class BFTLlamaModel(LlamaModel):
    """A LlamaModel, some or all of whose layers filter."""

    config_class = BFTLlamaConfig
    _no_split_modules = [*SPLIT, "BFTLlamaDecoderLayer"]  # noqa: RUF012
    # these keep no precision
    _supports_flash_attn = False
    _supports_flex_attn = False
    _keep_in_fp32_modules_strict = PRECISE

    def __init__(self, config: BFTLlamaConfig):
        super().__init__(config)
        made = LAYERS[config.bft_variant]
        for i in config.filtering:
            self.layers[i] = made(config, i)
        self.post_init()

    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As a LlamaModel's; ``hidden_states`` are the means.

        Raises: ValueError if attention weights are asked for.
        """
        asked = kwargs.get("output_attentions")
        if self.config.output_attentions if asked is None else asked:
            raise ValueError(
                "output_attentions: expected False, got True; the weights of "
                "layers that filter are in bft_ref.llm.trace(model)"
            )
        output = super().forward(*args, **kwargs, return_dict=True)
        if output.hidden_states is not None:
            d = self.config.hidden_size
            means = (h[..., :d] for h in output.hidden_states)
            output.hidden_states = tuple(means)
        return output

    def _init_weights(self, module: nn.Module) -> None:
        """Also what a plain checkpoint lacks.

        transformers asks the innermost model, so it cannot stand further out.
        """
        super()._init_weights(module)
        if isinstance(module, LogParameter):
            init.constant_(module.weight, module.start)
        elif isinstance(module, nn.Linear) and hasattr(module, "start"):
            init.zeros_(module.weight)
            init.constant_(module.bias, cast(float, module.start))


class BFTLlamaForCausalLM(LlamaForCausalLM):
    """A LlamaForCausalLM, some or all of whose layers filter.

    Made from a Llama by :func:`patch`, or by ``from_pretrained`` from a
    checkpoint of its own or of a plain Llama, whose missing τ and Q then
    start as the configuration says.
    """

    config_class = BFTLlamaConfig
    _supports_flash_attn = False
    _supports_flex_attn = False
    _keep_in_fp32_modules_strict = PRECISE

    def __init__(self, config: BFTLlamaConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = BFTLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(
            config.hidden_size, config.vocab_size, bias=False
        )
        self.post_init()

    def filters(self) -> list[BFTLlamaDecoderLayer]:
        """The layers that filter."""
        return [
            layer
            for layer in self.model.layers
            if isinstance(layer, BFTLlamaDecoderLayer)
        ]

    def precision_parameters(self) -> list[nn.Parameter]:
        """log τ and log Q, or what a control has in the gain's place."""
        return [
            parameter
            for name, parameter in self.named_parameters()
            if is_added(name)
        ]


def is_added(name: str) -> bool:
    """Whether a plain Llama has no parameter of that name."""
    return not {*name.split(".")}.isdisjoint(ADDED)


def patch(
    model: LlamaForCausalLM,
    filter: BFTConfig | None = None,
    layers: Iterable[int] | None = None,
    *,
    variant: Variant = "kalman",
    initial_precision: Initial = "constant",
    tau: float = 1.0,
    dial: float = 1.0,
) -> BFTLlamaForCausalLM:
    """A model that filters and shares the parameters of ``model``.

    Nothing is copied, and ``model`` still works as it did. Adds log Q for
    each layer that filters and log τ: less than 0.1 % of the parameters. As
    it starts, with τ = Q = 1, it says other things than the plain model: go
    on with :func:`bft_ref.llm.calibrate`, or with ``dial=0``.

    filter: options of the layers, :data:`bft_ref.llm.DEFAULT` if not given.
    layers: the indices of those that filter, one after another; all if not
    given. variant, initial_precision, tau, dial: see
    :class:`bft_ref.llm.BFTLlamaConfig`.

    Raises: TypeError for anything but a LlamaForCausalLM of transformers
    itself (adapters come afterwards); ValueError for quantised or offloaded
    weights, for modules that were exchanged, and for options that do not fit.
    """
    if type(model) is not LlamaForCausalLM:
        raise TypeError(
            "model: expected a LlamaForCausalLM of transformers, got "
            f"{type(model).__name__}; patch it before adapters and wrappers"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            "model: expected weights as they were trained, got quantised "
            "ones, of whose matrices variances cannot be made"
        )
    if any(hasattr(part, "_hf_hook") for part in model.modules()):
        raise ValueError(
            "model: expected one on one device, got one that accelerate moves "
            "between devices; save it, and load it by "
            "BFTLlamaForCausalLM.from_pretrained(…, device_map=…)"
        )
    if not isinstance(filter, BFTConfig | None):
        raise TypeError(
            f"filter: expected a BFTConfig, got {type(filter).__name__}"
        )
    given = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        given.pop(name, None)
    config = BFTLlamaConfig(
        **given,
        bft=filter,
        bft_layers=layers,
        bft_variant=variant,
        bft_initial_precision=initial_precision,
        bft_tau=tau,
        bft_dial=dial,
    )
    implementation = model.config._attn_implementation
    known = implementation in ("sdpa", "eager")
    config._attn_implementation = implementation if known else "sdpa"
    with torch.device("meta"):
        made = BFTLlamaForCausalLM(config)
    # shared: nothing is copied
    missing, unexpected = made.load_state_dict(
        model.state_dict(), strict=False, assign=True
    )
    missing = [name for name in missing if not is_added(name)]
    if missing or unexpected:
        raise ValueError(
            "model: expected a Llama's parameters, got one without "
            f"{missing[:3]} and with {unexpected[:3]}; patch it before "
            "adapters, pruning and parametrisations"
        )
    made.model.rotary_emb = model.model.rotary_emb
    _materialise(made, model.device)
    theirs = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        if name in theirs:
            parameter.requires_grad_(theirs[name].requires_grad)
    made.tie_weights()
    made.generation_config = model.generation_config
    return made.train(model.training)


def _materialise(made: BFTLlamaForCausalLM, device: torch.device) -> None:
    """Give what a plain Llama lacks its memory and its start."""
    for name, module in made.named_modules():
        if name.rpartition(".")[-1] in ADDED:
            module.to_empty(device=device)
            for part in module.modules():
                made.model._init_weights(part)
