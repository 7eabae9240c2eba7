"""A small Llama's weights, from the Hub or GGUF; the sizes of a larger one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

#: 134,515,008 parameters, Apache-2.0, stored in bfloat16
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"

#: TinyLlama-1.1B, for the meta device: 1,100,048,384 parameters
TINYLLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)

#: GGUF's names of a layer's matrices -> transformers'
_MATRICES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def load_smollm2(
    source: str | Path | None = None,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32, in evaluation mode; its tokenizer.

    ``source``: None for the Hub, at a pinned revision and checked; a GGUF
    file; or a folder that ``save_pretrained`` wrote.
    Raises: FileNotFoundError for a path that is not there; ValueError for a
    download with another checksum, and as :func:`read_gguf`.
    """
    if source is None:
        folder = _from_hub()
    else:
        folder = Path(source)
        if folder.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(
                folder.parent, gguf_file=folder.name
            )
            return read_gguf(folder), tokenizer
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"source: expected a .gguf file or a folder with config.json, "
                f"got {folder}; None downloads {SMOLLM2}"
            )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
) -> None:
    """Write both to a folder of safetensors, which loads in no time."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _from_hub() -> Path:
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            SMOLLM2,
            revision=REVISION,
            allow_patterns=["*.json", "*.txt", "model.safetensors"],
        )
    )
    weights = folder / "model.safetensors"
    found = pooch.file_hash(str(weights), alg="sha256")
    if found != SHA256:
        raise ValueError(
            f"{SMOLLM2} at {REVISION}: expected sha256 {SHA256} of "
            f"{weights}, got {found}; remove the file and try again"
        )
    return folder


def read_gguf(path: str | Path) -> LlamaForCausalLM:
    """The Llama of a GGUF file in float32, exact up to its quantisation.

    What ``from_pretrained(gguf_file=...)`` gives, bit for bit, but a model
    that can be saved. GGUF keeps the rows of W_q and W_k in the order of
    rotary pairs, transformers in that of halves.
    Raises: FileNotFoundError; ValueError for no GGUF, another architecture,
    or a tensor that a Llama does not have.
    """
    from gguf import GGUFReader, dequantize

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path: no file {path}")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"path: {path} is no GGUF file: {error}") from error
    fields = {name: each.contents() for name, each in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(
            f"path: expected the architecture llama in {path}, got "
            f"{fields.get('general.architecture')!r}"
        )
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in names)
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads or config.num_attention_heads,
    }
    weights = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        array = np.array(
            dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
        ).reshape([int(n) for n in reversed(tensor.shape)])
        name, kind = _name(path, tensor.name)
        if kind in heads:
            array = _halves(array, heads[kind])
        weights[name] = torch.from_numpy(np.ascontiguousarray(array))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # what is not a parameter (the rotary frequencies) is not on meta
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    lacks = model.state_dict().keys() - weights.keys()
    if config.tie_word_embeddings:
        lacks.discard("lm_head.weight")
    if lacks:
        raise ValueError(f"path: {path} lacks {', '.join(sorted(lacks))}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def _config(fields: Mapping[str, Any], tied: bool) -> LlamaConfig:
    def llama(name: str, default: Any = None) -> Any:
        return fields.get(f"llama.{name}", default)

    heads = llama("attention.head_count")
    tokens = fields.get("tokenizer.ggml.tokens", [])
    return LlamaConfig(
        vocab_size=llama("vocab_size", len(tokens)),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=llama("attention.head_count_kv", heads),
        max_position_embeddings=llama("context_length"),
        # a float32 in the file: 1e-5 is meant, not 9.99999975e-06
        rms_norm_eps=float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": llama("rope.freq_base", 10000.0),
        },
        tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _name(path: Path, name: str) -> tuple[str, str]:
    """transformers' name of a tensor, and its kind within a layer."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], ""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _MATRICES:
        raise ValueError(
            f"path: expected the tensors of a Llama in {path}, got {name!r}"
        )
    _, layer, kind, _ = parts
    return f"model.layers.{layer}.{_MATRICES[kind]}.weight", kind


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows from the order of rotary pairs to that of halves, head by head."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
