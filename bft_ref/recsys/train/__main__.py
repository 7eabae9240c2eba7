"""Command line: ``python -m bft_ref.recsys.train --help``."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import typer

from bft_ref.config import BFTConfig
from bft_ref.recsys import metrics
from bft_ref.recsys.data import DATASETS, DataError, DataUnavailableError, load
from bft_ref.recsys.data.readers import Format
from bft_ref.recsys.models import ModelConfig
from bft_ref.recsys.models.gates import GateKind
from bft_ref.recsys.models.precision import Source
from bft_ref.recsys.train.losses import Loss
from bft_ref.recsys.train.provenance import code_version, device_name
from bft_ref.recsys.train.trainer import (
    TrainConfig,
    asking,
    fit,
    refuse_what_nothing_reads,
)

Model = Literal["sasrec", "bert4rec", "hstu", "popularity", "item-knn"]
Residual = Literal["pre", "original"]

DATA, MODEL, FILTER, RIVALS, TRAINING, OUTPUT = (
    "Data",
    "Model",
    "Bayesian filter",
    "Rivals and controls of the gain",
    "Training",
    "Output",
)

app = typer.Typer(
    add_completion=False, rich_markup_mode="rich", no_args_is_help=True
)


def filter_config(text: str | None) -> BFTConfig | None:
    """``off`` → None, ``on`` → defaults, ``name=value,…`` → those changed.

    Raises: typer.BadParameter for an unknown name or a bad value.
    """
    if text is None or text == "off":
        return None
    given: dict[str, Any] = {}
    known = {field.name: field.type for field in fields(BFTConfig)}
    for part in [] if text == "on" else text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or not value:
            raise typer.BadParameter(
                f"expected on, off or name=value with a name out of "
                f"{', '.join(known)}; got {part!r}",
                param_hint="--bft",
            )
        if name in given:
            raise typer.BadParameter(
                f"{name}: expected once, got {text!r}", param_hint="--bft"
            )
        kind = known[name]
        kind = kind if isinstance(kind, str) else kind.__name__
        if kind == "bool":
            if value.lower() not in ("true", "false"):
                raise typer.BadParameter(
                    f"{name}: expected true or false, got {value!r}",
                    param_hint="--bft",
                )
            given[name] = value.lower() == "true"
        elif kind == "float":
            try:
                given[name] = float(value)
            except ValueError:
                raise typer.BadParameter(
                    f"{name}: expected a number, got {value!r}",
                    param_hint="--bft",
                ) from None
        else:
            given[name] = value
    try:
        return BFTConfig(**given)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--bft") from None


def numbers(text: str) -> float | tuple[float, ...]:
    """``0.7`` → 0.7, ``0.9,0.2`` → (0.9, 0.2).

    Raises: typer.BadParameter for anything else.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected a number, or several with commas; got {text!r}",
            param_hint="--gate-value",
        ) from None
    return found[0] if len(found) == 1 else found


def epochs_of(text: str) -> list[int]:
    """``40,80`` → [40, 80], nothing → [].

    Raises: typer.BadParameter for anything else.
    """
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(
            f"expected epochs with commas, got {text!r}",
            param_hint="--read-at",
        ) from None


@app.command()
def main(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help=f"A public set ({', '.join(DATASETS)}) or a file.",
            rich_help_panel=DATA,
        ),
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="BFT_DATA",
            help="Folder searched before anything is downloaded.",
            rich_help_panel=DATA,
        ),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="Format of a file, if its name does not tell.",
            rich_help_panel=DATA,
        ),
    ] = None,
    model: Annotated[
        Model,
        typer.Option(
            help="The backbone, or a baseline without training.",
            rich_help_panel=MODEL,
        ),
    ] = "sasrec",
    d: Annotated[
        int,
        # Not --d: torchrun takes it for an abbreviation of its own options.
        typer.Option(
            "--d-model", help="Width of the state.", rich_help_panel=MODEL
        ),
    ] = 64,
    layers: Annotated[
        int, typer.Option(help="Layers.", rich_help_panel=MODEL)
    ] = 2,
    heads: Annotated[
        int, typer.Option(help="Attention heads.", rich_help_panel=MODEL)
    ] = 2,
    ffn: Annotated[
        int,
        typer.Option(
            help="Width of the feed-forward network.", rich_help_panel=MODEL
        ),
    ] = 256,
    length: Annotated[
        int | None,
        typer.Option(
            help="Last items seen (default: the set's own, or 20).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    dropout: Annotated[
        float, typer.Option(help="Dropout rate.", rich_help_panel=MODEL)
    ] = 0.5,
    embedding_std: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the first vectors (default: d^-1/2).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    residual: Annotated[
        Residual,
        typer.Option(
            help="SASRec's residual: pre-LN, or the original's.",
            rich_help_panel=MODEL,
        ),
    ] = "pre",
    bft: Annotated[
        str,
        typer.Option(
            metavar="on|off|NAME=VALUE,…",
            help="Make every layer a Bayesian filter; with options of "
            "BFTConfig, e.g. reading=value,project_variance=false.",
            rich_help_panel=FILTER,
        ),
    ] = "off",
    tau: Annotated[
        Source,
        typer.Option(
            help="Initial precision: learned per item, by an MLP on the "
            "embedding, one for all, or fixed (shuffled) from frequency.",
            rich_help_panel=FILTER,
        ),
    ] = "item",
    tau_power: Annotated[
        float,
        typer.Option(
            help="τ ∝ (frequency + 1)^power where it is fixed.",
            rich_help_panel=FILTER,
        ),
    ] = -0.125,
    tau_start: Annotated[
        float,
        typer.Option(help="τ before training.", rich_help_panel=FILTER),
    ] = 1.0,
    precision_lr: Annotated[
        float,
        typer.Option(
            help="Learning rate of log τ and log Q.", rich_help_panel=FILTER
        ),
    ] = 1e-2,
    gate: Annotated[
        GateKind,
        typer.Option(
            help="Scale the attention branch: by a constant, a learned "
            "scalar or vector, LiGR's or Qiu's gate.",
            rich_help_panel=RIVALS,
        ),
    ] = "none",
    gate_value: Annotated[
        str,
        typer.Option(
            help="The constant, or a learned factor's start; one number, or "
            "one per layer: 0.9,0.2.",
            rich_help_panel=RIVALS,
        ),
    ] = "1",
    tau_bias: Annotated[
        bool,
        typer.Option(
            "--tau-bias",
            help="log τ on the attention logits alone, gain 1.",
            rich_help_panel=RIVALS,
        ),
    ] = False,
    loss: Annotated[
        Loss, typer.Option(help="Loss.", rich_help_panel=TRAINING)
    ] = "sampled",
    negatives: Annotated[
        int,
        typer.Option(
            help="Negatives shared by a batch.", rich_help_panel=TRAINING
        ),
    ] = 512,
    correct: Annotated[
        bool,
        typer.Option(
            help="Weigh the negatives up to the whole catalogue.",
            rich_help_panel=TRAINING,
        ),
    ] = True,
    calibration: Annotated[
        float,
        typer.Option(help="gBCE's t in [0, 1].", rich_help_panel=TRAINING),
    ] = 0.75,
    epochs: Annotated[
        int, typer.Option(help="At most.", rich_help_panel=TRAINING)
    ] = 100,
    patience: Annotated[
        int,
        typer.Option(
            help="Evaluations without a better validation NDCG@10.",
            rich_help_panel=TRAINING,
        ),
    ] = 10,
    evaluate_every: Annotated[
        int,
        typer.Option(
            help="Epochs between evaluations.", rich_help_panel=TRAINING
        ),
    ] = 1,
    batch: Annotated[
        int,
        typer.Option(help="Sequences a batch.", rich_help_panel=TRAINING),
    ] = 128,
    lr: Annotated[
        float, typer.Option(help="Adam's rate.", rich_help_panel=TRAINING)
    ] = 1e-3,
    weight_decay: Annotated[
        float, typer.Option(help="L2.", rich_help_panel=TRAINING)
    ] = 0.0,
    every_window: Annotated[
        bool,
        typer.Option(
            "--every-window",
            help="Train on the whole of long sequences.",
            rich_help_panel=TRAINING,
        ),
    ] = False,
    mask_rate: Annotated[
        float,
        typer.Option(help="BERT4Rec's masks.", rich_help_panel=TRAINING),
    ] = 0.3,
    seed: Annotated[
        int, typer.Option(help="Of everything.", rich_help_panel=TRAINING)
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1 … (default: cuda if there is one).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=0,
            help="CPU threads, 0 for PyTorch's choice.",
            rich_help_panel=TRAINING,
        ),
    ] = 0,
    read_at: Annotated[
        str,
        typer.Option(
            help="Report these epochs too, whichever is best: 40,80.",
            rich_help_panel=OUTPUT,
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the result as JSON; a file that is there already "
            "means the run is finished, and nothing is done.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write each user's rank (.npz), for paired tests.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Written after every epoch; an interrupted run goes on "
            "from it, to the same result.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", help="No progress bar.", rich_help_panel=OUTPUT
        ),
    ] = False,
    final: Annotated[
        bool,
        typer.Option(
            "--final",
            help="Also rank the test items, with the epoch chosen on "
            "validation. Nothing else touches them: decide first.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Train a sequential recommender and rank the whole catalogue.

    The last item of each user is kept for the test, the one before for
    validation. Nothing is sampled in evaluation, items of the history are
    left out, ties count against the model. The result, with its
    configuration, checksums, versions, machine, time and memory, is printed
    as JSON or written to --output.

    [bold]Examples[/bold]

    Plain SASRec on Beauty, downloaded and checked:

        python -m bft_ref.recsys.train --data beauty --output results/plain.json

    The same as a Bayesian filter, resumable:

        python -m bft_ref.recsys.train --data beauty --bft reading=value --checkpoint run.pt

    A control: attention branch times a constant:

        python -m bft_ref.recsys.train --data beauty --gate constant --gate-value 0.7

    Your own RecBole file on two GPUs:

        torchrun --nproc-per-node 2 -m bft_ref.recsys.train --data my.inter
    """  # noqa: E501
    if threads:
        torch.set_num_threads(threads)
    try:
        sequences = load(data, folder=data_dir, format=format)
    except (DataUnavailableError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    if model in ("popularity", "item-knn"):
        _refuse_training_options(context, model)
        wanted = {"model": {"model": model}, "data": sequences.describe()}
        if _is_there(output, final, wanted):
            return
        with _named_after("--data"):
            result, rankings = _baseline(sequences, model, final)
    else:
        if length is None:
            length = DATASETS[data].length if data in DATASETS else 20
        try:
            model_config = ModelConfig(
                n_items=sequences.n_items,
                model=model,
                d=d,
                layers=layers,
                heads=heads,
                ffn=ffn,
                length=length,
                dropout=dropout,
                embedding_std=embedding_std,
                residual=residual,
                gate=gate,
                gate_value=numbers(gate_value),
                tau_bias=tau_bias,
                tau=tau,
                tau_power=tau_power,
                tau_start=tau_start,
                bft=filter_config(bft),
            )
            train_config = TrainConfig(
                loss=loss,
                negatives=negatives,
                correct=correct,
                calibration=calibration,
                epochs=epochs,
                patience=patience,
                evaluate_every=evaluate_every,
                batch=batch,
                lr=lr,
                precision_lr=precision_lr,
                weight_decay=weight_decay,
                every_window=every_window,
                mask_rate=mask_rate,
                seed=seed,
            )
            refuse_what_nothing_reads(model_config, train_config)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        wanted = {
            "model": asdict(model_config),
            "train": asdict(train_config),
            "data": sequences.describe(),
        }
        if _is_there(output, final, wanted):
            return
        where = _join(device)
        with _named_after("--data"):
            fitted = fit(
                sequences,
                model_config,
                train_config,
                device=where,
                checkpoint=checkpoint,
                final=final,
                read_at=epochs_of(read_at),
                progress=not quiet,
            )
        result, rankings = fitted.result, fitted.rankings
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(result, rankings, output, ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _named_after(option: str) -> Iterator[None]:
    """Data that cannot be used are a bad ``option``."""
    try:
        yield
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _refuse_training_options(context: typer.Context, model: str) -> None:
    """Counting needs no training options."""
    used = "data data_dir format model final output ranks quiet threads device"
    for option in context.command.params:
        if option.name is None or option.name in used.split():
            continue
        source = context.get_parameter_source(option.name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{model} does not read it", param_hint=option.opts[0]
            )


def _is_there(output: Path | None, final: bool, wanted: dict) -> bool:
    """Whether the very result is written already."""
    if output is None or not output.is_file():
        return False
    found = json.loads(output.read_text())
    same = all(
        found.get(k) == v for k, v in json.loads(json.dumps(wanted)).items()
    )
    if not same or (final and "test" not in found):
        lacks = (
            "another configuration or data" if not same else "no test items"
        )
        raise typer.BadParameter(
            f"{output} is there already, with {lacks}: remove it or choose "
            "another file",
            param_hint="--output",
        )
    typer.echo(f"{output} is there already: nothing to do", err=True)
    return True


def _join(device: str | None) -> torch.device:
    """The device of this process; joins the others under ``torchrun``."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # each backend has its own
        raise typer.BadParameter(
            f"expected a device that is here, got {device!r}: {error}",
            param_hint="--device",
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


def _baseline(sequences, name: str, final: bool):
    score = {"popularity": metrics.popularity, "item-knn": metrics.item_knn}
    result = {"model": {"model": name}, "data": sequences.describe()}
    rankings = {}
    for part in ("validation", "test") if final else ("validation",):
        split = asking(sequences, part)
        rankings[part] = metrics.evaluate(split, score[name](split))
        result[part] = metrics.report(split, rankings[part])
    cpu = torch.device("cpu")
    return result | {
        "code": code_version(),
        "device": device_name(cpu),
    }, rankings


def _write(result, rankings, output: Path | None, ranks: Path | None):
    if ranks is not None:
        ranks.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            ranks,
            **{
                f"{part}_{name}": value
                for part, ranking in rankings.items()
                for name, value in asdict(ranking).items()
            },
        )
    text = json.dumps(result, indent=1)
    # One line for a list of numbers: thousands of lines help nobody.
    text = re.sub(
        r"\[[\s\d,.e+-]+\]", lambda m: re.sub(r"\s+", " ", m[0]), text
    )
    if output is None:
        sys.stdout.write(text + "\n")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".part")
    unfinished.write_text(text + "\n")
    os.replace(unfinished, output)


if __name__ == "__main__":
    app()
