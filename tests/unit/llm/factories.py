"""Tiny Llamas with random parameters, none of them at a default."""

import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from bft_ref import BFTConfig
from bft_ref.llm import calibrate, patch

VOCABULARY, WIDTH, LAYERS, PAD = 61, 32, 3, 0
TOKEN = {"granularity": "token", "prior_scale": "unit"}
FEATURE = {"granularity": "feature", "prior_scale": "unit"}
NEIGHBOURS = {"granularity": "feature", "prior_scale": "neighbours"}
#: what a Llama may have beyond the smallest
LLAMAS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 12},
    "gelu": {"hidden_act": "gelu"},
    "relu2": {"hidden_act": "relu2"},
    "one key head": {"num_key_value_heads": 1},
}
#: the cache's name, which transformers 5.24 changed
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaModel.forward).parameters
    else "past_key_values"
)


def llama(dtype=torch.float32, seed=1, **options):
    """An evaluated LlamaForCausalLM."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-4,
        "pad_token_id": PAD,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 6
            else:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def some_ids(batch=2, tokens=12, seed=3):
    """Random tokens, none of them padding, (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        PAD + 1, VOCABULARY, (batch, tokens), generator=generator
    )


def filtering(base=None, config=None, gain=0.7, **options):
    """A Llama that filters, visibly, with what may differ by layer."""
    base = llama() if base is None else base
    config = BFTConfig(**(TOKEN if config is None else config))
    model = patch(base, config, **{"tau": 0.7, **options}).to(base.dtype)
    if config.prior_scale == "unit":
        calibrate(model, some_ids(seed=8), gain)
    return model


def left_padded(ids, by=4):
    """The same tokens behind padding; their mask and positions."""
    padding = ids.new_full((len(ids), by), PAD)
    padded = torch.cat([padding, ids], 1)
    mask = (padded != PAD).long()
    return padded, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def close(found, expected, tolerance):
    """Assert the largest difference, against the largest number."""
    assert found.shape == expected.shape
    error = (found - expected).abs().max()
    assert error <= tolerance * expected.abs().max(), error
