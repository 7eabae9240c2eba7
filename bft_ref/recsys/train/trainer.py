"""One trainer for every model: the same budget and rules for both sides."""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from bft_ref.recsys import metrics
from bft_ref.recsys.data.errors import DataError
from bft_ref.recsys.data.sequences import Sequences, Split
from bft_ref.recsys.models import ModelConfig, Recommender, build
from bft_ref.recsys.storage import write
from bft_ref.recsys.train.batches import training_batches
from bft_ref.recsys.train.diagnostics import anatomy, histories, interventions
from bft_ref.recsys.train.losses import (
    LOSSES,
    next_item_loss,
    uniform_negatives,
)
from bft_ref.recsys.train.provenance import (
    code_version,
    device_name,
    peak_memory,
)
from bft_ref.support import checks


@dataclass(frozen=True)
class TrainConfig:
    """How a model is fitted.

    Training stops after ``epochs``, or once validation NDCG@10 has not
    improved at ``patience`` evaluations, one every ``evaluate_every`` epochs;
    the best epoch's weights are kept. ``precision_lr`` is Adam's rate for
    log τ and log Q; ``negatives`` are shared by a batch of ``batch``
    sequences; ``correct`` and ``calibration`` belong to the losses;
    ``weight_decay`` is Adam's L2; ``clip`` > 0 is the largest norm that a
    step's gradient, of all parameters together, may have (0: any);
    ``every_window`` trains on the whole of long sequences, not only on their
    end. ``mask_rate`` and ``last_rate`` are BERT4Rec's.

    Raises: TypeError for a field of another type; ValueError for a value out
    of its range, each naming the field.
    """

    loss: str = "sampled"
    negatives: int = 512
    correct: bool = True
    calibration: float = 0.75
    epochs: int = 100
    patience: int = 10
    evaluate_every: int = 1
    batch: int = 128
    lr: float = 1e-3
    precision_lr: float = 1e-2
    weight_decay: float = 0.0
    clip: float = 0.0
    every_window: bool = False
    mask_rate: float = 0.3
    last_rate: float = 0.1
    seed: int = 0

    def __post_init__(self):
        checks.typed(self)
        checks.choice("loss", self.loss, LOSSES)
        for name in (
            "epochs",
            "patience",
            "evaluate_every",
            "batch",
            "negatives",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected at least 1, got {getattr(self, name)}"
                )
        checks.number("lr", self.lr, 0.0)
        checks.number("precision_lr", self.precision_lr, 0.0)
        checks.number("mask_rate", self.mask_rate, 0.0, 1.0)
        checks.within("last_rate", self.last_rate, 0.0, 1.0)
        checks.within("calibration", self.calibration, 0.0, 1.0)
        checks.within("weight_decay", self.weight_decay, 0.0)
        checks.within("clip", self.clip, 0.0)
        if not 0 <= self.seed < 2**64:
            raise ValueError(
                f"seed: expected 0 <= seed < 2^64, got {self.seed}"
            )


@dataclass
class Fitted:
    """A trained model, its result for JSON, and the rankings behind it.

    ``model`` is in evaluation mode; ``rankings`` holds one
    :class:`bft_ref.recsys.metrics.Ranking` a part.
    """

    model: Recommender
    result: dict
    rankings: dict[str, metrics.Ranking]


def scorer(
    model: Recommender, split: Split, device: torch.device
) -> metrics.Scorer:
    """What ``metrics.evaluate`` asks: scores of some users."""

    def score(part):
        return model.scores(*histories(model, split, part, device))

    return score


@torch.no_grad()
def evaluate(
    model: Recommender, split: Split, device: torch.device
) -> metrics.Ranking:
    """Full ranking of a split's targets; shared out among the processes."""
    was = model.training
    model.eval()
    rank, world = _rank(), _world()
    mine = np.arange(rank, len(split.target), world)
    part = split._replace(
        history=split.history.take(mine), target=split.target[mine]
    )
    ranking = metrics.evaluate(part, scorer(model, part, device))
    model.train(was)
    if world == 1:
        return ranking
    shares: list[Any] = [None] * world
    dist.all_gather_object(shares, (mine, ranking))
    whole = metrics.Ranking(
        *(np.zeros(len(split.target), dtype=np.int64) for _ in range(3))
    )
    for where, found in shares:
        whole.above[where] = found.above
        whole.tied[where] = found.tied
        whole.candidates[where] = found.candidates
    return whole


def fit(
    sequences: Sequences,
    model_config: ModelConfig,
    config: TrainConfig,
    *,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    final: bool = False,
    read_at: Iterable[int] = (),
    progress: bool = True,
    on_epoch: Callable[[dict], None] | None = None,
) -> Fitted:
    """Train, choose the epoch on validation, report; resumes by itself.

    With ``checkpoint`` (a file) the state is written after every epoch, and
    a run that finds one goes on from it, to the same result as a run never
    interrupted: every epoch draws from its own seed. ``final`` ranks the test
    targets too, once, with the weights chosen on validation; without it the
    test items are not looked at. ``read_at`` names epochs whose weights are
    reported as well, under ``at``, whichever epoch is best: arms can then be
    compared after equal training. Under ``torchrun`` each batch is shared out
    among the processes.

    Raises: ValueError for a checkpoint of another configuration, data or
    number of processes, a model for another number of items, an option that
    nothing reads, an epoch to be read that is not reached, or a loss that is
    no longer finite; DataError if no user has the three items that it takes
    to be asked.
    """
    read_at = sorted(set(read_at))
    if not all(1 <= epoch <= config.epochs for epoch in read_at):
        raise ValueError(
            f"read_at: expected epochs in 1…{config.epochs}, got {read_at}"
        )
    if model_config.n_items != sequences.n_items:
        raise ValueError(
            f"n_items: expected {sequences.n_items}, those of the data; got "
            f"{model_config.n_items}"
        )
    refuse_what_nothing_reads(model_config, config)
    device = torch.device(
        device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    split = asking(sequences, "validation")
    torch.manual_seed(config.seed)
    model = build(model_config, split.frequency).to(device)
    optimizer = torch.optim.Adam(
        model.parameter_groups(config.lr, config.precision_lr),
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
    )
    identity = {
        "model": asdict(model_config),
        "train": asdict(config),
        "data": sequences.describe(),
        "processes": _world(),
    }
    state = _State(model, optimizer, identity)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_file():
        state.load(path, device)
    parallel = _parallel(model, device)
    epochs = tqdm(
        range(state.epoch, config.epochs),
        initial=state.epoch,
        total=config.epochs,
        unit="epoch",
        disable=not progress or _rank() > 0,
        dynamic_ncols=True,
    )
    for epoch in epochs:
        if state.stale >= config.patience:
            break
        began, worked = time.perf_counter(), time.process_time()
        loss, steps = _epoch(
            parallel, model, optimizer, split, config, epoch, device
        )
        trained, busy = time.perf_counter(), time.process_time()
        record = {"epoch": epoch + 1, "loss": loss, "steps": steps}
        last = epoch + 1 == config.epochs
        if last or (epoch + 1) % config.evaluate_every == 0:
            ranking = evaluate(model, split, device)
            found = ranking.summary()
            record |= found | metrics.by_stratum(split, ranking)
            state.keep_best(found["NDCG@10"])
            epochs.set_postfix(loss=f"{loss:.3f}", **_rounded(found))
        record["train_seconds"] = round(trained - began, 3)
        record["train_cpu_seconds"] = round(busy - worked, 3)
        record["evaluate_seconds"] = round(time.perf_counter() - trained, 3)
        if epoch + 1 in read_at:
            state.keep(epoch + 1)
        state.finish(record)
        if path is not None and _rank() == 0:
            state.save(path)
        if on_epoch is not None:
            on_epoch(record)
    epochs.close()
    peak = peak_memory(device)  # before the analyses, which only filters have
    lost = [epoch for epoch in read_at if epoch not in state.kept]
    if lost:
        raise ValueError(
            f"read_at: expected epochs that were trained and kept, got {lost} "
            f"of a run of {state.epoch} epochs"
        )
    parts = {"validation": split}
    if final:
        parts["test"] = sequences.split("test")
    at: dict[str, dict] = {}
    for epoch in read_at:
        model.load_state_dict(state.kept[epoch])
        at[str(epoch)] = {
            name: metrics.report(part, evaluate(model, part, device))
            for name, part in parts.items()
        }
    model.load_state_dict(state.best or model.state_dict())
    result = {
        **identity,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": state.epoch,
        "best_epoch": state.best_epoch,
        "stopped_early": state.stale >= config.patience,
        "seconds": round(
            sum(
                r["train_seconds"] + r["evaluate_seconds"]
                for r in state.history
            ),
            1,
        ),
        "seconds_per_epoch": _typical(state.history, "train_seconds"),
        "cpu_seconds_per_epoch": _typical(state.history, "train_cpu_seconds"),
        "history": state.history,
    }
    if at:
        result["at"] = at
    rankings = {}
    for name, part in parts.items():
        rankings[name] = evaluate(model, part, device)
        result[name] = metrics.report(part, rankings[name])
    if model_config.bft is not None:
        result["anatomy"] = anatomy(model, split, device)
        result["interventions"] = interventions(
            model, split, lambda: evaluate(model, split, device)
        )
    result |= {
        "code": state.code[0],
        "resumed_with": state.code[1:],
        "device": device_name(device),
        "training_peak_bytes": peak,
    }
    return Fitted(model.eval(), result, rankings)


def asking(sequences: Sequences, part: str) -> Split:
    """The split. Raises: DataError if it has no question."""
    split = sequences.split(part)
    if not len(split.target):
        raise DataError(
            sequences.name or "data",
            None,
            "no user has three items, so nobody can be asked",
        )
    return split


def refuse_what_nothing_reads(model: ModelConfig, config: TrainConfig) -> None:
    """Raises: ValueError for an option that model and loss do not read."""
    unread = {}
    if model.model != "bert4rec":
        unread["mask_rate"] = unread["last_rate"] = model.model
    for name, readers in {
        "correct": ("sampled",),
        "calibration": ("gbce",),
    }.items():
        if config.loss not in readers:
            unread[name] = f"loss {config.loss!r}"
    checks.unread(config, unread)


class _State:
    """What a resumed run needs: weights, optimiser, best so far."""

    def __init__(self, model, optimizer, identity):
        self.model, self.optimizer = model, optimizer
        self.identity = json.loads(json.dumps(identity))
        self.epoch, self.stale = 0, 0
        self.best, self.best_value, self.best_epoch = None, -math.inf, 0
        self.history: list[dict] = []
        self.kept: dict[int, dict] = {}  # weights of epochs to be reported
        #: versions of the code, as they were when each began to work on it
        self.code = [code_version()]

    def weights(self) -> dict:
        return {
            name: x.detach().clone()
            for name, x in self.model.state_dict().items()
        }

    def keep(self, epoch: int):
        self.kept[epoch] = self.weights()

    def keep_best(self, value: float):
        if value > self.best_value:
            self.best = self.weights()
            self.best_value, self.best_epoch = value, self.epoch + 1
            self.stale = 0
        else:
            self.stale += 1

    def finish(self, record: dict):
        self.history.append(record)
        self.epoch += 1

    def save(self, path: Path):
        kept = (
            "epoch",
            "stale",
            "best_value",
            "best_epoch",
            "history",
            "kept",
            "code",
        )
        write(
            {
                "identity": json.dumps(self.identity, sort_keys=True),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "best": self.best,
                **{name: getattr(self, name) for name in kept},
            },
            path,
        )

    def load(self, path: Path, device):
        found = torch.load(path, map_location=device, weights_only=True)
        mine = json.dumps(self.identity, sort_keys=True)
        if found.pop("identity") != mine:
            raise ValueError(
                f"checkpoint: {path} belongs to another configuration, "
                "data file or number of processes; remove it or choose "
                "another path"
            )
        self.model.load_state_dict(found.pop("model"))
        self.optimizer.load_state_dict(found.pop("optimizer"))
        (mine,) = self.code
        for name, value in found.items():
            setattr(self, name, value)
        if mine != self.code[-1]:
            self.code.append(mine)


def _epoch(parallel, model, optimizer, split, config, epoch, device):
    """One pass; returns the mean loss over questions and the steps."""
    rank, world = _rank(), _world()
    rng = np.random.default_rng([config.seed, epoch, 1])
    draw = torch.Generator().manual_seed(_seed(config.seed, epoch, 2))
    torch.manual_seed(_seed(config.seed, epoch, 3, rank))
    c = model.config
    sampled = config.loss != "full"
    parallel.train()
    total, asked, steps = 0.0, 0, 0
    for batch in training_batches(
        split.training,
        length=c.length,
        size=config.batch,
        rng=rng,
        every_window=config.every_window,
        mask_id=getattr(model, "mask_id", None),
        mask_rate=config.mask_rate,
        last_rate=config.last_rate,
    ):
        negatives = None
        if sampled:
            negatives = uniform_negatives(config.negatives, c.n_items, draw)
            negatives = negatives.to(device)
        questions = int((batch.target > 0).sum())
        mine = batch.share(rank, world).to(device)
        loss = parallel(mine, negatives, config)
        # DDP averages gradients over processes; shares differ in questions.
        share = int((mine.target > 0).sum()) * world / questions
        optimizer.zero_grad(set_to_none=True)
        (loss * share).backward()
        if config.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        total += loss.detach() * share / world * questions
        asked += questions
        steps += 1
    if world > 1:
        total = torch.as_tensor(total)
        dist.all_reduce(total)
    mean = float(total) / max(asked, 1)
    if not math.isfinite(mean):
        raise ValueError(f"loss: expected a finite number, got {mean}")
    return mean, steps


class _Questions(nn.Module):
    """Model and loss in one forward, as DDP needs it."""

    def __init__(self, model: Recommender):
        super().__init__()
        self.model = model

    def forward(self, batch, negatives, config) -> Tensor:
        model = self.model
        where = batch.target > 0
        if bool((where & (batch.items == 0)).any()):
            raise ValueError(
                "target: expected 0 where items are padding, got an item to "
                "be predicted from no history"
            )
        if not where.any():
            # A process without a question still takes part in the sum.
            return torch.stack([p.sum() for p in model.parameters()]).sum() * 0
        hidden = model(batch.items, batch.times)
        query = model.head(hidden[where])
        keys, bias = model.keys()
        return next_item_loss(
            query,
            batch.target[where],
            keys,
            bias,
            negatives,
            n_items=model.config.n_items,
            kind=config.loss,
            correct=config.correct,
            calibration=config.calibration,
        )


def _parallel(model, device):
    questions = _Questions(model)
    if _world() == 1:
        return questions
    on = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        questions, device_ids=on, find_unused_parameters=True
    )


def _seed(*parts: int) -> int:
    """One seed out of several numbers, different for different numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rounded(found: dict) -> dict:
    return {name: f"{value:.4f}" for name, value in found.items()}


def _typical(history: list[dict], name: str) -> float:
    return round(float(np.median([record[name] for record in history])), 3)
