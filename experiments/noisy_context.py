"""The runs of noisy_context.md: gold among passages that a retriever found.

    python -m experiments.noisy_context --list
    python -m experiments.noisy_context --work runs --weights smollm2

An interrupted run goes on from its checkpoint in --work. Started twice, two
runs go side by side; a file ``stop`` in --work ends it after the run at hand.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import tyro

from bft_ref.llm.finetune.command import FineTune, Task
from bft_ref.llm.finetune.known import Known
from bft_ref.llm.finetune.trainer import FineTuneConfig
from experiments.noisy_labels import ARMS, Named, chosen, make_all
from experiments.runs import RESULTS

#: arm -> the arm of noisy labels that it stands on, and what is known
STANDS_ON: dict[str, tuple[str, Known | None]] = {
    "sft": ("sft", None),
    "filter": ("filter", None),
    "tau-bias": ("tau-bias", None),
    "known-precision": ("filter", Known("precision")),
    "known-bias": ("sft", Known("bias")),
}
TRAINED = {"clean": 0, "noisy": 1}


def runs(results: Path = RESULTS) -> Iterator[Named]:
    """Every run that can be made by now, in the registered order."""
    for seed, trained, arm in product((1, 2, 3), TRAINED, STANDS_ON):
        base, known = STANDS_ON[arm]
        trial = chosen(base, results)
        if trial is None:
            continue
        yield (
            f"nq-context-{arm}-{trained}-s{seed}",
            FineTune(
                task=Task(
                    distractors=TRAINED[trained],
                    asked=(0, 1, 3),
                    train=320,
                    validation=100,
                    test=200,
                    shifted=0,
                ),
                adaptation=ARMS[base].adaptation,
                train=FineTuneConfig(seed=seed, **ARMS[base].train, **trial),
                known=known,
                evaluate_test=True,
                threads=1,
                quiet=True,
            ),
        )


def main(
    work: Path = Path("runs"),
    weights: Path | None = None,
    data_dir: Path | None = None,
    results: Path = RESULTS,
    only_list: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> None:
    """Make the runs that are missing, in order.

    Args:
        work: For checkpoints, logs and the lower layers' states; keep it.
        weights: SmolLM2's; by default from the Hub.
        data_dir: Where the data sets are; by default BFT_DATA.
        results: Where results are, and are written to.
        only_list: Say what is done and what is open.
    """
    make_all(
        lambda: runs(results), work, weights, data_dir, results, only_list
    )


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.DisallowNone,))
