"""A layer's input, checked once, before anything has changed."""

import torch
from torch import Tensor, nn

from bft_ref.support import checks
from bft_ref.support.modules import is_watched
from bft_ref.support.numerics import autocast_device, hidden_and_bias


def sizes(
    d_model: int,
    nhead: int,
    dim_feedforward: int,
    num_kv_heads: int,
    rotary_base: float | None,
    dropout: float,
) -> None:
    """Raise for sizes of a layer that are none or do not fit together."""
    for name, value in [
        ("d_model", d_model),
        ("nhead", nhead),
        ("dim_feedforward", dim_feedforward),
        ("num_kv_heads", num_kv_heads),
    ]:
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{name}: expected a positive integer, got {value!r}"
            )
    if d_model % nhead:
        raise ValueError(
            f"d_model: expected a multiple of nhead={nhead}, got {d_model}"
        )
    if nhead % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: expected a divisor of nhead={nhead}, "
            f"got {num_kv_heads}"
        )
    if rotary_base is not None:
        checks.number("rotary_base", rotary_base, 0.0)
        if (d_model // nhead) % 2:
            raise ValueError(
                "rotary_base: rotary positions need an even head size, got "
                f"{d_model // nhead}"
            )
    if not checks.within("dropout", dropout, 0.0) < 1.0:
        raise ValueError(f"dropout: expected [0, 1), got {dropout!r}")


def unwrapped(attention: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A layer's ``self_attn``, unless it is more than is read of it."""
    if not isinstance(attention, kind) or is_watched(attention):
        raise TypeError(
            "self_attn: expected the layer's own parameters, unwrapped "
            f"and without hooks, got {type(attention).__name__}; they are "
            "read and never called, so that an adapter or a hook there would "
            "do nothing: use self_attn.out_proj, or parametrise "
            "in_proj_weight"
        )
    return attention


def belief(
    mean: Tensor,
    log: Tensor,
    d_model: int,
    dtype: torch.dtype,
    padding: Tensor | None,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Mean and log precision, emptied where padding hides what is not finite.

    Raises: TypeError, ValueError for what is no sound belief of such a layer.
    """
    checks.shape("belief.mean", mean, ["B", "T", d_model])
    if 0 in mean.shape:
        raise ValueError(
            f"belief.mean: expected at least one token, got shape "
            f"{tuple(mean.shape)}"
        )
    checks.floating("belief.mean", mean)
    checks.floating("belief.log_precision", log)
    autocast = torch.is_autocast_enabled(autocast_device(mean))
    if mean.dtype != dtype and not autocast:
        raise TypeError(
            f"belief.mean: expected {dtype}, the dtype of the "
            f"layer's weights, got {mean.dtype}; convert one with .to"
        )
    rest, last = log.shape[:-1], log.shape[-1:]
    if rest != mean.shape[:2] or last not in ((1,), (d_model,)):
        raise ValueError(
            "belief.log_precision: expected shape "
            f"{(*mean.shape[:2], d_model)} or "
            f"{(*mean.shape[:2], 1)}, got {tuple(log.shape)}"
        )
    if padding is not None:
        sound = mean.isfinite().all(-1) & log.isfinite().all(-1)
        hidden = _hidden(padding, mean, batch_first)
        lost = (hidden & ~sound).unsqueeze(-1)
        mean, log = mean.masked_fill(lost, 0.0), log.masked_fill(lost, 0.0)
    checks.finite("belief.mean", mean)
    checks.finite("belief.log_precision", log)
    return mean, log


def _hidden(padding: Tensor, mean: Tensor, batch_first: bool) -> Tensor:
    """Which of the tokens given are hidden, shaped as mean without d."""
    batch, tokens = mean.shape[:2]
    if not batch_first:
        batch, tokens = tokens, batch
    checks.shape("src_key_padding_mask", padding, ["B", "S"])
    keys = max(padding.shape[1], tokens)  # more, with a cache
    padding_mask(padding, batch, keys)
    hidden = padding[:, keys - tokens :]  # the newest
    if hidden.dtype != torch.bool:
        hidden = hidden_and_bias(hidden)[0]
    return hidden if batch_first else hidden.mT


def padding_mask(padding: Tensor, batch: int, keys: int) -> None:
    """Raise unless it is a mask of (batch, keys)."""
    name = "src_key_padding_mask"
    checks.mask(name, padding, (batch, keys))
    checks.shape(name, padding, (batch, keys))


def score_mask(
    mask: Tensor | None, batch: int, heads: int, queries: int, keys: int
) -> Tensor | None:
    """``src_mask`` in the convention of scaled_dot_product_attention."""
    if mask is None:
        return None
    rows = batch * heads
    checks.mask("src_mask", mask, (rows, queries, keys))
    want = [[queries, keys], [rows, queries, keys]][mask.dim() == 3]
    checks.shape("src_mask", mask, want)
    if mask.dim() == 3:
        mask = mask.unflatten(0, (batch, heads))
    return ~mask if mask.dtype == torch.bool else mask


def traces(given: object) -> None:
    """Raise TypeError for what a layer's internals cannot be appended to."""
    if given is not None and not isinstance(given, list):
        raise TypeError(
            "traces: expected a list to append to, or None, got "
            f"{type(given).__name__}; step() and steps() bring their own"
        )


def is_causal(value: object) -> None:
    """Raise TypeError for what looks like a mask and is none."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(
            "is_causal: expected True or False, got "
            f"{type(value).__name__}; a mask is a src_mask"
        )
