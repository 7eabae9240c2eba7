"""The stack: against PyTorch's encoder, checkpointing, misuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bft_ref import Belief, BFTConfig, BFTEncoder
from tests.factories import (
    D_MODEL,
    HEADS,
    WIDTH,
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
    randomise,
)


def plain_encoder(first, final=False, batch_first=True, layers=3):
    layer = nn.TransformerEncoderLayer(
        D_MODEL,
        HEADS,
        WIDTH,
        0.2,
        "gelu",
        1e-4,
        batch_first=batch_first,
        norm_first=first,
    )
    norm = nn.LayerNorm(D_MODEL) if final else None
    encoder = nn.TransformerEncoder(
        layer, layers, norm, enable_nested_tensor=False
    )
    return randomise(encoder).double().eval()


LIMIT = BFTConfig(prior_scale="unit", process_noise=1e16)


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(
    "first,layers,final",
    [(True, 3, False), (True, 3, True), (False, 1, False), (False, 1, True)],
)
def test_from_torch_is_the_plain_encoder_in_the_limit(
    first, layers, final, padding, granularity
):
    plain = plain_encoder(first, final, layers=layers)
    config = BFTConfig(
        granularity=granularity, prior_scale="unit", process_noise=1e16
    )
    ours = BFTEncoder.from_torch(plain, config, initial_precision=1e-16)
    assert not ours.training
    x = make_belief().mean
    shown = torch.ones(2, 5, dtype=torch.bool)
    hidden = None
    if padding:
        hidden = left_padding(2, 5, [5, 3])
        hidden = hidden if padding == "left" else hidden.flip(1)
        shown = ~hidden
    expected = plain(x, src_key_padding_mask=hidden)
    found = ours(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(found[shown], expected[shown])


def test_the_limit_of_a_post_norm_stack_keeps_unequal_precisions():
    """K → 1, but each norm divides by a token's own scale, after Q.

    So λ̄ differs between tokens from the second layer on, and the stack
    equals plain attention with log λ̄ added to the scores.
    """
    plain = plain_encoder(False, layers=2)
    ours = BFTEncoder.from_torch(plain, LIMIT, initial_precision=1e-16)
    x = make_belief().mean
    found, traces = ours.steps(x)
    for trace in traces:
        torch.testing.assert_close(trace.gain, torch.ones_like(trace.gain))
    assert (found - plain(x)).abs().max() > 0.05
    first = ours.layers[0](Belief(x, torch.full_like(x, -36.8)))
    log = first.log_token_precision
    assert (log - log[:, :1]).abs().max() > 0.1
    bias = log.repeat_interleave(HEADS, 0)[:, None].expand(-1, 5, -1)
    second = plain.layers[1](plain.layers[0](x), bias)
    torch.testing.assert_close(found, second, rtol=1e-6, atol=1e-6)


def test_from_torch_in_the_limit_with_a_causal_mask_and_batch_second():
    plain = plain_encoder(True, batch_first=False)
    ours = BFTEncoder.from_torch(plain, LIMIT, initial_precision=1e-16)
    x = make_belief().mean.transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(5).double()
    torch.testing.assert_close(
        ours(x, mask, is_causal=True), plain(x, mask, is_causal=True)
    )


def test_from_torch_is_visible_away_from_the_limit():
    plain = plain_encoder(True)
    ours = BFTEncoder.from_torch(plain, BFTConfig(process_noise=0.5))
    x = make_belief().mean
    assert (ours(x) - plain(x)).abs().max() > 0.05


def test_from_torch_takes_everything_over():
    plain = plain_encoder(True, True).train()
    ours = BFTEncoder.from_torch(plain, BFTConfig(granularity="token"))
    assert ours.training
    theirs, mine = plain.state_dict(), ours.state_dict()
    new = {k for k in mine if k not in theirs}
    assert new == {"log_initial_precision"} | {
        f"layers.{i}.log_process_noise" for i in range(3)
    }
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value)
        assert mine[name].data_ptr() != value.data_ptr()
    layer = ours.layers[0]
    assert (layer.dropout_p, layer.norm1.eps, layer.norm_first) == (
        0.2,
        1e-4,
        True,
    )
    assert mine["log_initial_precision"].dtype == torch.float64


def test_golden_encoder_keys():
    keys = set(make_encoder(2).state_dict())
    per_layer = set(make_layer().state_dict())
    assert keys == {"log_initial_precision"} | {
        f"layers.{i}.{name}" for i in range(2) for name in per_layer
    }


def test_state_dict_round_trip_is_exact():
    one, two = make_encoder(seed=1), make_encoder(seed=5)
    belief = make_belief()
    assert (one(belief).mean - two(belief).mean).abs().max() > 0.01
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(one(belief), two(belief), rtol=0, atol=0)


def test_encoder_is_its_layers_in_turn():
    model, belief = make_encoder(3), make_belief()
    model.norm = nn.LayerNorm(D_MODEL).double()
    expected = belief
    for layer in model.layers:
        expected = layer(expected, is_causal=True)
    found = model(belief, is_causal=True)
    torch.testing.assert_close(found.mean, model.norm(expected.mean))
    torch.testing.assert_close(found.log_precision, expected.log_precision)


@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_a_tensor_starts_from_the_learned_precision(granularity):
    model = make_encoder(granularity=granularity)
    x = make_belief().mean
    log = model.log_initial_precision.expand(2, 5, -1)
    found = model(x)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, model(Belief(x, log)).mean)
    found.sum().backward()
    assert model.log_initial_precision.grad.abs().max() > 0


def test_traces_hold_every_layer():
    model, belief = make_encoder(3), make_belief()
    out, traces = model.steps(belief)
    torch.testing.assert_close(out, model(belief))
    assert len(traces) == 3
    for trace in traces:
        assert trace.weights.shape == (2, HEADS, 5, 5)
        assert trace.n_eff.shape == (2, HEADS, 5)
        assert trace.gain.shape == (2, 5, D_MODEL)
        assert ((trace.gain >= 0) & (trace.gain <= 1)).all()
    mean, _ = model.steps(belief.mean)
    assert isinstance(mean, torch.Tensor)


@pytest.mark.parametrize(
    "config",
    [
        {"dropout": 0.3},
        {"dropout": 0.3, "variance_rule": "row"},
        {"dropout": 0.3, "jacobian": "hutchinson", "granularity": "token"},
    ],
    ids=label,
)
def test_checkpointing_gives_identical_outputs_and_gradients(config):
    found = []
    for checkpointing in [False, True]:
        model = make_encoder(checkpointing=checkpointing, **config).train()
        x = make_belief().mean.requires_grad_()
        torch.manual_seed(7)  # the same dropout and probes
        out = model(Belief(x, make_belief().log_precision), is_causal=True)
        (out.mean.square().sum() + out.log_precision.sum()).backward()
        grads = {
            name: p.grad
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        found.append((out.mean, x.grad, grads))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_cache_is_refused_while_checkpointing_recomputes():
    model = make_encoder(checkpointing=True).train()
    with pytest.raises(ValueError, match="caches: expected None while check"):
        model(make_belief(), is_causal=True, caches=model.make_caches())
    model.eval()(make_belief(), is_causal=True, caches=model.make_caches())


def test_checkpointing_saves_less():
    saved = []
    for checkpointing in [False, True]:
        model = make_encoder(4, checkpointing=checkpointing).train()
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(make_belief(), is_causal=True)
        saved.append(total)
    assert saved[1] < 0.3 * saved[0]


def test_copies_start_alike_and_learn_apart():
    model = make_encoder(2)
    a, b = (layer.linear1.weight for layer in model.layers)
    assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize(
    "arguments,kind,words",
    [
        ((nn.Linear(2, 2), 2), TypeError, "^layer: .*Linear"),
        ((make_layer(), 0), ValueError, "^num_layers: .*0"),
        ((make_layer(), 1.5), ValueError, "^num_layers: .*1.5"),
    ],
)
def test_constructor_errors(arguments, kind, words):
    with pytest.raises(kind, match=words):
        BFTEncoder(*arguments)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_initial_precision(value):
    with pytest.raises(ValueError, match="^initial_precision: "):
        BFTEncoder(make_layer(), 1, initial_precision=value)


def test_from_torch_refuses_a_single_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    with pytest.raises(TypeError, match="^encoder: .*TransformerEncoderLayer"):
        BFTEncoder.from_torch(layer)


def test_neither_tensor_nor_belief():
    with pytest.raises(TypeError, match="^belief: .*list"):
        make_encoder()([1.0])


def test_from_torch_keeps_what_each_layer_has_of_its_own():
    plain = plain_encoder(True)
    _, two, three = plain.layers
    two.activation, two.norm1.eps = F.silu, 1e-2
    for dropout in [two.dropout, two.dropout1, two.dropout2]:
        dropout.p = 0.4
    two.self_attn.dropout = 0.4
    three.linear1.requires_grad_(False)
    ours = BFTEncoder.from_torch(plain, LIMIT, initial_precision=1e-16)
    x = make_belief().mean
    torch.testing.assert_close(ours(x), plain(x))
    assert [layer.dropout_p for layer in ours.layers] == [0.2, 0.4, 0.2]
    frozen = {n for n, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"layers.2.linear1.weight", "layers.2.linear1.bias"}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_from_torch_with_padding_in_the_limit(nested, final):
    """Nested tensors or not, what can be seen is the same."""
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, 0.1, batch_first=True, norm_first=False
    )
    norm = nn.LayerNorm(8) if final else None
    plain = nn.TransformerEncoder(layer, 1, norm, enable_nested_tensor=nested)
    randomise(plain).eval()
    ours = BFTEncoder.from_torch(plain, LIMIT, initial_precision=1e-16)
    assert (ours.norm is None) == (not final)
    x = make_belief(dtype=torch.float32).mean
    hidden = torch.zeros(2, 5).bool()
    hidden[1, 3:] = True
    with torch.no_grad():
        found = ours(x, src_key_padding_mask=hidden)
        expected = plain(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(
        found[~hidden], expected[~hidden], rtol=1e-4, atol=1e-4
    )


def test_from_torch_keeps_shared_layers_shared():
    plain = plain_encoder(True)
    plain.layers[2] = plain.layers[0]
    ours = BFTEncoder.from_torch(plain, LIMIT, initial_precision=1e-16)
    assert ours.layers[2] is ours.layers[0] is not ours.layers[1]
    x = make_belief().mean
    torch.testing.assert_close(ours(x), plain(x))


def test_from_torch_refuses_an_encoder_with_a_forward_of_its_own():
    class Doubled(nn.TransformerEncoder):
        def forward(self, *arguments, **options):
            return 2 * super().forward(*arguments, **options)

    plain = plain_encoder(True)
    plain.__class__ = Doubled
    with pytest.raises(TypeError, match="^encoder: .*Doubled"):
        BFTEncoder.from_torch(plain)
