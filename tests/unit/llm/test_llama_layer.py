"""A Llama's layer against BFTLayer with the same weights, and its limits."""

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from bft_ref import Belief, BFTConfig, BFTLayer
from bft_ref.llm import patch
from bft_ref.llm.widened import narrow, widen
from tests.unit.llm.factories import (
    LLAMAS,
    WIDTH,
    close,
    filtering,
    llama,
    some_ids,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def as_bft_layer(layer, dtype):
    """BFTLayer, whose matrices a Llama has under other names."""
    config, attn, mlp = layer.config, layer.self_attn, layer.mlp
    made = BFTLayer(
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
        0.0,
        "swiglu",
        config.rms_norm_eps,
        norm_first=True,
        bias=False,
        dtype=dtype,
        config=config.filter,
        num_kv_heads=config.num_key_value_heads,
        rotary_base=config.rope_parameters["rope_theta"],
        norm="rmsnorm",
    )
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    made.load_state_dict(
        {
            "log_process_noise": layer.process_noise.weight,
            "norm1.weight": layer.input_layernorm.weight,
            "norm2.weight": layer.post_attention_layernorm.weight,
            "self_attn.in_proj_weight": torch.cat(
                [part.weight for part in projections]
            ),
            "self_attn.out_proj.weight": attn.o_proj.weight,
            "linear1.weight": torch.cat(
                [mlp.gate_proj.weight, mlp.up_proj.weight]
            ),
            "linear2.weight": mlp.down_proj.weight,
        }
    )
    return made.eval()


def exact_rotary(config, tokens, dtype):
    """Cosine and sine, which transformers has in float32 only."""
    base = torch.tensor(config.rope_parameters["rope_theta"]).double()
    pairs = torch.arange(0, config.head_dim, 2) / config.head_dim
    angle = torch.arange(tokens)[:, None] * base ** -pairs.double()
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.fixture
def exact_norms(monkeypatch):
    """A Llama's norms in float64, which transformers has in float32 only."""

    def forward(self, x):
        mean = x.square().mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(mean + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


GRID = [
    *itertools.product(
        ["token", "feature"],
        ["unit", "neighbours"],
        [True, False],
        ["exact", "first"],
        ["auto", "eager"],
    )
]


@pytest.mark.parametrize(
    "granularity,prior,project,jacobian,implementation", GRID
)
def test_a_layer_is_bft_layer_with_the_same_weights(
    granularity, prior, project, jacobian, implementation
):
    config = {
        "granularity": granularity,
        "prior_scale": prior,
        "project_variance": project,
        "jacobian": jacobian,
        "implementation": implementation,
        "prior_dof": 1.7,
    }
    ids = some_ids()
    for dtype in (torch.float64, torch.float32):
        model = filtering(llama(dtype), config)
        layer = model.model.layers[1]
        with torch.no_grad():
            layer.process_noise.weight.add_(0.3)
        oracle = as_bft_layer(layer, dtype)
        features = len(layer.process_noise.weight)
        torch.manual_seed(2)
        mean = 3 * torch.randn(*ids.shape, WIDTH, dtype=dtype)
        log = 2 * torch.randn(*ids.shape, features, dtype=dtype)
        layer.traces = []
        rotary = exact_rotary(model.config, ids.shape[1], dtype)
        out = layer(widen(Belief(mean, log)), position_embeddings=rotary)
        found = narrow(out, WIDTH)
        expected, trace = oracle.step(Belief(mean, log), is_causal=True)
        [mine] = layer.traces
        for x, y in [
            *zip(found, expected, strict=True),
            (mine.gain, trace.gain),
            (mine.n_eff, trace.n_eff),
            (mine.weights, trace.weights),
            (mine.log_growth, trace.log_growth),
            (mine.log_observation_precision, trace.log_observation_precision),
        ]:
            close(x, y, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("granularity", ["token", "feature"])
@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS)
def test_at_the_dials_zero_it_is_the_plain_llama(
    exact_norms, options, granularity, dtype
):
    base, ids = llama(dtype, **options), some_ids()
    config = BFTConfig(granularity=granularity, prior_scale="unit")
    model = patch(base, config, dial=0.0)
    with torch.no_grad():
        for parameter in model.precision_parameters():
            parameter.copy_(torch.randn_like(parameter))
        close(model(ids).logits, base(ids).logits, TOLERANCE[dtype])


@pytest.mark.parametrize("variant", ["plain", "constant", "gate", "tau_bias"])
def test_the_controls_start_as_the_plain_llama(exact_norms, variant):
    base, ids = llama(torch.float64), some_ids()
    model = patch(base, variant=variant).double()
    if variant == "gate":  # its start is nearly 1
        for layer in model.filters():
            layer.gain.bias.data.fill_(40.0)
    close(model(ids).logits, base(ids).logits, 1e-7)


@pytest.mark.parametrize("granularity", ["token", "feature"])
def test_in_the_limit_of_no_precision_it_is_the_plain_llama(
    exact_norms, granularity
):
    base, ids = llama(torch.float64), some_ids()
    config = BFTConfig(
        granularity=granularity, prior_scale="unit", process_noise=1e20
    )
    model = patch(base, config, tau=1e-20).double()
    close(model(ids).logits, base(ids).logits, 1e-10)


def test_only_the_layers_named_filter():
    base, ids = llama(torch.float64), some_ids()
    model = filtering(base, layers=[1])
    plain = base(ids, output_hidden_states=True).hidden_states
    found = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(found[1], plain[1])
    assert (found[2] - plain[2]).abs().max() > 0.01
    [layer] = model.filters()
    assert layer.self_attn.layer_idx == 1
    assert layer.is_first and layer.is_last


def test_layer_by_layer_it_is_the_model():
    """So that lower layers can be frozen and their output kept."""
    model, ids = filtering(layers=[1, 2]), some_ids()
    with torch.no_grad():
        expected = model(ids).logits
        inner, h = model.model, model.model.embed_tokens(ids)
        rotary = inner.rotary_emb(h, torch.arange(ids.shape[1])[None])
        for layer in inner.layers:
            h = layer(h, position_embeddings=rotary)
        close(model.lm_head(inner.norm(h)), expected, 1e-6)


@pytest.mark.parametrize("granularity", ["token", "feature"])
def test_gradients_are_differences_of_the_loss(exact_norms, granularity):
    config = {"granularity": granularity, "prior_scale": "unit"}
    model = filtering(llama(torch.float64), config)
    ids, reach = some_ids(1, 6), 1e-5

    def loss():
        return cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])

    loss().backward()
    for layer in model.filters()[:-1]:
        weight, ends = layer.process_noise.weight, []
        for end in (reach, -2 * reach):
            with torch.no_grad():
                weight[0] += end
                ends.append(loss().item())
        slope = (ends[0] - ends[1]) / (2 * reach)
        assert weight.grad[0].item() == pytest.approx(slope, rel=1e-4)
        assert abs(slope) > 1e-4
        with torch.no_grad():
            weight[0] += reach
