"""What the paper leaves open, and our choices."""

from dataclasses import dataclass
from typing import Literal

from bft_ref.fast import Implementation
from bft_ref.reml import Reading
from bft_ref.support import checks


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
    #: ``eager``: the readable functions, which form the T×T weights; other
    #: ways to the same numbers: see :mod:`bft_ref.fast.attention`
    implementation: Implementation = "auto"
    #: False drops the gradient through n_eff, which is cheaper
    n_eff_gradient: bool = True

    def __post_init__(self):
        checks.typed(self)
        checks.number("prior_dof", self.prior_dof, 0.0)
        checks.number("process_noise", self.process_noise, 0.0)
        if self.variance_rule == "row" and self.granularity == "token":
            raise ValueError(
                "variance_rule: 'row' needs granularity='feature', got 'token'"
            )
