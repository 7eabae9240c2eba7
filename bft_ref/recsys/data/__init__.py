"""Interaction sequences: files, public data sets and a generator.

Everything becomes one :class:`Sequences`: users, each with item ids in time
order. Item ids run from 1 to ``n_items``; 0 is padding.
"""

from bft_ref.recsys.data.datasets import DATASETS, Dataset, fetch, load
from bft_ref.recsys.data.errors import (
    DuplicateError,
    EmptyUserError,
    ItemRangeError,
)
from bft_ref.recsys.data.frames import Catalogue, from_frame
from bft_ref.recsys.data.generator import Simulation, simulate
from bft_ref.recsys.data.readers import (
    READERS,
    k_core,
    read_amazon,
    read_letter,
    read_movielens,
    read_recbole,
    read_s3rec,
)
from bft_ref.recsys.data.sequences import Sequences, Split
from bft_ref.training.files import (
    DataError,
    DataUnavailableError,
    MalformedLineError,
)

__all__ = [
    "DATASETS",
    "READERS",
    "Catalogue",
    "DataError",
    "DataUnavailableError",
    "Dataset",
    "DuplicateError",
    "EmptyUserError",
    "ItemRangeError",
    "MalformedLineError",
    "Sequences",
    "Simulation",
    "Split",
    "fetch",
    "from_frame",
    "k_core",
    "load",
    "read_amazon",
    "read_letter",
    "read_movielens",
    "read_recbole",
    "read_s3rec",
    "simulate",
]
