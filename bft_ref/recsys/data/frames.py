"""A frame of interactions, pandas' or polars', and the names in it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import narwhals as nw
import numpy as np
from numpy.typing import NDArray

from bft_ref.recsys.data.sequences import MILLISECONDS, Sequences

Label = int | str


@dataclass(frozen=True)
class Catalogue:
    """The names of items and users, and the ids that stand for them.

    ``items`` (n_items,): the first has id 1, since 0 is padding; ``users``
    (users,): the first has the first of the sequences. Each are whole numbers
    or strings, and 7 is not "7".
    Raises: TypeError for other labels, or labels of both kinds; ValueError
    for an empty one, or one that is there twice.
    """

    items: tuple[Label, ...]
    users: tuple[Label, ...]

    def __post_init__(self):
        for name in ("items", "users"):
            found = tuple(_labels(name, getattr(self, name), "at position"))
            object.__setattr__(self, name, found)
            if len(set(found)) < len(found):
                twice = next(x for x in found if found.count(x) > 1)
                raise ValueError(
                    f"{name}: expected each label once, got {twice!r} twice"
                )

    @cached_property
    def _item_ids(self) -> dict[Label, int]:
        return {label: i for i, label in enumerate(self.items, 1)}

    @cached_property
    def _user_indices(self) -> dict[Label, int]:
        return {label: u for u, label in enumerate(self.users)}

    def item_ids(self, labels: Iterable[Label]) -> list[int]:
        """The id of each label; 0 for one that is not in the catalogue.

        Raises: TypeError for labels of another kind than the catalogue's.
        """
        asked = self._asked("items", labels)
        return [self._item_ids.get(label, 0) for label in asked]

    def user_indices(self, labels: Iterable[Label]) -> list[int | None]:
        """The place of each user's sequence; None for one without any.

        Raises: TypeError for labels of another kind than the catalogue's.
        """
        asked = self._asked("users", labels)
        return [self._user_indices.get(label) for label in asked]

    def _asked(self, name: str, labels: Iterable[Label]) -> list[Label]:
        if isinstance(labels, str):
            raise TypeError(
                f"{name}: expected a list of labels, got {labels!r}"
            )
        known = getattr(self, name)
        like = type(known[0]) if known else None
        return _labels(name, labels, "at position", like)


def from_frame(
    frame: Any,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = "time",
) -> tuple[Sequences, Catalogue]:
    """Sequences of a frame with a row an interaction, and the names in it.

    ``user``, ``item`` and ``time`` are names of columns: of whole numbers or
    strings; of seconds or dates. Users and items are numbered as they first
    appear. A user's rows are put in the order of time; equal times keep the
    order of the rows, as all rows do where ``time`` is None. A row that is
    there twice counts twice; frame.drop_duplicates() or .unique() comes first
    where that is a fault.
    Raises: TypeError for what is no frame in memory, and for labels or times
    of another kind; ValueError for a frame without rows, a column that is not
    there, and a value that is missing. Rows are counted from 0.
    """
    try:
        table = nw.from_native(frame, eager_only=True)
    except TypeError:
        raise TypeError(
            "frame: expected a pandas or polars DataFrame, got "
            f"{type(frame).__name__}; of a LazyFrame, collect() makes one"
        ) from None
    columns = {"user": user, "item": item, "time": time}
    for name, column in columns.items():
        if column is not None and column not in table.columns:
            raise ValueError(
                f"{name}: expected one of the frame's columns, "
                f"{', '.join(map(str, table.columns))}; got {column!r}"
            )
    if not len(table):
        raise ValueError("frame: expected rows, got none")
    users, who = _numbered(table[user])
    items, what = _numbered(table[item])
    sequences = Sequences.grouped(
        who,
        what + 1,
        None if time is None else _seconds(table[time]),
        n_items=len(items),
        users=[str(label) for label in users],
        labels=["", *map(str, items)],
        name="frame",
    )
    return sequences, Catalogue(tuple(items), tuple(users))


def _numbered(column: nw.Series) -> tuple[list[Label], NDArray[np.int64]]:
    """The labels of a column as they first appear, and the place of each."""
    _complete(column)
    places: dict[Label, int] = {}
    rows = _labels(f"column {column.name!r}", column.to_list(), "in row")
    number = [places.setdefault(label, len(places)) for label in rows]
    return list(places), np.asarray(number)


def _complete(column: nw.Series) -> None:
    missing = column.is_null()
    if column.dtype.is_float():
        missing = missing | column.is_nan()
    if missing.any():
        raise ValueError(
            f"column {column.name!r}: expected a value in every row, got none "
            f"in row {missing.to_list().index(True)}; drop such rows first"
        )


def _labels(
    name: str, values: Iterable[Any], where: str, like: type | None = None
) -> list[Label]:
    """The values as Python's whole numbers, or as strings, all of a kind."""
    found: list[Label] = []
    for at, value in enumerate(values):
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole and not isinstance(value, str):
            raise TypeError(
                f"{name}: expected whole numbers or strings, got {value!r} "
                f"{where} {at}"
                + "; make whole numbers of them"
                * isinstance(value, float)
            )
        label = int(value) if whole else str(value)
        if label == "":
            raise ValueError(f"{name}: expected a label, got '' {where} {at}")
        like = like or type(label)
        if type(label) is not like:
            raise TypeError(
                f"{name}: expected {like.__name__} like the others, got "
                f"{label!r} {where} {at}"
            )
        found.append(label)
    return found


def _seconds(column: nw.Series) -> NDArray[np.float64]:
    """The seconds since 1970 of a column of such seconds, or of dates."""
    _complete(column)
    if column.dtype in (nw.Datetime, nw.Date):
        dates = column.cast(nw.Datetime) if column.dtype == nw.Date else column
        return dates.dt.timestamp("us").to_numpy() / 1e6
    if not column.dtype.is_numeric():
        raise TypeError(
            f"column {column.name!r}: expected seconds or dates, got "
            f"{column.dtype}; pandas.to_datetime or polars' str.to_datetime "
            "makes dates of text"
        )
    seconds = column.to_numpy().astype(np.float64)
    wrong = ~(np.abs(seconds) < MILLISECONDS)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"column {column.name!r}: expected finite seconds since 1970, got "
            f"{seconds[at]:g} in row {at}; divide milliseconds by 1000"
        )
    return seconds
