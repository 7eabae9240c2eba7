"""Every way to compute attention equals the reference, which equals loops."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref import attend, kriging_attention
from bft_ref.fast import attention
from bft_ref.fast import weighted_columns as columns
from bft_ref.kriging import dispersion
from tests.oracles import loops

FAST = ["chunked", "flex"] if torch.cuda.is_available() else ["chunked"]


class Case:
    """Random inputs; ``leaves`` are those with gradients."""

    def __init__(
        self,
        batch=2,
        heads=4,
        kv_heads=2,
        queries=6,
        keys=None,
        size=4,
        dtype=torch.float64,
        spread=1.3,
        seed=0,
        shift=0.0,
    ):
        g = torch.Generator().manual_seed(seed)
        keys = keys or queries

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.query = 1.4 * draw(batch, heads, queries, size)
        self.key = 1.4 * draw(batch, kv_heads, keys, size)
        self.value = 1.6 * draw(batch, kv_heads, keys, size) + shift
        self.log = spread * draw(batch, keys)
        self.c = draw(batch, keys).exp() * 2.5
        self.w = draw(heads, size).square()
        self.names = ["query", "key", "value", "log", "c", "w"]
        for name in self.names:
            setattr(self, name, getattr(self, name).to(dtype))

    @property
    def leaves(self):
        return [getattr(self, name) for name in self.names]

    def run(self, leaves=None, token=False, **options):
        q, k, v, log, c, w = leaves or self.leaves
        return attend(
            q,
            k,
            v,
            log,
            neighbour_variance=c,
            feature_weights=w if token else None,
            **options,
        )


def padded(batch, keys, lengths):
    hidden = torch.zeros(batch, keys, dtype=torch.bool)
    for row, length in enumerate(lengths):
        hidden[row, : keys - length] = True
    return hidden


def compare(a, b, **tolerance):
    for name in ["mean", "dispersion", "n_eff", "neighbour_variance"]:
        torch.testing.assert_close(
            getattr(a, name),
            getattr(b, name),
            **tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def gradients(case, implementation, token, **options):
    leaves = [x.detach().clone().requires_grad_() for x in case.leaves]
    out = case.run(leaves, token, implementation=implementation, **options)
    parts = [out.mean, out.dispersion, out.n_eff, out.neighbour_variance]
    loss = sum(
        (x * torch.sin(torch.arange(x.numel()).view(x.shape))).sum()
        for x in parts
    )
    return torch.autograd.grad(loss, leaves if token else leaves[:-1])


@pytest.mark.parametrize("implementation", ["eager", "chunked", "flex"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_loops(implementation, causal):
    case = Case()
    hidden = padded(2, 6, [6, 4])
    if implementation == "flex" and torch.cuda.is_available():
        pytest.skip("on CUDA: test_implementations_are_equal")
    with torch.no_grad():
        found = case.run(
            key_padding_mask=hidden,
            is_causal=causal,
            implementation=implementation,
        )
    for b, h in itertools.product(range(2), range(4)):
        visible = (
            np.tril(np.ones((6, 6), bool)) if causal else np.ones((6, 6), bool)
        )
        visible = visible & ~hidden[b].numpy()
        _, mean, spread, n, around = loops.kriging(
            case.query[b, h].numpy(),
            case.key[b, h // 2].numpy(),
            case.value[b, h // 2].numpy(),
            case.log[b].exp().numpy(),
            case.c[b].numpy(),
            visible,
        )
        parts = [
            (found.mean, mean),
            (found.dispersion, spread),
            (found.n_eff, n),
            (found.neighbour_variance, around),
        ]
        for x, y in parts:
            np.testing.assert_allclose(x[b, h], y, 1e-9, 1e-11)


@pytest.mark.parametrize("token", [False, True])
def test_flex_forward_on_cpu_equals_the_reference(token):
    case = Case(queries=20, dtype=torch.float32)
    with torch.no_grad():
        for causal in [False, True]:
            options = {
                "is_causal": causal,
                "key_padding_mask": padded(2, 20, [20, 3]),
                "token": token,
            }
            if torch.cuda.is_available():
                pytest.skip("on CUDA: test_implementations_are_equal")
            a = case.run(implementation="eager", **options)
            b = case.run(implementation="flex", **options)
            compare(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("padding", [None, "left", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("implementation", FAST)
def test_implementations_are_equal_in_values_and_gradients(
    implementation, token, causal, padding
):
    case = Case(queries=40)
    if implementation == "flex":
        case = Case(queries=128, size=16, dtype=torch.float32)
        for name in case.names:
            setattr(case, name, getattr(case, name).cuda())
    keys = case.key.shape[-2]
    hidden = None
    if padding == "left":
        hidden = padded(2, keys, [keys, 9])
    elif padding == "float":
        hidden = torch.linspace(-3, 3, 2 * keys).view(2, keys).double()
        hidden[0, :5] = -torch.inf
    if hidden is not None:
        hidden = hidden.to(case.query.device)
    options = {"key_padding_mask": hidden, "is_causal": causal}
    loose = (
        {"rtol": 1e-3, "atol": 1e-3}
        if implementation == "flex"
        else {"rtol": 1e-8, "atol": 1e-9}
    )
    a = case.run(None, token, implementation="eager", **options)
    b = case.run(None, token, implementation=implementation, **options)
    compare(a, b, **loose)
    assert b.weights is None
    for x, y in zip(
        gradients(case, "eager", token, **options),
        gradients(case, implementation, token, **options),
        strict=True,
    ):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, **loose)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("budget", [64, 5000])
def test_any_size_of_block_gives_the_same(budget, causal, monkeypatch):
    """Blocks of one head or several, and a last block that is shorter."""
    case = Case(3, 2, 1, queries=71)
    options = {
        "is_causal": causal,
        "key_padding_mask": padded(3, 71, [71, 5, 40]),
    }
    expected = gradients(case, "eager", False, **options)
    monkeypatch.setitem(columns.BLOCK, "cpu", budget)
    monkeypatch.setattr(columns, "ROWS", 30)
    compare(
        case.run(implementation="chunked", **options),
        case.run(implementation="eager", **options),
        rtol=1e-8,
        atol=1e-9,
    )
    found = gradients(case, "chunked", False, **options)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 30.0, 300.0])
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_chunked_equals_the_reference_for_extreme_scores_and_precisions(
    scale, spread
):
    """Precisions from 1e-60 to 1e60; near one-hot and uniform weights."""
    case = Case(queries=24, spread=spread)
    case.query *= scale
    options = {"is_causal": True, "key_padding_mask": padded(2, 24, [24, 5])}
    compare(
        case.run(implementation="eager", **options),
        case.run(implementation="chunked", **options),
        rtol=1e-6,
        atol=1e-8,
    )
    for x in gradients(case, "chunked", False, **options):
        assert x.isfinite().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    queries=st.integers(1, 9),
    size=st.sampled_from([1, 2, 5, 8]),
    causal=st.booleans(),
    token=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
def test_chunked_equals_the_reference_for_any_shape(
    batch, groups, queries, size, causal, token, dtype, lengths, seed
):
    case = Case(batch, *groups, queries, None, size, dtype, seed=seed)
    lengths = [min(x, queries) for x in lengths[:batch]]
    options = {
        "is_causal": causal,
        "key_padding_mask": padded(batch, queries, lengths),
    }
    a = case.run(None, token, implementation="eager", **options)
    b = case.run(None, token, implementation="chunked", **options)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-8
    compare(a, b, rtol=tolerance, atol=tolerance)
    for x in [a, b]:
        assert (x.dispersion >= 0).all()
        seen = x.n_eff[x.n_eff > 0]
        assert (seen >= 1).all()
        assert (seen <= queries).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    queries=st.integers(1, 6),
    keys=st.integers(1, 9),
    causal=st.booleans(),
    boolean=st.booleans(),
    seed=st.integers(0, 100),
)
def test_score_masks_equal_loops(queries, keys, causal, boolean, seed):
    case = Case(1, 2, 1, queries, keys, seed=seed)
    rng = np.random.default_rng(seed)
    visible = rng.random((queries, keys)) < 0.6
    mask = torch.from_numpy(visible)
    if not boolean:
        mask = torch.zeros(queries, keys).masked_fill(~mask, -torch.inf)
    found = case.run(attn_mask=mask, is_causal=causal, keep_weights=True)
    if causal:
        visible &= np.tril(np.ones((queries, keys), bool), keys - queries)
    for h in range(2):
        weights, mean, _, n, _ = loops.kriging(
            case.query[0, h].numpy(),
            case.key[0, 0].numpy(),
            case.value[0, 0].numpy(),
            case.log[0].exp().numpy(),
            case.c[0].numpy(),
            visible,
        )
        np.testing.assert_allclose(found.weights[0, h], weights, 1e-9, 1e-12)
        np.testing.assert_allclose(found.mean[0, h], mean, 1e-9, 1e-12)
        np.testing.assert_allclose(found.n_eff[0, h], n, 1e-9)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("token", [False, True])
def test_gradcheck_of_attention(implementation, token):
    case = Case(1, 2, 1, 4, size=2)
    leaves = [x.clone().requires_grad_() for x in case.leaves]

    def run(*leaves):
        out = case.run(
            leaves,
            token,
            implementation=implementation,
            is_causal=True,
            key_padding_mask=padded(1, 4, [3]),
        )
        return out.mean, out.dispersion, out.n_eff, out.neighbour_variance

    used = leaves if token else leaves[:-1]
    assert torch.autograd.gradcheck(
        lambda *x: run(*x, *leaves[len(x) :]), used
    )


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_n_eff_gradient_can_be_dropped_and_nothing_else(implementation):
    case = Case(queries=12)
    leaves = [x.clone().requires_grad_() for x in case.leaves]
    out = case.run(leaves, implementation=implementation, n_eff_gradient=False)
    assert not out.n_eff.requires_grad or not any(
        g is not None and g.abs().max() > 0
        for g in torch.autograd.grad(
            out.n_eff.sum(), leaves, retain_graph=True, allow_unused=True
        )
    )
    found = torch.autograd.grad(out.dispersion.sum(), leaves[:3])
    kept = case.run(leaves, implementation=implementation)
    expected = torch.autograd.grad(kept.dispersion.sum(), leaves[:3])
    torch.testing.assert_close(found, expected)


def test_mean_is_sdpa_with_the_precision_as_a_bias():
    case = Case(kv_heads=4)
    bias = case.log[:, None, None].expand(2, 4, 6, 6)
    expected = F.scaled_dot_product_attention(
        case.query, case.key, case.value, bias
    )
    torch.testing.assert_close(case.run().mean, expected)


def test_dispersion_is_the_weighted_variance_by_an_explicit_tensor():
    """The T×T×d tensor that the expanded square avoids."""
    w = torch.rand(5, 7).double().softmax(-1)
    v = torch.randn(7, 3).double() * 1.6 + 2
    mean = w @ v
    explicit = (w[..., None] * (v[None] - mean[:, None]).square()).sum(1)
    torch.testing.assert_close(dispersion(w, v), explicit)
    torch.testing.assert_close(dispersion(w, v, v[:1]), explicit)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_dispersion_survives_a_mean_far_above_the_spread(implementation):
    """float32, mean 10⁴ times the spread: nothing left without centring."""
    exact = Case(queries=30).run()
    shifted = Case(queries=30, dtype=torch.float32, shift=16000.0)
    found = shifted.run(implementation=implementation)
    ratio = found.dispersion.double() / exact.dispersion
    n = exact.n_eff[..., None].expand_as(ratio)
    assert (ratio[n > 1.5] - 1).abs().max() < 0.05
    raw = dispersion(torch.full((1, 30), 1 / 30), shifted.value[0, 0], None)
    centred = dispersion(
        torch.full((1, 30), 1 / 30),
        shifted.value[0, 0],
        shifted.value[0, 0, :1],
    )
    assert (raw / centred - 1).abs().max() > 0.1


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_one_hot_weights_have_no_dispersion_and_one_value(implementation):
    case = Case(queries=12)
    case.log[:, 3] = 400.0
    found = case.run(implementation=implementation)
    torch.testing.assert_close(found.n_eff, torch.ones_like(found.n_eff))
    assert found.dispersion.max() < 1e-12
    value = case.value[:, :, 3:4].repeat_interleave(2, 1)
    torch.testing.assert_close(found.mean, value.expand_as(found.mean))


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_identical_values_have_no_dispersion(implementation):
    case = Case(queries=12, dtype=torch.float32)
    case.value = torch.full_like(case.value, 777.7)
    found = case.run(implementation=implementation)
    assert (found.dispersion == 0).all()
    torch.testing.assert_close(found.mean, torch.full_like(found.mean, 777.7))


def test_rows_that_see_nothing_are_zero_everywhere():
    case = Case()
    for implementation in ["eager", "chunked"]:
        found = case.run(
            key_padding_mask=padded(2, 6, [0, 6]),
            implementation=implementation,
        )
        for part in [found.mean, found.dispersion, found.n_eff]:
            assert (part[0] == 0).all()
            assert part[1].abs().min() > 0


def test_the_centre_is_a_key_that_may_be_seen():
    case = Case()
    hidden = padded(2, 6, [2, 0])
    centre = attention._first_seen(case.value, [hidden[:, None, None]])
    torch.testing.assert_close(centre[0], case.value[0, :, 4:5])
    torch.testing.assert_close(centre[1], case.value[1, :, 0:1])


def test_auto_chooses_the_reference_where_weights_are_needed(monkeypatch):
    case, choose = Case(queries=8), attention._choose
    tensors = (case.query, case.key)
    assert choose("auto", *tensors, ["keep_weights"], []) == "eager"
    assert choose("auto", *tensors, [], ["attn_mask"]) == "eager"
    assert choose("auto", *tensors, [], []) == "chunked"
    monkeypatch.setattr(attention, "SHORT", 7)
    assert choose("auto", *tensors, [], ["attn_mask"]) == "chunked"


@pytest.mark.parametrize(
    "implementation,options",
    [
        ("chunked", {"keep_weights": True}),
        ("flex", {"keep_weights": True}),
        ("flex", {"dropout_p": 0.1}),
        ("flex", {"attn_mask": torch.ones(6, 6).bool()}),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_fast_ways_refuse_what_they_cannot_do(implementation, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^implementation: .*{name}"):
        Case().run(implementation=implementation, **options)


def wrong(**changes):
    case = Case()
    for name, value in changes.items():
        setattr(case, name, value)
    return case


@pytest.mark.parametrize(
    "case,options,words",
    [
        (wrong(query=torch.ones(2, 6, 4)), {}, "^query: .*batch, heads"),
        (wrong(key=torch.ones(2, 2, 6, 5)), {}, "^key: "),
        (wrong(value=torch.ones(2, 2, 5, 4)), {}, "^value: "),
        (wrong(key=torch.ones(2, 3, 6, 4)), {}, "^value: "),
        (wrong(log=torch.zeros(2, 5)), {}, "^log_token_precision: .*5"),
        (wrong(log=torch.zeros(2, 6) / 0), {}, "^log_token_precision: .*NaN"),
        (wrong(log=-torch.ones(2, 6) / 0), {}, "^log_token_precision: "),
        (wrong(c=torch.zeros(2, 5)), {}, "^neighbour_variance: .*5"),
        (wrong(w=torch.zeros(2, 4)), {"token": True}, "^feature_weights: "),
        (wrong(), {"attn_mask": torch.ones(5, 6).bool()}, "^attn_mask: "),
        (
            wrong(query=torch.ones(2, 4, 1, 4).double()),
            {"attn_mask": torch.ones(6, 6).bool()},
            "^attn_mask: .*6, 6",
        ),
        (
            wrong(),
            {"key_padding_mask": torch.ones(2, 5).bool()},
            "^key_padding_mask: .*5",
        ),
        (
            wrong(),
            {"key_padding_mask": torch.ones(1, 6).bool()},
            "^key_padding_mask: ",
        ),
        (wrong(), {"implementation": "fast"}, "^implementation: .*'fast'"),
    ],
)
def test_attention_errors_name_the_argument(case, options, words):
    with pytest.raises(ValueError, match=words):
        case.run(**options)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="^query: .*int64"):
        wrong(query=torch.ones(2, 4, 6, 4).long()).run()
    with pytest.raises(
        TypeError, match="^key_padding_mask: .*bool.*int64.*== 0"
    ):
        Case().run(key_padding_mask=torch.zeros(2, 6).long())
    with pytest.raises(TypeError, match="^attn_mask: .*uint8"):
        Case().run(attn_mask=torch.ones(6, 6).byte())


def test_heads_must_be_a_multiple():
    case = wrong(
        key=torch.ones(2, 3, 6, 4).double(),
        value=torch.ones(2, 3, 6, 4).double(),
    )
    with pytest.raises(ValueError, match="^query: .*multiple of the 3"):
        case.run()


@pytest.mark.parametrize("queries,keys", [(3, 0), (0, 3)])
def test_no_token_at_all_is_refused(queries, keys):
    query, key = torch.ones(1, 2, queries, 4), torch.ones(1, 2, keys, 4)
    for function in (kriging_attention, attend):
        with pytest.raises(ValueError, match=f"{queries} queries .* {keys} k"):
            function(query, key, key, torch.ones(1, keys))


def test_nan_is_not_mistaken_for_an_empty_row():
    case = Case()
    case.query[0, 0, 0, 0] = torch.nan
    assert case.run(implementation="eager").n_eff[0, 0, 0].isnan()
