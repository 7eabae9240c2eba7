"""What is inside a filter, by layer; and whether any of it ranks noise."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from transformers import LlamaForCausalLM

from bft_ref.layer import LayerTrace
from bft_ref.llm.finetune.evaluate import answer_positions, upper
from bft_ref.llm.finetune.known import Known
from bft_ref.llm.finetune.states import LowerStates
from bft_ref.llm.model import is_added
from bft_ref.llm.tracing import trace


def precisions(model: LlamaForCausalLM) -> dict[str, float]:
    """The mean of each log τ, log Q, or what stands in their place."""
    return {
        name: round(p.detach().mean().item(), 5)
        for name, p in model.named_parameters()
        if is_added(name) and "base_layer" not in name
    }


@torch.no_grad()
def by_layer(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    known: Known | None = None,
) -> dict[str, list[float]]:
    """Medians over tokens in each filtering layer, first to last.

    ``gain``; ``log_precision``, of what leaves the layer;
    ``log_observation_precision``; ``n_eff``, over tokens and heads.
    Raises: TypeError for a model that does not filter.
    """
    traces = _traces(model, states, indices, known)[1]
    lengths = torch.tensor([len(states.examples[i].tokens) for i in indices])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    # the first token sees only itself
    real[:, 0] = False
    parts = {
        "gain": [each.gain for each in traces],
        "log_precision": [each.log_predicted_precision for each in traces],
        "log_observation_precision": [
            each.log_observation_precision for each in traces
        ],
        "n_eff": [each.n_eff.movedim(1, -1) for each in traces],
    }
    return {
        name: [round(x[real].median().item(), 5) for x in found]
        for name, found in parts.items()
    }


@torch.no_grad()
def ranks_noise(
    model: LlamaForCausalLM,
    states: LowerStates,
    labels: Sequence[NDArray[np.int64]],
    wrong: Sequence[NDArray[np.bool_]],
    *,
    known: Known | None = None,
    filters: bool,
    batch_size: int = 16,
) -> dict[str, float]:
    """AUROC of finding the wrong labels; 0.5 is chance.

    ``loss``, of the label; of a filter also ``variance``, 1/λ that leaves the
    last layer where the token is predicted, and ``gain``, K's mean over
    layers there. NaN where no label is wrong, or all.
    """
    found: dict[str, list[Tensor]] = {}
    was = model.training
    model.eval()
    for start in range(0, len(states.examples), batch_size):
        indices = range(start, min(start + batch_size, len(states.examples)))
        if filters:
            logits, traces = _traces(model, states, indices, known)
            where = answer_positions(states, indices)
            last = traces[-1].log_predicted_precision[where]
            gain = torch.stack([each.gain[where] for each in traces]).mean(0)
            found.setdefault("variance", []).append(-last.mean(-1))
            found.setdefault("gain", []).append(gain.mean(-1))
        else:
            logits = upper(model, states, indices, known)
        wanted = torch.from_numpy(np.concatenate([labels[i] for i in indices]))
        loss = torch.nn.functional.cross_entropy(
            logits, wanted, reduction="none"
        )
        found.setdefault("loss", []).append(loss)
    model.train(was)
    target = torch.from_numpy(np.concatenate(wrong)).long()
    if target.min() == target.max():
        return dict.fromkeys(found, float("nan"))
    return {
        # by ranks: binary_auroc takes what is outside [0, 1] for logits
        name: binary_auroc(_ranks(torch.cat(x)), target).item()
        for name, x in found.items()
    }


@torch.no_grad()
def by_passage(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    known: Known | None = None,
) -> dict[str, list[float]]:
    """Gold's passage against the distractors', layer by layer.

    ``log_precision``: the mean of log λ that leaves the layer over gold's
    tokens, less that over the distractors'. ``log_weight``: the log of the
    attention that gold's mean token gets from the prompt's last, over that of
    a distractor's mean token, heads together. Means over questions.
    Raises: ValueError for a prompt without distractors.
    """
    traces = _traces(model, states, indices, known)[1]
    precision = np.zeros((len(indices), len(traces)))
    weight = np.zeros_like(precision)
    for row, i in enumerate(indices):
        example = states.examples[i]
        of = torch.tensor(example.passage_of)
        gold = of == example.gold_passage
        others = (of >= 0) & ~gold
        if not others.any():
            raise ValueError(
                f"states: expected distractors in prompt {example.id}, got "
                "gold alone"
            )
        n = len(of)
        for layer, each in enumerate(traces):
            log = each.log_predicted_precision[row, :n].mean(-1)
            precision[row, layer] = log[gold].mean() - log[others].mean()
            if each.weights is None:
                raise RuntimeError("weights: the trace has none")
            seen = each.weights[row, :, n - 1, :n].mean(0)
            weight[row, layer] = (
                seen[gold].mean().log() - seen[others].mean().log()
            )
    return {
        "log_precision": precision.mean(0).round(5).tolist(),
        "log_weight": weight.mean(0).round(5).tolist(),
    }


def _traces(
    model: LlamaForCausalLM,
    states: LowerStates,
    indices: Sequence[int],
    known: Known | None,
) -> tuple[Tensor, list[LayerTrace]]:
    """Logits at the answers, and what the layers saw."""
    with trace(model) as traces:
        logits = upper(model, states, indices, known)
    return logits, traces


def _ranks(x: Tensor) -> Tensor:
    """Where each value stands among all, in [0, 1]; equals share a place."""
    _, place = x.unique(return_inverse=True)
    return place.double() / max(int(place.max()), 1)
