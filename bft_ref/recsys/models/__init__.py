"""SASRec, BERT4Rec and HSTU, each with or without the Bayesian filter."""

from bft_ref.recsys.models.base import ModelConfig, Recommender, as_batch
from bft_ref.recsys.models.bert4rec import BERT4Rec
from bft_ref.recsys.models.gates import GATES, Gate
from bft_ref.recsys.models.hstu import HSTU
from bft_ref.recsys.models.precision import InitialPrecision
from bft_ref.recsys.models.sasrec import SASRec

MODELS: dict[str, type[Recommender]] = {
    "sasrec": SASRec,
    "bert4rec": BERT4Rec,
    "hstu": HSTU,
}


def build(config: ModelConfig, frequency=None) -> Recommender:
    """The model that ``config.model`` names.

    ``frequency`` (n_items + 1,) is needed where the initial precision is
    fixed from it; elsewhere it is only checked.
    Raises: TypeError or ValueError for another config or frequency.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"config: expected a ModelConfig, got {type(config).__name__}"
        )
    return MODELS[config.model](config, frequency)


__all__ = [
    "GATES",
    "HSTU",
    "MODELS",
    "BERT4Rec",
    "Gate",
    "InitialPrecision",
    "ModelConfig",
    "Recommender",
    "SASRec",
    "as_batch",
    "build",
]
