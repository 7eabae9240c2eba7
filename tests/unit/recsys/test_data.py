"""Readers, splits, downloads and the generator, on files made here."""

import gzip
import hashlib
import itertools
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filterpy.kalman import KalmanFilter
from hypothesis import given
from hypothesis import strategies as st
from scipy import linalg, special, stats

from bft_ref.recsys import data
from bft_ref.recsys.data import datasets
from bft_ref.recsys.data.readers import guess_format, interactions
from bft_ref.recsys.data.sequences import Sequences
from bft_ref.training import files


def lists(sequences):
    return [sequences[u].tolist() for u in range(len(sequences))]


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_s3rec_reads_every_item(write):
    path = write("a.txt", "u1 1 2 3 2\nu2 4 1\n")
    found = data.read_s3rec(path)
    assert lists(found) == [[1, 2, 3, 2], [4, 1]]
    assert (found.n_items, list(found.users)) == (4, ["u1", "u2"])
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.frequency.tolist() == [0, 2, 2, 1, 1]
    assert found.density == pytest.approx(6 / 8)


@pytest.mark.parametrize(
    "text, error, line",
    [
        ("a 1 2\na 3\n", data.DuplicateError, 2),
        ("a 1 2\nb\n", data.EmptyUserError, 2),
        ("a 1 2\n\nb 1\n", data.MalformedLineError, 2),
        ("a 1 2\nb 1 x\n", data.MalformedLineError, 2),
        ("a 1 2\nb 1 2.0\n", data.MalformedLineError, 2),
        ("a 1 2\nb 1 1_2\n", data.MalformedLineError, 2),
        ("a 1 2\nb 1 \uff12\n", data.MalformedLineError, 2),
        ("a 1 2\n 1 2 3\n", data.MalformedLineError, 2),
        ("a 1 2\n\ufeffb 1\n", data.MalformedLineError, 2),
        ("a 1 2\nb\u200b 1\n", data.MalformedLineError, 2),
        ('a 1 2\n"b" 1\n', data.MalformedLineError, 2),
        ("a 1 2\nb 0 1\n", data.ItemRangeError, 2),
        ("a 1 2\nb 1 -3\n", data.ItemRangeError, 2),
        ("a 1 2\nb 1 6\n", data.ItemRangeError, 2),
        ("a 1 2\nb 1 " + "9" * 30, data.ItemRangeError, 2),
        ("a 1 2\nb 1 " + "9" * 5000, data.MalformedLineError, 2),
    ],
)
def test_s3rec_faults_name_file_and_line(write, text, error, line):
    path = write("bad.txt", text)
    with pytest.raises(error, match=rf"bad\.txt, line {line}: ") as caught:
        data.read_s3rec(path, n_items=5)
    assert caught.value.line == line


def test_letter_shifts_ids_by_one(write):
    found = data.read_letter(write("x.inter.json", '{"0": [0, 2], "1": [1]}'))
    assert lists(found) == [[1, 3], [2]]


@pytest.mark.parametrize(
    "text, error, said",
    [
        ('{"0": [0],\n"1": [1}', data.MalformedLineError, "line 2"),
        ('{"0": [0], "0": [1]}', data.DuplicateError, "user 0"),
        ('{"0": [0], "0 ": [1]}', data.DuplicateError, "user 0"),
        ('{" ": [0]}', data.MalformedLineError, "name of user"),
        ('{"a\u200b": [0]}', data.MalformedLineError, "invisible"),
        ('{"7": ["1", "2"]}', data.MalformedLineError, "got .'1', '2'"),
        ('{"7": [true]}', data.MalformedLineError, "got .True"),
        ('{"7": []}', data.EmptyUserError, "user 7"),
        ('{"7": [1.5]}', data.MalformedLineError, "user 7"),
        ('{"7": [-1]}', data.ItemRangeError, "item id -1"),
        ('{"7": [3]}', data.ItemRangeError, "item id 3"),
        ("[1, 2]", data.MalformedLineError, "expected an object"),
        ('{"7": [' + "9" * 5000 + "]}", data.MalformedLineError, "digits"),
        ("[" * 100_000, data.MalformedLineError, ""),
        ("{}", data.EmptyUserError, "no interactions"),
    ],
)
def test_letter_faults(write, text, error, said):
    with pytest.raises(error, match=rf"x\.inter\.json.*{said}"):
        data.read_letter(write("x.inter.json", text), n_items=3)


def test_an_id_beyond_64_bits_is_out_of_range(write):
    with pytest.raises(data.ItemRangeError, match="a.txt, line 1: item id"):
        data.read_s3rec(write("a.txt", f"a 1 {2**63}\n"))
    with pytest.raises(data.ItemRangeError, match="b.json: item id"):
        data.read_letter(write("b.json", f'{{"a": [{2**63 - 1}]}}'))


def test_movielens_sorts_by_time_and_keeps_the_order_of_ties(write):
    rows = ["1\t50\t5\t300", "1\t40\t3\t100", "2\t50\t1\t7"]
    ties = ["1\t60\t3\t200", "1\t30\t3\t200", "1\t70\t3\t200"]
    found = data.read_movielens(write("u.data", "\n".join(rows + ties)))
    names = [[found.labels[i] for i in row] for row in lists(found)]
    assert names == [["40", "60", "30", "70", "50"], ["50"]]
    assert found.times.tolist() == [100, 200, 200, 200, 300, 7]


@pytest.mark.parametrize(
    "text, error, line",
    [
        ("1\t2\t3\t4\n1\t2\t3\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t3\tnoon\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t3\tnan\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n\t3\t3\t4\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t3\t1_0\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t3\t\uff14\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t3\t1.6e12\n", data.MalformedLineError, 2),
        ("1\t2\t3\t4\n1\t3\t97865\t3\n", data.MalformedLineError, 2),
        ('1\t2\t3\t4\n1\t"3"\t3\t4\n', data.MalformedLineError, 2),
        ("user\titem\trating\ttimestamp\n", data.MalformedLineError, 1),
        ("1\t2\t3\t4\n1\t3\t3\t4\n1\t2\t5\t4", data.DuplicateError, 3),
        ("1\t2\t3\t4\n1\t3\t3\t4\n1\t4\t3\t4", data.ItemRangeError, 3),
    ],
)
def test_movielens_faults(write, text, error, line):
    with pytest.raises(error, match=f"line {line}"):
        data.read_movielens(write("u.data", text), n_items=2)


def test_a_field_without_an_end_is_an_error(write):
    text = "1\t2\t3\t4\n1\t" + "2" * 200_000 + "\t3\t4\n"
    with pytest.raises(data.MalformedLineError, match="u.data, line 2"):
        data.read_movielens(write("u.data", text))


def test_an_empty_file_is_an_error(write):
    for name, read in data.READERS.items():
        if name not in ("letter", "recbole"):  # no JSON, no header
            with pytest.raises(data.EmptyUserError, match="d.x.*no inter"):
                read(write("d.x", ""))


TABLE = "a\tx\t3\t4\nb\ty\t3\t4\nc\tz\t3\t4\n"
THREE_LINES = {
    "s3rec": "a 1 2\nb 1\nc 2\n",
    "letter": '{"a":\n[1, 2],\n"b": [1]}\n',
    "movielens": TABLE,
    "recbole": "user_id\titem_id\trating\ttimestamp\n" + TABLE[8:],
    "amazon": "".join(
        json.dumps({"reviewerID": "a", "asin": x, "unixReviewTime": 1}) + "\n"
        for x in "xyz"
    ),
}

CORELESS = {"amazon": {"core": 0}}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", THREE_LINES)
def test_marks_line_ends_and_outer_space_are_no_part_of_a_file(
    tmp_path, name, packed
):
    plain = THREE_LINES[name]
    path = tmp_path / ("d.x.gz" if packed else "d.x")

    def read(text):
        content = text.encode()
        path.write_bytes(gzip.compress(content) if packed else content)
        found = data.READERS[name](path, **CORELESS.get(name, {}))
        return lists(found), found.users, found.labels, found.n_items

    expected = read(plain)
    for text in [
        "\ufeff" + plain,
        plain.replace("\n", "\r\n"),
        plain.replace("\n", "\r"),
        plain.replace("\n", " \n"),
        plain.replace("\t", " \t "),
        plain.removesuffix("\n"),
    ]:
        assert read(text) == expected


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", THREE_LINES)
def test_bytes_that_are_no_utf8_are_named_with_their_line(
    tmp_path, name, packed
):
    content = THREE_LINES[name].encode() + "é".encode("latin-1")
    path = tmp_path / ("d.x.gz" if packed else "d.x")
    path.write_bytes(gzip.compress(content) if packed else content)
    said = f"{path.name}, line 4: not UTF-8"
    with pytest.raises(data.MalformedLineError, match=said):
        data.READERS[name](path)


@pytest.mark.parametrize("fault", ["text", "end", "middle"])
@pytest.mark.parametrize("name", THREE_LINES)
def test_what_is_no_gzip_is_named(tmp_path, name, fault):
    whole = gzip.compress(THREE_LINES[name].encode())
    path = tmp_path / "d.gz"
    path.write_bytes(
        {
            "text": THREE_LINES[name].encode(),
            "end": whole[:-4],
            "middle": whole[:10] + b"\xff" * 20,
        }[fault]
    )
    with pytest.raises(data.MalformedLineError, match="d.gz: not gzip"):
        data.READERS[name](path)


def test_recbole_goes_by_the_header(write):
    text = (
        "timestamp:float\titem_id:token\tuser_id:token\n"
        "20\tb\tx\n10\ta\tx\n5\tb\ty\n"
    )
    found = data.read_recbole(write("d.inter", text))
    assert lists(found) == [[2, 1], [1]]
    assert list(found.labels) == ["", "b", "a"]


def test_recbole_without_time_keeps_the_file_order(write):
    text = "user_id:token\titem_id:token\nx\tb\ny\tb\nx\ta\n"
    found = data.read_recbole(write("d.inter", text))
    assert lists(found) == [[1, 2], [1]] and found.times is None


@pytest.mark.parametrize(
    "text, said",
    [
        ("user_id:token\trating:float\nx\t3\n", "line 1.*lacks item_id"),
        ("", "line 1.*lacks item_id, user_id"),
        ("user_id\titem_id\tuser_id\nx\ty\tz\n", "user_id more than once"),
        ("user_id\titem_id:token_seq\nx\ty z\n", "one id.*item_id:token_seq"),
        ("user_id\titem_id\ttime:float\nx\ty\t3\n", "timestamp, got time"),
        ("user_id\titem_id\tTimestamp\nx\ty\t3\n", "got Timestamp"),
        ("user_id:token\titem_id:token\nx\tb\tc\n", "line 2.*2 fields"),
    ],
)
def test_recbole_faults(write, text, said):
    with pytest.raises(data.MalformedLineError, match=said):
        data.read_recbole(write("d.inter", text))


def reviews(rows):
    names = ("reviewerID", "asin", "unixReviewTime")
    return "".join(
        json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows
    )


def test_amazon_keeps_the_core_and_counts_what_it_drops(tmp_path):
    rows = [(u, i, 10 * t) for u in "ab" for t, i in enumerate("xyz")]
    rows += [("c", "x", 1), ("a", "rare", 5)]
    path = tmp_path / "r.json.gz"
    with gzip.open(path, "wt") as file:
        file.write(reviews(rows))
    found = data.read_amazon(path, core=2)
    assert lists(found) == [[1, 2, 3], [1, 2, 3]]
    assert list(found.labels) == ["", "x", "y", "z"]
    assert found.notes == {"core": 2, "core_dropped": 2}
    assert len(found.items) + found.notes["core_dropped"] == len(rows)


def test_amazon_duplicates_are_an_error_unless_asked(write):
    path = write("r.json", reviews([("a", "x", 1), ("a", "x", 1)]))
    with pytest.raises(data.DuplicateError, match="line 2.*on line 1"):
        data.read_amazon(path, core=1)
    kept = data.read_amazon(path, core=1, duplicates="keep")
    assert lists(kept) == [[1, 1]]
    dropped = data.read_amazon(path, core=1, duplicates="drop")
    assert lists(dropped) == [[1]]
    assert dropped.notes["duplicates_dropped"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"asin": "x"}',
        "3",
        "9" * 5000,
        "[" * 100_000,
        reviews([(["a"], "x", 1)]),
        reviews([("a", {"x": 1}, 1)]),
        reviews([(7, "x", 1)]),
        reviews([("a", "x", None)]),
        reviews([("a", "x", True)]),
        reviews([("a", "x", 1_399_939_200_000)]),
        reviews([("", "x", 1)]),
        reviews([("a", "x\ufeff", 1)]),
        reviews([("a", "x", [1])]),
        reviews([("a", "x", 10**400)]),
    ],
)
def test_amazon_faults(write, line):
    path = write("r.json", reviews([("a", "x", 1)]) + line + "\n")
    with pytest.raises(data.MalformedLineError, match="r.json, line 2: "):
        data.read_amazon(path)


def test_a_field_given_twice_is_an_error(write):
    line = '{"reviewerID": "a", "asin": "x", "asin": "y"}'
    with pytest.raises(data.DuplicateError, match="line 1: field asin"):
        data.read_amazon(write("r.json", line))


def test_rows_are_checked_whoever_reads_them():
    def read(*rows, **given):
        numbered = [(n, *row) for n, row in enumerate(rows, 1)]
        return interactions(__file__, numbered, **given)

    found = read(("a", "x", 2), ("b", "y", "1"), ("a", "z", 1.5))
    assert (lists(found), found.times.tolist()) == ([[3, 1], [2]], [1.5, 2, 1])
    with pytest.raises(data.MalformedLineError, match="line 2: .*every line"):
        read(("a", "x", 1), ("a", "y", None))
    with pytest.raises(data.MalformedLineError, match="line 2: .*every line"):
        read(("a", "x", None), ("a", "y", 1))
    with pytest.raises(data.MalformedLineError, match="name of user, got 0"):
        read((0, "x", 1))
    with pytest.raises(data.MalformedLineError, match="got 12 and 12.0"):
        read(("a", "12", 1), ("a", "12.0", 2))
    with pytest.raises(data.MalformedLineError, match="got 7 and 7.0"):
        read(("7.0", "x", 1), ("7", "x", 1))


@pytest.mark.parametrize("bad", [True, 2.5, 0, -1])
def test_sizes_of_readers_are_whole(write, bad):
    for name, read in data.READERS.items():
        with pytest.raises((ValueError, TypeError), match="n_items: expected"):
            read(write("d.x", THREE_LINES[name]), n_items=bad)
    with pytest.raises((ValueError, TypeError), match="k: expected"):
        data.k_core(Sequences.of([[1, 1]]), bad)
    if bad != 0:
        with pytest.raises((ValueError, TypeError), match="core: expected"):
            data.read_movielens(write("u.data", TABLE), core=bad)


@given(
    st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_k_core_is_the_largest_such_part(rows, k):
    sequences = Sequences.of(rows, n_items=6)
    kept = [list(row) for row in rows]
    while True:  # one user or item at a time, in the order of a reader's loop
        flat = [i for row in kept for i in row]
        next_ = [
            [i for i in row if flat.count(i) >= k] if len(row) >= k else []
            for row in kept
        ]
        if next_ == kept:
            break
        kept = next_
    kept = [row for row in kept if row]
    if not kept:
        with pytest.raises(ValueError, match="core"):
            data.k_core(sequences, k)
        return
    names = sorted({i for row in kept for i in row})
    expected = [[names.index(i) + 1 for i in row] for row in kept]
    assert lists(data.k_core(sequences, k)) == expected


def test_times_stay_with_their_interactions():
    rows = [[1, 5, 2], [3], [2, 1, 4, 2], [2, 1, 1, 2, 6]]
    bare = Sequences.of(rows, labels=list("_abcdef"))
    owner = np.repeat(np.arange(4), bare.lengths)
    place = np.arange(len(bare.items))
    sequences = replace(
        bare, times=1e9 + 1e4 * owner + 100 * place + bare.items
    )

    def ids(found):
        """Of each user: the number it had and the items, from the times."""
        names = [found.labels[i] for i in found.items]
        when = found.times - 1e9
        assert ["_abcdef"[int(t) % 100] for t in when] == names
        cuts = np.split(when, found.offsets[1:-1])
        return [[int(t // 1e4) for t in own] for own in cuts]

    assert ids(sequences.take(np.array([2, 0]))) == [[2] * 4, [0] * 3]
    assert ids(sequences.without_last(1)) == [[0] * 2, [], [2] * 3, [3] * 4]
    assert ids(data.k_core(sequences, 2)) == [[0] * 2, [2] * 3, [3] * 4]
    split = sequences.split()
    assert ids(split.history) == [[0], [2] * 2, [3] * 3]
    assert ids(split.training) == [[0], [1], [2] * 2, [3] * 3]


def test_split_leaves_the_last_two_out():
    sequences = Sequences.of([[1, 2, 3, 4], [5, 6], [6, 1, 2]])
    validation = sequences.split()
    assert lists(validation.training) == [[1, 2], [5, 6], [6]]
    assert lists(validation.history) == [[1, 2], [6]]
    assert validation.target.tolist() == [3, 1]
    assert validation.users.tolist() == [0, 2]
    assert validation.frequency.tolist() == [0, 1, 1, 0, 0, 1, 2]
    test = sequences.split("test")
    assert lists(test.training) == lists(validation.training)
    assert lists(test.history) == [[1, 2, 3], [6, 1]]
    assert test.target.tolist() == [4, 2]
    with pytest.raises(ValueError, match="split: expected one of"):
        sequences.split("train")


def test_sequences_refuse_contradictions():
    items = np.array([1, 2])
    with pytest.raises(ValueError, match="offsets"):
        Sequences(items, np.array([0, 3]), n_items=2)
    with pytest.raises(ValueError, match="items"):
        Sequences(items, np.array([0, 2]), n_items=1)
    with pytest.raises(ValueError, match="times"):
        Sequences(items, np.array([0, 2]), 2, times=np.zeros(3))
    with pytest.raises(IndexError, match="user"):
        Sequences.of([[1]])[1]


def test_times_that_go_back_are_refused_and_how_to_sort_is_said():
    items, offsets = np.array([3, 1, 2, 4, 5]), np.array([0, 2, 5])
    times = np.array([8.0, 9.0, 1.0, 7.0, 6.0])
    given = {"users": ["a", "b"], "n_items": 5}
    with pytest.raises(ValueError) as caught:
        Sequences(items, offsets, times=times, **given)
    said = str(caught.value)
    assert said.startswith("times: user 1 (b), position 2: ")
    assert "6.0 after 7.0" in said
    hint = said.partition("sort items and times by ")[2]
    names = {"np": np, "times": times, "users": 2, "offsets": offsets}
    order = eval(hint, names)
    found = Sequences(items[order], offsets, times=times[order], **given)
    assert lists(found) == [[3, 1], [2, 5, 4]]
    # equal times, and a user who begins before the last one ended, are fine
    replace(found, times=[8, 8, 1, 1, 1])


@pytest.mark.parametrize(
    "times, error, said",
    [
        ([1.0, np.nan, 3.0], ValueError, "user 1, position 0: .*nan"),
        ([1.0, 2.0, np.inf], ValueError, "user 1, position 1: .*inf"),
        ([1e9, 1e9, 1.6e12], ValueError, "divide milliseconds by 1000"),
        (["1", "2", "3"], TypeError, "expected seconds as numbers"),
        ([True, True, True], TypeError, "got bool"),
        (np.array([1, 2, 3], "datetime64[ns]"), TypeError, "datetime64"),
        ([[1.0, 2.0, 3.0]], ValueError, r"expected shape \(3,\)"),
    ],
)
def test_times_are_seconds(times, error, said):
    with pytest.raises(error, match="times: .*" + said):
        Sequences([1, 2, 1], [0, 1, 3], 2, times=times)


@pytest.mark.parametrize(
    "bad, error",
    [
        ([1, 1.9], ValueError),
        ([1, np.nan], ValueError),
        ([1, 2.0**60], ValueError),
        (np.array([1, 2**63], np.uint64), ValueError),
        ([1, 2**70], TypeError),
        ([True, True], TypeError),
        (["1", "2"], TypeError),
        ([1, None], TypeError),
        ([[1], [1, 2]], ValueError),
        ([[1, 2]], ValueError),
    ],
)
def test_ids_that_are_no_whole_numbers_are_refused(bad, error):
    with pytest.raises(error, match="items of user 1: expected"):
        Sequences.of([[1], bad])
    with pytest.raises(error, match="items: expected"):
        Sequences(bad, [0, 2], 2)
    with pytest.raises(error, match="offsets: expected"):
        Sequences([1], bad, 2)
    with pytest.raises(error, match="users: expected"):
        Sequences.of([[1], [2], [3]]).take(bad)


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.int32, np.uint8, np.float32, object],
)
def test_whole_numbers_of_any_kind_are_ids(kind):
    def of(values):
        if kind in (list, tuple):
            return kind(values)
        return np.array(values, kind)

    times = [5, 5, 1] if kind is object else of([5, 5, 1])
    found = Sequences(of([1, 2, 3]), of([0, 2, 3]), 3, times=times)
    assert lists(found) == [[1, 2], [3]]
    assert found.items.dtype == found.offsets.dtype == np.int64
    assert lists(Sequences.of([of([1, 2]), of([3])])) == [[1, 2], [3]]
    assert lists(found.take(of([1]))) == [[3]]


@pytest.mark.parametrize("bad", [{3, 1}, {3: 1}, "31", 3])
def test_items_without_an_order_are_refused(bad):
    with pytest.raises(TypeError, match="expected a list.*user 1, got"):
        Sequences.of([[1], bad])


def test_contradictions_of_names_and_sizes_are_refused():
    for n_items, error in [(2.0, TypeError), (True, TypeError)]:
        with pytest.raises(error, match="n_items"):
            Sequences([1], [0, 1], n_items)
    with pytest.raises(ValueError, match="labels: expected 3 names, got 2"):
        Sequences.of([[1, 2]], labels=["x", "y"])
    with pytest.raises(ValueError, match="users: expected 1 names, got 2"):
        Sequences.of([[1, 2]], users=["a", "b"])
    with pytest.raises(ValueError, match="n: expected at least 0, got -1"):
        Sequences.of([[1, 2], [3, 4]]).without_last(-1)


def test_fetch_prefers_the_folder_and_checks_it(tmp_path, monkeypatch):
    below = tmp_path / "deep"
    below.mkdir()
    path = below / datasets.DATASETS["beauty"].file
    path.write_text("1 1 2 3\n")
    with pytest.raises(ValueError, match="sha256"):
        data.fetch("beauty", tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    changed = data.Dataset(path.name, "http://x", digest, "s3rec", "")
    monkeypatch.setitem(datasets.DATASETS, "beauty", changed)
    assert data.fetch("beauty", tmp_path) == path
    monkeypatch.setenv("BFT_DATA", str(tmp_path))
    loaded = data.load("beauty")
    assert (loaded.name, lists(loaded)) == ("beauty", [[1, 2, 3]])
    # another version of the file, met first, does not hide the right one
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / path.name).write_text("1 3 2 1\n")
    assert data.fetch("beauty", tmp_path) == path
    with pytest.raises(data.DataUnavailableError, match="expected a folder"):
        data.fetch("beauty", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="format: expected 's3rec' or none"):
        data.load("beauty", format="letter")


def test_a_named_set_can_be_cut_to_its_core(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("1 1 2 3\n2 1 2\n3 2 1\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setenv("BFT_DATA", str(tmp_path))
    known = data.Dataset(path.name, "http://x", digest, "s3rec", "", core=2)
    monkeypatch.setitem(datasets.DATASETS, "beauty", known)
    options = {}

    def reader(path, *, core=0):
        options["core"] = core
        return data.read_s3rec(path)

    monkeypatch.setitem(datasets.READERS, "s3rec", reader)
    data.load("beauty")
    assert options == {"core": 2}
    data.load("beauty", core=0)
    assert options == {"core": 0}
    assert datasets.DATASETS["ml-100k"].core == 5


def test_fetch_downloads_and_checks(tmp_path, monkeypatch):
    source = tmp_path / "served.txt"
    source.write_text("1 1 2 3\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    cache = tmp_path / "cache"
    monkeypatch.delenv("BFT_DATA", raising=False)
    monkeypatch.setattr(files.pooch, "os_cache", lambda _: cache)

    def served(url, output, pooch_, **_):
        with open(output, "wb") as file:
            file.write(source.read_bytes())

    monkeypatch.setattr(
        "pooch.core.choose_downloader", lambda *_, **__: served
    )
    for known, fails in [(digest, False), ("0" * 64, True)]:
        changed = data.Dataset(
            "x.txt", f"http://x/{known}", known, "s3rec", ""
        )
        monkeypatch.setitem(datasets.DATASETS, "toys", changed)
        if fails:
            with pytest.raises(data.DataUnavailableError, match="hash"):
                data.fetch("toys")
        else:
            assert data.fetch("toys").read_text() == "1 1 2 3\n"


def test_fetch_takes_a_member_out_of_a_checked_archive(tmp_path, monkeypatch):
    source, member = tmp_path / "served.zip", "deep/in/x.inter"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("deep/in/other.inter", "no")
        archive.writestr(member, "user_id\titem_id\na\tx\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.delenv("BFT_DATA", raising=False)
    monkeypatch.setattr(files.pooch, "os_cache", lambda _: tmp_path / "c")

    def served(url, output, pooch_, **_):
        Path(output).write_bytes(source.read_bytes())

    monkeypatch.setattr(
        "pooch.core.choose_downloader", lambda *_, **__: served
    )
    for archive, right in [("0" * 64, False), (digest, True)]:
        known = data.Dataset(
            "x.inter",
            f"http://x/{archive}.zip",
            "1" * 64,
            "recbole",
            "",
            archive=archive,
            member=member,
        )
        monkeypatch.setitem(datasets.DATASETS, "toys", known)
        if right:
            path = data.fetch("toys")
            assert path.as_posix().endswith(member)
            assert data.load("toys").users == ["a"]
        else:
            with pytest.raises(data.DataUnavailableError, match="hash"):
                data.fetch("toys")


@pytest.mark.parametrize(
    "name, reader",
    [
        ("Instruments.inter.json", "letter"),
        ("ml-100k.inter", "recbole"),
        ("u.data", "movielens"),
        ("ml-100k_u.data.gz", "movielens"),
        ("reviews_Beauty_5.json.gz", "amazon"),
        ("All_Beauty.jsonl", "amazon"),
        ("Beauty.txt", "s3rec"),
    ],
)
def test_a_name_tells_the_format(name, reader):
    assert guess_format(Path("some.json") / name) == reader


def test_offline_is_said_clearly(tmp_path, monkeypatch):
    monkeypatch.setattr(files.pooch, "os_cache", lambda _: tmp_path / "c")
    nowhere = data.Dataset(
        "x.txt", "http://127.0.0.1:9/x.txt", "0" * 64, "s3rec", ""
    )
    monkeypatch.setitem(datasets.DATASETS, "toys", nowhere)
    with pytest.raises(data.DataUnavailableError) as caught:
        data.fetch("toys", tmp_path)
    for said in ("toys", "x.txt", str(tmp_path), "127.0.0.1:9", "BFT_DATA"):
        assert said in str(caught.value)


def test_load_says_what_it_cannot_find(tmp_path):
    with pytest.raises(ValueError, match="name"):
        data.fetch("nothing")
    with pytest.raises(FileNotFoundError, match="beauty"):
        data.load(tmp_path / "nothing.txt")
    path = tmp_path / "odd.xyz"
    path.write_text("1 1 2\n")
    with pytest.raises(ValueError, match="format"):
        data.load(path)
    assert lists(data.load(path, format="s3rec")) == [[1, 2]]
    with pytest.raises(ValueError, match="format"):
        data.load(path, format="csv")


def test_simulation_is_deterministic_and_skewed():
    first, again = (data.simulate(200, 60, seed=3) for _ in range(2))
    other = data.simulate(200, 60, seed=4)
    assert lists(first.sequences) == lists(again.sequences)
    assert lists(first.sequences) != lists(other.sequences)
    lengths = first.sequences.lengths
    assert lengths.min() >= 5 and lengths.max() <= 20
    for row in lists(first.sequences):
        assert len(set(row)) == len(row)
    flat = data.simulate(200, 60, seed=3, popularity=0.0)
    top = [
        np.sort(s.sequences.frequency)[-6:].sum() / len(s.sequences.items)
        for s in (first, flat)
    ]
    assert top[0] > top[1] + 0.05


def test_known_reliabilities_are_worth_something():
    simulation = data.simulate(600, 150, seed=1, noise=(0.05, 20.0))
    split = simulation.sequences.split()

    def hits(variance):
        scores = simulation.oracle(split.history, variance=variance)
        for u in range(len(scores)):
            scores[u, split.history[u]] = -np.inf
        own = scores[np.arange(len(scores)), split.target]
        return float(((scores > own[:, None]).sum(1) < 10).mean())

    truth = hits(None)
    equal = hits(np.full_like(simulation.variance, 1.0))
    assert truth > equal + 0.02
    assert truth > 3 * 10 / 150


def test_the_oracle_is_the_kalman_filter_of_the_simulation():
    truth = data.simulate(1, 6, length=(1, 1), state=2, drift=0.3, pull=0.6)
    history = [4, 1, 1, 6]
    kalman = KalmanFilter(dim_x=2, dim_z=2)
    kalman.F, kalman.H = 0.6 * np.eye(2), np.eye(2)
    kalman.Q = 0.3 * np.eye(2)
    kalman.P = linalg.solve_discrete_lyapunov(kalman.F, kalman.Q)
    for changed in (None, 1 + np.arange(7.0)):
        believed = truth.variance if changed is None else changed
        kalman.x = np.zeros((2, 1))
        kalman.P = linalg.solve_discrete_lyapunov(kalman.F, kalman.Q)
        for item in history:
            kalman.update(
                truth.position[item][:, None], R=believed[item] * np.eye(2)
            )
            kalman.predict()
        (found,) = truth.oracle(
            Sequences.of([history], n_items=6), variance=changed
        )
        expected = [
            stats.multivariate_normal(
                kalman.x[:, 0], kalman.P + truth.variance[i] * np.eye(2)
            ).logpdf(truth.position[i])
            + np.log(truth.popularity[i])
            for i in range(1, 7)
        ]
        np.testing.assert_allclose(found[1:], expected, rtol=1e-10)
        assert found[0] == -np.inf


def test_choices_follow_the_softmax_of_a_state_that_walks():
    """Both choices of two, against the integral over both states."""
    users, drift, pull = 60_000, 1.0, 0.7
    found = data.simulate(
        users,
        3,
        length=(2, 2),
        state=1,
        noise=(0.1, 4.0),
        drift=drift,
        pull=pull,
        seed=2,
    )
    nodes = np.linspace(-7, 7, 500)
    weights = stats.norm.pdf(nodes) / stats.norm.pdf(nodes).sum()
    first = (drift / (1 - pull**2)) ** 0.5 * nodes
    second = pull * first[:, None] + drift**0.5 * nodes

    def preference(i, s):
        item = stats.norm(found.position[i, 0], found.variance[i] ** 0.5)
        return np.log(found.popularity[i]) + item.logpdf(s)

    one = special.softmax([preference(i, first) for i in (1, 2, 3)], axis=0)
    pairs = [tuple(row) for row in lists(found.sequences)]
    for i, j in itertools.permutations((1, 2, 3), 2):
        other = preference(6 - i - j, second)
        two = special.expit(preference(j, second) - other)
        p = float(weights @ (one[i - 1] * (two @ weights)))
        assert abs(pairs.count((i, j)) / users - p) < 4 * np.sqrt(
            p * (1 - p) / users
        )


def test_a_reliable_item_tells_more_about_the_state():
    simulation = data.simulate(50, 40, seed=2)
    order = np.argsort(simulation.variance[1:]) + 1
    sharp, vague = order[0], order[-1]
    one = Sequences.of([[sharp], [vague]], n_items=40)
    popularity = simulation.popularity[1:]
    scores = simulation.oracle(one)[:, 1:] - np.log(popularity)
    spread = scores.std(1)
    assert spread[0] > spread[1]


@pytest.mark.parametrize(
    "given, name",
    [
        ({"n_users": 0}, "n_users"),
        ({"n_items": 0}, "n_items"),
        ({"length": (5, 4)}, "length"),
        ({"length": (1, 500)}, "length"),
        ({"noise": (0.0, 1.0)}, "noise"),
        ({"drift": 0.0}, "drift"),
        ({"pull": 1.0}, "pull"),
        ({"n_users": 2.5}, "n_users"),
        ({"n_items": True}, "n_items"),
        ({"length": (5.5, 9)}, "length"),
        ({"length": (5, 9, 12)}, "length"),
        ({"noise": (0.1, np.inf)}, "noise"),
        ({"noise": (0.1, 1.0, 2.0)}, "noise"),
        ({"drift": np.inf}, "drift"),
        ({"popularity": np.nan}, "popularity"),
    ],
)
def test_simulation_names_the_bad_argument(given, name):
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected"):
        data.simulate(**given)


def test_the_oracle_refuses_what_is_of_another_catalogue():
    truth = data.simulate(5, 6, length=(2, 3))
    with pytest.raises(ValueError, match="histories: expected n_items 6"):
        truth.oracle(Sequences.of([[1, 2]], n_items=7))
    for bad in (truth.variance[1:], -truth.variance, truth.variance * np.nan):
        with pytest.raises(ValueError, match="variance: expected positive"):
            truth.oracle(truth.sequences, variance=bad)
