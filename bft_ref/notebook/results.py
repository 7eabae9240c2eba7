"""The stored runs of the recommendation chapters, read and compared.

A run is the JSON that ``python -m bft_ref.recsys.train`` writes; its name is
``<data>-<model>-<variant>-s<seed>``. Variants and seeds are those of
``experiments/grid.py``.
"""

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bft_ref.notebook.forest import Estimate, Kind
from bft_ref.recsys import fields
from bft_ref.recsys.data.sequences import SplitName
from bft_ref.recsys.metrics import (
    Difference,
    Ranking,
    paired_bootstrap,
    pooled_bootstrap,
)
from bft_ref.support.checks import choice

Run = dict[str, Any]
#: the kinds of strata; the rarest targets, and the rarest last items
KINDS = ("frequency", "history", "last")
RAREST = ("frequency", 0)
RAREST_LAST = ("last", 0)
#: fresh sets, whose comparisons were fixed before the first run on them, and
#: the epoch they were fixed for; on the others all of them are exploratory
REGISTERED = {"video-games": 80, "arts": 80}


def folder() -> Path:
    """Where the runs are: in the repository, or else in the package."""
    package = Path(str(resources.files("bft_ref")))
    beside = package.parent / "results"
    return beside if beside.is_dir() else package / "results"


def names() -> list[str]:
    """The names of all stored runs of a recommender.

    Those of language models, :mod:`bft_ref.notebook.answers` reads.
    """
    found = (p.stem for p in folder().glob("*.json"))
    return sorted(n for n in found if re.search(r"^(?!nq-).*-s\d+$", n))


@cache
def load(name: str) -> Run:
    """One stored file, by its name without ``.json``, in today's words.

    Raises: FileNotFoundError that names the runs there are.
    """
    path = folder() / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"name: expected a stored run out of {', '.join(names())}; "
            f"got {name!r}"
        )
    found = json.loads(path.read_text("utf8"))
    return fields.of_today(found) if "model" in found else found


def runs(
    data: str,
    variant: str,
    model: str = "sasrec",
    split: SplitName = "validation",
) -> list[Run]:
    """A variant's runs that ranked a split, by seed; [] if there are none."""
    form = re.compile(re.escape(f"{data}-{model}-{variant}") + r"-s(\d+)")
    matches = (form.fullmatch(name) for name in names())
    found = {int(m[1]): m[0] for m in matches if m}
    each = (load(found[seed]) for seed in sorted(found))
    return [run for run in each if split in run]


def at(runs: list[Run], epoch: int) -> list[Run]:
    """The runs as they were after an epoch, whichever was their best.

    Raises: ValueError that names the epochs a run was read at.
    """
    for run in runs:
        choice("epoch", str(epoch), list(run.get("at", {})))
    return [run | run["at"][str(epoch)] for run in runs]


def of_users(
    runs: list[Run],
    split: SplitName = "validation",
    metric: str = "NDCG",
    stratum: tuple[str, int] | None = None,
    k: int = 10,
) -> NDArray[np.float64]:
    """HR@k or NDCG@k of each user and run, (runs, users).

    ``stratum`` is a kind (``frequency`` of the target, length of the
    ``history``, frequency of its ``last`` item) and a quartile 0…3.
    Raises: ValueError for no runs, runs that lack the split, another
    metric or stratum, or a k beyond the ranks that were kept.
    """
    choice("metric", metric, ("HR", "NDCG"))
    if not runs or any(split not in run for run in runs):
        raise ValueError(
            f"runs: expected at least one run, each with {split!r}, got "
            f"{[sorted(set(run) & {'validation', 'test'}) for run in runs]}"
        )
    rows = []
    for run in runs:
        top = run[split]["top"]
        if not 1 <= k <= top["k"]:
            raise ValueError(f"k: expected 1 to {top['k']}, got {k!r}")
        ranking = Ranking.from_top(top)
        score = {"HR": ranking.hit, "NDCG": ranking.ndcg}[metric]
        rows.append(score(k))
    values = np.stack(rows)
    if stratum is None:
        return values
    kind, quartile = stratum
    choice("stratum", kind, KINDS)
    if quartile not in range(4):
        raise ValueError(
            f"stratum: expected a quartile 0 to 3, got {quartile!r}"
        )
    strata = load(f"{runs[0]['data']['name']}-strata")[split][kind]
    member = np.array(list(strata["of_user"])) == str(quartile)
    return values[:, member]


def difference(
    a: list[Run],
    b: list[Run],
    split: SplitName = "validation",
    metric: str = "NDCG",
    stratum: tuple[str, int] | None = None,
) -> Difference:
    """b − a with its 95 % interval over users and, where several, seeds.

    Only seeds that both sides have are compared. Raises: ValueError if there
    is none.
    """
    return paired_bootstrap(*_sides(a, b, split, metric, stratum))


def pooled_difference(
    pairs: list[tuple[list[Run], list[Run]]],
    split: SplitName = "validation",
    metric: str = "NDCG",
    stratum: tuple[str, int] | None = None,
) -> Difference:
    """The mean of :func:`difference` over the (a, b) of several sets."""
    return pooled_bootstrap(
        [_sides(a, b, split, metric, stratum) for a, b in pairs]
    )


def _sides(
    a: list[Run],
    b: list[Run],
    split: SplitName,
    metric: str,
    stratum: tuple[str, int] | None,
) -> tuple[NDArray, NDArray]:
    """Both sides' users, for the seeds that both have."""
    one, other = ({run["seed"]: run for run in side} for side in (a, b))
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        raise ValueError(
            f"a, b: expected runs of a common seed, got seeds {sorted(one)} "
            f"and {sorted(other)}"
        )
    a, b = ([side[seed] for seed in seeds] for side in (one, other))
    return (
        of_users(a, split, metric, stratum),
        of_users(b, split, metric, stratum),
    )


def estimate(
    data: str,
    rival: str,
    arm: str = "bft",
    *,
    label: str | None = None,
    model: str = "sasrec",
    split: SplitName = "test",
    metric: str = "NDCG",
    stratum: tuple[str, int] | None = None,
    epoch: int | None = None,
    kind: Kind = "exploratory",
    group: str | None = None,
) -> Estimate:
    """A variant less its rival on one set, a row of a forest plot.

    Over the seeds that both have; ``epoch``: as the runs were then, instead
    of at each one's best. The label is the set's name unless one is given.
    Raises: ValueError if there is no common seed.
    """
    a, b = (runs(data, name, model, split) for name in (rival, arm))
    if epoch is not None:
        a, b = at(a, epoch), at(b, epoch)
    common = {run["seed"] for run in a} & {run["seed"] for run in b}
    found = difference(a, b, split, metric, stratum)
    return Estimate(label or data, found, len(common), kind, group)


def peak_megabytes(run: Run) -> float:
    """Peak memory of the process up to the last epoch; NaN if not kept.

    Runs made before that was recorded have a peak that includes the analyses
    of a filter after training, which is no cost of training.
    """
    return run.get("training_peak_bytes", np.nan) / 1e6


def provenance(runs: dict[str, Run]) -> pd.DataFrame:
    """What made each run: code, machine, time, memory, choice of epoch."""
    rows = {}
    for label, run in runs.items():
        peak = peak_megabytes(run)
        rows[label] = {
            "commit": (run["code"]["commit"] or "")[:9],
            "torch": run["code"]["torch"],
            "device": run["device"],
            "best epoch": run["best_epoch"],
            "epochs": run["epochs"],
            "CPU s/epoch": run["cpu_seconds_per_epoch"],
            "peak MB": "–" if np.isnan(peak) else f"{peak:.0f}",
            "parameters": run["parameters"],
            "data sha256": run["data"]["sha256"][:12],
        }
    return pd.DataFrame.from_dict(rows, orient="index")
