"""The runs of noisy_labels.md: a search on validation, then test, by seeds.

    python -m experiments.noisy_labels --list
    python -m experiments.noisy_labels --work runs --weights smollm2

An interrupted run goes on from its checkpoint in --work. Started twice, two
runs go side by side; a file ``stop`` in --work ends it after the run at hand.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import tyro

from bft_ref.llm.finetune.adaptation import Adaptation
from bft_ref.llm.finetune.command import FineTune, Task, execute
from bft_ref.llm.finetune.trainer import FineTuneConfig
from experiments.runs import RESULTS, is_done, make

#: a run by its name
Named = tuple[str, FineTune]
RATES: list[dict[str, Any]] = [{"lr": lr} for lr in (2e-4, 4e-4, 8e-4)]


class Arm(NamedTuple):
    """What an arm is, and what it tries on validation."""

    adaptation: Adaptation
    train: Mapping[str, Any] = MappingProxyType({})
    trials: list[dict[str, Any]] = RATES


PLAIN = Adaptation()
ARMS = {
    "sft": Arm(PLAIN),
    "focal": Arm(
        PLAIN,
        {"loss": "focal"},
        [
            {"lr": 4e-4, "gamma": 1.0},
            {"lr": 4e-4, "gamma": 2.0},
            {"lr": 8e-4, "gamma": 2.0},
        ],
    ),
    "filter": Arm(Adaptation(variant="kalman", gain=0.8)),
    "constant": Arm(Adaptation(variant="constant", gain=0.8)),
    "smoothing": Arm(
        PLAIN,
        {},
        [
            {"lr": 4e-4, "smoothing": 0.1},
            {"lr": 4e-4, "smoothing": 0.2},
            {"lr": 8e-4, "smoothing": 0.1},
        ],
    ),
    "rescaled": Arm(Adaptation(gain=0.8)),
    "gate": Arm(Adaptation(variant="gate", gain=0.8)),
    "tau-bias": Arm(Adaptation(variant="tau_bias", initial_precision="mlp")),
    "early": Arm(PLAIN, {"evaluate_every": 20}),
    "filter-mlp": Arm(
        Adaptation(variant="kalman", gain=0.8, initial_precision="mlp")
    ),
}
FIRST = ("sft", "focal", "filter")
NOISE = 0.3


def trials(arm: str) -> dict[str, FineTune]:
    """The search of an arm, by the names of its runs."""
    return {
        f"nq-{arm}-p{NOISE}-trial{place}-s0": _run(arm, NOISE, 0, trial)
        for place, trial in enumerate(ARMS[arm].trials)
    }


def chosen(arm: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """The trial that validation chose; None before its runs are made."""
    found = []
    for name, trial in zip(trials(arm), ARMS[arm].trials, strict=True):
        path = results / f"{name}.json"
        if not path.is_file():
            return None
        seen = json.loads(path.read_text("utf8"))["validation"]
        found.append((-seen["f1"], seen["nll"], trial))
    return min(found, key=lambda each: each[:2])[2]


def tests(
    arm: str, noise: float, seeds: tuple[int, ...], results: Path = RESULTS
) -> dict[str, FineTune]:
    """The runs on test questions; none before the arm's search is made."""
    trial = chosen(arm, results)
    if trial is None:
        return {}
    return {
        f"nq-{arm}-p{noise}-s{seed}": replace(
            _run(arm, noise, seed, trial), evaluate_test=True
        )
        for seed in seeds
    }


def best_control(results: Path = RESULTS) -> str | None:
    """The control with the highest mean test F1 at p = 0.3, if all are in."""
    means = {}
    for arm in ARMS:
        if arm.startswith("filter"):
            continue
        values = [
            json.loads(path.read_text("utf8"))["test"]["f1"]
            for seed in (1, 2, 3)
            if (path := results / f"nq-{arm}-p{NOISE}-s{seed}.json").is_file()
        ]
        if len(values) < 3:
            return None
        means[arm] = sum(values) / len(values)
    return max(means, key=means.__getitem__)


def runs(results: Path = RESULTS) -> Iterator[Named]:
    """Every run that can be made by now, in the registered order."""
    for arm in FIRST:
        yield from trials(arm).items()
    for seed in (1, 2, 3):
        for arm in FIRST:
            yield from tests(arm, NOISE, (seed,), results).items()
    for arm in ARMS:
        if arm not in FIRST:
            yield from trials(arm).items()
            yield from tests(arm, NOISE, (1, 2, 3), results).items()
    best = best_control(results)
    asked = dict.fromkeys((*FIRST, *([best] if best else [])))
    for noise in (0.0, 0.5):
        for seed in (1, 2, 3):
            for arm in asked:
                yield from tests(arm, noise, (seed,), results).items()
    for seed in (4, 5):
        for arm in ARMS:
            yield from tests(arm, NOISE, (seed,), results).items()


def _run(arm: str, noise: float, seed: int, trial: dict[str, Any]) -> FineTune:
    adaptation, train, _ = ARMS[arm]
    return FineTune(
        task=Task(noise=noise),
        adaptation=adaptation,
        train=FineTuneConfig(seed=seed, **train, **trial),
        threads=1,
        quiet=True,
    )


def main(
    work: Path = Path("runs"),
    weights: Path | None = None,
    data_dir: Path | None = None,
    results: Path = RESULTS,
    arm: tuple[str, ...] = (),
    only_list: Annotated[bool, tyro.conf.arg(name="list")] = False,
) -> None:
    """Make the runs that are missing, in order.

    Args:
        work: For checkpoints, logs and the lower layers' states; keep it.
        weights: SmolLM2's; by default from the Hub.
        data_dir: Where the data sets are; by default BFT_DATA.
        results: Where results are, and are written to.
        arm: Only these; by default all.
        only_list: Say what is done and what is open.
    """
    make_all(
        lambda: (
            each for each in runs(results) if not arm or _arm(each[0]) in arm
        ),
        work,
        weights,
        data_dir,
        results,
        only_list,
    )


def _arm(name: str) -> str:
    return name.split("-p")[0].removeprefix("nq-")


def make_all(
    runs: Callable[[], Iterator[Named]],
    work: Path,
    weights: Path | None,
    data_dir: Path | None,
    results: Path,
    only_list: bool,
) -> None:
    """Make the runs that are missing, or list them all.

    ``runs`` is asked anew before each, since results decide on later ones.
    """
    if only_list:
        for name, run in runs():
            done = is_done(results / f"{name}.json", run)
            print("done " if done else "open ", name)
        return
    work.mkdir(parents=True, exist_ok=True)
    tried: set[str] = set()
    while not (work / "stop").exists():
        for name, run in runs():
            result = results / f"{name}.json"
            if name not in tried and not is_done(result, run):
                break
        else:
            return
        tried.add(name)
        run = replace(run, weights=weights, cache=work / "states")
        make(run, result, work, data_dir, execute)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.DisallowNone,))
