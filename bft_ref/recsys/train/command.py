"""What the command line can be asked for, as dataclasses, and doing it.

An option is a field: its name, type, default and, as help, the comment beside
it are written once, here or in the configuration that it belongs to.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tyro.conf import Suppress, arg, subcommand

from bft_ref.config import BFTConfig
from bft_ref.recsys import metrics
from bft_ref.recsys.data import (
    DATASETS,
    DataError,
    DataUnavailableError,
    Sequences,
    load,
)
from bft_ref.recsys.data.readers import Format
from bft_ref.recsys.data.sequences import SplitName
from bft_ref.recsys.fields import VERSION, of_today
from bft_ref.recsys.models import (
    MODELS,
    BERT4RecConfig,
    HSTUConfig,
    HSTUFilter,
    RecommenderConfig,
    SASRecConfig,
)
from bft_ref.recsys.storage import as_fields, save
from bft_ref.recsys.train.trainer import (
    TrainConfig,
    asking,
    epochs_to_read,
    fit,
)
from bft_ref.training.checkpoint import RunError
from bft_ref.training.files import write_json
from bft_ref.training.provenance import code_version, device_name

ABOUT = """Train a sequential recommender and rank the whole catalogue.

The last item of each user is kept for the test, the one before for
validation. Nothing is sampled in evaluation, items of the history are left
out, ties count against the model. The result, with its configuration,
checksums, versions, machine, time and memory, is printed as JSON or written
to --output.

Plain SASRec on Beauty, downloaded and checked:

    python -m bft_ref.recsys.train sasrec --data beauty --output plain.json

The same as a Bayesian filter, resumable:

    python -m bft_ref.recsys.train sasrec --data beauty --checkpoint run.pt
        bft --reading value

A control, the attention branch times a constant:

    python -m bft_ref.recsys.train sasrec --data beauty
        --gate constant --gate-value 0.7

Your own RecBole file on two GPUs:

    torchrun --nproc-per-node 2 -m bft_ref.recsys.train sasrec
        --data my.inter
"""
MAKES = "Make every layer a Bayesian filter; its options may follow."


class UsageError(ValueError):
    """Something was asked for that cannot be done; says which option."""


@dataclass(frozen=True)
class _OfData:
    """What a model's configuration takes from the data, if it is not said."""

    n_items: Annotated[int, Suppress] = 0
    # Last items visible; by default the set's own, or 20.
    max_length: int | None = None

    def __post_init__(self):
        """Checked when the data are known."""

    def of(self, data: str, sequences: Sequences) -> RecommenderConfig:
        """The configuration. Raises: TypeError or ValueError if it is bad."""
        kind = next(kind for kind in MODELS if isinstance(self, kind))
        given = {each.name: getattr(self, each.name) for each in fields(kind)}
        given["n_items"] = sequences.n_items
        if self.max_length is None:
            known = DATASETS.get(data)
            given["max_length"] = 20 if known is None else known.length
        return kind(**given)


@dataclass(frozen=True)
class SASRecOptions(_OfData, SASRecConfig):
    """SASRec: causal self-attention, each item asked for by those before."""

    bft: Annotated[BFTConfig, subcommand("bft", description=MAKES)] | None = (
        None
    )


@dataclass(frozen=True)
class BERT4RecOptions(_OfData, BERT4RecConfig):
    """BERT4Rec: bidirectional attention, trained to fill in masked items."""

    bft: Annotated[BFTConfig, subcommand("bft", description=MAKES)] | None = (
        None
    )


@dataclass(frozen=True)
class HSTUOptions(_OfData, HSTUConfig):
    """HSTU: pointwise attention whose weights need not sum to one."""

    bft: Annotated[HSTUFilter, subcommand("bft", description=MAKES)] | None = (
        None
    )


Model = TypeVar("Model", bound=_OfData)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What training and counting have in common."""

    data: Annotated[
        str, arg(help=f"A public set ({', '.join(DATASETS)}) or a file.")
    ]
    # Folder searched before anything is downloaded; by default BFT_DATA of
    # the environment.
    data_dir: Path | None = None
    format: Format | None = None  # Of a file, if its name does not tell.
    # Also rank the test items, with the epoch chosen on validation. Nothing
    # else touches them: decide first.
    evaluate_test: bool = False
    # Write the result as JSON. A file that is there already means that the
    # run is finished, and nothing is done.
    output: Path | None = None
    ranks: Path | None = None  # Write each user's rank (.npz).
    threads: int = 0  # CPU threads; 0 for PyTorch's choice.
    quiet: bool = False  # No progress bar.


@dataclass(frozen=True, kw_only=True)
class Popularity(_Common):
    """Count: how often each item was met in training."""

    name = "popularity"
    scorer = staticmethod(metrics.popularity)


@dataclass(frozen=True, kw_only=True)
class ItemKNN(_Common):
    """Count: how similar each item is to those of the history."""

    name = "item-knn"
    scorer = staticmethod(metrics.item_knn)


@dataclass(frozen=True, kw_only=True)
class Train(_Common, Generic[Model]):
    """A model, trained."""

    model: Model
    train: Annotated[TrainConfig, arg(help="How it is fitted.")] = field(
        default_factory=TrainConfig
    )
    # Report these epochs too, whichever is best.
    read_at: tuple[int, ...] = ()
    # Written after every epoch; an interrupted run goes on from it, to the
    # same result.
    checkpoint: Path | None = None
    # Write the model, with the weights of its best epoch, for
    # bft_ref.recsys.storage.load.
    weights: Path | None = None
    # cpu, cuda, cuda:1, ...; by default cuda if there is one.
    device: str | None = None


Run = Train[Any] | Popularity | ItemKNN
Command = (
    Annotated[
        Train[SASRecOptions],
        subcommand("sasrec", description=SASRecOptions.__doc__),
    ]
    | Annotated[
        Train[BERT4RecOptions],
        subcommand("bert4rec", description=BERT4RecOptions.__doc__),
    ]
    | Annotated[
        Train[HSTUOptions],
        subcommand("hstu", description=HSTUOptions.__doc__),
    ]
    | Annotated[Popularity, subcommand("popularity")]
    | Annotated[ItemKNN, subcommand("item-knn")]
)


def parse(arguments: Iterable[str]) -> Run:
    """The command that a command line asks for.

    Raises: SystemExit for what is none, told on stderr, and for ``--help``.
    """
    return tyro.cli(
        Command,
        prog="python -m bft_ref.recsys.train",
        description=ABOUT,
        args=list(arguments),
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.CascadeSubcommandArgs,
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.DisallowNone,
        ),
    )


def execute(command: Run) -> None:
    """Do what is asked, unless its very result is there already.

    Raises: UsageError, which names the option, as early as that is known.
    """
    if command.threads < 0:
        raise UsageError(f"--threads: expected >= 0, got {command.threads}")
    if command.threads:
        torch.set_num_threads(command.threads)
    for name in ("output", "ranks", "checkpoint", "weights"):
        _refuse_no_file(name, getattr(command, name, None))
    try:
        sequences = load(
            command.data, folder=command.data_dir, format=command.format
        )
    except (DataUnavailableError, OSError, ValueError) as error:
        raise UsageError(f"--data: {error}") from None
    wanted: dict[str, Any] = {"data": sequences.describe()}
    if isinstance(command, Train):
        try:
            model = command.model.of(command.data, sequences)
            epochs_to_read(command.read_at, command.train)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None
        wanted |= {
            "model": as_fields(model),
            "train": as_fields(command.train),
        }
    else:
        wanted["model"] = {"model": command.name}
    if _is_there(command, wanted):
        return
    try:
        if isinstance(command, Train):
            fitted = fit(
                sequences,
                model,
                command.train,
                device=_join(command.device),
                checkpoint=command.checkpoint,
                evaluate_test=command.evaluate_test,
                read_at=command.read_at,
                progress=not command.quiet,
            )
            result, rankings = fitted.result, fitted.rankings
        else:
            result, rankings = _count(command, sequences, wanted)
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    except RunError as error:
        raise UsageError(str(error)) from None
    if not dist.is_initialized() or dist.get_rank() == 0:
        if isinstance(command, Train) and command.weights is not None:
            save(fitted.model, command.weights)
        _write(result, rankings, command)
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_no_file(name: str, path: Path | None) -> None:
    """A path that cannot be written to is told before the work, not after."""
    if path is None:
        return
    beside = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir():
        fault = "a folder"
    elif not beside.is_dir():
        fault = f"one below {beside}, which is no folder"
    elif not os.access(path if path.exists() else beside, os.W_OK):
        fault = "one that cannot be written"
    else:
        return
    raise UsageError(f"--{name}: expected a file, got {path}: {fault}")


def _is_there(command: Run, wanted: dict[str, Any]) -> bool:
    """Whether the very result is written already."""
    path = command.output
    if path is None or not path.is_file():
        return False
    try:
        found = of_today(json.loads(path.read_text("utf8")))
    except (AttributeError, ValueError) as error:
        lacks = f"something else ({error})"
    else:
        same = all(found.get(k) == v for k, v in wanted.items())
        if same and ("test" in found or not command.evaluate_test):
            print(f"{path} is there already: nothing to do", file=sys.stderr)
            return True
        lacks = "no test items" if same else "another configuration or data"
    raise UsageError(
        f"--output: {path} is there already, with {lacks}: remove it or "
        "choose another file"
    )


def _join(device: str | None) -> torch.device:
    """The device of this process; joins the others under ``torchrun``."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # each backend has its own
        raise UsageError(
            f"--device: expected one that is here, got {device!r}: {error}"
        ) from None
    cuda = torch.cuda.is_available() and device != "cpu"
    if "WORLD_SIZE" not in os.environ:
        return torch.device(device or ("cuda" if cuda else "cpu"))
    dist.init_process_group("nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    return mine


def _count(
    command: Popularity | ItemKNN, sequences: Sequences, known: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, metrics.Ranking]]:
    """The result of a baseline, and the rankings behind it."""
    result: dict[str, Any] = {"version": VERSION, **known}
    rankings: dict[str, metrics.Ranking] = {}
    names: list[SplitName] = ["validation"]
    if command.evaluate_test:
        names.append("test")
    for name in names:
        split = asking(sequences, name)
        rankings[name] = metrics.evaluate(split, command.scorer(split))
        result[name] = metrics.report(split, rankings[name])
    provenance = {
        "code": code_version(),
        "device": device_name(torch.device("cpu")),
    }
    return result | provenance, rankings


def _write(
    result: dict[str, Any],
    rankings: dict[str, metrics.Ranking],
    command: Run,
) -> None:
    if command.ranks is not None:
        command.ranks.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            command.ranks,
            **{
                f"{split}_{name}": value
                for split, ranking in rankings.items()
                for name, value in asdict(ranking).items()
            },
        )
    write_json(result, command.output)
