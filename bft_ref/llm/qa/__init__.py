"""Question answering: data, prompts, noise, and SQuAD's scores."""

from bft_ref.llm.qa.data import (
    FILES,
    Question,
    load,
    read_nq_open,
    read_xquad,
)
from bft_ref.llm.qa.distractors import Ranked, context, rank
from bft_ref.llm.qa.examples import (
    Example,
    corrupt,
    encode,
    ground,
    prompt,
    split,
)
from bft_ref.llm.qa.scores import score

__all__ = [
    "FILES",
    "Example",
    "Question",
    "Ranked",
    "context",
    "corrupt",
    "encode",
    "ground",
    "load",
    "prompt",
    "rank",
    "read_nq_open",
    "read_xquad",
    "score",
    "split",
]
