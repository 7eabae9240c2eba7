"""The laboratory: plain model, Bayesian filter and one rival, by the reader.

The three have the same seeds, batches and number of steps, which is counted
and no matter of the machine's speed. A run that is there is not made again,
one that was broken off goes on where it stopped.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from bft_ref.config import BFTConfig
from bft_ref.notebook import results
from bft_ref.notebook.forest import Estimate, verdict
from bft_ref.notebook.results import Run
from bft_ref.recsys.data import (
    DATASETS,
    Sequences,
    from_frame,
    load,
    simulate,
)
from bft_ref.recsys.data.sequences import SplitName
from bft_ref.recsys.metrics import membership, paired_bootstrap
from bft_ref.recsys.models import SASRecConfig
from bft_ref.recsys.train import TrainConfig, fit
from bft_ref.recsys.train.batches import windows
from bft_ref.support.checks import choice, count
from bft_ref.training.files import replacing

Rival = Literal["tau-bias", "constant", "ligr"]
Size = Literal["short", "full"]
Runs = dict[str, list[Run]]  # of each arm, by seed

#: rival -> what it is called in the stored runs
RIVALS: dict[Rival, str] = {
    "tau-bias": "tau-bias",
    "constant": "by-layer",
    "ligr": "ligr",
}
#: size -> steps of each run: on simulated data, on real ones
STEPS: dict[Size, tuple[int, int]] = {
    "short": (150, 150),
    "full": (1000, 5000),
}
WORLDS: dict[Size, dict[str, Any]] = {
    "short": {"n_users": 1200, "n_items": 300, "length": (5, 12)},
    "full": {"n_users": 8000, "n_items": 600, "length": (5, 20)},
}
EVALUATIONS = 10  # of each run on validation items, to choose the epoch


def choose(
    data: Any = "simulated",
    size: Size = "short",
    **world: Any,
) -> Sequences:
    """The data of a comparison.

    ``data`` is "simulated", a public set by name (downloaded and checked), a
    file that :func:`bft_ref.recsys.data.load` reads, sequences, or a table of
    pandas or polars with columns ``user``, ``item`` and, unless its rows are
    in order, ``time``. ``world`` changes the generator, as
    ``noise=(1.0, 1.0)``.
    Raises: ValueError for another size, or ``world`` with data that are not
    simulated; and as ``load`` and :func:`bft_ref.recsys.data.from_frame`.
    """
    choice("size", size, get_args(Size))
    if isinstance(data, str) and data == "simulated":
        options = WORLDS[size] | {"seed": 13} | world
        return simulate(**options).sequences
    if world:
        raise ValueError(
            f"{', '.join(world)}: expected only with data 'simulated'"
        )
    if isinstance(data, Sequences):
        return data
    if isinstance(data, str | Path):
        return load(data)
    timed = "time" in getattr(data, "columns", ())
    return from_frame(data, time="time" if timed else None)[0]


@dataclass(frozen=True)
class Plan:
    """What is compared, fixed before the first run.

    ``model`` and ``train`` are what all arms share of their SASRecConfig and
    TrainConfig. Raises: ValueError for another rival or no seed.
    """

    sequences: Sequences
    rival: Rival
    seeds: int
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("rival", self.rival, get_args(Rival))
        count("seeds", self.seeds, 1)

    @property
    def arms(self) -> tuple[str, str, str]:
        """The names of the three."""
        return "plain", "filter", self.rival

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, counted."""
        return _steps_per_epoch(self.sequences, self.model, self.train)

    @property
    def steps(self) -> int:
        """Steps of each run."""
        return self.train["epochs"] * self.steps_per_epoch

    def __str__(self) -> str:
        about, epochs = self.sequences.describe(), self.train["epochs"]
        return (
            f"{about['name']}: {about['users']} users, {about['items']} "
            f"items, {about['interactions']} interactions\n"
            f"{', '.join(self.arms)}; seeds "
            f"{', '.join(map(str, range(self.seeds)))}\n"
            f"{epochs} epochs of {self.steps_per_epoch} steps, "
            f"{self.steps} steps a run, {3 * self.seeds} runs"
        )


def plan(
    sequences: Sequences,
    rival: Rival = "tau-bias",
    size: Size = "short",
    *,
    seeds: int = 3,
    **model: Any,
) -> Plan:
    """A plan whose runs have as many epochs as the size has steps for.

    Real sets have the recipes of the stored runs (one for fewer than 2000
    users, one for more) but for the number of epochs. ``model`` changes
    fields of all three arms' SASRecConfig, as ``d_model=32``.
    Raises: ValueError for another rival or size, or no seed.
    """
    choice("size", size, get_args(Size))
    simulated = sequences.name.startswith("simulation-")
    shape: dict[str, Any] = {"n_items": sequences.n_items}
    train: dict[str, Any] = {}
    if simulated:
        longest = int(sequences.lengths.max())
        shape |= {"d_model": 32, "dim_feedforward": 64, "dropout": 0.2}
        shape |= {"max_length": longest}
        train |= {"loss": "full", "lr": 6e-3}
    else:
        known = DATASETS.get(sequences.name)
        shape |= {"max_length": 20 if known is None else known.length}
        if len(sequences) < 2000:
            shape |= {"dropout": 0.3}
            train |= {"batch_size": 32, "every_window": True}
    shape |= model
    steps = STEPS[size][not simulated]
    epochs = math.ceil(steps / _steps_per_epoch(sequences, shape, train))
    train |= {
        "epochs": epochs,
        "evaluate_every": max(1, epochs // EVALUATIONS),
        "patience": epochs,  # all have the same number of steps
    }
    return Plan(sequences, rival, seeds, shape, train)


def _steps_per_epoch(
    sequences: Sequences, model: dict[str, Any], train: dict[str, Any]
) -> int:
    config = TrainConfig(**train)
    training = sequences.split("validation").training
    users, _ = windows(
        training.lengths, model["max_length"], config.every_window
    )
    return math.ceil(len(users) / config.batch_size)


def run_all(
    plan: Plan,
    folder: str | Path,
    *,
    evaluate_test: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> Runs:
    """Make what is missing of a plan's runs, and give all, by arm and seed.

    Each run is a JSON file in ``folder``, named for its data and options,
    and a checkpoint that an interrupted run goes on from. ``evaluate_test``
    ranks the test items too, of runs that are there already as well.
    A line is printed for each run, with its value on validation items.
    """
    found: Runs = {arm: [] for arm in plan.arms}
    for seed in range(plan.seeds):
        for arm in plan.arms:
            config = _config(plan, arm, found["filter"])
            train = TrainConfig(seed=seed, **plan.train)
            name = f"{plan.sequences.name}-{arm}-s{seed}"
            path = Path(folder) / f"{name}-{_key(plan, config, train)}.json"
            run, new = _run(
                plan.sequences,
                config,
                train,
                path,
                evaluate_test=evaluate_test,
                device=device,
                progress=progress,
            )
            found[arm].append(run)
            print(
                f"{arm}, seed {seed}: "
                f"NDCG@10 {run['validation']['NDCG@10']:.4f}, "
                f"{run['seconds']:.0f} s" + ", was there" * (not new)
            )
    return found


def _config(plan: Plan, arm: str, filters: list[Run]) -> SASRecConfig:
    """The model of an arm; a constant is the mean gain of the last filter."""
    options: dict[str, Any] = {}
    if arm == "filter":
        options = {"bft": BFTConfig()}
    elif arm == "tau-bias":
        options = {"tau_bias": True}
    elif arm == "ligr":
        options = {"gate": "ligr"}
    elif arm == "constant":
        layers = filters[-1]["diagnostics"]["layers"]
        gains = tuple(float(np.mean(layer["gain"])) for layer in layers)
        options = {"gate": "constant", "gate_value": gains}
    return SASRecConfig(**plan.model | options)


def _key(plan: Plan, config: SASRecConfig, train: TrainConfig) -> str:
    """Ten digits that another model, recipe or data set does not have."""
    known = hashlib.sha256()
    known.update(json.dumps([asdict(config), asdict(train)]).encode())
    known.update(plan.sequences.items.tobytes())
    known.update(plan.sequences.offsets.tobytes())
    return known.hexdigest()[:10]


def _run(
    sequences: Sequences,
    config: SASRecConfig,
    train: TrainConfig,
    path: Path,
    *,
    evaluate_test: bool,
    **options: Any,
) -> tuple[Run, bool]:
    """A run's result, and whether it had to be made."""
    split: SplitName = "test" if evaluate_test else "validation"
    if path.is_file():
        run = json.loads(path.read_text("utf8"))
        if split in run:
            return run, False
    fitted = fit(
        sequences,
        config,
        train,
        checkpoint=path.with_suffix(".pt"),
        evaluate_test=evaluate_test,
        **options,
    )
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(fitted.result), "utf8")
    return fitted.result, True


def compare(
    plan: Plan,
    runs: Runs,
    split: SplitName = "validation",
    stratum: tuple[str, int] | None = None,
    group: str | None = None,
) -> list[Estimate]:
    """Paired differences of NDCG@10 between the three arms.

    Over users and, where there are several, seeds. ``stratum`` is a kind
    (``frequency`` of the target, or ``history``) and a quartile 0…3; a
    reader's comparison is exploratory.
    Raises: ValueError for runs that lack the split, or a stratum of fewer
    than two users.
    """
    ndcg = {arm: results.of_users(runs[arm], split) for arm in plan.arms}
    if stratum is not None:
        kind, quartile = stratum
        member = membership(plan.sequences.split(split))[kind]["of_user"]
        inside = np.array(list(member)) == str(quartile)
        ndcg = {arm: values[:, inside] for arm, values in ndcg.items()}
    plain, ours, rival = plan.arms
    return [
        Estimate(
            f"{one} − {other}",
            paired_bootstrap(ndcg[other], ndcg[one]),
            plan.seeds,
            "exploratory",
            group,
        )
        for one, other in [(ours, plain), (rival, plain), (ours, rival)]
    ]


def stored(
    rival: Rival, stratum: tuple[str, int] | None = None
) -> list[Estimate]:
    """The same of the stored runs on real sets: filter less plain and rival.

    On test items, where a set has such runs.
    Raises: ValueError for another rival.
    """
    choice("rival", rival, get_args(Rival))
    found = []
    for name, variant in [("plain", "plain"), (rival, RIVALS[rival])]:
        for data in DATASETS:
            other = results.runs(data, variant, split="test")
            ours = results.runs(data, "bft", split="test")
            if {r["seed"] for r in other} & {r["seed"] for r in ours}:
                fixed = data in results.REGISTERED
                found.append(
                    results.estimate(
                        data,
                        variant,
                        stratum=stratum,
                        epoch=results.REGISTERED.get(data),
                        kind="confirmatory" if fixed else "exploratory",
                        group=f"stored: filter − {name}",
                    )
                )
    return found


def curves(runs: Runs) -> pd.DataFrame:
    """NDCG@10 while training: arm, seed, step, quartile (0 rarest), value.

    By quartile of the target's frequency in training, on validation items.
    """
    return pd.DataFrame(
        _points(runs), columns=["arm", "seed", "step", "quartile", "NDCG@10"]
    )


def _points(runs: Runs) -> Iterator[tuple[str, int, int, int, float]]:
    for arm, each in runs.items():
        for run in each:
            step = 0
            for record in run["history"]:
                step += record["steps"]
                by = record.get("NDCG@10 by frequency", [])
                for quartile, value in enumerate(by):
                    yield arm, run["seed"], step, quartile, value


def in_words(rows: Iterable[Estimate], what: str = "NDCG@10") -> str:
    """Two lines for each comparison that say no more than its interval."""
    return "\n".join(_sentence(row, what) for row in rows)


def _sentence(row: Estimate, what: str) -> str:
    other = row.label.partition(" − ")[2]
    said = verdict(row.difference, row.kind, row.seeds)
    start = f"{row.named}: {row} % of {other}'s {what}\n    {said}: "
    if said == "open":
        return f"{start}zero is inside, so this does not say which is better"
    side = "above" if row.difference.absolute > 0 else "below"
    if row.seeds < 3:
        return f"{start}a verdict takes three seeds"
    return f"{start}the whole interval lies {side} zero"
