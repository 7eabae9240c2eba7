"""Every numbered equation of chapter 14, from a source of its own.

Joint Gaussians and statsmodels' smoother, enumeration and counting of masks,
Jacobians from automatic differentiation, plain HSTU's own branch, simulation.
"""

import itertools

import numpy as np
import pytest
import statsmodels.api as sm
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from torch import nn

from bft_ref import (
    Belief,
    BFTConfig,
    BFTLayer,
    fuse,
    local_level_filter,
    steady_state_precision,
)
from bft_ref.notebook.examples import nile
from bft_ref.recsys.data import simulate
from bft_ref.recsys.models import (
    BERT4RecConfig,
    HSTUConfig,
    HSTUFilter,
    SASRecConfig,
    build,
)
from bft_ref.recsys.train import training_batches
from tests.equations import equation

R, Q = 15098.52, 1469.18
f64 = torch.float64


def joint(z, r, q):
    """Mean and variance of every level, from all readings at once."""
    tokens = len(z)
    seen = ~z.isnan()
    step = torch.eye(tokens, dtype=f64).diff(dim=0)
    precision = torch.diag(seen.double() / r) + step.T @ step / q
    covariance = precision.inverse()
    mean = covariance @ (z.nan_to_num(0.0) * seen / r)
    return mean, covariance.diag()


@equation(
    "14.1",
    r"\lambda_{t|T} = \lambda_{t|t} + \lambda^{b}_{t}, \qquad"
    r" \lambda^{b}_{T} = 0",
)
@pytest.mark.parametrize("holes", [[], [3, 40, 41, 42]])
def test_two_filters_are_the_smoother(holes):
    z = nile().flow.clone()
    z[holes] = torch.nan
    ahead = local_level_filter(z, R, Q).filtered
    back = local_level_filter(z.flip(0), R, Q).predicted
    back = Belief(*(x.flip(0) for x in back))
    assert back.precision[-1] == 0
    precision = ahead.precision + back.precision
    mean, variance = joint(z, R, Q)
    assert_allclose(precision, 1 / variance, rtol=1e-8)
    inner = slice(0, -1)
    fused = fuse(*(Belief(*(x[inner] for x in b)) for b in (ahead, back)))
    assert_allclose(fused.mean, mean[inner], rtol=1e-8)
    assert_allclose(ahead.mean[-1], mean[-1], rtol=1e-8)
    library = sm.tsa.UnobservedComponents(
        z.numpy(), "llevel", use_exact_diffuse=True
    ).smooth([R, Q])
    assert_allclose(1 / precision, library.smoothed_state_cov[0, 0], rtol=1e-6)


@equation(
    "14.2",
    r"\lambda_{\mathrm{hole}} = 2\,\lambda_{\mathrm{next}} = 2\lambda^*",
)
@pytest.mark.parametrize(("r", "q"), [(R, Q), (2.0, 0.5), (0.3, 4.0)])
def test_a_hole_is_known_twice_as_well(r, q):
    z = torch.zeros(401, dtype=f64)
    z[[200, 400]] = torch.nan
    hole = 1 / joint(z, r, q)[1][200]
    following = 1 / joint(z[201:], r, q)[1][-1]
    fixed = steady_state_precision(
        torch.tensor(1 / r, dtype=f64), torch.tensor(q, dtype=f64)
    )
    assert_allclose(hole, 2 * following, rtol=1e-8)
    assert_allclose(following, fixed, rtol=1e-8)


@equation(
    "14.3",
    r"\Pr(\text{the last alone}) = r + (1-r)\Bigl[\rho\,(1-\rho)^{n-1} +"
    r" \frac{(1-\rho)^n}{n}\Bigr]",
)
@pytest.mark.parametrize("r", [0.0, 0.25])
def test_how_often_the_masks_ask_the_tests_question(r):
    """All patterns of masks enumerated, and the trainer's counted."""
    n, rho = 4, 0.4
    formula = r + (1 - r) * (rho * (1 - rho) ** (n - 1) + (1 - rho) ** n / n)
    every = 0.0
    for pattern in itertools.product([0, 1], repeat=n):
        p = rho ** sum(pattern) * (1 - rho) ** (n - sum(pattern))
        if sum(pattern) == 0:
            every += p / n
        elif pattern[-1] == sum(pattern) == 1:
            every += p
    assert_allclose(formula, r + (1 - r) * every, rtol=1e-12)

    sequences = simulate(500, 30, length=(n, n), seed=3).sequences
    rng = np.random.default_rng(3)
    alone = asked = 0
    for _ in range(20):
        for batch in training_batches(
            sequences,
            max_length=n,
            batch_size=100,
            rng=rng,
            mask_id=31,
            mask_rate=rho,
            last_rate=r,
        ):
            hidden = batch.target > 0
            assert hidden.any(1).all()
            assert ((batch.items == 31) == hidden).all()
            alone += int((hidden[:, -1] & (hidden.sum(1) == 1)).sum())
            asked += len(hidden)
    error = (formula * (1 - formula) / asked) ** 0.5
    assert abs(alone / asked - formula) < 4 * error


@equation(
    "14.4",
    r"\lim_{\tau_M\to0}\tilde\alpha_{tj} = \frac{\alpha_{tj}\bar\lambda_j}"
    r"{\sum_{i\notin\mathcal M}\alpha_{ti}\bar\lambda_i} \quad"
    r" (j \notin \mathcal M), \qquad"
    r" \lim_{\tau_M\to0} K_M = 1",
)
@pytest.mark.parametrize("prior", ["unit", "neighbours"])
def test_a_mask_of_no_precision_is_a_missing_reading(prior):
    torch.manual_seed(4)
    config = BFTConfig(prior_scale=prior)
    layer = BFTLayer(8, 2, 12, 0.0, dtype=f64, config=config).eval()
    h = torch.randn(2, 6, 8, dtype=f64)
    log_tau = 0.7 * torch.randn(2, 6, 1, dtype=f64).expand(h.shape).clone()
    mask = [1, 3]
    others = [0, 2, 4, 5]
    log_tau[:, mask] = -60.0
    belief = Belief(h, log_tau)
    seen = layer.observe(belief, keep_weights=True)
    _, K = layer.update(belief, seen)
    w, b = layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias
    q, k, _ = F.linear(h, w, b).unflatten(-1, (3, 2, 4)).unbind(2)
    alpha = torch.einsum("bthd,bshd->bhts", q, k).div(2.0).softmax(-1)
    heard = alpha * log_tau[..., 0].exp()[:, None, None]
    expected = heard[..., others] / heard[..., others].sum(-1, keepdim=True)
    torch.testing.assert_close(seen.weights[..., others], expected)
    assert seen.weights[..., mask].max() < 1e-20
    assert (1 - K[:, mask]).max() < 1e-12
    assert (1 - K[:, others]).max() > 0.01


@equation(
    "14.5",
    r"\lim_{Q\to\infty} \frac{1}{Q\,\lambda''_i} = \frac{\gamma_i^2}"
    r"{\varsigma^2}\Bigl(1 - \frac{1+z_i^2}{d}\Bigr)",
)
def test_post_norm_keeps_ratios_of_precision():
    """A layer with a huge Q, and the rows of the norm's exact Jacobian."""
    torch.manual_seed(5)
    d, noise = 10, 1e12
    layer = BFTLayer(
        d,
        2,
        14,
        0.0,
        "gelu",
        dtype=f64,
        layer_norm_eps=1e-14,
        config=BFTConfig(process_noise=noise),
    ).eval()
    with torch.no_grad():
        layer.norm2.weight.uniform_(0.4, 1.8)
    belief = Belief(
        torch.randn(2, 5, d, dtype=f64), torch.randn(2, 5, d, dtype=f64)
    )
    after, _ = layer.predict(belief)
    ffn = layer.linear2(F.gelu(layer.linear1(belief.mean)))
    h = belief.mean + ffn
    centred = h - h.mean(-1, keepdim=True)
    scale = centred.square().mean(-1, keepdim=True).sqrt()
    z, gamma = centred / scale, layer.norm2.weight
    expected = (gamma / scale).square() * (1 - (1 + z.square()) / d)
    torch.testing.assert_close(1 / (noise * after.precision), expected)
    rows = torch.stack(
        [
            torch.func.jacrev(layer.norm2)(token).square().sum(-1)
            for token in h.flatten(0, 1)
        ]
    )
    torch.testing.assert_close(rows, expected.flatten(0, 1))


def fresh_loss_of_gain(d, heads, N, t, seed, bft, shrink):
    """1 − K of a new layer, or a new plain layer's own e²; σ shrunk."""
    torch.manual_seed(seed)
    model = build(
        HSTUConfig(
            n_items=500,
            d_model=d,
            nhead=heads,
            max_length=N,
            num_layers=1,
            dropout=0.0,
            bft=bft,
            tau_start=1.0 if bft is None else 0.5,
        )
    )
    model = model.double().eval()
    items = torch.randint(1, 501, (16, t))
    with torch.no_grad():
        model.layers[0].uvqk.weight.mul_(shrink)
        model.distance.copy_(0.02 * shrink * model.distance.sign())
        if bft is None:
            e = model(items) - model.embed(items) - model.layers[0].out.bias
            return e[:, -1].square().mean().item()
        gain = model.steps(items)[1][0].gain
        return (1 - gain[:, -1]).mean().item()


def fresh_formula(d, heads, N, t, sigma):
    s = d * sigma**2 / 4
    A = s * t * (d // heads * s**2 + sigma**2) / (4 * N**2)
    return s * A / (A + 1e-6)


FRESH = [(64, 2, 20, 20), (64, 2, 200, 60), (128, 4, 50, 50), (256, 4, 20, 20)]


# An embedded item has variance two, so that τ = 1/2 is its precision and
# the sandwich's prior is right.
@equation(
    "14.6",
    r"1-K \approx \tau s\,\frac{A}{A+\epsilon}, \qquad"
    r" s = \frac{d\sigma^2}{4}, \qquad"
    r" A = \frac{s\,t\,(d_hs^2+\sigma_r^2)}{4N^2}",
)
@pytest.mark.parametrize("shape", FRESH, ids=str)
def test_the_gain_of_a_fresh_hstu(shape):
    """The package's filter, and plain HSTU's own branch less its bias."""
    formula = fresh_formula(*shape, 0.005)

    def measured(bft):
        drawn = [fresh_loss_of_gain(*shape, i, bft, 0.25) for i in range(32)]
        drawn = np.array(drawn) / formula
        return drawn.mean(), drawn.std() / len(drawn) ** 0.5

    claimed, error = measured(HSTUFilter())
    assert error < 0.015
    assert abs(claimed - 0.5) < 4 * error
    branch, error = measured(None)
    d, _, _, t = shape
    # keys and values of one token go together: up to 1 + t/d times more
    assert error < 0.05 * (1 + t / d)
    assert 1 - 4 * error < branch < 1 + t / d + 4 * error


@pytest.mark.parametrize("shape", FRESH, ids=str)
def test_the_gain_at_hstus_published_start(shape):
    """Left out: about a factor 1 + 3dσ²/4 for each of U, V, Q and K."""
    formula = 0.5 * fresh_formula(*shape, 0.02)
    bft = HSTUFilter()
    drawn = [fresh_loss_of_gain(*shape, i, bft, 1.0) for i in range(32)]
    assert 0.88 < np.mean(drawn) / formula < 1.12


@equation(
    "14.7",
    r"\frac{\partial\,\mathrm{scores}}{\partial \log Q_L} = 0",
)
@pytest.mark.parametrize(
    "kind, bft",
    [
        (SASRecConfig, BFTConfig(process_noise=0.4)),
        (BERT4RecConfig, BFTConfig(process_noise=0.4)),
        (HSTUConfig, HSTUFilter(process_noise=0.4)),
    ],
)
def test_the_last_process_noise_does_nothing(kind, bft):
    torch.manual_seed(7)
    model = build(
        kind(
            n_items=20,
            d_model=16,
            max_length=8,
            num_layers=3,
            dropout=0.0,
            bft=bft,
            tau_start=0.5,
        )
    ).double()
    with torch.no_grad():  # a visible branch
        for key, p in model.named_parameters():
            if "uvqk.weight" in key:
                p.mul_(20)
    items = torch.tensor([[3, 7, 1, 12], [5, 2, 9, 4]])
    asked, _ = model.evaluation_inputs(items)
    hidden = model(asked)[:, (asked > 0).sum(1)[0] - 1]
    keys, bias = model.item_embeddings()
    F.linear(model.query(hidden), keys, bias).square().sum().backward()
    noises = [
        p for key, p in model.named_parameters() if "log_process_noise" in key
    ]
    *earlier, last = noises
    assert len(noises) == 3
    assert last.grad is None or (last.grad == 0).all()
    assert all(p.grad.abs().max() > 1e-9 for p in earlier)
    with torch.no_grad():
        before = model(asked)
        last += 3.0
        assert torch.equal(model(asked), before)
        earlier[0] += 3.0
        assert not torch.equal(model(asked), before)


@equation(
    "14.8",
    r"\mathrm{E}\,\mathrm{loss}_0 \approx \log N_v +"
    r" \frac{1}{2\vartheta^2 d}",
)
@pytest.mark.parametrize(
    ("d", "theta", "items"), [(64, 0.1, 4000), (256, 0.05, 4000)]
)
def test_the_first_loss_of_a_cosine_head(d, theta, items):
    """Simulated directions, and a fresh model's own loss.

    Each query is asked for every item once; the cosine's fourth cumulant,
    −6/d²(d + 2), is what the formula leaves out.
    """
    torch.manual_seed(8)
    directions = F.normalize(torch.randn(items, d, dtype=f64), dim=-1)
    query = F.normalize(torch.randn(500, d, dtype=f64), dim=-1)
    cosine = query @ directions.T
    assert abs(cosine.var() * d - 1) < 0.02
    formula = np.log(items) + 1 / (2 * theta**2 * d)
    fourth = -1 / (4 * theta**4 * d**2 * (d + 2))
    every = torch.full_like(cosine, 1 / items)
    loss = F.cross_entropy(cosine / theta, every, reduction="none")
    error = loss.std().item() / 500**0.5
    assert error < 2e-3
    assert abs(loss.mean().item() - formula - fourth) < 4 * error

    model = build(
        HSTUConfig(
            n_items=items,
            d_model=d,
            nhead=2,
            max_length=6,
            temperature=theta,
            dropout=0.0,
        )
    ).eval()
    with torch.no_grad():
        history = torch.randint(1, items + 1, (500, 6))
        scores = model.scores(history)[:, 1:].double()
        # the last item's own vector is still in the state
        own = scores.gather(1, history[:, -1:] - 1).mean().item()
        assert abs(own * theta - 0.5**0.5) < 0.05
    # the items of the history are no random directions
    free = torch.ones_like(scores).scatter(1, history - 1, 0.0).bool()
    loss = [
        F.cross_entropy(row, torch.full_like(row, 1 / len(row))).item()
        for row in map(torch.masked_select, scores, free)
    ]
    # its one place and its tied items are shared by all queries
    assert abs(np.mean(loss) - formula) < 0.04


def test_cosines_bound_the_loss():
    """No queries and items on a sphere come below the floor."""
    torch.manual_seed(9)
    items, theta = 12, 1.0
    floor = np.log1p((items - 1) * np.exp(-2 / theta))
    free = nn.Parameter(torch.randn(items, 16, dtype=f64))
    query = nn.Parameter(torch.randn(items, 16, dtype=f64))
    optimizer = torch.optim.Adam([free, query], lr=0.05)
    for _ in range(300):
        cosine = F.normalize(query, dim=-1) @ F.normalize(free, dim=-1).T
        loss = F.cross_entropy(cosine / theta, torch.arange(items))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert floor < loss.item() < floor + 0.7
    best = -torch.ones(1, items, dtype=f64)
    best[0, 0] = 1.0
    assert_allclose(
        F.cross_entropy(best / theta, torch.zeros(1, dtype=torch.long)), floor
    )
