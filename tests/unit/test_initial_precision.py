"""Where precision comes from."""

import math

import numpy as np
import pytest
import torch

from bft_ref import Belief, ItemPrecision, MLPPrecision
from bft_ref.initial_precision import InitialPrecision
from tests.factories import make_layer

KINDS = {
    "item": lambda **k: ItemPrecision(10, **k),
    "mlp": lambda **k: MLPPrecision(8, **k),
}


def inputs(kind):
    if kind == "item":
        return torch.tensor([[0, 3, 9], [3, 3, 1]])
    return torch.randn(2, 3, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("initial", [1e-30, 2.5, 3, 1e30])
def test_everything_starts_at_the_initial_precision(kind, initial):
    for features in [1, 8]:
        module = KINDS[kind](features=features, initial=initial)
        log = module(inputs(kind))
        assert log.shape == (2, 3, features)
        expected = torch.full_like(log, math.log(initial))
        torch.testing.assert_close(log, expected)


def test_an_item_has_one_precision_wherever_it_stands():
    module = ItemPrecision(10)
    torch.nn.init.normal_(module.log_precision.weight)
    log = module(inputs("item"))
    assert log[0, 1] == log[1, 0] == log[1, 1]
    assert log[0, 0] != log[0, 1]
    log.sum().backward()
    counts = module.log_precision.weight.grad.squeeze(-1)
    assert counts.tolist() == [1, 1, 0, 3, 0, 0, 0, 0, 0, 1]


def test_parameters_of_an_item_precision():
    count = sum(p.numel() for p in ItemPrecision(1000, 1).parameters())
    assert count == 1000  # 1/d of the table


def test_mlp_is_its_two_layers():
    module = MLPPrecision(8, hidden=5, initial=0.4)
    torch.nn.init.normal_(module.layers[-1].weight)
    h = inputs("mlp")
    first, second = module.layers[0], module.layers[-1]
    hidden = torch.nn.functional.gelu(h @ first.weight.T + first.bias)
    expected = hidden @ second.weight.T + second.bias
    torch.testing.assert_close(module(h), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_log_precision_is_float32_under_autocast_and_in_bfloat16(kind):
    module, x = KINDS[kind](initial=0.37), inputs(kind)
    if kind == "mlp":
        torch.nn.init.normal_(module.layers[-1].weight)
    plain = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
        if kind == "mlp":
            module(x.bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain)
    assert module.bfloat16()(x).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_initial_precision_learns_through_a_layer(kind):
    module, layer = KINDS[kind](), make_layer(dtype=torch.float32)
    out = layer(Belief(torch.randn(2, 3, 8), module(inputs(kind))))
    out.mean.square().sum().backward()
    for p in module.parameters():
        if p is not getattr(module, "layers", [None])[0]:
            assert p.grad.isfinite().all()
    last = list(module.parameters())[-1]
    assert last.grad.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("initial", [0.0, -1.0, math.nan, math.inf])
def test_bad_initial_precisions_are_named(kind, initial):
    with pytest.raises(ValueError, match="^initial: .*got"):
        KINDS[kind](initial=initial)


def test_where_an_items_precision_comes_from():
    frequency = np.array([0, 1, 3, 8, 20])
    given = {"num_items": 6, "d_model": 4, "initial": 2.5}
    ids_ = torch.arange(6)[None]
    embedding = torch.randn(1, 6, 4)
    for source in ("item", "mlp", "unit"):
        log_tau = InitialPrecision(source, **given)(ids_, embedding)
        assert log_tau.shape == (1, 6, 1)
        torch.testing.assert_close(
            log_tau, torch.full_like(log_tau, math.log(2.5))
        )
    fixed = InitialPrecision(
        "frequency", frequency=frequency, power=-0.5, **given
    )
    tau = fixed(ids_, embedding).exp()[0, 1:5, 0]
    torch.testing.assert_close(
        tau / tau[0], torch.tensor((frequency[1:] + 1) / 2.0).float() ** -0.5
    )
    assert tau.log().mean().exp() == pytest.approx(2.5, rel=1e-5)
    shuffled = InitialPrecision(
        "shuffled", frequency=frequency, power=-0.5, **given
    )
    other = shuffled(ids_, embedding).exp()[0, 1:5, 0]
    torch.testing.assert_close(other.sort().values, tau.sort().values)
    assert not torch.equal(other, tau)
    assert not list(fixed.parameters()) + list(shuffled.parameters())
    with pytest.raises(ValueError, match="frequency"):
        InitialPrecision("frequency", **given)
    with pytest.raises(ValueError, match="source: expected one of"):
        InitialPrecision("none", **given)
