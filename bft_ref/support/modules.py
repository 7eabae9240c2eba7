"""What a user's module multiplies by: adapters, hooks and all.

The layer calls the modules that it has. Where a variance needs the matrix of
one, it is looked for here, and held against what the module really did.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32, autocast_device

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody would notice that a module is not called.

    Hooks on all modules at once, which profilers set, do not count.
    """
    return "forward" in vars(module) or any(
        getattr(module, hooks) for hooks in HOOKS
    )


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether Wx + b with the module's own W and b is all it does.

    W may be parametrised: it is what reading ``module.weight`` gives.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not is_watched(module)
    )


def apply(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the module makes of x, and W where that is Wx + b, else None.

    W is the module's own, with what an adapter of peft adds; that of another
    module is found by calling it once more, on the unit vectors and in
    evaluation mode. It is held against what was made, unless dropout inside
    the module or a compiler keeps it from being compared: then hooks, which
    may change anything, leave it unknown.

    Shapes: ``x`` (..., m) → (..., k) and (k, m).
    """
    if is_linear(module):
        w = module.weight
        return F.linear(x, w, module.bias), w
    y = module(x)
    watched = any(is_watched(part) for part in module.modules())
    thinned = _thins(module)
    if watched and (thinned or not checks.values_can_be_read()):
        return y, None
    for find, tolerance in [
        (_own, 1e-4),
        (_adapted, 1e-4),
        (_by_unit_vectors, 0.02),  # as rough as eight bits are
    ]:
        found = find(module, x)
        if found is None:
            continue
        sure = thinned or not (watched or find is _by_unit_vectors)
        same = None if sure else _agree(*found, x, y, tolerance)
        if same or (same is None and not watched):
            return y, found[0]
    return y, None


def apply_norm(
    name: str,
    module: nn.Module,
    x: Tensor,
    normalise: Callable,
    hooks: bool = True,
) -> tuple[Tensor, Any]:
    """The output of a norm, and its :class:`bft_ref.delta.Normalised`.

    ``hooks=False``: those of the module are left out, as where a function
    is differentiated.

    Raises: TypeError for another module than LayerNorm and RMSNorm;
    ValueError for a hook that changes the output.
    """
    forward = getattr(type(module), "forward", None)
    if forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        raise TypeError(
            f"{name}: expected nn.LayerNorm or nn.RMSNorm, through which "
            f"precision goes in closed form, got {type(module).__name__}"
        )
    norm_module = cast(nn.LayerNorm, module)  # or RMSNorm
    checks.shape(f"{name}: input", x[0, 0], norm_module.normalized_shape)
    watched = hooks and is_watched(module)
    least = torch.finfo(x.dtype).eps
    # first: a hook may set the weight, as pruning does
    made = module(x).to(x.dtype) if watched else None
    norm = normalise(
        x,
        module.weight,
        getattr(module, "bias", None),
        own if (own := norm_module.eps) is not None else least,
        forward is nn.LayerNorm.forward,
    )
    output = norm.output.to(x.dtype)
    if made is None:
        return output, norm
    apart = (at_least_float32(made) - at_least_float32(output)).abs()
    tolerance = max(1e-4, 2 * torch.finfo(x.dtype).eps)
    changed = apart > tolerance * (1 + at_least_float32(output).abs())
    said = (
        f"{name}: expected hooks that only look, got one that changes "
        "the output, which precision cannot follow"
    )
    if not checks.values_can_be_read():
        torch._assert_async(~changed.any(), said)
    elif checks.anywhere(changed) == [True]:
        raise ValueError(said)
    return made, norm


def squared_map(module: nn.Module, variance: Tensor, signs: Tensor) -> Tensor:
    """Σ_k W[i,k]² v_k of an affine module, unbiased over random signs.

    Shapes: ``variance`` and ``signs``, of ±1, (..., m) → (..., k).
    """
    tiny = torch.finfo(variance.dtype).tiny
    x = signs * variance.clamp(min=tiny).sqrt().to(signs.dtype)
    with evaluated(module):
        return at_least_float32(
            module(x) - module(torch.zeros_like(x))
        ).square()


def _own(module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    if (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and module.weight.device == x.device  # else it was offloaded
    ):
        return module.weight, module.bias
    return None


def _adapted(module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """The base's plus the active adapters' of peft's LoRA, unless merged."""
    base = getattr(module, "base_layer", None)
    if not (isinstance(base, nn.Linear) and hasattr(module, "lora_variant")):
        return None
    own = _own(base, x)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if own is None or any(
        name in module.lora_variant or module.lora_bias.get(name)
        for name in names
    ):
        return None
    w, b = own
    if not module.merged and not module.disable_adapters:
        for name in names:
            w = w + module.get_delta_weight(name).to(w.dtype)
    return w, b


def _by_unit_vectors(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of an affine module from what it makes of 0 and I."""
    features = x.shape[-1]
    points = torch.eye(features + 1, features, dtype=x.dtype, device=x.device)
    with evaluated(module):
        made = module(points.roll(1, 0)[None])[0]  # of 0 first, then of I
    return (made[1:] - made[0]).mT, made[0]


def _agree(
    w: Tensor, b: Tensor | None, x: Tensor, y: Tensor, tolerance: float
) -> bool | None:
    """Whether y = Wx + b; None where that cannot be read."""
    with torch.no_grad(), torch.autocast(autocast_device(x), enabled=False):
        made = F.linear(
            at_least_float32(x),
            at_least_float32(w),
            None if b is None else at_least_float32(b),
        )
        if y.dtype in (torch.bfloat16, torch.float16):
            tolerance = max(tolerance, 0.05)
        error = torch.linalg.vector_norm(at_least_float32(y) - made)
        size = torch.linalg.vector_norm(made)
        answer = checks.anywhere(error <= tolerance * size)
    return None if answer is None else answer[0]


def _thins(module: nn.Module) -> bool:
    """Whether dropout in the module keeps it from doing the same twice."""
    return any(
        isinstance(part, _DropoutNd) and part.training and part.p > 0
        for part in module.modules()
    )


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """In evaluation mode: no dropout, no statistics."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def warn_unknown(name: str) -> None:
    """Say that a module's matrix is estimated, where that can be said."""
    if checks.values_can_be_read():  # a warning would break the graph
        warnings.warn(
            f"BFTLayer: what {name} does is not known to be Wx + b (a hook?); "
            "what the variances need of it is estimated by random signs",
            stacklevel=5,
        )
