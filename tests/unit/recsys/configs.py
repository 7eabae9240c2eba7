"""One configuration for several models, so that tests can go through them."""

from dataclasses import fields
from typing import Any

from bft_ref.layer import BFTConfig
from bft_ref.recsys.models import CONFIGS, HSTUFilter, RecommenderConfig


def make_config(model: str = "sasrec", **given: Any) -> RecommenderConfig:
    """The model's own; HSTU has no network, and its filter fewer options."""
    if model == "hstu":
        given.pop("dim_feedforward", None)
        if isinstance(given.get("bft"), BFTConfig):
            chosen = vars(given["bft"])
            chosen = chosen | {"project_variance": chosen["project"]}
            read = [field.name for field in fields(HSTUFilter)]
            given["bft"] = HSTUFilter(**{name: chosen[name] for name in read})
    return CONFIGS[model](**given)
