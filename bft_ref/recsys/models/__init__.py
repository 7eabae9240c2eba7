"""SASRec, BERT4Rec and HSTU, each with or without the Bayesian filter."""

from bft_ref.initial_precision import InitialPrecision
from bft_ref.recsys.models.base import (
    Recommender,
    RecommenderConfig,
    as_batch,
)
from bft_ref.recsys.models.bert4rec import BERT4Rec, BERT4RecConfig
from bft_ref.recsys.models.gates import GATES, Gate
from bft_ref.recsys.models.heads import Head
from bft_ref.recsys.models.hstu import HSTU, HSTUConfig, HSTUFilter
from bft_ref.recsys.models.sasrec import SASRec, SASRecConfig
from bft_ref.recsys.models.top import Top, top_items

MODELS: dict[type[RecommenderConfig], type[Recommender]] = {
    SASRecConfig: SASRec,
    BERT4RecConfig: BERT4Rec,
    HSTUConfig: HSTU,
}
#: the configuration of each model, by its name in results
CONFIGS = {config.model: config for config in MODELS}


def build(config: RecommenderConfig, frequency=None) -> Recommender:
    """The model of a configuration.

    ``frequency`` (n_items + 1,) is needed where the initial precision is
    fixed from it; elsewhere it is only checked.
    Raises: TypeError or ValueError for another config or frequency.
    """
    if type(config) not in MODELS:
        raise TypeError(
            "config: expected one of "
            f"{', '.join(kind.__name__ for kind in MODELS)}, got "
            f"{type(config).__name__}"
        )
    return MODELS[type(config)](config, frequency)


__all__ = [
    "CONFIGS",
    "GATES",
    "HSTU",
    "MODELS",
    "BERT4Rec",
    "BERT4RecConfig",
    "Gate",
    "HSTUConfig",
    "HSTUFilter",
    "Head",
    "InitialPrecision",
    "Recommender",
    "RecommenderConfig",
    "SASRec",
    "SASRecConfig",
    "Top",
    "as_batch",
    "build",
    "top_items",
]
