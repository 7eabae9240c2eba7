"""Chapter 6's task: copies of one vector, and three residual connections.

A sequence has one hidden vector θ; its tokens are copies of it with
independent errors, whose precisions τ the layer is told. Every token is to
return θ. ``python -m bft_ref.notebook.residual_rules FILE`` makes the stored
result of the chapter, in half an hour of one processor.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bft_ref import Belief, BFTConfig, BFTLayer
from bft_ref.layer import Observation
from bft_ref.reml import READINGS
from bft_ref.support import checks

WIDTH, HEADS, HIDDEN, TOKENS = 16, 2, 32, 8
SD = 1.5  # of θ
RULES = ("one", "gain", "subtract")
STEPS = (200, 500, 1000, 2000, 4000)
SEEDS = (1, 2, 3)


class Copies(NamedTuple):
    """``theta`` (B, 1, d), ``tau`` (B, T, 1), and the tokens' beliefs."""

    theta: Tensor
    tau: Tensor
    belief: Belief


def copies(batch: int, generator: torch.Generator) -> Copies:
    """A batch of sequences; log τ is standard normal. float64."""
    options: Any = {"generator": generator, "dtype": torch.float64}
    theta = SD * torch.randn(batch, 1, WIDTH, **options)
    tau = torch.exp(torch.randn(batch, TOKENS, 1, **options))
    noise = torch.randn(batch, TOKENS, WIDTH, **options) / tau.sqrt()
    return Copies(theta, tau, Belief.of(theta + noise, precision=tau))


def floor(data: Copies) -> float:
    """Mean squared error of the posterior mean given all tokens."""
    return (1 / (data.tau.sum(1) + SD**-2)).mean().item()


class Layer(BFTLayer):
    """A small pre-norm layer with one of three residual connections.

    ``one``: h + e. ``gain``: h + Ke. ``subtract``: h + K(z − h), where z is
    what attention returns. Raises: ValueError for another ``rule``.
    """

    def __init__(self, rule: str):
        checks.choice("rule", rule, RULES)
        super().__init__(
            WIDTH,
            HEADS,
            HIDDEN,
            0.0,
            norm_first=True,
            dtype=torch.float64,
            config=BFTConfig(
                innovation="difference" if rule == "subtract" else "increment"
            ),
        )
        self.rule = rule

    def update(
        self, belief: Belief, observation: Observation
    ) -> tuple[Belief, Tensor]:
        """As the layer's, but for the gain of ``one``."""
        updated, K = super().update(belief, observation)
        if self.rule == "one":
            mean = belief.mean + observation.innovation
            updated = updated._replace(mean=mean)
        return updated, K


@torch.no_grad()
def study(layer: Layer, data: Copies) -> dict[str, float]:
    """Test error, mean gain in each reading, and what attention returns.

    ``on_theta`` and ``on_h`` are the coefficients of a least-squares fit of
    what attention returns on θ and h: an innovation has −1 on h.
    """
    theta, _, belief = data
    error = (layer(belief).mean - theta).square().mean().item()
    returned = layer.observe(belief).innovation
    if layer.rule == "subtract":
        returned = returned + belief.mean
    both = torch.stack([theta.expand_as(returned), belief.mean], -1)
    fit = torch.linalg.lstsq(both.flatten(0, -2), returned.reshape(-1, 1))
    on_theta, on_h = fit.solution.squeeze(-1).tolist()
    found = {"error": error, "on_theta": on_theta, "on_h": on_h}
    config = layer.config
    for reading in READINGS:
        layer.config = dataclasses.replace(config, reading=reading)
        found[reading] = layer.step(belief)[1].gain.mean().item()
    layer.config = config
    return found


def trained(
    rule: str, seed: int, stops: tuple[int, ...], data: Copies
) -> tuple[Layer, list[dict[str, float]]]:
    """A layer trained by Adam, and its :func:`study` after each stop."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    layer, found = Layer(rule), []
    adam = torch.optim.Adam(layer.parameters(), 5e-3)
    for step in range(1, max(stops) + 1):
        theta, _, belief = copies(64, generator)
        loss = (layer(belief).mean - theta).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step in stops:
            found.append(study(layer, data))
    return layer, found


def test_set() -> Copies:
    """The two thousand sequences that all layers are compared on."""
    return copies(2000, torch.Generator().manual_seed(99))


def main(path: Path) -> None:
    """Train every rule with every seed, and write what was found."""
    data, runs = test_set(), []
    for seed in SEEDS:
        for rule in RULES:
            _, path_of = trained(rule, seed, STEPS, data)
            runs += [
                {"rule": rule, "seed": seed, "steps": steps} | row
                for steps, row in zip(STEPS, path_of, strict=True)
            ]
            print(runs[-1], flush=True)
    result = {
        "command": "python -m bft_ref.notebook.residual_rules "
        "results/residual-rules.json",
        "torch": torch.__version__,
        "floor": floor(data),
        "runs": runs,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
