"""Incremental decoding equals the full pass, precision included."""

import pytest
import torch
from torch import nn

from bft_ref import Belief, KeyValueCache
from tests.factories import (
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
)

CONFIGS = [
    {},
    {"granularity": "token"},
    {"prior_scale": "unit", "reading": "mean"},
    {"norm_first": False},
    {"norm_first": False, "granularity": "token", "activation": "swiglu"},
    {"dynamics": "ornstein_uhlenbeck", "innovation": "difference"},
    {
        "d_model": 16,
        "heads": 4,
        "options": {"num_kv_heads": 2, "rotary_base": 50.0},
    },
]


def decode(model, belief, steps, hidden=None):
    caches = model.make_caches()
    parts, start = [], 0
    for size in steps:
        stop = start + size
        part = Belief(*(x[:, start:stop] for x in belief))
        seen = None if hidden is None else hidden[:, :stop]
        parts.append(model(part, None, seen, True, caches=caches))
        start = stop
    assert [c.length for c in caches] == [start] * len(caches)
    return Belief(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("steps", [[1] * 6, [4, 1, 1], [2, 3, 1], [6]])
def test_incremental_decoding_equals_the_full_pass(config, steps):
    model = make_encoder(2, **config)
    belief = make_belief(2, 6, config.get("d_model", 8))
    hidden = left_padding(2, 6, [6, 4])
    full = model(belief, None, hidden, True)
    found = decode(model, belief, steps, hidden)
    torch.testing.assert_close(found.mean, full.mean)
    torch.testing.assert_close(found.log_precision, full.log_precision)


def test_score_masks_count_the_cached_tokens():
    layer, belief = make_layer(), make_belief(tokens=5)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    full = layer(belief, later)
    cache = KeyValueCache()
    for t in range(5):
        one = Belief(*(x[:, t : t + 1] for x in belief))
        with pytest.raises(
            ValueError, match=r"^src_mask: .*, 1, .*got \(7, 7\)"
        ):
            layer(one, torch.zeros(7, 7).bool(), cache=cache)
        assert cache.length == t  # a refused call leaves it alone
        out = layer(one, later[t : t + 1, : t + 1], cache=cache)
        torch.testing.assert_close(out.mean[:, 0], full.mean[:, t])


def test_padding_must_cover_the_cached_tokens():
    layer, cache = make_layer(), KeyValueCache()
    layer(make_belief(), cache=cache)
    with pytest.raises(ValueError, match="^src_key_padding_mask: .*10"):
        layer(make_belief(), None, torch.zeros(2, 5).bool(), cache=cache)
    assert cache.length == 5


def test_another_batch_is_refused_and_the_cache_kept():
    layer, cache = make_layer(), KeyValueCache()
    assert cache.length == 0
    layer(make_belief(2), cache=cache)
    with pytest.raises(ValueError, match=r"^cache: .*\(2, 2, \*, 4\).*\(3, "):
        layer(make_belief(3), cache=cache)
    with pytest.raises(ValueError, match="^cache: "):
        make_layer(heads=4)(make_belief(2), cache=cache)
    assert cache.length == 5


def test_the_number_of_caches_is_checked():
    model = make_encoder(2)
    with pytest.raises(ValueError, match="^caches: expected 2, got 1"):
        model(make_belief(), caches=model.make_caches()[:1])


def test_the_cache_holds_the_precision():
    """The same keys with another precision give another answer."""
    layer = make_layer()
    first = make_belief(tokens=3)
    sharp = Belief(first.mean, first.log_precision.flip(1) * 2)
    last = make_belief(tokens=1, seed=8)
    answers = []
    for history in [first, sharp]:
        cache = KeyValueCache()
        layer(history, is_causal=True, cache=cache)
        answers.append(layer(last, is_causal=True, cache=cache))
    assert (answers[0].mean - answers[1].mean).abs().max() > 1e-3
    change = answers[0].log_precision - answers[1].log_precision
    assert change.abs().max() > 1e-3


class Broken(nn.Module):
    """Fails at will, and is nothing otherwise."""

    def __init__(self, error):
        super().__init__()
        self.error, self.armed = error, False

    def forward(self, x):
        if self.armed:
            raise self.error
        return 0.5 * x


def watched(name):
    """A place in an encoder's last layer where a hook can raise."""

    def place(model, broken):
        def hook(module, given):
            broken(given[0])

        model.layers[-1].get_submodule(name).register_forward_pre_hook(hook)

    return place


def final_norm(model, broken):
    model.norm = broken


def own_network(model, broken):
    model.layers[-1].ffn = broken


def contents(caches):
    return [
        [None if x is None else x.clone() for x in c._state] for c in caches
    ]


@pytest.mark.parametrize("way", ["chunked", "eager"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "place",
    [
        final_norm,
        own_network,
        watched("norm1"),
        watched("self_attn.out_proj"),
        watched("linear2"),
        watched("norm2"),
    ],
)
def test_a_call_that_fails_anywhere_leaves_every_cache_alone(
    place, error, way
):
    """And the next call goes on as if it had not been made."""
    model, broken = make_encoder(2, implementation=way), Broken(error)
    place(model, broken)
    belief = make_belief(2, 6)
    first, second = (Belief(*(x[:, t] for x in belief)) for t in HALVES)
    caches = model.make_caches()
    model(first, is_causal=True, caches=caches)
    before = contents(caches)
    broken.armed = True
    with pytest.raises(type(error)):
        model(second, is_causal=True, caches=caches)
    torch.testing.assert_close(contents(caches), before, rtol=0, atol=0)
    broken.armed = False
    found = model(second, is_causal=True, caches=caches)
    full = model(belief, is_causal=True)
    torch.testing.assert_close(found.mean, full.mean[:, 4:])


HALVES = [slice(4), slice(4, 6)]


@pytest.mark.parametrize("way", ["chunked", "eager"])
def test_refused_arguments_leave_every_cache_alone(way):
    model = make_encoder(2, implementation=way)
    caches = model.make_caches()
    model(make_belief(), is_causal=True, caches=caches)
    before = contents(caches)
    nan = make_belief()._replace(mean=make_belief().mean * torch.nan)
    for arguments in [
        (nan,),
        (make_belief(3),),
        (make_belief(), torch.zeros(3, 3)),
        (make_belief(), None, torch.zeros(2, 5).bool()),
    ]:
        with pytest.raises(ValueError):
            model(*arguments, caches=caches)
        torch.testing.assert_close(contents(caches), before, rtol=0, atol=0)


def test_a_failing_observation_alone_leaves_the_cache_alone():
    layer, cache = make_layer(), KeyValueCache()
    belief = layer._entered(make_belief())
    layer.observe(belief, cache=cache)
    broken = Broken(ValueError("no"))
    broken.armed = True
    layer.self_attn.out_proj = broken
    with pytest.raises(ValueError, match="^no$"):
        layer.observe(belief, cache=cache)
    assert cache.length == 5


def test_one_cache_cannot_serve_two_layers():
    model, belief = make_encoder(2), make_belief()
    with pytest.raises(ValueError, match="^caches: .*the same twice"):
        model(belief, is_causal=True, caches=[KeyValueCache()] * 2)


@pytest.mark.parametrize("bad", [True, [True, True], KeyValueCache()])
def test_what_is_no_list_of_caches_is_refused(bad):
    with pytest.raises(TypeError, match="^caches?: expected a"):
        make_encoder(2)(make_belief(), caches=bad)
    if not isinstance(bad, KeyValueCache):
        with pytest.raises(TypeError, match="^cache: expected a KeyValueC"):
            make_layer()(make_belief(), cache=bad)


@pytest.mark.parametrize("first", ["unit", "neighbours"])
def test_a_cache_of_a_layer_with_another_prior_is_refused(first):
    second = {"unit": "neighbours", "neighbours": "unit"}[first]
    cache, belief = KeyValueCache(), make_belief()
    make_layer(prior_scale=first)(belief, cache=cache)
    with pytest.raises(ValueError, match="^cache: expected .*prior_scale"):
        make_layer(prior_scale=second)(belief, cache=cache)
    assert cache.length == 5


@pytest.mark.parametrize("steps", [[2, 2, 1], [4, 1], [1] * 5])
def test_what_is_hidden_may_be_nan_with_a_cache_too(steps):
    """The mask counts the cached tokens: its end is that of the newest."""
    model, belief = make_encoder(2), make_belief()
    hidden = left_padding(2, 5, [2, 4])
    hidden[1, 3] = True
    expected = decode(model, belief, steps, hidden)
    lost = Belief(
        *(x.masked_fill(hidden.unsqueeze(-1), torch.nan) for x in belief)
    )
    found = decode(model, lost, steps, hidden)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[~hidden], y[~hidden])
