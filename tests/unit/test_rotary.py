"""Rotary positions against complex numbers and against their purpose."""

import numpy as np
import pytest
import torch

from bft_ref.rotary import rotate
from tests.oracles import loops


@pytest.mark.parametrize("start", [0, 7])
def test_rotation_equals_complex_multiplication(start):
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    found = rotate(x, 50.0, start)
    for b in range(2):
        for h in range(3):
            expected = loops.rotated(x[b, h].numpy(), 50.0, start)
            np.testing.assert_allclose(found[b, h], expected, 1e-12, 1e-12)


def test_scores_depend_on_distance_alone_and_lengths_stay():
    q, k = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64)
    near = rotate(q) @ rotate(k).mT
    far = rotate(q, start=1000) @ rotate(k, start=1000).mT
    torch.testing.assert_close(near, far)
    torch.testing.assert_close(rotate(q).norm(dim=-1), q.norm(dim=-1))
    assert (near - q @ k.mT).abs().max() > 0.1


def test_position_zero_is_not_turned():
    q = torch.randn(1, 1, 1, 4)
    torch.testing.assert_close(rotate(q), q, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_angles_are_float32_or_wider(dtype):
    x = torch.ones(1, 1, 4096, 4, dtype=dtype)
    found = rotate(x)
    assert found.dtype == dtype
    error = (found.double() - rotate(x.double())).abs().max()
    assert error < (5e-3 if dtype == torch.bfloat16 else 5e-4)


def test_gradcheck_of_rotation():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, start=2), x)


def test_odd_sizes_are_refused():
    with pytest.raises(ValueError, match="^x: .*even.*3"):
        rotate(torch.ones(1, 1, 2, 3))
