"""A retriever's score as known precision of a passage's tokens, or as a bias.

Both say the same of a token: log τ = ``strength`` · log (1 + s)/(1 + s_max), s
its passage's score, s_max the best passage's; 0 outside passages. As precision
it is where the filter's belief starts; as a bias it is added to the attention
logits of every upper layer, and stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bft_ref.llm.qa.examples import Example


@dataclass(frozen=True)
class Known:
    """How a retriever's scores enter: see the module."""

    role: Literal["precision", "bias"]
    strength: float = 1.0


def log_tau(
    examples: Sequence[Example], length: int, strength: float
) -> Tensor:
    """log τ of each token, (B, length); 0 of answers, and after their end.

    Raises: ValueError for an example without the retriever's scores.
    """
    found = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        if not example.retrieved or min(example.retrieved) < 0:
            raise ValueError(
                f"examples: expected a retriever's scores in {example.id}"
                f", got {example.retrieved}"
            )
        scores = torch.tensor(example.retrieved).log1p()
        # the last is that of the passage −1, of no passage
        of_passage = torch.cat([scores - scores.max(), scores[:1] * 0])
        place = torch.tensor(example.passage_of)
        found[row, : len(place)] = strength * of_passage[place]
    return found


def logit_bias(
    examples: Sequence[Example],
    length: int,
    known: Known | None,
    visible: Tensor | None = None,
) -> Tensor | None:
    """What a layer takes as mask: a bias where it is known, else visibility.

    ``visible`` (B, length), for the last token alone; None for causal
    attention.
    """
    if known is None or known.role != "bias":
        return None if visible is None else visible[:, None, None]
    bias = log_tau(examples, length, known.strength)[:, None, None]
    seen = (
        torch.ones(length, length, dtype=torch.bool).tril()
        if visible is None
        else visible[:, None, None]
    )
    return bias.masked_fill(~seen, -torch.inf)


class KnownPrecision(nn.Module):
    """log τ as a model learns it, and what is known of the tokens beside it.

    ``known`` (B, T) holds for the next calls of that many tokens; a token
    that is decoded later has none. ``log_tau`` of the model stays learned.
    """

    def __init__(self, learned: nn.Module):
        super().__init__()
        self.learned = learned
        self.known: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        """log τ, (B, T, 1)."""
        log = self.learned(h)
        if self.known is None or h.shape[1] == 1:
            return log
        return log.expand(*h.shape[:-1], log.shape[-1]) + self.known[..., None]


def tell(
    model: Any,
    examples: Sequence[Example],
    length: int,
    known: Known | None,
) -> None:
    """Tell a filter what is known of the tokens that it is called with."""
    if known is None or known.role != "precision":
        return
    first = model.filters()[0]
    if not isinstance(first.initial_precision, KnownPrecision):
        raise ValueError(
            "known: expected a model that adapt made for known precisions"
        )
    first.initial_precision.known = log_tau(examples, length, known.strength)
