"""A key/value cache that carries the precision."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_State = tuple[Tensor, Tensor, Tensor, Tensor | None]


class KeyValueCache:
    """What later tokens need of earlier ones, for one layer.

    Keys and values (B, H_kv, S, d_h), log λ̄ (B, S) and the neighbours'
    normalised variances c (B, S) (None with the unit prior). Grows by
    :meth:`append`; ``length`` is S.
    """

    def __init__(self) -> None:
        self._state: _State | None = None

    @property
    def length(self) -> int:
        """Number of tokens stored."""
        return 0 if self._state is None else self._state[0].shape[-2]

    def append(
        self,
        key: Tensor,
        value: Tensor,
        log_token_precision: Tensor,
        neighbour_variance: Tensor | None,
    ) -> _State:
        """Store the newest tokens; return all of them.

        Raises: ValueError if batch, heads or prior differ from what is
        stored.
        """
        joined = self.joined(
            key, value, log_token_precision, neighbour_variance
        )
        self.keep(joined)
        return joined

    def joined(
        self,
        key: Tensor,
        value: Tensor,
        log_token_precision: Tensor,
        neighbour_variance: Tensor | None,
    ) -> _State:
        """What is stored and the newest tokens, which are not stored yet."""
        new = (key, value, log_token_precision, neighbour_variance)
        if self._state is not None:
            old_shape, shape = self._state[0].shape, key.shape
            if (*old_shape[:2], old_shape[3]) != (*shape[:2], shape[3]):
                raise ValueError(
                    "cache: expected keys of shape "
                    f"({old_shape[0]}, {old_shape[1]}, *, {old_shape[3]}), "
                    f"got {tuple(shape)}"
                )
            k, v, log, c = self._state
            if (c is None) != (neighbour_variance is None):
                raise ValueError(
                    "cache: expected tokens of layers with one prior_scale, "
                    "got those of 'unit' and of 'neighbours' together"
                )
            new = (
                torch.cat([k, key], -2),
                torch.cat([v, value], -2),
                torch.cat([log, log_token_precision], -1),
                None
                if c is None or neighbour_variance is None
                else torch.cat([c, neighbour_variance], -1),
            )
        return new

    def keep(self, joined: _State) -> None:
        """Store what :meth:`joined` gave."""
        self._state = joined


@contextmanager
def all_or_nothing(caches: Sequence[KeyValueCache]) -> Iterator[None]:
    """If what is done with the caches fails, they are as they were.

    Raises: TypeError for what is no cache, ValueError for one cache twice.
    """
    for i, each in enumerate(caches):
        if not isinstance(each, KeyValueCache):
            raise TypeError(
                f"cache: expected a KeyValueCache, got {type(each).__name__}"
            )
        if any(each is other for other in caches[:i]):
            raise ValueError(
                "caches: expected one of its own for each layer, got the same "
                "twice; make them with make_caches()"
            )
    before = [cache._state for cache in caches]
    try:
        yield
    except BaseException:
        for cache, state in zip(caches, before, strict=True):
            cache._state = state
        raise
