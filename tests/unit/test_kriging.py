"""Kriging against geostatistical libraries, attention against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch.testing import assert_close

from bft_ref import (
    kriging_attention,
    kriging_weights,
)
from bft_ref.fast.attention import attend
from bft_ref.kriging import dispersion, effective_sample_size
from tests.oracles import loops

SILL, LENGTH, NUGGET = 2.5, 3.0, 0.4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


# ------------------------------------------------------- kriging of a field


@pytest.mark.parametrize("way", [kriging_attention, attend])
@pytest.mark.parametrize(
    "name, shape",
    [("neighbour_variance", (1, 5)), ("feature_weights", (1, 3))],
)
def test_what_goes_with_the_keys_has_their_shape(way, name, shape):
    with pytest.raises(ValueError, match=f"^{name}: expected shape"):
        way(*heads_of(), **{name: torch.ones(shape)})


# ---------------------------------------------------- attention as kriging


def heads_of(
    seed=0,
    batch=2,
    heads=2,
    kv_heads=None,
    queries=5,
    keys=5,
    features=3,
    mean=7.0,
    dtype=torch.float64,
):
    """query, key, value, log λ̄ with no unit scale."""
    g = torch.Generator().manual_seed(seed)
    kv = kv_heads or heads

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return tuple(
        x.to(dtype)
        for x in (
            1.3 * normal(batch, heads, queries, features),
            1.3 * normal(batch, kv, keys, features),
            mean + 1.6 * normal(batch, kv, keys, features),
            1.2 * normal(batch, keys) - 0.5,
        )
    )


masks = st.sampled_from(["none", "bool", "float", "causal", "both"])


def mask_of(kind, queries, keys, seed):
    """attn_mask, is_causal, and what each query sees (queries, keys)."""
    g = torch.Generator().manual_seed(seed)
    seen = torch.rand(queries, keys, generator=g) < 0.6
    order = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if kind == "none":
        return None, False, torch.ones_like(seen)
    if kind == "causal":
        return None, True, order
    if kind == "float":
        lowest = torch.where(seen, 0.0, -torch.inf).double()
        return lowest, False, seen
    return seen, kind == "both", seen & order if kind == "both" else seen


@settings(deadline=None, max_examples=40)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    queries=st.integers(1, 6),
    extra=st.integers(0, 3),
    features=st.integers(1, 4),
    kind=masks,
    seed=st.integers(0, 10_000),
)
def test_attention_equals_loops(
    batch, kv_heads, groups, queries, extra, features, kind, seed
):
    """Any shape, any mask, grouped queries: token by token, head by head."""
    keys = queries + extra
    q, k, v, log_precision = heads_of(
        seed, batch, kv_heads * groups, kv_heads, queries, keys, features
    )
    mask, causal, seen = mask_of(kind, queries, keys, seed)
    c = torch.rand(batch, keys, dtype=torch.float64) + 0.3
    said = kriging_attention(
        q,
        k,
        v,
        log_precision,
        neighbour_variance=c,
        centre=torch.tensor(7.0, dtype=torch.float64),
        attn_mask=mask,
        is_causal=causal,
    )
    for b in range(batch):
        for h in range(kv_heads * groups):
            g = h // groups
            expected = loops.kriging(
                q[b, h].numpy(),
                k[b, g].numpy(),
                v[b, g].numpy(),
                log_precision[b].exp().numpy(),
                c[b].numpy(),
                seen.numpy(),
            )
            weights, mean, spread, n_eff, around = expected
            assert_allclose(said.weights[b, h], weights, atol=1e-12)
            assert_allclose(said.mean[b, h], mean, atol=1e-11)
            assert_allclose(said.dispersion[b, h], spread, atol=1e-11)
            assert_allclose(said.n_eff[b, h], n_eff, atol=1e-10)
            assert_allclose(said.neighbour_variance[b, h], around, atol=1e-11)


@settings(deadline=None, max_examples=30)
@given(
    queries=st.integers(1, 6),
    kind=st.sampled_from(["none", "bool", "float", "causal"]),
    precision=st.floats(-20, 20),
    seed=st.integers(0, 10_000),
)
def test_property_1_equal_precisions_give_plain_attention(
    queries, kind, precision, seed
):
    q, k, v, _ = heads_of(seed, queries=queries, keys=queries)
    mask, causal, seen = mask_of(kind, queries, queries, seed)
    equal = torch.full((2, queries), precision, dtype=torch.float64)
    said = kriging_attention(q, k, v, equal, attn_mask=mask, is_causal=causal)
    plain = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal
    )
    some = seen.any(-1)  # PyTorch's own answer for an empty row varies
    assert_close(said.mean[:, :, some], plain[:, :, some], **EXACT)
    assert (said.mean[:, :, ~some] == 0).all()


def test_unequal_precisions_are_a_bias_of_plain_attention():
    q, k, v, log_precision = heads_of()
    plain = F.scaled_dot_product_attention(
        q, k, v, attn_mask=log_precision[:, None, None]
    )
    said = kriging_attention(q, k, v, log_precision)
    assert_close(said.mean, plain, **EXACT)
    ignored = F.scaled_dot_product_attention(q, k, v)
    assert (said.mean - ignored).abs().max() > 0.1


def test_property_4_permuting_keys_changes_nothing():
    q, k, v, log_precision = heads_of(keys=7)
    c = log_precision.exp() + 0.2
    mask, _, _ = mask_of("bool", 5, 7, 3)
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    a = kriging_attention(
        q, k, v, log_precision, neighbour_variance=c, attn_mask=mask
    )
    b = kriging_attention(
        q,
        k[:, :, order],
        v[:, :, order],
        log_precision[:, order],
        neighbour_variance=c[:, order],
        attn_mask=mask[:, order],
    )
    for x, y in zip(a[:4], b[:4], strict=True):
        assert_close(x, y, **EXACT)
    assert_close(a.weights[..., order], b.weights, **EXACT)


def test_permuting_queries_permutes_answers():
    q, k, v, log_precision = heads_of()
    order = torch.tensor([3, 0, 4, 2, 1])
    a = kriging_attention(q, k, v, log_precision)
    b = kriging_attention(q[:, :, order], k, v, log_precision)
    for x, y in zip(a, b, strict=True):
        assert_close(x[:, :, order], y, **EXACT)


@pytest.mark.parametrize("later", [1, 3, 4])
def test_causal_nothing_depends_on_later_tokens(later):
    """Bit by bit, and no gradient reaches them."""
    q, k, v, log_precision = heads_of()
    a = kriging_attention(q, k, v, log_precision, is_causal=True)
    changed = [x.clone() for x in (q, k, v, log_precision)]
    for x in changed[:3]:
        x[:, :, later:] = 50.0
    changed[3][:, later:] = 9.0
    b = kriging_attention(*changed, is_causal=True)
    for x, y in zip(a[:4], b[:4], strict=True):
        assert torch.equal(x[:, :, :later], y[:, :, :later])
    inputs = [x.clone().requires_grad_() for x in (k, v, log_precision)]
    early = kriging_attention(q, *inputs, is_causal=True)
    sum(x[:, :, :later].sum() for x in early[:3]).backward()
    assert (inputs[0].grad[:, :, later:] == 0).all()
    assert (inputs[1].grad[:, :, later:] == 0).all()
    assert (inputs[2].grad[:, later:] == 0).all()
    assert inputs[2].grad.abs().sum() > 0 or later == 1


def test_causal_with_a_cache_aligns_the_last_query_with_the_last_key():
    q, k, v, log_precision = heads_of()
    full = kriging_attention(q, k, v, log_precision, is_causal=True)
    last = kriging_attention(q[:, :, 3:], k, v, log_precision, is_causal=True)
    for x, y in zip(full, last, strict=True):
        assert_close(x[:, :, 3:], y, **EXACT)


def test_grouped_queries_equal_repeated_heads():
    q, k, v, log_precision = heads_of(heads=6, kv_heads=2)
    centre = v[:, :, :1]
    a = kriging_attention(q, k, v, log_precision, centre=centre)
    twice = [x.repeat_interleave(3, 1) for x in (k, v, centre)]
    b = kriging_attention(q, *twice[:2], log_precision, centre=twice[2])
    for x, y in zip(a, b, strict=True):
        assert x is y is None or torch.equal(x, y)
    plain = F.scaled_dot_product_attention(
        q, k, v, enable_gqa=True, attn_mask=log_precision[:, None, None]
    )
    assert_close(a.mean, plain, **EXACT)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_sees_nothing(kind):
    """Zero weights, n_eff 0, a mean of zero, and finite gradients."""
    inputs = [x.requires_grad_() for x in heads_of()]
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[2] = False
    mask = seen
    if kind == "float":
        mask = torch.where(seen, 0.0, -torch.inf)
    said = kriging_attention(*inputs, attn_mask=mask)
    assert (said.weights[:, :, 2] == 0).all()
    assert (said.mean[:, :, 2] == 0).all()
    assert (said.dispersion[:, :, 2] == 0).all()
    assert (said.n_eff[:, :, 2] == 0).all()
    assert (said.neighbour_variance[:, :, 2] == 0).all()
    others = torch.tensor([0, 1, 3, 4])
    assert_close(
        said.weights[:, :, others].sum(-1),
        torch.ones(2, 2, 4, dtype=torch.float64),
        **EXACT,
    )
    sum(x.sum() for x in said[:4]).backward()
    for x in inputs:
        assert x.grad.isfinite().all()
    assert (inputs[0].grad[:, :, 2] == 0).all()


@pytest.mark.parametrize("kind", ["none", "bool", "causal", "both"])
def test_attention_passes_gradcheck(kind):
    inputs = [
        x.requires_grad_()
        for x in heads_of(batch=1, queries=3, keys=3, mean=0.5)
    ]
    mask, causal, _ = mask_of(kind, 3, 3, 11)

    def everything(q, k, v, log_precision):
        said = kriging_attention(
            q, k, v, log_precision, attn_mask=mask, is_causal=causal
        )
        return said.weights, said.mean, said.dispersion

    assert torch.autograd.gradcheck(everything, inputs)


def test_weights_pass_gradcheck():
    q, k, _, log_precision = heads_of(batch=1, heads=1, queries=3, keys=4)
    scores = (q @ k.mT)[0, 0].requires_grad_()
    bias = log_precision[0].requires_grad_()
    mask, _, _ = mask_of("bool", 3, 4, 5)
    assert torch.autograd.gradcheck(
        lambda s, b: kriging_weights(s, b, mask), (scores, bias)
    )


def test_float32_follows_float64():
    inputs = heads_of(mean=0.0, keys=9)
    exact = kriging_attention(*inputs)
    said = kriging_attention(*(x.float() for x in inputs))
    for x, y in zip(exact, said, strict=True):
        assert y.dtype == torch.float32
        assert_close(y.double(), x, rtol=2e-5, atol=2e-5)


def test_half_precision_input_is_computed_in_float32():
    inputs = [x.bfloat16() for x in heads_of(mean=0.0)]
    said = kriging_attention(*inputs)
    exact = kriging_attention(*(x.double() for x in inputs))
    for x, y in zip(exact, said, strict=True):
        assert y.dtype == torch.float32
        assert_close(y.double(), x, rtol=2e-5, atol=2e-5)


@settings(deadline=None, max_examples=30)
@given(shift=st.floats(-1e3, 1e3), seed=st.integers(0, 10_000))
def test_property_6_dispersion_ignores_a_constant(shift, seed):
    q, k, v, log_precision = heads_of(seed, mean=0.0)
    a = kriging_attention(q, k, v, log_precision)
    b = kriging_attention(q, k, v + shift, log_precision)
    assert_close(a.dispersion, b.dispersion, rtol=1e-9, atol=1e-8)
    assert_close(a.mean + shift, b.mean, rtol=1e-9, atol=1e-9)
    constant = torch.full_like(v[:, :, :1], shift)
    c = kriging_attention(q, k, v + shift, log_precision, centre=constant)
    assert_close(a.dispersion, c.dispersion, rtol=1e-9, atol=1e-9)


def test_float32_keeps_a_spread_far_below_the_mean():
    q, k, v, log_precision = heads_of(mean=3000.0, keys=8)
    exact = kriging_attention(
        q, k, v, log_precision, centre=torch.tensor(3000.0).double()
    ).dispersion
    single = [x.float() for x in (q, k, v, log_precision)]
    bare = kriging_attention(*single).dispersion
    far = kriging_attention(*single, centre=torch.zeros(3)).dispersion
    near = kriging_attention(*single, centre=single[2][:, :, :1]).dispersion
    for found in (bare, far, near):
        assert_close(found.double(), exact, rtol=5e-3, atol=1e-3)


def test_identical_values_have_no_dispersion():
    q, k, _, log_precision = heads_of()
    v = torch.full((2, 2, 5, 3), 7.3, dtype=torch.float64)
    said = kriging_attention(q, k, v, log_precision)
    assert_close(said.mean, v, **EXACT)
    assert (said.dispersion >= 0).all()
    assert said.dispersion.max() < 1e-12
    assert (said.n_eff > 1).all()


def test_one_witness_takes_it_all():
    q, k, v, log_precision = heads_of()
    log_precision[:, 3] = 200.0
    said = kriging_attention(q, k, v, log_precision)
    one_hot = F.one_hot(torch.tensor(3), 5).double()
    assert_close(said.weights, one_hot.expand(2, 2, 5, 5), **EXACT)
    assert_close(said.mean, v[:, :, 3:4].expand_as(q), **EXACT)
    assert said.dispersion.max() < 1e-12
    assert_close(said.n_eff, torch.ones(2, 2, 5).double(), **EXACT)


@settings(deadline=None, max_examples=40)
@given(
    scores=st.lists(st.floats(-80, 80), min_size=1, max_size=8),
    bias=st.floats(-80, 80),
    double=st.booleans(),
)
def test_weights_sum_to_one_and_n_eff_stays_between_one_and_s(
    scores, bias, double
):
    dtype = torch.float64 if double else torch.float32
    x = torch.tensor([scores], dtype=dtype)
    log_precision = torch.zeros(len(scores), dtype=dtype)
    log_precision[0] = bias
    weights = kriging_weights(x, log_precision)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(1, dtype=dtype))
    n = effective_sample_size(weights)
    assert 1 <= n.item() <= len(scores)


def test_equal_weights_count_every_witness():
    weights = torch.full((2, 7), 1 / 7, dtype=torch.float64)
    assert_close(
        effective_sample_size(weights), torch.full((2,), 7.0).double()
    )


def test_dispersion_is_the_weighted_square_about_the_mean():
    q, k, v, log_precision = heads_of()
    weights = kriging_attention(q, k, v, log_precision).weights
    mean = weights @ v
    square = (v[:, :, None] - mean[..., None, :]).square()
    direct = (weights[..., None] * square).sum(-2)
    assert_close(dispersion(weights, v), direct, rtol=1e-10, atol=1e-10)


def test_feature_weights_contract_the_dispersion():
    q, k, v, log_precision = heads_of()
    per_feature = torch.tensor([[0.3, 1.1, 2.0], [0.7, 0.2, 0.5]]).double()
    full = kriging_attention(q, k, v, log_precision).dispersion
    said = kriging_attention(
        q, k, v, log_precision, feature_weights=per_feature
    ).dispersion
    assert said.shape == (2, 2, 5, 1)
    for head in range(2):
        by_hand = sum(
            per_feature[head, i] * full[:, head, :, i] for i in range(3)
        )
        assert_close(said[:, head, :, 0], by_hand, **EXACT)


def test_dropout_thins_the_mean_only():
    inputs = heads_of(queries=8, keys=8)
    kept = kriging_attention(*inputs)
    torch.manual_seed(0)
    thinned = kriging_attention(*inputs, dropout_p=0.5)
    assert (thinned.mean - kept.mean).abs().max() > 0.1
    assert torch.equal(thinned.weights, kept.weights)
    assert torch.equal(thinned.dispersion, kept.dispersion)
    assert torch.equal(thinned.n_eff, kept.n_eff)


@pytest.mark.parametrize(
    ("argument", "bad", "error"),
    [
        ("query", torch.zeros(2, 5, 3), ValueError),
        ("query", torch.zeros(2, 2, 5, 3, dtype=torch.int64), TypeError),
        ("query", [1.0, 2.0], TypeError),
        ("query", torch.zeros(2, 3, 5, 3), ValueError),
        ("key", torch.zeros(2, 2, 5, 4), ValueError),
        ("key", torch.zeros(3, 2, 5, 3), ValueError),
        ("value", torch.zeros(2, 2, 4, 3), ValueError),
        ("value", torch.zeros(2, 1, 5, 3), ValueError),
        ("log_token_precision", torch.zeros(2, 4), ValueError),
        ("log_token_precision", torch.zeros(2, 5).long(), TypeError),
        ("log_token_precision", torch.full((2, 5), torch.nan), ValueError),
        ("attn_mask", torch.ones(5, 4, dtype=torch.bool), ValueError),
    ],
)
def test_attention_names_what_is_wrong(argument, bad, error):
    names = ("query", "key", "value", "log_token_precision")
    call = dict(zip(names, heads_of(dtype=torch.float32), strict=True))
    kriging_attention(**call)
    with pytest.raises(error, match=f"^{argument}"):
        kriging_attention(**call | {argument: bad})


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here"
)
def test_the_same_on_a_gpu():
    inputs = heads_of(keys=9)
    here = kriging_attention(*inputs)
    there = kriging_attention(*(x.cuda() for x in inputs))
    for x, y in zip(here, there, strict=True):
        assert_close(x, y.cpu(), rtol=1e-10, atol=1e-10)
