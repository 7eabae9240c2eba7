"""The runs of decisive.md, block by block.

    python -m experiments.decisive --list
    python -m experiments.decisive --block travel --work runs

An interrupted run goes on from its checkpoint in --work. Started twice, two
runs go side by side.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bft_ref.config import BFTConfig
from bft_ref.recsys.train import TrainConfig
from bft_ref.recsys.train.command import SASRecOptions, Train
from experiments.grid import BUDGET, TRIALS
from experiments.runs import RESULTS, is_done, line, make

Block = Literal["ligr", "travel", "bound", "head", "simple"]

#: what keeps precision from the second layer, taken away
OPEN = BFTConfig(project_variance=False, process_noise=0.01)


def first_round(arm: str, data: str, seed: int) -> dict[str, Train]:
    """A run as those of the first round were made, on test items."""
    run = Train(
        data=data,
        model=SASRecOptions(**TRIALS[arm].model),
        train=TrainConfig(seed=seed, **BUDGET.train),
        evaluate_test=True,
        threads=1,
    )
    return {f"{data}-sasrec-{arm}-s{seed}": run}


def ligr() -> dict[str, Train]:
    """What the registered endpoint of the first round lacks."""
    return (
        first_round("ligr", "toys", 2)
        | first_round("ligr", "toys", 3)
        | first_round("ligr", "instruments", 3)
        | first_round("ligr", "sports", 2)
        | first_round("ligr", "sports", 3)
    )


def simple() -> dict[str, Train]:
    """The τ-bias and a constant on two more sets."""
    runs: dict[str, Train] = {}
    for data, arm, seed in product(
        ("instruments", "sports"), ("tau-bias", "constant"), (1, 2)
    ):
        runs |= first_round(arm, data, seed)
    return runs


def on_beauty(
    arm: str, train: dict[str, Any], **model: Any
) -> dict[str, Train]:
    """One run on Beauty's validation items, by its name."""
    model = {"embedding_std": 0.02} | model
    train = {"epochs": 40, "evaluate_every": 2, "patience": 40} | train
    run = Train(
        data="beauty",
        model=SASRecOptions(**model),
        train=TrainConfig(seed=0, **train),
        read_at=(40,),
        threads=1,
    )
    return {f"beauty-sasrec-e40-{arm}-s0": run}


def travel() -> dict[str, Train]:
    """Why precision does not travel to the second layer."""
    slow = {"precision_lr": 1e-3}
    return (
        on_beauty("plain", {})
        | on_beauty("bft", {}, bft=BFTConfig())
        | on_beauty("open", slow, bft=OPEN)
        | on_beauty("open-project", slow, bft=BFTConfig(process_noise=0.01))
        | on_beauty("open-noise", slow, bft=BFTConfig(project_variance=False))
        | on_beauty("open-fast", {}, bft=OPEN)
        | on_beauty("open-start", slow, bft=OPEN, embedding_std=None)
        | on_beauty("plain-start", {}, embedding_std=None)
    )


def bound() -> dict[str, Train]:
    """A bound instead of a runaway Q, and the subtraction."""
    return (
        on_beauty("ou", {}, bft=BFTConfig(dynamics="ornstein_uhlenbeck"))
        | on_beauty("noise-prior", {"noise_prior_sd": 1.0}, bft=BFTConfig())
        | on_beauty("difference", {}, bft=BFTConfig(innovation="difference"))
    )


def head() -> dict[str, Train]:
    """Scores that use λ, beside two controls."""
    runs: dict[str, Train] = {}
    for kind, (side, bft) in product(
        ("gaussian", "item_bias", "item_temperature"),
        (("plain", None), ("bft", BFTConfig())),
    ):
        name = f"{side}-{kind.replace('_', '-')}"
        runs |= on_beauty(name, {}, head=kind, bft=bft)
    return runs


BLOCKS: dict[Block, Callable[[], dict[str, Train]]] = {
    "ligr": ligr,
    "travel": travel,
    "bound": bound,
    "head": head,
    "simple": simple,
}


def runs() -> dict[str, Train]:
    """Every run of every block, by its name."""
    return {k: v for block in BLOCKS.values() for k, v in block().items()}


def main(
    work: Path = Path("runs"),
    block: tuple[Block, ...] = (),
    data_dir: Path | None = None,
    only_list: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> None:
    """Make the runs that are missing, in order.

    Args:
        work: For checkpoints and logs; keep it.
        block: Which of them, in this order.
        data_dir: Where the data sets are; by default BFT_DATA.
        only_list: Say what is done and what is open, with the commands.
    """
    if only_list:
        for name, run in runs().items():
            done = is_done(RESULTS / f"{name}.json", run)
            print("done " if done else "open ", name, line(run))
        return
    work.mkdir(parents=True, exist_ok=True)
    for name, run in [r for b in block for r in BLOCKS[b]().items()]:
        result = RESULTS / f"{name}.json"
        if not is_done(result, run):
            make(run, result, work, data_dir)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.DisallowNone,))
