"""The Bayesian Filtering Transformer: the code of the book."""

from bft_ref.belief import Belief, discount, fuse
from bft_ref.cache import KeyValueCache
from bft_ref.encoder import BFTEncoder
from bft_ref.fast.attention import attend
from bft_ref.initial_precision import ItemPrecision, MLPPrecision
from bft_ref.kalman import (
    gain,
    local_level_filter,
    steady_state_precision,
    update,
)
from bft_ref.kriging import (
    kriging_attention,
    kriging_weights,
    ordinary_kriging,
    simple_kriging,
)
from bft_ref.layer import BFTConfig, BFTLayer

__all__ = [
    "BFTConfig",
    "BFTEncoder",
    "BFTLayer",
    "Belief",
    "ItemPrecision",
    "KeyValueCache",
    "MLPPrecision",
    "attend",
    "discount",
    "fuse",
    "gain",
    "kriging_attention",
    "kriging_weights",
    "local_level_filter",
    "ordinary_kriging",
    "simple_kriging",
    "steady_state_precision",
    "update",
]
__version__ = "0.1.0"
