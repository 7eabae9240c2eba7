"""Weights from GGUF, from the Hub and from nowhere."""

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from bft_ref.llm import weights
from tests.unit.llm import small

D, HEADS, KV, FFN, LAYERS, VOCABULARY = 16, 4, 2, 24, 2, 48


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny Llama as llama.cpp keeps it, its vocabulary with it."""
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write(path, architecture="llama", leave_out=(), more=()):
    rng = np.random.default_rng(0)
    file = gguf.GGUFWriter(str(path), architecture)
    file.add_context_length(64)
    file.add_embedding_length(D)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(FFN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(5000.0)
    file.add_vocab_size(VOCABULARY)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(["<end>", *(chr(65 + i) for i in range(47))])
    file.add_token_types([3] + [1] * 47)
    file.add_token_merges(["A B"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(0)
    shapes = {"token_embd": (VOCABULARY, D), "output_norm": (D,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (D,),
            f"blk.{i}.ffn_norm": (D,),
            f"blk.{i}.attn_q": (D, D),
            f"blk.{i}.attn_k": (D * KV // HEADS, D),
            f"blk.{i}.attn_v": (D * KV // HEADS, D),
            f"blk.{i}.attn_output": (D, D),
            f"blk.{i}.ffn_gate": (FFN, D),
            f"blk.{i}.ffn_up": (FFN, D),
            f"blk.{i}.ffn_down": (D, FFN),
        }
    for name, shape in (shapes | dict(more)).items():
        if name not in leave_out:
            x = rng.normal(size=shape).astype(np.float32)
            file.add_tensor(f"{name}.weight", x)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.filterwarnings("ignore")
def test_gguf_is_read_as_transformers_reads_it_bit_for_bit(path):
    ours = weights.read_gguf(path)
    theirs = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, x in ours.state_dict().items():
        assert torch.equal(x, expected[name]), name
    assert ours.config.rms_norm_eps == 1e-5
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_what_gguf_gave_is_saved_and_loads_alike(path, tmp_path):
    model = weights.read_gguf(path)
    weights.save(model, small.tokenizer(), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    again, tokenizer = weights.load_smollm2(tmp_path)
    ids = torch.tensor([tokenizer("AB")["input_ids"]]) % VOCABULARY
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert not again.training and again.dtype == torch.float32


def test_rows_of_pairs_become_halves():
    rows = np.arange(8)[:, None]  # two heads of four
    assert weights._halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_an_untied_head_is_read(tmp_path):
    head = {"output": (VOCABULARY, D)}
    model = weights.read_gguf(write(tmp_path / "a.gguf", more=head.items()))
    assert not model.config.tie_word_embeddings
    assert not torch.equal(
        model.lm_head.weight, model.model.embed_tokens.weight
    )


def test_a_gguf_that_is_no_llama_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        weights.read_gguf(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not at all" * 9)
    with pytest.raises(ValueError, match="no GGUF file"):
        weights.read_gguf(broken)
    with pytest.raises(ValueError, match="architecture llama .*'qwen2'"):
        weights.read_gguf(write(tmp_path / "b.gguf", "qwen2"))
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        weights.read_gguf(
            write(tmp_path / "c.gguf", leave_out=["output_norm"])
        )
    odd = {"blk.0.attn_sinks": (4,)}
    with pytest.raises(ValueError, match="tensors of a Llama .*attn_sinks"):
        weights.read_gguf(write(tmp_path / "d.gguf", more=odd.items()))


def test_the_hub_is_asked_for_one_revision_and_checked(tmp_path, monkeypatch):
    weights.save(small.llama(2), small.tokenizer(), tmp_path)
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", snapshot_download
    )
    with pytest.raises(ValueError, match=f"expected sha256 {weights.SHA256}"):
        weights.load_smollm2()
    assert asked["repository"] == weights.SMOLLM2
    assert asked["revision"] == weights.REVISION
    found = weights.pooch.file_hash(str(tmp_path / "model.safetensors"))
    monkeypatch.setattr(weights, "SHA256", found)
    model, _ = weights.load_smollm2()
    assert model.config.hidden_size == 16


def test_a_folder_without_a_model_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        weights.load_smollm2(tmp_path)


def test_tinyllama_has_its_parameters():
    with torch.device("meta"):
        model = LlamaForCausalLM(weights.TINYLLAMA)
    assert sum(p.numel() for p in model.parameters()) == 1_100_048_384
