"""What a layer costs: time, memory, products; the standard layer beside it."""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from bft_ref import Belief

Call = Callable[[], tuple[Tensor, ...]]


class StandardLayer(nn.Module):
    """The pre-norm Transformer layer everyone uses; (B, T, d) → same."""

    def __init__(self, d_model: int, nhead: int):
        super().__init__()
        self.nhead = nhead
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.linear1 = nn.Linear(d_model, 4 * d_model)
        self.linear2 = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.nhead, -1)).transpose(1, 2)
            for y in self.in_proj(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(seen.transpose(1, 2).flatten(-2))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


def call_of(layer: nn.Module, x: Tensor, log_precision: Tensor | None) -> Call:
    """A causal call of a layer, as a function of nothing."""
    if log_precision is None:
        return lambda: (layer(x),)
    return lambda: tuple(layer(Belief(x, log_precision), is_causal=True))


def training(call: Call) -> None:
    """A step forward and backward, gradients of parameters and inputs."""
    outputs = call()
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


def inference(call: Call) -> None:
    """A step forward that keeps nothing for a gradient."""
    with torch.no_grad():
        call()


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """How long ``run`` takes, waited for on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_memory(run: Callable[[], None], device: torch.device) -> float:
    """Peak of the memory ``run`` allocates, in MiB, above what is held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - held) / 2**20
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as trace:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sizes = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]"
    )
    total = peak = 0
    for _, size in sizes:
        total += size
        peak = max(peak, total)
    return peak / 2**20


def flops(run: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products in ``run``."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@register_flop_formula(torch.ops.bft_ref.weighted_columns)
def _columns_flop(q, k, v, is_causal, *args, out_shape=None, **kwargs) -> int:
    (n, t, d), s, c = q, k[1], v[2]
    return n * t * s * 2 * (d + c + 1) // (2 if is_causal else 1)


@register_flop_formula(torch.ops.bft_ref.weighted_columns_grad)
def _columns_grad_flop(
    go, gs, q, k, v, out, sq, lse, is_causal, *args, out_shape=None, **kwargs
) -> int:
    (n, t, d), s, c = q, k[1], v[2]
    flop = n * t * s * 2 * (d + c + (c + 1) + 2 * d)
    return flop // (2 if is_causal else 1)


@register_flop_formula(torch.ops.bft_ref.linearised_feed_forward)
def _ffn_flop(
    x, w_in, b, w_out, columns, s, k, act, radial, out_shape=None, **kwargs
) -> int:
    (r, d), hidden, f, c = x, w_in[0], w_out[1], columns[1]
    return 2 * r * (hidden * (d + c) + f * d * (2 if radial else 1))


@register_flop_formula(torch.ops.bft_ref.linearised_feed_forward_grad)
def _ffn_grad_flop(
    gy, gf, gr, x, w_in, b, w_out, columns, *args, out_shape=None, **kwargs
) -> int:
    (r, d), hidden, f, c = x, w_in[0], w_out[1], columns[1]
    first = 0 if gf is None else hidden * c
    return 4 * r * (hidden * d + first + f * d * (1 if gr is None else 2))


@register_flop_formula(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
)
def _cpu_flash_flop(q, k, v, p=0.0, is_causal=False, *a, **kwargs) -> int:
    b, h, t, d = q
    return b * h * t * k[2] * 4 * d // (2 if is_causal else 1)


@register_flop_formula(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
def _cpu_flash_grad_flop(
    go, q, k, v, out, lse, p=0.0, is_causal=False, *a, **kwargs
) -> int:
    b, h, t, d = q
    return b * h * t * k[2] * 10 * d // (2 if is_causal else 1)
