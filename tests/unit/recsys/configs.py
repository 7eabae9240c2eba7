"""One configuration for several models, so that tests can go through them."""

from dataclasses import fields
from typing import Any

from bft_ref.config import BFTConfig
from bft_ref.recsys.models import CONFIGS, HSTUFilter, RecommenderConfig


def make_config(model: str = "sasrec", **given: Any) -> RecommenderConfig:
    """The model's own; HSTU has no network, and its filter fewer options."""
    if model == "hstu":
        given.pop("dim_feedforward", None)
        if isinstance(given.get("bft"), BFTConfig):
            read = [field.name for field in fields(HSTUFilter)]
            chosen = {name: getattr(given["bft"], name) for name in read}
            given["bft"] = HSTUFilter(**chosen)
    return CONFIGS[model](**given)
