"""One container for all formats, and the leave-one-out split."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bft_ref.support.checks import choice, count, whole

SplitName = Literal["validation", "test"]
#: Seconds since 1970 reach this in the year 5138, milliseconds in 1973.
MILLISECONDS = 1e11


class Split(NamedTuple):
    """What a model may see, and what it is asked.

    ``history``: a :class:`Sequences` that ends just before the target;
    ``target`` (n,): the item to be ranked for each of ``users`` (n,);
    ``training``: the :class:`Sequences` a model is fitted on;
    ``frequency`` (n_items + 1,): interactions per item in ``training``.
    """

    training: "Sequences"
    history: "Sequences"
    users: NDArray[np.int64]
    target: NDArray[np.int64]
    frequency: NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Item sequences of many users, stored end to end.

    Shapes: ``items`` (N,) with ids 1…n_items in time order, ``offsets``
    (users + 1,): user u owns ``items[offsets[u]:offsets[u + 1]]``; ``times``
    (N,) in seconds, never falling within a user, or None. ``users``
    (users,) and ``labels`` (n_items + 1,), the first padding's, hold the
    names used by the file; ``sha256`` is the checksum of the file read.
    Lists will do for arrays. Raises: ValueError if offsets, ids, times or
    lengths contradict each other or numbers are not whole; TypeError for
    what is no number.
    """

    items: NDArray[np.int64]
    offsets: NDArray[np.int64]
    n_items: int
    times: NDArray[np.float64] | None = None
    users: Sequence[str] | None = None
    labels: Sequence[str] | None = None
    name: str = ""
    sha256: str = ""
    notes: dict = field(default_factory=dict)

    def __post_init__(self):
        items = whole("items", self.items)
        offsets = whole("offsets", self.offsets)
        n_items = count("n_items", self.n_items)
        if len(offsets) < 1 or offsets[0] != 0:
            raise ValueError("offsets: expected shape (users + 1,) from 0")
        if (np.diff(offsets) < 0).any() or offsets[-1] != len(items):
            raise ValueError(
                f"offsets: expected an increasing walk to {len(items)}, got "
                f"an end of {offsets[-1]}"
            )
        if len(items) and not 1 <= items.min() <= items.max() <= n_items:
            raise ValueError(
                f"items: expected ids in 1…{n_items}, got "
                f"{items.min()}…{items.max()}"
            )
        for name, names, n in [
            ("users", self.users, len(offsets) - 1),
            ("labels", self.labels, n_items + 1),
        ]:
            if names is not None and len(names) != n:
                raise ValueError(
                    f"{name}: expected {n} names, got {len(names)}"
                )
        times = None if self.times is None else self._seconds(items, offsets)
        for name, value in [
            ("items", items),
            ("offsets", offsets),
            ("n_items", n_items),
            ("times", times),
        ]:
            object.__setattr__(self, name, value)

    def _seconds(self, items, offsets) -> NDArray[np.float64]:
        """The checked times."""
        times = np.asarray(self.times)
        if times.shape != items.shape:
            raise ValueError(
                f"times: expected shape {items.shape}, got {times.shape}"
            )
        if len(times) and times.dtype.kind not in "iuf":
            raise TypeError(
                f"times: expected seconds as numbers, got {times.dtype}; of "
                "dates, .astype('datetime64[s]').astype(float) makes them"
            )
        times = times.astype(np.float64, copy=False)
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        falls = (np.diff(times) < 0) & (owner[1:] == owner[:-1])
        for fault, wrong in [
            ("expected finite numbers, got {now}", ~np.isfinite(times)),
            (
                "expected seconds, got {now:.0f}: divide milliseconds by 1000",
                np.abs(times) >= MILLISECONDS,
            ),
            (
                "expected them in order, got {now} after {before}; sort items "
                "and times by np.lexsort((times, np.repeat(np.arange(users), "
                "np.diff(offsets))))",
                np.concatenate([np.zeros(len(times[:1]), bool), falls]),
            ),
        ]:
            if wrong.any():
                at = int(np.argmax(wrong))
                user = owner[at]
                named = "" if self.users is None else f" ({self.users[user]})"
                said = fault.format(now=times[at], before=times[at - 1])
                raise ValueError(
                    f"times: user {user}{named}, position "
                    f"{at - offsets[user]}: {said}"
                )
        return times

    @classmethod
    def of(cls, sequences: Iterable[Iterable[int]], **given) -> "Sequences":
        """Pack an iterable of id sequences; ``n_items`` defaults to the max.

        Raises: as the constructor; TypeError for a user whose items have no
        order (a set) or are no list at all.

        >>> Sequences.of([[1, 2], [2]]).n_items
        2
        """
        rows = []
        for user, own in enumerate(sequences):
            unordered = isinstance(own, str | bytes | AbstractSet | Mapping)
            if unordered or not isinstance(own, Iterable):
                raise TypeError(
                    f"sequences: expected a list of item ids for user {user}, "
                    f"got {own!r:.60}"
                )
            ids = own if isinstance(own, np.ndarray) else list(own)
            rows.append(whole(f"items of user {user}", ids))
        lengths = [len(row) for row in rows]
        items = np.concatenate([np.empty(0, np.int64), *rows])
        given.setdefault("n_items", int(items.max(initial=0)))
        return cls(items, np.cumsum([0, *lengths], dtype=np.int64), **given)

    @classmethod
    def grouped(
        cls,
        user: ArrayLike,
        item: ArrayLike,
        time: ArrayLike | None = None,
        **given,
    ) -> "Sequences":
        """Sequences of (user, item, time) rows in any order.

        Users are 0, 1, …; a user's items are put in the
        order of time; equal times keep the order of the rows, as all rows do
        without times. Raises: as the constructor.

        >>> Sequences.grouped([1, 0, 1], [4, 5, 6], [9, 9, 8], n_items=6)[1]
        array([6, 4])
        """
        user, item = whole("user", user), whole("item", item)
        keys = (user,) if time is None else (np.asarray(time), user)
        order = np.lexsort(keys)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(user))])
        times = None if time is None else np.asarray(time)[order]
        return cls(item[order], offsets, times=times, **given)

    def __len__(self) -> int:
        """The number of users."""
        return len(self.offsets) - 1

    def __getitem__(self, user: int) -> NDArray[np.int64]:
        """The items of one user, in time order."""
        if not -len(self) <= user < len(self):
            raise IndexError(f"user: expected one of {len(self)}, got {user}")
        user %= len(self)
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Interactions per user, (users,)."""
        return np.diff(self.offsets)

    @property
    def frequency(self) -> NDArray[np.int64]:
        """Interactions per item, (n_items + 1,); entry 0 is padding's."""
        return np.bincount(self.items, minlength=self.n_items + 1)

    @property
    def density(self) -> float:
        """Interactions divided by users times items."""
        return len(self.items) / max(1, len(self) * self.n_items)

    def take(self, users: NDArray[np.int64]) -> "Sequences":
        """The same sequences for some of the users, given by position.

        Raises: TypeError for a mask, IndexError for a user that is not there.
        """
        users = whole("users", users)
        return self._cut(users, np.zeros(len(users), dtype=np.int64))

    def without_last(self, n: int) -> "Sequences":
        """Each sequence without its last ``n`` items (down to none).

        Raises: ValueError if n < 0, TypeError unless it is a whole number.
        """
        every = np.arange(len(self))
        return self._cut(every, np.minimum(self.lengths, count("n", n)))

    def _cut(self, users, dropped) -> "Sequences":
        kept = self.lengths[users] - dropped
        offsets = np.concatenate([[0], np.cumsum(kept)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], kept)
        index = np.repeat(self.offsets[:-1][users], kept) + within
        names = self.users
        return replace(
            self,
            items=self.items[index],
            offsets=offsets,
            times=None if self.times is None else self.times[index],
            users=None if names is None else [names[u] for u in users],
        )

    def split(self, split: SplitName = "validation") -> Split:
        """Leave one out: last item = test, last but one = validation.

        Both train on what lies before the last two items; a test
        history holds the validation item too. A user with fewer than three
        items is trained on whole and never asked, so that nothing is lost.
        Raises: ValueError for a split other than "validation" or "test".
        """
        choice("split", split, get_args(SplitName))
        lengths = self.lengths
        asked = np.flatnonzero(lengths >= 3)
        every = np.arange(len(self))
        training = self._cut(every, np.where(lengths >= 3, 2, 0))
        back = 2 if split == "validation" else 1
        history = self._cut(asked, np.full(len(asked), back))
        target = self.items[self.offsets[1:][asked] - back]
        return Split(training, history, asked, target, training.frequency)

    def describe(self) -> dict:
        """Name, counts, density and checksum, for a result's provenance."""
        return {
            "name": self.name,
            "users": len(self),
            "items": self.n_items,
            "interactions": len(self.items),
            "mean_length": round(float(self.lengths.mean()), 3),
            "density": self.density,
            "sha256": self.sha256,
            **({"notes": self.notes} if self.notes else {}),
        }
