"""How long an epoch of SASRec takes, plain and as a filter, in turns.

    python -m benchmarks.epoch --data beauty --data-dir my-data

Each pair of epochs gives one ratio; the median is reported. The simulated
sequences (the default) have the size of Amazon Beauty's.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import track

import bft_ref
from bft_ref import BFTConfig
from bft_ref.recsys.data import Sequences, load, simulate
from bft_ref.recsys.models import SASRecConfig
from bft_ref.recsys.train import TrainConfig, fit
from bft_ref.training.provenance import device_name

ARMS = {
    "feature": BFTConfig(),
    "feature, first term": BFTConfig(jacobian="first"),
    "token": BFTConfig(granularity="token"),
}


@dataclass(frozen=True)
class Options:
    """Seconds of an epoch of SASRec: plain, and the filter over it."""

    data: str = ""
    """a public data set; empty: simulated sequences of Beauty's size"""
    data_dir: Path | None = None
    """folder with its file"""
    repeats: int = 3
    """pairs of epochs"""
    device: str = "cpu"
    """cpu or cuda"""
    threads: int = 1
    """CPU threads"""
    json: Path | None = None
    """write the figures here"""


class _Enough(Exception):
    """The first epoch is over; nothing after it is measured."""


def seconds(
    sequences: Sequences, bft: BFTConfig | None, device: str, seed: int
) -> float:
    """Training time of the first of two epochs; nothing is ranked."""
    model = SASRecConfig(n_items=sequences.n_items, bft=bft)
    config = TrainConfig(epochs=2, evaluate_every=2, seed=seed)

    def stop(record: dict) -> None:
        raise _Enough(record["train_seconds"])

    try:
        fit(
            *(sequences, model, config),
            device=device,
            progress=False,
            on_epoch=stop,
        )
    except _Enough as enough:
        return enough.args[0]
    raise AssertionError("fit: expected an epoch, got none")


def run(options: Options) -> dict:
    """Measure; the record, as it is written."""
    torch.set_num_threads(options.threads)
    if options.data:
        sequences = load(options.data, folder=options.data_dir)
    else:
        sequences = simulate(22363, 12101, length=(3, 16), seed=1).sequences
    plain: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in track(
        range(options.repeats), console=Console(stderr=True), transient=True
    ):
        plain.append(seconds(sequences, None, options.device, seed))
        for name, bft in ARMS.items():
            times[name].append(seconds(sequences, bft, options.device, seed))
    ratios = {
        name: statistics.median(
            a / b for a, b in zip(mine, plain, strict=True)
        )
        for name, mine in times.items()
    }
    record = {
        "device": device_name(torch.device(options.device)),
        "torch": torch.__version__,
        "bft_ref": bft_ref.__version__,
        "data": sequences.describe(),
        "repeats": options.repeats,
        "plain": statistics.median(plain),
        "ratio": ratios,
    }
    print(f"plain: {record['plain']:.2f} s an epoch")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} × plain")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def main(arguments: list[str] | None = None) -> int:
    run(tyro.cli(Options, args=arguments, prog="benchmarks.epoch"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
