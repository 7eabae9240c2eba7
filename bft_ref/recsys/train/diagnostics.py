"""Inside a trained filter: its gains and precisions, and what they are for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bft_ref.initial_precision import InitialPrecision
from bft_ref.recsys import metrics
from bft_ref.recsys.data.sequences import Split
from bft_ref.recsys.models import Recommender
from bft_ref.recsys.train.batches import pad_windows


def histories(
    model: Recommender,
    split: Split,
    user_indices: NDArray,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Items and times of some users, as long as the model can see."""
    items, times, _ = pad_windows(
        split.history,
        user_indices,
        split.history.lengths[user_indices],
        model.config.max_length,
    )
    seconds = None if times is None else torch.from_numpy(times).to(device)
    return torch.from_numpy(items).to(device), seconds


@torch.no_grad()
def diagnose(
    model: Recommender, split: Split, device: torch.device, chunk: int = 512
) -> dict:
    """What the filter does: K, λ and n_eff where the question is asked.

    That is at the last item, or at BERT4Rec's [MASK] after it. Per layer and
    quartile of the last item's training frequency: the mean gain, the median
    precision after the update, the mean n_eff; and per layer Q; and τ by
    quartile of item frequency.
    Raises: ValueError for a plain model.
    """
    _filter(model)
    model.eval()
    n = len(split.target)
    rows = []
    order = np.argsort(split.history.lengths, kind="stable")
    last_item = np.zeros(n, dtype=np.int64)
    for start in range(0, n, chunk):
        users = order[start : start + chunk]
        items, times = histories(model, split, users, device)
        last = (items > 0).sum(1) - 1
        each = torch.arange(len(users), device=device)
        last_item[users] = items[each, last].cpu().numpy()
        asked, times = model.evaluation_inputs(items, times)
        end = (asked > 0).sum(1) - 1
        _, traces = model.steps(asked, times)
        for layer, trace in enumerate(traces):
            rows.append(
                (
                    layer,
                    users,
                    trace.gain[each, end].mean(-1),
                    trace.log_updated_precision[each, end].exp().mean(-1),
                    trace.n_eff[each, :, end].mean(-1),
                )
            )
    found: dict = {"layers": []}
    cuts, member = metrics.quartiles(split.frequency[last_item])
    found["last_item_frequency_cuts"] = cuts
    for layer in range(model.config.num_layers):
        values = np.zeros((3, n))
        for index, users, *three in rows:
            if index == layer:
                for k, x in enumerate(three):
                    values[k, users] = x.float().cpu().numpy()
        its = model_layers(model)[layer]
        noise = its.get_parameter("log_process_noise").exp()
        found["layers"].append(
            {
                "gain": [_mean(values[0][member == q]) for q in range(4)],
                "updated_precision": [
                    _median(values[1][member == q]) for q in range(4)
                ],
                "n_eff": [_mean(values[2][member == q]) for q in range(4)],
                "process_noise_mean": float(noise.mean()),
                "process_noise_max": float(noise.max()),
            }
        )
    log_tau = _filter(model).of_items(model.items.weight).cpu().numpy()
    met = np.flatnonzero(split.frequency[1:] > 0) + 1
    cuts, member = metrics.quartiles(split.frequency[met])
    found["item_frequency_cuts"] = cuts
    tau = np.exp(log_tau[met])
    found["tau"] = [_mean(tau[member == q]) for q in range(4)]
    return found


def model_layers(model: Recommender) -> nn.ModuleList:
    """The list of layers, wherever the model keeps it."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def interventions(
    model: Recommender,
    split: Split,
    evaluate: Callable[[], metrics.Ranking],
    seed: int = 0,
) -> dict:
    """How the trained filter ranks when a part of it no longer means anything.

    ``trained``: as it is; ``tau equal``: every item gets the geometric mean
    of τ; ``tau shuffled``: the items' τ dealt out at random; ``gain
    constant``: λ_obs is such that the gain is the same for every token, the
    mean gain of its layer and feature. Nothing is trained again: what a
    change costs is what the trained model makes of that part. ``top`` has the
    users' ranks, for paired comparisons.
    Raises: ValueError for a plain model.
    """
    tau = _filter(model)
    log_tau = tau.of_items(model.items.weight)
    items = slice(1, model.config.n_items + 1)
    equal, shuffled = log_tau.clone(), log_tau.clone()
    equal[items] = log_tau[items].mean()
    order = torch.randperm(
        model.config.n_items, generator=torch.Generator().manual_seed(seed)
    )
    shuffled[items] = log_tau[items][order.to(log_tau.device)]
    gains = _mean_gains(model, split)
    found = {"trained": _ranks(split, evaluate())}
    for name, values in [("tau equal", equal), ("tau shuffled", shuffled)]:
        with _initial_precision(model, values):
            found[name] = _ranks(split, evaluate())
    with _constant_gains(model, gains):
        found["gain constant"] = _ranks(split, evaluate())
    return found


def _filter(model: Recommender) -> InitialPrecision:
    if model.config.bft is None or model.tau is None:
        raise ValueError("model: expected a Bayesian filter, got a plain one")
    return model.tau


def _ranks(split: Split, ranking: metrics.Ranking) -> dict:
    kept = metrics.report(split, ranking, ks=(10,))
    wanted = ("HR@10", "NDCG@10", "frequency", "top")
    return {name: kept[name] for name in wanted}


@contextmanager
def _initial_precision(model: Recommender, log_tau: Tensor) -> Iterator[None]:
    """Another log τ per item, for as long as the context lasts."""
    own = model.tau
    fixed = InitialPrecision("unit", len(log_tau), model.config.d_model)
    fixed.log_tau = log_tau
    model.tau = fixed
    try:
        yield
    finally:
        model.tau = own


@contextmanager
def _constant_gains(model: Recommender, gains: list[Tensor]) -> Iterator[None]:
    """Every token's gain is its layer's, one per feature, in the context."""
    layers = model_layers(model)

    def frozen(layer, gain):
        def update(belief, observation):
            log_observed = belief.log_precision + torch.logit(gain)
            log_observed = torch.where(
                observation.log_precision > -torch.inf,
                log_observed,
                -torch.inf,
            )
            observation = observation._replace(log_precision=log_observed)
            return type(layer).update(layer, belief, observation)

        return update

    try:
        for layer, gain in zip(layers, gains, strict=True):
            layer.update = frozen(layer, gain)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("update", None)


@torch.no_grad()
def _mean_gains(model: Recommender, split: Split) -> list[Tensor]:
    """Mean gain per layer, (d or 1,), over every token of the histories."""
    model.eval()
    device = model.items.weight.device
    sums = [torch.zeros((), dtype=torch.float64, device=device)]
    sums *= model.config.num_layers
    tokens = 0
    order = np.argsort(split.history.lengths, kind="stable")
    for users in np.array_split(order, max(1, len(order) // 512)):
        items, times = model.evaluation_inputs(
            *histories(model, split, users, device)
        )
        there = items > 0
        tokens += int(there.sum())
        for layer, trace in enumerate(model.steps(items, times)[1]):
            sums[layer] = sums[layer] + trace.gain[there].double().sum(0)
    tiny = torch.finfo(model.items.weight.dtype).eps
    return [(total / tokens).float().clamp(tiny, 1 - tiny) for total in sums]


def _mean(x):
    return float(x.mean()) if len(x) else None


def _median(x):
    return float(np.median(x)) if len(x) else None
