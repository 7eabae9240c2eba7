"""A retriever's score as known precision of a passage's tokens, or as a bias.

Both say the same of a token: log τ = ``strength`` · log (score / best score)
of its passage, 0 outside passages. As precision it is where the filter's
belief starts; as a bias it is added to the attention logits of every upper
layer, and stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

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
        if not example.retrieved or min(example.retrieved) <= 0:
            raise ValueError(
                f"examples: expected a retriever's scores > 0 in {example.id}"
                f", got {example.retrieved}"
            )
        scores = torch.tensor(example.retrieved)
        # the last is that of the passage −1, of no passage
        of_passage = torch.cat([(scores / scores.max()).log(), scores[:1] * 0])
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


def widened(
    model: LlamaForCausalLM,
    hidden: Tensor,
    examples: Sequence[Example],
    known: Known | None,
) -> Tensor:
    """The hidden states, with log τ beside them where it is known."""
    if known is None or known.role != "precision":
        return hidden
    raise NotImplementedError  # until the model is here
