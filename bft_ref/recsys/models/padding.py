"""Histories padded on either side, read as if padded on the right."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref.layer import LayerTrace
from bft_ref.support import checks


class Rows(NamedTuple):
    """Histories padded on the right, and the way back to how they were given.

    Shapes: ``items`` (B, T) ids; ``times`` (B, T) or None; ``back`` (B, T'),
    for each place that was given the one it has here, T where it was cut; None
    if nothing was moved.
    """

    items: Tensor
    times: Tensor | None
    back: Tensor | None

    def restore(self, x: Tensor, *dims: int) -> Tensor:
        """``x`` with the tokens along ``dims`` where they were given."""
        if self.back is None:
            return x
        for dim in dims:
            shape = [1] * x.dim()
            shape[0], shape[dim] = self.back.shape
            if self.back.shape[1] > x.shape[dim]:
                x = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim)
            x = x.take_along_dim(self.back.view(shape), dim)
        return x

    def restore_trace(self, trace: LayerTrace) -> LayerTrace:
        """A layer's internals with the tokens where they were given."""
        observation = self._restored(
            trace.observation, weights=(2, 3), n_eff=(2,)
        )
        rest = trace._replace(observation=None)  # type: ignore[arg-type]
        return self._restored(rest)._replace(observation=observation)

    def _restored(self, fields, **dims: tuple[int, ...]):
        found = {
            name: self.restore(x, *dims.get(name, (1,)))
            for name, x in fields._asdict().items()
            if x is not None
        }
        return fields._replace(**found)


class _Fault(NamedTuple):
    """Where something is wrong, and the words for it at (row, place)."""

    where: Tensor
    words: Callable[..., str]


def on_the_right(
    items: Tensor,
    times: Tensor | None = None,
    *,
    largest: int,
    max_length: int,
    empty: bool = True,
) -> Rows:
    """Checked histories, each moved to the left end, its padding (0) after it.

    Under ``torch.compile``, where values cannot be looked at, every row is
    moved; in eager mode only those of a batch that needs it.

    Shapes: ``items`` (B, T) of ids up to ``largest``; ``times`` (B, T) or
    None. Raises: TypeError for what is no tensor of integers; ValueError for
    another shape, another id, padding between two items, more than
    ``max_length`` items, times that are not finite or go back, and, unless
    ``empty``, for a history without an item.
    """
    _kinds(items, times)
    items = items.long()
    inside = items != 0
    faults = _faults(items, times, inside, largest, max_length, empty)
    late = ~inside[:, :1] & inside.any(1, keepdim=True)
    found = checks.anywhere(late, *(fault.where for fault in faults))
    cut = items.shape[1] > max_length
    if found is None and cut:
        raise ValueError(
            f"items: expected shape (B, T <= {max_length}), got "
            f"{tuple(items.shape)}; a compiled model cannot tell what to cut"
        )
    if found is not None:
        for bad, fault in zip(found[1:], faults, strict=True):
            if bad:
                raise ValueError(fault.words(*fault.where.nonzero()[0]))
        if not (found[0] or cut):
            return Rows(items, times, None)
    order = (~inside).byte().argsort(dim=1, stable=True)
    back = order.argsort(1).clamp(max=max_length)
    order = order[:, :max_length]
    times = None if times is None else times.gather(1, order)
    return Rows(items.gather(1, order), times, back)


def _kinds(items: Tensor, times: Tensor | None) -> None:
    """Raise for what is seen without looking at a value."""
    for name, x in [("items", items), ("times", times)]:
        if x is None and name == "times":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name}: expected a tensor (B, T), got {type(x).__name__}; "
                "bft_ref.recsys.models.as_batch makes one of histories"
            )
        if x.dtype == torch.bool or x.is_complex():
            raise TypeError(f"{name}: expected numbers, got {x.dtype}")
    if items.is_floating_point():
        raise TypeError(
            f"items: expected integer ids, got {items.dtype}; convert them "
            "with items.long()"
        )
    if items.dim() != 2:
        raise ValueError(
            f"items: expected shape (B, T), one row a history, got "
            f"{tuple(items.shape)}; items[None] is a batch of one"
        )
    if times is not None:
        checks.shape("times", times, items.shape)


def _faults(items, times, inside, largest, max_length, empty) -> list[_Fault]:
    """What may be wrong with the values, with the words for each."""
    count = inside.sum(1)
    begins = inside[:, 1:] & ~inside[:, :-1]
    again = begins & (begins.cumsum(1) + inside[:, :1] > 1)
    faults = [
        _Fault(
            (items < 0) | (items > largest),
            lambda row, at: (
                f"items: expected ids in 1…{largest}, or 0 for padding; got "
                f"{items[row, at]} in row {row} at position {at}"
            ),
        ),
        _Fault(
            again,
            lambda row, at: (
                "items: expected padding (0) at the ends of a row only, got "
                f"0 between items in row {row} at position {at}"
            ),
        ),
        _Fault(
            count > max_length,
            lambda row: (
                f"items: expected at most max_length={max_length} items in a "
                f"row, got {count[row]} in row {row}; keep the last ones, as "
                f"bft_ref.recsys.models.as_batch(histories, {max_length}) does"
            ),
        ),
    ]
    if not empty:
        faults.append(
            _Fault(
                count < 1,
                lambda row: (
                    f"items: expected at least one item in a row, got none in "
                    f"row {row}"
                ),
            )
        )
    if times is not None:
        # from here on neighbours of the dtype are more than a second apart
        floats = times.is_floating_point()
        exact = 2 / torch.finfo(times.dtype).eps if floats else torch.inf
        both = inside[:, 1:] & inside[:, :-1]
        faults += [
            _Fault(
                inside & ~times.isfinite(),
                lambda row, at: (
                    f"times: expected finite seconds, got {times[row, at]} in "
                    f"row {row} at position {at}"
                ),
            ),
            _Fault(
                inside & (times.abs() > exact),
                lambda row, at: (
                    f"times: expected seconds that {times.dtype} tells apart, "
                    f"got {times[row, at]:.0f} in row {row} at position {at}; "
                    "give float64, or seconds since each first item"
                ),
            ),
            _Fault(
                both & (times[:, 1:] < times[:, :-1]),
                lambda row, at: (
                    f"times: expected the oldest item first, got "
                    f"{times[row, at]}, then {times[row, at + 1]} in row "
                    f"{row} at position {at}"
                ),
            ),
        ]
    return faults
