"""Answers by greedy decoding on cached lower layers, and their likelihood."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from bft_ref.llm.finetune.known import Known, logit_bias, tell
from bft_ref.llm.finetune.states import LowerStates, through
from bft_ref.llm.qa.scores import score


@dataclass(frozen=True)
class Answers:
    """What a model answers, question by question.

    Shapes: ``texts`` n; ``nll`` (n,), the mean over the accepted answer's
    tokens; ``confidence`` and ``correct`` (all tokens of answers,), the
    largest probability and whether its token is right, the answer so far
    given.
    """

    texts: list[str]
    nll: NDArray[np.float64]
    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]
    em: NDArray[np.float64]
    f1: NDArray[np.float64]

    def report(self) -> dict[str, Any]:
        """Means, and each question's own values, for JSON."""
        error = binary_calibration_error(
            torch.from_numpy(self.confidence),
            torch.from_numpy(self.correct.astype(np.int64)),
        )
        each = {"em": self.em, "f1": self.f1, "nll": self.nll}
        return {
            "questions": len(self.texts),
            **{name: float(x.mean()) for name, x in each.items()},
            "token_accuracy": float(self.correct.mean()),
            "token_ece": float(error),
            "each": {name: x.round(5).tolist() for name, x in each.items()},
        }


@torch.no_grad()
def nll(
    model: LlamaForCausalLM,
    states: LowerStates,
    *,
    known: Known | None = None,
    batch_size: int = 24,
) -> float:
    """The mean over questions of an answer token's negative log likelihood."""
    found = [
        values
        for indices in _batches(states, batch_size)
        for values in _forced(model, states, indices, known)[1]
    ]
    return float(np.mean([-x.mean().item() for x in found]))


@torch.no_grad()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    states: LowerStates,
    *,
    known: Known | None = None,
    max_new_tokens: int = 9,
    batch_size: int = 24,
) -> Answers:
    """Answer every question greedily, up to a line's end or the text's.

    The states must hold the lower layers' keys and values. One pass over
    prompt and accepted answer gives the likelihood, the first token and, in
    the cache, the prompt; the answer's own slots are hidden from what is
    decoded after it.
    """
    was = model.training
    model.eval()
    n = len(states.examples)
    texts, mean = [""] * n, np.zeros(n)
    confidence: list[NDArray] = [np.zeros(0)] * n
    correct: list[NDArray] = [np.zeros(0, dtype=bool)] * n
    for indices in _batches(states, batch_size):
        length = max(len(states.examples[i].tokens) for i in indices)
        cache = states.cache(indices, length)
        logits, likely = _forced(model, states, indices, known, cache)
        for i, found, values in zip(indices, logits, likely, strict=True):
            gold = torch.tensor(states.examples[i].answer)
            top = found.softmax(-1).max(-1)
            mean[i] = -values.mean().item()
            confidence[i] = top.values.double().numpy()
            correct[i] = (top.indices == gold).numpy()
        first = torch.stack([found[0].argmax() for found in logits])
        tokens = _decode(
            model, states, indices, first, cache, length, known, max_new_tokens
        )
        for i, line in zip(indices, tokens, strict=True):
            text = tokenizer.decode(line, skip_special_tokens=True)
            texts[i] = str(text).strip().split("\n")[0].strip()
    model.train(was)
    scores = score(texts, [each.accepted for each in states.examples])
    return Answers(
        texts,
        mean,
        np.concatenate(confidence),
        np.concatenate(correct),
        scores["em"],
        scores["f1"],
    )


def _batches(states: LowerStates, size: int) -> list[list[int]]:
    """Examples of like length together."""
    order = sorted(
        range(len(states.examples)),
        key=lambda i: len(states.examples[i].tokens),
    )
    return [order[i : i + size] for i in range(0, len(order), size)]


def answer_positions(
    states: LowerStates, indices: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Rows and columns of a batch whose states predict answers' tokens."""
    rows: list[int] = []
    columns: list[int] = []
    for row, i in enumerate(indices):
        example = states.examples[i]
        start = len(example.prompt) - 1
        rows += [row] * len(example.answer)
        columns += range(start, start + len(example.answer))
    return torch.tensor(rows), torch.tensor(columns)


def upper(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    known: Known | None = None,
    cache: Any = None,
) -> Tensor:
    """Logits (tokens of answers, V), from the layers above the cut."""
    hidden = states.batch(indices)
    examples = [states.examples[i] for i in indices]
    length = hidden.shape[1]
    tell(model, examples, length, known)
    out = through(
        model,
        range(states.cut, model.config.num_hidden_layers),
        hidden,
        torch.arange(length)[None],
        mask=logit_bias(examples, length, known),
        cache=cache,
    )
    rows, columns = answer_positions(states, indices)
    return model.lm_head(model.model.norm(out[rows, columns]))


def _forced(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    known: Known | None,
    cache: Any = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of each answer, and its own tokens' log likelihoods."""
    logits = upper(model, states, indices, known, cache).float()
    answers = [torch.tensor(states.examples[i].answer) for i in indices]
    lengths = [len(each) for each in answers]
    likely = logits.log_softmax(-1).gather(1, torch.cat(answers)[:, None])
    return list(logits.split(lengths)), list(likely[:, 0].split(lengths))


def _decode(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    first: Tensor,
    cache: Any,
    length: int,
    known: Known | None,
    max_new_tokens: int,
) -> list[list[int]]:
    """Greedy tokens of each row, without the end of text."""
    examples = [states.examples[i] for i in indices]
    prompts = torch.tensor([len(each.prompt) for each in examples])
    visible = torch.arange(length) < prompts[:, None]
    end, token = model.config.eos_token_id, first
    ends = torch.tensor(end if isinstance(end, list) else [end])
    found = [first]
    over = torch.isin(first, ends)
    layers = range(model.config.num_hidden_layers)
    for step in range(max_new_tokens - 1):
        if over.all():
            break
        new = torch.ones(len(indices), 1, dtype=torch.bool)
        visible = torch.cat([visible, new], dim=1)
        mask = logit_bias(examples, visible.shape[1], known, visible)
        hidden = model.model.embed_tokens(token)[:, None]
        positions = (prompts + step)[:, None]
        hidden = through(
            model, layers[: states.cut], hidden, positions,
            mask=visible[:, None, None], cache=cache,
        )  # fmt: skip
        hidden = through(
            model, layers[states.cut :], hidden, positions,
            mask=mask, cache=cache,
        )  # fmt: skip
        token = model.lm_head(model.model.norm(hidden))[:, 0].argmax(-1)
        found.append(token)
        over |= torch.isin(token, ends)
    lines = torch.stack(found, dim=1).tolist()
    stops = set(ends.tolist())
    return [
        line[: next((i for i, t in enumerate(line) if t in stops), None)]
        for line in lines
    ]
