"""The stored runs of language models that answer questions, compared.

A run is the JSON that ``python -m bft_ref.llm.finetune`` writes; its name is
``<task>-<arm>-p<noise>-s<seed>``, with ``-trial<n>`` before the seed where a
setting was tried on validation. Arms and seeds are those of
``experiments/noisy_labels.py``.
"""

import json
import re
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bft_ref.notebook.forest import Estimate, Kind
from bft_ref.notebook.results import folder
from bft_ref.recsys.metrics import paired_bootstrap

Run = dict[str, Any]
NAME = re.compile(r"(nq)-([a-z-]+)-p([\d.]+)(?:-trial(\d+))?-s(\d+)")


class Key(NamedTuple):
    """What a run's name says of it."""

    task: str
    arm: str
    noise: float
    trial: int | None
    seed: int


def names() -> dict[Key, str]:
    """All stored runs, by what their names say."""
    found = {}
    for path in folder().glob("*.json"):
        if match := NAME.fullmatch(path.stem):
            task, arm, noise, trial, seed = match.groups()
            number = None if trial is None else int(trial)
            key = Key(task, arm, float(noise), number, int(seed))
            found[key] = path.stem
    return dict(sorted(found.items(), key=lambda each: each[1]))


@cache
def load(name: str) -> Run:
    """One stored run, by its name without ``.json``."""
    return json.loads((folder() / f"{name}.json").read_text("utf8"))


def runs(arm: str, noise: float, split: str = "test") -> list[Run]:
    """An arm's runs that answered a split, by seed, trials left out."""
    each = [
        load(name)
        for key, name in names().items()
        if (key.arm, key.noise, key.trial) == (arm, noise, None)
    ]
    found = [run for run in each if split in run]
    return sorted(found, key=lambda run: run["seed"])


def of_questions(
    runs: list[Run], split: str = "test", metric: str = "f1"
) -> NDArray[np.float64]:
    """``f1``, ``em`` or ``nll`` of each question, (runs, questions)."""
    return np.array([run[split]["each"][metric] for run in runs])


def estimate(
    rival: str,
    arm: str = "filter",
    noise: float = 0.3,
    *,
    split: str = "test",
    metric: str = "f1",
    kind: Kind = "exploratory",
    label: str | None = None,
    group: str | None = None,
) -> Estimate | None:
    """An arm less its rival over the seeds that both have, None without one.

    The interval is over questions and, where several, seeds, in pairs.
    """
    sides = [
        {run["seed"]: run for run in runs(name, noise, split)}
        for name in (rival, arm)
    ]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    if not seeds:
        return None
    a, b = (
        of_questions([side[seed] for seed in seeds], split, metric)
        for side in sides
    )
    said = label or f"{arm} − {rival}"
    return Estimate(said, paired_bootstrap(a, b), len(seeds), kind, group)
