"""From questions to tokens: prompts, splits, and answers with noise."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bft_ref.llm.qa.data import Question
from bft_ref.support import checks


@dataclass(frozen=True)
class Example:
    """A question as tokens.

    ``answer`` begins after the prompt and ends with the end of text.
    ``passage_of`` has, for each token of the prompt, which passage it is of,
    or −1; ``gold_passage`` says which one answers; ``retrieved`` are the
    retriever's scores of the passages, where it was asked.
    """

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    accepted: tuple[str, ...]
    passage_of: tuple[int, ...]
    gold_passage: int = 0
    retrieved: tuple[float, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer


def ground(question: Question) -> str | None:
    """The first accepted answer that the passage holds word for word."""
    return next((a for a in question.answers if a in question.passage), None)


def prompt(question: str, passages: Iterable[str]) -> str:
    """What the model is asked; it goes on with a space and the answer."""
    shown = "".join(f"Passage: {each}\n" for each in passages)
    return f"{shown}Question: {question.rstrip('?').rstrip()}?\nAnswer:"


def encode(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    passages: Sequence[str] | None = None,
    *,
    gold_passage: int = 0,
    retrieved: Sequence[float] = (),
) -> Example:
    """The tokens of a question about ``passages``, by default its own.

    Raises: ValueError for a question that :func:`ground` finds no answer to.
    """
    passages = [question.passage] if passages is None else passages
    answer = ground(question)
    if answer is None:
        raise ValueError(
            f"question: expected an answer that is in the passage of "
            f"{question.id}, got {question.answers}; leave it out"
        )
    text = prompt(question.question, passages)
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True
    )
    ends = np.cumsum([len(f"Passage: {each}\n") for each in passages])
    passage_of = [
        int(np.searchsorted(ends, start, side="right"))
        for start, _ in found["offset_mapping"]
    ]
    told = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
    return Example(
        question.id,
        tuple(found["input_ids"]),
        (*told, tokenizer.eos_token_id),
        question.answers,
        tuple(-1 if p == len(passages) else p for p in passage_of),
        gold_passage,
        tuple(retrieved),
    )


def split(
    questions: Sequence[Question],
    sizes: Mapping[str, int],
    *,
    seed: int = 0,
    one_a_passage: bool = True,
) -> dict[str, list[Question]]:
    """Disjoint parts of the questions, in an order that a seed draws.

    ``one_a_passage``: of the questions to one passage the first stays, so
    that no passage is in two parts. Raises: ValueError for more than there
    are.
    """
    found = list(questions)
    if one_a_passage:
        found = list({q.passage: q for q in found[::-1]}.values())[::-1]
    if sum(sizes.values()) > len(found):
        own = ", each with a passage of its own" if one_a_passage else ""
        raise ValueError(
            f"sizes: expected at most {len(found)} questions{own}, got "
            f"{dict(sizes)}"
        )
    order = np.random.default_rng(seed).permutation(len(found))
    bounds = np.cumsum([0, *sizes.values()])
    return {
        name: [found[i] for i in order[start:end]]
        for name, start, end in zip(
            sizes, bounds[:-1], bounds[1:], strict=True
        )
    }


def corrupt(
    examples: Sequence[Example],
    rate: float,
    vocabulary: Sequence[int] | NDArray[np.int64],
    *,
    seed: int = 0,
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.bool_]]]:
    """The answers as labels, each token replaced with probability ``rate``.

    A replacement is drawn evenly from the other tokens of ``vocabulary``; the
    last token of an answer, the end of text, is never replaced. The same
    seed replaces, at a higher rate, the same tokens and more. Returns the
    labels, and where they are wrong.
    Raises: ValueError for a rate outside [0, 1] or less than two tokens.
    """
    rate = checks.within("rate", rate, 0.0, 1.0)
    tokens = np.unique(np.asarray(vocabulary, dtype=np.int64))
    if len(tokens) < 2:
        raise ValueError(
            f"vocabulary: expected two tokens or more, got {len(tokens)}"
        )
    rng = np.random.default_rng([seed, 1])
    labels, wrong = [], []
    for example in examples:
        answer = np.array(example.answer, dtype=np.int64)
        hit = rng.random(len(answer)) < rate
        hit[-1:] = False
        # one of the others: a draw that meets the token itself moves on
        drawn = rng.integers(len(tokens) - 1, size=len(answer))
        place = np.searchsorted(tokens, answer)
        present = tokens[np.minimum(place, len(tokens) - 1)] == answer
        drawn = np.where(present & (drawn >= place), drawn + 1, drawn)
        labels.append(np.where(hit, tokens[drawn], answer))
        wrong.append(hit)
    return labels, wrong


def digest(examples: Iterable[Example]) -> str:
    """SHA-256 of all tokens and where the prompts end."""
    found = hashlib.sha256()
    for each in examples:
        found.update(
            np.array([len(each.prompt), len(each.answer), *each.tokens])
            .astype("<i8")
            .tobytes()
        )
    return found.hexdigest()
