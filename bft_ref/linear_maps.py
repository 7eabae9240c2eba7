"""What a user's module multiplies by: adapters, hooks and all.

The layer calls the modules that it has. Where a variance needs the matrix of
one, it is looked for here, and held against what the module really did.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import checks

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


def is_plain(module: nn.Module) -> bool:
    """Whether Wx + b with the module's own W and b is all it does."""
    return type(module) is nn.Linear and not is_watched(module)


def effective_weight(module: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """W with y = Wx + b, where the module made y of x; None if unknown.

    That of a linear layer, pruned or parametrised, as it was when called; of
    one of peft's adapters, with what it adds; of any other module, taken as
    affine, by the unit vectors. None if y is something else: a hook may have
    changed it.

    Shapes: ``x`` (..., m), ``y`` (..., k) → (k, m).
    """
    w: Tensor
    b: Tensor | None
    exact = type(module).forward is nn.Linear.forward
    if isinstance(module, nn.Linear) and exact:
        w, b = module.weight, module.bias
    elif hasattr(module, "get_delta_weight"):
        w, b = _adapted(module, x)
    else:
        w, b = _by_unit_vectors(module, x)
    if not checks.values_can_be_read():
        return None if is_watched(module) else w
    if module.training and not exact:
        return w  # an adapter's dropout changes y, not what it stands for
    with torch.no_grad():
        bias = None if b is None else b.to(w.dtype)
        error = torch.linalg.vector_norm(
            y.to(w.dtype) - F.linear(x.to(w.dtype), w, bias)
        )
        rough = not exact or y.dtype in (torch.bfloat16, torch.float16)
        same = error <= (0.05 if rough else 1e-4) * y.norm().to(w.dtype)
    return w if bool(same) else None


def _adapted(module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Base weight plus the active adapters', unless they are merged in."""
    base = module.base_layer
    names = [name for name in module.active_adapters if name in module.lora_A]
    if getattr(base, "weight", None) is None or any(
        getattr(module, "use_dora", {}).get(name) for name in names
    ):
        return _by_unit_vectors(module, x)
    w = base.weight
    if not module.merged and not module.disable_adapters:
        for name in names:
            w = w + module.get_delta_weight(name).to(w.dtype)
    return w, base.bias


def _by_unit_vectors(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of an affine module from what it makes of 0 and I."""
    features = x.shape[-1]
    points = torch.eye(features + 1, features, dtype=x.dtype, device=x.device)
    made = module(points.roll(1, 0)[None])[0]  # (1, features + 1, features)
    return (made[1:] - made[0]).mT, made[0]
