"""float32 and bfloat16 against float64, with bounds that are stated here.

Errors are of log λ (a relative error of λ), K, and the mean relative to its
standard deviation over the batch. The bounds are about four times what was
measured.
"""

import copy

import pytest
import torch

from bft_ref import Belief
from tests.factories import make_belief, make_encoder

CONFIGS = {
    "pre-norm, feature": {},
    "pre-norm, token": {"granularity": "token"},
    "post-norm, feature": {"norm_first": False},
    "post-norm, token": {"norm_first": False, "granularity": "token"},
    "SwiGLU, RMSNorm": {
        "activation": "swiglu",
        "options": {"norm": "rmsnorm"},
    },
    "row rule": {"variance_rule": "row"},
    "Hutchinson": {"jacobian": "hutchinson"},
}
# (mean, log λ, K)
BOUNDS = {
    "float32": (5e-6, 3e-6, 2e-6),
    "autocast": (0.1, 0.04, 0.03),
    "bfloat16": (0.12, 0.06, 0.04),
}


def models_and_beliefs(name, kind):
    sizes = {"d_model": 32, "heads": 4, "width": 64}
    exact = make_encoder(2, **sizes, **CONFIGS[name])
    with torch.no_grad():  # 0.3 per entry is too much at this width
        for p in exact.parameters():
            if p.dim() == 2:
                p *= 0.4
    belief = make_belief(4, 24, 32)
    low = copy.deepcopy(exact)
    mean, log = belief.mean, belief.log_precision.float()
    if kind == "bfloat16":
        # the same rounded parameters and states on both sides
        low, mean = low.bfloat16(), mean.bfloat16()
        exact.load_state_dict(low.state_dict())
        belief = Belief(mean.double(), log.double())
    else:
        low, mean = low.float(), mean.float()
    return exact, belief, low, Belief(mean, log)


def errors(name, kind):
    exact, belief, low, given = models_and_beliefs(name, kind)
    expected, exact_traces = exact.steps(belief, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found, traces = low.steps(given, is_causal=True)
    assert found.log_precision.dtype == torch.float32
    mean = (found.mean.double() - expected.mean).abs().max()
    log = (found.log_precision.double() - expected.log_precision).abs().max()
    k = max(
        (a.gain.double() - b.gain).abs().max()
        for a, b in zip(traces, exact_traces, strict=True)
    )
    return (mean / expected.mean.std()).item(), log.item(), k.item()


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_error_against_float64(name, kind):
    for error, bound in zip(errors(name, kind), BOUNDS[kind], strict=True):
        assert error < bound


@pytest.mark.parametrize("kind", ["float32", "autocast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_against_float64(name, kind):
    exact, belief, low, given = models_and_beliefs(name, kind)
    found = []
    for model, start in [(exact, belief), (low, given)]:
        on = kind == "autocast" and model is low
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = model(start, is_causal=True)
            loss = out.mean.square().mean() + out.log_precision.mean()
        loss.double().backward()
        found.append(
            torch.cat(
                [
                    p.grad.flatten().double()
                    for p in model.parameters()
                    if p.grad is not None
                ]
            )
        )
    cosine = torch.cosine_similarity(*found, dim=0)
    assert cosine > (0.999999 if kind == "float32" else 0.99)


@pytest.mark.parametrize("name", CONFIGS)
def test_precision_is_float32_throughout_under_autocast(name):
    """Every log precision on the way, and no rounding to bfloat16."""
    _, _, low, given = models_and_beliefs(name, "autocast")
    with torch.autocast("cpu", torch.bfloat16):
        out, traces = low.steps(given)
    for trace in traces:
        for field in trace[1:]:
            assert field.dtype == torch.float32
        observed = trace.log_observation_precision
        assert (observed.bfloat16().float() != observed).float().mean() > 0.9
    assert out.log_precision.dtype == torch.float32


def test_small_differences_of_precision_survive_autocast():
    """2⁻¹⁰ in log λ is below bfloat16's resolution at 3."""
    _, _, low, given = models_and_beliefs("pre-norm, feature", "autocast")
    layer = low.layers[0]
    log = torch.full_like(given.log_precision, 3.0)
    with torch.autocast("cpu", torch.bfloat16):
        seen = layer.observe(given._replace(log_precision=log))
        one, _ = layer.update(given._replace(log_precision=log), seen)
        two, _ = layer.update(given._replace(log_precision=log + 2**-10), seen)
    assert (two.log_precision > one.log_precision).all()


def test_weights_in_bfloat16_do_not_round_the_precision_bias():
    """log λ̄ of 300 ± 0.1: bfloat16 would see steps of 2."""
    _, _, low, given = models_and_beliefs("pre-norm, feature", "bfloat16")
    log = 300 + 0.1 * torch.arange(24.0).view(1, 24, 1).expand(4, 24, 1)
    exact = low.double()
    a = exact.layers[0].step(Belief(given.mean.double(), log.double()))[1]
    low = low.bfloat16()
    b = low.layers[0].step(Belief(given.mean, log))[1]
    torch.testing.assert_close(
        b.weights.double(), a.weights, rtol=0.1, atol=0.01
    )


@pytest.mark.parametrize("implementation", ["auto", "eager", "chunked"])
@pytest.mark.parametrize("prior_scale", ["neighbours", "unit"])
def test_a_precision_may_be_wider_than_its_mean(implementation, prior_scale):
    belief = make_belief(dtype=torch.float32)
    wider = belief._replace(log_precision=belief.log_precision.double())
    encoder = make_encoder(
        dtype=torch.float32,
        implementation=implementation,
        prior_scale=prior_scale,
    )
    out = encoder(wider)
    assert out.mean.dtype == torch.float32
    assert out.log_precision.dtype == torch.float64
    expected = encoder(belief)
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(out, expected, **close)
    if implementation != "chunked":
        torch.testing.assert_close(encoder.steps(wider)[0], out, **close)
