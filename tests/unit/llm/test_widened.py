"""Log precision as more features: nothing is lost on the way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bft_ref import Belief
from bft_ref.llm.widened import columns, narrow, numbers, widen


@given(st.floats(-90, 90, width=32))
def test_two_halves_hold_what_sixteen_bits_lose(x):
    log = torch.tensor([x])
    for dtype, bits in [(torch.bfloat16, 17), (torch.float16, 20)]:
        made = columns(log, dtype)
        assert made.dtype == dtype and made.shape == (2,)
        error = (numbers(made) - log).abs()
        assert error <= 2.0**-bits * abs(x) + 1e-7


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_infinite_precision_stays_infinite(dtype):
    log = torch.tensor([[-torch.inf], [torch.inf], [0.0]])
    assert torch.equal(numbers(columns(log, dtype)).float(), log)


@pytest.mark.parametrize("features", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_belief_comes_back_bit_for_bit(features, dtype):
    made = torch.randn(2, 3, 8 + features, dtype=dtype)
    belief = Belief(made[..., :8], made[..., 8:])
    wide = widen(belief)
    assert wide.shape == made.shape
    for found, given_ in zip(narrow(wide, 8), belief, strict=True):
        assert torch.equal(found, given_)


def test_a_belief_in_bfloat16_keeps_its_log_precision():
    mean = torch.randn(2, 3, 8).bfloat16()
    log = 20 * torch.rand(2, 3, 8) - 10
    back = narrow(widen(Belief(mean, log)), 8)
    assert torch.equal(back.mean, mean)
    torch.testing.assert_close(back.log_precision, log, rtol=0, atol=1e-4)
