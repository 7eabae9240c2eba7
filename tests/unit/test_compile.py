"""torch.compile without graph breaks, torch.export, and the same numbers."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from bft_ref import Belief
from tests.factories import (
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
)


def step(model, belief, hidden):
    """Belief and gradients of one training step."""
    model.zero_grad(set_to_none=True)
    out = model(belief, None, hidden, True)
    loss = out.mean.square().mean() + out.log_precision.mean()
    loss.backward()
    return out, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make,config",
    [
        (
            make_layer,
            {
                "norm_first": False,
                "granularity": "token",
                "activation": "swiglu",
            },
        ),
        (make_encoder, {"reading": "mean", "prior_scale": "unit"}),
    ],
    ids=["post-norm token layer", "encoder"],
)
def test_compiled_training_step_without_graph_breaks(make, config):
    model = make(dtype=torch.float32, **config).train()
    belief = make_belief(dtype=torch.float32)
    hidden = left_padding(2, 5, [5, 3])
    expected = step(model, belief, hidden)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    found = step(compiled, belief, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"variance_rule": "row"},
        {"jacobian": "hutchinson", "granularity": "token"},
        {"activation": nn.functional.elu},
        {"dropout": 0.2},
        {"activation": "swiglu", "jacobian_gradient": False},
        {"activation": "geglu", "granularity": "token"},
        {"implementation": "chunked", "norm_first": False},
        {
            "options": {
                "norm": "rmsnorm",
                "num_kv_heads": 1,
                "rotary_base": 100.0,
            }
        },
    ],
    ids=label,
)
def test_every_option_is_captured_in_one_graph(config):
    """The front end alone: what breaks a graph breaks it there."""
    model = make_encoder(2, dtype=torch.float32, **config)
    belief = make_belief(dtype=torch.float32)
    hidden = left_padding(2, 5, [5, 3])
    expected = model(belief, None, hidden, True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(belief, None, hidden, True), expected, rtol=1e-5, atol=1e-5
    )
    model.train()
    out = compiled(belief, None, hidden, True)
    (out.mean.sum() + out.log_precision.sum()).backward()
    assert all(
        p.grad is None or p.grad.isfinite().all() for p in model.parameters()
    )


def test_compiled_graphs_do_not_read_values():
    """NaN passes a compiled layer; the check is for eager mode only."""
    layer = make_layer(dtype=torch.float32)
    belief = make_belief(dtype=torch.float32)
    bad = Belief(belief.mean * torch.nan, belief.log_precision)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert compiled(bad).mean.isnan().all()
    with pytest.raises(ValueError, match="belief.mean"):
        layer(bad)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "token", "norm_first": False},
        {"variance_rule": "row"},
    ],
    ids=label,
)
def test_export(config):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = make_encoder(2, dtype=torch.float32, **config)

        def forward(self, mean, log_precision, hidden):
            belief = Belief(mean, log_precision)
            return tuple(self.encoder(belief, None, hidden, True))

    model = Encoder().eval()
    belief, hidden = (
        make_belief(dtype=torch.float32),
        left_padding(2, 5, [5, 3]),
    )
    program = torch.export.export(model, (*belief, hidden))
    other = make_belief(dtype=torch.float32, seed=9)
    found = program.module()(*other, hidden)
    torch.testing.assert_close(found, model(*other, hidden))
    names = set(program.state_dict)
    assert "encoder.layers.0.log_process_noise" in names


def compilations(run, lengths):
    """How often ``run(length)`` was compiled, all lengths considered."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = run(counter)
    for length in lengths:
        run(length)
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "token", "norm_first": False},
        {"dropout": 0.2},
        {"variance_rule": "row"},
        {"options": {"num_kv_heads": 1, "rotary_base": 10.0}},
    ],
    ids=label,
)
def test_nine_lengths_are_compiled_twice(config):
    """As nn.TransformerEncoder: the second length leaves it open."""
    model = make_encoder(1, dtype=torch.float32, **config)
    model.train("dropout" in config)

    def run(backend):
        compiled = torch.compile(model, fullgraph=True, backend=backend)

        def step(tokens):
            belief = make_belief(tokens=tokens, dtype=torch.float32)
            hidden = left_padding(2, tokens, [tokens, 3])
            out = compiled(belief, None, hidden, True)
            (out.mean.sum() + out.log_precision.sum()).backward()
            if not model.training:
                expected = model(belief, None, hidden, True)
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

        return step

    assert compilations(run, range(5, 14)) <= 2


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"granularity": "token", "norm_first": False},
        {"variance_rule": "row"},
        {"activation": "swiglu"},
        {"options": {"num_kv_heads": 1, "rotary_base": 10.0}},
    ],
    ids=label,
)
def test_an_export_with_an_open_length_is_right_at_any(config):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = make_encoder(1, dtype=torch.float32, **config)

        def forward(self, mean, log_precision, hidden):
            belief = Belief(mean, log_precision)
            return tuple(self.encoder(belief, None, hidden, True))

    model = Encoder().eval()

    def inputs(batch, tokens):
        belief = make_belief(batch, tokens, dtype=torch.float32)
        return *belief, left_padding(
            batch, tokens, [tokens] * (batch - 1) + [1]
        )

    Dim = torch.export.Dim
    sizes = {0: Dim("batch"), 1: Dim("tokens")}
    if torch.__version__ < "2.12":  # it cannot prove that T <= 2T
        sizes = dict.fromkeys(sizes, Dim.AUTO)
    program = torch.export.export(
        model, inputs(2, 5), dynamic_shapes=(sizes, sizes, sizes)
    ).module()
    for batch, tokens in [(2, 5), (2, 2), (3, 11), (5, 40)]:
        found = program(*inputs(batch, tokens))
        expected = model(*inputs(batch, tokens))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
