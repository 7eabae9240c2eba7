"""What the command line can be asked for, as dataclasses, and doing it."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from transformers import PreTrainedTokenizerBase
from tyro.conf import arg

from bft_ref.llm import qa
from bft_ref.llm.config import DEFAULT
from bft_ref.llm.finetune.adaptation import Adaptation, adapt, trained
from bft_ref.llm.finetune.anatomy import (
    by_layer,
    by_passage,
    precisions,
    ranks_noise,
)
from bft_ref.llm.finetune.evaluate import answer, nll
from bft_ref.llm.finetune.known import Known
from bft_ref.llm.finetune.states import (
    LowerStates,
    fingerprint,
    lower_states,
)
from bft_ref.llm.finetune.trainer import FineTuneConfig, fit
from bft_ref.llm.model import is_added
from bft_ref.llm.qa.data import FILES
from bft_ref.llm.qa.examples import Example, digest
from bft_ref.llm.weights import load_smollm2
from bft_ref.support import checks
from bft_ref.training.checkpoint import RunError
from bft_ref.training.files import write_json
from bft_ref.training.provenance import (
    code_version,
    device_name,
    peak_memory,
)

VERSION = 1
LOOK = 32  # prompts whose layers are looked into
ABOUT = """Fine-tune SmolLM2's upper layers to answer questions on passages.

Answers in training can be wrong, token by token, and the passage can stand
among others that a retriever took for it. Validation and test are clean. The
states of the lower layers are computed once and kept in --cache.

    python -m bft_ref.llm.finetune --noise 0.3 --loss focal --output focal.json
"""


@dataclass(frozen=True)
class Task:
    """What is asked, of whom, with how much noise.

    Questions are NQ-Open's, each with its gold passage, split by a seed that
    is the same for every run; ``shifted`` are XQuAD's.
    Raises: TypeError for a field of another type; ValueError for a value out
    of its range.
    """

    noise: float = 0.0  # Probability that a token of a label is another.
    distractors: int = 0  # Retrieved passages beside gold, in training.
    # The same, in validation and test, one after the other; of validation
    # the first counts.
    asked: tuple[int, ...] = (0,)
    train: int = 640  # Questions to train on.
    validation: int = 300  # Questions to choose by.
    test: int = 600  # Questions to judge by.
    shifted: int = 300  # Questions of XQuAD, asked without distractors.
    max_prompt: int = 150  # Tokens of a prompt with gold alone, at most.
    max_answer: int = 9  # Tokens of an answer with the end of text, at most.
    split_seed: int = 0  # Of who is in which part.

    def __post_init__(self):
        checks.typed(self)
        checks.within("noise", self.noise, 0.0, 1.0)
        for name in ("train", "validation", "test", "max_prompt"):
            checks.count(name, getattr(self, name), 1)
        for name in ("distractors", "shifted", "split_seed"):
            checks.count(name, getattr(self, name))
        checks.count("max_answer", self.max_answer, 2)
        if not self.asked or min(self.asked) < 0:
            raise ValueError(
                f"asked: expected numbers of distractors, got {self.asked}"
            )


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """A run."""

    task: Annotated[Task, arg(help="What is asked.")] = field(
        default_factory=Task
    )
    adaptation: Annotated[Adaptation, arg(help="What is fitted.")] = field(
        default_factory=Adaptation
    )
    train: Annotated[FineTuneConfig, arg(help="How it is fitted.")] = field(
        default_factory=FineTuneConfig
    )
    # What the retriever's scores are taken for, if for anything.
    known: Known | None = None
    # A GGUF file or a folder of safetensors; by default the Hub's.
    weights: Path | None = None
    # Folder searched before anything is downloaded; by default BFT_DATA of
    # the environment.
    data_dir: Path | None = None
    cache: Path = Path("states")  # Where the lower layers' states are kept.
    # Answer the test questions instead of validation. Nothing else touches
    # them: decide first.
    evaluate_test: bool = False
    # Write the result as JSON. A file that is there already means that the
    # run is finished, and nothing is done.
    output: Path | None = None
    # Written as it goes; an interrupted run goes on from it, to the same
    # result.
    checkpoint: Path | None = None
    threads: int = 0  # CPU threads; 0 for PyTorch's choice.
    quiet: bool = False  # No progress bar.


def parse(arguments: Iterable[str]) -> FineTune:
    """The run that a command line asks for.

    Raises: SystemExit for what is none, told on stderr, and for ``--help``.
    """
    return tyro.cli(
        FineTune,
        prog="python -m bft_ref.llm.finetune",
        description=ABOUT,
        args=list(arguments),
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
        ),
    )


def identity(run: FineTune) -> dict[str, Any]:
    """What the run's result depends on, but the weights, as JSON has it."""
    filters = run.adaptation.variant == "kalman"
    found = {
        "task": asdict(run.task),
        "adaptation": asdict(run.adaptation),
        "train": asdict(run.train),
        "known": None if run.known is None else asdict(run.known),
        # of layers that filter: the package's default, as it is today
        "filter": asdict(DEFAULT) if filters else None,
        "data": {name: file.sha256 for name, file in FILES.items()},
    }
    return json.loads(json.dumps(found))


def examples(
    tokenizer: PreTrainedTokenizerBase, task: Task, data_dir: Path | None
) -> dict[str, list[Example]]:
    """The examples of each part: ``train``, ``validation``, …, ``shifted``.

    Asked with several numbers of distractors, the second on are called
    ``validation k=1`` and so on. Raises: ValueError for more questions than
    there are.
    """

    def fitting(name: str) -> list[qa.Question]:
        grounded = filter(qa.ground, qa.load(name, data_dir))
        found = []
        for question in grounded:
            example = qa.encode(tokenizer, question)
            if (
                len(example.prompt) <= task.max_prompt
                and len(example.answer) <= task.max_answer
            ):
                found.append(question)
        return found

    eligible = fitting("nq-open")
    sizes = {
        "train": task.train,
        "validation": task.validation,
        "test": task.test,
    }
    parts = qa.split(eligible, sizes, seed=task.split_seed)
    most = max(task.distractors, *task.asked)
    ids = [q.id for q in eligible]
    ranked = dict(zip(ids, qa.rank(eligible, keep=most), strict=True))

    def asked(questions: list[qa.Question], k: int) -> list[Example]:
        found = []
        for question in questions:
            passages, gold, scores = qa.context(
                question, ranked[question.id], k, seed=task.split_seed
            )
            found.append(
                qa.encode(
                    tokenizer,
                    question,
                    passages,
                    gold_passage=gold,
                    retrieved=scores,
                )
            )
        return found

    found = {"train": asked(parts["train"], task.distractors)}
    for name in ("validation", "test"):
        for place, k in enumerate(task.asked):
            found[f"{name} k={k}" if place else name] = asked(parts[name], k)
    if task.shifted:
        others = qa.split(
            fitting("xquad"),
            {"shifted": task.shifted},
            seed=task.split_seed,
            one_a_passage=False,
        )
        found["shifted"] = [qa.encode(tokenizer, q) for q in others["shifted"]]
    return found


def execute(run: FineTune) -> None:
    """Do what is asked, unless its very result is there already.

    Raises: RunError, ValueError, or what loading weights and data raises.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    wanted = identity(run)
    if _is_there(run, wanted):
        return
    began = time.process_time()
    model, tokenizer = load_smollm2(run.weights)
    found = examples(tokenizer, run.task, run.data_dir)
    cut = model.config.num_hidden_layers - run.adaptation.top
    names = [
        name
        for name in found
        if name == "train"
        or name.startswith("validation") != run.evaluate_test
        or (name == "validation" and run.train.evaluate_every)
    ]
    states = {
        name: lower_states(
            model,
            found[name],
            cut,
            run.cache,
            keep_cache=name != "train",
            progress=not run.quiet,
        )
        for name in names
    }
    wanted["weights"] = fingerprint(model, model.config.num_hidden_layers)
    wanted["examples"] = {name: digest(found[name]) for name in found}
    words = np.setdiff1d(
        np.arange(model.config.vocab_size), tokenizer.all_special_ids
    )
    labels, wrong = qa.corrupt(
        found["train"], run.task.noise, words, seed=run.train.seed
    )
    torch.manual_seed(run.train.seed)
    model = adapt(
        model, run.adaptation, calibration(found["train"]), known=run.known
    )
    filters = run.adaptation.variant == "kalman"
    some = range(min(LOOK, len(found["train"])))

    def inside() -> dict[str, Any]:
        layers = {}
        if filters:
            layers = by_layer(model, states["train"], some, run.known)
        return {"parameters": precisions(model), **layers}

    before = inside()
    prepared = time.process_time()
    history = fit(
        model,
        states["train"],
        labels,
        run.train,
        identity=wanted,
        validate=lambda: nll(model, states["validation"], known=run.known),
        known=run.known,
        checkpoint=run.checkpoint,
        progress=not run.quiet,
    )
    fitted = time.process_time()
    free = trained(model)
    result: dict[str, Any] = {
        "version": VERSION,
        **wanted,
        "seed": run.train.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in free.values()),
        "precision_parameters": sum(
            p.numel() for name, p in free.items() if is_added(name)
        ),
        "history": history,
        "before": before,
        "after": inside(),
        "ranks_noise": ranks_noise(
            model,
            states["train"],
            labels,
            wrong,
            known=run.known,
            filters=filters,
        ),
    }
    for name in names:
        if name == "train":
            continue
        result[name] = _answers(model, tokenizer, states[name], run)
        if filters and found[name][0].retrieved[1:]:
            looked = range(min(LOOK, len(found[name])))
            result[name]["by_passage"] = by_passage(
                model, states[name], looked, run.known
            )
    result |= {
        "cpu_seconds": {
            "prepare": round(prepared - began, 1),
            "fit": round(fitted - prepared, 1),
            "answer": round(time.process_time() - fitted, 1),
        },
        "code": code_version(),
        "device": device_name(torch.device("cpu")),
        "peak_bytes": peak_memory(torch.device("cpu")),
    }
    write_json(result, run.output)


def calibration(train: list[Example], size: int = 8) -> list[list[int]]:
    """Prompts of middling length, cut at the shortest's end."""
    middle = sorted(train, key=lambda each: len(each.prompt))
    start = max(len(middle) // 2 - size // 2, 0)
    chosen = [each.prompt for each in middle[start : start + size]]
    length = min(map(len, chosen))
    return [list(each[:length]) for each in chosen]


def _answers(
    model: Any, tokenizer: Any, states: LowerStates, run: FineTune
) -> dict[str, Any]:
    return answer(
        model,
        tokenizer,
        states,
        known=run.known,
        max_new_tokens=run.task.max_answer,
    ).report()


def _is_there(run: FineTune, wanted: dict[str, Any]) -> bool:
    """Whether the very result is written already."""
    path = run.output
    if path is None or not path.is_file():
        return False
    found = json.loads(path.read_text("utf8"))
    same = all(found.get(name) == value for name, value in wanted.items())
    if same and ("test" in found or not run.evaluate_test):
        print(f"{path} is there already: nothing to do", file=sys.stderr)
        return True
    lacks = "no test answers" if same else "another configuration or data"
    raise RunError(
        f"output: {path} is there already, with {lacks}: remove it or choose "
        "another file"
    )
