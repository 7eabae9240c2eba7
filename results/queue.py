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

HERE = Path(__file__).parent
SETS = ("beauty", "instruments", "sports", "toys", "lastfm", "ml-100k")
BUDGET = "--epochs 100 --evaluate-every 2 --patience 5 --threads 1"
#: The filter that improved ranking in first trials; the others are ablations.
FILTER = "observation=value,project=false"
RIVALS = {
    "constant": "--gate constant --gate-value 0.7",
    "scalar": "--gate scalar",
    "vector": "--gate vector",
    "rezero": "--gate scalar --gate-value 0.01",
    "ligr": "--gate ligr",
    "qiu-head": "--gate qiu-head",
    "qiu-element": "--gate qiu-element",
    "tau-bias": "--tau-bias",
    "dropout-0.6": "--dropout 0.6",
    "dropout-0.3": "--dropout 0.3",
}
ABLATIONS = {
    "prediction": "--bft observation=prediction,project=false",
    "mean": "--bft observation=mean,project=false",
    "default": "--bft on",
    "token": f"--bft {FILTER},granularity=token",
    "tau-unit": f"--bft {FILTER} --tau unit",
    "tau-frequency": f"--bft {FILTER} --tau frequency",
    "tau-shuffled": f"--bft {FILTER} --tau shuffled",
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
    # Beauty is the development set: every choice is made on its validation.
    for seed in (0, 1):
        train("beauty", "plain", seed)
        train("beauty", "bft", seed, f"--bft {FILTER}")
        train("beauty", "constant", seed, RIVALS["constant"])
    for name, options in RIVALS.items():
        if name != "constant":
            train("beauty", name, 0, options)
    for name, options in ABLATIONS.items():
        train("beauty", f"bft-{name}", 0, options)
    for data in SETS[1:]:
        for seed in (0, 1, 2):
            train(data, "plain", seed)
            train(data, "bft", seed, f"--bft {FILTER}")
            train(data, "constant", seed, RIVALS["constant"])
    for model in ("hstu", "bert4rec"):
        for data in ("instruments", "sports", "lastfm"):
            for seed in (0, 1, 2):
                train(data, "plain", seed, model=model)
                train(data, "bft", seed, f"--bft {FILTER}", model)
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
        if (work / "stop").exists():
            break


if __name__ == "__main__":
    typer.run(main)
