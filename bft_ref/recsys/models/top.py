"""The best items of each row of scores, the same ones every time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bft_ref.support import checks


class Top(NamedTuple):
    """``items`` (B, k) ids and their ``scores`` (B, k), the best first.

    Where fewer than k items were left, the rest is 0 with −inf.
    """

    items: Tensor
    scores: Tensor


def top_items(scores: Tensor, k: int, excluded: Tensor | None = None) -> Top:
    """The k best items of each row; of two equal ones the lower id first.

    Shapes: ``scores`` (B, n_items + 1), of which column 0, padding's, is never
    given; ``excluded`` (B, S), ids that are not to be given, or 0.
    Raises: TypeError for other dtypes; ValueError for another shape, k < 1,
    an id that is not there, or a score that is NaN or +inf.
    """
    k = checks.count("k", k, 1)
    checks.shape("scores", checks.floating("scores", scores), ["B", "n + 1"])
    bad = (~(scores[:, 1:] < torch.inf)).any(1)
    if bad.any():
        raise ValueError(
            f"scores: expected numbers below infinity, got NaN or inf in row "
            f"{int(bad.nonzero()[0])}"
        )
    left = scores.clone()
    left[:, 0] = -torch.inf
    if excluded is not None:
        left.scatter_(1, _ids(excluded, scores), -torch.inf)
    n = min(k, left.shape[1])
    # topk alone takes any of equal scores
    bar = left.topk(n).values[:, -1:]
    above, level = left > bar, left == bar
    spare = n - above.sum(1, keepdim=True)
    taken = above | (level & (level.cumsum(1, dtype=torch.int32) <= spare))
    ids = taken.nonzero()[:, 1].view(-1, n)
    found = left.gather(1, ids)
    best, order = found.sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order).masked_fill(best == -torch.inf, 0)
    missing = (0, k - n)
    return Top(F.pad(ids, missing), F.pad(best, missing, value=-torch.inf))


def _ids(excluded: Tensor, scores: Tensor) -> Tensor:
    checks.shape("excluded", excluded, [len(scores), "S"])
    if excluded.is_floating_point() or excluded.dtype == torch.bool:
        raise TypeError(f"excluded: expected ids, got {excluded.dtype}")
    n_items = scores.shape[1] - 1
    wrong = (excluded < 0) | (excluded > n_items)
    if wrong.any():
        row, at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"excluded: expected ids in 0…{n_items}, got "
            f"{int(excluded[row, at])} in row {row} at position {at}"
        )
    return excluded.long()
