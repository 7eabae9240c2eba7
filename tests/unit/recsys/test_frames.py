"""A frame of interactions, pandas' and polars', becomes sequences."""

from datetime import UTC, date, datetime

import numpy as np
import pandas as pd
import polars as pl
import pytest

from bft_ref.recsys.data import Catalogue, Sequences, from_frame

KINDS = {"pandas": pd.DataFrame, "polars": pl.DataFrame}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
COLUMNS = {
    "user": ["bo", "al", "bo", "bo", "al", "bo"],
    "item": [70, 30, 30, 70, 50, 90],
    "time": [9, 2, 5, 9, 1, 9],
}


@each_kind
def test_rows_become_sequences_in_time(make):
    """Equal times in the order of the rows; what is twice counts twice."""
    sequences, catalogue = from_frame(make(COLUMNS))
    assert catalogue == Catalogue((70, 30, 50, 90), ("bo", "al"))
    assert [row.tolist() for row in sequences] == [[2, 1, 1, 4], [3, 2]]
    assert sequences.times.tolist() == [5, 9, 9, 9, 1, 2]
    assert sequences.n_items == 4
    assert sequences.labels == ["", "70", "30", "50", "90"]
    assert sequences.users == ["bo", "al"]
    names = catalogue.items
    assert all(type(label) is int for label in names)


@each_kind
def test_columns_have_any_name_and_times_may_be_missing(make):
    frame = make({"who": [2, 1, 2], "what": list("xyz"), "more": [0.0] * 3})
    sequences, catalogue = from_frame(
        frame, user="who", item="what", time=None
    )
    assert [row.tolist() for row in sequences] == [[1, 3], [2]]
    assert sequences.times is None
    assert catalogue == Catalogue(("x", "y", "z"), (2, 1))


@each_kind
@pytest.mark.parametrize(
    "dates",
    [
        [datetime(1970, 1, 2, 0, 0, 1, 500000), datetime(1970, 1, 1)],
        [
            datetime(1970, 1, 2, 0, 0, 1, 500000, tzinfo=UTC),
            datetime(1970, 1, 1, tzinfo=UTC),
        ],
        [86401.5, 0.0],
    ],
    ids=["naive", "utc", "seconds"],
)
def test_dates_are_seconds(make, dates):
    frame = make({"user": [1, 1], "item": [1, 2], "time": dates})
    sequences, _ = from_frame(frame)
    assert sequences.times.tolist() == [0.0, 86401.5]
    assert sequences[0].tolist() == [2, 1]


def test_days_are_seconds():
    frame = pl.DataFrame(
        {"user": [1, 1], "item": [1, 2], "time": [date(2000, 1, 1)] * 2}
    )
    assert from_frame(frame)[0].times.tolist() == [946684800.0] * 2


def test_the_index_of_pandas_says_nothing():
    frame = pd.DataFrame(COLUMNS, index=[5, 5, 0, 1, 2, 3])
    assert from_frame(frame)[1] == from_frame(pd.DataFrame(COLUMNS))[1]
    frame["item"] = frame["item"].astype("category")
    assert from_frame(frame)[1] == from_frame(pd.DataFrame(COLUMNS))[1]
    frame["item"] = frame["item"].astype("Int64")
    assert from_frame(frame)[1] == from_frame(pd.DataFrame(COLUMNS))[1]


def changed(make, column, values):
    return make(COLUMNS | {column: values})


@each_kind
@pytest.mark.parametrize(
    "column, values, error, said",
    [
        ("item", [7, 3, None, 7, 5, 9], ValueError, "none in row 2; drop"),
        ("user", ["a", None, *"bcde"], ValueError, "'user'.* none in row 1"),
        ("time", [1, 2, 3, None, 5, 6], ValueError, "'time'.* none in row 3"),
        (
            "time",
            [1.0, 2, 3, 4, 5, float("nan")],
            ValueError,
            "'time'.* none in row 5",
        ),
        (
            "item",
            [7.0, 3, 3, 7, 5, 9],
            TypeError,
            r"numbers or strings, got 7\.0 in row 0; make whole numbers",
        ),
        ("item", [True] * 6, TypeError, "got True in row 0"),
        ("item", ["a", "b", "", *"cde"], ValueError, "got '' in row 2"),
        ("time", list("abcdef"), TypeError, "seconds or dates, got String"),
        ("time", [True] * 6, TypeError, "seconds or dates, got Boolean"),
        ("time", [1, 2, 3, 4, 10**12, 6], ValueError, "in row 4; divide mill"),
        ("time", [1.0, np.inf, 3, 4, 5, 6], ValueError, "got inf in row 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(
    make, column, values, error, said
):
    with pytest.raises(error, match=said):
        from_frame(changed(make, column, values))


def test_numbers_and_strings_are_not_mixed():
    frame = changed(pd.DataFrame, "item", [7, 3, 3, "7", 5, 9])
    with pytest.raises(
        TypeError, match="column 'item': expected int .*, got '7' in row 3"
    ):
        from_frame(frame)


@each_kind
def test_what_is_no_such_frame_is_named(make):
    frame = make(COLUMNS)
    with pytest.raises(
        ValueError, match="time: expected one of .* user, item, time; got 'at'"
    ):
        from_frame(frame, time="at")
    with pytest.raises(ValueError, match="frame: expected rows, got none"):
        from_frame(frame[:0])
    for other in (COLUMNS, [1], pl.LazyFrame(COLUMNS), frame["item"]):
        with pytest.raises(TypeError, match="frame: expected a pandas or pol"):
            from_frame(other)


def test_a_catalogue_finds_ids_and_places():
    catalogue = Catalogue((7, np.int64(3)), ["x", "y"])
    assert catalogue == Catalogue((7, 3), ("x", "y"))
    assert catalogue.item_ids([3, 99, np.int32(7)]) == [2, 0, 1]
    assert catalogue.user_indices(["y", "z", "x"]) == [1, None, 0]
    assert catalogue.item_ids([]) == []


@pytest.mark.parametrize(
    "find, error, said",
    [
        (lambda c: c.item_ids(["7"]), TypeError, "items: expected int like"),
        (lambda c: c.item_ids([3.0]), TypeError, r"got 3\.0 at position 0"),
        (lambda c: c.item_ids([7, None]), TypeError, "None at position 1"),
        (lambda c: c.user_indices([1]), TypeError, "users: expected str like"),
        (lambda c: c.user_indices("x"), TypeError, "a list of labels, got"),
        (lambda c: Catalogue((1, "a"), ()), TypeError, "items: expected int"),
        (lambda c: Catalogue((), ("a", "a")), ValueError, "got 'a' twice"),
    ],
)
def test_a_label_of_another_kind_is_no_unknown_one(find, error, said):
    with pytest.raises(error, match=said):
        find(Catalogue((7, 3), ("x", "y")))


def test_rows_are_grouped_without_a_frame():
    found = Sequences.grouped([1, 0, 1, 1], [4, 5, 6, 3], n_items=6)
    assert [row.tolist() for row in found] == [[5], [4, 6, 3]]
    found = Sequences.grouped([2, 0], [1, 1], [0, 0], n_items=1)
    assert found.lengths.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="times: user 0, position 0"):
        Sequences.grouped([0], [1], [np.nan], n_items=1)
