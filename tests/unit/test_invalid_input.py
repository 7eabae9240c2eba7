"""Input that breaks things: never a silent NaN, K in [0, 1], variance > 0."""

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bft_ref import Belief, delta
from bft_ref.config import Dynamics
from tests.factories import (
    ENDS,
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
)

GRANULARITIES = ["feature", "token"]


def assert_sane(out, traces, *gradients):
    assert out.mean.isfinite().all()
    assert out.log_precision.isfinite().all()
    assert out.log_precision.dtype in (torch.float32, torch.float64)
    for trace in traces:
        assert ((trace.gain >= 0) & (trace.gain <= 1)).all()
        assert not trace.n_eff.isnan().any()
        assert (trace.n_eff >= 0).all()
        assert (trace.log_observation_precision < torch.inf).all()
    for gradient in gradients:
        assert gradient.isfinite().all()


def run(model, belief, *masks):
    """Forward, trace and backward; everything must be sane."""
    mean = belief.mean.detach().clone().requires_grad_()
    log = belief.log_precision.detach().clone().requires_grad_()
    if model.layers[0].config.implementation == "chunked":
        out, traces = model(Belief(mean, log), *masks), []
    else:
        out, traces = model.steps(Belief(mean, log), *masks)
    loss = out.mean.square().mean() + out.log_precision.mean()
    inputs = [mean, log, *model.parameters()]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert_sane(out, traces, *(g for g in gradients if g is not None))
    return out, traces


CONFIGS = [
    {},
    {"granularity": "token"},
    {"norm_first": False},
    {"norm_first": False, "granularity": "token"},
    {"prior_scale": "unit", "project_variance": False, "reading": "mean"},
    {"variance_rule": "row"},
    {"jacobian": "hutchinson", "activation": "swiglu"},
    {"implementation": "chunked"},
    {"options": {"norm": "rmsnorm"}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("exponent", [-30, -10, 10, 30])
def test_precision_from_1e_minus_30_to_1e30_in_float32(config, exponent):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(dtype=torch.float32)
    log = torch.full_like(belief.log_precision, exponent * math.log(10))
    run(model, Belief(belief.mean, log))


@pytest.mark.parametrize("size,log", ENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("config", [CONFIGS[i] for i in [0, 4, 5, 7]])
def test_a_belief_at_the_ends_of_float32(config, granularity, size, log):
    """Also where a token is hidden, whose norm has nothing but ε below it."""
    if "variance_rule" in config:
        granularity = "feature"
    config = {**config, "granularity": granularity}
    for first, features in [(True, 1), (False, 8)]:
        config["norm_first"] = first
        model = make_encoder(2, dtype=torch.float32, **config)
        belief = make_belief(
            1, 3, features=features, dtype=torch.float32, spread=2.0
        )
        belief = Belief(size * belief.mean, belief.log_precision + log)
        for mask in [None, left_padding(1, 3, [2]), left_padding(1, 3, [0])]:
            run(model, belief, None, mask)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_precisions_sixty_orders_of_magnitude_apart(config):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(2, 6, dtype=torch.float32)
    log = torch.linspace(-30, 30, 96).view(2, 6, 8) * math.log(10)
    for order in [log, log.flip(0, 1, 2), log[:, :, torch.randperm(8)]]:
        run(model, Belief(belief.mean, order), None, None, True)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_length_one(config):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(2, 1, dtype=torch.float32)
    for causal in [True, False]:
        _, traces = run(model, belief, None, None, causal)
        for trace in traces:
            torch.testing.assert_close(
                trace.n_eff, torch.ones_like(trace.n_eff)
            )


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_everything_masked(config):
    model = make_encoder(2, dtype=torch.float32, **config)
    hidden = torch.ones(2, 5, dtype=torch.bool)
    hidden[1, 3:] = False
    belief = make_belief(dtype=torch.float32)
    for causal in [True, False]:
        _, traces = run(model, belief, None, hidden, causal)
        for trace in traces:
            assert (trace.gain[0] == 0).all()
            assert (trace.n_eff[0] == 0).all()
            assert (trace.gain[1, 3:] > 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("value", [0.0, 777.7, -1e6])
def test_identical_tokens_and_features(config, value):
    """No dispersion anywhere, and a norm whose spread is its ε alone."""
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(dtype=torch.float32)
    run(model, Belief(torch.full_like(belief.mean, value), belief[1]))


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("size", [1e-20, 1e4, 1e8])
def test_states_of_any_size(config, size):
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(dtype=torch.float32)
    run(model, Belief(size * belief.mean, belief.log_precision))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_mean_far_above_the_spread_in_float32(granularity):
    """Against float64, state 10⁴ times its spread, post-norm (no centring)."""
    layer = make_layer(norm_first=False, granularity=granularity)
    with torch.no_grad():  # scores would be as large: not the question
        layer.self_attn.in_proj_weight[:16] = 0.0
    mean = (make_belief().mean + 16384).float()
    log = make_belief().log_precision
    found = {}
    for dtype in [torch.float64, torch.float32]:
        layer = layer.to(dtype)
        _, trace = layer.step(Belief(mean.to(dtype), log.to(dtype)))
        found[dtype] = trace.log_observation_precision.double()
    error = (found[torch.float32] - found[torch.float64]).abs().max()
    assert error < 0.02


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_one_hot_attention(config):
    model = make_encoder(2, dtype=torch.float32, **config)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[:16] *= 1e3
    belief = make_belief(dtype=torch.float32)
    run(model, belief)
    seen = model.layers[0].observe(belief)
    assert seen.n_eff.min() < 1.0001


@pytest.mark.parametrize("value", [-100.0, -30.0, 30.0, 80.0])
@pytest.mark.parametrize("dynamics", get_args(Dynamics))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_process_noise_of_any_size(value, granularity, dynamics):
    options = {"granularity": granularity, "dynamics": dynamics}
    model = make_encoder(2, dtype=torch.float32, **options)
    with torch.no_grad():
        for layer in model.layers:
            layer.log_process_noise.fill_(value)
    run(model, make_belief(dtype=torch.float32))


def test_jacobian_of_exactly_minus_one():
    """1 + J = 0: the state is forgotten, precision is 1/Q, gradients exist."""
    cancel = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        cancel.weight.copy_(-torch.eye(8))
    layer = make_layer(
        dtype=torch.float32, norm_first=False, options={"ffn": cancel}
    )
    with torch.no_grad():
        cancel.weight.copy_(-torch.eye(8))
    belief = make_belief(dtype=torch.float32)
    mean = belief.mean.clone().requires_grad_()
    _, log_growth = layer.predict(Belief(mean, belief.log_precision))
    assert log_growth.isfinite().all()
    assert log_growth.max() < -80
    log_q = layer.log_process_noise
    precision = delta.predict(belief.log_precision, log_growth, log_q)
    torch.testing.assert_close(precision, (-log_q).expand_as(precision))
    log_growth.sum().backward()
    assert mean.grad.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 129, 513, 1024])
def test_any_length(tokens):
    model = make_encoder(1, d_model=8, heads=1, dtype=torch.float32)
    belief = make_belief(1, tokens, dtype=torch.float32)
    out, traces = model.steps(belief, is_causal=True)
    assert_sane(out, traces)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_length_8192_with_gradients_and_padding(granularity):
    layer = make_layer(
        d_model=8,
        heads=1,
        width=8,
        dtype=torch.float32,
        granularity=granularity,
    )
    belief = make_belief(1, 8192, dtype=torch.float32)
    hidden = left_padding(1, 8192, [8000])
    out = layer(belief, None, hidden, True)
    (out.mean.mean() + out.log_precision.mean()).backward()
    assert out.mean.isfinite().all()
    assert out.log_precision.isfinite().all()
    for p in layer.parameters():
        assert p.grad.isfinite().all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 7),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    first=st.booleans(),
    granularity=st.sampled_from(GRANULARITIES),
    features=st.sampled_from([1, 8]),
    causal=st.booleans(),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    centre=st.floats(-60, 60),
    spread=st.floats(0, 10),
    lengths=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    options=st.sampled_from(CONFIGS[4:]),
    seed=st.integers(0, 1000),
)
@example(
    batch=1,
    tokens=1,
    dtype=torch.float32,
    first=False,
    granularity="feature",
    features=8,
    causal=False,
    size=1e-6,
    centre=-60.0,
    spread=7.0,
    lengths=[0, 0, 0],
    options=CONFIGS[4],
    seed=0,
)
def test_any_belief_mask_and_dtype_stays_sane(
    batch,
    tokens,
    dtype,
    first,
    granularity,
    features,
    causal,
    size,
    centre,
    spread,
    lengths,
    options,
    seed,
):
    config = {"granularity": granularity, **options, "norm_first": first}
    if "variance_rule" in options:
        config["granularity"] = "feature"
    model = make_encoder(2, dtype=dtype, **config)
    belief = make_belief(
        batch, tokens, features=features, dtype=dtype, seed=seed, spread=spread
    )
    belief = Belief(size * belief.mean, belief.log_precision + centre)
    hidden = left_padding(
        batch, tokens, [min(x, tokens) for x in lengths[:batch]]
    )
    run(model, belief, None, hidden, causal)


@pytest.mark.parametrize(
    "first,granularity",
    list(itertools.product([True, False], GRANULARITIES)),
)
def test_nan_and_infinity_are_refused_before_anything_is_computed(
    first, granularity
):
    layer = make_layer(norm_first=first, granularity=granularity)
    belief = make_belief()
    for field, bad in itertools.product(
        ["mean", "log_precision"], [torch.nan, torch.inf, -torch.inf]
    ):
        value = getattr(belief, field).clone()
        value[1, 2, 0] = bad
        with pytest.raises(ValueError, match=f"^belief.{field}: .*1 of 80"):
            layer(belief._replace(**{field: value}))


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["precision", "variance"])
def test_zero_and_negative_precision_are_refused(name, bad):
    mean = make_belief().mean
    value = torch.full_like(mean, 2.5)
    value[0, 0, 0] = bad
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        Belief.of(mean, **{name: value})
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        Belief.of(mean, **{name: bad})
