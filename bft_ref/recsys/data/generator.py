"""Sequences whose items are measurements of known reliability."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bft_ref.recsys.data.sequences import Sequences
from bft_ref.support.checks import count, number


@dataclass(frozen=True)
class Simulation:
    """Simulated sequences together with the truth behind them.

    Shapes: ``position`` (n_items + 1, k) in state units, ``variance``
    (n_items + 1,) in state²: the noise of the state's measurement that an
    item is; ``popularity`` (n_items + 1,) sums to one; row 0 is padding.
    ``drift`` and ``pull`` are the state's: s' = pull · s + N(0, drift).
    """

    sequences: Sequences
    position: NDArray[np.float64]
    variance: NDArray[np.float64]
    popularity: NDArray[np.float64]
    drift: float
    pull: float

    @property
    def spread(self) -> float:
        """The state's stationary variance, drift / (1 − pull²)."""
        return self.drift / (1 - self.pull**2)

    def oracle(
        self, histories: Sequences, *, variance: NDArray | None = None
    ) -> NDArray[np.float64]:
        """Log scores of all items by a Kalman filter that knows the items.

        Each item of a history is a measurement ``position`` of the state
        with ``variance`` (the truth by default: pass another to see what a
        wrong precision costs); an item's score is its popularity times the
        density of the predicted state at it. An approximation: the filter
        ignores that the items compete for every choice.

        Shape: (users, n_items + 1), column 0 is −inf. Raises: ValueError for
        histories of another catalogue, or a ``variance`` that is not positive
        or has another shape than the truth.
        """
        n = len(self.popularity)
        if histories.n_items + 1 != n:
            raise ValueError(
                f"histories: expected n_items {n - 1}, got {histories.n_items}"
            )
        variance = self.variance if variance is None else np.asarray(variance)
        if variance.shape != (n,) or not (variance[1:] > 0).all():
            raise ValueError(
                f"variance: expected positive numbers, shape ({n},), the "
                f"first padding's; got shape {variance.shape}"
            )
        k = self.position.shape[1]
        scores = np.full((len(histories), len(self.popularity)), -np.inf)
        for user in range(len(histories)):
            mean, spread = np.zeros(k), self.spread
            for item in histories[user]:
                gain = spread / (spread + variance[item])
                mean = mean + gain * (self.position[item] - mean)
                spread = (1 - gain) * spread
                mean = self.pull * mean
                spread = self.pull**2 * spread + self.drift
            scores[user, 1:] = _log_density(
                mean, self.position[1:], self.variance[1:] + spread
            ) + np.log(self.popularity[1:])
        return scores


def _log_density(at, position, variance):
    """log N(at; position, variance I), for each row of ``position``."""
    k = position.shape[1]
    squares = ((at - position) ** 2).sum(-1)
    return -0.5 * (squares / variance + k * np.log(2 * np.pi * variance))


def simulate(
    n_users: int = 2000,
    n_items: int = 400,
    *,
    length: tuple[int, int] = (5, 20),
    state: int = 3,
    popularity: float = 1.0,
    noise: tuple[float, float] = (0.1, 10.0),
    drift: float = 0.2,
    pull: float = 0.95,
    seed: int = 0,
) -> Simulation:
    """Sequences in which each item measures a hidden state with known noise.

    A user's state walks in ``state`` dimensions. At each step item i is
    chosen with probability ∝ popularity_i · N(s; position_i, variance_i):
    a reliable item (small variance) is met only near its own position, and so
    tells much about the state; an unreliable one is met anywhere. Popularity
    falls with rank as rank^(−popularity); variances are log-uniform in
    ``noise`` and independent of popularity. No item twice in a row of one
    user, so that removing the history loses no target.
    The same arguments give the same sequences.
    Raises: ValueError for a size below one, an unordered range, noise or
    drift not above 0 or not finite, a pull outside (0, 1), or lengths beyond
    n_items; TypeError for a size that is no whole number.
    """
    for name, value in [
        ("n_users", n_users),
        ("n_items", n_items),
        ("state", state),
    ]:
        count(name, value, 1)
    ends = [count("length", end, 1) for end in length]
    if len(ends) != 2 or not ends[0] <= ends[1] <= n_items:
        raise ValueError(
            f"length: expected 1 <= low <= high <= {n_items}, got {length}"
        )
    variances = [number("noise", end, 0) for end in noise]
    if len(variances) != 2 or variances[0] > variances[1]:
        raise ValueError(f"noise: expected 0 < low <= high, got {noise}")
    number("drift", drift, 0)
    number("popularity", popularity, -np.inf)
    if not 0 < pull < 1:
        raise ValueError(f"pull: expected in (0, 1), got {pull!r}")
    rng = np.random.default_rng(seed)
    spread = drift / (1 - pull**2)
    position = rng.normal(0, np.sqrt(spread), (n_items + 1, state))
    low, high = np.log(variances)
    variance = np.exp(rng.uniform(low, high, n_items + 1))
    weight = np.arange(1, n_items + 1, dtype=np.float64) ** -popularity
    weight = np.concatenate([[0.0], rng.permutation(weight / weight.sum())])
    position[0], variance[0] = 0, np.inf

    lengths = rng.integers(ends[0], ends[1] + 1, n_users)
    s = rng.normal(0, np.sqrt(spread), (n_users, state))
    met = np.zeros((n_users, n_items), dtype=bool)
    chosen = np.zeros((n_users, lengths.max()), dtype=np.int64)
    log_weight = np.log(weight[1:])
    for step in range(lengths.max()):
        score = log_weight + _log_density(
            s[:, None], position[1:], variance[1:]
        )
        # The largest of score + Gumbel noise is a draw from softmax(score).
        score += rng.gumbel(size=score.shape)
        score[met] = -np.inf
        item = score.argmax(-1)
        met[np.arange(n_users), item] = True
        chosen[:, step] = item + 1
        s = pull * s + rng.normal(0, np.sqrt(drift), s.shape)
    rows = [row[:n] for row, n in zip(chosen, lengths, strict=True)]
    return Simulation(
        Sequences.of(rows, n_items=n_items, name=f"simulation-{seed}"),
        position,
        variance,
        weight,
        drift,
        pull,
    )
