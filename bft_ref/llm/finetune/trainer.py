"""Fine-tuning on cached states: every arm has the same budget and rules."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM

from bft_ref.llm.finetune.adaptation import trained
from bft_ref.llm.finetune.evaluate import upper
from bft_ref.llm.finetune.known import Known
from bft_ref.llm.finetune.losses import Loss, answer_loss
from bft_ref.llm.finetune.states import LowerStates
from bft_ref.llm.model import is_added
from bft_ref.support import checks
from bft_ref.training import checkpoint as checkpoints
from bft_ref.training.checkpoint import RunError
from bft_ref.training.provenance import code_version


@dataclass(frozen=True)
class FineTuneConfig:
    """How the upper layers are fitted.

    Raises: TypeError for a field of another type; ValueError for a value out
    of its range or one that the loss does not read, each naming the field.
    """

    loss: Loss = "sft"  # Loss.
    gamma: float = 2.0  # Focal loss's exponent.
    smoothing: float = 0.0  # Label's weight that is spread over the others.
    epochs: int = 1  # Passes over the training questions.
    batch_size: int = 8  # Questions a batch.
    lr: float = 1e-4  # AdamW's largest rate.
    # AdamW's largest rate for log τ and log Q, and for vectors and numbers
    # that stand in their place; these have no weight decay.
    precision_lr: float = 1e-2
    weight_decay: float = 0.01  # AdamW's.
    warmup: float = 0.1  # Part of the steps in which the rate rises; then it
    clip: float = 1.0  # falls to 0. Largest norm of a step's gradient; 0: any.
    # Steps between looks at validation, of which the best one's weights are
    # kept; 0: the last weights.
    evaluate_every: int = 0
    seed: int = 0  # Of the order of questions, and of what else is drawn.

    def __post_init__(self):
        checks.typed(self)
        for name in ("epochs", "batch_size"):
            checks.count(name, getattr(self, name), 1)
        for name in ("evaluate_every", "seed"):
            checks.count(name, getattr(self, name))
        for name in ("lr", "precision_lr"):
            checks.number(name, getattr(self, name), 0.0)
        for name in ("gamma", "weight_decay", "clip"):
            checks.within(name, getattr(self, name), 0.0)
        for name in ("smoothing", "warmup"):
            checks.within(name, getattr(self, name), 0.0, 1.0)
        readers = {"gamma": "focal", "smoothing": "sft"}
        unread = {
            name: f"loss {self.loss!r}"
            for name, loss in readers.items()
            if loss != self.loss
        }
        checks.unread(self, unread)


def batches(
    lengths: Sequence[int], batch_size: int, rng: np.random.Generator
) -> list[list[int]]:
    """One epoch's batches: in a drawn order, like lengths together.

    Lengths are sorted only among 8 batches that were drawn, so that little
    is padded and every order of batches is possible.
    """
    order = rng.permutation(len(lengths))
    found: list[list[int]] = []
    for start in range(0, len(order), 8 * batch_size):
        block = sorted(
            order[start : start + 8 * batch_size].tolist(),
            key=lambda i: lengths[i],
        )
        cut = [
            block[i : i + batch_size] for i in range(0, len(block), batch_size)
        ]
        found += [cut[i] for i in rng.permutation(len(cut))]
    return found


def rate(step: int, steps: int, warmup: float) -> float:
    """Part of the largest rate at a step, counted from 0: up, then down.

    It rises over ``warmup`` of the steps and would be 0 at step ``steps``.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return (steps - step) / max(steps - rising, 1)


def fit(
    model: LlamaForCausalLM,
    states: LowerStates,
    labels: Sequence[NDArray[np.int64]],
    config: FineTuneConfig,
    *,
    identity: Any,
    validate: Callable[[], float] | None = None,
    known: Known | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 20,
    progress: bool = True,
) -> dict[str, Any]:
    """Train what :func:`~bft_ref.llm.finetune.adaptation.adapt` left free.

    ``labels``: what each answer's tokens are to be; the tokens themselves, on
    which the next depend, stay the example's own. ``validate`` gives what is
    lowest at the best weights. With ``checkpoint`` the state is written every
    ``checkpoint_every`` steps, and a run that finds one goes on from it, to
    the same result. Returns the history, for JSON.
    Raises: RunError for a checkpoint of another ``identity``, no
    ``validate`` where weights are chosen by it, or a loss that is no number.
    """
    if config.evaluate_every and validate is None:
        raise RunError(
            f"evaluate_every: expected 0 without validation, got "
            f"{config.evaluate_every}"
        )
    lengths = [len(each.tokens) for each in states.examples]
    per_epoch = math.ceil(len(lengths) / config.batch_size)
    steps = config.epochs * per_epoch
    state = _State(model, _optimizer(model, config), identity)
    if checkpoint is not None and checkpoint.is_file():
        state.load(checkpoint)
    bar = tqdm(
        total=steps, initial=state.step, unit="step", disable=not progress
    )
    for indices in _from(state.step, lengths, config):
        began = time.process_time()
        model.train()
        share = rate(state.step, steps, config.warmup)
        for group in state.optimizer.param_groups:
            group["lr"] = share * group["largest"]
        wanted = torch.from_numpy(np.concatenate([labels[i] for i in indices]))
        loss = answer_loss(
            upper(model, states, indices, known),
            wanted,
            loss=config.loss,
            gamma=config.gamma,
            smoothing=config.smoothing,
        )
        if not loss.isfinite():
            raise RunError(f"loss: expected a number, got {loss.item()}")
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.clip > 0:
            nn.utils.clip_grad_norm_(trained(model).values(), config.clip)
        state.optimizer.step()
        state.finish(loss.item(), time.process_time() - began)
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        last = state.step == steps
        looks = config.evaluate_every and (
            last or state.step % config.evaluate_every == 0
        )
        if looks and validate is not None:
            state.look(validate())
        if checkpoint is not None and (
            last or state.step % checkpoint_every == 0
        ):
            state.save(checkpoint)
    bar.close()
    if state.best is not None:
        state.put(state.best)
    return {
        "steps": state.step,
        "best_step": state.best_step or state.step,
        "cpu_seconds_per_step": round(float(np.median(state.seconds)), 3),
        "loss": [round(x, 5) for x in state.losses],
        "looks": state.looks,
        "code": state.code[0],
        "resumed_with": state.code[1:],
    }


def _from(
    step: int, lengths: Sequence[int], config: FineTuneConfig
) -> Iterator[list[int]]:
    """The batches from a step on; each epoch draws from its own seed."""
    per_epoch = math.ceil(len(lengths) / config.batch_size)
    for epoch in range(step // per_epoch, config.epochs):
        rng = np.random.default_rng([config.seed, epoch, 2])
        found = batches(lengths, config.batch_size, rng)
        yield from found[max(step - epoch * per_epoch, 0) :]


def _optimizer(
    model: LlamaForCausalLM, config: FineTuneConfig
) -> torch.optim.AdamW:
    free = trained(model)
    # a gate's or a network's matrix learns as other matrices do
    fast = {n for n, p in free.items() if is_added(n) and p.dim() < 2}
    precision = [p for name, p in free.items() if name in fast]
    plain = [p for name, p in free.items() if name not in fast]
    groups = [
        {"params": plain, "largest": config.lr},
        {"params": precision, "largest": config.precision_lr},
    ]
    groups[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
    )


class _State:
    """What a resumed run needs: trained weights, optimiser, best so far."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        optimizer: torch.optim.Optimizer,
        identity: Any,
    ):
        self.model, self.optimizer = model, optimizer
        self.identity = identity
        self.step = self.best_step = 0
        self.best: dict[str, Tensor] | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.looks: list[dict[str, float]] = []
        #: versions of the code, as they were when each began to work on it
        self.code = [code_version()]

    def weights(self) -> dict[str, Tensor]:
        free = trained(self.model)
        return {name: p.detach().clone() for name, p in free.items()}

    def put(self, weights: dict[str, Tensor]) -> None:
        free = trained(self.model)
        with torch.no_grad():
            for name, value in weights.items():
                free[name].copy_(value)

    def finish(self, loss: float, seconds: float) -> None:
        self.step += 1
        self.losses.append(loss)
        self.seconds.append(seconds)

    def look(self, value: float) -> None:
        best = min((x["nll"] for x in self.looks), default=math.inf)
        self.looks.append({"step": self.step, "nll": value})
        if value < best:
            self.best, self.best_step = self.weights(), self.step

    def save(self, path: Path) -> None:
        kept = ("step", "best_step", "losses", "seconds", "looks", "code")
        state = {
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            **{name: getattr(self, name) for name in kept},
        }
        checkpoints.save(path, self.identity, state)

    def load(self, path: Path) -> None:
        found = checkpoints.load(path, self.identity)
        self.put(found.pop("weights"))
        self.optimizer.load_state_dict(found.pop("optimizer"))
        (mine,) = self.code
        for name, value in found.items():
            setattr(self, name, value)
        if mine != self.code[-1]:
            self.code.append(mine)
