"""Jacobians by random signs: their averages are the exact quantities."""

from functools import partial

import pytest
import torch

from bft_ref import delta
from bft_ref.jacobian_estimates import (
    hutchinson_growth,
    jacobian_product,
    row_growth,
    row_variance,
)
from tests.unit.test_delta import NAMES, NORMS, Net


def every_sign(d):
    pair = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return torch.cartesian_prod(*[pair] * d)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_jacobian_diag_is_jacrevs_diagonal(name, norm, bare):
    net = Net(name, norm, bare=bare)
    ffn, normed = net.evaluated()
    torch.testing.assert_close(ffn.output, net(net.x))
    dense = net.jacobian()
    found = delta.jacobian_diag(ffn, normed)
    torch.testing.assert_close(found, dense.diagonal(dim1=1, dim2=2))
    trace = delta.jacobian_trace(ffn, normed)
    torch.testing.assert_close(trace, found.mean(-1, keepdim=True))
    vector = torch.linspace(-1, 2, 18, dtype=torch.float64).view(3, 6)
    product = jacobian_product(ffn, vector, normed)
    torch.testing.assert_close(product, (dense @ vector[..., None])[..., 0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_gradcheck_of_the_jacobians(name, norm):
    net = Net(name, norm, d=4)
    leaves = [net.x, net.w_in, net.w_out, net.b_in]
    leaves = [x.clone().requires_grad_() for x in leaves]
    vector = torch.linspace(-1, 2, 12, dtype=torch.float64).view(3, 4)

    def run(kind, x, w_in, w_out, b_in):
        net.w_in, net.w_out, net.b_in = w_in, w_out, b_in
        ffn, normed = net.evaluated(x)
        if kind == "product":
            return jacobian_product(ffn, vector, normed)
        return getattr(delta, f"jacobian_{kind}")(ffn, normed)

    for kind in ["diag", "trace", "product"]:
        assert torch.autograd.gradcheck(
            partial(run, kind), leaves, fast_mode=True
        )


def test_hutchinson_averages_to_the_diagonal_over_all_signs():
    """Every pair of probes: the expectation itself, without sampling."""
    net = Net(d=4)
    net.w_out *= 0.1  # nothing is cut at zero
    net.x = net.x[:1]
    signs = every_sign(4)
    one, two = signs.repeat(16, 1), signs.repeat_interleave(16, 0)
    many = net.x.expand(256, 4).contiguous()
    probes = torch.stack([one, two])
    y, growth = hutchinson_growth(net, many, probes)
    _, token = hutchinson_growth(net, many, probes, True)
    j = net.jacobian()[0].diag()
    torch.testing.assert_close(y, net(many))
    torch.testing.assert_close(growth.mean(0), (1 + j).square())
    torch.testing.assert_close(token.mean(), (1 + j.mean()).square())


def test_hutchinson_is_unbiased_within_its_standard_error():
    net = Net(d=6)
    net.w_out *= 0.1
    many = net.x[:1].expand(4000, -1).contiguous()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (2, 4000, 6), generator=generator).double()
    _, draws = hutchinson_growth(net, many, 2 * bits - 1)
    error = draws.std(0) / 4000**0.5
    j = net.jacobian()[0].diag()
    assert ((draws.mean(0) - (1 + j).square()).abs() < 4 * error).all()


def test_one_probe_twice_estimates_the_row_sum_instead():
    net = Net(d=4)
    net.x = net.x[:1]
    total = torch.zeros(1, 4, dtype=torch.float64)
    for row in every_sign(4):
        probes = row.expand(2, 1, 4)
        total += hutchinson_growth(net, net.x, probes)[1] / 16
    jacobian = torch.eye(4).double() + net.jacobian()[0]
    torch.testing.assert_close(total[0], jacobian.square().sum(-1))


def test_hutchinson_never_returns_a_negative_growth():
    net = Net(d=6)
    net.w_out *= 5
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (2, 3, 6), generator=generator).double()
    growth = hutchinson_growth(net, net.x, 2 * bits - 1)[1]
    assert (growth >= 0).all()
    assert (growth == 0).any()


@pytest.mark.parametrize("norm", NORMS)
def test_row_rule_averages_to_the_first_order_variance(norm):
    net = Net("swiglu", norm, d=4)
    ffn, normed = net.evaluated()
    log = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4)
    total = torch.zeros(3, 4, dtype=torch.float64)
    for row in every_sign(4):
        total += (
            row_variance(
                log,
                row.expand(3, 4),
                lambda x: jacobian_product(ffn, x, normed),
            )
            / 16
        )
    jacobian = torch.eye(4).double() + net.jacobian()
    expected = (jacobian.square() @ (-log).exp()[..., None])[..., 0]
    torch.testing.assert_close(total, expected)
    diagonal = (1 + delta.jacobian_diag(ffn, normed)).square() / log.exp()
    assert (total >= diagonal).all()
    assert (total > 1.02 * diagonal).any()


@pytest.mark.parametrize("size", [-600.0, 0.0, 600.0])
def test_row_growth_is_the_row_variance_times_precision_at_any_size(size):
    net = Net("swiglu", "layernorm", d=4)
    ffn, normed = net.evaluated()
    log = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4)
    probe = torch.tensor([1.0, -1.0, -1.0, 1.0]).double().expand(3, 4)
    row = (
        probe,
        lambda x: jacobian_product(ffn, x, normed),
    )
    expected = (row_variance(log, *row) * log.exp()).log()
    torch.testing.assert_close(row_growth(log + size, *row), expected)
