"""A run that goes on from where it stopped, or says why it cannot."""

import json
from pathlib import Path
from typing import Any

import torch

from bft_ref.training.files import replacing


class RunError(ValueError):
    """A run that cannot begin, go on or be reported as it was asked for."""


def save(path: Path, identity: Any, state: dict[str, Any]) -> None:
    """Write a run's ``state`` beside what it is a state of, as JSON."""
    with replacing(path) as unfinished:
        torch.save({"identity": _text(identity), **state}, unfinished)


def load(
    path: Path, identity: Any, device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """The state that :func:`save` wrote; no code of the file is run.

    Raises: RunError for the state of another run.
    """
    found = torch.load(path, map_location=device, weights_only=True)
    if found.pop("identity") != _text(identity):
        raise RunError(
            f"checkpoint: {path} belongs to another configuration, data file "
            "or number of processes; remove it or choose another path"
        )
    return found


def _text(identity: Any) -> str:
    return json.dumps(identity, sort_keys=True)
