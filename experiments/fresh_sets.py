"""The runs of fresh-sets.md: train nine a set, then rank test items, once.

    python -m experiments.fresh_sets --work /tmp/runs --data-dir my-data

An interrupted run goes on from its checkpoint in --work. Started twice, two
runs go side by side.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import tyro

from bft_ref.config import BFTConfig
from bft_ref.recsys.train import TrainConfig
from bft_ref.recsys.train.command import SASRecOptions, Train
from experiments.runs import RESULTS, is_done, make, strata

SETS = ("video-games", "arts")
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bft": {"bft": BFTConfig()},
    "tau-bias": {"tau_bias": True},
}
SEEDS = (1, 2, 3)
BUDGET = TrainConfig(epochs=80, evaluate_every=2, patience=80)


def runs(data: str) -> dict[str, Train[SASRecOptions]]:
    """Each run by its name, seed by seed; none looks at the test items."""
    return {
        f"{data}-sasrec-{arm}-s{seed}": Train(
            data=data,
            model=SASRecOptions(embedding_std=0.02, **ARMS[arm]),
            train=replace(BUDGET, seed=seed),
            read_at=(40, 80),
            threads=1,
        )
        for seed, arm in product(SEEDS, ARMS)
    }


def main(work: Path, data_dir: Path | None = None) -> None:
    """Make the runs that are missing, set by set.

    Args:
        work: For checkpoints and logs; keep it.
        data_dir: Where the data sets are; by default BFT_DATA.
    """
    work.mkdir(parents=True, exist_ok=True)
    strata(SETS, data_dir)
    for data in SETS:
        train(runs(data), work, data_dir)
    for data in SETS:
        trained = runs(data)
        if all(
            is_done(RESULTS / f"{n}.json", run) for n, run in trained.items()
        ):
            tested = {
                name: replace(run, evaluate_test=True)
                for name, run in trained.items()
            }
            train(tested, work, data_dir)


def train(
    asked: dict[str, Train[SASRecOptions]], work: Path, data_dir: Path | None
) -> None:
    """Make those that are missing."""
    for name, run in asked.items():
        result = RESULTS / f"{name}.json"
        if not is_done(result, run):
            make(run, result, work, data_dir)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.DisallowNone,))
