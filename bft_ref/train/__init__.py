"""Train and evaluate a recommender: ``python -m bft_ref.train --help``."""

from bft_ref.train.batches import Batch, training_batches
from bft_ref.train.losses import LOSSES, next_item_loss
from bft_ref.train.mechanism import anatomy, interventions
from bft_ref.train.trainer import (
    Fitted,
    TrainConfig,
    evaluate,
    fit,
    scorer,
)

__all__ = [
    "LOSSES",
    "Batch",
    "Fitted",
    "TrainConfig",
    "anatomy",
    "evaluate",
    "fit",
    "interventions",
    "next_item_loss",
    "scorer",
    "training_batches",
]
