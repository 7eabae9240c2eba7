"""The Bayesian Filtering Transformer: the code of the book.

Shapes, everywhere: B batch, T tokens that ask (queries), S tokens that are
seen (keys), H heads, d features of the state, d_h = d/H of a head, f hidden
units of the network. Precision is in 1/state², and kept as its logarithm.
"""

from bft_ref.belief import Belief, discount, fuse
from bft_ref.config import BFTConfig
from bft_ref.encoder import BFTEncoder
from bft_ref.fast.attention import attend
from bft_ref.initial_precision import ItemPrecision, MLPPrecision
from bft_ref.kalman import gain, update
from bft_ref.kriging import kriging_attention, kriging_weights
from bft_ref.layer import BFTLayer
from bft_ref.support.cache import KeyValueCache
from bft_ref.textbook import (
    local_level_filter,
    ordinary_kriging,
    simple_kriging,
    steady_state_precision,
)

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
