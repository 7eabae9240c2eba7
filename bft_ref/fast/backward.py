"""What hand-written backward passes share.

Each kernel has its plain counterpart in :mod:`bft_ref.kriging` or
:mod:`bft_ref.delta`, against which it is tested, gradients included. It has a
first derivative in reverse mode; for a second one the backward pass is the
plain form's, and :func:`bft_ref.support.derivatives.reverse_mode_only` says
where it cannot go.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bft_ref.support.derivatives import inside_torch_func


def by_plain_form(grads: Iterable[Tensor | None]) -> bool:
    """Whether a backward pass is itself differentiated, or many at once."""
    if torch.compiler.is_compiling():
        return False
    batched = torch._C._functorch.is_legacy_batchedtensor
    return (
        torch.is_grad_enabled()
        or inside_torch_func()
        or any(batched(g) for g in grads if g is not None)
    )


def differentiated(inputs: Iterable, plain, grads) -> tuple:
    """Gradients that can be differentiated again: those of the plain form."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # of views: one input may have been computed from another, and what
        # flows back through that is added where it was computed
        inputs = [x if x is None else x.view_as(x) for x in inputs]
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        outputs = plain(*inputs)
    pairs = [
        (y, g)
        for y, g in zip(outputs, grads, strict=True)
        if g is not None and y.requires_grad
    ]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            leaves,
            [g for _, g in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return tuple(
        next(found) if x is not None and x.requires_grad else None
        for x in inputs
    )
