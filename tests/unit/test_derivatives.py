"""Derivatives of every kind are right, or refused; none is silently zero."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vmap,
)
from torch.utils.checkpoint import checkpoint

from bft_ref import Belief, delta, fast
from bft_ref.fast import feed_forward
from bft_ref.fast import weighted_columns as columns
from bft_ref.fast.attention import attend
from tests.factories import label, make_belief, make_encoder, make_layer

F64 = torch.float64


def tensor(*shape, seed=0, scale=0.6):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=F64)


def network(name="gelu", *, norm=None, exact=True, token=False):
    """feed_forward_growth of everything it depends on, as one number."""
    activation, gated = delta.activation_function(
        {"elu": F.elu}.get(name, name)
    )

    def function(h, w_in, b_in, w_out, gamma, beta):
        normed, x = None, h
        if norm is not None:
            normed = fast.normalise(h, gamma, beta, 1e-3, norm == "layernorm")
            x = normed.output
        y, j = fast.feed_forward_growth(
            *(x, w_in, b_in, w_out, None, activation, gated, 0.0),
            *(normed, exact, token),
        )
        return y.sin().sum() + (0.7 * j).sin().sum()

    width = 10 if gated else 5
    shapes = [(3, 4), (width, 4), (width,), (4, 5), (4,), (4,)]
    return function, [tensor(*s, seed=i) for i, s in enumerate(shapes)]


def attention(implementation="auto", *, causal=True, masked=False, **options):
    """attend() of everything it depends on, as one number."""

    def function(q, k, v, log, neighbours):
        mask = None
        if masked:
            mask = torch.eye(4, dtype=torch.bool).flip(0).expand(1, 2, 4, 4)
            mask = ~mask
        found = attend(
            *(q, k, v, log),
            neighbour_variance=neighbours.exp(),
            is_causal=causal,
            attn_mask=mask,
            implementation=implementation,
            **options,
        )
        sizes = [found.mean, found.dispersion, found.n_eff]
        sizes.append(found.neighbour_variance)
        return sum(x.sin().sum() for x in sizes)

    shapes = [(1, 2, 4, 3), (1, 1, 4, 3), (1, 1, 4, 3), (1, 4), (1, 4)]
    return function, [tensor(*s, seed=i) for i, s in enumerate(shapes)]


def layer_function(make=make_layer, **arguments):
    """A layer or encoder of mean and precision, as one number."""
    layer = make(**arguments).requires_grad_(False)
    token = arguments.get("granularity") == "token"
    belief = make_belief(1, 3, features=1 if token else None)

    def function(mean, log_precision):
        out = layer(Belief(mean, log_precision), is_causal=True)
        return out.mean.sin().sum() + out.log_precision.sin().sum()

    return function, list(belief)


class Squash(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x):
        return self.inner(x.tanh())


CASES = {
    **{
        f"ffn {name} {norm} {exact} {token}": network(
            name, norm=norm, exact=exact, token=token
        )
        for name, norm, exact, token in [
            ("gelu", None, True, False),
            ("gelu", "layernorm", True, False),
            ("relu", "rmsnorm", True, True),
            ("silu", "layernorm", False, False),
            ("tanh", "layernorm", True, True),
            ("swiglu", "layernorm", True, False),
            ("geglu", "rmsnorm", True, True),
            ("elu", "rmsnorm", True, False),
        ]
    },
    "attend": attention(),
    "attend, masked": attention(masked=True),
    "attend, everywhere": attention(causal=False),
    "attend, eager": attention("eager"),
    "layer": layer_function(),
    "layer, post-norm token": layer_function(
        norm_first=False, granularity="token", activation="swiglu"
    ),
    "layer, rmsnorm": layer_function(
        options={"norm": "rmsnorm"}, prior_scale="unit", activation="tanh"
    ),
    "layer, first": layer_function(jacobian="first", activation="silu"),
    "layer, hutchinson": layer_function(jacobian="hutchinson"),
    "layer, row": layer_function(variance_rule="row"),
    "layer, own activation": layer_function(activation=F.softplus),
    "layer, own ffn": layer_function(options={"ffn": Squash()}),
    "layer, without project": layer_function(
        project_variance=False, norm_first=False
    ),
    "encoder": layer_function(make_encoder),
}
# forward mode inside forward_ad.dual_level, which does not nest
NESTED = ["ffn elu rmsnorm True False", "layer, own activation"]
NESTED += ["layer, own ffn"]
case = pytest.mark.parametrize("name", CASES)


def differences(function, inputs, ways, step=1e-6):
    ends = [
        function(*(x + sign * w for x, w in zip(inputs, ways, strict=True)))
        for sign in (step, -step)
    ]
    return (ends[0] - ends[1]) / (2 * step)


def ways_of(inputs):
    return [tensor(*x.shape, seed=9 + i) for i, x in enumerate(inputs)]


@case
def test_jvp_is_the_difference_quotient(name):
    """In each input alone, so that none is left out."""
    function, inputs = CASES[name]
    for i, way in enumerate(ways_of(inputs)):
        ways = [way if i == j else 0 * x for j, x in enumerate(inputs)]
        expected = differences(function, inputs, ways)
        _, found = jvp(function, tuple(inputs), tuple(ways))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

        def alone(x, i=i):
            return function(*inputs[:i], x, *inputs[i + 1 :])

        if name in NESTED:
            continue
        with forward_ad.dual_level():
            dual = alone(forward_ad.make_dual(inputs[i], way))
            tangent = forward_ad.unpack_dual(dual).tangent
        if tangent is None:  # β is not in it without a norm
            tangent = torch.zeros(()).double()
        torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NESTED)
def test_what_does_not_nest_is_refused(name):
    function, inputs = CASES[name]
    with (
        pytest.raises(RuntimeError, match="use torch.func.jvp"),
        forward_ad.dual_level(),
    ):
        function(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


@case
def test_grad_jacfwd_jacrev_and_autograd_agree(name):
    function, inputs = CASES[name]
    numbers = tuple(range(len(inputs)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(
        function(*leaves), leaves, materialize_grads=True
    )
    again = torch.autograd.grad(
        function(*leaves), leaves, create_graph=True, materialize_grads=True
    )
    torch.testing.assert_close(again, expected)
    for transform in [grad, jacfwd, jacrev]:
        found = transform(function, numbers)(*inputs)
        torch.testing.assert_close(found, expected)


@case
def test_vmap_is_the_loop(name):
    function, inputs = CASES[name]
    many = [torch.stack([x, 0.3 * x + 0.1, -x]) for x in inputs]
    found = vmap(function)(*many)
    expected = torch.stack([function(*x) for x in zip(*many, strict=True)])
    torch.testing.assert_close(found, expected)
    each = vmap(grad(function))(*many)
    loop = [grad(function)(*x) for x in zip(*many, strict=True)]
    torch.testing.assert_close(each, torch.stack(loop))


@case
def test_second_derivatives_are_difference_quotients(name):
    """By create_graph, by torch.func either way, and by checkpoints."""
    function, inputs = CASES[name]
    ways = ways_of(inputs)

    def slope(*inputs, run=function):
        leaves = [x if x.requires_grad else x.detach().clone() for x in inputs]
        leaves = [x.requires_grad_() for x in leaves]
        grads = torch.autograd.grad(
            run(*leaves), leaves, create_graph=True, materialize_grads=True
        )
        return sum((g * w).sum() for g, w in zip(grads, ways, strict=True))

    def along(*inputs):
        return jvp(function, inputs, tuple(ways))[1]

    def recomputed(*inputs):
        return checkpoint(function, *inputs, use_reentrant=False)

    others = [tensor(*x.shape, seed=70 + i) for i, x in enumerate(inputs)]
    expected = differences(slope, inputs, others).detach()
    for run in [function, recomputed]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        grads = torch.autograd.grad(
            slope(*leaves, run=run), leaves, materialize_grads=True
        )
        found = sum((g * w).sum() for g, w in zip(grads, others, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _, nested = jvp(along, tuple(inputs), tuple(others))
    torch.testing.assert_close(nested, expected, rtol=1e-4, atol=1e-5)
    numbers = tuple(range(len(inputs)))
    back = grad(along, numbers)(*inputs)
    found = sum((g * w).sum() for g, w in zip(back, others, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["attend", "layer", "ffn gelu None True False"]
)
def test_hessian_is_that_of_the_graph(name):
    function, inputs = CASES[name]
    rest = inputs[1:]
    found = hessian(lambda x: function(x, *rest))(inputs[0])
    expected = torch.autograd.functional.hessian(
        lambda x: function(x, *rest), inputs[0]
    )
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0.01


@pytest.mark.parametrize("implementation", ["chunked", "eager"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradgradcheck_of_attention(implementation, masked, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 2)
    monkeypatch.setattr(columns, "HEADS", 1)
    monkeypatch.setitem(columns.BLOCK, "cpu", 8)
    function, inputs = attention(implementation, masked=masked)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("centred", [True, False])
def test_gradgradcheck_of_normalise(centred):
    def function(x, gamma, beta):
        norm = fast.normalise(x, gamma, beta, 1e-3, centred)
        return norm.output, norm.scale

    leaves = [tensor(*s, seed=i) for i, s in enumerate([(2, 5), (5,), (5,)])]
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradgradcheck(function, leaves)
    assert torch.autograd.gradcheck(
        function, leaves, check_forward_ad=True, check_batched_grad=True
    )


def test_dropout_is_the_same_in_the_second_derivative():
    function, inputs = attention("chunked", dropout_p=0.4)
    leaves = [x.requires_grad_() for x in inputs]

    def seeded(*inputs):
        torch.manual_seed(3)
        return function(*inputs)

    assert torch.autograd.gradcheck(seeded, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(seeded, leaves, fast_mode=True)


def test_tangents_of_parameters_reach_the_belief():
    """Of each alone: a kernel must not look at some of its inputs only."""
    layer, belief = make_layer(), make_belief(1, 3)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    def function(name, value):
        out = functional_call(layer, {**parameters, name: value}, (belief,))
        return out.mean.sin().sum() + out.log_precision.sin().sum()

    for i, (name, value) in enumerate(parameters.items()):
        way = tensor(*value.shape, seed=i)

        def alone(x, name=name):
            return function(name, x)

        expected = differences(alone, [value], [way])
        assert expected.abs() > 1e-4, name
        _, found = jvp(alone, (value,), (way,))
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-7, msg=name
        )
        with forward_ad.dual_level():
            dual = alone(forward_ad.make_dual(value, way))
            tangent = forward_ad.unpack_dual(dual).tangent
        torch.testing.assert_close(
            tangent, expected, rtol=1e-5, atol=1e-7, msg=name
        )


@pytest.mark.parametrize("where", range(5))
def test_blocked_attention_refuses_forward_mode(where):
    """Whichever input carries it; the message names what can."""
    function, inputs = attention("chunked")
    with (
        pytest.raises(ValueError, match="use.*eager"),
        forward_ad.dual_level(),
    ):
        dual = forward_ad.make_dual(inputs[where], inputs[where])
        function(*inputs[:where], dual, *inputs[where + 1 :])
    with pytest.raises(ValueError, match="use.*eager"):
        jvp(
            lambda x: function(*inputs[:where], x, *inputs[where + 1 :]),
            (inputs[where],),
            (inputs[where],),
        )


def test_the_kernels_themselves_leave_nothing_at_zero():
    q, k, v = tensor(2, 3, 4), tensor(2, 3, 4, seed=1), tensor(2, 3, 2, seed=2)
    for transform in [jacfwd, jacrev]:
        with pytest.raises(ValueError, match="^weighted_columns: .*eager"):
            transform(
                lambda q: columns.weighted_columns(q, k, v, True, 0.5)[0]
            )(q)
    shapes = [(3, 4), (5, 4), (5,), (4, 5), (5, 2), (5,), (3, 5)]
    inputs = [tensor(*s, seed=i) for i, s in enumerate(shapes)]

    def function(*inputs):
        out = feed_forward.linearised_feed_forward(*inputs, "silu", True)
        return sum(y.sin().sum() for y in out)

    for i, way in enumerate(ways_of(inputs)):
        ways = [way if i == j else 0 * x for j, x in enumerate(inputs)]
        _, found = jvp(function, tuple(inputs), tuple(ways))
        expected = differences(function, inputs, ways)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_batched_gradients_of_the_kernels():
    for name in ["layer", "attend", "ffn gelu layernorm True False"]:
        function, inputs = CASES[name]
        leaf = inputs[0].clone().requires_grad_()
        y = function(leaf, *inputs[1:])
        many = torch.tensor([1.0, -2.0]).double()
        (found,) = torch.autograd.grad(
            y, leaf, many, retain_graph=True, is_grads_batched=True
        )
        (one,) = torch.autograd.grad(y, leaf, retain_graph=True)
        torch.testing.assert_close(found, torch.stack([one, -2 * one]))

        def back(scale, y=y, leaf=leaf):
            return torch.autograd.grad(y, leaf, scale, retain_graph=True)[0]

        torch.testing.assert_close(vmap(back)(many), found)


@pytest.mark.parametrize(
    "frozen", list(itertools.product([True, False], repeat=3)), ids=label
)
def test_second_derivatives_with_some_inputs_frozen(frozen):
    """And of the precision alone, which may leave the mean out."""
    shapes = [(3, 4), (5, 4), (5,), (4, 5), (5, 2), (5,)]
    inputs = [tensor(*s, seed=i) for i, s in enumerate(shapes)]
    learned = [inputs[i] for i in (0, 3, 5)]
    for x, fixed in zip(learned, frozen, strict=True):
        x.requires_grad_(not fixed)
    if all(frozen):
        return
    leaves = [x for x in learned if x.requires_grad]
    for i in range(3):
        y = (
            feed_forward.linearised_feed_forward(*inputs, None, "gelu", True)[
                i
            ]
            .square()
            .sum()
        )
        torch.autograd.grad(
            y, leaves, create_graph=True, materialize_grads=True
        )


@pytest.mark.parametrize(
    "name,transform",
    [
        ("layer", "jvp"),
        ("layer", "grad"),
        ("layer", "vmap"),
        ("layer, post-norm token", "grad of jvp"),
    ],
)
def test_transforms_inside_torch_compile(name, transform):
    function, inputs = CASES[name]
    rest = inputs[1:]

    def alone(x):
        return function(x, *rest)

    def along(x):
        return jvp(alone, (x,), (x.cos(),))[1]

    inside = {
        "jvp": along,
        "grad": grad(alone),
        "vmap": lambda x: vmap(alone)(torch.stack([x, 2 * x])),
        "grad of jvp": grad(along),
    }[transform]
    torch._dynamo.reset()
    compiled = torch.compile(inside, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs[0]), inside(inputs[0]))


def test_forward_mode_through_a_compiled_layer():
    """Warm, so that the graph for plain tensors must not be used again."""
    function, inputs = CASES["layer"]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    compiled(*inputs)
    expected = jvp(
        lambda x: function(x, inputs[1]), (inputs[0],), (inputs[0],)
    )[1]
    with forward_ad.dual_level():
        dual = compiled(forward_ad.make_dual(inputs[0], inputs[0]), inputs[1])
        tangent = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, expected)


def test_second_derivatives_of_a_compiled_layer_are_refused():
    layer, belief = make_layer(dtype=torch.float32), make_belief(1, 3)
    belief = Belief(*(x.float() for x in belief))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    mean = belief.mean.requires_grad_()
    out = compiled(belief._replace(mean=mean))
    (first,) = torch.autograd.grad(
        out.log_precision.sum(), mean, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_a_compiled_layer_keeps_its_kernels():
    """Without a transform: the plain forms hold far more in memory."""
    called = set()

    def look(graph, example):
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    function, inputs = CASES["layer"]
    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True)(*inputs)
    kernels = {name.split(".")[1] for name in called if "bft_ref" in name}
    assert kernels == {"weighted_columns", "linearised_feed_forward"}
