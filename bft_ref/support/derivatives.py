"""Forward mode, and where hand-written backward passes cannot go."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

Found = TypeVar("Found")


def jvp(
    function: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor
) -> tuple[Tensor, Tensor]:
    """f(x) and its derivative along the tangent, all shaped as x.

    Raises: RuntimeError where the derivative would silently be zero.
    """
    try:
        y, derivative, *_ = torch.func.jvp(
            function, (x,), (tangent,), strict=True
        )
    except RuntimeError as error:
        if "strict=True" in str(error):
            raise RuntimeError(
                "activation, ffn, linear1, linear2: expected a derivative in "
                "forward mode, got none; a custom or quantised operator drops "
                "it without a word"
            ) from error
        if "Nested forward mode" in str(error):
            raise RuntimeError(
                "forward_ad.dual_level: the Jacobian of this activation or "
                "network is itself taken in forward mode, which does not nest "
                "there; use torch.func.jvp"
            ) from error
        raise
    return y, derivative


def inside_torch_func() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._are_functorch_transforms_active()


def reverse_mode_only(*tensors: Tensor) -> bool:
    """Whether a derivative is being taken that fast kernels do not have.

    That is one in forward mode, whose tangents a custom operator would drop
    without a word, or a transform of ``torch.func``.
    """
    if inside_torch_func():
        return True
    if forward_ad._current_level < 0:
        return False
    return torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def constant_unless(gradient: bool, compute: Callable[[], Found]) -> Found:
    """``compute()``; of tensors that no derivative sees unless ``gradient``.

    Neither in reverse mode, where it then keeps nothing, nor in forward mode.
    """
    if gradient:
        return compute()
    with torch.no_grad():
        return tree_map_only(Tensor, Tensor.detach, compute())
