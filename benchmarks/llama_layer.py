"""What a layer of Llama's shape costs as a filter: time and memory.

    python -m benchmarks.llama_layer           the shape of SmolLM2-135M
    python -m benchmarks.llama_layer --help    other shapes, JSON

The standard layer is pre-norm, of RMSNorm, SwiGLU, rotary positions, grouped
queries and no biases, on ``F.scaled_dot_product_attention``. Steps alternate
and ratios are medians, as in :mod:`benchmarks.layer`. The last lines say what
the gradient through J is worth: of a small stack, all weights together, the
cosine of the gradients with and without it, and the norm of their difference
over that of the former.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from benchmarks import layer as bench
from bft_ref import Belief, BFTConfig, BFTEncoder, BFTLayer
from bft_ref.notebook import timing
from bft_ref.rotary import rotate

Granularity = Literal["token", "feature"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "feature")
Loss = Literal["mean", "precision"]
LOSSES: tuple[Loss, ...] = ("mean", "precision")
VARIANTS = {
    f"{granularity}, {'with' if gradient else 'no'} gradient through J": (
        BFTConfig(granularity=granularity, jacobian_gradient=gradient)
    )
    for granularity, gradient in product(GRANULARITIES, (True, False))
}


class Shape(NamedTuple):
    """``batch`` × ``tokens`` states of ``d_model``, and the layer's sizes."""

    batch: int = 4
    tokens: int = 512
    d_model: int = 576
    heads: int = 9
    kv_heads: int = 3
    width: int = 1536


SMOLLM = Shape()


@dataclass(frozen=True)
class Options:
    """Time, memory and flops of the filter over a layer as Llama's."""

    shape: Shape = SMOLLM
    repeats: int = 9
    """timed steps"""
    threads: int = 0
    """CPU threads; 0: PyTorch's choice"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """write the figures here"""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats: expected >= 1, got {self.repeats}")
        if self.threads < 0:
            raise ValueError(f"threads: expected >= 0, got {self.threads}")


class StandardLayer(nn.Module):
    """The layer of Llama; (B, T, d) → same."""

    def __init__(self, shape: Shape):
        super().__init__()
        d = shape.d_model
        self.head_dim = d // shape.heads
        self.widths = [d, *[shape.kv_heads * self.head_dim] * 2]
        self.norm1, self.norm2 = nn.RMSNorm(d, 1e-5), nn.RMSNorm(d, 1e-5)
        self.in_proj = nn.Linear(d, sum(self.widths), bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.linear1 = nn.Linear(d, 2 * shape.width, bias=False)
        self.linear2 = nn.Linear(shape.width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in self.in_proj(self.norm1(x)).split(self.widths, -1)
        )
        seen = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out_proj(seen.transpose(1, 2).flatten(-2))
        gate, up = self.linear1(self.norm2(x)).chunk(2, -1)
        return x + self.linear2(F.silu(gate) * up)


def filter_layer(shape: Shape, config: BFTConfig) -> BFTLayer:
    return BFTLayer(
        *(shape.d_model, shape.heads, shape.width, 0.0, "swiglu"),
        norm_first=True,
        bias=False,
        config=config,
        num_kv_heads=shape.kv_heads,
        rotary_base=10000.0,
        norm="rmsnorm",
    )


def calls_of(shape: Shape) -> dict[str, timing.Call]:
    """Causal calls of the standard layer and of each variant, same sizes."""
    torch.manual_seed(0)
    batch, tokens, d_model, *_ = shape
    x = torch.randn(batch, tokens, d_model, requires_grad=True)
    calls = {"standard": timing.call_of(StandardLayer(shape), x, None)}
    for name, config in VARIANTS.items():
        features = d_model if config.granularity == "feature" else 1
        log = torch.zeros(batch, tokens, features, requires_grad=True)
        calls[name] = timing.call_of(filter_layer(shape, config), x, log)
    return calls


def gradient_without_jacobian(
    granularity: Granularity, loss: Loss, seed: int = 0
) -> dict[str, float]:
    """Of all weights of three small layers, against the whole gradient.

    The loss is of a mean's squared error, or the Gaussian log score, in which
    the precision stands itself.
    """
    shape = Shape(4, 32, 48, 4, 2, 128)
    gradients = []
    for gradient in (True, False):
        torch.manual_seed(seed)
        config = BFTConfig(granularity=granularity, jacobian_gradient=gradient)
        model = BFTEncoder(filter_layer(shape, config), 3)
        for weight in model.parameters():
            if weight.dim() > 1:  # layers of a stack start as copies
                nn.init.xavier_normal_(weight)
        x, target = torch.randn(2, shape.batch, shape.tokens, shape.d_model)
        log = torch.randn(shape.batch, shape.tokens, 1)
        mean, log_precision = model(Belief(x, log), is_causal=True)
        error = (mean - target).square()
        if loss == "precision":
            error = error * log_precision.exp() - log_precision
        error.mean().backward()
        gradients.append(
            torch.cat(
                [
                    weight.grad.flatten()
                    for weight in model.parameters()
                    if weight.grad is not None
                ]
            )
        )
    whole, rest = gradients
    difference = (whole - rest).norm() / whole.norm()
    return {
        "cosine": F.cosine_similarity(whole, rest, 0).item(),
        "relative_difference": difference.item(),
    }


def run(options: Options) -> dict:
    """Measure what is asked for; the record, as it is written."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device, calls = torch.device("cpu"), calls_of(options.shape)
    case = ",".join(map(str, options.shape))
    rows = bench.compared(case, calls, calls, device, options.repeats)
    gradients = [
        {"granularity": granularity, "loss": loss}
        | gradient_without_jacobian(granularity, loss)
        for granularity, loss in product(GRANULARITIES, LOSSES)
    ]
    record = bench.recorded(
        *(rows, device, "float32", options.repeats, False),
        gradient_without_jacobian=gradients,
    )
    print(pd.DataFrame(gradients).round(4).to_string(index=False))
    bench.write(record, options.json)
    return record


def main(arguments: list[str] | None = None) -> int:
    return bench.asked(Options, run, "benchmarks.llama_layer", arguments)


if __name__ == "__main__":
    sys.exit(main())
