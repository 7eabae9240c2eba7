"""Configurations as JSON, and a recommender in one file, with a version."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bft_ref.recsys.fields import VERSION, of_storage, readable
from bft_ref.recsys.models import MODELS, Recommender, build
from bft_ref.support import checks
from bft_ref.training.files import replacing

Config = TypeVar("Config")
KIND = "bft_ref recommender"


def as_fields(config: Any) -> dict[str, Any]:
    """A configuration's fields as JSON has them, with its model's name."""
    named = {"model": config.model} if hasattr(config, "model") else {}
    return json.loads(json.dumps(named | asdict(config), allow_nan=False))


def to_json(config: Any) -> str:
    """A configuration (SASRecConfig, TrainConfig, …) with all its fields.

    Its defaults may change in a later version: they are written too.
    """
    content = {
        "kind": type(config).__name__,
        "version": VERSION,
        "fields": asdict(config),
    }
    return json.dumps(content, indent=2, allow_nan=False)


def from_json(kind: type[Config], text: str) -> Config:
    """The configuration of class ``kind`` that :func:`to_json` wrote.

    A field that is missing, since it was added later, has its default. What
    0.1.0 wrote is read too, as :mod:`bft_ref.recsys.fields` says.
    Raises: ValueError for text that is no such JSON, another kind, a newer
    version, an unknown field or a bad value; TypeError for a field of another
    type.
    """
    return _from_json((kind,), text)


def _from_json(kinds: tuple[type[Config], ...], text: str) -> Config:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"text: expected JSON, got {error}") from None
    if not isinstance(content, dict) or "fields" not in content:
        raise ValueError("text: expected what to_json wrote, got other JSON")
    readable(content.get("version"))
    if content["version"] < VERSION:
        content = of_storage(content)
    named = {kind.__name__: kind for kind in kinds}
    kind = checks.choice("kind", content.get("kind", ""), named)
    return _revived(named[kind], content["fields"])


def _revived(kind: type, given: Any) -> Any:
    """An instance of a dataclass, with those inside it."""
    if not isinstance(given, dict):
        raise TypeError(f"{kind.__name__}: expected fields, got {given!r}")
    known = {field.name for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(
                f"{name}: expected a field of {kind.__name__} "
                f"({', '.join(sorted(known))})"
            )
    values = dict(given)
    for name, hint in get_type_hints(kind).items():
        for inner in filter(is_dataclass, (hint, *get_args(hint))):
            if values.get(name) is not None:
                values[name] = _revived(cast(type, inner), values[name])
    found = kind(**values)
    checks.typed(found)
    return found


def save(
    model: Recommender,
    path: str | Path,
    *,
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a recommender to one file of safetensors.

    Its configuration is JSON in the file's metadata; ``beside`` are further
    tensors, such as those of :func:`packed`, for :func:`load_beside`. What
    was there stays until all is written. Raises: TypeError for another
    module, such as a model wrapped for training.
    """
    if not isinstance(model, Recommender):
        raise TypeError(
            f"model: expected a Recommender, got {type(model).__name__}; give "
            "the model inside it (.module of DDP, ._orig_mod of a compiled "
            "one)"
        )
    tensors = {
        f"{part}.{name}": x.contiguous()
        for part, found in [
            ("model", model.state_dict()),
            ("beside", beside or {}),
        ]
        for name, x in found.items()
    }
    metadata = {
        "kind": KIND,
        "version": str(VERSION),
        "config": to_json(model.config),
    }
    with replacing(Path(path)) as unfinished:
        save_file(tensors, unfinished, metadata)


def load(path: str | Path, device: str | torch.device = "cpu") -> Recommender:
    """The recommender of a file that :func:`save` wrote, ready to score.

    It is in evaluation mode and has the dtype it was saved with; no code of
    the file is run, no random number drawn.
    Raises: FileNotFoundError; ValueError for another file, a newer version,
    or weights that do not fit the configuration.
    """
    metadata, weights = _read(Path(path), "model.")
    config = _from_json(tuple(MODELS), metadata["config"])
    with torch.random.fork_rng(devices=[]):
        # the weights hold what was made of the frequencies
        model = build(config, np.zeros(config.n_items + 1))
    try:
        model = model.to(dtype=weights["items.weight"].dtype)
        model.load_state_dict(weights, assign=True)
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"path: the weights in {path} do not fit its configuration"
        ) from error
    return model.to(device).eval()


def load_beside(path: str | Path) -> dict[str, Tensor]:
    """What was written beside the model. Raises: as :func:`load`."""
    return _read(Path(path), "beside.")[1]


def packed(content: Any) -> Tensor:
    """Anything that JSON holds as a tensor of bytes, (n,)."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    return torch.frombuffer(bytearray(text, "utf8"), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    """What :func:`packed` packed."""
    return json.loads(content.numpy().tobytes())


def _read(path: Path, part: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata, and the tensors of one part of the file."""
    if not path.is_file():
        raise FileNotFoundError(f"path: no file {path}")
    expected = f"path: expected a file of {__name__}.save, got {path}, which"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise ValueError(f"{expected} holds something else")
            readable(json.loads(metadata["version"]))
            names = file.keys()
            # copied: the file may be replaced while its model is in use
            return metadata, {
                name.removeprefix(part): file.get_tensor(name).clone()
                for name in names
                if name.startswith(part)
            }
    except SafetensorError as error:
        raise ValueError(f"{expected} cannot be read") from error
