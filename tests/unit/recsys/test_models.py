"""The recommenders against independent formulations, and the switch."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bft_ref import reml
from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.recsys.models import (
    CONFIGS,
    GATES,
    Gate,
    HSTUFilter,
    SASRecConfig,
    build,
)
from bft_ref.recsys.models.base import as_batch
from bft_ref.recsys.models.hstu import HSTULayer
from bft_ref.recsys.models.sasrec import Block
from tests.factories import ENDS, randomise
from tests.unit.recsys.configs import make_config

SMALL = {
    "n_items": 30,
    "d_model": 16,
    "dim_feedforward": 24,
    "nhead": 2,
    "max_length": 8,
}
MODELS = ("sasrec", "bert4rec", "hstu")
FILTER = BFTConfig(project_variance=False)


def small(model="sasrec", *, dropout=0.0, seed=0, frequency=None, **given):
    torch.manual_seed(seed)
    config = make_config(model=model, dropout=dropout, **(SMALL | given))
    found = build(config, frequency)
    with torch.no_grad():  # so that no bias or norm is trivial
        for name, p in found.named_parameters():
            if "log_process_noise" not in name and p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return found.eval()


def ids(*rows):
    return as_batch([np.array(row) for row in rows], 8)


ITEMS = ids([3, 7, 7, 1], [5, 2, 9, 30, 4, 8, 6], [11])


def to_torch(block: Block, norm_first: bool) -> nn.TransformerEncoderLayer:
    c = block.config
    layer = nn.TransformerEncoderLayer(
        c.d_model,
        c.nhead,
        c.dim_feedforward,
        c.dropout,
        c.activation,
        batch_first=True,
        norm_first=norm_first,
    )
    names = {
        "in_proj.": "self_attn.in_proj_",
        "out_proj.": "self_attn.out_proj.",
    }
    state = {}
    for name, x in block.state_dict().items():
        for mine, theirs in names.items():
            if name.startswith(mine):
                name = name.replace(mine, theirs, 1)
        state[name] = x
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_plain_sasrec_is_torchs_pre_norm_encoder(activation):
    model = small(activation=activation, num_layers=3)
    x = model.embed(ITEMS)
    tokens = ITEMS.shape[1]
    mask = nn.Transformer.generate_square_subsequent_mask(tokens)
    h = x
    for block in model.encoder.layers:
        h = to_torch(block, True).eval()(h, src_mask=mask)
    torch.testing.assert_close(model(ITEMS), model.final(h))


def test_plain_bert4rec_is_torchs_post_norm_encoder():
    model = small("bert4rec")
    h = model.first(model.embed(ITEMS))
    for block in model.encoder.layers:
        layer = to_torch(block, False).eval()
        h = layer(h, src_key_padding_mask=ITEMS == 0)
    # the fast path of nn.TransformerEncoderLayer zeroes padded positions
    inside = ITEMS > 0
    torch.testing.assert_close(model(ITEMS)[inside], h[inside])


def test_the_original_residual_is_a_loop_over_its_definition():
    model = small(residual="original", num_layers=1)
    block, c = model.encoder.layers[0], model.config
    h = model.embed(ITEMS)
    w_q, w_k, w_v = block.in_proj.weight.chunk(3)
    b_q, b_k, b_v = block.in_proj.bias.chunk(3)
    x = block.norm1(h)
    q, k, v = x @ w_q.T + b_q, h @ w_k.T + b_k, h @ w_v.T + b_v
    size = c.d_model // c.nhead
    out = torch.zeros_like(h)
    for b in range(len(h)):
        for head in range(c.nhead):
            s = slice(head * size, (head + 1) * size)
            for t in range(h.shape[1]):
                logits = k[b, : t + 1, s] @ q[b, t, s] / math.sqrt(size)
                out[b, t, s] = logits.softmax(0) @ v[b, : t + 1, s]
    after = x + block.out_proj(out)
    y = block.norm2(after)
    expected = y + block.linear2(F.gelu(block.linear1(y)))
    torch.testing.assert_close(model(ITEMS), model.final(expected))


@pytest.mark.parametrize("timed", [False, True])
def test_plain_hstu_is_a_loop_over_its_definition(timed):
    model = small("hstu", num_layers=1)
    c = model.config
    times = None
    if timed:
        rng = np.random.default_rng(0)
        gaps = rng.uniform(0, 1e6, ITEMS.shape)
        times = torch.from_numpy(np.cumsum(gaps, 1)).float()
    layer, size = model.layers[0], c.d_model // c.nhead
    h = model.embed(ITEMS)
    expected = torch.zeros_like(h)
    ends = (ITEMS > 0).sum(1) - 1
    for b in range(len(h)):
        x = (h[b] - h[b].mean(-1, keepdim=True)) / torch.sqrt(
            h[b].var(-1, correction=0, keepdim=True) + 1e-6
        )
        u, v, q, k = F.silu(layer.uvqk(x)).chunk(4, -1)
        for t in range(h.shape[1]):
            o = torch.zeros(c.d_model)
            for head in range(c.nhead):
                s = slice(head * size, (head + 1) * size)
                for j in range(t + 1):
                    r = model.distance[t - j]
                    if timed:
                        now = t if t >= ends[b] else t + 1
                        gap = max(1.0, float(times[b, now] - times[b, j]))
                        bucket = min(128, int(math.log(gap) / 0.301))
                        r = r + model.bucket[bucket]
                    o[s] += (
                        F.silu(q[t, s] @ k[j, s] + r) / c.max_length * v[j, s]
                    )
            o = F.layer_norm(o, (c.d_model,), eps=1e-6)
            expected[b, t] = h[b, t] + layer.out(u[t] * o)
    inside = ITEMS > 0
    found = model(ITEMS, times)
    torch.testing.assert_close(found[inside], expected[inside])


@pytest.mark.parametrize("size,log", ENDS)
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_hstu_at_the_ends_of_float32(granularity, size, log):
    torch.manual_seed(0)
    bft = BFTConfig(granularity=granularity)
    layer = HSTULayer(make_config(**SMALL | {"model": "hstu", "bft": bft}))
    features = layer.config.d_model if granularity == "feature" else 1
    for weight in [0.02, 1e-15, 0.4]:
        with torch.no_grad():
            layer.uvqk.weight.copy_(weight * torch.randn(64, 16))
        h = size * torch.randn(2, 4, 16)
        leaves = [h, log + 2 * torch.randn(2, 4, features)]
        leaves = [x.requires_grad_() for x in leaves]
        out, trace = layer.step(Belief(*leaves), torch.randn(1, 1, 4, 4))
        assert out.mean.isfinite().all()
        assert out.log_precision.isfinite().all()
        assert ((trace.gain >= 0) & (trace.gain <= 1)).all()
        loss = out.mean.square().mean() + out.log_precision.mean()
        loss.backward()
        for x in [*leaves, *layer.parameters()]:
            assert x.grad.isfinite().all()


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("prior_scale", ["neighbours", "unit"])
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_hstu_variance_is_the_loop_over_weights(
    granularity, prior_scale, project
):
    torch.manual_seed(0)
    bft = BFTConfig(
        prior_dof=2.5,
        granularity=granularity,
        prior_scale=prior_scale,
        project_variance=project,
    )
    config = make_config(model="hstu", dropout=0.0, bft=bft, **SMALL)
    layer = HSTULayer(config)
    nn.init.normal_(layer.uvqk.weight, std=0.4)
    tokens, d = 5, config.d_model
    features = d if granularity == "feature" else 1
    belief = Belief(
        2.5 * torch.randn(1, tokens, d), torch.randn(1, tokens, features)
    )
    relative = torch.randn(1, 1, tokens, tokens)
    _, trace = layer.step(belief, relative)
    h, precision = belief.mean[0], belief.precision[0]
    spread = h.std(-1, correction=0)
    x = F.layer_norm(h, (d,), eps=1e-6)
    inner = layer.uvqk(x)
    u, v, q, k = F.silu(inner).chunk(4, -1)
    before = inner[:, d : 2 * d]
    slope = torch.sigmoid(before) * (1 + before * (1 - torch.sigmoid(before)))
    w_v = layer.uvqk.weight[d : 2 * d]
    t, size = 3, d // config.nhead
    o, var_o = torch.zeros(d), torch.zeros(d)
    mean_precision = precision[: t + 1].mean()
    for i in range(d):
        s = slice(i // size * size, i // size * size + size)
        a = torch.stack(
            [
                F.silu(q[t, s] @ k[j, s] + relative[0, 0, t, j])
                / config.max_length
                * precision[j].mean()
                / mean_precision
                for j in range(t + 1)
            ]
        )
        squares = a**2 / (a**2).sum()
        own = torch.stack(
            [slope[j, i] ** 2 * (w_v[i] ** 2).sum() for j in range(t + 1)]
        )
        if prior_scale == "neighbours":
            for j in range(t + 1):
                own[j] *= (1 / precision[j]).mean() / spread[j] ** 2
        values = v[: t + 1, i]
        dispersion = squares @ values**2 - (squares @ values) ** 2
        n = (a**2).sum() ** 2 / (a**4).sum()
        torch.testing.assert_close(trace.n_eff[0, i // size, t], n)
        s2 = (2.5 * squares @ own + n * dispersion) / (2.5 + n - 1)
        o[i], var_o[i] = a @ values, s2 * (a**2).sum()
    jacobian = torch.autograd.functional.jacobian(
        lambda y: F.layer_norm(y, (d,), eps=1e-6), o
    )
    expected = (jacobian**2) @ var_o * u[t] ** 2
    if project:
        expected = layer.out.weight**2 @ expected
    if granularity == "token":
        expected = expected.sum(0, keepdim=True) / d
    found = (-trace.log_observation_precision[0, t]).exp()
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)


def test_precision_of_hstu_returns_to_the_stationary_variance():
    torch.manual_seed(0)
    bft = HSTUFilter(
        process_noise=0.4,
        dynamics="ornstein_uhlenbeck",
        stationary_variance=2.5,
    )
    layer = HSTULayer(make_config("hstu", dropout=0.0, bft=bft, **SMALL))
    belief = Belief(torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    out, trace = layer.step(belief, torch.randn(1, 1, 5, 5))
    kept = 2.5 / (2.5 + 0.4)
    before = (-trace.log_updated_precision).exp()
    expected = kept * before + (1 - kept) * 2.5
    torch.testing.assert_close(out.variance, expected)


def test_hstu_subtracts_the_state_from_what_it_observed():
    torch.manual_seed(0)
    found = []
    belief = Belief(torch.randn(1, 5, 16), torch.randn(1, 5, 16))
    relative = torch.randn(1, 1, 5, 5)
    for innovation in ("increment", "difference"):
        bft = HSTUFilter(innovation=innovation)
        layer = HSTULayer(make_config("hstu", dropout=0.0, bft=bft, **SMALL))
        found.append((layer, *layer.step(belief, relative)))
    (one, before, increment), (other, _, _) = found
    other.load_state_dict(one.state_dict())
    after, trace = other.step(belief, relative)
    z, k = increment.observation.innovation, increment.gain
    torch.testing.assert_close(trace.observation.innovation, z - belief.mean)
    torch.testing.assert_close(after.mean, (1 - k) * belief.mean + k * z)
    assert torch.equal(after.log_precision, before.log_precision)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_the_switch_makes_every_layer_a_filter(model, granularity):
    config = BFTConfig(granularity=granularity)
    plain, filtered = small(model), small(model, bft=config)
    names = [n for n, _ in filtered.named_parameters()]
    assert sum("log_process_noise" in n for n in names) == 2
    assert not any(
        "log_process_noise" in n for n, _ in plain.named_parameters()
    )
    features = 16 if granularity == "feature" else 1
    extra = sum(p.numel() for p in filtered.parameters()) - sum(
        p.numel() for p in plain.parameters()
    )
    assert extra == 2 * features + filtered.items.num_embeddings
    hidden, traces = filtered.steps(ITEMS)
    torch.testing.assert_close(hidden, filtered(ITEMS))
    assert len(traces) == 2
    for trace in traces:
        gain = trace.gain[ITEMS > 0]
        assert ((gain > 0) & (gain < 1)).all()
        assert gain.shape[-1] == features


# A post-norm layer hands on precisions that differ between tokens, whatever
# Q, so that only its first layer has equal weights.
@pytest.mark.parametrize("model, layers", [("sasrec", 2), ("bert4rec", 1)])
def test_a_filter_with_a_vague_prior_is_the_plain_model(model, layers):
    bft = BFTConfig(prior_scale="unit", process_noise=1e8)
    plain = small(model, seed=1, num_layers=layers)
    filtered = small(
        model, seed=1, num_layers=layers, bft=bft, tau="unit", tau_start=1e-8
    )
    state = {
        name.replace("self_attn.in_proj_", "in_proj.").replace(
            "self_attn.", ""
        ): x
        for name, x in filtered.state_dict().items()
        if "log_process_noise" not in name and "tau" not in name
    }
    plain.load_state_dict(state)
    inside = ITEMS > 0
    torch.testing.assert_close(
        filtered(ITEMS)[inside], plain(ITEMS)[inside], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bft", [None, FILTER])
def test_padding_and_company_change_nothing(model, bft):
    net = small(model, bft=bft)
    together = net.scores(ITEMS)
    for row in range(len(ITEMS)):
        n = int((ITEMS[row] > 0).sum())
        alone = net.scores(ITEMS[row : row + 1, :n])
        torch.testing.assert_close(
            alone[0], together[row], rtol=1e-4, atol=1e-4
        )
    assert together.shape == (3, 31)
    assert (together[:, 0] == -torch.inf).all()
    assert together[:, 1:].isfinite().all()


@pytest.mark.parametrize("model", ["sasrec", "hstu"])
@pytest.mark.parametrize("bft", [None, FILTER])
def test_causal_models_do_not_see_ahead(model, bft):
    net = small(model, bft=bft)
    # same length, so that positions counted from the end agree
    a, b = ids([1, 2, 3, 4, 5]), ids([1, 2, 3, 9, 8])
    torch.testing.assert_close(net(a)[:, :3], net(b)[:, :3])
    assert not torch.allclose(net(a)[:, 3:], net(b)[:, 3:])


def test_bert4rec_asks_with_a_mask_after_the_whole_history():
    net = small("bert4rec")
    asked, _ = net.evaluation_inputs(ITEMS)
    assert asked[0].tolist() == [3, 7, 7, 1, 31, 0, 0, 0]
    assert asked[1].tolist() == [5, 2, 9, 30, 4, 8, 6, 31]
    changed = ITEMS.clone()
    changed[0, 3] = 2
    assert not torch.allclose(net.scores(changed)[0], net.scores(ITEMS)[0])


@pytest.mark.parametrize("bft", [None, FILTER])
def test_hstu_does_not_depend_on_the_padded_width(bft):
    net = small("hstu", bft=bft)
    wide = F.pad(ITEMS, (0, 1))
    hidden = net(wide)[:, :-1]
    torch.testing.assert_close(hidden, net(ITEMS), rtol=1e-4, atol=1e-5)


def test_gates_are_what_they_say():
    torch.manual_seed(0)
    h, e = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    heads = torch.randn(2, 5, 4, 4)
    for kind in GATES:
        gate = Gate(kind, 16, 4, 0.7)
        before = gate.on_heads(heads, h)
        after, ffn = gate.on_attention(e, h), gate.on_ffn(e, h)
        expected = {
            "constant": 0.7 * e,
            "scalar": 0.7 * e,
            "vector": 0.7 * e,
        }.get(kind, e)
        if kind == "ligr":
            w = torch.sigmoid(
                h @ gate.attention.weight.T + gate.attention.bias
            )
            expected = w * e
            w = torch.sigmoid(h @ gate.ffn.weight.T + gate.ffn.bias)
            torch.testing.assert_close(ffn, w * e)
        else:
            assert torch.equal(ffn, e)
        torch.testing.assert_close(after, expected)
        if kind.startswith("qiu"):
            w = torch.sigmoid(h @ gate.heads.weight.T + gate.heads.bias)
            w = w[..., None] if kind == "qiu-head" else w.view(2, 5, 4, 4)
            torch.testing.assert_close(before, heads * w)
        else:
            assert torch.equal(before, heads)
    sizes = {
        kind: sum(p.numel() for p in Gate(kind, 16, 4).parameters())
        for kind in GATES
    }
    assert sizes == {
        "none": 0,
        "constant": 0,
        "scalar": 1,
        "vector": 16,
        "ligr": 2 * (16 * 16 + 16),
        "qiu-head": 4 * 17,
        "qiu-element": 16 * 17,
    }
    with pytest.raises(ValueError, match="gate"):
        Gate("sigmoid", 16, 4)


@pytest.mark.parametrize("kind", [g for g in GATES if g != "none"])
def test_a_gate_reaches_the_model(kind):
    torch.manual_seed(0)
    reads = kind in ("constant", "scalar", "vector")
    gated = small(gate=kind, **({"gate_value": 0.5} if reads else {}))
    plain = small()
    plain.load_state_dict(gated.state_dict(), strict=False)
    assert not torch.allclose(gated(ITEMS), plain(ITEMS))
    gated(ITEMS).square().sum().backward()
    for name, p in gated.named_parameters():
        if "gate." in name:
            assert p.grad is not None and p.grad.abs().sum() > 0, name


def attended_by_hand(block, query, source, visible):
    """Heads' outputs (T, H, d_h), one token and head at a time."""
    c = block.config
    w_q, w_k, w_v = block.in_proj.weight.chunk(3)
    b_q, b_k, b_v = block.in_proj.bias.chunk(3)
    q = query @ w_q.T + b_q
    k, v = source @ w_k.T + b_k, source @ w_v.T + b_v
    size = c.d_model // c.nhead
    out = torch.zeros(len(query), c.nhead, size)
    for t in range(len(query)):
        for head in range(c.nhead):
            s = slice(head * size, (head + 1) * size)
            seen = [j for j in range(len(source)) if visible(t, j)]
            logits = k[seen][:, s] @ q[t, s] / math.sqrt(size)
            out[t, head] = logits.softmax(0) @ v[seen][:, s]
    return out


@pytest.mark.parametrize("kind", ["ligr", "qiu-head", "qiu-element"])
@pytest.mark.parametrize("norm", ["pre", "post", "original"])
def test_a_gated_block_written_out(kind, norm):
    torch.manual_seed(3)
    config = make_config(gate=kind, dropout=0.0, **SMALL)
    causal = norm != "post"
    block = randomise(Block(config, norm, causal)).eval()
    h = 1.7 * torch.randn(6, 16)
    gate = block.gate

    def sigmoid(linear, x):
        return 1 / (1 + torch.exp(-(x @ linear.weight.T + linear.bias)))

    x = h if norm == "post" else block.norm1(h)
    source = h if norm == "original" else x
    carried = x if norm == "original" else h
    heads = attended_by_hand(
        block, x, source, lambda t, j: j <= t or not causal
    )
    if kind == "qiu-head":
        heads = heads * sigmoid(gate.heads, x)[:, :, None]
    elif kind == "qiu-element":
        heads = heads * sigmoid(gate.heads, x).view(6, 2, 8)
    branch = block.out_proj(heads.flatten(1))
    if kind == "ligr":
        branch = branch * sigmoid(gate.attention, carried)
    after = carried + branch
    if norm == "post":
        after = block.norm1(after)
    x = after if norm == "post" else block.norm2(after)
    after = x if norm == "original" else after
    ffn = block.linear2(F.gelu(block.linear1(x)))
    if kind == "ligr":
        ffn = ffn * sigmoid(gate.ffn, after)
    expected = after + ffn
    if norm == "post":
        expected = block.norm2(expected)
    torch.testing.assert_close(block(h[None])[0], expected)


def test_the_mask_counts_among_the_places():
    """The last items that fit beside it, and every place is learned."""
    model = small("bert4rec")
    long = torch.arange(1, 11)[None]
    for count in (3, 7, 8):
        items = torch.where(torch.arange(10) < count, long, 0)
        asked, _ = model.evaluation_inputs(items)
        kept = asked[0][asked[0] > 0].tolist()
        first = max(count - 7, 0) + 1
        assert kept == [*range(first, count + 1), model.mask_id]
    whole = torch.arange(1, 9)[None]
    model(whole).square().sum().backward()
    assert (model.positions.weight.grad.abs().sum(1) > 0).all()
    assert len(model.positions.weight) == model.config.max_length


def test_bert4rec_drops_out_after_its_first_norm():
    model = small("bert4rec", dropout=0.5).train()
    seen = model.embed(ITEMS, model.first)
    assert (seen == 0).float().mean() == pytest.approx(0.5, abs=0.1)
    model.eval()
    whole = model.embed(ITEMS, model.first)
    kept = seen != 0
    torch.testing.assert_close(seen[kept], 2 * whole[kept])


def test_hstu_starts_as_published():
    layer = HSTULayer(make_config(n_items=5, model="hstu", d_model=64))
    assert layer.uvqk.bias is None
    w, out = layer.uvqk.weight.detach(), layer.out.weight.detach()
    assert w.std().item() == pytest.approx(0.02, rel=0.05)
    edge = math.sqrt(6 / 128)  # Xavier, uniform
    assert 0.98 * edge < out.abs().max() <= edge


def test_a_plain_block_has_a_gated_activation():
    torch.manual_seed(0)
    config = make_config(activation="swiglu", dropout=0.0, **SMALL)
    block = Block(config, "pre", True).eval()
    x = torch.randn(2, 3, 16)
    opening, through = block.linear1(x).chunk(2, -1)
    assert opening.shape[-1] == 24
    torch.testing.assert_close(
        block._feed_forward(x, x), block.linear2(F.silu(opening) * through)
    )


def test_a_gate_may_differ_between_layers():
    one, two = small(gate="constant", gate_value=(0.0, 1.0)), small()
    two.load_state_dict(one.state_dict())
    with torch.no_grad():  # a first layer that attends to nothing
        two.encoder.layers[0].out_proj.weight.zero_()
        two.encoder.layers[0].out_proj.bias.zero_()
    torch.testing.assert_close(one(ITEMS), two(ITEMS))
    with pytest.raises(ValueError, match="gate_value: expected a number, or"):
        small(gate="constant", gate_value=(0.5, 0.5, 0.5))


@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_tau_bias_moves_the_logits_alone(model):
    biased, plain = small(model, tau_bias=True), small(model)
    plain.load_state_dict(biased.state_dict(), strict=False)
    torch.nn.init.zeros_(biased.tau.learned.log_precision.weight)
    inside = ITEMS > 0
    torch.testing.assert_close(biased(ITEMS)[inside], plain(ITEMS)[inside])
    with torch.no_grad():
        biased.tau.learned.log_precision.weight[7] = -200.0
    seen = biased(ids([5, 7, 2]))
    # an item of no precision is not attended to, except by itself
    other = biased(ids([5, 7, 2]).where(torch.tensor([[1, 0, 1]]) > 0, 7))
    torch.testing.assert_close(seen, other)
    assert not torch.allclose(seen, plain(ids([5, 7, 2])))


@pytest.mark.parametrize("model", ["sasrec", "bert4rec"])
def test_tau_bias_adds_log_tau_of_the_key_to_the_logits(model):
    net = small(model, tau_bias=True, num_layers=1)
    log_tau = net.tau.learned.log_precision.weight
    nn.init.normal_(log_tau, 0.4, 1.5)
    block = net.encoder.layers[0]
    for row in range(len(ITEMS)):
        items = ITEMS[row, ITEMS[row] > 0][None]
        tokens = items.shape[1]
        h = net.embed(items, getattr(net, "first", None))
        x = block.norm1(h) if model == "sasrec" else h
        q, k, v = (
            y.unflatten(-1, (2, 8)).transpose(1, 2)
            for y in block.in_proj(x).chunk(3, -1)
        )
        bias = torch.full((tokens, tokens), -torch.inf)
        for t in range(tokens):
            for j in range(t + 1 if model == "sasrec" else tokens):
                bias[t, j] = log_tau[items[0, j], 0]
        e = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        after = h + block.out_proj(e.transpose(1, 2).flatten(-2))
        if model == "sasrec":
            x = block.norm2(after)
        else:
            x = after = block.norm1(after)
        expected = after + block.linear2(F.gelu(block.linear1(x)))
        last = net.final if model == "sasrec" else block.norm2
        found = net(ITEMS)[row, :tokens]
        torch.testing.assert_close(found, last(expected)[0])


@pytest.mark.parametrize("given, std", [(None, 16**-0.5), (0.02, 0.02)])
def test_vectors_start_with_the_spread_asked_for(given, std):
    torch.manual_seed(0)
    net = build(make_config(**SMALL | {"n_items": 2000}, embedding_std=given))
    assert net.items.weight[1:].std().item() == pytest.approx(std, rel=0.02)
    assert net.positions.weight.std().item() == pytest.approx(std, rel=0.2)


def test_precision_learns_at_its_own_rate():
    net = small(bft=FILTER)
    weights, precision = net.parameter_groups(1e-3, 1e-2)
    assert (weights["lr"], precision["lr"]) == (1e-3, 1e-2)
    assert len(precision["params"]) == 3  # log τ, log Q of two layers
    total = len(weights["params"]) + len(precision["params"])
    assert total == len(list(net.parameters()))
    assert len(small().parameter_groups(1e-3, 1e-2)) == 1
    for kind in ("scalar", "vector"):
        _, scales = small(gate=kind).parameter_groups(1e-3, 1e-2)
        assert len(scales["params"]) == 2 and scales["lr"] == 1e-2
    assert len(small(gate="ligr").parameter_groups(1e-3, 1e-2)) == 1


@pytest.mark.parametrize(
    "given, said",
    [
        ({"d_model": 15}, "nhead"),
        ({"embedding_std": 0.0}, "embedding_std: expected a number in"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_layers": 0}, "num_layers"),
        ({"gate": "x"}, "gate: expected one of none, constant"),
        ({"tau": "x"}, "tau: expected one of item, mlp"),
        ({"residual": "post"}, "residual: expected one of pre, original"),
        ({"gate": "ligr", "bft": FILTER}, "gate: .*a Bayesian filter does no"),
        ({"gate": "ligr", "gate_value": 0.5}, "does not read it; got 0.5"),
        ({"tau_start": 2.0}, "plain model without tau_bias does not read"),
        ({"bft": FILTER, "tau_power": -0.5}, "tau 'item' does not read it"),
        ({"tau_bias": True, "bft": FILTER}, "tau_bias: .*a Bayesian filter"),
        ({"residual": "original", "bft": FILTER}, "residual: .*a Bayesian fi"),
        ({"model": "bert4rec", "max_length": 1}, "max_length: .* at least 2"),
        ({"model": "bert4rec", "mask_rate": 0.0}, "mask_rate: expected a num"),
        ({"model": "bert4rec", "mask_rate": 1.5}, "mask_rate: expected a num"),
        ({"model": "bert4rec", "mask_rate": math.nan}, "mask_rate: expected"),
        ({"model": "bert4rec", "last_rate": -0.1}, "last_rate: expected a nu"),
        ({"model": "bert4rec", "last_rate": 1.1}, "last_rate: expected a num"),
        ({"model": "bert4rec", "last_rate": math.nan}, "last_rate: expected"),
        ({"dropout": math.nan}, "dropout"),
        ({"embedding_std": math.nan}, "embedding_std: expected a number in"),
        ({"gate": "constant", "gate_value": math.nan}, "gate_value"),
        ({"bft": FILTER, "tau_start": 0.0}, "tau_start: expected a number in"),
        ({"tau": "frequency", "bft": FILTER, "tau_power": math.nan}, "tau_po"),
        ({"model": "hstu", "temperature": 0.0}, "temperature: expected a num"),
        ({"model": "hstu", "temperature": -0.1}, "temperature: expected a nu"),
    ],
)
def test_configuration_names_the_bad_argument(given, said):
    with pytest.raises(ValueError, match=said):
        make_config(**(SMALL | given))


@pytest.mark.parametrize(
    "given, said",
    [
        *(
            ({name: value}, f"{name}: expected int, got {value!r}")
            for name in (
                "n_items",
                "d_model",
                "num_layers",
                "nhead",
                "dim_feedforward",
                "max_length",
            )
            for value in (16.0, True, "16", None)
        ),
        *(
            ({name: value}, f"{name}: expected float.*, got {value!r}")
            for name in ("dropout", "tau_power", "tau_start")
            for value in ("0.1", True, None)
        ),
        ({"embedding_std": "x"}, "embedding_std: expected float or None"),
        ({"gate_value": True}, "gate_value: expected float or .*, got True"),
        ({"gate_value": (1.0, "x")}, "gate_value: expected float, got 'x'"),
        ({"tau_bias": 1}, "tau_bias: expected bool, got 1"),
        ({"tau_bias": "no"}, "tau_bias: expected bool, got 'no'"),
        ({"activation": F.relu}, "activation: expected str"),
        ({"bft": True}, "bft: expected BFTConfig or None, got True"),
        (
            {"bft": {"reading": "value"}},
            "bft: expected BFTConfig or None, got",
        ),
    ],
)
def test_configuration_names_a_field_of_another_type(given, said):
    with pytest.raises(TypeError, match=said):
        make_config(**(SMALL | given))


@pytest.mark.parametrize(
    "model, option",
    [
        ("sasrec", {"temperature": 0.1}),
        ("sasrec", {"mask_rate": 0.5}),
        ("bert4rec", {"residual": "original"}),
        ("hstu", {"activation": "relu"}),
        ("hstu", {"gate": "ligr"}),
        ("hstu", {"tau_bias": True}),
    ],
)
def test_a_model_has_no_option_of_another(model, option):
    with pytest.raises(TypeError, match=f"argument '{next(iter(option))}'"):
        CONFIGS[model](n_items=30, **option)


@pytest.mark.parametrize(
    "given, error",
    [
        ({"granularity": "x"}, ValueError),
        ({"prior_scale": "x"}, ValueError),
        ({"prior_dof": 0.0}, ValueError),
        ({"process_noise": math.nan}, ValueError),
        ({"process_noise": "1"}, TypeError),
        ({"dynamics": "free"}, ValueError),
        ({"innovation": "sum"}, ValueError),
        ({"stationary_variance": 2.0}, ValueError),
        ({"stationary_variance": "2"}, TypeError),
        ({"project_variance": 1}, TypeError),
    ],
)
def test_the_filter_of_hstu_names_the_bad_argument(given, error):
    with pytest.raises(error, match=f"^{next(iter(given))}: expected"):
        HSTUFilter(**given)
    for other in (True, BFTConfig(), {}):
        with pytest.raises(TypeError, match="bft: expected HSTUFilter or No"):
            CONFIGS["hstu"](n_items=30, bft=other)


def test_numbers_of_numpy_are_numbers():
    given = {
        "n_items": np.int64(30),
        "d_model": np.int32(16),
        "tau_bias": np.True_,
    }
    given |= {"dropout": np.float32(0.5), "tau_power": -1, "tau": "frequency"}
    found = make_config(**given)
    plain = {"n_items": 30, "d_model": 16, "tau_bias": True, "dropout": 0.5}
    expected = make_config(**plain, tau_power=-1.0, tau="frequency")
    assert found == expected
    assert json.dumps(asdict(found)) == json.dumps(asdict(expected))
    listed = SASRecConfig(9, gate="vector", gate_value=[1, 0.5])
    assert listed.gate_value == (1.0, 0.5) and hash(listed)


@pytest.mark.parametrize(
    "frequency, error, said",
    [
        (np.ones(30), ValueError, r"expected shape \(31,\).*got \(30,\)"),
        (np.ones(32), ValueError, r"expected shape \(31,\).*got \(32,\)"),
        (np.ones((31, 1)), ValueError, r"got \(31, 1\)"),
        (3, ValueError, r"got \(\)"),
        (np.array(["1"] * 31), TypeError, "expected numbers, got <U1"),
        (np.ones(31, bool), TypeError, "expected numbers, got bool"),
        ([0.0, 2.0, math.nan] + [1.0] * 28, ValueError, "got nan for item 2"),
        ([0.0, 2.0, math.inf] + [1.0] * 28, ValueError, "got inf for item 2"),
        ([0, 2, 3, -1] + [1] * 27, ValueError, "got -1 for item 3"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_frequencies_that_are_none_are_refused(model, frequency, error, said):
    """Also by a model that would not read them."""
    for given in ({"bft": BFTConfig(), "tau": "shuffled"}, {}):
        config = make_config(model=model, **(SMALL | given))
        with pytest.raises(error, match=f"frequency: .*{said}"):
            build(config, frequency)


def test_only_a_configuration_builds_a_model():
    for given in ("sasrec", BFTConfig(), {"n_items": 3}):
        with pytest.raises(TypeError, match="config: expected one of SASRecC"):
            build(given)


@pytest.mark.parametrize("model", MODELS)
def test_places_count_back_from_each_sequences_end(model):
    net = small(model)
    found = net.embed(ids([4, 9], [5, 2, 9, 30, 4], [7]))
    items, places = net.items.weight, net.positions.weight
    for row, (pair, at) in {
        0: ([4, 9], [6, 7]),
        1: ([5, 2, 9, 30, 4], [3, 4, 5, 6, 7]),
        2: ([7], [7]),
    }.items():
        expected = 16**0.5 * (items[pair] + places[at])
        torch.testing.assert_close(found[row, : len(pair)], expected)


def test_a_batch_keeps_the_last_ids_and_pads_on_the_right():
    rows = [np.arange(1, 12), np.array([3, 5]), np.array([], dtype=int)]
    found = as_batch(rows, 4)
    assert found.tolist() == [[8, 9, 10, 11], [3, 5, 0, 0], [0, 0, 0, 0]]


def test_the_sandwich_is_the_estimator_hstu_uses(monkeypatch):
    called = []
    true = reml.unnormalised_variance
    monkeypatch.setattr(
        reml,
        "unnormalised_variance",
        lambda *a, **k: called.append(a) or true(*a, **k),
    )
    small("hstu", bft=FILTER)(ITEMS)
    assert len(called) == 2
