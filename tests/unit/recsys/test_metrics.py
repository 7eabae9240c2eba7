"""Ranks against a loop, ties, strata, the bootstrap and the baselines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bft_ref.recsys import metrics
from bft_ref.recsys.data.sequences import Sequences


def test_rank_is_the_rank_a_loop_finds():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (40, 13)).astype(np.float32)
    histories = [rng.integers(1, 13, rng.integers(0, 9)) for _ in scores]
    target = rng.integers(1, 13, 40)
    found = metrics.rank(scores, target, Sequences.of(histories, n_items=12))
    for u, (row, seen, goal) in enumerate(
        zip(scores, histories, target, strict=True)
    ):
        others = [i for i in range(1, 13) if i != goal and i not in seen]
        above = sum(row[i] > row[goal] for i in others)
        tied = sum(row[i] == row[goal] for i in others)
        assert found.above[u] == above
        assert found.tied[u] == tied
        assert found.candidates[u] == len(others) + 1


def test_values_of_a_rank():
    ranking = metrics.Ranking(*np.array([[0, 2, 9, 10], [0] * 4, [50] * 4]))
    assert ranking.hit(10).tolist() == [1, 1, 1, 0]
    assert ranking.ndcg(10) == pytest.approx([1, 0.5, 1 / np.log2(11), 0])


@given(st.integers(0, 15), st.integers(0, 15), st.integers(1, 12))
def test_expected_ties_average_over_all_orders(above, tied, k):
    ranking = metrics.Ranking(*np.array([[above], [tied], [40]]))
    places = np.arange(above, above + tied + 1)
    hit = np.mean(places < k)
    ndcg = np.mean(np.where(places < k, 1 / np.log2(places + 2), 0))
    assert ranking.hit(k, "expected")[0] == pytest.approx(hit)
    assert ranking.ndcg(k, "expected")[0] == pytest.approx(ndcg)
    assert ranking.hit(k)[0] == float(above + tied < k)


def small_split(users=300, items=40, seed=0):
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, items + 1)
    weight /= weight.sum()
    rows = [
        rng.choice(items, rng.integers(3, 9), replace=False, p=weight) + 1
        for _ in range(users)
    ]
    return Sequences.of(rows, n_items=items).split()


def test_a_constant_scorer_gets_the_level_of_chance():
    split = small_split()
    found = metrics.evaluate(
        split,
        lambda user_indices: torch.zeros(len(user_indices), 41),
        chunk=64,
    )
    candidates = 40 - split.history.lengths
    assert found.candidates.tolist() == candidates.tolist()
    assert found.hit(10, "expected") == pytest.approx(10 / candidates)
    assert found.summary()["HR@10"] == 0.0


def test_evaluate_does_not_depend_on_the_chunk():
    split = small_split()
    rng = np.random.default_rng(1)
    table = rng.normal(size=(len(split.target), 41))
    a = metrics.evaluate(
        split, lambda user_indices: table[user_indices], chunk=7
    )
    b = metrics.evaluate(
        split, lambda user_indices: table[user_indices], chunk=1000
    )
    c = metrics.rank(table, split.target, split.history)
    assert a.above.tolist() == b.above.tolist() == c.above.tolist()


def test_the_history_is_removed_but_not_a_repeated_target():
    scores = np.array([[0.0, 9, 8, 7, 6]])
    ranked = metrics.rank(
        scores, np.array([3]), Sequences.of([[1, 3]], n_items=4)
    )
    assert (ranked.above[0], ranked.candidates[0]) == (1, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_an_error(bad):
    scores = np.zeros((3, 5))
    scores[1, 2] = bad
    with pytest.raises(ValueError, match="scores.*1 of 3"):
        metrics.rank(scores, np.array([1, 1, 1]))
    ignored = np.zeros((3, 5))
    ignored[:, 0] = bad
    metrics.rank(ignored, np.array([1, 1, 1]))


def test_rank_names_the_bad_argument():
    with pytest.raises(ValueError, match="scores"):
        metrics.rank(np.zeros((2, 5)), np.array([1]))
    with pytest.raises(ValueError, match="target"):
        metrics.rank(np.zeros((1, 5)), np.array([5]))
    with pytest.raises(ValueError, match="target"):
        metrics.rank(np.zeros((1, 5)), np.array([0]))


@pytest.mark.parametrize(
    "target, error",
    [
        ([1.9, 2.0], ValueError),
        ([True, True], TypeError),
        ([[1], [2]], ValueError),
        ([1], ValueError),
    ],
)
def test_targets_that_are_no_ids_are_refused(target, error):
    with pytest.raises(error, match="target|scores"):
        metrics.rank(np.zeros((2, 5)), np.array(target))


def test_targets_of_any_whole_numbers_are_the_same():
    scores = np.array([[0.0, 9, 8, 7, 6]] * 2)
    for kind in (np.int32, np.uint8, np.float32):
        found = metrics.rank(scores, np.array([3, 1], dtype=kind))
        assert found.above.tolist() == [2, 0]


@pytest.mark.parametrize("users, items", [(2, 4), (4, 4), (3, 3), (3, 5)])
def test_a_history_of_others_is_refused(users, items):
    history = Sequences.of([[1]] * users, n_items=items)
    with pytest.raises(ValueError, match=rf"scores: .*\({users}, {items + 1}"):
        metrics.rank(np.zeros((3, 5)), np.array([1, 2, 3]), history)


def test_evaluate_ranks_everybody_or_nobody():
    split = small_split()
    score = metrics.popularity(split)
    for chunk in (0, -5, 2.5):
        with pytest.raises((ValueError, TypeError), match="chunk: expected"):
            metrics.evaluate(split, score, chunk=chunk)
    every = np.arange(len(split.target))
    for some in (every[:-1], np.append(every, 0)):
        other = split._replace(history=split.history.take(some))
        with pytest.raises(ValueError, match="a history for each of 300"):
            metrics.evaluate(other, score)
    with pytest.raises(ValueError, match=r"scores: .*41\), .*got \(300, 40"):
        metrics.evaluate(
            split, lambda user_indices: np.zeros((len(user_indices), 40))
        )


@pytest.mark.parametrize(
    "columns, said",
    [
        (([-1], [0], [5]), "above: expected counts, got -1"),
        (([0], [-1], [5]), "tied: expected counts, got -1"),
        (([0.5], [0], [5]), "above: expected whole numbers"),
        (([0, 1], [0], [5, 5]), "one of each a user, got 2, 1 and 2"),
        (([0, 3], [0, 2], [5, 5]), "4 other candidates of user 1"),
    ],
)
def test_a_ranking_that_cannot_be_is_refused(columns, said):
    with pytest.raises(ValueError, match=said):
        metrics.Ranking(*columns)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"rank": [0, 2]}, "rank: expected 1…3, got 0…2"),
        ({"rank": [1, 4]}, "rank: expected 1…3, got 1…4"),
        ({"rank": [1]}, "user: expected each of the 1 ranks"),
        ({"rank": [1.5, 2]}, "rank: expected whole numbers"),
        ({"user": [0, 0]}, "user: expected each"),
        ({"user": [0, -1]}, "user: expected each"),
        ({"user": [0, 4]}, r"user: expected each.*0…3"),
        ({"k": 0}, "k: expected at least 1"),
    ],
)
def test_ranks_that_cannot_be_are_refused(changed, said):
    top = {"k": 3, "users": 4, "user": [0, 2], "rank": [1, 3]}
    assert metrics.Ranking.from_top(top).above.tolist() == [0, 3, 2, 3]
    with pytest.raises(ValueError, match=said):
        metrics.Ranking.from_top(top | changed)


@pytest.mark.parametrize("k", [0, -1, 2.5, True])
def test_k_is_a_whole_number(k):
    ranking = metrics.Ranking([0], [0], [5])
    for ask in (ranking.hit, ranking.ndcg, ranking.top):
        with pytest.raises((ValueError, TypeError), match="k: expected"):
            ask(k)


def test_a_ranking_of_other_users_is_not_reported():
    split = small_split()
    ranking = metrics.evaluate(split, metrics.popularity(split))
    other = ranking.take(slice(1, None))
    for ask in (metrics.report, metrics.by_stratum):
        with pytest.raises(ValueError, match="ranking: .*300 users, got 299"):
            ask(split, other)


def test_strata_need_a_last_item():
    split = small_split()
    bare = split.history.without_last(3)
    with pytest.raises(ValueError, match="an item in each history"):
        metrics.membership(split._replace(history=bare))


@pytest.mark.parametrize("bad", [[1.0, np.nan], [[1.0, 2.0]], 1.0])
def test_quartiles_are_of_numbers(bad):
    with pytest.raises(ValueError, match="values: expected numbers"):
        metrics.quartiles(bad)
    assert metrics.quartiles([1, 2, 3, 4])[1].tolist() == [0, 1, 2, 3]


def test_strata_share_out_every_user_once():
    split = small_split()
    masks = {}
    for kind, _, mask in metrics.strata(split):
        masks.setdefault(kind, []).append(mask)
    assert set(masks) == {"frequency", "history", "last"}
    for kind in masks:
        assert (np.sum(masks[kind], 0) == 1).all()
    low = split.frequency[split.target[masks["frequency"][0]]].max()
    high = split.frequency[split.target[masks["frequency"][3]]].min()
    assert low < high
    for kind, entry in metrics.membership(split).items():
        for q, mask in enumerate(masks[kind]):
            found = [digit == str(q) for digit in entry["of_user"]]
            assert found == mask.tolist()
        assert len(entry["labels"]) == 4
    cuts, member = metrics.quartiles(np.array([1, 1, 1, 1, 5]))
    assert cuts == [1, 1, 1] and member.tolist() == [0, 0, 0, 0, 3]


def test_a_label_says_which_values_its_stratum_holds():
    split = small_split()
    values = {
        "frequency": split.frequency[split.target],
        "history": split.history.lengths,
        "last": split.frequency[[h[-1] for h in split.history]],
    }
    for kind, label, mask in metrics.strata(split):
        low, high = map(int, label.split(": ")[1].split("-"))
        inside = (low <= values[kind]) & (values[kind] <= high)
        assert mask.tolist() == inside.tolist()


def test_nobody_has_no_figures_but_a_report():
    split = Sequences.of([[1, 2], [3]]).split()
    ranking = metrics.evaluate(split, metrics.popularity(split))
    assert all(np.isnan(x) for x in ranking.summary().values())
    found = metrics.report(split, ranking)
    assert found["users"] == 0 and np.isnan(found["NDCG@10"])
    for kind, entry in metrics.membership(split).items():
        assert list(found[kind]) == entry["labels"]
        assert list(found[kind].values()) == [{"users": 0}] * 4
        assert entry["of_user"] == ""


def test_report_adds_up():
    split = small_split()
    ranking = metrics.evaluate(split, metrics.popularity(split))
    found = metrics.report(split, ranking)
    for kind in ("frequency", "history"):
        parts = found[kind].values()
        assert sum(p["users"] for p in parts) == found["users"]
        mean = sum(p["users"] * p.get("HR@10", 0) for p in parts)
        assert mean / found["users"] == pytest.approx(found["HR@10"])


def test_the_bootstrap_interval_is_that_of_the_t_test():
    rng = np.random.default_rng(0)
    a = rng.normal(3.0, 1.0, 4000)
    b = a + rng.normal(0.04, 0.5, 4000)
    found = metrics.paired_bootstrap(a, b, resamples=4000, seed=1)
    se = (b - a).std(ddof=1) / np.sqrt(len(a))
    centre = (b - a).mean()
    assert found.absolute == pytest.approx(centre)
    assert found.absolute_low == pytest.approx(centre - 1.96 * se, abs=se / 6)
    assert found.absolute_high == pytest.approx(centre + 1.96 * se, abs=se / 6)
    assert found.relative == pytest.approx(b.mean() / a.mean() - 1)
    # unpaired, the same difference would drown
    assert se < 0.5 * np.sqrt(a.var() / 4000 + b.var() / 4000)


def test_a_relative_interval_is_the_absolute_one_over_a_constant():
    rng = np.random.default_rng(2)
    b = rng.normal(3.0, 1.0, 200)
    found = metrics.paired_bootstrap(np.full(200, 4.0), b)
    assert found.relative == pytest.approx(found.absolute / 4)
    assert found.relative_low == pytest.approx(found.absolute_low / 4)
    assert found.relative_high == pytest.approx(found.absolute_high / 4)


def test_the_bootstrap_covers_the_truth():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        a = rng.binomial(1, 0.3, 250)
        b = np.where(rng.random(250) < 0.2, rng.binomial(1, 0.5, 250), a)
        truth = 0.2 * (0.5 - 0.3)
        found = metrics.paired_bootstrap(a, b, resamples=200, seed=trial)
        inside += found.absolute_low <= truth <= found.absolute_high
    assert 176 <= inside <= 199


def test_several_runs_widen_the_interval_by_their_spread():
    rng = np.random.default_rng(0)
    users = rng.normal(size=500)
    shift = np.array([-1.0, 0.0, 1.0])[:, None]
    still = metrics.paired_bootstrap(
        np.tile(users, (3, 1)), np.tile(users + 0.5, (3, 1))
    )
    assert still.absolute_low == pytest.approx(0.5)
    # what a seed does to both sides cancels, what it does to one does not
    alike = metrics.paired_bootstrap(users + shift, users + 0.5 + shift)
    assert alike.absolute_low == pytest.approx(0.5)
    assert alike.absolute_high == pytest.approx(0.5)
    moved = metrics.paired_bootstrap(users + shift, users + 0.5 - shift)
    assert moved.absolute_high - moved.absolute_low > 2.0
    # unequal numbers of runs have no pairs
    alone = metrics.paired_bootstrap(users + shift, users + 0.5 + shift[:2])
    assert alone.absolute_high - alone.absolute_low > 1.0


def test_pooled_sets_count_alike_and_are_drawn_independently():
    rng = np.random.default_rng(0)
    a = [rng.normal(5, 1, n) for n in (400, 4000)]
    b = [
        x + rng.normal(m, 1, len(x)) for x, m in zip(a, (0.5, 1), strict=True)
    ]
    pairs = list(zip(a, b, strict=True))
    found = metrics.pooled_bootstrap(pairs, resamples=4000)
    each = [metrics.paired_bootstrap(*pair) for pair in pairs]
    assert found.absolute == pytest.approx(np.mean([x.absolute for x in each]))
    assert found.relative == pytest.approx(np.mean([x.relative for x in each]))
    errors = [(y - x).std() / len(x) ** 0.5 for x, y in pairs]
    half = 1.96 * np.hypot(*errors) / 2
    assert found.absolute_low == pytest.approx(found.absolute - half, abs=4e-3)
    assert found.absolute_high == pytest.approx(
        found.absolute + half, abs=4e-3
    )
    assert metrics.pooled_bootstrap(pairs[:1]) == each[0]
    with pytest.raises(ValueError, match="pairs: expected at least one"):
        metrics.pooled_bootstrap([])


def test_the_bootstrap_refuses_what_does_not_pair():
    with pytest.raises(ValueError, match="same users"):
        metrics.paired_bootstrap(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="same users"):
        metrics.paired_bootstrap(np.zeros(0), np.zeros(0))
    for a, b in [((3, 4), (2, 4, 4)), ((2, 4, 4), (3, 4)), ((0, 4), (3, 4))]:
        with pytest.raises(ValueError, match=r"\(seeds, users\).*same users"):
            metrics.paired_bootstrap(np.zeros(a), np.zeros(b))
    with pytest.raises(ValueError, match="NaN"):
        metrics.paired_bootstrap(np.array([np.nan, 1]), np.zeros(2))
    with pytest.raises(ValueError, match="infinity"):
        metrics.paired_bootstrap(np.zeros(2), np.array([0, np.inf]))
    # two means instead of everybody's values, and one user, have no spread
    for a, b in [(0.3, 0.4), ([0.3], [0.4]), ([[0.3], [0.2]], [[0.4]])]:
        with pytest.raises(ValueError, match="two or more"):
            metrics.paired_bootstrap(a, b)
    with pytest.raises(TypeError, match="resamples: expected a whole number"):
        metrics.paired_bootstrap(np.zeros(3), np.zeros(3), resamples=9.5)
    with pytest.raises(ValueError, match="level"):
        metrics.paired_bootstrap(np.zeros(3), np.zeros(3), level=95)
    with pytest.raises(ValueError, match="resamples"):
        metrics.paired_bootstrap(np.zeros(3), np.zeros(3), resamples=0)
    none = metrics.paired_bootstrap(np.zeros(3), np.ones(3))
    assert np.isnan(none.relative) and none.absolute == 1.0


def test_popularity_ranks_by_training_frequency():
    split = small_split()
    scores = metrics.popularity(split)(np.arange(3))
    assert scores.shape == (3, 41)
    assert scores[0, 1:].tolist() == split.frequency[1:].tolist()


def test_popularity_tells_large_numbers_apart():
    split = small_split()
    many = np.full(41, 2**24) + np.arange(41)
    score = metrics.popularity(split._replace(frequency=many))
    assert metrics.rank(score(np.arange(1)), [39]).above.tolist() == [1]


@pytest.mark.parametrize(
    "name, bad", [("neighbours", 0), ("neighbours", -1), ("shrink", -1.0)]
)
def test_item_knn_names_the_bad_argument(name, bad):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        metrics.item_knn(small_split(), **{name: bad})


def test_item_knn_is_damped_cosine_of_co_occurrence():
    sequences = Sequences.of(
        [[1, 2, 1, 9, 9], [1, 2, 3, 9], [3, 4, 9, 9], [1, 5, 9, 9]], n_items=9
    )
    split = sequences.split()
    scores = metrics.item_knn(split, neighbours=10, shrink=1.0)(np.arange(4))
    sets = [set(split.training[u]) for u in range(4)]
    for u in range(4):
        for j in range(1, 10):
            expected = 0.0
            for i in split.history[u]:
                both = sum(i in s and j in s for s in sets)
                one = sum(i in s for s in sets) * sum(j in s for s in sets)
                if i != j:
                    expected += both / (np.sqrt(one) + 1.0)
            assert scores[u, j] == pytest.approx(expected)
    one = metrics.item_knn(split, neighbours=1, shrink=1.0)(np.arange(1))
    assert one[0, 2] > 0 and one[0, 5] == 0
