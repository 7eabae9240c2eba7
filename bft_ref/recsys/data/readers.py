"""Readers: one file in, one checked :class:`Sequences` out, nothing lost.

Every fault is a named error with the file and, where the format has lines,
the line number. Interactions with equal timestamps keep the order of the
file (a stable sort), so that reading is reproducible. A byte-order mark, any
kind of line end and space around a field are no part of it; an invisible
character or quotes, which would make two users of one, are refused.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import Literal

import numpy as np

from bft_ref.recsys.data.errors import (
    DuplicateError,
    EmptyUserError,
    ItemRangeError,
)
from bft_ref.recsys.data.sequences import MILLISECONDS, Sequences
from bft_ref.support.checks import count
from bft_ref.training.files import MalformedLineError, text_file


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, fields between tabs) of each line."""
    with text_file(path) as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for row in rows:
                yield rows.line_num, [field.strip() for field in row]
        except csv.Error as error:
            raise MalformedLineError(path, rows.line_num, str(error)) from None


def _unique(path: Path, line: int | None, what: str, pairs: list) -> dict:
    """A JSON object, of whose equal names the parser would keep the last.

    Names that only differ in the space around them are equal.
    """
    found: dict = {}
    for name, value in pairs:
        if name.strip() in found:
            raise DuplicateError(path, line, f"{what} {name} is given twice")
        found[name.strip()] = value
    return found


def _name(path: Path, line: int | None, what: str, text: object) -> str:
    """A user's or an item's name, without the space around it."""
    if not isinstance(text, str) or not text.strip():
        raise MalformedLineError(
            path, line, f"expected the name of {what}, got {shortened(text)}"
        )
    name = text.strip()
    if not name.isprintable():
        raise MalformedLineError(
            path, line, f"an invisible character in {what} {shortened(name)}"
        )
    if len(name) > 1 and name[0] == name[-1] == '"':
        raise MalformedLineError(
            path, line, f"{what} {shortened(name)}: expected no quotes"
        )
    return name


def _number(value: object) -> float:
    """A plain decimal number; NaN for all else that Python would read."""
    try:
        text = str(value)
        return float(text if text.isascii() and "_" not in text else "nan")
    except ValueError:
        return np.nan


def _seconds(path: Path, line: int, value: object) -> float:
    seconds = _number(value)
    if not np.isfinite(seconds):
        raise MalformedLineError(
            path,
            line,
            "expected a finite number as the timestamp, got "
            + shortened(value)
            + " (is this line a header?)" * (line == 1),
        )
    if abs(seconds) >= MILLISECONDS:
        raise MalformedLineError(
            path,
            line,
            f"expected a timestamp in seconds, got {value}: divide "
            "milliseconds by 1000",
        )
    return seconds


def _most(n_items: int | None) -> int | None:
    return None if n_items is None else count("n_items", n_items, 1)


def _in_range(path, line, item: int, first: int, n_items: int | None) -> int:
    most = np.iinfo(np.int64).max if n_items is None else n_items
    last = most + first - 1
    if not first <= item <= last:
        raise ItemRangeError(
            path, line, f"item id {item}, expected {first}…{last}"
        )
    return item - first + 1


def read_s3rec(path: str | Path, *, n_items: int | None = None) -> Sequences:
    """S3-Rec text: one user a line, ``user item item …``, ids from 1.

    Items a user repeats are kept: without timestamps a repeat is no fault.
    ``n_items`` is the size of the catalogue, by default the largest id.
    Raises: MalformedLineError, DuplicateError (a user on two lines),
    EmptyUserError (also a file without users), ItemRangeError, each with its
    line number.
    """
    path, n_items = Path(path), _most(n_items)
    users: dict[str, int] = {}
    rows: list[list[int]] = []
    with text_file(path) as lines:
        for number, line in enumerate(lines, 1):
            user, *fields = line.split() or [""]
            if not user:
                raise MalformedLineError(path, number, "an empty line")
            if line[0].isspace():
                raise MalformedLineError(
                    path, number, "expected a user first, got space"
                )
            user = _name(path, number, "user", user)
            if user in users:
                raise DuplicateError(
                    path,
                    number,
                    f"user {user} was already given on line {users[user]}; "
                    "a user's items belong on one line, in time order",
                )
            if not fields:
                raise EmptyUserError(path, number, f"user {user} has no items")
            for field in fields:
                if not re.fullmatch("-?[0-9]{1,4000}", field):
                    raise MalformedLineError(
                        path,
                        number,
                        "expected whole numbers as item ids, got "
                        f"{shortened(field)}",
                    )
            row = [int(field) for field in fields]
            rows.append([_in_range(path, number, i, 1, n_items) for i in row])
            users[user] = number
    return _pack(path, rows, list(users), n_items)


def read_letter(path: str | Path, *, n_items: int | None = None) -> Sequences:
    """LETTER / LC-Rec JSON: ``{"user": [item, …]}`` in time order, ids from 0.

    Ids are shifted by one, since 0 is padding here. ``n_items`` is the size
    of the catalogue, by default what the largest id needs.
    Raises: MalformedLineError (with the line number if it is no JSON),
    DuplicateError, EmptyUserError, ItemRangeError (naming the user).
    """
    path, n_items = Path(path), _most(n_items)
    unique = partial(_unique, path, None, "user")
    with text_file(path) as file:
        text = file.read()
    try:
        content = json.loads(text, object_pairs_hook=unique)
    except DuplicateError:
        raise
    except json.JSONDecodeError as error:
        raise MalformedLineError(path, error.lineno, error.msg) from None
    except (ValueError, RecursionError) as error:
        raise MalformedLineError(path, None, str(error)) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise MalformedLineError(path, 1, f"expected an object, got a {kind}")
    rows = []
    for user, items in content.items():
        _name(path, None, "user", user)
        if not isinstance(items, list) or any(
            type(item) is not int for item in items
        ):
            raise MalformedLineError(
                path,
                None,
                f"user {user}: expected a list of whole numbers, got "
                f"{shortened(items)}",
            )
        if not items:
            raise EmptyUserError(path, None, f"user {user} has no items")
        rows.append([_in_range(path, None, i, 0, n_items) for i in items])
    return _pack(path, rows, list(content), n_items)


def _pack(path, rows, users, n_items) -> Sequences:
    if not rows:
        raise EmptyUserError(path, None, "the file holds no interactions")
    given = {} if n_items is None else {"n_items": n_items}
    return Sequences.of(
        rows, users=users, name=path.stem, sha256=_sha256(path), **given
    )


def read_movielens(path: str | Path, **options) -> Sequences:
    """MovieLens ``u.data``: user, item, rating, timestamp between tabs.

    Options and errors as in :func:`interactions`.
    """
    path = Path(path)

    def parse():
        for line, row in _table(path):
            if len(row) != 4:
                raise MalformedLineError(
                    path,
                    line,
                    f"expected 4 fields between tabs, got {len(row)}",
                )
            user, item, rating, time = row
            if _number(rating) > 10:
                raise MalformedLineError(
                    path,
                    line,
                    f"expected a rating of at most 10, got {rating}; the "
                    "order is user, item, rating, timestamp",
                )
            yield line, user, item, time

    return interactions(path, parse(), **options)


def _header(path: Path, fields: list[str]) -> list[str]:
    """The names of a RecBole header, which say how to read the lines."""
    names = [field.split(":")[0] for field in fields]
    missing = {"user_id", "item_id"} - set(names)
    twice = [name for name in names if names.count(name) > 1]
    several = [
        field
        for name, field in zip(names, fields, strict=True)
        if name in ("user_id", "item_id", "timestamp")
        and field.endswith("_seq")
    ]
    times = [
        name
        for name in names
        if "timestamp" in name.lower()
        or name.lower() in ("time", "date", "datetime")
    ]
    if missing:
        fault = (
            f"the header lacks {', '.join(sorted(missing))}; "
            f"it has {', '.join(names) or 'nothing'}"
        )
    elif twice:
        fault = f"the header has {twice[0]} more than once"
    elif several:
        fault = f"expected one id or time a line, got {several[0]}"
    elif times and "timestamp" not in names:
        fault = f"expected the time under the name timestamp, got {times[0]}"
    else:
        return names
    raise MalformedLineError(path, 1, fault)


def read_recbole(path: str | Path, **options) -> Sequences:
    """RecBole ``.inter``: a header of ``name:type``, then fields by tabs.

    Needs user_id and item_id; timestamp orders a user's items, and without
    it the order of the file does. A time under another name and a sequence
    as user, item or time are refused. Options and errors:
    :func:`interactions`.
    """
    path = Path(path)

    def parse():
        rows = _table(path)
        _, names = next(rows, (1, []))
        header = _header(path, names)
        for line, row in rows:
            if len(row) != len(header):
                raise MalformedLineError(
                    path,
                    line,
                    f"expected {len(header)} fields, got {len(row)}",
                )
            field = dict(zip(header, row, strict=True))
            yield (
                line,
                field["user_id"],
                field["item_id"],
                field.get("timestamp"),
            )

    return interactions(path, parse(), **options)


def read_amazon(path: str | Path, *, core: int = 5, **options) -> Sequences:
    """Amazon reviews, JSON lines (2014 and 2018), plain or gzipped.

    Keeps the ``core``-core: see :func:`k_core`. The 2018 files hold the same
    review more than once: pass ``duplicates="drop"`` for them; what was
    dropped is counted in ``notes``. Errors: :func:`interactions`.
    """
    path = Path(path)
    needed = ("reviewerID", "asin", "unixReviewTime")

    def parse():
        with text_file(path) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    review = json.loads(
                        line,
                        object_pairs_hook=partial(
                            _unique, path, number, "field"
                        ),
                    )
                    user, item, time = (review[name] for name in needed)
                except json.JSONDecodeError as error:
                    raise MalformedLineError(
                        path, number, f"not a JSON object: {error.msg}"
                    ) from None
                except (KeyError, TypeError):
                    raise MalformedLineError(
                        path, number, f"expected {', '.join(needed)}"
                    ) from None
                except DuplicateError:
                    raise
                except (ValueError, RecursionError) as error:
                    raise MalformedLineError(
                        path, number, str(error)
                    ) from None
                if time is None:
                    raise MalformedLineError(
                        path, number, "expected a time, got null"
                    )
                yield number, user, item, time

    return interactions(path, parse(), core=core, **options)


def interactions(
    path: str | Path,
    rows: Iterable[tuple[int, str, str, str | float | None]],
    *,
    core: int = 0,
    duplicates: str = "error",
    n_items: int | None = None,
) -> Sequences:
    """Sequences from (line, user, item, time) rows in any order.

    Users and items are numbered by first appearance in the file, before any
    filtering; equal times keep the file's order. Times are seconds, on all
    rows or (None) on none. ``duplicates`` says what the same user, item and
    time on two lines is: "error", "keep" or "drop" (counted in ``notes``);
    without times a repeat is kept. ``core`` > 0 keeps the k-core; ``n_items``
    is the most items that may appear.
    Raises: MalformedLineError (a time that is no finite number, or in
    milliseconds; a name that is empty, quoted, has invisible characters, or
    is there as 12 and as 12.0), DuplicateError, ItemRangeError (more items
    than ``n_items``),
    EmptyUserError (a file without rows).
    """
    core, n_items = count("core", core), _most(n_items)
    if duplicates not in ("error", "keep", "drop"):
        raise ValueError(
            f"duplicates: expected error, keep or drop, got {duplicates!r}"
        )
    path = Path(path)
    users: dict[str, int] = {}
    labels: dict[str, int] = {}
    first: dict[tuple, int] = {}
    user, item, dropped = [], [], 0
    time: list[float | None] = []
    for line, who, what, when in rows:
        who = _name(path, line, "user", who)
        what = _name(path, line, "item", what)
        when = None if when is None else _seconds(path, line, when)
        if time and (when is None) != (time[0] is None):
            raise MalformedLineError(
                path, line, "expected a time on every line or on none"
            )
        key = (who, what, when)
        if when is not None and duplicates != "keep":
            if key in first and duplicates == "error":
                raise DuplicateError(
                    path,
                    line,
                    f"user {who}, item {what} and time {when:.0f} were "
                    f"already given on line {first[key]}",
                )
            if key in first:
                dropped += 1
                continue
            first[key] = line
        full = n_items is not None and len(labels) >= n_items
        if full and what not in labels:
            raise ItemRangeError(
                path, line, f"item {what} is one more than {n_items} items"
            )
        user.append(users.setdefault(who, len(users)))
        item.append(labels.setdefault(what, len(labels)) + 1)
        time.append(when)
    if not user:
        raise EmptyUserError(path, None, "the file holds no interactions")
    for names in (users, labels):
        for name in names:
            bare = name.removesuffix(".0")
            if bare != name and bare in names:
                raise MalformedLineError(
                    path, None, f"expected one name, got {bare} and {name}"
                )
    found = Sequences.grouped(
        user,
        item,
        None if time[0] is None else np.asarray(time, dtype=np.float64),
        n_items=len(labels),
        users=list(users),
        labels=["", *labels],
        name=path.stem,
        sha256=_sha256(path),
        notes={"duplicates_dropped": dropped} if dropped else {},
    )
    return k_core(found, core) if core else found


def k_core(sequences: Sequences, k: int) -> Sequences:
    """The largest part where every user and every item has k interactions.

    Users and items below k are removed in turn until none is left below;
    the result does not depend on the order. Remaining items are numbered
    anew in the old order; ``notes`` counts what was removed.
    Raises: ValueError if k < 1, or if nothing is left; TypeError unless k is
    a whole number.
    """
    k = count("k", k, 1)
    owner = np.repeat(np.arange(len(sequences)), sequences.lengths)
    kept = np.ones(len(owner), dtype=bool)
    while True:
        per_user = np.bincount(owner[kept], minlength=len(sequences))
        per_item = np.bincount(
            sequences.items[kept], minlength=sequences.n_items + 1
        )
        good = kept & (per_user[owner] >= k) & (per_item[sequences.items] >= k)
        if good.sum() == kept.sum():
            break
        kept = good
    if not kept.any():
        raise ValueError(f"k: the {k}-core of {sequences.name!r} is empty")
    users = np.flatnonzero(per_user)
    items = np.flatnonzero(per_item)
    number = np.zeros(sequences.n_items + 1, dtype=np.int64)
    number[items] = np.arange(1, len(items) + 1)
    return Sequences(
        number[sequences.items[kept]],
        np.concatenate([[0], np.cumsum(per_user[users])]),
        n_items=len(items),
        times=None if sequences.times is None else sequences.times[kept],
        users=sequences.users and [sequences.users[int(u)] for u in users],
        labels=sequences.labels
        and ["", *(sequences.labels[int(i)] for i in items)],
        name=sequences.name,
        sha256=sequences.sha256,
        notes={
            **sequences.notes,
            "core": k,
            "core_dropped": int((~kept).sum()),
        },
    )


Format = Literal["s3rec", "letter", "movielens", "recbole", "amazon"]
#: The public sets are s3rec, letter and recbole. The others are for a
#: reader's own download: GroupLens' and Amazon's files as they are published.
READERS: dict[str, Callable[..., Sequences]] = {
    "s3rec": read_s3rec,
    "letter": read_letter,
    "movielens": read_movielens,
    "recbole": read_recbole,
    "amazon": read_amazon,
}


def guess_format(path: Path) -> str:
    """The reader's name for a file name.

    Raises: ValueError if the name says nothing.
    """
    name = path.name.removesuffix(".gz")
    for ending, reader in [
        (".inter.json", "letter"),
        (".inter", "recbole"),
        ("u.data", "movielens"),
        (".json", "amazon"),
        (".jsonl", "amazon"),
        (".txt", "s3rec"),
    ]:
        if name.endswith(ending):
            return reader
    raise ValueError(
        f"format: cannot tell the format of {path.name!r}; pass one of "
        f"{', '.join(READERS)}"
    )
