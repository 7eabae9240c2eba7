"""The layer against loops, against PyTorch's own, and against misuse."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from bft_ref import (
    Belief,
    BFTConfig,
    BFTEncoder,
    BFTLayer,
    KeyValueCache,
    MLPPrecision,
)
from tests.factories import (
    D_MODEL,
    HEADS,
    WIDTH,
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
    numpy_parameters,
    randomise,
)
from tests.oracles import loops

GOLDEN = Path(__file__).with_name("golden_layer.json")
RETURNING = {"dynamics": "ornstein_uhlenbeck", "stationary_variance": 1.7}
DIFFERENCE = {"innovation": "difference"}


def assert_equals_loops(layer, belief, visible, hidden=None, **arguments):
    """Run layer and loops on every sequence and compare everything."""
    allowed = torch.from_numpy(visible)
    out, trace = layer.step(
        belief, ~allowed, hidden, **arguments.pop("call", {})
    )
    config = layer.config
    for b in range(len(belief.mean)):
        seen = visible
        if hidden is not None:
            seen = visible & ~hidden[b].numpy()[None]
        mean, precision, inside = loops.layer(
            numpy_parameters(layer),
            belief.mean[b].numpy(),
            belief.precision[b].numpy(),
            seen,
            heads=layer.nhead,
            kv_heads=layer.num_kv_heads,
            norm_first=layer.norm_first,
            centred=isinstance(layer.norm1, torch.nn.LayerNorm),
            token=config.granularity == "token",
            reading=config.reading,
            prior=config.prior_scale,
            nu0=config.prior_dof,
            project_variance=config.project_variance,
            rotary_base=layer.rotary_base,
            stationary=(
                config.stationary_variance
                if config.dynamics == "ornstein_uhlenbeck"
                else None
            ),
            difference=config.innovation == "difference",
            **arguments,
        )
        found = {
            "weights": trace.weights[b],
            "n_eff": trace.n_eff[b],
            "observation_precision": trace.log_observation_precision[b].exp(),
            "gain": trace.gain[b],
            "growth": trace.log_growth[b].exp(),
        }
        for name, value in inside.items():
            np.testing.assert_allclose(
                found[name].detach(), value, 1e-9, 1e-12, err_msg=name
            )
        np.testing.assert_allclose(out.mean[b].detach(), mean, 1e-9, 1e-10)
        np.testing.assert_allclose(out.precision[b].detach(), precision, 1e-9)


GRID = list(
    itertools.product(
        [True, False],
        ["feature", "token"],
        ["gelu", "swiglu"],
        ["layernorm", "rmsnorm"],
        ["prediction", "mean", "value"],
        ["neighbours", "unit"],
        [True, False],
    )
)


@pytest.mark.parametrize(
    "first,granularity,activation,norm,reading,prior,project", GRID
)
def test_layer_equals_the_loop_oracle(
    first, granularity, activation, norm, reading, prior, project
):
    layer = make_layer(
        activation=activation,
        norm_first=first,
        granularity=granularity,
        reading=reading,
        prior_scale=prior,
        prior_dof=1.6,
        project_variance=project,
        options={"norm": norm},
    )
    token = granularity == "token"
    belief = make_belief(1, 4, features=1 if token else None)
    rng = np.random.default_rng(0)
    visible = rng.random((4, 4)) < 0.6
    visible[:, 0] = True
    visible[2] = False  # one query sees nothing
    assert_equals_loops(layer, belief, visible, activation=activation)


@pytest.mark.parametrize(
    "activation", ["relu", "silu", "tanh", "reglu", "geglu"]
)
def test_other_activations_equal_the_loop_oracle(activation):
    layer = make_layer(activation=activation)
    causal = np.tril(np.ones((5, 5), bool))
    assert_equals_loops(layer, make_belief(), causal, activation=activation)


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [RETURNING, DIFFERENCE], ids=label)
def test_our_options_equal_the_loop_oracle(options, first, granularity):
    layer = make_layer(norm_first=first, granularity=granularity, **options)
    features = 1 if granularity == "token" else None
    visible = np.tril(np.ones((5, 5), bool))
    visible[2] = False  # one query sees nothing
    belief = make_belief(features=features)
    assert_equals_loops(layer, belief, visible, activation="gelu")


def test_an_observation_is_subtracted_and_weighs_as_an_increment_does():
    """λ is the same; K moves the state to z, where e was added to it."""
    layer = make_layer(prior_scale="unit")
    other = make_layer(prior_scale="unit", **DIFFERENCE)
    belief, hidden = make_belief(), left_padding(2, 5, [5, 2])
    seen, subtracted = (
        each.observe(belief, None, hidden, True) for each in (layer, other)
    )
    z = seen.innovation
    torch.testing.assert_close(subtracted.innovation, z - belief.mean)
    assert torch.equal(seen.log_precision, subtracted.log_precision)
    updated, k = other.update(belief, subtracted)
    torch.testing.assert_close(updated.mean, (1 - k) * belief.mean + k * z)
    assert torch.equal(
        updated.log_precision, layer.update(belief, seen)[0].log_precision
    )
    # what saw nothing keeps its mean
    assert torch.equal(updated.mean[1, :3], belief.mean[1, :3])
    # a state of which nothing is known is forgotten
    vague = belief._replace(log_precision=belief.log_precision - 80)
    updated, _ = other.update(vague, other.observe(vague))
    z = layer.observe(vague).innovation
    torch.testing.assert_close(updated.mean, z, rtol=0, atol=1e-12)


def test_dropout_thins_the_observation_before_the_state_is_subtracted():
    layer = make_layer(dropout=0.5, **DIFFERENCE).train()
    torch.manual_seed(3)
    belief = make_belief()
    found = layer.observe(belief).innovation
    dropped = found == -belief.mean
    assert 0.3 < dropped.double().mean() < 0.7


def test_noise_cannot_make_a_returning_state_vaguer_than_it_was():
    layer, belief = make_layer(**RETURNING), make_belief()
    with torch.no_grad():
        layer.log_process_noise.fill_(40.0)
        out, trace = layer.step(belief)
        np.testing.assert_allclose(out.variance, 1.7, rtol=1e-6)
        layer.log_process_noise.fill_(-40.0)
        out, trace = layer.step(belief)
    kept = trace.log_growth - trace.log_updated_precision
    torch.testing.assert_close(out.log_precision, -kept)


@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_grouped_heads_and_rotary_equal_the_loop_oracle(granularity):
    layer = make_layer(
        d_model=16,
        heads=4,
        granularity=granularity,
        options={"num_kv_heads": 2, "rotary_base": 50.0},
    )
    token = granularity == "token"
    belief = make_belief(2, 5, 16, features=1 if token else None)
    hidden = left_padding(2, 5, [3, 5])
    causal = np.tril(np.ones((5, 5), bool))
    assert_equals_loops(layer, belief, causal, hidden, activation="gelu")


def test_first_term_differs_from_exact_only_in_the_jacobian():
    belief = make_belief()
    exact, first = (make_layer(jacobian=j) for j in ["exact", "first"])
    (a, ta), (b, tb) = exact.step(belief), first.step(belief)
    torch.testing.assert_close(a.mean, b.mean)
    torch.testing.assert_close(ta.gain, tb.gain)
    assert (ta.log_growth - tb.log_growth).abs().max() > 0.01


def test_row_rule_of_the_layer_averages_to_the_dense_first_order_variance():
    """Over all signs of the probe, exactly."""
    layer = make_layer(d_model=4, heads=2, width=6, variance_rule="row")
    updated = make_belief(1, 1, 4)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 4)
    total = 0.0
    for row in signs:
        layer._signs = row.expand(3, 4)
        total = total + layer.predict(updated)[0].variance / len(signs)

    def function(h):
        normed = F.layer_norm(
            h, (4,), layer.norm2.weight, layer.norm2.bias, layer.norm2.eps
        )
        hidden = F.gelu(layer.linear1(normed))
        return h + layer.linear2(hidden)

    jacobian = torch.func.jacrev(function)(updated.mean[0, 0])
    noise = layer.log_process_noise.exp()
    expected = jacobian.square() @ updated.variance[0, 0] + noise
    torch.testing.assert_close(total[0, 0], expected)


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("own", [False, True])
def test_hutchinson_layer_averages_to_the_closed_form(granularity, own):
    """Over all pairs of probes; small weights, so that nothing is cut at 0."""
    closed = make_layer(d_model=4, heads=2, width=6, granularity=granularity)
    with torch.no_grad():
        closed.linear2.weight *= 0.2
    options = {}
    if own:
        network = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        options["ffn"] = network.double()
    layer = make_layer(
        d_model=4,
        heads=2,
        width=6,
        granularity=granularity,
        jacobian="hutchinson",
        options=options,
    )
    state = closed.state_dict()
    if own:
        for ours, theirs in [("0", "linear1"), ("2", "linear2")]:
            for kind in ["weight", "bias"]:
                value = state.pop(f"{theirs}.{kind}")
                state[f"ffn.{ours}.{kind}"] = value
    layer.load_state_dict(state)
    updated = make_belief(1, 2, 4, features=1 if granularity == "token" else 4)
    expected, growth = closed.predict(updated)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 4)
    one, two = signs.repeat(16, 1), signs.repeat_interleave(16, 0)
    probes = torch.stack([one, two, one])[:, :, None]
    many = Belief(*(x.expand(256, -1, -1) for x in updated))
    layer.signs = lambda like, index: probes[index].expand(like.shape)
    found, log_growth = layer.predict(many)
    average = log_growth.exp().mean(0, keepdim=True)
    torch.testing.assert_close(average, growth.exp())
    torch.testing.assert_close(found.mean[:1], expected.mean)


@pytest.mark.parametrize("rule", ["diagonal", "row"])
def test_own_ffn_in_post_norm_is_run(rule):
    layer = make_layer(
        norm_first=False,
        variance_rule=rule,
        options={"ffn": nn.Linear(D_MODEL, D_MODEL).double()},
    )
    belief = make_belief()
    out = layer(belief)
    assert out.mean.isfinite().all()
    assert out.log_precision.isfinite().all()
    seen = layer.observe(belief)
    updated, _ = layer.update(belief, seen)
    expected = layer.norm2(updated.mean + layer.ffn(updated.mean))
    torch.testing.assert_close(out.mean, expected)


def test_observe_update_predict_are_the_layer():
    layer, belief = make_layer(), make_belief()
    updated, _ = layer.update(belief, layer.observe(belief, is_causal=True))
    by_hand, _ = layer.predict(updated)
    out = layer(belief, is_causal=True)
    torch.testing.assert_close(out.mean, by_hand.mean)
    torch.testing.assert_close(out.log_precision, by_hand.log_precision)


def test_trace_changes_nothing_and_holds_the_gain():
    layer, belief = make_layer(), make_belief()
    plain = layer(belief)
    traced, trace = layer.step(belief)
    torch.testing.assert_close(plain, traced, rtol=1e-12, atol=1e-13)
    k = torch.sigmoid(trace.log_observation_precision - belief.log_precision)
    torch.testing.assert_close(trace.gain, k)
    rows = trace.weights.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_token_layer_turns_feature_precision_into_its_harmonic_mean():
    layer, belief = make_layer(granularity="token"), make_belief()
    scalar = belief.variance.mean(-1, keepdim=True).log().neg()
    a, b = layer(belief), layer(Belief(belief.mean, scalar))
    torch.testing.assert_close(a, b)
    assert a.log_precision.shape == (2, 5, 1)


def test_feature_layer_spreads_a_token_precision():
    layer, belief = make_layer(), make_belief(features=1)
    wide = Belief(belief.mean, belief.log_precision.expand(2, 5, D_MODEL))
    torch.testing.assert_close(layer(belief), layer(wide))


def test_batch_second_is_the_transpose():
    layer = make_layer()
    other = make_layer(options={"batch_first": False})
    belief = make_belief()
    swapped = Belief(*(x.transpose(0, 1) for x in belief))
    out, back = layer(belief), other(swapped)
    torch.testing.assert_close(out.mean, back.mean.transpose(0, 1))
    torch.testing.assert_close(
        out.log_precision, back.log_precision.transpose(0, 1)
    )


# masks ---------------------------------------------------------------------


def test_every_way_to_write_a_causal_mask_agrees():
    layer, belief = make_layer(), make_belief()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    as_float = torch.zeros(5, 5).masked_fill(later, -torch.inf)
    lowest = torch.zeros(5, 5).masked_fill(later, torch.finfo().min)
    expected = layer(belief, is_causal=True)
    for mask in [
        later,
        as_float,
        as_float.double(),
        lowest,
        later.expand(2 * HEADS, 5, 5),
        as_float.expand(2 * HEADS, 5, 5),
        nn.Transformer.generate_square_subsequent_mask(5),
    ]:
        torch.testing.assert_close(layer(belief, mask), expected)
        both = layer(belief, mask, is_causal=True)
        torch.testing.assert_close(both, expected)


def test_every_way_to_write_padding_agrees():
    layer, belief = make_layer(), make_belief()
    hidden = left_padding(2, 5, [5, 3])
    as_float = torch.zeros(2, 5).masked_fill(hidden, -torch.inf)
    lowest = torch.zeros(2, 5).masked_fill(hidden, torch.finfo().min)
    as_score = hidden[:, None, None].expand(2, HEADS, 5, 5).flatten(0, 1)
    expected = layer(belief, None, hidden)
    for arguments in [(None, as_float), (None, lowest), (as_score,)]:
        torch.testing.assert_close(layer(belief, *arguments), expected)


def test_float_masks_are_added_to_the_scores():
    """A key bias of log 2 counts the key twice."""
    layer, belief = make_layer(prior_scale="unit"), make_belief()
    bias = torch.zeros(2, 5)
    bias[:, 2] = 2.0
    biased = layer.step(belief, None, bias)[1]
    scored = layer.step(belief, bias[0].expand(5, 5))[1]
    shifted = Belief(belief.mean, belief.log_precision + bias[..., None])
    raised = layer.step(shifted)[1]
    torch.testing.assert_close(biased.weights, scored.weights)
    torch.testing.assert_close(biased.weights, raised.weights)


def test_hidden_tokens_do_not_matter():
    layer, belief = make_layer(), make_belief()
    hidden = left_padding(2, 5, [3, 2])
    other = make_belief(seed=11)
    mixed = Belief(
        *(
            torch.where(hidden[..., None], b, a)
            for a, b in zip(belief, other, strict=True)
        )
    )
    for a, b in zip(
        layer(belief, None, hidden), layer(mixed, None, hidden), strict=True
    ):
        torch.testing.assert_close(a[~hidden], b[~hidden], rtol=0, atol=0)


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("innovation", ["increment", "difference"])
def test_all_masked_row_keeps_its_mean_and_has_finite_gradients(
    first, granularity, innovation
):
    layer = make_layer(
        norm_first=first, granularity=granularity, innovation=innovation
    )
    belief = make_belief()
    mean = belief.mean.clone().requires_grad_()
    log = belief.log_precision.clone().requires_grad_()
    hidden = left_padding(2, 5, [5, 2])
    given = layer._entered(Belief(mean, log))
    seen = layer.observe(given, None, hidden, True)
    updated, k = layer.update(given, seen)
    assert (seen.log_precision[1, :3] == -torch.inf).all()
    assert (k[1, :3] == 0).all()
    assert (k[0] > 0).all()
    assert (k[1, 3:] > 0).all()
    kept = given.mean[1, :3]
    if not first:
        kept = layer.norm1(kept)
    torch.testing.assert_close(updated.mean[1, :3], kept, rtol=0, atol=1e-14)
    if first:
        torch.testing.assert_close(
            updated.log_precision[1, :3], given.log_precision[1, :3]
        )
    out = layer(Belief(mean, log), None, hidden, True)
    (out.mean.square().sum() + out.log_precision.sum()).backward()
    for x in [mean, log, *layer.parameters()]:
        assert x.grad.isfinite().all()


# against PyTorch -----------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_loads_the_state_dict_of_the_standard_layer(first, bias):
    plain = nn.TransformerEncoderLayer(
        D_MODEL,
        HEADS,
        WIDTH,
        0.2,
        "gelu",
        1e-4,
        batch_first=True,
        norm_first=first,
        bias=bias,
    )
    randomise(plain)
    ours = BFTLayer(
        D_MODEL, HEADS, WIDTH, 0.2, "gelu", 1e-4, norm_first=first, bias=bias
    )
    report = ours.load_state_dict(plain.state_dict())
    assert not report.missing_keys
    assert not report.unexpected_keys
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    # in the limit it computes the same
    config = BFTConfig(prior_scale="unit", process_noise=1e20)
    near = BFTLayer(
        D_MODEL,
        HEADS,
        WIDTH,
        0.2,
        "gelu",
        1e-4,
        norm_first=first,
        bias=bias,
        config=config,
    )
    near.load_state_dict(plain.state_dict())
    x = make_belief(dtype=torch.float32).mean
    low = Belief(x, torch.full_like(x, -40.0))
    torch.testing.assert_close(
        near.eval()(low).mean, plain.eval()(x), rtol=1e-4, atol=1e-5
    )


def test_golden_state_dict():
    expected = {
        "log_process_noise": (8,),
        "self_attn.in_proj_weight": (24, 8),
        "self_attn.in_proj_bias": (24,),
        "self_attn.out_proj.weight": (8, 8),
        "self_attn.out_proj.bias": (8,),
        "linear1.weight": (12, 8),
        "linear1.bias": (12,),
        "linear2.weight": (8, 12),
        "linear2.bias": (8,),
        "norm1.weight": (8,),
        "norm1.bias": (8,),
        "norm2.weight": (8,),
        "norm2.bias": (8,),
    }
    state = make_layer().state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == expected
    token = make_layer(granularity="token").state_dict()
    assert token["log_process_noise"].shape == (1,)


def golden_cases():
    """Layers whose parameters and input need no random generator."""
    for first, granularity in itertools.product(
        [True, False], ["feature", "token"]
    ):
        layer = BFTLayer(
            8,
            2,
            12,
            0.0,
            "gelu",
            norm_first=first,
            dtype=torch.float64,
            config=BFTConfig(granularity=granularity, process_noise=0.3),
        ).eval()
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters(), 1):
                steps = torch.arange(parameter.numel()).double()
                wave = 0.4 * torch.sin(number + 0.7 * steps)
                parameter.copy_(wave.view(parameter.shape) + 0.1)
        steps = torch.arange(2 * 4 * 8).double().view(2, 4, 8)
        belief = Belief(torch.sin(1.3 * steps), torch.cos(0.9 * steps))
        out = layer(belief, None, left_padding(2, 4, [4, 3]), True)
        name = f"{'pre' if first else 'post'}-norm, {granularity}"
        yield name, [x.detach().flatten().tolist() for x in out]


def write_golden():
    """Only on purpose: every number in the file will change."""
    content = {
        name: {"mean": mean, "log_precision": log}
        for name, (mean, log) in golden_cases()
    }
    text = json.dumps(content, indent=1) + "\n"
    GOLDEN.write_text(text, encoding="utf-8")


def test_golden_output():
    """A change of any number is noticed; ``write_golden`` accepts it."""
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for name, (mean, log_precision) in golden_cases():
        np.testing.assert_allclose(mean, stored[name]["mean"], 1e-9, 1e-11)
        np.testing.assert_allclose(
            log_precision, stored[name]["log_precision"], 1e-9, 1e-11
        )


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("d", [256, 768, 2048])
def test_extra_parameters_are_below_a_thousandth(d, granularity):
    config = BFTConfig(granularity=granularity)
    ours = BFTLayer(d, 8, 4 * d, config=config, device="meta")
    plain = nn.TransformerEncoderLayer(d, 8, 4 * d, device="meta")

    def count(module):
        return sum(p.numel() for p in module.parameters())

    extra = count(ours) - count(plain)
    assert extra == (d if granularity == "feature" else 1)
    assert extra < 1e-3 * count(plain)


# gradients, dropout, determinism -------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "token"},
        {"reading": "mean", "project_variance": False, "prior_scale": "unit"},
        {"variance_rule": "row"},
        {"jacobian": "hutchinson"},
        {"jacobian": "hutchinson", "options": {"norm": "rmsnorm"}},
        RETURNING,
        DIFFERENCE,
    ],
    ids=label,
)
@pytest.mark.parametrize("first", [True, False])
def test_gradcheck_of_the_whole_layer(first, config):
    layer = make_layer(
        d_model=4, heads=2, width=5, norm_first=first, seed=4, **config
    )
    belief = make_belief(1, 3, 4, seed=5)
    hidden = left_padding(1, 3, [2])
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(mean, log, *values):
        state = dict(zip(names, values, strict=True))
        out = torch.func.functional_call(
            layer, state, (Belief(mean, log), None, hidden, True)
        )
        return tuple(out)

    inputs = [x.detach().clone().requires_grad_() for x in [*belief, *values]]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_dropout_thins_the_mean_only():
    """Precision and n_eff in training come from the undropped weights."""
    layer, belief = make_layer(dropout=0.4), make_belief()
    calm = layer.observe(belief)
    layer.train()
    torch.manual_seed(0)
    one, two = layer.observe(belief), layer.observe(belief)
    for seen in [one, two]:
        torch.testing.assert_close(seen.log_precision, calm.log_precision)
        torch.testing.assert_close(seen.n_eff, calm.n_eff)
    assert (one.innovation - two.innovation).abs().max() > 0.01
    assert (one.innovation - calm.innovation).abs().max() > 0.01


def test_dropout_keeps_the_mean_of_the_innovation():
    layer, belief = make_layer(dropout=0.3), make_belief(1, 3)
    calm = layer.observe(belief).innovation
    layer.train()
    torch.manual_seed(0)
    many = Belief(*(x.expand(4000, -1, -1) for x in belief))
    draws = layer.observe(many).innovation
    error = draws.std(0) / 4000**0.5
    assert ((draws.mean(0) - calm[0]).abs() < 5 * error).all()


@pytest.mark.parametrize("jacobian", ["exact", "hutchinson"])
def test_ffn_dropout_acts_on_the_hidden_layer_and_not_on_the_jacobian(
    jacobian,
):
    layer = make_layer(dropout=0.5, jacobian=jacobian)
    with torch.no_grad():
        layer.linear2.weight.zero_()
        layer.linear2.weight[0, 0] = 3.0
    belief = make_belief(1, 1)
    _, calm = layer.predict(belief)
    layer.train()
    torch.manual_seed(0)
    many = Belief(*(x.expand(500, -1, -1) for x in belief))
    predicted, growth = layer.predict(many)
    if jacobian == "exact":
        torch.testing.assert_close(growth, calm.expand_as(growth))
    step = (predicted.mean - many.mean)[:, 0, 0]
    bias = layer.linear2.bias[0] * 2
    # hidden and output dropout: 0, the bias alone, or both
    assert len(step.round(decimals=9).unique()) == 3
    assert torch.isclose(step, bias).any()


def test_evaluation_is_deterministic_bit_by_bit():
    for jacobian in ["exact", "hutchinson"]:
        layer = make_layer(dropout=0.5, jacobian=jacobian)
        a, b = layer(make_belief()), layer(make_belief())
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_deterministic_algorithms_are_enough():
    layer, belief = (
        make_layer(dtype=torch.float32),
        make_belief(dtype=torch.float32),
    )
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for _ in range(2):
            layer.zero_grad()
            out = layer(belief, None, left_padding(2, 5, [5, 2]), True)
            (out.mean.sum() + out.log_precision.sum()).backward()
            grads.append([p.grad.clone() for p in layer.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_gradient_of_n_eff_can_be_dropped():
    belief = make_belief()
    gradients = []
    for keep in [True, False]:
        layer = make_layer(n_eff_gradient=keep)
        out = layer(belief)
        out.log_precision.sum().backward()
        gradients.append(layer.self_attn.in_proj_weight.grad)
    torch.testing.assert_close(
        make_layer()(belief), make_layer(n_eff_gradient=False)(belief)
    )
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"activation": "swiglu"},
        {"implementation": "eager"},
        {"activation": "geglu", "jacobian": "first"},
        {"jacobian": "hutchinson"},
        {"variance_rule": "row"},
        {"ffn": True},
        {"hooked": True},
    ],
    ids=label,
)
def test_gradient_of_the_jacobian_can_be_dropped(config, granularity):
    config = dict(config)
    hooked, ffn = config.pop("hooked", False), config.pop("ffn", False)
    if "variance_rule" in config and granularity == "token":
        return
    belief = make_belief()
    gradients, outputs = [], []
    for keep in [True, False]:
        if ffn:
            torch.manual_seed(0)
            modules = nn.Tanh(), nn.Linear(8, 8, dtype=torch.float64)
            config["options"] = {"ffn": nn.Sequential(*modules)}
        layer = make_layer(
            jacobian_gradient=keep, granularity=granularity, **config
        )
        if hooked:
            layer.linear1.register_forward_hook(lambda *_: None)
        out, trace = layer.step(belief)
        assert trace.log_growth.requires_grad is keep
        (out.log_precision.sum() + out.mean.square().sum()).backward()
        linear = layer.linear1 if layer.ffn is None else layer.ffn[1]
        gradients.append(linear.weight.grad)
        outputs.append(Belief(*(x.detach() for x in out)))
    torch.testing.assert_close(*outputs)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4
    layer.zero_grad()
    out = layer(belief)
    out.mean.square().sum().backward()  # what is left is of the mean alone
    torch.testing.assert_close(linear.weight.grad, gradients[1])


def test_forward_mode_sees_no_jacobian_either():
    layer = make_layer(jacobian_gradient=False, activation="swiglu")
    belief = make_belief()

    def growth(mean):
        return layer.step(Belief(mean, belief.log_precision))[1].log_growth

    _, along = torch.func.jvp(growth, (belief.mean,), (belief.mean,))
    assert (along == 0).all()


# misuse --------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments,options,words",
    [
        ((8, 3), {}, ["d_model", "nhead=3", "got 8"]),
        ((0, 2), {}, ["d_model", "positive", "0"]),
        ((8, -1), {}, ["nhead", "positive"]),
        ((8, 2.0), {}, ["nhead", "2.0"]),
        ((8, 2, 0), {}, ["dim_feedforward"]),
        ((8, 2, 12, 1.0), {}, ["dropout", "[0, 1)", "1.0"]),
        ((8, 2, 12, 0.1, "sin"), {}, ["activation", "gelu", "'sin'"]),
        ((8, 4), {"num_kv_heads": 3}, ["num_kv_heads", "nhead=4", "3"]),
        ((6, 2), {"rotary_base": 1e4}, ["rotary_base", "even", "3"]),
        ((8, 2), {"rotary_base": 0.0}, ["rotary_base", "(0, inf)", "0.0"]),
        ((8, 2), {"rotary_base": -2.0}, ["rotary_base", "-2.0"]),
        ((8, True), {}, ["nhead", "positive", "True"]),
        ((8, 2), {"norm": "batch"}, ["norm", "rmsnorm", "'batch'"]),
    ],
)
def test_constructor_errors_name_the_argument(arguments, options, words):
    with pytest.raises(ValueError, match=f"^{words[0]}: ") as error:
        BFTLayer(*arguments, **options)
    for word in words:
        assert word in str(error.value)


def test_a_text_for_a_number_of_the_constructor_is_named():
    for name in ["dropout", "rotary_base"]:
        with pytest.raises(TypeError, match=f"^{name}: expected a number"):
            BFTLayer(8, 2, **{name: "0.5"})


@pytest.mark.parametrize(
    "option,value",
    [
        ("granularity", "word"),
        ("reading", "variance"),
        ("prior_scale", "flat"),
        ("prior_dof", 0.0),
        ("prior_dof", float("nan")),
        ("prior_dof", float("inf")),
        ("process_noise", -1.0),
        ("process_noise", float("inf")),
        ("jacobian", "none"),
        ("variance_rule", "full"),
        ("implementation", "fast"),
        ("innovation", "sum"),
        ("dynamics", "free"),
        ("stationary_variance", 0.0),
        ("stationary_variance", 2.0),  # which a random walk does not read
    ],
)
def test_config_errors_name_the_option(option, value):
    with pytest.raises(ValueError, match=f"^{option}: expected .* got"):
        BFTConfig(**{option: value})


def test_config_refuses_a_row_rule_per_token_and_text_for_a_number():
    with pytest.raises(ValueError, match="^variance_rule: .*'token'"):
        BFTConfig(variance_rule="row", granularity="token")
    with pytest.raises(TypeError, match="^prior_dof: expected float"):
        BFTConfig(prior_dof="1")


def changed(**fields):
    return make_belief()._replace(**fields)


BAD_BELIEFS = {
    "tensor": (lambda: make_belief().mean, TypeError, "belief: .*Tensor"),
    "2-d": (
        lambda: Belief(*(x[0] for x in make_belief())),
        ValueError,
        r"belief.mean: expected shape \(B, T, 8\), got \(5, 8\)",
    ),
    "width": (
        lambda: make_belief(d_model=6),
        ValueError,
        r"belief.mean: .*\(B, T, 8\), got \(2, 5, 6\)",
    ),
    "empty": (
        lambda: make_belief(tokens=0),
        ValueError,
        r"belief.mean: .*at least one token.*\(2, 0, 8\)",
    ),
    "integers": (
        lambda: changed(mean=torch.ones(2, 5, 8, dtype=torch.int64)),
        TypeError,
        "belief.mean: .*int64",
    ),
    "nan mean": (
        lambda: changed(mean=torch.full((2, 5, 8), torch.nan).double()),
        ValueError,
        "belief.mean: expected finite.*80 of 80",
    ),
    "infinite mean": (
        lambda: changed(mean=torch.full((2, 5, 8), torch.inf).double()),
        ValueError,
        "belief.mean: expected finite",
    ),
    "nan precision": (
        lambda: changed(log_precision=make_belief().mean.log()),
        ValueError,
        "belief.log_precision: expected finite",
    ),
    "zero precision": (
        lambda: changed(log_precision=torch.zeros(2, 5, 8).log()),
        ValueError,
        "belief.log_precision: expected finite",
    ),
    "precision of other length": (
        lambda: changed(log_precision=torch.zeros(2, 4, 8)),
        ValueError,
        r"belief.log_precision: .*\(2, 5, 8\) or \(2, 5, 1\), got \(2, 4, 8\)",
    ),
    "lists": (
        lambda: Belief([[[1.0] * 8]], [[[1.0] * 8]]),
        TypeError,
        "belief.mean: expected a tensor, got list",
    ),
    "precision of no shape": (
        lambda: changed(log_precision=torch.tensor(0.0)),
        ValueError,
        r"belief.log_precision: .*got \(\)",
    ),
    "precision without features": (
        lambda: changed(log_precision=torch.zeros(2, 5)),
        ValueError,
        r"belief.log_precision: .*got \(2, 5\)",
    ),
}


@pytest.mark.parametrize("make", [make_layer, make_encoder])
@pytest.mark.parametrize("traces", [True, ()])
def test_traces_that_are_no_list_are_refused_before_anything_changes(
    make, traces
):
    """``trace=True`` is what other libraries say: a cache must not grow."""
    model, belief = make(), make_belief()
    caches = [KeyValueCache(), KeyValueCache()]
    many = isinstance(model, BFTEncoder)
    options = {"caches": caches} if many else {"cache": caches[0]}
    with pytest.raises(TypeError, match=r"^traces: expected a list.*step\(\)"):
        model(belief, is_causal=True, traces=traces, **options)
    assert [cache.length for cache in caches] == [0, 0]


def test_a_stack_that_fails_leaves_the_traces_alone():
    encoder, traces = make_encoder(2), []
    encoder.layers[1].norm1 = nn.Identity()
    with pytest.raises(TypeError, match="^norm1: "):
        encoder(make_belief(), traces=traces)
    assert traces == []


@pytest.mark.parametrize("mask", [[[True] * 5] * 2, None])
def test_a_padding_mask_that_is_no_tensor_is_named(mask):
    mask = np.zeros((2, 5), bool) if mask is None else mask
    with pytest.raises(TypeError, match="^src_key_padding_mask: .*tensor"):
        make_layer()(make_belief(), src_key_padding_mask=mask)


@pytest.mark.parametrize("case", BAD_BELIEFS)
def test_bad_beliefs_are_named(case):
    make, kind, words = BAD_BELIEFS[case]
    with pytest.raises(kind, match="^" + words):
        make_layer()(make())


NAN = float("nan")
BAD_MASKS = {
    "transposed": ("src_mask", torch.zeros(7, 5).bool(), ValueError),
    "short": ("src_mask", torch.zeros(5, 4).bool(), ValueError),
    "one row": ("src_mask", torch.zeros(1, 5).bool(), ValueError),
    "1-d": ("src_mask", torch.zeros(5).bool(), ValueError),
    "per sequence": ("src_mask", torch.zeros(2, 5, 5).bool(), ValueError),
    "4-d": ("src_mask", torch.zeros(2, 2, 5, 5).bool(), ValueError),
    "integers": ("src_mask", torch.zeros(5, 5).int(), TypeError),
    "list": ("src_mask", [[False] * 5] * 5, TypeError),
    "nan": ("src_mask", torch.full((5, 5), NAN), ValueError),
    "+inf": ("src_mask", torch.full((5, 5), torch.inf), ValueError),
    "padding short": (
        "src_key_padding_mask",
        torch.zeros(2, 4).bool(),
        ValueError,
    ),
    "padding transposed": (
        "src_key_padding_mask",
        torch.zeros(5, 2).bool(),
        ValueError,
    ),
    "padding broadcast": (
        "src_key_padding_mask",
        torch.zeros(1, 5).bool(),
        ValueError,
    ),
    "padding integers": (
        "src_key_padding_mask",
        torch.zeros(2, 5).long(),
        TypeError,
    ),
    "padding nan": (
        "src_key_padding_mask",
        torch.full((2, 5), NAN),
        ValueError,
    ),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_bad_masks_are_named(case):
    name, mask, kind = BAD_MASKS[case]
    with pytest.raises(kind, match=f"^{name}: expected .*got "):
        make_layer()(make_belief(), **{name: mask})


def test_state_dict_of_another_granularity_is_refused():
    token = make_layer(granularity="token")
    with pytest.raises(RuntimeError, match="log_process_noise"):
        make_layer().load_state_dict(token.state_dict())


def test_nan_parameters_do_not_stay_silent():
    layer = make_layer()
    with torch.no_grad():
        layer.self_attn.in_proj_weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="belief"):
        layer(layer(make_belief()))


def test_repr_shows_the_options():
    assert "reading='prediction'" in repr(make_layer())


# where it is built, copied and kept ------------------------------------------

ESTIMATED = [
    {"jacobian": "hutchinson"},
    {"variance_rule": "row", "norm_first": False},
    {"granularity": "token", "jacobian": "hutchinson"},
]


def through_file(layer, path):
    torch.save(layer, path)
    return torch.load(path, weights_only=False)


def through_safetensors(layer, path):
    safetensors.torch.save_file(layer.state_dict(), path)
    other = randomise(make_layer_like(layer), 5).eval()
    other.load_state_dict(safetensors.torch.load_file(path))
    return other


def through_meta(layer, path):
    with torch.device("meta"):
        other = make_layer_like(layer)
    assert all(p.is_meta for p in other.parameters())
    other.to_empty(device="cpu")
    for parameter in other.parameters():
        nn.init.constant_(parameter, torch.nan)  # what memory may hold
    other.load_state_dict(layer.state_dict())
    return other.eval()


def assigned_to_meta(layer, path):
    with torch.device("meta"):
        other = make_layer_like(layer)
    other.load_state_dict(layer.state_dict(), assign=True)
    return other.eval()


def by_default_device(layer, path):
    torch.set_default_device("meta")
    try:
        other = make_layer_like(layer)
    finally:
        torch.set_default_device(None)
    other.load_state_dict(layer.state_dict(), assign=True)
    return other.eval()


def in_half_and_back(layer, path):
    other = copy.deepcopy(layer).half().double()
    other.load_state_dict(layer.state_dict())
    return other


def make_layer_like(layer):
    return BFTLayer(
        *(D_MODEL, HEADS, WIDTH, 0.0, "gelu"),
        norm_first=layer.norm_first,
        dtype=torch.float64,
        config=layer.config,
    )


@pytest.mark.parametrize("config", ESTIMATED, ids=label)
@pytest.mark.parametrize(
    "way",
    [
        through_file,
        through_safetensors,
        through_meta,
        assigned_to_meta,
        by_default_device,
        in_half_and_back,
        lambda layer, path: copy.deepcopy(layer),
    ],
    ids=label,
)
def test_estimates_are_the_same_wherever_the_layer_has_been(
    way, config, tmp_path
):
    """Their signs are no parameter, and must not be lost or made up."""
    layer = make_layer(**config)
    other = way(layer, tmp_path / "layer")
    belief = make_belief()
    torch.testing.assert_close(other(belief), layer(belief), rtol=0, atol=0)


def test_plain_weights_on_a_layer_built_on_no_device():
    """They bring no Q: it starts where the configuration says."""
    plain = nn.TransformerEncoderLayer(D_MODEL, HEADS, WIDTH, batch_first=True)
    with torch.device("meta"):
        layer = BFTLayer(
            *(D_MODEL, HEADS, WIDTH), config=BFTConfig(process_noise=0.3)
        )
    layer.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(
        layer.log_process_noise.exp(), torch.full((D_MODEL,), 0.3)
    )
    layer(make_belief(dtype=torch.float32))


# from_torch ------------------------------------------------------------------


def plain_layer(**options):
    return nn.TransformerEncoderLayer(
        D_MODEL, HEADS, WIDTH, 0.2, batch_first=True, **options
    )


def replace(name, value):
    def spoil(layer):
        parent, _, last = name.rpartition(".")
        setattr(layer.get_submodule(parent), last, value)

    return spoil


class Own(nn.TransformerEncoderLayer):
    pass


@pytest.mark.parametrize(
    "spoil,name",
    [
        (replace("linear1", nn.Sequential()), "layer.linear1"),
        (replace("norm2", nn.RMSNorm(D_MODEL)), "layer.norm2"),
        (replace("dropout1", nn.Identity()), "layer.dropout1"),
        (
            replace(
                "self_attn",
                nn.MultiheadAttention(D_MODEL, HEADS, add_zero_attn=True),
            ),
            "layer.self_attn",
        ),
        (
            replace(
                "self_attn",
                nn.MultiheadAttention(D_MODEL, HEADS, add_bias_kv=True),
            ),
            "layer.self_attn",
        ),
        (
            lambda layer: layer.linear2.register_forward_hook(print),
            "layer.linear2",
        ),
        (
            lambda layer: nn.utils.parametrizations.weight_norm(layer.linear1),
            "layer.linear1",
        ),
        (lambda layer: setattr(layer, "__class__", Own), "layer"),
    ],
    ids=label,
)
def test_from_torch_names_what_it_cannot_take_over(spoil, name):
    layer = plain_layer()
    spoil(layer)
    with pytest.raises(TypeError, match=f"^{name}: expected .*got "):
        BFTLayer.from_torch(layer)


@pytest.mark.parametrize(
    "name", ["dropout", "dropout1", "dropout2", "self_attn.dropout"]
)
def test_from_torch_refuses_dropouts_that_differ(name):
    layer = plain_layer()
    if name == "self_attn.dropout":
        layer.self_attn.dropout = 0.5
    else:
        layer.get_submodule(name).p = 0.5
    with pytest.raises(ValueError, match=r"^layer: .*\[0.2, 0.5\]"):
        BFTLayer.from_torch(layer)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "activation",
    ["gelu", F.silu, nn.ReLU(inplace=True), nn.PReLU()],
    ids=label,
)
def test_from_torch_computes_the_same_in_the_limit(activation, bias, first):
    plain = plain_layer(activation=activation, bias=bias, norm_first=first)
    randomise(plain).eval()
    plain.norm1.eps, plain.norm2.eps = 1e-2, 1e-3
    plain.linear2.weight.requires_grad_(False)
    config = BFTConfig(prior_scale="unit", process_noise=1e20)
    ours = BFTLayer.from_torch(plain, config)
    x = make_belief(dtype=torch.float32).mean
    low = Belief(x, torch.full_like(x, -40.0))
    torch.testing.assert_close(ours(low).mean, plain(x), rtol=1e-4, atol=1e-4)
    assert ours.norm1.eps == 1e-2
    assert (ours.dropout_p, ours.training) == (0.2, False)
    frozen = {n for n, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"linear2.weight"}
    if isinstance(activation, nn.Module):
        assert ours.activation is not plain.activation


@pytest.mark.parametrize("tokens", [5, 200])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_shapes_are_found_on_the_meta_device(tokens, norm_first, granularity):
    config = BFTConfig(granularity=granularity)
    with torch.device("meta"):
        layer = BFTLayer(8, 2, 12, norm_first=norm_first, config=config)
        encoder = BFTEncoder(layer, 2)
        x = torch.randn(2, tokens, 8)
        hidden = torch.zeros(2, tokens, dtype=torch.bool)
        mask = torch.zeros(tokens, tokens)
    out = encoder(x, mask, hidden, True)
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape
    assert layer(Belief(x, x)).log_precision.shape[-1] == (
        8 if granularity == "feature" else 1
    )
    assert MLPPrecision(8).to("meta")(x).shape == (2, tokens, 1)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "token"},
        {"jacobian": "first", "prior_scale": "unit", "prior_dof": 2.5},
        {"reading": "value", "project_variance": False},
        {"reading": "mean", "activation": "silu"},
        {"variance_rule": "row", "activation": "swiglu"},
        {"options": {"norm": "rmsnorm", "num_kv_heads": 1}},
        RETURNING,
        RETURNING | {"granularity": "token"},
        DIFFERENCE,
        DIFFERENCE | {"granularity": "token"},
    ],
    ids=label,
)
def test_the_readable_layer_is_the_fast_one(config, norm_first):
    """Everything that a step gives, and every gradient of all of it."""
    belief = make_belief(tokens=7)
    hidden = left_padding(2, 7, [7, 4])
    found = []
    for way in ["eager", "auto"]:
        layer = make_layer(norm_first=norm_first, implementation=way, **config)
        given = Belief(*(x.clone().requires_grad_() for x in belief))
        after, trace = layer.step(given, None, hidden, True)
        observed = trace.observation
        seen = observed.log_precision.masked_fill(hidden.unsqueeze(-1), 0.0)
        outputs = [*after, observed.innovation, seen, observed.n_eff]
        outputs += [observed.weights, trace.gain, trace.log_growth]
        outputs += [trace.log_updated_precision]
        loss = sum((x * x.detach().cos()).sum() for x in outputs)
        leaves = [*given, *layer.parameters()]
        grads = torch.autograd.grad(loss, leaves)
        found.append([*outputs, *grads])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
