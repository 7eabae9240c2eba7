"""Masks, positions and caches: what transformers hands to attention."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from bft_ref.llm import trace
from tests.unit.llm.factories import (
    CACHE,
    LLAMAS,
    NEIGHBOURS,
    TOKEN,
    close,
    filtering,
    left_padded,
    llama,
    some_ids,
)

BOTH = pytest.mark.parametrize(
    "config", [TOKEN, NEIGHBOURS], ids=["token", "neighbours"]
)


@pytest.fixture(params=[TOKEN, NEIGHBOURS], ids=["token", "neighbours"])
def model(request):
    return filtering(llama(torch.float64), request.param)


@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model):
    ids = some_ids()
    expected = model(ids).logits
    padded, mask, positions = left_padded(ids)
    found = model(padded, attention_mask=mask, position_ids=positions)
    assert found.logits.isfinite().all()
    close(found.logits[:, 4:], expected, 1e-6)
    right, mask = padded.roll(-4, 1), mask.roll(-4, 1)
    found = model(right, attention_mask=mask)
    close(found.logits[:, :-4], expected, 1e-10)


@torch.no_grad()
def test_packed_sequences_do_not_see_one_another(model):
    ids = some_ids()
    expected = model(ids).logits
    positions = torch.arange(ids.shape[1]).repeat(1, 2)
    packed = ids.reshape(1, -1)
    found = model(packed, position_ids=positions, use_cache=False).logits
    close(found.view_as(expected), expected, 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float", "lowest"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_four_dimensions(model, kind, implementation):
    ids = some_ids()
    expected = model(ids).logits
    first, second = torch.zeros(24).long(), torch.arange(24) // 12
    mask = (second[:, None] == second[None]).tril()[None, None]
    if kind != "bool":
        hidden = -torch.inf if kind == "float" else -1.7e308
        mask = first.double().masked_fill(~mask, hidden)
    model.set_attn_implementation(implementation)
    positions = torch.arange(12).repeat(1, 2)
    found = model(
        ids.reshape(1, -1), attention_mask=mask, position_ids=positions
    ).logits
    close(found.view_as(expected), expected, 1e-10)


@torch.no_grad()
def test_eager_attention_is_the_same(model):
    padded, mask, positions = left_padded(some_ids())
    call = {"attention_mask": mask, "position_ids": positions}
    expected = model(padded, **call).logits
    model.set_attn_implementation("eager")
    close(model(padded, **call).logits[:, 4:], expected[:, 4:], 1e-10)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(5, 4, 3), (1,) * 12, (11, 1), (1, 11)])
def test_with_a_cache_it_is_the_same_in_chunks_of_any_size(model, chunks):
    ids = some_ids()
    expected, cache = model(ids).logits, DynamicCache(config=model.config)
    made = [
        model(part, **{CACHE: cache}).logits for part in ids.split(chunks, 1)
    ]
    close(torch.cat(made, 1), expected, 1e-6)
    assert cache.get_seq_length() == 12


@torch.no_grad()
def test_a_cache_can_be_cropped_and_used_again(model):
    ids = some_ids()
    expected, cache = model(ids).logits, DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    cache.crop(-5)
    found = model(ids[:, 7:], **{CACHE: cache}).logits
    close(found, expected[:, 7:], 1e-6)


@torch.no_grad()
def test_a_static_cache_is_the_same_in_chunks(model):
    ids = some_ids()
    cache = StaticCache(config=model.config, max_cache_len=20)
    made = []
    for start, end in [(0, 5), (5, 9), (9, 10), (10, 12)]:
        positions = torch.arange(start, end)[None]
        call = {CACHE: cache, "position_ids": positions}
        made.append(model(ids[:, start:end], **call).logits)
    close(torch.cat(made, 1), model(ids).logits, 1e-6)


@torch.no_grad()
@BOTH
def test_in_bfloat16_the_cache_holds_log_precision_in_two_halves(config):
    model = filtering(llama(), config).bfloat16()
    ids = some_ids()
    cache = DynamicCache(config=model.config)
    with trace(model) as full:
        model(ids, use_cache=False)
    model(ids[:, :7], **{CACHE: cache})
    assert cache.layers[1].keys.dtype == torch.bfloat16
    assert cache.layers[1].keys.shape[-1] == model.config.head_dim + 2
    with trace(model) as cached:
        model(ids[:, 7:], **{CACHE: cache})
    for one, other in zip(full, cached, strict=True):
        close(other.n_eff, one.n_eff[..., 7:], 0.02)
        close(other.gain, one.gain[:, 7:], 0.05)


@torch.no_grad()
def test_a_token_that_sees_nothing_keeps_its_state():
    model, ids = filtering(), some_ids()
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[:, :, 4] = False
    with trace(model) as traces:
        model(ids, attention_mask=mask)
    for each in traces:
        assert (each.gain[:, 4] == 0).all()
        assert each.log_predicted_precision.isfinite().all()


@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS)
@torch.no_grad()
def test_every_llama_has_its_cache(options):
    model = filtering(llama(torch.float64, **options), NEIGHBOURS)
    ids, cache = some_ids(), DynamicCache(config=model.config)
    made = [model(x, **{CACHE: cache}).logits for x in ids.split([5, 7], 1)]
    close(torch.cat(made, 1), model(ids).logits, 1e-6)


def test_dropout_of_attention_thins_in_training_only():
    model = filtering(llama(attention_dropout=0.5))
    ids = some_ids()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_other_masks_are_refused_by_name():
    model, ids = filtering(), some_ids()
    layer = model.model.layers[0]
    h = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(h, torch.arange(12)[None])
    for mask, error, said in [
        (torch.ones(2, 12).bool(), ValueError, r"\(B, 1, T, S\).*\(2, 12\)"),
        (torch.ones(2, 1, 12, 12).long(), TypeError, "boolean.*int64"),
        (torch.ones(2, 1, 12, 5).bool(), ValueError, r"shape.*12, 5\)"),
    ]:
        with pytest.raises(error, match=f"(?s)attention_mask: .*{said}"):
            layer(h, mask, position_embeddings=rotary)


def test_a_plain_models_cache_is_refused_by_name():
    base, ids = llama(), some_ids()
    cache = DynamicCache(config=base.config)
    base(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"cache: .*9 features.*got 8"):
        filtering(base)(ids, **{CACHE: cache})


@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flex_attention", "nonsense"]
)
def test_attention_that_keeps_no_precision_is_refused_by_name(name):
    model = filtering()
    with pytest.raises((ValueError, ImportError), match="(?i)fla|flex|nons"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


def test_values_of_an_unknown_matrix_are_refused_by_name():
    model = filtering()
    for name in ("v_proj", "o_proj"):
        part = getattr(model.model.layers[0].self_attn, name)
        hook = part.register_forward_hook(lambda _, __, y: y.abs())
        model.config.bft = {"granularity": "feature"}
        with pytest.raises(ValueError, match=f"{name}: .*hooks"):
            model(some_ids())
        hook.remove()
