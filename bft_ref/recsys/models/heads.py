"""From a state to the scores of all items: a product, or two beliefs compared.

A head's scores come from two tables, what the states ask and what the items
answer, and one function of the model, which the loss calls too.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref.support.numerics import at_least_float32, log_mean_exp

HeadKind = Literal["dot", "gaussian", "item_bias", "item_temperature"]
#: (query, item_embeddings, bias, paired) → scores, such as :func:`dot`
Score = Callable[[Tensor, Tensor, Tensor | None, bool], Tensor]


def dot(
    query: Tensor,
    item_embeddings: Tensor,
    bias: Tensor | None = None,
    paired: bool = False,
) -> Tensor:
    """s_i = ĥ·v_i + b_i of every item, or (``paired``) of one for each query.

    Shapes: ``query`` (N, d), ``item_embeddings`` (M, d), ``bias`` (M,) or None
    → (N, M), or (N,) if ``paired``, M = N.
    """
    if not paired:
        return F.linear(query, item_embeddings, bias)
    scores = (query * item_embeddings).sum(-1)
    return scores if bias is None else scores + bias


def gaussian(
    query: Tensor, item_embeddings: Tensor, paired: bool = False
) -> Tensor:
    """Log density of item i where a state is believed to be, but for 2π.

    s_i = −½[‖ĥ − v_i‖²/(a + c_i) + d log(a + c_i)]: N(v_i; ĥ, a + c_i), a the
    variance of the state, c_i = 1/τ_i that of the item. With a variance a_f
    for each feature the sum over f, −½Σ_f[(ĥ_f − v_if)²/(a_f + c_i) +
    log(a_f + c_i)], is no product of matrices; here all share their mean,
    a = mean_f a_f, exact where they are equal. Ours.

    Shapes: ``query`` (N, d + 1), the last column log a; ``item_embeddings``
    (M, d + 1), the last column log c → (N, M), or (N,) if ``paired``.
    """
    state, log_a = query[:, :-1], at_least_float32(query[:, -1:])
    items, log_c = item_embeddings[:, :-1], item_embeddings[:, -1]
    if paired:
        distance = (state - items).square().sum(-1)
        log_a = log_a.squeeze(-1)
    else:
        distance = state.square().sum(-1, True) + items.square().sum(-1)
        distance = (distance - 2 * state @ items.mT).clamp(min=0)
    log_variance = torch.logaddexp(log_a, at_least_float32(log_c))
    size = at_least_float32(distance) * (-log_variance).exp()
    return -0.5 * (size + state.shape[-1] * log_variance)


class Head(nn.Module):
    """What a state's scores of the items are made of, beside their vectors.

    kind: ``dot``, ĥ·v_i; ``item_bias``, ĥ·v_i + b_i; ``item_temperature``,
    (ĥ·v_i)·exp(t_i); ``gaussian``, θ times :func:`gaussian` of s·ĥ, whose
    variance is s²a, with learned s, θ and τ_i, the candidate's precision. A
    plain model's λ is learned, one per feature, 1 at first; a filter's is its
    last λ'', carried through the final norm by (9.4). A normed state has
    variance 1 if nothing is known of it, so a is the mean of 1/(1 + λ), where
    first order alone would know no bound.

    ``plain`` is a model without filter. The ``gaussian`` starts with
    s = d^-1/2, so that s·ĥ has length 1, whatever the length of the first item
    vectors: started as short as they are at SD 0.02, it left popularity
    behind much later. 1/τ = s² is as uncertain as a state of which nothing is
    known, and θ = 2s: θs/(a + c) is then from 1, the scale of a product, to 2.

    Shapes: ``rows`` of the item table; b, t, log τ (rows,), log λ (d,).
    """

    def __init__(self, kind: HeadKind, rows: int, d_model: int, plain: bool):
        super().__init__()
        self.kind = kind
        if kind == "item_bias":
            self.bias = nn.Parameter(torch.zeros(rows))
        elif kind == "item_temperature":
            self.log_item_temperature = nn.Parameter(torch.zeros(rows))
        elif kind == "gaussian":
            log = -0.5 * math.log(d_model)
            self.log_scale = nn.Parameter(torch.full((1,), log))
            self.log_temperature = nn.Parameter(
                torch.full((1,), log + math.log(2))
            )
            self.log_candidate_precision = nn.Parameter(
                torch.full((rows,), -2 * log)
            )
            if plain:
                self.log_precision = nn.Parameter(torch.zeros(d_model))

    def state(self, hidden: Tensor, log_precision: Tensor) -> Tensor:
        """A normed state with log a, of its mean variance, behind it.

        Shapes: (..., d) and (..., d) or (d,) → (..., d + 1).
        """
        log_variance = -F.softplus(at_least_float32(log_precision))
        log_variance = log_mean_exp(log_variance).to(hidden.dtype)
        log_variance = log_variance.expand(*hidden.shape[:-1], 1)
        return torch.cat([hidden, log_variance], -1)

    def query(self, state: Tensor) -> Tensor:
        """What a state asks; with a variance, both in the items' units."""
        if self.kind != "gaussian":
            return state
        hidden, log_variance = state[..., :-1], state[..., -1:]
        log = self.log_scale
        return torch.cat([log.exp() * hidden, 2 * log + log_variance], -1)

    def items(self, embeddings: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the items answer, (rows, d or d + 1), and a bias or None."""
        if self.kind == "item_bias":
            return embeddings, self.bias
        if self.kind == "item_temperature":
            factor = self.log_item_temperature.exp().unsqueeze(1)
            return embeddings * factor, None
        if self.kind == "gaussian":
            log_variance = -self.log_candidate_precision.unsqueeze(1)
            return torch.cat([embeddings, log_variance], 1), None
        return embeddings, None

    def score(
        self,
        query: Tensor,
        item_embeddings: Tensor,
        bias: Tensor | None = None,
        paired: bool = False,
    ) -> Tensor:
        """Scores (N, M), or (N,) of pairs, of what asks and answers."""
        if self.kind != "gaussian":
            return dot(query, item_embeddings, bias, paired)
        found = gaussian(query, item_embeddings, paired)
        return self.log_temperature.exp() * found
