"""What the files of 0.1.0 call otherwise: its configurations and results.

Files of version 1, all of ``results/`` until now, stay as they were written;
whoever reads one reads it through here. Every field of theirs is named, so
that one that nobody knows is an error.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from bft_ref.config import BFTConfig
from bft_ref.recsys.models import CONFIGS, HSTUConfig, HSTUFilter
from bft_ref.support import checks

Fields = dict[str, Any]

#: what is written now: 2, where 0.1.0 wrote 1, or in results nothing
VERSION = 2

#: 0.1.0's name → today's
MODEL = {
    "n_items": "n_items",
    "d": "d_model",
    "layers": "num_layers",
    "heads": "nhead",
    "ffn": "dim_feedforward",
    "length": "max_length",
    "dropout": "dropout",
    "embedding_std": "embedding_std",
    "activation": "activation",
    "residual": "residual",
    "gate": "gate",
    "gate_value": "gate_value",
    "tau_bias": "tau_bias",
    "tau": "tau",
    "tau_power": "tau_power",
    "tau_start": "tau_start",
    "temperature": "temperature",
    "bft": "bft",
}
FILTER = {
    "granularity": "granularity",
    "observation": "reading",
    "prior_scale": "prior_scale",
    "prior_dof": "prior_dof",
    "project": "project_variance",
    "jacobian": "jacobian",
    "variance_rule": "variance_rule",
    "process_noise": "process_noise",
    "implementation": "implementation",
    "n_eff_gradient": "n_eff_gradient",
}
#: 0.1.0's implementations of attention → today's
WAYS = {"materialised": "eager", "blocked": "chunked"}
TRAIN = {
    "loss": "loss",
    "negatives": "num_negatives",
    "correct": "logq_correction",
    "calibration": "gbce_t",
    "epochs": "epochs",
    "patience": "patience",
    "evaluate_every": "evaluate_every",
    "batch": "batch_size",
    "lr": "lr",
    "precision_lr": "precision_lr",
    "weight_decay": "weight_decay",
    "clip": "clip",
    "every_window": "every_window",
    "mask_rate": "mask_rate",
    "last_rate": "last_rate",
    "seed": "seed",
}
RESULT = {"anatomy": "diagnostics"}

#: 0.1.0 had one configuration for all models. Each of today's has only what
#: it reads; the rest stood at these values, or was refused.
UNREAD = {
    "activation": "gelu",
    "residual": "pre",
    "gate": "none",
    "gate_value": 1.0,
    "tau_bias": False,
    "temperature": 0.05,
    "reading": "prediction",
    "jacobian": "exact",
    "variance_rule": "diagonal",
    "implementation": "auto",
    "n_eff_gradient": True,
    "mask_rate": 0.3,
    "last_rate": 0.1,
}
#: came while runs were made, of either version: what those without it did
LATER = {"embedding_std": None, "head": "dot"}
LATER_FILTER = {
    "innovation": "increment",
    "dynamics": "random_walk",
    "stationary_variance": 1.0,
    "jacobian_gradient": True,
}
LATER_TRAIN = {"noise_prior_sd": 0.0}


def of_today(result: Fields) -> Fields:
    """A run's result, whichever version wrote it, in today's words.

    Raises: ValueError for a field that is not known, or one whose value its
    model did not read; a version that is newer than this code.
    """
    version = result.get("version", 1)
    readable(version)
    found = dict(result)
    if version == 1:
        found = {RESULT.get(name, name): x for name, x in result.items()}
    found["version"] = VERSION
    if "train" in result:  # counting has no configuration
        model, train = result["model"], result["train"]
        if version == 1:
            train = _renamed(train, TRAIN)
            names = ("mask_rate", "last_rate")
            masks = {name: train.pop(name) for name in names}
            model = model_of_today(model, masks)
        found["model"] = _completed(model)
        found["train"] = LATER_TRAIN | train
    return found


def _completed(model: Fields) -> Fields:
    """A model's fields, with those of its class that came later."""
    kind = CONFIGS[model["model"]]
    found = _later(LATER, kind) | model
    if isinstance(found["bft"], dict):
        known = HSTUFilter if kind is HSTUConfig else BFTConfig
        found["bft"] = _later(LATER_FILTER, known) | found["bft"]
    return found


def _later(values: Fields, kind: type) -> Fields:
    known = {field.name for field in fields(kind)}
    return {name: x for name, x in values.items() if name in known}


def readable(version: Any) -> None:
    """Raises: ValueError for a newer version, or what is none."""
    if version not in range(1, VERSION + 1):
        raise ValueError(
            f"version: expected at most {VERSION}, got {version!r}; the "
            "bft_ref that wrote it can read it"
        )


def of_storage(content: Fields) -> Fields:
    """What 0.1.0's ``to_json`` wrote, as today's would. Raises: ValueError."""
    kind, given = content.get("kind"), content["fields"]
    if not isinstance(given, dict):
        return content
    if kind == "ModelConfig":
        given = model_of_today(given, {})
        kind = CONFIGS[given.pop("model")].__name__
    elif kind == "TrainConfig":
        names = set(TRAIN.values()) - {"mask_rate", "last_rate"}
        given = _read(_renamed(given, TRAIN), names)
    elif kind == "BFTConfig":
        given = _filter(given)
    return {"kind": kind, "version": VERSION, "fields": given}


def model_of_today(model: Fields, masks: Fields) -> Fields:
    """A model's fields, with its name as ``model``. Raises: ValueError."""
    given = dict(model)
    name = checks.choice("model", given.pop("model", "sasrec"), CONFIGS)
    given = _renamed(given, MODEL) | masks
    if name == "hstu":
        given.pop("dim_feedforward", None)  # a size, which was never refused
    given = _read(given, {field.name for field in fields(CONFIGS[name])})
    if isinstance(given.get("bft"), dict):
        kind = HSTUFilter if name == "hstu" else BFTConfig
        known = {field.name for field in fields(kind)}
        given["bft"] = _read(_filter(given["bft"]), known)
    return {"model": name, **given}


def _filter(bft: Fields) -> Fields:
    found = _renamed(bft, FILTER)
    way = found.get("implementation")
    return found | {"implementation": WAYS.get(way, way)} if way else found


def _renamed(given: Fields, names: Mapping[str, str]) -> Fields:
    for name in given:
        if name not in names:
            raise ValueError(
                f"{name}: expected a field that 0.1.0 knew "
                f"({', '.join(sorted(names))})"
            )
    return {names[name]: value for name, value in given.items()}


def _read(given: Fields, known: Collection[str]) -> Fields:
    """Without what is not read, which must not say anything."""
    for name, value in given.items():
        if name not in known and value != UNREAD[name]:
            raise ValueError(
                f"{name}: expected {UNREAD[name]!r} where nothing reads it, "
                f"got {value!r}"
            )
    return {name: x for name, x in given.items() if name in known}
