"""Batches of sequences of similar length, the same for every resumed run."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bft_ref.recsys.data.sequences import Sequences
from bft_ref.support.checks import count, whole
from bft_ref.training.files import DataError


class Batch(NamedTuple):
    """Padded inputs and, at each position, the item asked for (0: none).

    Shapes: ``items``, ``target`` (B, T) ids; ``times`` (B, T) or None.
    """

    items: Tensor
    target: Tensor
    times: Tensor | None

    def to(self, device) -> "Batch":
        """The batch on another device."""
        times = None if self.times is None else self.times.to(device)
        return Batch(self.items.to(device), self.target.to(device), times)

    def share(self, rank: int, world: int) -> "Batch":
        """Every ``world``-th sequence, from ``rank`` on."""
        mine = slice(rank, None, world)
        times = None if self.times is None else self.times[mine]
        return Batch(self.items[mine], self.target[mine], times)


def windows(
    lengths: NDArray, max_length: int, every: bool
) -> tuple[NDArray, NDArray]:
    """(sequence, end) of each training window of at most max_length + 1 items.

    One a sequence, its end, or with ``every`` as many as it takes for each
    item to be a target once. Raises: ValueError for a max_length below 1.
    """
    lengths = whole("lengths", lengths)
    max_length = count("max_length", max_length, 1)
    if not every:
        asked = np.flatnonzero(lengths >= 2)
        return asked, lengths[asked]
    pairs = [
        (s, end)
        for s, n in enumerate(lengths)
        for end in range(n, 1, -max_length)
    ]
    found = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def pad_windows(
    sequences: Sequences, users: NDArray, end: NDArray, max_length: int
) -> tuple[NDArray, NDArray | None, NDArray]:
    """Up to ``max_length`` items before ``end``, padded on the right with 0.

    Returns items (B, T), times (B, T) or None, and the lengths (B,).
    Raises: ValueError for an ``end`` that is not within its user's sequence,
    a ``max_length`` below 1, or unequal numbers of users and ends; TypeError
    for a mask of users; IndexError for a user that is not there.
    """
    users, end = whole("users", users), whole("end", end)
    max_length = count("max_length", max_length, 1)
    if len(users) != len(end):
        raise ValueError(
            f"end: expected one a user, {len(users)}, got {len(end)}"
        )
    beyond = (end < 0) | (end > sequences.lengths[users])
    if beyond.any():
        at = int(np.argmax(beyond))
        raise ValueError(
            f"end: expected 0…{sequences.lengths[users[at]]} for user "
            f"{users[at]}, got {end[at]}"
        )
    n = np.minimum(end, max_length)
    width = int(n.max(initial=0))
    place = np.arange(width)
    index = (sequences.offsets[:-1][users] + end - n)[:, None] + place
    inside = place < n[:, None]
    index = np.where(inside, index, 0)
    items = np.where(inside, sequences.items[index], 0)
    times = None
    if sequences.times is not None:
        # Differences of seconds since 1970 do not fit float32.
        first = sequences.times[index[:, :1]]
        times = np.where(inside, sequences.times[index] - first, 0.0)
        times = times.astype(np.float32)
    return items, times, n


def count_batches(
    sequences: Sequences, max_length: int, batch_size: int, every: bool = False
) -> int:
    """How many :func:`training_batches` gives in an epoch.

    Raises: ValueError for a size or length below 1.
    """
    batch_size = count("batch_size", batch_size, 1)
    users, _ = windows(sequences.lengths, max_length, every)
    return -(-len(users) // batch_size)


def training_batches(
    sequences: Sequences,
    *,
    max_length: int,
    batch_size: int,
    rng: np.random.Generator,
    every_window: bool = False,
    mask_id: int | None = None,
    mask_rate: float = 0.3,
    last_rate: float = 0.1,
) -> Iterator[Batch]:
    """One epoch of batches, lengths alike within a batch, order random.

    Causal models predict each item from those before it. With ``mask_id``
    (cloze): items are hidden with probability ``mask_rate``, at least one a
    sequence, or, in a share ``last_rate`` of the sequences, the last alone,
    which is what the test asks. Equation (14.3).
    Raises: ValueError for a size or length below 1, a rate outside [0, 1], a
    ``mask_id`` that is an item or padding; DataError for sequences without a
    question; TypeError for a number that is not whole. All before the first
    batch.
    """
    max_length = count("max_length", max_length, 1)
    batch_size = count("batch_size", batch_size, 1)
    for name, rate in [("mask_rate", mask_rate), ("last_rate", last_rate)]:
        if not 0 <= rate <= 1:
            raise ValueError(f"{name}: expected in [0, 1], got {rate!r}")
    if mask_id is not None:
        mask_id = count("mask_id", mask_id, sequences.n_items + 1)
    if sequences.lengths.max(initial=0) < 2:
        raise DataError(
            sequences.name or "sequences",
            None,
            "no user has two items to train on, one to be asked for",
        )
    return _batches(
        sequences,
        max_length,
        batch_size,
        rng,
        every_window,
        mask_id,
        mask_rate,
        last_rate,
    )


def _batches(
    sequences,
    max_length,
    batch_size,
    rng,
    every_window,
    mask_id,
    mask_rate,
    last_rate,
):
    users, end = windows(sequences.lengths, max_length, every_window)
    order = rng.permutation(len(users))
    pool = 32 * batch_size
    groups = []
    for start in range(0, len(order), pool):
        alike = order[start : start + pool]
        lengths = end[alike].clip(max=max_length)
        alike = alike[np.argsort(lengths, kind="stable")]
        groups += np.split(alike, range(batch_size, len(alike), batch_size))
    for g in rng.permutation(len(groups)):
        rows = groups[g]
        width = max_length + (mask_id is None)
        items, times, n = pad_windows(sequences, users[rows], end[rows], width)
        if mask_id is None:
            target = items[:, 1:]
            items = np.where(target > 0, items[:, :-1], 0)
            times = None if times is None else times[:, :-1]
        else:
            hidden = rng.random(items.shape) < mask_rate
            last = np.arange(items.shape[1]) == n[:, None] - 1
            alone = rng.random(len(rows)) < last_rate
            hidden = np.where(alone[:, None], last, hidden & (items > 0))
            one = (rng.random(len(rows)) * n).astype(np.int64)
            none = ~hidden.any(1)
            hidden[none, one[none]] = True
            target = np.where(hidden, items, 0)
            items = np.where(hidden, mask_id, items)
        yield Batch(
            torch.from_numpy(items),
            torch.from_numpy(np.ascontiguousarray(target)),
            None if times is None else torch.from_numpy(times),
        )
