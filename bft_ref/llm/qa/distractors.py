"""Passages that a retriever takes for the right one: BM25, by bm25s."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import bm25s
import numpy as np

from bft_ref.llm.qa.data import Question


@dataclass(frozen=True)
class Ranked:
    """The gold passage's BM25 score, and the best other passages with theirs.

    None of the others holds an accepted answer.
    """

    gold: float
    passages: tuple[str, ...]
    scores: tuple[float, ...]


def rank(
    questions: Sequence[Question],
    corpus: Sequence[str] | None = None,
    *,
    keep: int = 3,
) -> list[Ranked]:
    """For each question the ``keep`` best passages that do not answer it.

    ``corpus``: by default the questions' own passages. The gold passage, and
    whatever holds an accepted answer as words of its own, is left out.
    Raises: ValueError where fewer than ``keep`` are left.
    """
    passages = list(
        dict.fromkeys(
            [*(q.passage for q in questions), *(corpus or ())]
        ).keys()
    )
    index = bm25s.BM25()
    index.index(_words(passages), show_progress=False)
    place = {passage: i for i, passage in enumerate(passages)}
    asked = _words([q.question for q in questions])
    found = []
    for question, words in zip(questions, asked, strict=True):
        scores = index.get_scores(words)
        answers = _answers(question)
        chosen: list[int] = []
        # stable: equal scores keep the corpus's order
        for i in np.argsort(-scores, kind="stable"):
            if len(chosen) == keep:
                break
            other = passages[i] != question.passage
            if other and not answers.search(passages[i]):
                chosen.append(int(i))
        if len(chosen) < keep:
            raise ValueError(
                f"corpus: expected {keep} passages that do not answer "
                f"question {question.id}, got {len(chosen)}"
            )
        found.append(
            Ranked(
                float(scores[place[question.passage]]),
                tuple(passages[i] for i in chosen),
                tuple(float(scores[i]) for i in chosen),
            )
        )
    return found


def context(
    question: Question, ranked: Ranked, k: int, *, seed: int = 0
) -> tuple[list[str], int, list[float]]:
    """The gold passage among its ``k`` best distractors, in a drawn order.

    Returns the passages, where gold is, and the retriever's scores. The
    order depends on the seed and the question, not on who else is asked.
    Raises: ValueError for more distractors than were kept.
    """
    if not 0 <= k <= len(ranked.passages):
        raise ValueError(
            f"k: expected 0 <= k <= {len(ranked.passages)}, the distractors "
            f"kept, got {k}"
        )
    shown = [question.passage, *ranked.passages[:k]]
    scores = [ranked.gold, *ranked.scores[:k]]
    rng = np.random.default_rng([seed, crc32(question.id.encode())])
    order = rng.permutation(k + 1).tolist()
    return (
        [shown[i] for i in order],
        order.index(0),
        [scores[i] for i in order],
    )


def _words(texts: Sequence[str]) -> list[list[str]]:
    return bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )


def _answers(question: Question) -> re.Pattern:
    """Any accepted answer, as words, whatever the case and the spaces."""
    alternatives = (
        r"\s+".join(map(re.escape, answer.split()))
        for answer in question.answers
    )
    return re.compile(
        rf"(?<!\w)(?:{'|'.join(alternatives)})(?!\w)", re.IGNORECASE
    )
