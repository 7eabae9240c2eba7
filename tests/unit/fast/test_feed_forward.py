"""The kernels with hand-written backward passes equal their plain forms."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from bft_ref import delta
from bft_ref.delta import ACTIVATIONS, GATED
from bft_ref.fast import feed_forward
from bft_ref.fast import weighted_columns as columns
from bft_ref.fast.feed_forward import activated
from bft_ref.fast.norm import Standardise

F64 = torch.float64
CASES = list(
    itertools.product(
        ["gelu", "relu", "silu", "tanh", "reglu", "geglu", "swiglu"],
        [None, "layernorm", "rmsnorm"],
        [True, False],
        [True, False],
    )
)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, the last one ragged, even at the size of a test."""
    monkeypatch.setattr(feed_forward, "HIDDEN_BLOCK", 9 * 64)
    monkeypatch.setattr(feed_forward, "LEAST_ROWS", 64)
    monkeypatch.setattr(feed_forward, "GATED_ROWS", 64)
    monkeypatch.setattr(columns, "ROWS", 4)
    monkeypatch.setattr(columns, "HEADS", 1)
    monkeypatch.setitem(columns.BLOCK, "cpu", 64)


def leaf(*shape, scale=0.4):
    return (scale * torch.randn(*shape, dtype=F64)).requires_grad_()


def weighed(outputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return sum(
        (y * torch.randn(y.shape, generator=generator, dtype=F64)).sum()
        for y in outputs
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "norm", "exact", "token"), CASES)
def test_one_pass_equals_the_ffn_and_its_jacobian(
    small_blocks, activation, norm, exact, token, bias
):
    torch.manual_seed(3)
    activation, gated = delta.activation_function(activation)
    hidden = 18 if gated else 9
    h, w_in, w_out = leaf(2, 70, 6), leaf(hidden, 6), leaf(6, 9)
    gamma, beta = leaf(6), leaf(6)
    b_in, b_out = (leaf(hidden), leaf(6)) if bias else (None, None)
    if norm == "rmsnorm" and not bias:
        beta = None  # as in Llama: no constant part at all
    weights = (w_in, b_in, w_out, b_out, activation, gated)
    leaves = [h, w_in, w_out]
    leaves += [x for x in (gamma, beta) if norm and x is not None]
    leaves += [b_in, b_out] if bias else []

    def normed():
        if norm is None:
            return None, h
        n = delta.normalise(h, gamma, beta, centred=norm == "layernorm")
        return n, n.output

    n, x = normed()
    ffn = delta.feed_forward(x, *weights, norm=n)
    jacobian = delta.jacobian_trace if token else delta.jacobian_diag
    plain = ffn.output, delta.log_square(1 + jacobian(ffn, n, exact))
    n, x = normed()
    quick = feed_forward.feed_forward_growth(
        x, *weights, norm=n, exact=exact, token=token
    )
    torch.testing.assert_close(quick, plain, rtol=1e-11, atol=1e-12)
    grads = [
        torch.autograd.grad(
            weighed(y), leaves, allow_unused=True, materialize_grads=True
        )
        for y in (quick, plain)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("thinned", [True, False])
@pytest.mark.parametrize("name", ["gelu", *GATED.values()])
def test_first_and_second_derivatives_of_the_pass(
    small_blocks, name, thinned, shifted, token
):
    torch.manual_seed(5)
    shapes = [(3, 2), (8, 2), (8,), (2, 4), (8, 1 if token else 2), (8,)]
    inputs = [leaf(*shape) for shape in shapes]
    if not shifted:
        inputs[5] = None
    keep = torch.tensor([0.0, 2, 2, 0]).double().expand(3, 4).clone()

    def function(*inputs):
        *outputs, _ = feed_forward.linearised_feed_forward(
            *inputs, keep if thinned else None, name, True
        )
        return tuple(outputs)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    found = function(*inputs)
    rest = keep if thinned else None
    plain = feed_forward._plain_feed_forward(*inputs, rest, name, True)
    torch.testing.assert_close(found, plain[:3], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_without_its_gradient_the_jacobian_is_a_constant(activation, token):
    torch.manual_seed(2)
    activation, gated = delta.activation_function(activation)
    h, w_in = leaf(2, 7, 6), leaf(18 if gated else 9, 6)
    w_out, gamma = leaf(6, 9), leaf(6)
    leaves = [h, w_in, w_out, gamma]
    found = {}
    for way in (delta, feed_forward):
        for gradient in (True, False):
            n = delta.normalise(h, gamma, None, centred=False)
            output, growth = way.feed_forward_growth(
                *(n.output, w_in, None, w_out, None, activation, gated),
                norm=n,
                token=token,
                jacobian_gradient=gradient,
            )
            assert growth.requires_grad is gradient
            grads = torch.autograd.grad(weighed([output]), leaves)
            found[way, gradient] = output, growth.detach(), grads
    first, *rest = found.values()
    for other in rest:
        torch.testing.assert_close(other, first, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("token", [True, False])
def test_bfloat16_is_as_near_as_it_can_be(token):
    torch.manual_seed(0)
    weights = [torch.randn(*s) * 0.3 for s in [(32, 8), (8, 16)]]
    h = torch.randn(50, 8)

    def growth(dtype):
        w_in, w_out = (w.to(dtype) for w in weights)
        n = delta.normalise(h.to(dtype), None, None, centred=False)
        return feed_forward.feed_forward_growth(
            *(n.output.to(dtype), w_in, None, w_out, None, F.silu, True),
            norm=n,
            token=token,
        )

    (y, log), (y64, log64) = growth(torch.bfloat16), growth(F64)
    assert y.dtype == torch.bfloat16 and log.dtype == torch.float32
    torch.testing.assert_close(y.double(), y64, rtol=0.05, atol=0.1)
    # compared where the log of a square near zero is not all there is
    one = (0.5 * log64).exp()
    torch.testing.assert_close(
        (0.5 * log).exp().double(), one, rtol=0.05, atol=0.1
    )


def test_shapes_are_known_without_memory():
    x, w_in = torch.empty(2, 5, 4, device="meta"), torch.empty(6, 4)
    w_in, w_out = w_in.to("meta"), torch.empty(4, 3, device="meta")
    n = delta.normalise(x, None, None, centred=False)
    found = feed_forward.linearised_feed_forward(
        x.flatten(0, 1), w_in, None, w_out, w_in, None, None, "silu", True
    )
    assert [y.shape for y in found] == [(10, 4), (10, 4), (10, 4), (10, 6)]
    output, growth = feed_forward.feed_forward_growth(
        x, w_in, None, w_out, None, F.silu, True, norm=n, token=True
    )
    assert output.shape == x.shape and growth.shape == (2, 5, 1)


def test_dropout_thins_the_output_alone(small_blocks):
    torch.manual_seed(0)
    x = leaf(200, 6)
    weights = (leaf(9, 6), leaf(9), leaf(6, 9), None)
    plain, j = feed_forward.feed_forward_growth(x, *weights, F.gelu)
    thinned, j_thinned = feed_forward.feed_forward_growth(
        x, *weights, F.gelu, dropout_p=0.5
    )
    torch.testing.assert_close(j_thinned, j, rtol=0, atol=0)
    assert (thinned - plain).abs().mean() > 0.05
    many = torch.stack(
        [
            feed_forward.feed_forward_growth(
                x, *weights, F.gelu, dropout_p=0.5
            )[0]
            for _ in range(400)
        ]
    ).detach()
    error = many.std(0) / 20
    assert ((many.mean(0) - plain).abs() < 5 * error + 1e-9).all()


def plain_columns(q, k, v, is_causal, scale):
    scores = q @ k.mT * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights.square().sum(-1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_blocks_of_rows_equal_the_whole(small_blocks, is_causal, tokens):
    torch.manual_seed(tokens)
    q, k, v = leaf(3, tokens, 5), leaf(3, tokens, 5), leaf(3, tokens, 7)
    quick = columns.weighted_columns(q, k, v, is_causal, 0.7)[:2]
    plain = plain_columns(q, k, v, is_causal, 0.7)
    torch.testing.assert_close(quick, plain, rtol=1e-12, atol=1e-13)
    grads = [
        torch.autograd.grad(weighed(y), (q, k, v)) for y in (quick, plain)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_scores_of_any_size_stay_finite(small_blocks):
    q = torch.full((1, 3, 2), 1e3, dtype=F64).requires_grad_()
    k = leaf(1, 3, 2, scale=1e3)
    v = leaf(1, 3, 2)
    out, squares, _ = columns.weighted_columns(q, k, v, True, 1.0)
    (out.sum() + squares.sum()).backward()
    for x in (out, squares, q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    assert ((squares > 0) & (squares <= 1 + 1e-12)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_and_curvatures_are_derivatives(name):
    torch.manual_seed(0)
    a = leaf(50, scale=2.0)
    value, slope, none = activated(name, a)
    assert none is None
    (first,) = torch.autograd.grad(value.sum(), a)
    torch.testing.assert_close(slope, first, rtol=1e-12, atol=1e-13)
    kappa = activated(name, a.detach(), True)[2]
    if name == "relu":
        assert kappa is None
        return
    a2 = a.detach().requires_grad_()
    (once,) = torch.autograd.grad(
        activated(name, a2)[0].sum(),
        a2,
        create_graph=True,
    )
    (second,) = torch.autograd.grad(once.sum(), a2)
    torch.testing.assert_close(kappa, second, rtol=1e-9, atol=1e-11)


def test_the_scale_of_a_norm_has_its_gradient():
    torch.manual_seed(0)
    x = leaf(4, 7)
    z, scale, *_ = Standardise.apply(x, 1e-5, True)
    centred = x - x.mean(-1, keepdim=True)
    plain = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close((z, scale), (centred / plain, plain))
    grads = [
        torch.autograd.grad(weighed(y), x)
        for y in ((z, scale), (centred / plain, plain))
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_the_operators_keep_pytorchs_rules():
    """Fake kernels, autograd registration and aliasing, by opcheck."""
    torch.manual_seed(0)
    q, k, v = leaf(2, 5, 3), leaf(2, 5, 3), leaf(2, 5, 4)
    op = torch.ops.bft_ref.weighted_columns.default
    opcheck(op, (q, k, v, True, 0.5, [], 1, 0.0, 0, None, None))
    hidden = torch.tensor([[[[False, True, False, False, True]]]])
    added = torch.randn(1, 2, 5, 5, dtype=F64)
    seed = torch.tensor(3)
    opcheck(op, (q, k, v, True, 0.5, [hidden, added], 2, 0.3, 2, seed, None))
    rows = torch.tensor([[True] + 4 * [False], 5 * [False]])
    opcheck(op, (q, k, v, False, 0.5, [hidden], 2, 0.0, 0, None, rows))
    x, w_in, b, w_out = leaf(5, 3), leaf(6, 3), leaf(6), leaf(3, 6)
    columns, shift = leaf(6, 2), leaf(6)
    gated = leaf(3, 3)
    for out, bias, s, radial in [
        (w_out, b, shift, True),
        (w_out, b, None, False),
        (gated, b, shift, True),
        (gated, None, None, True),
    ]:
        arguments = (x, w_in, bias, out, columns, s, None, "gelu", radial)
        opcheck(feed_forward._linearised_feed_forward, arguments)
