"""Every numbered equation of chapter 16, from a source of its own.

Automatic differentiation of transformers' own Llama, prefixes and shifted
positions, enumeration over labels, and the patched model itself.
"""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from bft_ref.belief import Belief
from bft_ref.llm import calibrate, patch, trace
from bft_ref.llm.widened import columns, numbers
from bft_ref.notebook.examples import plays
from tests.equations import equation

F64 = torch.float64
CONFIG = LlamaConfig(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="sdpa",
)


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama with weights large enough to matter."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.6 if "norm" in name else 4.0)
    return model


def ids(seed: int = 1, rows: int = 4, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(29, (rows, length), generator=generator)


@equation(
    "16.1",
    r"A_{ii} = \bigl[(\varphi'(g)\circ u)\,(W_g\circ W_d^\top)"
    r" + \varphi(g)\,(W_u\circ W_d^\top)\bigr]_i",
)
@pytest.mark.parametrize("seed", range(3))
def test_the_gated_networks_diagonal(seed):
    """The Jacobian of transformers' own network."""
    torch.manual_seed(seed)
    mlp = LlamaMLP(CONFIG).double()
    x = 2.5 * torch.randn(24, dtype=F64)
    dense = torch.func.jacrev(mlp)(x).diagonal()
    w_g, w_u, w_d = (
        part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    g, u = (x @ w.T for w in (w_g, w_u))
    (slope,) = torch.autograd.grad(F.silu(g).sum(), g, retain_graph=True)
    ours = (slope * u) @ (w_g * w_d.T) + F.silu(g) @ (w_u * w_d.T)
    torch.testing.assert_close(ours, dense)


@equation(
    "16.2",
    r"J_i = \frac1r\Bigl(\gamma_iA_{ii} - \frac{z_i}d"
    r"\sum_k A_{ik}\gamma_kz_k\Bigr)",
)
@pytest.mark.parametrize("outlier", [1.0, 60.0])
def test_the_jacobian_behind_a_norm_without_a_mean(outlier):
    """Both modules of transformers, composed; also with an outlier."""
    torch.manual_seed(2)
    mlp, norm = LlamaMLP(CONFIG).double(), LlamaRMSNorm(24).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    # its forward computes in float32, too coarse for a reference
    h = torch.randn(24, dtype=F64)
    h[3] *= outlier
    gamma, eps = norm.weight.detach(), norm.variance_epsilon

    def normed(h):
        return gamma * h / (h.square().mean() + eps).sqrt()

    torch.testing.assert_close(normed(h).float(), norm(h).float())
    dense = torch.func.jacrev(lambda h: mlp(normed(h)))(h).diagonal()
    r = (h.square().mean() + eps).sqrt()
    z, A = h / r, torch.func.jacrev(mlp)(normed(h))
    ours = (gamma * A.diagonal() - z / 24 * (A * gamma * z).sum(-1)) / r
    torch.testing.assert_close(ours, dense)
    first = gamma * A.diagonal() / r
    assert (first - dense).abs().max() > 1e-3 * dense.abs().max()


@equation(
    "16.3",
    r"s_{tj} = \frac{(R_tq_t)\cdot(R_jk_j)}{\sqrt{d_h}} + \log\bar\lambda_j"
    r" = \frac{q_t\cdot(R_{j-t}\,k_j)}{\sqrt{d_h}} + \log\bar\lambda_j",
)
def test_only_distances_are_left_of_turning():
    """transformers' own turn; and the whole filter at shifted positions."""
    q, k = torch.randn(2, 1, 1, 9, 8, dtype=F64)
    log = torch.randn(9, dtype=F64)
    rates = 10000.0 ** -(torch.arange(4, dtype=F64) / 4)

    def turned(x, position):
        angle = (position[:, None] * rates).repeat(1, 2)[None]
        return apply_rotary_pos_emb(x, x, angle.cos(), angle.sin())[0]

    place = torch.arange(9, dtype=F64)
    both = turned(q, place) @ turned(k, place).mT / 8**0.5 + log
    for t in range(9):
        apart = q[0, 0, t] @ turned(k, place - t)[0, 0].mT / 8**0.5 + log
        torch.testing.assert_close(both[0, 0, t], apart)
    model = patch(llama())
    x = ids()
    positions = torch.arange(12)[None]
    seen = []
    for shift in (0, 31):
        with torch.no_grad(), trace(model) as traces:
            model(x, position_ids=positions + shift)
        seen.append(traces)
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one.gain, other.gain, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.n_eff, other.n_eff, atol=1e-2, rtol=0)


@equation(
    "16.4",
    r"\bar\lambda_j^{(\ell)}(x_1,\dots,x_t) ="
    r" \bar\lambda_j^{(\ell)}(x_1,\dots,x_j) \qquad (j\le t)",
)
def test_later_tokens_change_no_precision():
    """Prefixes; and decoding with a cache is the full pass."""
    model, x = patch(llama()), ids()
    with torch.no_grad(), trace(model) as whole:
        full = model(x).logits
    for t in (1, 5, 11):
        with torch.no_grad(), trace(model) as first:
            model(x[:, :t])
        for a, b in zip(first, whole, strict=True):
            torch.testing.assert_close(
                a.log_predicted_precision, b.log_predicted_precision[:, :t]
            )
    with torch.no_grad():
        asked = inspect.signature(LlamaForCausalLM.forward).parameters
        kept = "cache" if "cache" in asked else "past_key_values"
        given = {kept: DynamicCache(config=model.config)}
        model(x[:, :7], use_cache=True, **given)
        after = model(x[:, 7:], use_cache=True, **given)
    torch.testing.assert_close(after.logits, full[:, 7:], atol=1e-4, rtol=1e-4)


def test_two_halves_hold_a_precision():
    x = torch.linspace(-12, 12, 4001)[:, None]
    kept = numbers(columns(x, torch.bfloat16))
    assert (kept - x).abs().max() < 1e-4
    assert (x.bfloat16().float() - x).abs().max() > 0.02


@equation(
    "16.5",
    r"h' = h + \bigl(1-\delta\,(1-K)\bigr)\circ e ="
    r" (1-\delta)\,(h+e) + \delta\,(h+K\circ e)",
)
def test_the_dial_is_a_straight_line():
    """In one layer; and the whole model at zero is transformers' own."""
    plain, x = llama(), ids()
    with torch.no_grad():
        torch.testing.assert_close(
            patch(plain, dial=0.0)(x).logits, plain(x).logits
        )
    updated = {}
    for dial in (0.0, 0.3, 1.0):
        layer = patch(plain, dial=dial).filters()[0]
        h = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
        belief = Belief(h, torch.full((2, 5, 1), 0.7))
        place = torch.arange(5)[None]
        where = plain.model.rotary_emb(h, place)
        with torch.no_grad():
            observation = layer.observe(belief, where)
            after, k = layer.update(belief, observation)
        e = observation.innovation
        expected = h + (1 - dial * (1 - k)) * e
        torch.testing.assert_close(after.mean, expected)
        updated[dial] = after.mean
    between = 0.7 * updated[0.0] + 0.3 * updated[1.0]
    torch.testing.assert_close(updated[0.3], between)


@equation(
    "16.6",
    r"Q_\ell = \frac{K}{1-K}\,"
    r"\frac1{\operatorname{med}\lambda^{\mathrm{obs}}_{\ell+1}} -"
    r" \operatorname{med}\frac{(1+J_\ell)^2}{\lambda'_\ell}",
)
@pytest.mark.parametrize("k", [0.2, 0.55, 0.8])
def test_the_process_noise_that_makes_a_gain(k):
    """The gain of one update, exactly; and the medians of a model."""
    rng = np.random.default_rng(4)
    for carried, observed in rng.lognormal(sigma=0.4, size=(20, 2)):
        q = k / (1 - k) / observed - carried
        if q > 0:
            lam = 1 / (carried + q)
            assert_allclose(observed / (lam + observed), k)
    model, x = patch(llama()), ids(rows=8)
    reached = calibrate(model, x, gain=k)
    with torch.no_grad(), trace(model) as traces:
        model(x)
    medians = [each.gain.median().item() for each in traces]
    assert_allclose(medians, reached, atol=2e-3)
    # above what was asked only where carried variance alone is too much
    noise = [each.process_noise().exp().item() for each in model.filters()]
    for layer, median in enumerate(medians[1:]):
        one, following = traces[layer], traces[layer + 1]
        carried = one.log_growth - one.log_updated_precision
        wanted = k / (1 - k)
        wanted /= following.log_observation_precision.exp().median().item()
        due = wanted - carried.exp().median().item()
        if abs(median - k) < 5e-3:
            assert_allclose(noise[layer], due, rtol=0.3)
        else:
            assert median > k


@equation(
    "16.7",
    r"h + K\circ\bigl(K^{-1}W_O\,\mu\bigr) = h + W_O\,\mu, \qquad"
    r" \lambda^{\mathrm{obs}} \to K^2\,\lambda^{\mathrm{obs}}",
)
def test_dividing_the_output_matrix():
    """One layer's observation before and after the division."""
    k = 0.6
    plain = llama()
    layer = patch(plain).filters()[0]
    h = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(5))
    belief = Belief(h, torch.zeros(2, 5, 1))
    where = plain.model.rotary_emb(h, torch.arange(5)[None])
    with torch.no_grad():
        before = layer.observe(belief, where)
        o_proj = layer.self_attn.o_proj
        o_proj.weight = nn.Parameter(o_proj.weight / k)
        after = layer.observe(belief, where)
    torch.testing.assert_close(h + k * after.innovation, h + before.innovation)
    torch.testing.assert_close(
        after.log_precision, before.log_precision + 2 * math.log(k)
    )


def test_a_rescaled_start_is_nearer_to_the_plain_model():
    x, plain = ids(rows=8), llama()
    off = []
    for rescale in (False, True):
        model = patch(plain)
        calibrate(model, x, gain=0.8, rescale=rescale)
        with torch.no_grad():
            off.append((model(x).logits - plain(x).logits).abs().mean())
    assert off[1] < off[0] / 2


@equation(
    "16.8",
    r"w = \frac{(1-2\varepsilon)\,p_y}{\varepsilon + (1-2\varepsilon)\,p_y}",
)
@pytest.mark.parametrize("flip", [0.0, 0.1, 0.4, 0.5])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_weight_of_a_label(flip, sign):
    """Autograd of the two log likelihoods, as a mixture over the truth."""
    z = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    label = torch.sigmoid(sign * z)
    other = torch.sigmoid(-sign * z)
    mixture = (1 - flip) * label + flip * other
    (noisy,) = torch.autograd.grad(mixture.log().sum(), z)
    plain_log = torch.nn.functional.logsigmoid(sign * z)
    (plain,) = torch.autograd.grad(plain_log.sum(), z)
    p = label.detach()
    w = (1 - 2 * flip) * p / (flip + (1 - 2 * flip) * p)
    torch.testing.assert_close(w * plain, noisy, rtol=1e-9, atol=1e-12)


@equation(
    "16.9",
    r"\mathrm{E}_{\tilde y}\bigl[-\log q_{\tilde y}\bigr] ="
    r" (1-\varepsilon)\,(-\log q_y) +"
    r" \frac\varepsilon V\sum_{k=1}^V(-\log q_k)",
)
@pytest.mark.parametrize("V", [2, 7])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.8])
def test_even_noise_is_label_smoothing(V, p):
    """Each label that may come, by its probability; PyTorch's smoothing."""
    torch.manual_seed(V)
    logits = torch.randn(1, V, dtype=F64)
    for y in range(V):
        expected = 0.0
        for label in range(V):
            chance = 1 - p if label == y else p / (V - 1)
            one = F.cross_entropy(logits, torch.tensor([label]))
            expected += chance * one.item()
        epsilon = p * V / (V - 1)
        log = logits.log_softmax(-1)[0]
        ours = -(1 - epsilon) * log[y] - epsilon / V * log.sum()
        assert_allclose(ours, expected, rtol=1e-12)
        if epsilon <= 1:
            smoothed = F.cross_entropy(
                logits, torch.tensor([y]), label_smoothing=epsilon
            )
            assert_allclose(smoothed, expected, rtol=1e-12)


@equation(
    "16.10",
    r"\Pr(\lambda_{\text{wrong}} < \lambda_{\text{right}}) +"
    r" \tfrac12\Pr(\lambda_{\text{wrong}} = \lambda_{\text{right}})"
    r" = \tfrac12",
)
def test_a_precision_ranks_wrong_labels_by_chance():
    """All patterns of noise over four tokens, one of them tied."""
    score, p = np.array([0.3, 1.7, 1.7, 4.0]), 0.3
    in_order = tied = pairs = 0.0
    for pattern in itertools.product([False, True], repeat=4):
        wrong = np.array(pattern)
        chance = p ** wrong.sum() * (1 - p) ** (~wrong).sum()
        a, b = score[wrong][:, None], score[~wrong][None]
        in_order += chance * (a < b).sum()
        tied += chance * (a == b).sum()
        pairs += chance * (a < b).size
    assert_allclose((in_order + tied / 2) / pairs, 0.5, rtol=1e-12)
    # a filter's own precision, one long draw, against Mann and Whitney
    model, x = patch(llama()), ids(rows=60)
    with torch.no_grad(), trace(model) as traces:
        model(x)
    lam = traces[-1].log_predicted_precision.flatten().numpy()
    hit = np.random.default_rng(6).random(lam.size) < p
    test = stats.mannwhitneyu(lam[hit], lam[~hit])
    assert test.pvalue > 1e-3


@equation(
    "16.11",
    r"\frac{\partial L}{\partial e_t} ="
    r" K_t\circ\frac{\partial L}{\partial h'_t}",
)
def test_a_gain_is_a_smaller_step():
    """Autograd, with gains that differ between tokens and are held."""
    torch.manual_seed(7)
    h, k = torch.randn(5, 6, dtype=F64), torch.rand(5, 1, dtype=F64)
    e = torch.randn(5, 6, dtype=F64, requires_grad=True)
    updated = h + k * e
    loss = F.cross_entropy(updated.tanh(), torch.arange(5), reduction="sum")
    at_e, at_h = torch.autograd.grad(loss, [e, updated])
    torch.testing.assert_close(at_e, k * at_h)


def test_the_plays_are_text_alone():
    dream, wives = plays()
    assert dream.startswith("THESEUS:\nNow, fair Hippolyta,")
    assert wives.startswith("SHALLOW:\nSir Hugh, persuade me not")
    assert (len(dream), len(wives)) == (90_555, 123_310)
    assert not set("#_*[]=") & set(dream + wives)
