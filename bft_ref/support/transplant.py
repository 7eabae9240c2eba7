"""From PyTorch's own layers and encoders to ours, weights and all."""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from bft_ref.support.modules import is_watched

Layer = TypeVar("Layer", bound=nn.Module)
PARTS = {
    "self_attn": nn.MultiheadAttention,
    "linear1": nn.Linear,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout": nn.Dropout,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}


def layer_like(
    made: type[Layer], layer: nn.TransformerEncoderLayer, config: Any
) -> Layer:
    """A layer of class ``made`` with sizes, options, weights of ``layer``.

    Raises: TypeError, ValueError as :meth:`bft_ref.BFTLayer.from_torch`.
    """
    if type(layer) is not nn.TransformerEncoderLayer:
        raise TypeError(
            "layer: expected nn.TransformerEncoderLayer, got "
            f"{type(layer).__name__}"
        )
    for name, expected in PARTS.items():
        module: nn.Module = getattr(layer, name)
        if type(module) is not expected or is_watched(module):
            raise TypeError(
                f"layer.{name}: expected {expected.__name__} without "
                f"hooks, got {module}; add adapters and hooks afterwards"
            )
    attn, linear = layer.self_attn, layer.linear1
    if attn.bias_k is not None or attn.add_zero_attn:
        raise TypeError(
            "layer.self_attn: expected keys of tokens only, got "
            "add_bias_kv or add_zero_attn"
        )
    rates = {layer.dropout.p, layer.dropout1.p, layer.dropout2.p, attn.dropout}
    if len(rates) > 1:
        raise ValueError(
            f"layer: expected one dropout rate, got {sorted(rates)}"
        )
    result: Any = made(
        *(attn.embed_dim, attn.num_heads, linear.out_features, rates.pop()),
        *(copy.deepcopy(layer.activation), layer.norm1.eps),
        *(attn.batch_first, layer.norm_first, linear.bias is not None),
        *(linear.weight.device, linear.weight.dtype),
        config=config,
    )
    result.norm2.eps = layer.norm2.eps
    result.load_state_dict(layer.state_dict())
    theirs = dict(layer.named_parameters())
    for name, parameter in result.named_parameters():
        if name in theirs:
            parameter.requires_grad_(theirs[name].requires_grad)
    return result.train(layer.training)


def keep_process_noise(module, state_dict, prefix, *_) -> None:
    """A plain Transformer layer has no Q: keep ours, or start one."""
    if prefix + "linear1.weight" in state_dict or module.ffn is not None:
        ours = module.log_process_noise.detach()
        if ours.is_meta:
            start = module.config.process_noise
            ours = torch.full_like(ours, start, device="cpu").log()
        state_dict.setdefault(prefix + "log_process_noise", ours)
