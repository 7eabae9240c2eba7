"""Incremental decoding equals the full pass, precision included."""

import pytest
import torch

from bft_ref import Belief, KeyValueCache
from tests.builders import (
    label,
    left_padding,
    make_belief,
    make_encoder,
    make_layer,
)

CONFIGS = [
    {},
    {"granularity": "token"},
    {"prior_scale": "unit", "observation": "mean"},
    {"norm_first": False},
    {"norm_first": False, "granularity": "token", "activation": "swiglu"},
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
