"""Rotary positions."""

import torch
from torch import Tensor


def rotate(x: Tensor, base: float = 10000.0, start: int = 0) -> Tensor:
    """Rotate feature pairs (i, i + d_h/2) by position·base^(−2i/d_h).

    Scores of rotated queries and keys depend on distance alone; values, and
    so dispersion and precision, are not rotated.

    Shapes: ``x`` (B, H, T, d_h), d_h even; ``start`` is the first position.
    Raises: ValueError for an odd d_h.
    Source: RoFormer, Su et al. 2021, doi:10.48550/arXiv.2104.09864.
    """
    tokens, features = x.shape[-2:]
    if features % 2:
        raise ValueError(
            f"x: expected an even number of features, got {features}"
        )
    kind = torch.promote_types(x.dtype, torch.float32)
    pair = torch.arange(0, features, 2, dtype=kind, device=x.device)
    position = torch.arange(start, start + tokens, device=x.device)
    angle = position.to(kind)[:, None] * base ** (-pair / features)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(kind).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
