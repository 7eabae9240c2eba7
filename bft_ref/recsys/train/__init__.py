"""Train and evaluate: ``python -m bft_ref.recsys.train --help``."""

from bft_ref.recsys.train.batches import Batch, training_batches
from bft_ref.recsys.train.diagnostics import diagnose, interventions
from bft_ref.recsys.train.losses import LOSSES, next_item_loss
from bft_ref.recsys.train.trainer import (
    Fitted,
    TrainConfig,
    evaluate,
    fit,
    scorer,
)
from bft_ref.training.checkpoint import RunError

__all__ = [
    "LOSSES",
    "Batch",
    "Fitted",
    "RunError",
    "TrainConfig",
    "diagnose",
    "evaluate",
    "fit",
    "interventions",
    "next_item_loss",
    "scorer",
    "training_batches",
]
