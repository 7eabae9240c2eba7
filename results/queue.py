"""The grid behind the recommendation chapters: runs what is missing.

    python results/queue.py --work /tmp/bft-runs --data-dir my-data
    python results/queue.py --list

Runs go in the order below, one at a time, and are skipped when their JSON is
in this folder; an interrupted run goes on from its checkpoint in --work.
"""

import subprocess
import sys
import time
from pathlib import Path
from shutil import copyfile
from typing import Annotated

import typer
from filelock import FileLock, Timeout

HERE = Path(__file__).parent
SETS = ("beauty", "instruments", "sports", "toys", "lastfm", "ml-100k")
BUDGET = "--epochs 100 --evaluate-every 2 --patience 5 --threads 1"
#: The filter that improved ranking in first trials; the others are ablations.
FILTER = "observation=value,project=false"
#: Controls: what could explain a gain of the filter away.
RIVALS = {
    "constant": "--gate constant --gate-value 0.7",
    "ligr": "--gate ligr",
    "vector": "--gate vector",
    "tau-bias": "--tau-bias",
    "qiu-element": "--gate qiu-element",
    "scalar": "--gate scalar",
    "rezero": "--gate scalar --gate-value 0.01",
    "qiu-head": "--gate qiu-head",
    "dropout-0.6": "--dropout 0.6",
    "dropout-0.3": "--dropout 0.3",
}
ABLATIONS = {
    "default": "--bft on",
    "prediction": "--bft observation=prediction,project=false",
    "tau-unit": f"--bft {FILTER} --tau unit",
    "tau-shuffled": f"--bft {FILTER} --tau shuffled",
    "tau-frequency": f"--bft {FILTER} --tau frequency",
    "token": f"--bft {FILTER},granularity=token",
    "mean": "--bft observation=mean,project=false",
    "tau-mlp": f"--bft {FILTER} --tau mlp",
    "prior-unit": f"--bft {FILTER},prior_scale=unit",
    "dof-5": f"--bft {FILTER},prior_dof=5",
    "noise-0.1": f"--bft {FILTER},process_noise=0.1",
    "slow-precision": f"--bft {FILTER} --precision-lr 1e-3",
    "dropout-0.3": f"--bft {FILTER} --dropout 0.3",
}


def grid() -> list[tuple[str, list[str]]]:
    """(name, arguments of ``python -m bft_ref.train``), in order."""
    runs = []

    def baseline(data, model):
        runs.append((f"{data}-{model}", ["--data", data, "--model", model]))

    def train(data, name, seed, options="", model="sasrec"):
        arguments = f"--data {data} --model {model} --seed {seed} {BUDGET}"
        runs.append(
            (
                f"{data}-{model}-{name}-s{seed}",
                f"{arguments} {options}".split(),
            )
        )

    for data in SETS:
        baseline(data, "popularity")
        baseline(data, "item-knn")
    # Development: every choice is made on validation items of these two.
    for data in ("beauty", "lastfm"):
        train(data, "plain", 0)
        train(data, "bft", 0, f"--bft {FILTER}")
        rivals, ablations = list(RIVALS.items()), list(ABLATIONS.items())
        for (a, options), (b, changes) in zip(
            rivals[:5], ablations[:5], strict=True
        ):
            train(data, a, 0, options)
            train(data, f"bft-{b}", 0, changes)
    for seed in (1, 2):
        train("beauty", "plain", seed)
        train("beauty", "bft", seed, f"--bft {FILTER}")
        train("beauty", "constant", seed, RIVALS["constant"])
    return runs


def main(
    work: Annotated[
        Path, typer.Option(help="For checkpoints, logs and a file 'stop'.")
    ] = Path("runs"),
    data_dir: Annotated[
        str | None,
        typer.Option(envvar="BFT_DATA", help="Where the data sets are."),
    ] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Say what is done and what is open.")
    ] = False,
) -> None:
    """Make the runs that are missing, in order."""
    work.mkdir(parents=True, exist_ok=True)
    for name, arguments in grid():
        done = HERE / f"{name}.json"
        command = [sys.executable, "-m", "bft_ref.train", *arguments]
        if only_list:
            print("done " if done.is_file() else "open ", " ".join(command))
            continue
        if done.is_file():
            continue
        lock = FileLock(work / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue  # another queue on this folder has it
        output, checkpoint = work / f"{name}.json", work / f"{name}.pt"
        command += ["--output", str(output), "--quiet"]
        if data_dir:
            command += ["--data-dir", data_dir]
        if arguments[-1] not in ("popularity", "item-knn"):
            command += ["--checkpoint", str(checkpoint)]
        began = time.time()
        with open(work / f"{name}.log", "a") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        print(f"{name}: exit {code}, {time.time() - began:.0f} s", flush=True)
        if code == 0:
            copyfile(output, done)
            checkpoint.unlink(missing_ok=True)
        lock.release()
        if (work / "stop").exists():
            break


if __name__ == "__main__":
    typer.run(main)
