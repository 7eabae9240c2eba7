"""What is hidden touches nothing: not one bit of an output or a gradient."""

import pytest
import torch

from bft_ref import Belief, BFTLayer, attend
from bft_ref.fast import attention
from bft_ref.fast import weighted_columns as columns
from tests.factories import label, make_belief, make_encoder, make_layer

CONFIGS = [
    {},
    {"granularity": "token"},
    {"norm_first": False},
    {"norm_first": False, "granularity": "token", "prior_scale": "unit"},
    {"implementation": "eager"},
    {"implementation": "eager", "norm_first": False},
    {"variance_rule": "row"},
    {"jacobian": "hutchinson", "norm_first": False},
    {"options": {"norm": "rmsnorm", "num_kv_heads": 1, "rotary_base": 9.0}},
    {"activation": "swiglu", "project_variance": False},
]
TOKENS, LAST = 9, [7, 8]  # hidden: the last two


def step(model, belief, hidden, *arguments, trace=False):
    """Visible outputs, and all gradients of a loss on them."""
    model.zero_grad(set_to_none=True)
    mean, log = (x.clone().requires_grad_() for x in belief)
    traces = [] if trace else None
    out = model(Belief(mean, log), *arguments, traces=traces)
    seen = [x[~hidden] for x in out]
    (seen[0].square().sum() + seen[1].sum()).backward()
    parameters = [p.grad for p in model.parameters() if p.grad is not None]
    inputs = [x.grad[~hidden] for x in (mean, log)]
    return [*seen, *inputs, *parameters]


def spoiled(belief, hidden, mean, log):
    """The belief with something else at the hidden tokens."""
    where = hidden.unsqueeze(-1)
    return Belief(
        torch.where(where, mean, belief.mean),
        torch.where(where, log, belief.log_precision),
    )


def assert_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert y.isfinite().all()
        assert torch.equal(x, y)


def last_two(batch=2):
    hidden = torch.zeros(batch, TOKENS, dtype=torch.bool)
    hidden[:, LAST] = True
    return hidden


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize(
    "mean,log",
    [
        (1e9, 0.0),
        (-1e30, 80.0),
        (1e30, -80.0),
        (torch.nan, 0.0),
        (torch.inf, torch.nan),
        (0.0, torch.inf),
        (0.0, -torch.inf),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_padding_hides_whatever_stands_there(config, mean, log, trace):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(tokens=TOKENS, dtype=torch.float32)
    hidden = last_two()
    for causal in (False, True):
        arguments = (None, hidden, causal)
        expected = step(model, belief, hidden, *arguments, trace=trace)
        bad = spoiled(belief, hidden, mean, log)
        found = step(model, bad, hidden, *arguments, trace=trace)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("mean,log", [(1e9, 0.0), (-1e30, 80.0), (1e30, -80)])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_causal_or_a_per_query_mask_hides_any_number(config, mean, log):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(tokens=TOKENS, dtype=torch.float32)
    hidden = last_two()
    bad = spoiled(belief, hidden, mean, log)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    never = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    never[:, LAST] = True
    added = torch.zeros(TOKENS, TOKENS).masked_fill(later, -1e9)
    for arguments in [
        (None, None, True),
        (later, None, False),
        (never, None, False),
        (never, None, True),
        (added, None, False),
        (never.repeat(4, 1, 1), None, False),
    ]:
        expected = step(model, belief, hidden, *arguments)
        assert_same_bits(step(model, bad, hidden, *arguments), expected)


def test_a_token_of_1e30_is_a_number_itself():
    """At a place that sees itself: finite, and its gradient too."""
    for config in CONFIGS:
        model = make_encoder(2, dtype=torch.float32, **config)
        belief = make_belief(tokens=TOKENS, dtype=torch.float32)
        for size in (1e15, 1e19, 1e30):
            bad = spoiled(belief, last_two(), size, 0.3)
            inputs = [x.clone().requires_grad_() for x in bad]
            out = model(Belief(*inputs), None, None, True)
            loss = out.mean.sum() + out.log_precision.sum()
            for x in (*out, *torch.autograd.grad(loss, inputs)):
                assert x.isfinite().all(), (config, size)


def heads(seed=0, keys=40, dtype=torch.float32):
    torch.manual_seed(seed)
    shape = (2, 2, keys, 4)
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(2, keys, dtype=dtype)


def random_masks(keys):
    """Every way to hide, alone and together, with a row that sees nothing."""
    torch.manual_seed(1)
    padding = torch.rand(2, keys) < 0.3
    padding[1] = True
    visible = torch.rand(2, 1, keys, keys) < 0.6
    visible[0, 0, 3] = False
    bias = torch.randn(1, 2, keys, keys)
    bias[torch.rand(bias.shape) < 0.3] = -1e9
    by_key = torch.randn(2, keys).masked_fill(padding, -torch.inf)
    return [
        {"key_padding_mask": padding},
        {"key_padding_mask": by_key},
        {"attn_mask": visible},
        {"attn_mask": bias},
        {"attn_mask": bias[0, 0]},
        {"attn_mask": visible, "key_padding_mask": padding},
        {"attn_mask": bias, "key_padding_mask": by_key},
        {"attn_mask": visible[:, :, :1]},
    ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", range(8))
def test_blocks_take_every_mask(small_blocks, case, is_causal):
    """Against the reference, gradients included, T ≠ S too."""
    masks = random_masks(40)[case]
    masks = {
        name: x if x.dtype == torch.bool else x.double()
        for name, x in masks.items()
    }
    q, k, v, log = (x.requires_grad_() for x in heads(dtype=torch.float64))
    if masks.get("attn_mask", q).shape[-2] == 40 and case in (0, 1):
        q = q[:, :, 11:]
    results = []
    for way in ("eager", "chunked"):
        out = attend(
            *(q, k, v, log),
            neighbour_variance=log.exp(),
            centre=torch.full((4,), 0.3, dtype=torch.float64),
            is_causal=is_causal,
            implementation=way,
            **masks,
        )[:4]
        loss = sum((x * (i + x).sin()).sum() for i, x in enumerate(out))
        grads = torch.autograd.grad(loss, (q, k, v, log))
        results.append((*out, *grads))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    # the others need not have a row that sees nothing
    assert (results[0][2] == 0).any() or case in (3, 4, 7)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, the last one ragged, even at the size of a test."""
    monkeypatch.setattr(columns, "ROWS", 7)
    monkeypatch.setattr(columns, "HEADS", 1)
    monkeypatch.setitem(columns.BLOCK, "cpu", 600)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_a_float_mask_hides_at_minus_1e9_and_at_its_lowest(dtype):
    """As people write it; other numbers are added to the scores."""
    dtype = dtype or torch.float32
    layer = make_layer(dtype=torch.float32)
    belief = make_belief(dtype=torch.float32)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[:, 3:] = True
    expected = layer(belief, None, hidden)
    lowest = torch.finfo(dtype).min
    numbers = [lowest, -torch.inf, *([] if lowest > -1e9 else [-1e9, -1e10])]
    for number in numbers:
        mask = torch.zeros(2, 5, dtype=dtype).masked_fill(hidden, number)
        for found in (
            layer(belief, None, mask),
            layer(belief, mask[0].expand(5, 5).clone()),
        ):
            torch.testing.assert_close(found.mean[:, :3], expected.mean[:, :3])
    soft = torch.zeros(2, 5).masked_fill(hidden, -3.0)
    assert not torch.equal(layer(belief, None, soft).mean, expected.mean)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_dropout_thins_the_mean_alone(implementation):
    """Unbiased in the mean; dispersion and n from all the weights."""
    q, k, v, log = heads(keys=12, dtype=torch.float64)
    centre = torch.full((4,), 2.0, dtype=torch.float64)
    options = {"centre": centre, "implementation": implementation}
    plain = attend(q, k, v + 2, log, is_causal=True, **options)
    torch.manual_seed(0)
    draws = [
        attend(q, k, v + 2, log, is_causal=True, dropout_p=0.4, **options)
        for _ in range(800)
    ]
    for name in ("dispersion", "n_eff", "neighbour_variance"):
        for draw in draws[:2]:
            torch.testing.assert_close(
                getattr(draw, name), getattr(plain, name)
            )
    means = torch.stack([draw.mean for draw in draws])
    error = (means.mean(0) - plain.mean).abs()
    assert (error < 5 * means.std(0) / 800**0.5 + 1e-9).all()
    assert means[:, :, :, 3:].std(0).min() > 0.05
    dropped = (means[:, :, :, 0] == 0).all(-1).double().mean()
    assert abs(dropped - 0.4) < 0.03  # the first token sees itself alone


def test_dropout_of_blocks_has_its_gradient(small_blocks):
    """The same weights are dropped in the backward pass."""
    q, k, v, _ = heads(dtype=torch.float64)
    flat = [x.flatten(0, 1)[:3, :9].requires_grad_() for x in (q, k, v)]

    def summed(*x):
        torch.manual_seed(5)
        options = {"dropout_p": 0.4, "thinned": 2}
        return columns.weighted_columns(*x, True, 0.5, **options)[:2]

    assert torch.autograd.gradcheck(summed, flat)
    assert torch.autograd.gradgradcheck(summed, flat)


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("factor", [1e3, 1e4])
@pytest.mark.parametrize("masked", [False, True])
def test_an_outlier_costs_no_precision(
    granularity, norm_first, factor, masked
):
    """log λ_obs against float64, one token times 10³ or 10⁴, two seeds.

    Queries that see the outlier alone, or next to nothing beside it, have
    no dispersion to speak of: asked are rows with n over 1.5.
    """
    first = torch.zeros(12, 12, dtype=torch.bool)
    first[:, 0] = True  # hides the outlier itself, where it stands first
    for seed, at in [(3, 0), (4, 5)]:
        layer = make_layer(
            norm_first=norm_first, granularity=granularity, seed=seed
        )
        with torch.no_grad():  # comparable weights, whatever the state
            layer.self_attn.in_proj_weight[:16] *= 1 / factor
        belief = make_belief(tokens=12, seed=seed)
        belief.mean[:, at] *= factor
        found = {}
        for dtype in (torch.float64, torch.float32):
            inputs = Belief(*(x.to(dtype) for x in belief))
            seen = layer.to(dtype).observe(
                inputs, first if masked else None, None, not masked
            )
            found[dtype] = seen
        rows = (found[torch.float64].n_eff > 1.5).all(1)
        assert rows.sum() > 10
        error = found[torch.float32].log_precision.double()
        error = (error - found[torch.float64].log_precision)[rows]
        assert error.abs().max() < 1e-3


def test_one_effective_value_has_no_dispersion():
    q, k, v, log = heads(keys=6)
    alone = torch.eye(6, dtype=torch.bool)
    for way in ("eager", "chunked"):
        for w in (None, torch.rand(2, 4)):
            found = attend(
                *(q, k, 1e3 * v + 1e5, log),
                attn_mask=alone,
                centre=torch.zeros(4),
                feature_weights=w,
                implementation=way,
            )
            assert (found.n_eff == 1).all()
            assert (found.dispersion == 0).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_neither_masks_nor_dropout_form_the_matrix(monkeypatch, dropout):
    """Training at T = 400: no tensor as large as the heads' weights."""
    tokens = 400
    layer = make_layer(dtype=torch.float32, dropout=dropout).train()
    belief = make_belief(1, tokens, dtype=torch.float32)
    visible = torch.rand(tokens, tokens) < 0.5
    seen = []
    monkeypatch.setitem(columns.BLOCK, "cpu", 2**15)
    scores = columns._scores

    def watched(*arguments):
        found = scores(*arguments)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(columns, "_scores", watched)
    monkeypatch.setattr(attention, "kriging_attention", None)
    for mask in (None, ~visible):
        out = layer(belief, mask, None, True)
        (out.mean.sum() + out.log_precision.sum()).backward()
    assert max(seen) < tokens * tokens / 2
    assert sum(seen) > tokens * tokens


def test_what_does_not_fit_is_named():
    layer = make_layer(dtype=torch.float32)
    belief = make_belief()
    with pytest.raises(TypeError, match="belief.mean: expected torch.float32"):
        layer(belief)
    huggingface = torch.tensor([[1, 1, 1, 1, 0]] * 2)
    single = make_belief(dtype=torch.float32)
    with pytest.raises(TypeError, match="pass src_key_padding_mask == 0"):
        layer(single, None, huggingface)
    found = layer(single, None, huggingface == 0)
    assert found.mean.isfinite().all()
    with pytest.raises(TypeError, match="config: expected a BFTConfig"):
        BFTLayer(8, 2, config={"granularity": "token"})
    q, k, v, log = heads(keys=5)
    with pytest.raises(TypeError, match="value: expected torch.float32"):
        attend(q, k, v.double(), log)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_a_mask_in_the_place_of_is_causal_is_refused(implementation):
    layer = make_layer(implementation=implementation)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with pytest.raises(TypeError, match="^is_causal: .*got Tensor"):
        layer(make_belief(), None, None, later)
    found = layer(make_belief(), later, is_causal=None)
    torch.testing.assert_close(found.mean, layer(make_belief(), later).mean)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float32])
def test_the_lowest_number_of_a_dtype_hides(dtype):
    """In float16 it is −65504: a key of log λ̄ 10⁵ would shine through."""
    layer, (mean, log) = make_layer(), make_belief()
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[:, 1] = True
    log[:, 1] = 1e5
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(2, 5, dtype=dtype).masked_fill(hidden, lowest)
    expected = layer(Belief(mean, log), None, hidden)
    for masks in [(None, mask), (mask[0].expand(5, 5), None)]:
        found = layer(Belief(mean, log), *masks)
        torch.testing.assert_close(found.mean, expected.mean)
