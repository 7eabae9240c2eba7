"""Questions, prompts, noise, distractors and scores."""

import gzip
import json

import numpy as np
import pytest

from bft_ref.llm import qa
from bft_ref.llm.qa.examples import digest
from bft_ref.training.files import DataUnavailableError, MalformedLineError
from tests.unit.llm import small

LINE = {
    "question": "who wrote it",
    "answers": ["Ann Lee", " "],
    "ctxs": [{"title": "t", "text": " Ann Lee wrote it. "}],
}
ARTICLE = {
    "paragraphs": [
        {
            "context": "Ann wrote it.",
            "qas": [
                {"id": "7", "question": "Who?", "answers": [{"text": "Ann"}]}
            ],
        }
    ]
}


def lines(path, *texts):
    with gzip.open(path, "wt", encoding="utf8") as file:
        file.write("\n".join(texts))
    return path


def test_nq_open_is_read(tmp_path):
    path = lines(tmp_path / "a.jsonl.gz", json.dumps(LINE), "", "")
    assert qa.read_nq_open(path) == [
        qa.Question("1", "who wrote it", "Ann Lee wrote it.", ("Ann Lee",))
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: expected JSON"),
        ("[]", "line 2: expected question, answers and ctxs"),
        (json.dumps(LINE | {"ctxs": []}), "line 2: expected question"),
        (json.dumps(LINE | {"answers": []}), "line 2: .*one or more, got"),
        (json.dumps(LINE | {"answers": "x"}), "line 2: .*list of answers"),
        (json.dumps(LINE | {"question": ""}), "line 2: .*text as question"),
        (
            json.dumps(LINE | {"ctxs": [{"text": 3}]}),
            "line 2: .*text as passage, got 3",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = lines(tmp_path / "a.jsonl.gz", json.dumps(LINE), line)
    with pytest.raises(MalformedLineError, match=message) as error:
        qa.read_nq_open(path)
    assert str(path) in str(error.value) and error.value.line == 2


def test_what_is_no_gzip_is_said(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_text(json.dumps(LINE))
    with pytest.raises(MalformedLineError, match="not gzip"):
        qa.read_nq_open(path)


def test_xquad_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"data": [ARTICLE]}))
    assert qa.read_xquad(path) == [
        qa.Question("7", "Who?", "Ann wrote it.", ("Ann",))
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"data":\n\n [}', "line 3: expected JSON"),
        ("[]", "an object with data"),
        (
            json.dumps({"data": [ARTICLE, {}]}),
            r"data\[1\]: expected SQuAD's fields.*'paragraphs'",
        ),
        (
            json.dumps({"data": [ARTICLE]}).replace('"Who?"', "1"),
            r"data\[0\].paragraphs\[0\].qas\[0\]: expected text as question",
        ),
        (
            json.dumps({"data": [ARTICLE]}).replace('"text"', '"txt"'),
            r"data\[0\].paragraphs\[0\].qas\[0\]: .*'text'",
        ),
    ],
)
def test_broken_xquad_is_named(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(MalformedLineError, match=message):
        qa.read_xquad(path)


def test_load_looks_in_the_folder_and_checks(tmp_path, monkeypatch):
    path = lines(tmp_path / "nq-open-oracle.jsonl.gz", json.dumps(LINE))
    with pytest.raises(ValueError, match="nq-open: expected sha256 6a7f"):
        qa.load("nq-open", tmp_path)
    with pytest.raises(ValueError, match="name: expected one of nq-open"):
        qa.load("squad", tmp_path)
    with pytest.raises(DataUnavailableError, match="folder with data"):
        qa.load("xquad", tmp_path / "none")
    file = qa.data.FILES["nq-open"]
    known = qa.data.fetch.__globals__["pooch"].file_hash(str(path))
    monkeypatch.setitem(
        qa.FILES, "nq-open", type(file)(file.file, file.url, known)
    )
    assert len(qa.load("nq-open", tmp_path)) == 1


def test_a_prompt_ends_where_the_answer_begins():
    assert qa.prompt("where is it ??", ["One.", "Two."]) == (
        "Passage: One.\nPassage: Two.\nQuestion: where is it?\nAnswer:"
    )


def test_an_example_knows_which_passage_a_token_is_of():
    tokenizer = small.tokenizer()
    question = small.questions()[1]
    example = qa.encode(
        tokenizer,
        question,
        ["Élan.", question.passage],
        gold_passage=1,
        retrieved=[2.0, 3.0],
    )
    whole = tokenizer.decode(example.tokens)
    assert whole.endswith("Question: where lives otto?\nAnswer: Turin<end>")
    parts = [
        tokenizer.decode(
            [
                token
                for token, of in zip(
                    example.prompt, example.passage_of, strict=True
                )
                if of == p
            ]
        )
        for p in (0, 1, -1)
    ]
    assert parts == [
        "Passage: Élan.\n",
        f"Passage: {question.passage}\n",
        "Question: where lives otto?\nAnswer:",
    ]


def test_a_question_that_its_passage_does_not_answer_is_refused():
    question = qa.Question("9", "why", "Nobody knows.", ("because",))
    assert qa.ground(question) is None
    with pytest.raises(ValueError, match="in the passage of 9"):
        qa.encode(small.tokenizer(), question)


def test_a_split_is_disjoint_and_the_seeds():
    asked = small.questions()
    asked.append(qa.Question("x", "again", asked[0].passage, ("Bonn",)))
    sizes = {"train": 4, "validation": 2, "test": 2}
    parts = qa.split(asked, sizes, seed=1)
    assert {name: len(part) for name, part in parts.items()} == sizes
    drawn = [q.id for part in parts.values() for q in part]
    assert sorted(drawn) == [str(i) for i in range(8)]
    assert qa.split(asked, sizes, seed=1) == parts
    assert qa.split(asked, sizes, seed=2) != parts
    with pytest.raises(ValueError, match="at most 8 questions, each with a"):
        qa.split(asked, {"train": 9})
    assert len(qa.split(asked, {"all": 9}, one_a_passage=False)["all"]) == 9


def examples(n):
    tokenizer = small.tokenizer()
    return [qa.encode(tokenizer, q) for q in small.questions()] * n


def test_labels_are_wrong_at_their_rate_and_never_at_the_end():
    given, vocabulary = examples(60), np.arange(1, 257)
    labels, wrong = qa.corrupt(given, 0.3, vocabulary, seed=3)
    inside = np.concatenate([w[:-1] for w in wrong])
    # four standard errors
    bound = 4 * np.sqrt(0.3 * 0.7 / len(inside))
    assert abs(inside.mean() - 0.3) < bound
    for example, label, hit in zip(given, labels, wrong, strict=True):
        assert (hit == (label != np.array(example.answer))).all()
        assert label[-1] == example.answer[-1] == 0 and not hit[-1]
    replaced = np.concatenate(labels)[np.concatenate(wrong)]
    assert len(np.unique(replaced)) > 200 and replaced.min() >= 1
    again, _ = qa.corrupt(given, 0.3, vocabulary, seed=3)
    other, _ = qa.corrupt(given, 0.3, vocabulary, seed=4)
    assert all((a == b).all() for a, b in zip(labels, again, strict=True))
    assert any((a != b).any() for a, b in zip(labels, other, strict=True))


def test_more_noise_keeps_what_less_noise_replaced():
    given, vocabulary = examples(5), np.arange(1, 257)
    few, hit_few = qa.corrupt(given, 0.2, vocabulary)
    many, hit_many = qa.corrupt(given, 0.6, vocabulary)
    for a, b, x, y in zip(few, many, hit_few, hit_many, strict=True):
        assert (y | ~x).all() and (a[x] == b[x]).all()
    none, hit = qa.corrupt(given, 0.0, vocabulary)
    assert not np.concatenate(hit).any()
    assert all(tuple(x) == e.answer for x, e in zip(none, given, strict=True))


def test_bad_noise_is_refused():
    with pytest.raises(ValueError, match="rate"):
        qa.corrupt(examples(1), 1.5, [1, 2])
    with pytest.raises(ValueError, match="two tokens or more, got 1"):
        qa.corrupt(examples(1), 0.5, [2, 2])


def test_distractors_are_near_and_hold_no_answer():
    asked = [
        qa.Question("a", "which river is at bonn", "Rhine, Bonn", ("Rhine",)),
        qa.Question("b", "which river is in turin", "Po in Turin", ("Po",)),
        qa.Question("c", "what falls", "the rhine falls", ("falls",)),
        qa.Question("d", "what of bonn", "beer of bonn river", ("beer",)),
        qa.Question("e", "what pots", "pots in a river", ("pots",)),
    ]
    found = qa.rank(asked, keep=2)
    for question, ranked in zip(asked, found, strict=True):
        assert question.passage not in ranked.passages
        assert list(ranked.scores) == sorted(ranked.scores, reverse=True)
    assert "the rhine falls" not in found[0].passages  # the answer, in it
    assert found[0].passages[0] == "beer of bonn river"
    assert found[0].gold > 0
    # "pots" holds the letters of "Po", but not the word
    assert "pots in a river" in found[1].passages
    with pytest.raises(ValueError, match="expected 5 passages .*got 3"):
        qa.rank(asked, keep=5)


def test_gold_is_among_its_distractors_in_a_drawn_order():
    asked = small.questions()
    ranked = dict(zip(asked, qa.rank(asked, keep=3), strict=True))
    places = set()
    for question in asked:
        for k in (0, 1, 3):
            shown, gold, scores = qa.context(question, ranked[question], k)
            assert shown[gold] == question.passage and len(shown) == k + 1
            assert scores[gold] == ranked[question].gold
            others = [p for i, p in enumerate(shown) if i != gold]
            assert sorted(others) == sorted(ranked[question].passages[:k])
            again = qa.context(question, ranked[question], k)
            assert again == (shown, gold, scores)
        places.add(gold)
    assert len(places) > 1
    with pytest.raises(ValueError, match="0 <= k <= 3"):
        qa.context(asked[0], ranked[asked[0]], 4)


def test_scores_are_squads():
    found = qa.score(
        ["The cat!", "a red cat", "dog", ""],
        [["cat"], ["red fox", "blue"], ["cat", "Dog."], ["cat"]],
    )
    assert found["em"].tolist() == [1, 0, 1, 0]
    assert found["f1"] == pytest.approx([1, 0.5, 1, 0])
    with pytest.raises(ValueError, match="for each of 1 questions, got 2"):
        qa.score(["a", "b"], [["a"]])


def test_the_checksum_of_examples_sees_where_prompts_end():
    one, two = examples(1)[:2]
    moved = type(one)(
        one.id,
        one.prompt + one.answer[:1],
        one.answer[1:],
        one.accepted,
        (*one.passage_of, -1),
    )
    sums = [digest(x) for x in ([one], [two], [moved], [one, two])]
    assert len(set(sums)) == 4 and digest([one]) == sums[0]
