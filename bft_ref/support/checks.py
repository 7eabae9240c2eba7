"""What bad input is told, before it can become a silent NaN.

Shapes and dtypes are always checked. Values are looked at in eager mode only:
a compiled or exported graph must not wait for a number.
"""

from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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


def anywhere(*conditions: Tensor) -> list[bool] | None:
    """Whether each condition holds anywhere; None where that is not known.

    One answer for all of them, so that a GPU is waited for once.
    """
    if not values_can_be_read():
        return None
    try:
        return torch.stack([c.any() for c in conditions]).tolist()
    except RuntimeError:  # inside torch.func.vmap values have no truth value
        return None


def surely_within(bound: float, *tensors: Tensor) -> bool:
    """Whether all entries are known to be smaller than ``bound`` in size.

    Looked at on a CPU in eager mode, where that is cheaper than to guard
    against the contrary; elsewhere it is not known.
    """
    if any(x.device.type != "cpu" for x in tensors):
        return False
    ends = [x.detach().aminmax() for x in tensors if x.numel()]
    # NaN is no number within the bound
    sure = [(low > -bound) & (high < bound) for low, high in ends]
    found = anywhere(*(~each for each in sure)) if sure else []
    return found == [False] * len(sure)


def tensor(name: str, x: object) -> None:
    """Raise TypeError unless ``x`` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def floating(name: str, x: Tensor) -> Tensor:
    """Raise TypeError unless ``x`` is a tensor of real floating dtype."""
    tensor(name, x)
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
    """Raise unless ``x`` is a tensor of that shape; names, None are free."""
    tensor(name, x)
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


def mask(
    name: str, x: Tensor, onto: Iterable[int], true: str = "hidden"
) -> Tensor:
    """Raise unless ``x`` is a boolean or float mask that fits a shape.

    ``true`` says what True means: ``hidden`` or ``visible``. TypeError for
    another dtype: 0 and 1 of an integer mask would be added to the scores.
    ValueError for the shape, and for NaN or +inf.
    """
    tensor(name, x)
    if x.dtype != torch.bool and not x.is_floating_point():
        keep = "== 0" if true == "hidden" else "!= 0"
        raise TypeError(
            f"{name}: expected a boolean mask, True where a token is {true}, "
            f"or a float mask, added to the scores; got {x.dtype}. If 1 means "
            f"visible, as in Hugging Face's attention_mask, pass "
            f"{name} {keep}"
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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_token_precision: Tensor,
    neighbour_variance: Tensor | None = None,
    feature_weights: Tensor | None = None,
) -> None:
    """Raise unless query, key, value and what goes with them fit."""
    for name, x in [("query", query), ("key", key), ("value", value)]:
        floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected shape (batch, heads, tokens, features), "
                f"got {tuple(x.shape)}"
            )
    batch, heads, queries, features = query.shape
    _, kv_heads, keys, _ = key.shape
    if not queries or not keys:
        raise ValueError(
            f"query, key: expected at least one token each, got {queries} "
            f"queries and {keys} keys"
        )
    shape("key", key, [batch, kv_heads, keys, features])
    shape("value", value, [batch, kv_heads, keys, value.shape[-1]])
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query: expected a number of heads that is a multiple of the "
            f"{kv_heads} key heads, got {heads}"
        )
    for name, x in [("key", key), ("value", value)]:
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected {query.dtype} as the query, got {x.dtype}; "
                f"convert it with {name}.to(query.dtype)"
            )
    floating("log_token_precision", log_token_precision)
    shape("log_token_precision", log_token_precision, [batch, keys])
    if neighbour_variance is not None:
        shape("neighbour_variance", neighbour_variance, [batch, keys])
    if feature_weights is not None:
        width = value.shape[-1]
        shape("feature_weights", feature_weights, [heads, width])
    finite("log_token_precision", log_token_precision)


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
    value = _real(name, value)
    if not low < value <= high or value == torch.inf:
        end = f"{high:g}]" if high < torch.inf else "inf)"
        raise ValueError(
            f"{name}: expected a number in ({low:g}, {end}, got {value!r}"
        )
    return value


def within(
    name: str, value: object, low: float, high: float = torch.inf
) -> float:
    """Raise unless ``value`` is finite and low <= value <= high."""
    value = _real(name, value)
    if not low <= value <= high or value == torch.inf:
        end = f"{high:g}]" if high < torch.inf else "inf)"
        raise ValueError(
            f"{name}: expected a number in [{low:g}, {end}, got {value!r}"
        )
    return value


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number, got {type(value).__name__}"
        )
    return float(value)


def typed(config) -> None:
    """Raise TypeError unless each field of a dataclass is of its type.

    Fields may be numbers, strings, tuples of one kind, other dataclasses, and
    unions of these. What means the same becomes the same: NumPy's numbers are
    turned into Python's, an int into a float where one is expected, a list
    into a tuple. A bool is no number.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = _as(name, kind, getattr(config, name))
        object.__setattr__(config, name, value)


def _as(name: str, kind: Any, value: Any) -> Any:
    if get_origin(kind) is Literal:
        return choice(name, value, get_args(kind))
    union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if union else (kind,)
    truth = isinstance(value, bool | np.bool_)
    for each in kinds:
        if get_origin(each) is tuple and isinstance(value, list | tuple):
            return tuple(_as(name, get_args(each)[0], x) for x in value)
        if each is bool and truth:
            return bool(value)
        if each is int and isinstance(value, Integral) and not truth:
            return int(value)
        if each is float and isinstance(value, Real) and not truth:
            return float(value)
        other = each not in (int, float) and isinstance(each, type)
        if other and isinstance(value, each):
            return value
    said = " or ".join(
        "None" if each is NoneType else getattr(each, "__name__", str(each))
        for each in kinds
    )
    raise TypeError(f"{name}: expected {said}, got {value!r}")


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
