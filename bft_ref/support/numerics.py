"""Numbers that stay numbers: dtypes, overflow, cancellation."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bft_ref.support import checks


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 or wider: precision is never computed in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_device(x: Tensor) -> str:
    """The device type that autocast goes by; it knows no meta device."""
    return "cpu" if x.is_meta else x.device.type


def log_mean_exp(x: Tensor) -> Tensor:
    """log of the mean of eˣ over features, (..., d) → (..., 1)."""
    x = at_least_float32(x)
    return x.logsumexp(-1, keepdim=True) - math.log(x.shape[-1])


def saturate(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each within ±2⁵⁸ (float64: ±2⁵⁰⁰), so that its square is a number.

    Where a token is so large, others that do not see it must not be touched:
    a weight of zero times infinity is NaN.
    """
    bound = 2.0 ** (500 if tensors[0].dtype == torch.float64 else 58)
    if checks.surely_within(bound, *tensors):
        return tensors
    return tuple(x.clamp(-bound, bound) for x in tensors)


def shrink(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``x`` over a power of two that keeps its square from overflowing.

    Shapes: (..., d) → (..., d) and the power (..., 1), None where it is 1.
    """
    largest = 2.0 ** (400 if x.dtype == torch.float64 else 40)
    if checks.surely_within(largest, x):
        return x.view_as(x), None  # gradients add up in one order both ways
    peak = x.detach().abs().amax(-1, keepdim=True) / largest
    power = torch.exp2(torch.floor(torch.log2(peak))).clamp(min=1.0)
    return x / power, power


def hidden_and_bias(mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a float mask hides, and what it adds elsewhere, shaped as it.

    Hidden is −1e9 and below, as people write it, and the lowest number of
    the mask's dtype, which in float16 is higher; the bias is 0 there.
    """
    x = at_least_float32(mask)
    hidden = x <= max(-0.99e9, torch.finfo(mask.dtype).min)
    return hidden, x.masked_fill(hidden, 0.0)


def settle(
    spread: Tensor,
    second: Tensor,
    n_eff: Tensor,
    in_float64: Callable[[Tensor], Tensor],
    everywhere: bool = False,
) -> Tensor:
    """D ≥ 0 from the difference ``spread`` of two moments.

    In float32 little is left of it where the values are much closer to one
    another than to the centre, all features taken together: there
    ``in_float64``, given the rows (...), does it again. One effective value
    has no dispersion.

    Shapes: ``spread`` and the ``second`` moment (..., d), ``n_eff`` (...).
    """
    if spread.dtype == torch.float32:
        with torch.no_grad():
            rows = spread.sum(-1) < 2.0**-12 * second.sum(-1)
            rows = (
                torch.ones_like(rows) if everywhere else rows & (n_eff > 1.01)
            )
        if checks.anywhere(rows) != [False]:
            exact = in_float64(rows).float()
            spread = torch.where(rows.unsqueeze(-1), exact, spread)
    none = (spread <= 0) | (n_eff <= 1).unsqueeze(-1)
    return spread.masked_fill(none, 0.0)
