"""A user's modules are called, and the variances know what they do.

The oracle is a layer without anything on it whose weights are the effective
ones: what each module makes of nothing and of the unit vectors.
"""

import copy
import warnings
from functools import partial

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from bft_ref import Belief
from tests.factories import (
    D_MODEL,
    label,
    make_belief,
    make_encoder,
    make_layer,
)

NAMES = ["self_attn.out_proj", "linear1", "linear2"]


class Adapter(nn.Module):
    """By hand: the base's output plus B A x."""

    def __init__(self, base, rank=2, thin=0.0):
        super().__init__()
        self.base, self.thin = base, nn.Dropout(thin)
        rows, columns = base.weight.shape
        self.a = nn.Parameter(0.4 * torch.randn(rank, columns).double())
        self.b = nn.Parameter(0.4 * torch.randn(rows, rank).double())

    def forward(self, x):
        return self.base(x) + self.thin(x) @ self.a.mT @ self.b.mT


def by_hand(layer):
    for name in NAMES:
        layer.set_submodule(name, Adapter(layer.get_submodule(name)))


def lora(layer, adapter="default", kind=peft.LoraConfig, **options):
    targets = ["linear1", "linear2", "out_proj"]
    if kind is peft.LoraConfig:
        options = {"lora_alpha": 3, "init_lora_weights": False, **options}
    else:
        options = {"init_weights": False, **options}
    config = kind(r=2, target_modules=targets, **options)
    peft.inject_adapter_in_model(config, layer, adapter)
    layer.double()  # peft's own weights are float32
    return layer


def two_lora(layer):
    lora(lora(layer), "second")
    tuners = [m for m in layer.modules() if hasattr(m, "lora_A")]
    for tuner in tuners:
        tuner.set_adapter(["default", "second"])


def merged(layer):
    lora(layer)
    for module in layer.modules():
        if hasattr(module, "merge"):
            module.merge()


def disabled(layer):
    lora(layer)
    for module in layer.modules():
        if hasattr(module, "enable_adapters"):
            module.enable_adapters(False)


def each(change):
    def on(layer):
        for name in NAMES:
            change(layer.get_submodule(name))

    return on


def pruned(module):
    prune.random_unstructured(module, "weight", 0.4)


def replaced_forward(module):
    old = module.forward
    module.forward = lambda x: 1.5 * old(x)


def scaling_hook(module):
    module.register_forward_hook(lambda module, given, made: 1.5 * made)


def scaling_pre_hook(module):
    module.register_forward_pre_hook(lambda module, given: 1.5 * given[0])


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(module)
    with torch.no_grad():
        module.weight_g *= 1.4


def weight_norm(module):
    parametrizations.weight_norm(module)
    with torch.no_grad():
        module.parametrizations.weight.original0 *= 1.4


def subclass(layer):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for name in NAMES:
        layer.get_submodule(name).__class__ = Twice


CHANGES = {
    "by hand": by_hand,
    "LoRA": lora,
    "two LoRA": two_lora,
    "merged": merged,
    "disabled": disabled,
    "DoRA": partial(lora, use_dora=True),
    "LoRA with bias": partial(lora, lora_bias=True),
    "rsLoRA": partial(lora, use_rslora=True),
    "LoHa": partial(lora, kind=peft.LoHaConfig),
    "LoKr": partial(lora, kind=peft.LoKrConfig),
    "weight norm": each(weight_norm),
    "spectral norm": each(parametrizations.spectral_norm),
    "old weight norm": each(old_weight_norm),
    "pruned": each(pruned),
    "another forward": each(replaced_forward),
    "scaling hook": each(scaling_hook),
    "scaling pre-hook": each(scaling_pre_hook),
    "subclass": subclass,
}


def twin(layer, **arguments):
    """The same layer, plain, with the effective weights and biases."""
    plain = make_layer(**arguments)
    state = {
        name: value
        for name, value in layer.state_dict().items()
        if name in plain.state_dict()
    }
    state["self_attn.in_proj_weight"] = layer.self_attn.in_proj_weight
    for name in NAMES:
        module = layer.get_submodule(name)
        width = plain.get_submodule(name).in_features
        at_zero = module(torch.zeros(1, width).double())
        at_units = module(torch.eye(width).double())
        state[f"{name}.weight"] = (at_units - at_zero).mT
        state[f"{name}.bias"] = at_zero[0]
    plain.load_state_dict(state)
    return plain.train(layer.training)


def slope_of(loss, parameters):
    """Derivatives along one direction: by autograd, by differences."""
    generator = torch.Generator().manual_seed(0)
    ways = [
        torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for p in parameters
    ]
    grads = torch.autograd.grad(loss(), parameters)
    exact = sum((g * w).sum() for g, w in zip(grads, ways, strict=True))
    values, step = [], 1e-5
    with torch.no_grad():
        for sign in (step, -2 * step):
            for p, w in zip(parameters, ways, strict=True):
                p += sign * w
            values.append(loss())
        for p, w in zip(parameters, ways, strict=True):
            p += step * w
    return exact, (values[0] - values[1]) / (2 * step)


def loss_of(layer, belief=None):
    belief = make_belief() if belief is None else belief
    out = layer(belief, is_causal=True)
    return out.mean.square().mean() + out.log_precision.sin().mean()


SHAPES = [
    {},
    {"norm_first": False, "granularity": "token", "activation": "swiglu"},
]


# two adapters are what is tested
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("arguments", SHAPES, ids=label)
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_modules_do_is_what_the_belief_knows(change, arguments):
    layer = make_layer(**arguments)
    CHANGES[change](layer)
    layer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = layer(make_belief(), is_causal=True)
    expected = twin(layer, **arguments)(make_belief(), is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    untouched = make_layer(**arguments)(make_belief(), is_causal=True)
    if change != "disabled":
        assert (out.mean - untouched.mean).abs().max() > 0.01
        apart = out.log_precision - untouched.log_precision
        assert apart.abs().max() > 0.01


@pytest.mark.parametrize("arguments", SHAPES, ids=label)
@pytest.mark.parametrize("change", ["by hand", "LoRA", "LoKr", "weight norm"])
def test_adapters_learn(change, arguments):
    """Through the mean and through the precision."""
    layer = make_layer(**arguments)
    CHANGES[change](layer)
    own = [
        p
        for name, p in layer.named_parameters()
        if p.requires_grad
        and name not in dict(make_layer().named_parameters())
    ]
    assert len(own) >= 6
    found, expected = slope_of(lambda: loss_of(layer), own)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "config",
    [
        {"jacobian": "exact"},
        {"jacobian": "first"},
        {"jacobian": "hutchinson"},
        {"variance_rule": "row"},
        {"variance_rule": "row", "jacobian": "hutchinson"},
        {"granularity": "token", "jacobian": "exact"},
        {"granularity": "token", "jacobian": "first"},
        {"granularity": "token", "jacobian": "hutchinson"},
        {"granularity": "token", "project_variance": False},
        {"project_variance": False, "prior_scale": "unit"},
    ],
    ids=label,
)
def test_every_option_knows_an_adapter(config, activation, first):
    arguments = {"activation": activation, "norm_first": first, **config}
    layer = make_layer(**arguments)
    by_hand(layer)
    belief = make_belief()
    expected = twin(layer, **arguments)(belief)
    torch.testing.assert_close(layer(belief), expected, rtol=1e-9, atol=1e-9)


def test_a_parametrised_in_proj_is_read_once_and_enters_the_prior():
    layer = make_layer()

    class Half(nn.Module):
        calls = 0

        def forward(self, w):
            Half.calls += 1
            return 0.5 * w

    parametrize.register_parametrization(
        layer.self_attn, "in_proj_weight", Half()
    )
    expected = twin(layer)(make_belief())
    Half.calls = 0
    torch.testing.assert_close(layer(make_belief()), expected)
    assert Half.calls <= 2  # once for its dtype
    loss_of(layer).backward()
    original = layer.self_attn.parametrizations.in_proj_weight.original
    assert original.grad.abs().min() > 0


def test_spectral_norm_in_training_uses_one_weight_for_mean_and_variance():
    """Each reading of such a weight makes another one of it."""
    layer = make_layer(norm_first=False, project_variance=False)
    for name in ["linear1", "linear2"]:
        parametrizations.spectral_norm(layer.get_submodule(name))
    layer.train()
    seen = {}

    def spy(name):
        def look(module, given, made):
            seen[name] = made

        parametrization = layer.get_submodule(name).parametrizations.weight
        vectors = parametrization[0]
        for x in [vectors._u, vectors._v]:  # far from what it converges to
            x.copy_(F.normalize(torch.arange(1.0, len(x) + 1).to(x), dim=0))
        parametrization.register_forward_hook(look)

    spy("linear1"), spy("linear2")
    updated = make_belief()
    h = updated.mean
    _, log_growth = layer.predict(updated)
    a = F.linear(h, seen["linear1"], layer.linear1.bias)
    slope = torch.func.vmap(torch.func.grad(F.gelu))(a.flatten()).view_as(a)
    j = slope @ (seen["linear1"] * seen["linear2"].mT)
    torch.testing.assert_close(log_growth, (1 + j).square().log())


# peft -----------------------------------------------------------------------


def test_adapter_dropout_thins_the_mean_and_not_what_the_precision_knows():
    layer = lora(make_layer(norm_first=False), lora_dropout=0.5)
    layer.linear1 = layer.linear1.base_layer  # slopes without dropout
    updated = make_belief()
    _, expected = layer.predict(updated)
    layer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out, log_growth = layer.predict(updated)
    torch.testing.assert_close(log_growth, expected)
    assert (out.mean - layer.eval().predict(updated)[0].mean).abs().max() > 0.1


@pytest.mark.parametrize("change", ["LoRA", "DoRA", "by hand"])
def test_training_with_adapter_dropout_learns_and_stays_quiet(change):
    layer = make_layer(dropout=0.1)
    if change == "by hand":
        for name in NAMES:
            base = layer.get_submodule(name)
            layer.set_submodule(name, Adapter(base, thin=0.3))
    else:
        lora(layer, lora_dropout=0.3, use_dora=change == "DoRA")
    layer.train()
    modes = {name: m.training for name, m in layer.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loss_of(layer).backward()
    assert {n: m.training for n, m in layer.named_modules()} == modes
    for name, p in layer.named_parameters():
        if p.requires_grad:
            assert p.grad.isfinite().all(), name


def test_get_peft_model_and_its_saved_adapter(tmp_path):
    config = peft.LoraConfig(
        r=2,
        target_modules=["linear1", "linear2", "out_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(make_encoder(2), config).double().eval()
    belief = make_belief()
    expected = model(belief)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_encoder(2), tmp_path)
    again = again.double().eval()
    torch.testing.assert_close(again(belief), expected, rtol=1e-5, atol=1e-5)
    plain = make_encoder(2)(belief)
    assert (plain.log_precision - expected.log_precision).abs().max() > 0.01
    with again.disable_adapter():
        torch.testing.assert_close(again(belief), plain)
    whole = again.merge_and_unload()
    assert type(whole.layers[0].linear1) is nn.Linear
    torch.testing.assert_close(whole(belief), expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_in_low_precision():
    layer = make_layer(dtype=torch.bfloat16)
    lora(layer).bfloat16()
    belief = make_belief(dtype=torch.bfloat16)
    belief = belief._replace(log_precision=belief.log_precision.float())
    expected = twin(copy.deepcopy(layer).double())(
        Belief(*(x.double() for x in belief))
    )
    out = Belief(*(x.double() for x in layer(belief)))
    torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)


# hooks ----------------------------------------------------------------------

EVERYWHERE = [*NAMES, "norm1", "norm2", "activation"]


# beliefs that need no gradient are the usual input of a first layer
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "kind", ["forward", "pre", "backward", "pre-backward"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"norm_first": False, "granularity": "token"},
        {"jacobian": "hutchinson"},
        {"variance_rule": "row", "activation": "silu"},
    ],
    ids=label,
)
def test_hooks_fire_once_and_change_nothing(arguments, kind):
    activation = {"silu": nn.SiLU}.get(arguments.get("activation"), nn.GELU)
    layer = make_layer(**{**arguments, "activation": activation()})
    expected, plain = layer(make_belief()), {}
    loss_of(layer).backward()
    for name, p in layer.named_parameters():
        plain[name], p.grad = p.grad, None
    calls = dict.fromkeys(EVERYWHERE, 0)
    register = {
        "forward": nn.Module.register_forward_hook,
        "pre": nn.Module.register_forward_pre_hook,
        "backward": nn.Module.register_full_backward_hook,
        "pre-backward": nn.Module.register_full_backward_pre_hook,
    }[kind]
    for name in EVERYWHERE:

        def count(*_, name=name):
            calls[name] += 1

        register(layer.get_submodule(name), count)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = layer(make_belief())
    torch.testing.assert_close(found, expected)
    if "backward" not in kind:
        assert calls == dict.fromkeys(EVERYWHERE, 1)
    else:
        loss_of(layer).backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(p.grad, plain[name], msg=name)
        assert min(calls.values()) >= 1, calls


def test_what_a_hook_keeps_can_be_used_afterwards():
    layer, kept = make_layer(activation=nn.GELU()), {}
    for name in EVERYWHERE:

        def keep(module, given, made, name=name):
            kept[name] = made

        layer.get_submodule(name).register_forward_hook(keep)
    layer(make_belief())
    hidden = F.gelu(kept["linear1"])
    torch.testing.assert_close(kept["activation"], hidden)
    torch.testing.assert_close(kept["linear2"], layer.linear2(hidden))
    torch.testing.assert_close(kept["linear1"], layer.linear1(kept["norm2"]))


def per_token(module, given, made):
    """Linear for each token, but with no matrix that all of them share."""
    scale = 1 + 0.2 * torch.arange(made.shape[-2]).to(made)
    return made * scale[:, None]


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("first", [True, False])
def test_the_jacobian_of_unknown_modules_averages_to_the_exact_one(
    first, granularity
):
    """Over all pairs of probes, with a warning."""
    arguments = {"d_model": 4, "width": 6, "granularity": granularity}
    layer = make_layer(norm_first=first, **arguments)
    with torch.no_grad():
        layer.linear2.weight *= 0.2  # so that nothing is cut at 0
    layer.linear1.register_forward_hook(per_token)
    updated = make_belief(1, 2, 4, features=1 if granularity == "token" else 4)

    def network(h):
        x = layer.norm2(h) if first else h
        return layer.linear2(F.gelu(layer.linear1(x)))

    jacobian = torch.func.jacrev(network)(updated.mean)
    j = jacobian.reshape(8, 8).diagonal().view(1, 2, 4)
    if granularity == "token":
        j = j.mean(-1, keepdim=True)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 4)
    one, two = signs.repeat(16, 1), signs.repeat_interleave(16, 0)
    probes = torch.stack([one, two])[:, :, None]
    many = Belief(*(x.expand(256, -1, -1) for x in updated))
    layer.signs = lambda like, index: probes[index].expand(like.shape)
    with pytest.warns(UserWarning, match="what linear1 does is not known"):
        found, log_growth = layer.predict(many)
    average = log_growth.exp().mean(0, keepdim=True)
    torch.testing.assert_close(average, (1 + j).square())
    h = updated.mean
    expected = h + network(h)
    if not first:
        expected = layer.norm2(expected)
    torch.testing.assert_close(found.mean[:1], expected)


@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_the_variance_of_an_unknown_out_proj_averages_to_the_exact_one(
    granularity,
):
    arguments = {"d_model": 4, "width": 6, "granularity": granularity}
    layer = make_layer(**arguments)
    belief = layer._entered(make_belief(1, 3, 4))
    known = layer.observe(belief)
    layer.self_attn.out_proj.register_forward_hook(per_token)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 4)
    many = Belief(*(x.expand(16, -1, -1) for x in belief))
    layer.signs = lambda like, index: signs[:, None].expand(like.shape)
    with pytest.warns(UserWarning, match="what self_attn.out_proj does"):
        seen = layer.observe(many)
    scale = 1 + 0.2 * torch.arange(3).double()[:, None]
    torch.testing.assert_close(seen.innovation[:1], known.innovation * scale)
    average = (-seen.log_precision).exp().mean(0, keepdim=True)
    expected = (-known.log_precision).exp() * scale.square()
    torch.testing.assert_close(average, expected)


def test_an_unknown_out_proj_has_finite_gradients_where_nothing_is_seen():
    layer = make_layer()
    layer.self_attn.out_proj.register_forward_hook(per_token)
    hidden = torch.ones(2, 5).bool()
    hidden[:, 3:] = False
    with pytest.warns(UserWarning, match="self_attn.out_proj"):
        out = layer(make_belief(), None, hidden, True)
    (out.mean.sum() + out.log_precision.sum()).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_an_altering_hook_on_an_adapter_with_dropout_is_not_overlooked():
    layer = lora(make_layer(), lora_dropout=0.4).train()
    layer.linear2.register_forward_hook(scaled)
    with pytest.warns(UserWarning, match="what linear2 does is not known"):
        layer(make_belief())


def scaled(module, given, made):
    return 1.5 * made


# other modules --------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["feature", "token"])
@pytest.mark.parametrize("jacobian", ["exact", "hutchinson"])
def test_quantised_linear_layers(granularity, jacobian):
    arguments = {"granularity": granularity, "jacobian": jacobian}
    arguments |= {"dtype": torch.float32, "d_model": 32, "width": 64}
    layer = make_layer(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert "quantized" in type(small.linear1).__module__
    belief = make_belief(2, 5, 32, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, trace = small.step(belief)
    out, expected = layer.step(belief)
    torch.testing.assert_close(found.mean, out.mean, rtol=0.1, atol=0.2)
    apart = trace.log_growth - expected.log_growth
    assert apart.abs().median() < 0.02
    assert expected.log_growth.abs().median() > 0.05  # zeros would be seen
    apart = found.log_precision - out.log_precision
    assert apart.abs().median() < 0.05


@torch.library.custom_op("tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


@pytest.mark.parametrize("where", ["ffn", "activation"])
def test_an_operator_without_forward_derivative_is_refused(where):
    """It would pass for a network that does not grow."""

    class Squared(nn.Module):
        def forward(self, x):
            return squared(x)

    arguments = {"options": {"ffn": Squared()}}
    if where == "activation":
        arguments = {"activation": squared}
    layer = make_layer(**arguments).requires_grad_(False)
    with pytest.raises(RuntimeError, match="expected a derivative in forward"):
        layer(make_belief())


def test_an_ffn_of_another_shape_is_refused():
    layer = make_layer(options={"ffn": nn.Linear(D_MODEL, 1).double()})
    with pytest.raises(
        ValueError, match=r"^ffn: output: .*8\), got \(2, 5, 1"
    ):
        layer(make_belief())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.register_forward_hook(lambda *_: None),
        lambda a: a.register_forward_pre_hook(lambda *_: None),
        lambda a: a.register_full_backward_hook(lambda *_: None),
        lambda a: setattr(a, "forward", lambda x: x),
        lambda a: prune.random_unstructured(a, "in_proj_weight", 0.5),
    ],
)
def test_a_hook_on_self_attn_is_refused(spoil):
    layer = make_layer()
    spoil(layer.self_attn)
    with pytest.raises(TypeError, match="^self_attn: .*self_attn.out_proj"):
        layer(make_belief())


def test_an_adapter_around_self_attn_is_refused():
    layer = make_layer()
    layer.self_attn = nn.Sequential(layer.self_attn)
    with pytest.raises(TypeError, match="^self_attn: .*Sequential"):
        layer(make_belief())
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["in_proj_weight"]
    )
    wrapped = peft.inject_adapter_in_model(config, make_layer())
    with pytest.raises(TypeError, match="^self_attn: .*ParamWrapper"):
        wrapped(make_belief())


# norms ----------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_the_norms_of_the_layer_are_the_ones_used(first):
    layer = make_layer(norm_first=first)
    other = make_layer(norm_first=first, options={"layer_norm_eps": 1e-2})
    before = layer(make_belief())
    layer.norm1.eps = layer.norm2.eps = 1e-2
    torch.testing.assert_close(layer(make_belief()), other(make_belief()))
    assert (before.mean - layer(make_belief()).mean).abs().max() > 1e-4
    rms = make_layer(norm_first=first, options={"norm": "rmsnorm"})
    for name in ["norm1", "norm2"]:
        setattr(layer, name, nn.RMSNorm(D_MODEL, eps=1e-5).double())
    layer.load_state_dict(rms.state_dict())
    torch.testing.assert_close(layer(make_belief()), rms(make_belief()))


def test_a_parametrised_norm():
    class Exp(nn.Module):
        def forward(self, w):
            return w.exp()

    layer, other = make_layer(), make_layer()
    parametrize.register_parametrization(layer.norm1, "weight", Exp())
    with torch.no_grad():
        other.norm1.weight.exp_()
    torch.testing.assert_close(layer(make_belief()), other(make_belief()))
    loss_of(layer).backward()
    assert layer.norm1.parametrizations.weight.original.grad.abs().min() > 0


@pytest.mark.parametrize(
    "norm,got",
    [
        (nn.BatchNorm1d(5), "BatchNorm1d"),
        (nn.Identity(), "Identity"),
        (Adapter(nn.Linear(8, 8)), "Adapter"),
    ],
)
@pytest.mark.parametrize("name", ["norm1", "norm2"])
def test_an_unknown_norm_is_refused_by_name(name, norm, got):
    layer = make_layer()
    setattr(layer, name, norm)
    with pytest.raises(TypeError, match=f"^{name}: expected nn.Layer.*{got}"):
        layer(make_belief())


def test_a_norm_over_other_axes_is_refused():
    layer = make_layer()
    layer.norm2 = nn.LayerNorm((5, D_MODEL)).double()
    with pytest.raises(ValueError, match=r"^norm2: input: .*\(5, 8\)"):
        layer(make_belief())


@pytest.mark.parametrize("size", [1.001, 1.5])
def test_a_hook_that_changes_a_norm_is_refused(size):
    layer = make_layer()
    layer.norm2.register_forward_hook(lambda m, given, made: size * made)
    with pytest.raises(ValueError, match="^norm2: expected hooks that only"):
        layer(make_belief())


# activations ----------------------------------------------------------------


@pytest.mark.parametrize("jacobian", ["exact", "first", "hutchinson"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "module,function",
    [
        (nn.GELU(), F.gelu),
        (nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
        (nn.PReLU(init=0.25).double(), lambda x: F.leaky_relu(x, 0.25)),
        (nn.SiLU(inplace=True), F.silu),
        (nn.ReLU(inplace=True), F.relu),
        (nn.ELU(inplace=True), F.elu),
        (F.elu_, F.elu),
        (F.relu_, F.relu),
        (torch.tanh_, torch.tanh),
        (nn.Hardtanh(inplace=True), F.hardtanh),
    ],
    ids=label,
)
def test_activations_as_modules_and_in_place(
    module, function, first, jacobian
):
    found, expected = [], []
    for results, activation in [(found, module), (expected, function)]:
        layer = make_layer(
            norm_first=first,
            jacobian=jacobian,
        )
        layer.activation = copy.deepcopy(activation)
        if jacobian == "hutchinson":
            layer.train()
            torch.manual_seed(5)
        mean = make_belief().mean.requires_grad_()
        belief = Belief(mean, make_belief().log_precision)
        out = layer(belief)
        (out.mean.square().sum() + out.log_precision.sin().sum()).backward()
        parameters = dict(layer.named_parameters())
        results += [*out, mean.grad, parameters["linear1.weight"].grad]
        results += [parameters["linear2.weight"].grad]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("gate", [nn.SiLU(inplace=True), F.elu_])
def test_gates_in_place(gate):
    plain = {nn.SiLU: F.silu}.get(type(gate), F.elu)
    found = []
    for activation in [gate, plain]:
        layer = make_layer(activation="swiglu")
        layer.activation = activation
        mean = make_belief().mean.requires_grad_()
        out = layer(Belief(mean, make_belief().log_precision))
        grads = torch.autograd.grad(out.log_precision.sum(), mean)
        found.append([*out, *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("first", [True, False])
def test_an_ffn_that_works_in_place(first):
    class Network(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.inner = nn.Linear(D_MODEL, D_MODEL).double()
            self.in_place = in_place

        def forward(self, x):
            if self.in_place:
                return self.inner(x.mul_(0.7)).tanh_()
            return self.inner(x * 0.7).tanh()

    found = []
    for in_place in [False, True]:
        torch.manual_seed(1)
        ffn = Network(in_place)
        layer = make_layer(norm_first=first, options={"ffn": ffn})
        mean = make_belief().mean.requires_grad_()
        out = layer(Belief(mean, make_belief().log_precision))
        grads = torch.autograd.grad(out.log_precision.sum(), mean)
        found.append([*out, *grads])
    torch.testing.assert_close(*found)


def test_a_learned_activation_gets_its_gradient():
    layer = make_layer(activation=nn.PReLU().double(), norm_first=False)
    slopes = [layer.activation.weight]
    found, expected = slope_of(lambda: loss_of(layer), slopes)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_hook_that_changes_an_activation_is_in_value_and_slope():
    layer = make_layer(activation=nn.GELU())
    layer.activation.register_forward_hook(scaled)
    other = make_layer(activation=lambda x: 1.5 * F.gelu(x))
    torch.testing.assert_close(layer(make_belief()), other(make_belief()))


# torch.compile --------------------------------------------------------------


@pytest.mark.parametrize(
    "change", ["by hand", "LoRA", "weight norm", "subclass"]
)
@pytest.mark.parametrize("training", [False, True])
def test_adapters_are_captured_in_one_graph(change, training):
    layer = make_layer()
    CHANGES[change](layer)
    layer.train(training)
    expected = layer(make_belief())
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(make_belief()), expected)


def test_hooks_on_norms_are_compared_in_a_compiled_graph_too():
    layer = make_layer(dtype=torch.float32)
    hook = layer.norm1.register_forward_hook(lambda m, given, made: made)
    belief = make_belief(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(belief), layer(belief))
    hook.remove()
    layer.norm1.register_forward_hook(scaled)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="^norm1: expected hooks that only"):
        compiled(belief)


def test_an_altering_hook_is_estimated_in_a_compiled_graph():
    layer = make_layer()
    layer.linear1.register_forward_hook(per_token)
    with pytest.warns(UserWarning, match="linear1"):
        expected = layer(make_belief())
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(make_belief()), expected)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", ["norm1", "norm2", "linear1", "linear2"])
def test_pruned_weights_are_those_of_this_pass(name, norm_first):
    """Pruning sets the weight in a hook, when the module is called."""
    layer, belief = make_layer(norm_first=norm_first).train(), make_belief()
    part = layer.get_submodule(name)
    prune.l1_unstructured(part, "weight", 0.3)
    for _ in range(2):
        out = layer(belief)
        (out.mean.square().mean() + out.log_precision.mean()).backward()
        with torch.no_grad():
            part.weight_orig -= 0.1 * part.weight_orig.grad
    found = layer(belief)
    prune.remove(part, "weight")
    expected = layer(belief)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.log_precision, expected.log_precision)
