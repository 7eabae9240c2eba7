"""On a GPU the same: values, gradients, low dtypes, caches, the compiler.

Skipped where there is none. ``BFT_DEVICE=cpu`` runs the same tests on a CPU,
which proves that they can be run.
"""

import copy
import os

import pytest
import torch

from bft_ref import Belief, attend
from tests.factories import label, make_belief, make_encoder, make_layer

DEVICE = os.environ.get("BFT_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="no CUDA device here",
    ),
]
CONFIGS = [
    {},
    {"norm_first": False},
    {"granularity": "token"},
    {"reading": "value", "project_variance": False},
    {"activation": "swiglu", "options": {"norm": "rmsnorm"}},
    {"jacobian": "hutchinson"},
    {"implementation": "eager"},
    {"implementation": "chunked"},
    {"options": {"num_kv_heads": 1, "rotary_base": 100.0}},
]


def there(belief):
    return Belief(*(x.detach().to(DEVICE).requires_grad_() for x in belief))


def gradients(model, belief, **options):
    """Outputs, and gradients of a loss on mean and precision."""
    out = model(belief, is_causal=True, **options)
    loss = out.mean.float().square().sum() + out.log_precision.sum()
    leaves = [*belief, *model.parameters()]
    grads = torch.autograd.grad(
        loss, leaves, allow_unused=True, materialize_grads=True
    )
    return [x.cpu() for x in (*out, *grads)]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_values_and_gradients_are_those_of_the_cpu(config):
    model = make_encoder(2, **config)
    belief = make_belief()
    here = gradients(
        model, Belief(*(x.clone().requires_grad_() for x in belief))
    )
    found = gradients(copy.deepcopy(model).to(DEVICE), there(belief))
    torch.testing.assert_close(found, here, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_low_dtypes_stay_near_float64(dtype, granularity):
    exact = make_encoder(2, granularity=granularity)
    belief = make_belief()
    out = exact(belief, is_causal=True)
    low = copy.deepcopy(exact).to(DEVICE, dtype)
    found = low(belief.to(DEVICE, dtype), is_causal=True)
    assert found.log_precision.dtype == torch.float32
    limit = 0.5 if dtype == torch.bfloat16 else 1e-3
    for x, y in zip(found, out, strict=True):
        assert (x.double().cpu() - y).abs().max() < limit


def test_autocast_keeps_the_precision_wide():
    model = make_encoder(2, dtype=torch.float32).to(DEVICE)
    belief = make_belief(dtype=torch.float32).to(DEVICE)
    exact = model(belief)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = model(belief)
    assert found.log_precision.dtype == torch.float32
    apart = (found.log_precision - exact.log_precision).abs()
    assert apart.max() < 0.5


@pytest.mark.parametrize("tokens", [128, 1200])
def test_flex_is_the_reference(tokens):
    """1,200 × 1,200 pairs are where a GPU goes to FlexAttention by itself."""
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(1, 2, tokens, 32, generator=generator).to(DEVICE)
        for _ in range(3)
    ]
    log = torch.randn(1, tokens, generator=generator).to(DEVICE)
    options = {"neighbour_variance": (-log).exp(), "is_causal": True}
    ways = ["eager", "flex"] if DEVICE == "cuda" else ["eager", "chunked"]
    for x in heads:
        x.requires_grad_()
    found = [
        attend(*heads, log, implementation=way, **options) for way in ways
    ]
    for x, y in zip(found[0][:4], found[1][:4], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    grads = [
        torch.autograd.grad((x.mean.square() + x.dispersion).sum(), heads)
        for x in found
    ]
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


def test_decoding_with_a_cache_is_the_full_pass():
    model = make_encoder(2, options={"rotary_base": 50.0}).to(DEVICE)
    belief = make_belief(tokens=6).to(DEVICE)
    full = model(belief, is_causal=True)
    caches = model.make_caches()
    parts = [
        model(belief.at[:, t : t + 1], is_causal=True, caches=caches)
        for t in range(6)
    ]
    joined = Belief(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))
    torch.testing.assert_close(joined, full, rtol=1e-9, atol=1e-10)


def test_padding_hides_a_token_bit_for_bit():
    model = make_encoder(2, dtype=torch.float32).to(DEVICE)
    belief = make_belief(dtype=torch.float32).to(DEVICE)
    hidden = torch.zeros(2, 5, dtype=torch.bool, device=DEVICE)
    hidden[:, -2:] = True
    spoiled = Belief(
        belief.mean.masked_fill(hidden.unsqueeze(-1), torch.nan),
        belief.log_precision,
    )
    found, expected = (
        model(b, None, hidden).at[~hidden] for b in (spoiled, belief)
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
def test_compiled_is_eager():
    layer = make_layer(dtype=torch.float32).to(DEVICE)
    belief = make_belief(dtype=torch.float32).to(DEVICE)
    expected = layer(belief, is_causal=True)
    found = torch.compile(layer)(belief, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_training_moves_the_loss_down():
    torch.manual_seed(0)
    model = make_encoder(2, dtype=torch.float32, dropout=0.1).to(DEVICE)
    belief = make_belief(8, 6, dtype=torch.float32).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        out = model.train()(belief, is_causal=True)
        loss = (out.mean - belief.mean.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
