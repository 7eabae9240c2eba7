"""The eight properties that the book shows and the code must have."""

import filterpy.kalman
import numpy as np
import pytest
import statsmodels.api as sm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref import (
    Belief,
    attend,
    discount,
    gain,
    kriging_attention,
    steady_state_precision,
    update,
)
from bft_ref.kriging import dispersion
from tests.factories import (
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
    numpy_parameters,
)

WAYS = ["eager", "chunked"]


def qkv(batch=2, heads=2, tokens=7, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, heads, tokens, size)
    return 1.5 * torch.randn(shape, generator=generator).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_property_1_equal_precision_is_plain_attention(way, causal):
    q, k, v = qkv()
    log = torch.full((2, 7), 1.7).double()
    found = attend(q, k, v, log, is_causal=causal, implementation=way)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(found.mean, expected)
    assert (
        attend(q, k, v, log + torch.arange(7), is_causal=causal).mean
        - expected
    ).abs().max() > 0.01


def test_property_2_unit_prior_and_vague_beliefs_give_gain_one():
    """1 − K ≤ 1/(1 + Qλ_obs) from the second layer on, at every size of Q."""
    belief = make_belief()
    for noise in [1e2, 1e6, 1e12]:
        model = make_encoder(3, prior_scale="unit")
        with torch.no_grad():
            model.log_initial_precision.fill_(-np.log(noise))
            for layer in model.layers:
                layer.log_process_noise.fill_(np.log(noise))
        start = model.log_initial_precision.expand(2, 5, -1)
        _, traces = model.steps(Belief(belief.mean, start))
        for trace in traces:
            observed = trace.log_observation_precision.exp()
            bound = 1 / (1 + noise * observed)
            assert (1 - trace.gain <= bound + 1e-12).all()
    assert (1 - traces[-1].gain).max() < 1e-8


def test_property_2_neighbours_prior_keeps_the_gain_below_one():
    """Vague neighbours are vague evidence: no belief makes K tend to 1."""
    model = make_encoder(2)
    worst = []
    for noise in [1e6, 1e12]:
        with torch.no_grad():
            model.log_initial_precision.fill_(-np.log(noise))
            for layer in model.layers:
                layer.log_process_noise.fill_(np.log(noise))
        _, traces = model.steps(make_belief().mean)
        worst.append(traces[-1].gain.min().item())
    assert worst[1] < 0.95
    assert worst[0] == pytest.approx(worst[1], rel=1e-3)


def test_property_2_an_invisible_patch_cannot_learn():
    """dK/dlog Q = K(1 − K) where λ = 1/Q."""
    log_q = torch.tensor([-3.0, 0.4, 20.0]).double().requires_grad_()
    k = gain(-log_q, torch.tensor(0.7).double())
    (slope,) = torch.autograd.grad(k.sum(), log_q)
    torch.testing.assert_close(slope, k * (1 - k))
    assert slope[2] < 1e-8


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tau=st.floats(1e-3, 1e3), o=st.floats(1e-3, 1e3), depth=st.integers(1, 30)
)
def test_property_3_without_noise_the_gain_is_one_over_depth(tau, o, depth):
    log_tau, log_o = torch.tensor([tau, o], dtype=torch.float64).log()
    belief = Belief(torch.zeros(()).double(), log_tau)
    for ell in range(depth):
        belief, k = update(belief, torch.ones(()).double(), log_o)
        assert k.item() == pytest.approx(1 / (ell + 1 + tau / o), rel=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(q=st.floats(1e-3, 1e3), o=st.floats(1e-3, 1e3), x=st.floats(-9, 9))
def test_property_3_with_noise_there_is_a_stable_fixed_point(q, o, x):
    q, o = torch.tensor([q, o], dtype=torch.float64)
    star = steady_state_precision(o, q)

    def step(log):
        return discount(torch.logaddexp(log, o.log()), q.log())

    torch.testing.assert_close(step(star.log()), star.log())
    assert star < 1 / q
    multiplier = torch.func.grad(lambda lam: step(lam.log()).exp())(star)
    torch.testing.assert_close(multiplier, (star / (star + o)).square())
    k = gain(star.log(), o.log())
    torch.testing.assert_close(k, 2 / (1 + (1 + 4 / (q * o)).sqrt()))
    log = torch.tensor(x).double()
    before = (log - star.log()).abs()
    for _ in range(20):
        log = step(log)
        assert log < -q.log()
    assert (log - star.log()).abs() <= before * (1 + 1e-12) + 1e-12


def test_property_3_a_gain_of_077_is_a_noise_of_258():
    o = torch.tensor(1.0).double()
    star = steady_state_precision(o, torch.tensor(2.58).double())
    assert gain(star.log(), o.log()).item() == pytest.approx(0.77, abs=5e-3)


def test_property_3_the_layer_never_exceeds_one_over_q():
    layer = make_layer()
    sharp = make_belief()
    sharp = Belief(sharp.mean, sharp.log_precision + 60)
    out = layer(sharp)
    assert (out.log_precision <= -layer.log_process_noise).all()


@pytest.mark.parametrize("way", WAYS)
def test_property_4_permuting_the_keys_changes_nothing(way):
    q, k, v = qkv()
    log, c = make_belief(2, 7, 2, seed=4).log_precision.unbind(-1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    plain = attend(
        q, k, v, log, neighbour_variance=c.exp(), implementation=way
    )
    mixed = attend(
        q,
        k[:, :, order],
        v[:, :, order],
        log[:, order],
        neighbour_variance=c.exp()[:, order],
        implementation=way,
    )
    for a, b in zip(plain[:4], mixed[:4], strict=True):
        torch.testing.assert_close(a, b)
    half = attend(q, k[:, :, order], v[:, :, order], log, implementation=way)
    assert (half.mean - plain.mean).abs().max() > 0.01


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("first", [True, False])
def test_property_4_an_encoder_without_positions_is_equivariant(
    first, granularity
):
    model = make_encoder(2, norm_first=first, granularity=granularity)
    belief, order = make_belief(), torch.tensor([2, 4, 0, 1, 3])
    mixed = Belief(*(x[:, order] for x in belief))
    for a, b in zip(model(mixed), model(belief), strict=True):
        torch.testing.assert_close(a, b[:, order])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [True, False])
def test_property_4_causal_nothing_depends_on_later_tokens(first, way):
    model = make_encoder(2, norm_first=first, implementation=way)
    belief, other = make_belief(), make_belief(seed=9)
    for t in [1, 3]:
        changed = Belief(
            *(
                torch.cat([a[:, :t], 5 * b[:, t:]], 1)
                for a, b in zip(belief, other, strict=True)
            )
        )
        before = model(belief, is_causal=True)
        after = model(changed, is_causal=True)
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(a[:, :t], b[:, :t], rtol=0, atol=1e-12)
            assert (a[:, t:] - b[:, t:]).abs().max() > 0.01


def nile_like():
    rng = np.random.default_rng(0)
    level = 900 + np.cumsum(rng.normal(0, 12, 40))
    return level + rng.normal(0, 50, 40)


def test_property_5_the_belief_algebra_is_the_scalar_kalman_filter():
    z, r, q, p0, m0 = nile_like(), 2500.0, 144.0, 700.0, 880.0
    theirs = filterpy.kalman.KalmanFilter(1, 1)
    theirs.x, theirs.P = np.array([[m0]]), np.array([[p0]])
    theirs.F = theirs.H = np.eye(1)
    theirs.R, theirs.Q = np.array([[r]]), np.array([[q]])
    model = sm.tsa.UnobservedComponents(z, "llevel")
    model.ssm.initialize_known(np.array([m0]), np.array([[p0]]))
    smooth = model.filter([r, q])
    log_o, log_q = -np.log(r), torch.tensor(np.log(q))
    belief = Belief(torch.tensor(m0), -torch.tensor(p0).double().log())
    belief = Belief(*(x.double() for x in belief))
    for t, value in enumerate(z):
        belief, k = update(belief, value - belief.mean, torch.tensor(log_o))
        theirs.update(value)
        assert k.item() == pytest.approx(theirs.K[0, 0], rel=1e-10)
        assert belief.mean.item() == pytest.approx(theirs.x[0, 0], rel=1e-10)
        assert belief.variance.item() == pytest.approx(
            theirs.P[0, 0], rel=1e-10
        )
        assert belief.mean.item() == pytest.approx(
            smooth.filtered_state[0, t], rel=1e-10
        )
        assert belief.variance.item() == pytest.approx(
            smooth.filtered_state_cov[0, 0, t], rel=1e-10
        )
        belief = Belief(belief.mean, discount(belief.log_precision, log_q))
        theirs.predict()


def test_property_5_a_layer_never_subtracts_the_state():
    """Its innovation is W_O μ + b_O, whatever h is."""
    layer, belief = make_layer(norm_first=False), make_belief()
    seen = layer.observe(belief, keep_weights=True)
    p = numpy_parameters(layer)
    v = belief.mean.numpy() @ p["self_attn.in_proj_weight"][16:].T
    v = v + p["self_attn.in_proj_bias"][16:]
    v = v.reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    mu = seen.weights.detach().numpy() @ v
    flat = mu.transpose(0, 2, 1, 3).reshape(2, 5, 8)
    expected = flat @ p["self_attn.out_proj.weight"].T
    expected = expected + p["self_attn.out_proj.bias"]
    np.testing.assert_allclose(seen.innovation.detach(), expected, 1e-10)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [-3.0, 1e5])
def test_property_6_a_constant_added_to_the_values_changes_no_dispersion(
    way, shift
):
    q, k, v = qkv()
    log = make_belief(2, 7, 1).log_precision.squeeze(-1)
    plain = attend(q, k, v, log, implementation=way)
    moved = attend(q, k, v + shift, log, implementation=way)
    torch.testing.assert_close(
        moved.dispersion, plain.dispersion, rtol=1e-7, atol=1e-9
    )
    torch.testing.assert_close(moved.mean, plain.mean + shift)


def test_property_6_the_centre_does_not_break_causality():
    """Bit by bit, where the mean over all tokens would."""
    q, k, v = qkv()
    log = torch.zeros(2, 7).double()
    changed = v.clone()
    changed[:, :, 4:] += 1e6
    for way in WAYS:
        a, b = (
            attend(q, k, x, log, is_causal=True, implementation=way)
            for x in (v, changed)
        )
        assert torch.equal(a.dispersion[:, :, :4], b.dispersion[:, :, :4])


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("first", [True, False])
def test_property_7_decoding_token_by_token_equals_the_full_pass(
    first, granularity
):
    model = make_encoder(
        2,
        norm_first=first,
        granularity=granularity,
        options={"rotary_base": 100.0},
    )
    belief, hidden = make_belief(), left_padding(2, 5, [5, 3])
    full, caches = model(belief, None, hidden, True), model.make_caches()
    for t in range(5):
        one = Belief(*(x[:, t : t + 1] for x in belief))
        seen = hidden[:, : t + 1]
        out = model(one, None, seen, True, caches=caches)
        torch.testing.assert_close(out.mean[:, 0], full.mean[:, t])
        torch.testing.assert_close(
            out.log_precision[:, 0], full.log_precision[:, t]
        )


def test_property_8_effective_size_from_two_log_sum_exps():
    q, k, v = qkv()
    log = make_belief(2, 7, 1).log_precision.squeeze(-1)
    scores = q @ k.mT / 2 + log[:, None, None]
    expected = (2 * scores.logsumexp(-1) - (2 * scores).logsumexp(-1)).exp()
    for way in WAYS:
        found = attend(q, k, v, log, implementation=way).n_eff
        torch.testing.assert_close(found, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    scale=st.sampled_from([0.0, 1e-8, 1.0, 50.0, 1e4]),
    tokens=st.integers(1, 12),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 50),
)
def test_property_8_effective_size_and_dispersion_stay_in_range(
    scale, tokens, way, dtype, seed
):
    q, k, v = (x.to(dtype) for x in qkv(tokens=tokens, seed=seed))
    log = torch.zeros(2, tokens, dtype=dtype)
    found = attend(scale * q, k, 100 + v, log, implementation=way)
    assert (found.n_eff >= 1).all()
    assert (found.n_eff <= tokens).all()
    assert (found.dispersion >= 0).all()
    if scale == 0:
        torch.testing.assert_close(
            found.n_eff, torch.full_like(found.n_eff, tokens)
        )


def test_property_8_dropped_weights_would_bias_the_dispersion():
    """Why dispersion and n_eff take the undropped weights."""
    q, k, v = qkv()
    log = torch.zeros(2, 7).double()
    calm = kriging_attention(q, k, v + 5, log)
    torch.manual_seed(0)
    noisy = kriging_attention(q, k, v + 5, log, dropout_p=0.5)
    torch.testing.assert_close(noisy.dispersion, calm.dispersion)
    torch.testing.assert_close(noisy.n_eff, calm.n_eff)
    thinned = torch.dropout(calm.weights, 0.5, True)
    biased = dispersion(thinned, v + 5)
    assert (biased - calm.dispersion).abs().max() > 1.0
