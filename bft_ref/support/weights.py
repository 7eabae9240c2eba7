"""What depends on weights alone, found once while they stay as they are."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bft_ref.support.derivatives import reverse_mode_only

Found = TypeVar("Found")
SAMPLE = 2**14  # entries of a weight that are held against what they were
# by id: a weak reference to a tensor would keep it from being swapped
_found: dict[int, dict[Hashable, tuple[list[tuple], Any]]] = {}


def of_weights(
    key: Hashable,
    weights: Sequence[Tensor | None],
    compute: Callable[[], Found],
) -> Found:
    """``compute()``, remembered where nothing is differentiated or traced.

    It may depend on ``key`` and on ``weights``, the first of which is no
    None, and on nothing else. Only parameters on a CPU are trusted to be the
    same as long as they are: an effective weight, which a parametrisation or
    an adapter makes anew, is not, nor what a tracer or autocast looks at.
    It is forgotten when the first of them is trained, or at the first new
    find after that weight is gone.

    A weight is the same if it is the same tensor of the same memory, if
    PyTorch has counted no change, and if a sample of its entries, all of a
    small one, is what it was: ``weight.data`` is changed without a count.
    """
    if torch.compiler.is_compiling():
        return compute()
    given = [w for w in weights if w is not None]
    first = id(given[0])
    if not _lasting(given):
        _found.pop(first, None)
        return compute()
    slots = _found.setdefault(first, {})
    if key in slots and _same(slots[key][0], given):
        return slots[key][1]
    found = compute()
    slots[key] = [_mark(w) for w in given], found
    _forget_the_gone()
    return found


def _forget_the_gone() -> None:
    for first, slots in list(_found.items()):
        if any(marks[0][0].expired() for marks, _ in slots.values()):
            _found.pop(first, None)


def _lasting(weights: Sequence[Tensor]) -> bool:
    """Whether weights and what is made of them may be kept."""
    return not (
        torch.is_grad_enabled()
        or torch.jit.is_tracing()
        or _get_current_dispatch_mode() is not None
        or reverse_mode_only(*weights)
        or torch.is_autocast_enabled("cpu")
        or any(
            type(w) is not nn.Parameter
            or w.device.type != "cpu"
            or w.is_inference()
            for w in weights
        )
    )


def _mark(w: Tensor) -> tuple:
    # the weak reference keeps the storage's address from being used again
    return StorageWeakRef(w.untyped_storage()), _state(w), _sample(w).clone()


def _state(w: Tensor) -> tuple:
    place = (w.data_ptr(), w.storage_offset(), w.stride(), w.shape, w.dtype)
    return w._version, id(w), *place


def _sample(w: Tensor) -> Tensor:
    # an odd step, to meet each row and each column of a large matrix
    return w.detach().flatten()[:: w.numel() // SAMPLE | 1]


def _same(marks: list[tuple], weights: Sequence[Tensor]) -> bool:
    return len(marks) == len(weights) and all(
        place.cdata == w.untyped_storage()._cdata
        and state == _state(w)
        and torch.equal(sample, _sample(w))
        for (place, state, sample), w in zip(marks, weights, strict=True)
    )
