"""Losses for choosing the next item out of a large catalogue."""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref.recsys.models.heads import Score, dot
from bft_ref.support import checks

Loss = Literal["sampled", "full", "bce", "gbce"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


def uniform_negatives(
    count: int, n_items: int, generator: torch.Generator
) -> Tensor:
    """``count`` item ids drawn uniformly from 1…n_items, with replacement.

    Raises: ValueError for a number below 1.
    """
    checks.count("count", count, 1)
    checks.count("n_items", n_items, 1)
    return torch.randint(1, n_items + 1, (count,), generator=generator)


def noise_penalty(model: nn.Module, start: float, sd: float) -> Tensor:
    """−log of a log-normal prior on every Q, but for a constant.

    Σ (log Q − log Q₀)²/(2 sd²) over layers and features, Q₀ = ``start`` the
    Q before training, in state². Beside the sum of an epoch's losses, each
    question's once, it makes the trained Q a mode of the posterior (MAP, of
    log Q). Ours.

    Raises: ValueError for ``start`` or ``sd`` that is not positive, or a
    model without process noise.
    """
    checks.number("start", start, 0.0)
    checks.number("sd", sd, 0.0)
    away = [
        (log_q - math.log(start)).square().sum()
        for name, log_q in model.named_parameters()
        if name.endswith("log_process_noise")
    ]
    if not away:
        raise ValueError(
            "model: expected a Bayesian filter, got a model without process "
            "noise"
        )
    return torch.stack(away).sum() / (2 * sd**2)


def next_item_loss(
    query: Tensor,
    target: Tensor,
    item_embeddings: Tensor,
    bias: Tensor | None,
    negatives: Tensor | None,
    *,
    n_items: int,
    kind: Loss = "sampled",
    logq_correction: bool = True,
    gbce_t: float = 0.75,
    score: Score = dot,
) -> Tensor:
    """The mean loss of N answered questions, a scalar.

    kind: ``full``, cross-entropy over the catalogue; ``sampled``, over the
    target and ``negatives``, whose logits gain log((n_items − 1)/m) with
    ``logq_correction``, so that the sum estimates the full one; ``bce``, one
    against the others; ``gbce``, the same with log σ(s⁺) scaled down against
    overconfidence by ``gbce_t`` in [0, 1] (gSASRec, Petrov & Macdonald 2023;
    the rate m/(n_items − 1) counts as at most one).
    A negative that is the question's own target does not count: with a single
    item there is nothing to choose, and ``sampled`` is 0 as ``full`` is.
    Equations (20.5) and (20.6) say how well ``sampled`` estimates ``full``.
    ``score`` is the model's own (:meth:`bft_ref.recsys.models.Head.score`).

    Shapes: ``query`` (N, d); ``target`` (N,); ``item_embeddings``
    (≥ n_items + 1, d); ``bias`` (≥ n_items + 1,) or None; ``negatives`` (m,),
    shared by all questions, None for ``full``.
    Raises: ValueError for another kind, missing negatives, shapes that do
    not fit, ids outside 1…n_items or a ``gbce_t`` outside [0, 1]; TypeError
    for ids that are no integers.
    """
    checks.choice("loss", kind, LOSSES)
    checks.count("n_items", n_items, 1)
    checks.shape("query", query, ["N", "d"])
    checks.shape("target", target, [len(query)])
    width = query.shape[1]
    checks.shape("item_embeddings", item_embeddings, ["n_items + 1", width])
    if bias is not None:
        checks.shape("bias", bias, ["n_items + 1"])
    for name, table in [("item_embeddings", item_embeddings), ("bias", bias)]:
        if table is not None and len(table) <= n_items:
            raise ValueError(
                f"{name}: expected n_items + 1 = {n_items + 1} rows or more, "
                f"the first padding's, got {len(table)}"
            )
    _item_ids("target", target, n_items)
    if kind == "full":
        rows = slice(1, n_items + 1)
        bias = None if bias is None else bias[rows]
        logits = score(query, item_embeddings[rows], bias, False)
        return F.cross_entropy(logits, target - 1)
    if negatives is None or len(negatives) == 0:
        raise ValueError(f"negatives: expected at least one for {kind!r}")
    checks.shape("negatives", negatives, ["m"])
    _item_ids("negatives", negatives, n_items)
    checks.within("gbce_t", gbce_t, 0.0, 1.0)
    positive, negative = (
        score(
            query,
            item_embeddings[ids],
            None if bias is None else bias[ids],
            paired,
        )
        for ids, paired in [(target, True), (negatives, False)]
    )
    own = target[:, None] == negatives
    m, others = len(negatives), max(n_items - 1, 1)
    if kind == "sampled":
        if logq_correction:
            negative = negative + math.log(others / m)
        negative = negative.masked_fill(own, -torch.inf)
        logits = torch.cat([positive[:, None], negative], 1)
        return (logits.logsumexp(1) - positive).mean()
    beta = 1.0
    if kind == "gbce":
        rate = min(m / others, 1.0)
        beta = rate * (gbce_t * (1 - 1 / rate) + 1 / rate)
    right = beta * F.logsigmoid(positive)
    wrong = F.logsigmoid(-negative).masked_fill(own, 0.0).sum(1)
    return -(right + wrong).mean() / (m + 1)


def _item_ids(name: str, ids: Tensor, n_items: int) -> None:
    if ids.dtype != torch.int64:
        raise TypeError(f"{name}: expected item ids as int64, got {ids.dtype}")
    if not len(ids):
        raise ValueError(f"{name}: expected at least one, got none")
    if checks.values_can_be_read():
        low, high = torch.stack(ids.aminmax()).tolist()
        if not 1 <= low <= high <= n_items:
            raise ValueError(
                f"{name}: expected ids in 1…{n_items}, got {low}…{high}"
            )
