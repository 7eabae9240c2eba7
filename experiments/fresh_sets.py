"""The runs of fresh-sets.md: train nine a set, then rank test items, once.

    python experiments/fresh_sets.py --work /tmp/runs --data-dir my-data

An interrupted run goes on from its checkpoint in --work. Started twice, two
runs go side by side.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout

OUTPUT = Path(__file__).parents[1] / "results" / "fresh"
SETS = ("video-games", "arts")
ARMS = {"plain": "", "bft": "--bft on", "tau-bias": "--tau-bias"}
SEEDS = (1, 2, 3)
BUDGET = (
    "--model sasrec --embedding-std 0.02 --epochs 80 --evaluate-every 2 "
    "--patience 80 --read-at 40,80 --threads 1"
)


def runs(data: str) -> dict[str, list[str]]:
    """Name → arguments of ``python -m bft_ref.recsys.train``, seed by seed."""
    return {
        f"{data}-sasrec-{arm}-s{seed}": (
            f"--data {data} --seed {seed} {BUDGET} {ARMS[arm]}".split()
        )
        for seed, arm in product(SEEDS, ARMS)
    }


def is_done(name: str, part: str) -> bool:
    """Whether the stored result ranks ``part``."""
    path = OUTPUT / f"{name}.json"
    return path.is_file() and part in json.loads(path.read_text("utf8"))


def train(
    name: str, arguments: list[str], work: Path, data_dir: str | None
) -> None:
    """One run, unless another process has it in hand."""
    part = "test" if "--final" in arguments else "validation"
    lock = FileLock(work / f"{name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return
    with lock:
        if is_done(name, part):
            return
        output = work / f"{name}-{part}.json"
        command = [sys.executable, "-m", "bft_ref.recsys.train", *arguments]
        command += ["--output", str(output), "--quiet"]
        command += ["--checkpoint", str(work / f"{name}.pt")]
        command += ["--data-dir", data_dir] if data_dir else []
        with open(work / f"{name}.log", "a") as log:
            done = subprocess.run(command, stdout=log, stderr=log)
        print(f"{name}, {part}: exit {done.returncode}", flush=True)
        if done.returncode == 0:
            OUTPUT.mkdir(parents=True, exist_ok=True)
            (OUTPUT / f"{name}.json").write_bytes(output.read_bytes())


def main(
    work: Annotated[
        Path, typer.Option(help="For checkpoints and logs; keep it.")
    ],
    data_dir: Annotated[
        str | None,
        typer.Option(envvar="BFT_DATA", help="Where the data sets are."),
    ] = None,
) -> None:
    """Make the runs that are missing, set by set."""
    work.mkdir(parents=True, exist_ok=True)
    for data in SETS:
        for name, arguments in runs(data).items():
            if not is_done(name, "validation"):
                train(name, arguments, work, data_dir)
    for data in SETS:
        if all(is_done(name, "validation") for name in runs(data)):
            for name, arguments in runs(data).items():
                if not is_done(name, "test"):
                    train(name, [*arguments, "--final"], work, data_dir)


if __name__ == "__main__":
    typer.run(main)
