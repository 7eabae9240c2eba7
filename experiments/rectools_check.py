"""RecTools' SASRec beside ours on one set, and its metrics beside ours.

    python -m experiments.rectools_check --data-dir my-data

Needs RecTools, beside which the rest runs as experiments/README.md says. All
runs train on the same histories with the same budget, and are asked for the
validation items; no test item is looked at. RecTools' metrics and ours judge
the same ten recommendations of each user.
"""

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro
from pytorch_lightning import seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.metrics import NDCG, HitRate
from rectools.models import SASRecModel

from bft_ref.recsys.data import Catalogue, Sequences, Split, load
from bft_ref.recsys.metrics import Ranking
from bft_ref.recsys.models import SASRecConfig
from bft_ref.recsys.recommend import Service, as_columns
from bft_ref.recsys.rectools import BFTBackbone, BFTTransformerLayers
from bft_ref.recsys.storage import as_fields
from bft_ref.recsys.train import TrainConfig, fit
from bft_ref.training.files import replacing
from bft_ref.training.provenance import code_version, device_name

OUTPUT = Path(__file__).parents[1] / "results" / "external"
K = 10
#: what both have, in our words and in RecTools'
OURS: dict[str, Any] = {
    "d_model": 64,
    "num_layers": 2,
    "nhead": 2,
    "dropout": 0.3,
}
THEIRS: dict[str, Any] = {
    "n_factors": 64,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout_rate": 0.3,
}
#: SASRec as its authors published it, which is RecTools' form: queries alone
#: are normed, a narrow ReLU network, small first vectors
PUBLISHED: dict[str, Any] = {
    "residual": "original",
    "dim_feedforward": 64,
    "activation": "relu",
    "embedding_std": 0.02,
}
FILTER: dict[str, Any] = {
    "transformer_layers_type": BFTTransformerLayers,
    "backbone_type": BFTBackbone,
}
Recommend = Callable[[], pd.DataFrame]
#: a trained model's description, seconds, and recommendations
Found = tuple[dict[str, Any], float, pd.DataFrame]


def ours(
    sequences: Sequences, split: Split, budget: TrainConfig, **options: Any
) -> Found:
    """Our SASRec, and what its service recommends."""
    config = SASRecConfig(sequences.n_items, max_length=50, **OURS, **options)
    fitted = fit(sequences, config, budget, device="cpu", progress=False)
    seconds = sum(one["train_seconds"] for one in fitted.result["history"])
    users = range(len(split.users))
    labels = Catalogue(tuple(range(1, sequences.n_items + 1)), tuple(users))
    service = Service(fitted.model, split.history, labels)
    found = pd.DataFrame(as_columns(service.recommend(users, k=K)))
    named = {
        "user": Columns.User,
        "item": Columns.Item,
        "rank": Columns.Rank,
    }
    return as_fields(config), seconds, found[list(named)].rename(columns=named)


def theirs(
    sequences: Sequences, split: Split, budget: TrainConfig, **options: Any
) -> Found:
    """RecTools' SASRec, and what it recommends."""
    lengths = split.history.lengths
    place = np.arange(len(split.history.items)) - np.repeat(
        split.history.offsets[:-1], lengths
    )
    dataset = Dataset.construct(
        pd.DataFrame(
            {
                Columns.User: np.repeat(np.arange(len(lengths)), lengths),
                Columns.Item: split.history.items,
                Columns.Weight: 1.0,
                Columns.Datetime: pd.to_datetime(place, unit="s"),
            }
        )
    )
    seed_everything(budget.seed, verbose=False)
    model = SASRecModel(
        **THEIRS,
        session_max_len=50,
        loss="softmax",
        lr=budget.lr,
        batch_size=budget.batch_size,
        epochs=budget.epochs,
        recommend_torch_device="cpu",
        **options,
    )
    began = time.perf_counter()
    model.fit(dataset)
    seconds = time.perf_counter() - began
    found = model.recommend(
        users=np.arange(len(lengths)), dataset=dataset, k=K, filter_viewed=True
    )
    described = {
        name: value
        for name, value in model.get_config(simple_types=True).items()
        if isinstance(value, str | int | float | bool)
    }
    return described, seconds, found


def judged(split: Split, found: pd.DataFrame) -> dict[str, Any]:
    """HR and NDCG by our code, and how far RecTools' values are from them.

    RecTools' NDCG divides by the gain of ten hits, or by what the targets
    allow (``divide_by_achievable``), which for one target is 1, as ours does.
    """
    users = np.arange(len(split.target))
    goal = split.target[found[Columns.User].to_numpy()]
    hits = found[found[Columns.Item].to_numpy() == goal]
    ranking = Ranking.from_top(
        {
            "k": K,
            "users": len(users),
            "user": hits[Columns.User].tolist(),
            "rank": hits[Columns.Rank].tolist(),
        }
    )
    asked = pd.DataFrame({Columns.User: users, Columns.Item: split.target})
    full = (1 / np.log2(np.arange(K) + 2)).sum()
    pairs = {
        "HitRate": (HitRate(k=K), ranking.hit(K)),
        "NDCG": (NDCG(k=K), ranking.ndcg(K) / full),
        "NDCG, achievable": (
            NDCG(k=K, divide_by_achievable=True),
            ranking.ndcg(K),
        ),
    }
    apart = {}
    for name, (metric, mine) in pairs.items():
        of_user = metric.calc_per_user(found, asked).reindex(users)
        apart[name] = float(np.abs(of_user.to_numpy() - mine).max())
    return ranking.summary((K,)) | {"largest_difference": apart}


#: arm → how it is made, its options, its seeds: one is a direction only
ARMS: dict[str, tuple[Callable[..., Found], dict[str, Any], list[int]]] = {
    "rectools": (theirs, {}, [1, 2, 3]),
    "ours-published": (ours, PUBLISHED, [1, 2, 3]),
    "ours": (ours, {}, [1]),
    "rectools-bft": (theirs, FILTER, [1]),
    # our state of an item is √d times its vector; RecTools leaves that off
    "rectools-scaled": (
        theirs,
        {"pos_encoding_kwargs": {"use_scale_factor": True}},
        [1],
    ),
}


def main(
    data: str = "lastfm",
    data_dir: Path | None = None,
    output: Path | None = None,
    epochs: int = 20,
) -> None:
    """Make the runs that are missing, one thread; write each as it is made.

    Args:
        data: A public set.
        data_dir: Where the data sets are; by default BFT_DATA.
        output: By default results/external/rectools-<data>.json.
        epochs: All are trained; none is chosen.
    """
    torch.set_num_threads(1)
    sequences = load(data, folder=data_dir)
    split = sequences.split("validation")
    new = ~np.isin(split.target, split.training.items)
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "data": sequences.describe(),
        "split": "validation",
        "users": len(split.target),
        "targets_never_trained_on": int(new.sum()),
        "epochs": epochs,
        "versions": {
            name: version(name)
            for name in ("rectools", "pytorch-lightning", "pandas")
        },
        "device": device_name(torch.device("cpu")),
        "runs": runs,
    }
    path, code = output or OUTPUT / f"rectools-{data}.json", code_version()
    if path.is_file():
        before = json.loads(path.read_text("utf8"))
        runs += before["runs"]
        if before != result:
            raise ValueError(
                f"output: expected runs of this set, budget, machine and "
                f"these versions in {path}, got others; remove it"
            )
    made = {(run["arm"], run["seed"]) for run in runs}
    for arm, (make, options, seeds) in ARMS.items():
        for seed in seeds:
            if (arm, seed) in made:
                continue
            budget = TrainConfig(
                loss="full",
                epochs=epochs,
                evaluate_every=epochs,
                batch_size=32,
                seed=seed,
            )
            busy = time.process_time()
            model, seconds, found = make(sequences, split, budget, **options)
            run = {"arm": arm, "seed": seed, **judged(split, found)}
            run |= {
                "train_seconds": round(seconds, 1),
                "cpu_seconds": round(time.process_time() - busy, 1),
                "code": code,
                "model": model,
            }
            runs.append(run)
            print(*list(run.items())[:4], flush=True)
            with replacing(path) as unfinished:
                unfinished.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.DisallowNone,))
