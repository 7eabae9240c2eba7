"""One trainer for every model: the same budget and rules for both sides."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from bft_ref.recsys import metrics
from bft_ref.recsys.data.sequences import Sequences, Split, SplitName
from bft_ref.recsys.models import Recommender, RecommenderConfig, build
from bft_ref.recsys.storage import VERSION, as_fields
from bft_ref.recsys.train.batches import count_batches, training_batches
from bft_ref.recsys.train.diagnostics import (
    diagnose,
    histories,
    interventions,
)
from bft_ref.recsys.train.losses import (
    Loss,
    next_item_loss,
    noise_penalty,
    uniform_negatives,
)
from bft_ref.support import checks
from bft_ref.training import checkpoint as checkpoints
from bft_ref.training.checkpoint import RunError
from bft_ref.training.files import DataError
from bft_ref.training.provenance import (
    code_version,
    device_name,
    peak_memory,
)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is fitted.

    Raises: TypeError for a field of another type; ValueError for a value out
    of its range or one that the loss does not read, each naming the field.
    """

    loss: Loss = "sampled"  # Loss.
    num_negatives: int = 512  # Negatives shared by a batch.
    # Weigh the sampled negatives up to the whole catalogue.
    logq_correction: bool = True
    gbce_t: float = 0.75  # gBCE's t in [0, 1].
    epochs: int = 100  # At most.
    # Evaluations without a better validation NDCG@10 after which to stop; the
    # best epoch's weights are kept.
    patience: int = 10
    evaluate_every: int = 1  # Epochs between evaluations.
    batch_size: int = 128  # Sequences a batch.
    lr: float = 1e-3  # Adam's rate.
    # Adam's rate for log τ and log Q, and for what stands in their place: a
    # gate's learned scale, a head's precisions or temperatures of items.
    precision_lr: float = 1e-2
    # SD of a log-normal prior on a filter's Q around its start; 0: none.
    noise_prior_sd: float = 0.0
    weight_decay: float = 0.0  # Adam's L2.
    # Largest norm of a step's gradient, of all parameters together; 0: any.
    clip: float = 0.0
    # Train on the whole of long sequences, not only on their end.
    every_window: bool = False
    seed: int = 0  # Of everything that is drawn.

    def __post_init__(self):
        checks.typed(self)
        for name in (
            "epochs",
            "patience",
            "evaluate_every",
            "batch_size",
            "num_negatives",
        ):
            checks.count(name, getattr(self, name), 1)
        checks.number("lr", self.lr, 0.0)
        checks.number("precision_lr", self.precision_lr, 0.0)
        checks.within("gbce_t", self.gbce_t, 0.0, 1.0)
        checks.within("noise_prior_sd", self.noise_prior_sd, 0.0)
        checks.within("weight_decay", self.weight_decay, 0.0)
        checks.within("clip", self.clip, 0.0)
        if not 0 <= self.seed < 2**64:
            raise ValueError(
                f"seed: expected 0 <= seed < 2^64, got {self.seed}"
            )
        readers = {"logq_correction": "sampled", "gbce_t": "gbce"}
        unread = {
            name: f"loss {self.loss!r}"
            for name, loss in readers.items()
            if loss != self.loss
        }
        checks.unread(self, unread)


@dataclass
class Fitted:
    """A trained model, its result for JSON, and the rankings behind it.

    ``model`` is in evaluation mode; ``rankings`` holds one
    :class:`bft_ref.recsys.metrics.Ranking` a split.
    """

    model: Recommender
    result: dict
    rankings: dict[str, metrics.Ranking]


def scorer(
    model: Recommender, split: Split, device: torch.device
) -> metrics.Scorer:
    """What ``metrics.evaluate`` asks: scores of some users."""

    def score(user_indices):
        return model.scores(*histories(model, split, user_indices, device))

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
    share = split._replace(
        history=split.history.take(mine), target=split.target[mine]
    )
    ranking = metrics.evaluate(share, scorer(model, share, device))
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
    model_config: RecommenderConfig,
    config: TrainConfig,
    *,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    evaluate_test: bool = False,
    read_at: Iterable[int] = (),
    progress: bool = True,
    on_epoch: Callable[[dict], None] | None = None,
) -> Fitted:
    """Train, choose the epoch on validation, report; resumes by itself.

    With ``checkpoint`` (a file) the state is written after every epoch, and
    a run that finds one goes on from it, to the same result as a run never
    interrupted: every epoch draws from its own seed. ``evaluate_test`` ranks
    the test targets too, once, with the weights chosen on validation; without
    it the test items are not looked at. ``read_at`` names epochs whose weights
    are reported as well, under ``at``, whichever epoch is best: arms can then
    be compared after equal training. Under ``torchrun`` each batch is shared
    out among the processes.

    Raises: RunError for a checkpoint of another configuration, data or
    number of processes, a model for another number of items, an epoch to be
    read that is not reached, a prior on Q for a plain model, or a loss that
    is no longer finite; DataError if no user has the three items that it takes
    to be asked.
    """
    read_at = epochs_to_read(read_at, config)
    if model_config.bft is None and config.noise_prior_sd > 0:
        raise RunError(
            "noise_prior_sd: expected 0 for a plain model, which has no "
            f"process noise; got {config.noise_prior_sd}"
        )
    if model_config.n_items != sequences.n_items:
        raise RunError(
            f"n_items: expected {sequences.n_items}, those of the data; got "
            f"{model_config.n_items}"
        )
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
        "model": as_fields(model_config),
        "train": as_fields(config),
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
        raise RunError(
            f"read_at: expected epochs that were trained and kept, got {lost} "
            f"of a run of {state.epoch} epochs"
        )
    splits = {"validation": split}
    if evaluate_test:
        splits["test"] = sequences.split("test")
    at: dict[str, dict] = {}
    for epoch in read_at:
        model.load_state_dict(state.kept[epoch])
        at[str(epoch)] = {
            name: metrics.report(each, evaluate(model, each, device))
            for name, each in splits.items()
        }
    model.load_state_dict(state.best or model.state_dict())
    result = {
        "version": VERSION,
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
    for name, each in splits.items():
        rankings[name] = evaluate(model, each, device)
        result[name] = metrics.report(each, rankings[name])
    if model_config.bft is not None:
        result["diagnostics"] = diagnose(model, split, device)
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


def epochs_to_read(read_at: Iterable[int], config: TrainConfig) -> list[int]:
    """In order, each once. Raises: RunError for one beyond the last."""
    found = sorted(set(read_at))
    if not all(1 <= epoch <= config.epochs for epoch in found):
        raise RunError(
            f"read_at: expected epochs in 1…{config.epochs}, got {found}"
        )
    return found


def asking(sequences: Sequences, name: SplitName) -> Split:
    """The split. Raises: DataError if it has no question."""
    split = sequences.split(name)
    if not len(split.target):
        raise DataError(
            sequences.name or "data",
            None,
            "no user has three items, so nobody can be asked",
        )
    return split


class _State:
    """What a resumed run needs: weights, optimiser, best so far."""

    def __init__(self, model, optimizer, identity):
        self.model, self.optimizer = model, optimizer
        self.identity = identity
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
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            **{name: getattr(self, name) for name in kept},
        }
        checkpoints.save(path, self.identity, state)

    def load(self, path: Path, device):
        found = checkpoints.load(path, self.identity, device)
        self.model.load_state_dict(found.pop("model"))
        self.optimizer.load_state_dict(found.pop("optimizer"))
        (mine,) = self.code
        for name, value in found.items():
            setattr(self, name, value)
        if mine != self.code[-1]:
            self.code.append(mine)


def _epoch(parallel, model, optimizer, split, config, epoch, device):
    """One pass; returns the mean loss over questions and the steps.

    A prior on Q is shared out evenly among the epoch's B batches: a step's
    loss, the mean of n questions, is then 1/n of (their sum + 1/B of the
    prior's), and the steps together are those of the epoch's MAP objective.
    """
    rank, world = _rank(), _world()
    rng = np.random.default_rng([config.seed, epoch, 1])
    draw = torch.Generator().manual_seed(_seed(config.seed, epoch, 2))
    torch.manual_seed(_seed(config.seed, epoch, 3, rank))
    c = model.config
    sampled = config.loss != "full"
    batches = count_batches(
        split.training, c.max_length, config.batch_size, config.every_window
    )
    parallel.train()
    total, asked, steps = 0.0, 0, 0
    for batch in training_batches(
        split.training,
        max_length=c.max_length,
        batch_size=config.batch_size,
        rng=rng,
        every_window=config.every_window,
        **model.masking,
    ):
        negatives = None
        if sampled:
            negatives = uniform_negatives(
                config.num_negatives, c.n_items, draw
            )
            negatives = negatives.to(device)
        questions = int((batch.target > 0).sum())
        mine = batch.share(rank, world).to(device)
        loss, prior = parallel(mine, negatives, config)
        # DDP averages gradients over processes; shares differ in questions.
        share = int((mine.target > 0).sum()) * world / questions
        optimizer.zero_grad(set_to_none=True)
        objective = loss * share
        if prior is not None:
            objective = objective + prior / (batches * questions)
        objective.backward()
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
        raise RunError(f"loss: expected a finite number, got {mean}")
    return mean, steps


class _Loss(nn.Module):
    """Model, loss and prior in one forward, as DDP needs it."""

    def __init__(self, model: Recommender):
        super().__init__()
        self.model = model

    def forward(
        self, batch, negatives, config
    ) -> tuple[Tensor, Tensor | None]:
        return self._loss(batch, negatives, config), self._prior(config)

    def _prior(self, config) -> Tensor | None:
        if config.noise_prior_sd == 0:
            return None
        start = self.model.config.bft.process_noise
        return noise_penalty(self.model, start, config.noise_prior_sd)

    def _loss(self, batch, negatives, config) -> Tensor:
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
        item_embeddings, bias = model.item_embeddings()
        return next_item_loss(
            model.query(hidden[where]),
            batch.target[where],
            item_embeddings,
            bias,
            negatives,
            n_items=model.config.n_items,
            kind=config.loss,
            logq_correction=config.logq_correction,
            gbce_t=config.gbce_t,
            score=model.head.score,
        )


def _parallel(model, device):
    loss = _Loss(model)
    if _world() == 1:
        return loss
    on = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        loss, device_ids=on, find_unused_parameters=True
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
