"""Losses for choosing the next item out of a large catalogue."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bft_ref import checks

Loss = Literal["sampled", "full", "bce", "gbce"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


def uniform_negatives(
    count: int, n_items: int, generator: torch.Generator
) -> Tensor:
    """``count`` item ids drawn uniformly from 1…n_items, with replacement."""
    return torch.randint(1, n_items + 1, (count,), generator=generator)


def next_item_loss(
    query: Tensor,
    target: Tensor,
    keys: Tensor,
    bias: Tensor | None,
    negatives: Tensor | None,
    *,
    n_items: int,
    kind: str = "sampled",
    correct: bool = True,
    calibration: float = 0.75,
) -> Tensor:
    """The mean loss of N answered questions, a scalar.

    kind: ``full``, cross-entropy over the catalogue; ``sampled``, over the
    target and ``negatives``, whose logits gain log((n_items − 1)/m) with
    ``correct``, so that the sum estimates the full one; ``bce``, one against
    the others; ``gbce``, the same with log σ(s⁺) scaled down against
    overconfidence by ``calibration`` t in [0, 1] (gSASRec, Petrov & Macdonald
    2023; the rate m/(n_items − 1) counts as at most one).
    A negative that is the question's own target does not count.
    Equations (13.2) and (13.3) say how well ``sampled`` estimates ``full``.

    Shapes: ``query`` (N, d); ``target`` (N,); ``keys`` (≥ n_items + 1, d);
    ``bias`` (≥ n_items + 1,) or None; ``negatives`` (m,), shared by all
    questions, None for ``full``.
    Raises: ValueError for another kind, missing negatives, no question, too
    few keys, or ids that are not in 1…n_items.
    """
    checks.choice("loss", kind, LOSSES)
    if len(keys) <= n_items:
        raise ValueError(
            f"keys: expected at least n_items + 1 = {n_items + 1} rows, got "
            f"{len(keys)}"
        )
    if len(target) < 1:
        raise ValueError("target: expected at least one question, got none")
    _ids("target", target, n_items)
    if kind == "full":
        rows = slice(1, n_items + 1)
        bias = None if bias is None else bias[rows]
        logits = F.linear(query, keys[rows], bias)
        return F.cross_entropy(logits, target - 1)
    if negatives is None or len(negatives) == 0:
        raise ValueError(f"negatives: expected at least one for {kind!r}")
    _ids("negatives", negatives, n_items)
    positive = (query * keys[target]).sum(-1)
    negative = F.linear(
        query, keys[negatives], None if bias is None else bias[negatives]
    )
    if bias is not None:
        positive = positive + bias[target]
    own = target[:, None] == negatives
    m = len(negatives)
    others = max(n_items - 1, 1)  # of one item there is no other
    if kind == "sampled":
        if correct:
            negative = negative + math.log(others / m)
        negative = negative.masked_fill(own, -torch.inf)
        logits = torch.cat([positive[:, None], negative], 1)
        return (logits.logsumexp(1) - positive).mean()
    beta = 1.0
    if kind == "gbce":
        rate = min(m / others, 1.0)
        beta = rate * (calibration * (1 - 1 / rate) + 1 / rate)
    right = beta * F.logsigmoid(positive)
    wrong = F.logsigmoid(-negative).masked_fill(own, 0.0).sum(1)
    return -(right + wrong).mean() / (m + 1)


def _ids(name: str, ids: Tensor, n_items: int) -> None:
    if ids.dtype != torch.long:
        raise TypeError(
            f"{name}: expected item ids of dtype int64, got {ids.dtype}"
        )
    if checks.anywhere((ids < 1) | (ids > n_items)) == [True]:
        raise ValueError(
            f"{name}: expected item ids in 1…{n_items}, got "
            f"{int(ids.min())}…{int(ids.max())}"
        )
