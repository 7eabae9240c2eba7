"""A Llama and a tokenizer that a test makes in no time, and questions."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from bft_ref.llm.qa import Question

END = "<end>"
NAMES = ["anna", "otto", "emma", "hugo", "lena", "paul", "rosa", "karl"]
PLACES = ["Bonn", "Turin", "Lyon", "Basel", "Ghent", "Delft", "Porto", "Graz"]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and one for the end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([END, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=END
    )


def llama(layers: int = 3, seed: int = 0, **options) -> LlamaForCausalLM:
    """Random, but not so small that all it says is the same."""
    given = {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**given | options)).eval()


def questions(n: int = 8) -> list[Question]:
    """One a place; passages of different lengths."""
    return [
        Question(
            id=str(i),
            question=f"where lives {name}",
            passage=f"{'So ' * (i % 3)}{name} lives in {place}.",
            answers=(place, f"{place} town"),
        )
        for i, (name, place) in enumerate(
            zip(NAMES[:n], PLACES[:n], strict=True)
        )
    ]
