"""Full ranking, its strata, and whether a difference is more than chance.

Every target is ranked against the whole catalogue without the user's
history; nothing is sampled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from bft_ref.recsys.data.sequences import Sequences, Split
from bft_ref.support.checks import choice, count, whole

Scorer = Callable[[NDArray[np.int64]], "torch.Tensor | NDArray"]


@dataclass(frozen=True)
class Ranking:
    """Where each target stood: items above it, and items tied with it.

    Shapes: ``above`` (n,), ``tied`` (n,), counts over ``candidates`` (n,)
    items that could have been recommended, the target among them; 0 where
    that is not known.
    Raises: ValueError for counts that are not whole, below 0, of different
    users, or more than the other candidates; TypeError for no numbers.
    """

    above: NDArray[np.int64]
    tied: NDArray[np.int64]
    candidates: NDArray[np.int64]

    def __post_init__(self):
        for name in ("above", "tied", "candidates"):
            values = whole(name, getattr(self, name))
            if values.min(initial=0) < 0:
                raise ValueError(
                    f"{name}: expected counts, got {values.min()}"
                )
            object.__setattr__(self, name, values)
        sizes = len(self.above), len(self.tied), len(self.candidates)
        if len(set(sizes)) > 1:
            raise ValueError(
                "above, tied, candidates: expected one of each a user, got "
                f"{sizes[0]}, {sizes[1]} and {sizes[2]}"
            )
        others = np.where(self.candidates > 0, self.candidates - 1, np.inf)
        over = self.above + self.tied > others
        if over.any():
            at = int(np.argmax(over))
            raise ValueError(
                f"above, tied: expected at most {others[at]:.0f} other "
                f"candidates of user {at}, got {self.above[at]} and "
                f"{self.tied[at]}"
            )

    def hit(self, k: int = 10, ties: str = "against") -> NDArray[np.float64]:
        """HR@k of each user, (n,): is the target among the first k?

        ``ties``: "against" puts every tied item before the target;
        "expected" averages over the orders of the tied items, which gives a
        constant scorer k / candidates, the level of chance: Equation (20.1).
        """
        k = count("k", k, 1)
        choice("ties", ties, ("against", "expected"))
        if ties == "against":
            return (self.above + self.tied < k).astype(np.float64)
        places = np.clip(k - self.above, 0, self.tied + 1)
        return places / (self.tied + 1)

    def ndcg(self, k: int = 10, ties: str = "against") -> NDArray[np.float64]:
        """NDCG@k of each user, (n,): 1 / log2(1 + rank) within the first k."""
        k = count("k", k, 1)
        choice("ties", ties, ("against", "expected"))
        worth = np.zeros(k + 1)
        worth[:k] = 1 / np.log2(np.arange(k) + 2)
        if ties == "against":
            return worth[np.minimum(self.above + self.tied, k)]
        below = np.concatenate([[0], np.cumsum(worth[:k])])
        first = np.minimum(self.above, k)
        last = np.minimum(self.above + self.tied + 1, k)
        return (below[last] - below[first]) / (self.tied + 1)

    def summary(
        self, ks: tuple[int, ...] = (10,), ties: str = "against"
    ) -> dict[str, float]:
        """Mean HR@k and NDCG@k over users, NaN if there are none."""
        found = {}
        for k in ks:
            for name, values in [
                (f"HR@{k}", self.hit(k, ties)),
                (f"NDCG@{k}", self.ndcg(k, ties)),
            ]:
                found[name] = float(values.mean()) if len(values) else np.nan
        return found

    def top(self, k: int = 20) -> dict:
        """Who had the target within the first k, and where, for JSON.

        Ties against the model. Enough for every metric up to k:
        :meth:`from_top` gives them back.
        """
        k = count("k", k, 1)
        place = self.above + self.tied
        user = np.flatnonzero(place < k)
        return {
            "k": k,
            "users": len(place),
            "user": user.tolist(),
            "rank": (place[user] + 1).tolist(),
        }

    @classmethod
    def from_top(cls, top: dict) -> "Ranking":
        """A ranking that agrees with the original up to rank ``top["k"]``.

        Its other targets are put just behind, and candidates are unknown (0).
        Raises: ValueError for ranks outside 1…k, users that are not there or
        there twice, or numbers of both that differ.
        """
        users, k = count("users", top["users"]), count("k", top["k"], 1)
        user, place = whole("user", top["user"]), whole("rank", top["rank"])
        once = len(np.unique(user)) == len(user) == len(place)
        if not once or not ((user >= 0) & (user < users)).all():
            raise ValueError(
                f"user: expected each of the {len(place)} ranks' own, in "
                f"0…{users - 1}, got {len(user)}: {user}"
            )
        if not ((place >= 1) & (place <= k)).all():
            raise ValueError(
                f"rank: expected 1…{k}, got {place.min()}…{place.max()}"
            )
        above = np.full(users, k, dtype=np.int64)
        above[user] = place - 1
        return cls(above, np.zeros_like(above), np.zeros_like(above))

    def take(self, where: NDArray) -> "Ranking":
        """The ranking of some of the users."""
        return Ranking(
            self.above[where], self.tied[where], self.candidates[where]
        )


def rank(
    scores: torch.Tensor | NDArray,
    target: NDArray[np.int64],
    history: Sequences | None = None,
) -> Ranking:
    """Rank one target a user among all items not in the user's history.

    Shapes: ``scores`` (n, n_items + 1), column 0 is padding's and ignored;
    ``target`` (n,). A target that is in the history stays a candidate.
    Raises: ValueError for NaN or +inf scores, a wrong shape, a target that
    is not whole or outside 1…n_items, or a history of other users or items;
    TypeError for targets that are no numbers.
    """
    scores = torch.as_tensor(scores)
    device = scores.device
    goal = torch.as_tensor(whole("target", target), device=device)
    if scores.dim() != 2 or goal.shape != scores.shape[:1]:
        raise ValueError(
            f"scores: expected shape ({len(goal)}, n_items + 1), got "
            f"{tuple(scores.shape)}"
        )
    if history is not None:
        known = len(history), history.n_items + 1
        if known != scores.shape:
            raise ValueError(
                f"scores: expected shape {known}, (users, n_items + 1) of the "
                f"history, got {tuple(scores.shape)}"
            )
    if len(goal) and not 1 <= goal.min() <= goal.max() < scores.shape[1]:
        raise ValueError(
            f"target: expected ids in 1…{scores.shape[1] - 1}, got "
            f"{int(goal.min())}…{int(goal.max())}"
        )
    items = scores[:, 1:]
    # A NaN or +inf anywhere makes the maximum of its row NaN or +inf.
    if not bool((items.amax(1) < torch.inf).all()):
        bad = int((~(items < torch.inf)).any(1).sum())
        raise ValueError(
            f"scores: expected numbers below infinity, got NaN or inf for "
            f"{bad} of {len(goal)} users"
        )
    mine = scores.gather(1, goal[:, None])
    # Summed in int32: several times faster on CPU than the default int64.
    above = (items > mine).sum(1, dtype=torch.int32).long()
    tied = (items == mine).sum(1, dtype=torch.int32).long() - 1
    candidates = torch.full_like(above, items.shape[1])
    if history is not None and len(history.items):
        owner = np.repeat(np.arange(len(history)), history.lengths)
        pairs = np.unique(np.stack([owner, history.items]), axis=1)
        u, i = torch.as_tensor(pairs, device=device)
        u, i = u[i != goal[u]], i[i != goal[u]]
        theirs, bar = scores[u, i], mine[u, 0]
        above.index_add_(0, u, -(theirs > bar).long())
        tied.index_add_(0, u, -(theirs == bar).long())
        candidates.index_add_(0, u, -torch.ones_like(u))
    return Ranking(*(x.cpu().numpy() for x in (above, tied, candidates)))


def evaluate(split: Split, score: Scorer, *, chunk: int = 512) -> Ranking:
    """Rank every target of a split, ``chunk`` users at a time.

    ``score`` maps positions in ``split.history`` (m,) to scores
    (m, n_items + 1), higher is better. Users are taken in the order of
    their history's length, so that a model pads little.
    Raises: ValueError for a chunk below 1, a history too many or too few,
    and as :func:`rank`.
    """
    chunk, n = count("chunk", chunk, 1), len(split.target)
    if len(split.history) != n:
        raise ValueError(
            f"split: expected a history for each of {n} targets, got "
            f"{len(split.history)}"
        )
    order = np.argsort(split.history.lengths, kind="stable")
    found = Ranking(*(np.zeros(n, dtype=np.int64) for _ in range(3)))
    for start in range(0, n, chunk):
        users = order[start : start + chunk]
        ranked = rank(
            score(users), split.target[users], split.history.take(users)
        )
        found.above[users] = ranked.above
        found.tied[users] = ranked.tied
        found.candidates[users] = ranked.candidates
    return found


def quartiles(values: NDArray) -> tuple[list[float], NDArray[np.int64]]:
    """The three quartile cuts of ``values`` and each value's stratum 0…3.

    A stratum holds the values up to and including its cut, so that equal
    values always share a stratum (the strata need not be of equal size).
    Of no values at all the cuts are 0. Raises: ValueError for NaN or another
    shape than (n,).
    """
    values = np.asarray(values)
    if values.ndim != 1 or np.isnan(values).any():
        raise ValueError(
            f"values: expected numbers, shape (n,), got {values.shape} with "
            f"{int(np.isnan(values).sum())} NaN"
        )
    cuts = np.quantile(values if len(values) else [0], [0.25, 0.5, 0.75])
    return cuts.tolist(), np.searchsorted(cuts, values, side="left")


def strata(split: Split) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """(kind, label, mask over users): ``frequency``, ``history``, ``last``.

    Quartiles over the asked users, of the target's frequency in the training
    data, of the length of the history, and of the frequency of its last item.
    Raises: ValueError for an empty history, which has no last item.
    """
    if split.history.lengths.min(initial=1) < 1:
        raise ValueError(
            "split: expected an item in each history, got none for user "
            f"{int(np.argmin(split.history.lengths))}"
        )
    end = split.history.offsets[1:] - 1
    for kind, values in [
        ("frequency", split.frequency[split.target]),
        ("history", split.history.lengths),
        ("last", split.frequency[split.history.items[end]]),
    ]:
        cuts, member = quartiles(values)
        low = 0
        for q in range(4):
            high = int(cuts[q]) if q < 3 else int(values.max(initial=0))
            yield kind, f"Q{q + 1}: {low}-{high}", member == q
            low = high + 1


def membership(split: Split) -> dict:
    """Which stratum each user is in, ready for JSON.

    Per kind the four labels, and a string with one digit 0…3 a user.
    """
    found: dict = {}
    for kind, label, mask in strata(split):
        entry = found.setdefault(
            kind, {"labels": [], "of_user": np.zeros(len(mask), dtype="U1")}
        )
        entry["of_user"][mask] = str(len(entry["labels"]))
        entry["labels"].append(label)
    for entry in found.values():
        entry["of_user"] = "".join(entry["of_user"])
    return found


def by_stratum(split: Split, ranking: Ranking) -> dict[str, list[float]]:
    """HR@10 and NDCG@10 in the four strata of each kind, for a curve.

    Keys such as ``"NDCG@10 by last"``; NaN where nobody is asked.
    Raises: ValueError for a ranking of other users.
    """
    _same_users(split, ranking)
    found: dict[str, list[float]] = {}
    for kind, _, mask in strata(split):
        for name, value in ranking.take(mask).summary().items():
            found.setdefault(f"{name} by {kind}", []).append(value)
    return found


def _same_users(split: Split, ranking: Ranking) -> None:
    if len(ranking.above) != len(split.target):
        raise ValueError(
            f"ranking: expected the split's {len(split.target)} users, got "
            f"{len(ranking.above)}"
        )


def report(
    split: Split,
    ranking: Ranking,
    *,
    ks: tuple[int, ...] = (5, 10, 20),
    ties: str = "against",
) -> dict:
    """HR and NDCG overall and per stratum, ready for JSON.

    ``top`` keeps who was answered where, for paired comparisons later.
    Where nobody is asked, HR and NDCG are NaN. Raises: ValueError for a
    ranking of other users.
    """
    _same_users(split, ranking)
    found: dict = {"users": len(split.target), **ranking.summary(ks, ties)}
    for kind, label, mask in strata(split):
        means = ranking.take(mask).summary((10,), ties)
        found.setdefault(kind, {})[label] = {
            "users": int(mask.sum()),
            **{name: value for name, value in means.items() if mask.any()},
        }
    return found | {"top": ranking.top(max(ks))}


@dataclass(frozen=True)
class Difference:
    """A paired difference with its bootstrap interval.

    ``absolute`` = mean(b) − mean(a); ``relative`` is that over mean(a);
    each with the ends of the interval at ``level``.
    """

    absolute: float
    absolute_low: float
    absolute_high: float
    relative: float
    relative_low: float
    relative_high: float
    level: float
    resamples: int


def paired_bootstrap(
    a: NDArray,
    b: NDArray,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Is b better than a? Percentile interval, users kept paired.

    Shapes: ``a`` and ``b`` (users,), or (seeds, users) for several training
    runs a side. Users are drawn anew with replacement, the same for both
    sides and all seeds; given several seeds, the runs are drawn anew too, in
    pairs where both sides have equally many: run s of a and run s of b should
    share their seed, with it the batches, the negatives and the items' first
    vectors, and so some of their luck. Unequal numbers are drawn
    independently. Few runs understate their own spread: the variance of S
    drawn runs is (S − 1)/S of the unbiased one. Equation (20.3) is the
    variance of a resampled mean, runs in pairs. A relative interval is NaN
    where a resample of ``a`` has mean 0.
    Raises: ValueError for shapes that do not pair, NaN or infinity, fewer
    than two users (there is nothing to draw), or fewer than 1 resample.
    """
    return pooled_bootstrap(
        [(a, b)], resamples=resamples, level=level, seed=seed
    )


def pooled_bootstrap(
    pairs: Sequence[tuple[NDArray, NDArray]],
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The mean difference over data sets, each set counted once.

    ``pairs``: (a, b) of each set, as :func:`paired_bootstrap` takes them;
    sets share no users and are drawn independently. ``absolute`` and
    ``relative`` are means over sets. The sets stay as they are: the interval
    says nothing about a set that is not among them.
    Raises: ValueError for no pair, and as :func:`paired_bootstrap`.
    """
    if not pairs:
        raise ValueError("pairs: expected at least one, got none")
    resamples = count("resamples", resamples, 1)
    if not 0 < level < 1:
        raise ValueError(f"level: expected in (0, 1), got {level!r}")
    rng = np.random.default_rng(seed)
    drawn = np.stack([_resampled(a, b, resamples, rng) for a, b in pairs])
    found = np.array([[np.mean(x) for x in pair] for pair in pairs])
    tails = [(1 - level) / 2, (1 + level) / 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (drawn[:, 1] / drawn[:, 0] - 1).mean(0)
        relative = float((found[:, 1] / found[:, 0] - 1).mean())
    if not np.isfinite(relative):
        relative = np.nan
    if not np.isfinite(ratios).all():
        ratios = np.full(resamples, np.nan)
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]).mean(0), tails)
    relative_low, relative_high = np.quantile(ratios, tails)
    return Difference(
        float((found[:, 1] - found[:, 0]).mean()),
        float(low),
        float(high),
        relative,
        float(relative_low),
        float(relative_high),
        level,
        resamples,
    )


def _resampled(
    a: NDArray, b: NDArray, resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Means of a and of b in each resample, (2, resamples)."""
    a, b = (np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in (a, b))
    flat = a.ndim == b.ndim == 2 and len(a) > 0 and len(b) > 0
    if not flat or a.shape[1] != b.shape[1] or a.shape[1] < 2:
        raise ValueError(
            f"a, b: expected (users,) or (seeds, users) of the same users, "
            f"two or more, got {a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a, b: expected numbers, got NaN or infinity")
    n = a.shape[1]
    means = np.empty((2, resamples))
    for r in range(resamples):
        weight = np.bincount(rng.integers(n, size=n), minlength=n) / n
        drawn = rng.integers(len(a), size=len(a))
        means[0, r] = (a @ weight)[drawn].mean()
        if len(b) != len(a):
            drawn = rng.integers(len(b), size=len(b))
        means[1, r] = (b @ weight)[drawn].mean()
    return means


def popularity(split: Split) -> Scorer:
    """Score an item by how often it was seen in training: no sequence."""
    scores = torch.as_tensor(split.frequency, dtype=torch.float64)
    scores[0] = -torch.inf
    return lambda user_indices: scores.expand(len(user_indices), -1)


def item_knn(
    split: Split, *, neighbours: int = 100, shrink: float = 10.0
) -> Scorer:
    """Score an item by its cosine similarity to the items of the history.

    Similarity is co-occurrence over users, damped by ``shrink`` so that two
    items seen together once are not perfect twins; each item keeps its
    ``neighbours`` most similar ones.
    Raises: ValueError for no neighbours or a ``shrink`` below 0.
    """
    neighbours = count("neighbours", neighbours, 1)
    if not 0 <= shrink < np.inf:
        raise ValueError(f"shrink: expected a number >= 0, got {shrink!r}")
    training = split.training
    met = _incidence(training)
    met.data[:] = 1
    together = (met.T @ met).tocsr()
    norm = np.sqrt(together.diagonal())
    together.setdiag(0)
    together.eliminate_zeros()
    rows = np.repeat(np.arange(together.shape[0]), np.diff(together.indptr))
    together.data = together.data / (
        norm[rows] * norm[together.indices] + shrink
    )
    order = np.lexsort((-together.data, rows))
    place = np.arange(len(rows)) - together.indptr[rows]
    kept = order[place < neighbours]
    nearest = sparse.csr_matrix(
        (together.data[kept], (rows[kept], together.indices[kept])),
        shape=together.shape,
    )
    history = _incidence(split.history)

    def score(user_indices):
        return (history[user_indices] @ nearest).toarray()

    return score


def _incidence(sequences: Sequences) -> sparse.csr_matrix:
    """Users × (items + 1): how often each user met each item."""
    matrix = sparse.csr_matrix(
        (
            np.ones(len(sequences.items)),
            sequences.items,
            sequences.offsets,
        ),
        shape=(len(sequences), sequences.n_items + 1),
    )
    matrix.sum_duplicates()
    return matrix
