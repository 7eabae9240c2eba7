"""Exact match and F1 of an answer, by SQuAD's rules."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torchmetrics.functional.text import squad


def score(
    answers: Sequence[str], accepted: Sequence[Iterable[str]]
) -> dict[str, NDArray[np.float64]]:
    """``em`` and ``f1`` of each question, (n,), in [0, 1].

    The best over the accepted answers; case, punctuation and articles do not
    count. torchmetrics gives means, so it is asked question by question: what
    is paired later needs each. Raises: ValueError for other numbers of both.
    """
    if len(answers) != len(accepted):
        raise ValueError(
            f"answers: expected one for each of {len(accepted)} questions, "
            f"got {len(answers)}"
        )
    found = [_one(*pair) for pair in zip(answers, accepted, strict=True)]
    em, f1 = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return {"em": em, "f1": f1}


def _one(answer: str, accepted: Iterable[str]) -> tuple[float, float]:
    texts = list(accepted)
    found = squad(
        [{"prediction_text": answer, "id": "0"}],
        [
            {
                "answers": {"text": texts, "answer_start": [0] * len(texts)},
                "id": "0",
            }
        ],
    )
    return float(found["exact_match"]) / 100, float(found["f1"]) / 100
