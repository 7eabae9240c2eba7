"""What the paper leaves open, and our choices."""

from dataclasses import dataclass
from typing import Literal

from bft_ref.reml import Reading
from bft_ref.support import checks

#: how attention is computed: see :mod:`bft_ref.fast.attention`
Implementation = Literal["auto", "eager", "chunked", "flex"]
#: what a layer reads as the innovation
Innovation = Literal["increment", "difference"]
#: how a state moves from layer to layer beside its network
Dynamics = Literal["random_walk", "ornstein_uhlenbeck"]


@dataclass(frozen=True)
class BFTConfig:
    """Options of a layer, chosen at its construction.

    Raises: TypeError, ValueError for values that are none of an option's.
    """

    #: a precision per feature, or one per token
    granularity: Literal["feature", "token"] = "feature"
    #: what the observation precision is a precision of: one more value as
    #: kriging predicts it, the local mean, or a value around a known mean
    reading: Reading = "prediction"
    #: what attention adds, e, is the innovation: h' = h + K∘e; or e is the
    #: observation z: h' = h + K∘(z − h), which at K = 1 is no residual
    #: connection any more, but forgets h
    innovation: Innovation = "increment"
    #: s₀² from the neighbours' own variances, or 1
    prior_scale: Literal["neighbours", "unit"] = "neighbours"
    #: ν₀ > 0 of the inverse-χ² prior
    prior_dof: float = 1.0
    #: carry the variance through W_O into state units; else feature i of the
    #: concatenated heads speaks for feature i of the state
    project_variance: bool = True
    #: the norm's whole Jacobian, its first term, or random signs, which are
    #: used anyway where a network's matrices are unknown
    jacobian: Literal["exact", "first", "hutchinson"] = "exact"
    #: the paper's diagonal, or a one-probe estimate of the exact first-order
    #: variance (feature granularity only)
    variance_rule: Literal["diagonal", "row"] = "diagonal"
    #: initial Q > 0, in state²
    process_noise: float = 1.0
    #: variances grow by Q without bound, or return to a stationary one: see
    #: :func:`bft_ref.delta.ornstein_uhlenbeck`
    dynamics: Dynamics = "random_walk"
    #: ς² > 0 that ``ornstein_uhlenbeck`` returns to, in state²; 1 is that of
    #: a white normalised state
    stationary_variance: float = 1.0
    #: ``eager``: the readable functions, which form the T×T weights; other
    #: ways to the same numbers: see :mod:`bft_ref.fast.attention`
    implementation: Implementation = "auto"
    #: False drops the gradient through n_eff, which is cheaper
    n_eff_gradient: bool = True
    #: False drops the gradient through J, which then costs little in training
    jacobian_gradient: bool = True

    def __post_init__(self):
        checks.typed(self)
        checks.number("prior_dof", self.prior_dof, 0.0)
        checks.number("process_noise", self.process_noise, 0.0)
        check_dynamics(self)
        if self.variance_rule == "row" and self.granularity == "token":
            raise ValueError(
                "variance_rule: 'row' needs granularity='feature', got 'token'"
            )


def check_dynamics(config) -> None:
    """Raise ValueError for a stationary variance that is bad or not read."""
    checks.number("stationary_variance", config.stationary_variance, 0.0)
    if config.dynamics == "random_walk":
        reader = f"dynamics {config.dynamics!r}"
        checks.unread(config, {"stationary_variance": reader})
