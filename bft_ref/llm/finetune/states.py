"""What frozen lower layers make of fixed text: computed once, kept on disk.

The layers below ``cut`` neither change nor see labels, so their outputs at
all tokens, and the keys and values that decoding needs, are the same in every
run. They are stored in float32, as the layers gave them.
"""

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bft_ref.llm.qa.examples import Example, digest

#: transformers 5.24 has renamed the cache's argument
_CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaDecoderLayer.forward).parameters
)


def through(
    model: LlamaForCausalLM,
    layers: Iterable[int],
    hidden: Tensor,
    positions: Tensor,
    *,
    mask: Tensor | None = None,
    cache: DynamicCache | None = None,
) -> Tensor:
    """The hidden states after some layers of the model, (B, T, d).

    Shapes: ``hidden`` (B, T, d), ``positions`` (B, T) or (1, T), ``mask``
    broadcast to (B, 1, T, S): boolean, True where visible, or added to the
    logits; None for causal attention.
    """
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in layers:
        hidden = model.model.layers[layer](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            use_cache=cache is not None,
            **{_CACHE: cache},
        )
    return hidden


@dataclass(frozen=True)
class LowerStates:
    """Outputs of the lower layers, example by example, mapped from disk.

    Shapes: ``hidden`` (all tokens, d); ``keys_values``, if they were asked
    for, (all tokens of prompts, cut, 2, kv heads, head dimension).
    """

    examples: Sequence[Example]
    cut: int
    hidden: np.ndarray
    keys_values: np.ndarray | None

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each example begins in ``hidden``."""
        return np.cumsum([0, *(len(each.tokens) for each in self.examples)])

    @cached_property
    def prompt_starts(self) -> np.ndarray:
        """Where each example begins in ``keys_values``."""
        return np.cumsum([0, *(len(each.prompt) for each in self.examples)])

    def batch(self, indices: Sequence[int]) -> Tensor:
        """Hidden states of some examples, (B, L, d); zero after their end."""
        starts = self.starts
        length = max(int(starts[i + 1] - starts[i]) for i in indices)
        found = torch.zeros(len(indices), length, self.hidden.shape[-1])
        for row, i in enumerate(indices):
            mine = self.hidden[starts[i] : starts[i + 1]]
            found[row, : len(mine)] = torch.from_numpy(mine.copy())
        return found

    def cache(self, indices: Sequence[int], length: int) -> DynamicCache:
        """Keys and values of some prompts, in ``length`` slots each."""
        if self.keys_values is None:
            raise ValueError(
                "keys_values: expected them to be kept; ask lower_states for "
                "keep_cache=True"
            )
        shape = self.keys_values.shape
        slots = torch.zeros(len(indices), length, *shape[1:])
        for row, i in enumerate(indices):
            start, end = self.prompt_starts[i : i + 2]
            mine = self.keys_values[start:end]
            slots[row, : len(mine)] = torch.from_numpy(mine.copy())
        # (B, S, layer, 2, head, dim) -> (layer, 2, B, head, S, dim)
        ordered = slots.permute(2, 3, 0, 4, 1, 5)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(ordered):
            cache.update(keys.contiguous(), values.contiguous(), layer)
        return cache


def fingerprint(model: LlamaForCausalLM, cut: int) -> str:
    """SHA-256 of all weights that the states below ``cut`` depend on."""
    found = hashlib.sha256()
    parts = [model.model.embed_tokens, *model.model.layers[:cut]]
    for part in parts:
        for name, x in sorted(part.state_dict().items()):
            found.update(name.encode())
            found.update(x.detach().contiguous().cpu().float().numpy().data)
    return found.hexdigest()


@torch.no_grad()
def lower_states(
    model: LlamaForCausalLM,
    examples: Sequence[Example],
    cut: int,
    folder: str | Path,
    *,
    keep_cache: bool = False,
    batch_size: int = 16,
    progress: bool = True,
) -> LowerStates:
    """The states below layer ``cut``, from ``folder`` or computed into it.

    The file's name is a checksum of weights, tokens and versions of none:
    other weights or prompts make another. ``keep_cache`` keeps keys and
    values of the prompts too, 34 kB a token of SmolLM2's 22 lower layers.
    A second process waits for the first one that computes the same.
    Raises: ValueError for no examples, or a cut beyond the model's layers.
    """
    config = model.config
    if not examples:
        raise ValueError("examples: expected one or more, got none")
    if not 0 <= cut <= config.num_hidden_layers:
        raise ValueError(
            f"cut: expected 0 <= cut <= {config.num_hidden_layers}, the "
            f"model's layers, got {cut}"
        )
    key = {
        "weights": fingerprint(model, cut),
        "examples": digest(examples),
        "cut": cut,
        "keep_cache": keep_cache,
    }
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    where = Path(folder) / name
    where.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(where.with_suffix(".lock")):
        if not where.is_dir():
            part = where.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            _compute(
                model, examples, cut, part, keep_cache, batch_size, progress
            )
            os.replace(part, where)
    kept = where / "keys_values.npy"
    return LowerStates(
        examples,
        cut,
        np.load(where / "hidden.npy", mmap_mode="r"),
        np.load(kept, mmap_mode="r") if keep_cache else None,
    )


def _compute(
    model: LlamaForCausalLM,
    examples: Sequence[Example],
    cut: int,
    folder: Path,
    keep_cache: bool,
    batch_size: int,
    progress: bool,
) -> None:
    config = model.config
    lengths = np.array([len(each.tokens) for each in examples])
    prompts = np.array([len(each.prompt) for each in examples])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    prompt_starts = np.concatenate([[0], np.cumsum(prompts)])
    hidden = np.lib.format.open_memmap(
        folder / "hidden.npy",
        mode="w+",
        dtype=np.float32,
        shape=(int(starts[-1]), config.hidden_size),
    )
    keys_values = None
    if keep_cache:
        keys_values = np.lib.format.open_memmap(
            folder / "keys_values.npy",
            mode="w+",
            dtype=np.float32,
            shape=(
                int(prompt_starts[-1]),
                cut,
                2,
                config.num_key_value_heads or config.num_attention_heads,
                model.model.layers[0].self_attn.head_dim,
            ),
        )
    order = np.argsort(lengths, kind="stable")
    batches = [
        order[start : start + batch_size].tolist()
        for start in range(0, len(order), batch_size)
    ]
    for indices in tqdm(batches, unit="batch", disable=not progress):
        tokens = torch.zeros(
            len(indices), int(lengths[indices].max()), dtype=torch.long
        )
        for row, i in enumerate(indices):
            tokens[row, : lengths[i]] = torch.tensor(examples[i].tokens)
        cache = DynamicCache() if keep_cache else None
        found = through(
            model,
            range(cut),
            model.model.embed_tokens(tokens),
            torch.arange(tokens.shape[1])[None],
            cache=cache,
        )
        for row, i in enumerate(indices):
            hidden[starts[i] : starts[i + 1]] = found[row, : lengths[i]]
        if keys_values is None or cache is None:
            continue
        for layer in range(cut):
            held: Any = cache.layers[layer]
            for side, x in enumerate((held.keys, held.values)):
                for row, i in enumerate(indices):
                    place = slice(prompt_starts[i], prompt_starts[i + 1])
                    keys_values[place, layer, side] = x[
                        row, :, : prompts[i]
                    ].transpose(0, 1)
    hidden.flush()
    if keys_values is not None:
        keys_values.flush()
