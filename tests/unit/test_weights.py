"""What depends on weights alone is found again when they have changed."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from bft_ref.support import weights as module
from bft_ref.support.weights import of_weights
from tests.factories import make_belief, make_layer


@pytest.fixture
def asked():
    """How often the sum of a weight was found, and a function to ask it."""
    calls = []

    def total(*weights, key="total"):
        def compute():
            calls.append(key)
            return sum(w.detach().sum() for w in weights if w is not None)

        return of_weights(key, weights, compute)

    total.calls = calls
    return total


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


def test_it_is_found_once_while_nothing_changes(asked):
    w, b = parameter(300, 100), parameter(7)
    with torch.no_grad():
        first = asked(w, b)
        assert asked(w, b) is first and len(asked.calls) == 1
        asked(w, b, key="another")
        asked(w, None)
        assert len(asked.calls) == 3
    with torch.inference_mode():
        asked(w, b, key="another")
    assert len(asked.calls) == 3


def set_twice(w):
    """The second may come to stand where the memory of the first was."""
    for _ in range(2):
        w.data = w.data * 2


def swapped(w):
    torch.utils.swap_tensors(w, nn.Parameter(torch.randn_like(w)))


def stepped(w):
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.1).step()
    w.grad = None


def low_rank(w):
    """As peft merges an adapter: added to ``data``, which counts nothing."""
    w.data += torch.randn(len(w), 1) @ torch.randn(1, w.shape[1])


def resized(w):
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(w.numel() * 4)
    w.data.copy_(torch.randn_like(w))


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "one entry": lambda w: w[3, 5].add_(1),
    "data in place": lambda w: w.data.mul_(2),
    "data copied into": lambda w: w.data.copy_(torch.randn_like(w)),
    "a row of data": lambda w: w.data[3].add_(1),
    "a column of data": lambda w: w.data[:, 3].add_(1),
    "data set": lambda w: setattr(w, "data", torch.randn_like(w)),
    "data set twice": set_twice,
    "set_": lambda w: w.set_(torch.randn_like(w)),
    "swapped": swapped,
    "an optimiser": stepped,
    "an adapter merged": low_rank,
    "storage resized": resized,
    "numpy": lambda w: w.detach().numpy().fill(3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", [(300, 200), (8, 6)])
def test_no_stale_answer(asked, change, shape):
    w = parameter(*shape)
    with torch.no_grad():
        for _ in range(5):
            asked(w)
            CHANGES[change](w)
            torch.testing.assert_close(asked(w), w.sum())


def test_dtypes_and_other_weights_at_one_address(asked):
    linear = nn.Linear(40, 30, bias=False)
    with torch.no_grad():
        for dtype in [torch.float64, torch.bfloat16, torch.float32]:
            asked(linear.weight)
            found = asked(linear.to(dtype).weight)
            assert found.dtype == dtype
        for _ in range(20):  # memory and ids are used again
            w = parameter(40, 30)
            torch.testing.assert_close(asked(w), w.sum())
            del w


def test_nothing_is_kept_where_it_might_be_another(asked):
    w = parameter(5, 4)
    asked(w), asked(w)  # a gradient may be wanted
    assert len(asked.calls) == 2
    with torch.no_grad():
        asked(w + 0), asked(w + 0)  # effective weights
        assert len(asked.calls) == 4
        torch.func.vmap(lambda s: s * asked(w))(torch.ones(3))
        with torch.autocast("cpu"):
            asked(w)
        with FlopCounterMode(display=False):
            asked(w)
    assert len(asked.calls) == 7
    linear = parametrizations.weight_norm(nn.Linear(4, 5))
    with torch.no_grad():
        for _ in range(2):
            asked(linear.weight)
    assert len(asked.calls) == 9


def test_training_and_deletion_forget(asked):
    w = parameter(5, 4)
    with torch.no_grad():
        asked(w)
    assert id(w) in module._found
    asked(w)
    assert id(w) not in module._found
    gone = parameter(5, 4)
    with torch.no_grad():
        asked(gone)
        before = len(module._found)
        del gone
        gc.collect()
        asked(w)
    assert len(module._found) <= before


CASES = [
    {"granularity": granularity, "activation": activation}
    for granularity in ["token", "feature"]
    for activation in ["gelu", "swiglu"]
]


@pytest.mark.parametrize("config", CASES, ids=str)
def test_a_layer_in_evaluation_is_the_layer_it_is(config):
    """Each change of weights, against a copy that never saw others."""
    layer, belief = make_layer(**config), make_belief()
    other = make_layer(seed=7, **config).state_dict()

    def merged():
        layer.linear1.weight.data += 0.1
        layer.norm2.weight.data *= 1.3
        layer.self_attn.out_proj.weight.data *= 1.1

    changes = [
        lambda: layer.load_state_dict(other),
        lambda: layer.linear2.weight.mul_(1.5),
        lambda: layer.norm2.bias.add_(0.3),
        lambda: layer.norm1.weight.mul_(0.7),
        lambda: layer.self_attn.in_proj_weight.mul_(1.2),
        merged,
        lambda: layer.load_state_dict(
            make_layer(seed=8, **config).state_dict(), assign=True
        ),
    ]
    with torch.no_grad():
        for change in changes:
            once = layer(belief)
            torch.testing.assert_close(layer(belief), once, rtol=0, atol=0)
            change()
            found = layer(belief)
            assert (found.log_precision != once.log_precision).any()
            fresh = copy.deepcopy(layer)
            torch.testing.assert_close(found, fresh(belief), rtol=0, atol=0)
    trained = layer(belief)
    torch.testing.assert_close(trained, found, rtol=0, atol=0)
