"""What bad input is told, before it can become a silent NaN.

Shapes and dtypes are always checked. Values are looked at in eager mode only:
a compiled or exported graph must not wait for a number.
"""

from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def values_can_be_read() -> bool:
    """False under ``torch.compile`` and ``torch.export``."""
    return not torch.compiler.is_compiling()


def _every(condition: Tensor) -> bool:
    try:
        return bool(condition.all())
    except RuntimeError:  # inside torch.func.vmap values have no truth value
        return True


def floating(name: str, x: Tensor) -> Tensor:
    """Raise TypeError unless ``x`` is a tensor of real floating dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(
            f"{name}: expected a floating dtype, got {x.dtype}; "
            f"convert it with {name}.float()"
        )
    return x


def finite(name: str, x: Tensor) -> Tensor:
    """Raise ValueError if ``x`` holds NaN or infinity."""
    floating(name, x)
    # the sum is finite unless an entry is not, or the sum overflows
    suspicious = values_can_be_read() and not _every(x.sum().isfinite())
    if suspicious and not _every(x.isfinite()):
        bad = int((~x.isfinite()).sum())
        raise ValueError(
            f"{name}: expected finite values, got NaN or infinity in {bad} of "
            f"{x.numel()} entries"
        )
    return x


def positive(name: str, x: Tensor) -> Tensor:
    """Raise ValueError unless every entry is finite and > 0."""
    finite(name, x)
    if values_can_be_read() and not _every(x > 0):
        raise ValueError(
            f"{name}: expected positive values, got a minimum of "
            f"{x.min().item():g}"
        )
    return x


def not_negative(name: str, x: Tensor) -> Tensor:
    """Raise ValueError unless every entry is finite and >= 0."""
    finite(name, x)
    if values_can_be_read() and not _every(x >= 0):
        raise ValueError(
            f"{name}: expected values >= 0, got a minimum of "
            f"{x.min().item():g}"
        )
    return x


def shape(
    name: str, x: Tensor, expected: Iterable[int | str | None]
) -> Tensor:
    """Raise ValueError unless ``x`` has the shape; names, None are free."""
    want = tuple(expected)
    matches = x.dim() == len(want) and all(
        not isinstance(w, int) or w == n
        for w, n in zip(want, x.shape, strict=True)
    )
    if not matches:
        text = ", ".join(str(w) if w is not None else "*" for w in want)
        raise ValueError(
            f"{name}: expected shape ({text}), got {tuple(x.shape)}"
        )
    return x


def mask(name: str, x: Tensor, onto: Iterable[int]) -> Tensor:
    """Raise unless ``x`` is a boolean or float mask that fits a shape.

    TypeError for another dtype: 0 and 1 of an integer mask would be added to
    the scores. ValueError for the shape, and for NaN or +inf.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dtype != torch.bool and not x.is_floating_point():
        raise TypeError(
            f"{name}: expected a boolean or floating mask, got {x.dtype}; "
            f"convert it with {name}.bool()"
        )
    want = tuple(onto)
    try:
        fits = torch.broadcast_shapes(x.shape, want) == want
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name}: expected shape {want} or one that broadcasts to it, "
            f"got {tuple(x.shape)}"
        )
    read = x.dtype != torch.bool and values_can_be_read()
    if read and not _every(x < torch.inf):
        raise ValueError(f"{name}: expected numbers or -inf, got NaN or +inf")
    return x


def broadcastable(name: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise ValueError unless the two shapes broadcast."""
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)} does not broadcast with "
            f"{other} of shape {tuple(y.shape)}"
        ) from None


def choice(name: str, value: str, allowed: Iterable[str]) -> str:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    options = tuple(allowed)
    if value not in options:
        raise ValueError(
            f"{name}: expected one of {', '.join(options)}, got {value!r}"
        )
    return value


def number(
    name: str, value: object, low: float, high: float = torch.inf
) -> float:
    """Raise unless ``value`` is finite and low < value <= high."""
    if not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number, got {type(value).__name__}"
        )
    value = float(value)
    if not low < value <= high or value == torch.inf:
        end = f"{high:g}]" if high < torch.inf else "inf)"
        raise ValueError(
            f"{name}: expected a number in ({low:g}, {end}, got {value!r}"
        )
    return value


def count(name: str, value: object, low: int = 0) -> int:
    """Raise unless ``value`` is a whole number from ``low`` on."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name}: expected at least {low}, got {value}")
    return int(value)


def whole(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """``values`` (n,) as int64, the same array if it is one already.

    Floats pass where they are whole, up to 2⁵³, from where on neighbours
    share a float. Raises: TypeError for anything but numbers, ValueError for
    another shape or a number that int64 does not hold.
    """
    try:
        x = np.asarray(values)
        x = np.asarray(x.tolist()) if x.dtype == object else x
    except ValueError:  # rows of several lengths
        x = np.empty((0, 0))
    if x.ndim != 1:
        raise ValueError(
            f"{name}: expected one list of whole numbers, got shape {x.shape}"
        )
    if not len(x):
        return x.astype(np.int64)
    if x.dtype.kind not in "iuf":
        hint = {
            "b": "; np.flatnonzero makes ids of a mask",
            "O": ", such as None or a number beyond int64",
        }.get(x.dtype.kind, "")
        raise TypeError(f"{name}: expected whole numbers, got {x.dtype}{hint}")
    if x.dtype.kind == "f":
        fits = (np.abs(x) <= 2**53) & (x == np.round(x))
    else:
        fits = x <= np.iinfo(np.int64).max
    if not fits.all():
        at = int(np.argmin(fits))
        raise ValueError(
            f"{name}: expected whole numbers, got {x[at]} at position {at}"
        )
    return x.astype(np.int64, copy=False)


def unread(config, readers: dict[str, str]) -> None:
    """An option that nothing reads is refused, not ignored.

    ``readers`` says for each such field of a dataclass who does not read it.
    """
    for option in fields(config):
        given = getattr(config, option.name)
        if option.name in readers and given != option.default:
            raise ValueError(
                f"{option.name}: expected its default {option.default!r}, "
                f"since {readers[option.name]} does not read it; got {given!r}"
            )
