"""Questions whose passage is given: NQ-Open's gold passages, and XQuAD."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bft_ref.training.files import (
    MalformedLineError,
    PublicFile,
    fetch,
    text_file,
)


@dataclass(frozen=True)
class Question:
    """A question, the passage that answers it, and accepted answers."""

    id: str
    question: str
    passage: str
    answers: tuple[str, ...]


FILES = {
    "nq-open": PublicFile(
        "nq-open-oracle.jsonl.gz",
        "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/"
        "29b8a6d042ce29abccee3db1a73171a107d7e6af/qa_data/"
        "nq-open-oracle.jsonl.gz",
        "6a7f72b846f663a133ef952244e5a4e43f06bcf190afe34e8fbe687ce0d1653e",
    ),
    "xquad": PublicFile(
        "xquad.en.json",
        "https://raw.githubusercontent.com/google-deepmind/xquad/"
        "7d30520c717524000f0d9d2f9c10a069acd9d285/xquad.en.json",
        "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29",
    ),
}


def load(name: str, folder: str | Path | None = None) -> list[Question]:
    """The questions of ``nq-open`` (2,655) or ``xquad`` (English, 1,190).

    Passages of Wikipedia: Natural Questions, by way of "Lost in the Middle",
    CC BY-SA 3.0; SQuAD, by way of XQuAD, CC BY-SA 4.0. Errors: those of
    :func:`bft_ref.training.files.fetch` and of the reader; ValueError for an
    unknown name.
    """
    if name not in FILES:
        raise ValueError(
            f"name: expected one of {', '.join(FILES)}, got {name!r}"
        )
    return _READERS[name](fetch(name, FILES[name], folder))


def read_nq_open(path: str | Path) -> list[Question]:
    """A line, a question: JSON with ``question``, ``answers``, ``ctxs``.

    The first of ``ctxs`` is the gold passage. An empty line is none.
    Raises: MalformedLineError, with file and line.
    """
    path = Path(path)
    found = []
    with text_file(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise MalformedLineError(
                    path, number, f"expected JSON, got {error}"
                ) from None
            try:
                passage = entry["ctxs"][0]["text"]
                asked, answers = entry["question"], entry["answers"]
            except (KeyError, IndexError, TypeError) as error:
                raise MalformedLineError(
                    path,
                    number,
                    "expected question, answers and ctxs with a text in "
                    f"it, got no {error}",
                ) from None
            found.append(
                _question(path, number, str(number), asked, passage, answers)
            )
    return found


def read_xquad(path: str | Path) -> list[Question]:
    """SQuAD's JSON: articles with paragraphs with questions.

    Raises: MalformedLineError; the line of what is no JSON, else which
    article, paragraph and question, counted from 0.
    """
    path = Path(path)
    with text_file(path) as file:
        content = file.read()
    try:
        articles = json.loads(content)["data"]
    except json.JSONDecodeError as error:
        raise MalformedLineError(
            path, error.lineno, f"expected JSON, got {error.msg}"
        ) from None
    except (KeyError, TypeError):
        raise MalformedLineError(
            path, None, "expected an object with data"
        ) from None
    found, where = [], "data"
    try:
        for a, article in enumerate(articles):
            where = f"data[{a}]"
            for p, paragraph in enumerate(article["paragraphs"]):
                where = f"data[{a}].paragraphs[{p}]"
                passage = paragraph["context"]
                for q, each in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    answers = [one["text"] for one in each["answers"]]
                    found.append(
                        _question(
                            path,
                            None,
                            str(each["id"]),
                            each["question"],
                            passage,
                            answers,
                            f"{where}: ",
                        )
                    )
    except (KeyError, TypeError) as error:
        raise MalformedLineError(
            path,
            None,
            f"{where}: expected SQuAD's fields (paragraphs, context, qas, id, "
            f"question, answers, text), got {error}",
        ) from None
    return found


def _question(
    path: Path,
    line: int | None,
    name: str,
    asked: Any,
    passage: Any,
    answers: Any,
    where: str = "",
) -> Question:
    for what, value in [("question", asked), ("passage", passage)]:
        if not isinstance(value, str) or not value.strip():
            raise MalformedLineError(
                path, line, f"{where}expected text as {what}, got {value!r}"
            )
    if not isinstance(answers, list) or not any(
        isinstance(each, str) and each.strip() for each in answers
    ):
        raise MalformedLineError(
            path,
            line,
            f"{where}expected a list of answers, one or more, got {answers!r}",
        )
    accepted = tuple(each.strip() for each in answers if each.strip())
    return Question(name, asked.strip(), passage.strip(), accepted)


_READERS: dict[str, Callable[[Path], list[Question]]] = {
    "nq-open": read_nq_open,
    "xquad": read_xquad,
}
