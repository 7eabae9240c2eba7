"""How fast: a BFT layer against the standard layer, in one run.

    python -m bft_ref.notebook.bench           the cases of the book
    python -m bft_ref.notebook.bench --help    other shapes, JSON, a plot

The standard layer is pre-norm, built on ``F.scaled_dot_product_attention``.
Steps alternate between the layers and ratios are taken step by step, so that
a busy machine disturbs both alike; the median ratio is reported. A training
step is forward and backward, gradients of all parameters and inputs.
"""

import gc
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import bft_ref
from bft_ref import Belief, BFTConfig, BFTLayer
from bft_ref.recsys.train.provenance import device_name

CPU_CASES = ["128,50,64,2", "8,512,256,4", "1,4096,256,4"]
CUDA_CASES = ["128,50,64,2", "8,512,256,4", "1,4096,1024,16"]
VARIANTS = {
    "feature, exact norm": BFTConfig(),
    "feature, first term": BFTConfig(jacobian="first"),
    "token, exact norm": BFTConfig(granularity="token"),
    "token, first term": BFTConfig(granularity="token", jacobian="first"),
}


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


@dataclass
class Measurement:
    """One layer at one shape; ratios are to the standard layer."""

    case: str
    layer: str
    training_ms: float
    training_ratio: float
    inference_ratio: float
    memory_mib: float
    memory_ratio: float
    flop_ratio: float


def _layer_call(
    layer: nn.Module, x: Tensor, log_precision: Tensor | None
) -> Callable[[], tuple[Tensor, ...]]:
    if log_precision is None:
        return lambda: (layer(x),)
    return lambda: tuple(layer(Belief(x, log_precision), is_causal=True))


def _training(call: Callable[[], tuple[Tensor, ...]]) -> None:
    outputs = call()
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


def _inference(call: Callable[[], tuple[Tensor, ...]]) -> None:
    with torch.no_grad():
        call()


def _seconds(run: Callable[[], None], device: torch.device) -> float:
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


@register_flop_formula(torch.ops.bft_ref.bent_feed_forward)
def _ffn_flop(
    x, w_in, b, w_out, columns, shift, *args, out_shape=None, **kwargs
) -> int:
    (r, d), f, c = x, w_in[0], columns[1]
    return 2 * r * f * (2 * d + c + (0 if shift is None else d))


@register_flop_formula(torch.ops.bft_ref.bent_feed_forward_grad)
def _ffn_grad_flop(
    gy, gf, gr, x, w_in, w_out, columns, shift, *args, out_shape=None, **kwargs
) -> int:
    (r, d), f, c = x, w_in[0], columns[1]
    return 2 * r * f * (4 * d + 2 * c + (0 if shift is None else 2 * d))


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


def flops(run: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products in ``run``."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def measure(
    case: str,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    variants: dict[str, BFTConfig] = VARIANTS,
) -> list[Measurement]:
    """Every layer at the shape ``case`` = "B,T,d,heads"."""
    batch, tokens, d_model, heads = (int(x) for x in case.split(","))
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, d_model, device=device, dtype=dtype)
    x.requires_grad_()
    standard = StandardLayer(d_model, heads).to(device, dtype)
    calls = {"standard": _layer_call(standard, x, None)}
    for name, config in variants.items():
        features = d_model if config.granularity == "feature" else 1
        log_precision = torch.zeros(
            batch, tokens, features, device=device, requires_grad=True
        )
        layer = BFTLayer(
            d_model,
            heads,
            4 * d_model,
            0.0,
            F.gelu,
            norm_first=True,
            device=device,
            dtype=dtype,
            config=config,
        )
        calls[name] = _layer_call(layer, x, log_precision)
    times: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in calls
    }
    for step in range(repeats + 1):
        for name, call in calls.items():
            train = _seconds(partial(_training, call), device)
            infer = _seconds(partial(_inference, call), device)
            if step:  # the first warms up
                times[name][0].append(train)
                times[name][1].append(infer)
    memory = {
        n: peak_memory(partial(_training, c), device) for n, c in calls.items()
    }
    work = {n: flops(partial(_training, c)) for n, c in calls.items()}

    def ratio(name: str, which: int) -> float:
        pairs = zip(times[name][which], times["standard"][which], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return [
        Measurement(
            case,
            name,
            1e3 * statistics.median(times[name][0]),
            ratio(name, 0),
            ratio(name, 1),
            memory[name],
            memory[name] / memory["standard"],
            work[name] / work["standard"],
        )
        for name in calls
    ]


def report(rows: list[Measurement]) -> Table:
    """The measurements as a table."""
    table = Table("B, T, d, heads", "layer")
    for title in ["train ms", "train ×", "infer ×", "MiB", "mem ×", "flop ×"]:
        table.add_column(title, justify="right")
    for r in rows:
        numbers = [
            f"{r.training_ms:.1f}",
            f"{r.training_ratio:.2f}",
            f"{r.inference_ratio:.2f}",
            f"{r.memory_mib:.1f}",
            f"{r.memory_ratio:.2f}",
            f"{r.flop_ratio:.2f}",
        ]
        table.add_row(r.case, r.layer, *numbers)
    return table


def plot(rows: list[Measurement], path: Path) -> None:
    """Training ratio and memory ratio against the number of tokens."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1, 2, figsize=(9, 3.5), sharex=True, layout="tight"
    )
    for name in dict.fromkeys(r.layer for r in rows):
        mine = sorted(
            (int(r.case.split(",")[1]), r.training_ratio, r.memory_ratio)
            for r in rows
            if r.layer == name
        )
        tokens, *ratios = zip(*mine, strict=True)
        for ax, y in zip(axes, ratios, strict=True):
            ax.plot(tokens, y, marker="o", label=name)
    for ax, what in zip(axes, ["training time", "peak memory"], strict=True):
        ax.set(xscale="log", xlabel="tokens", ylabel=f"{what}, ratio")
    axes[0].legend()
    fig.savefig(path, dpi=150)
    plt.close(fig)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Shape B,T,d,heads; may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 9,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; empty: cuda if there is one.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, …")] = "",
    threads: Annotated[
        int, typer.Option(help="CPU threads; 0: PyTorch's choice.", min=0)
    ] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write figures here.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw them here.")
    ] = None,
) -> None:
    """Time, memory and flops of a BFT layer over the standard layer."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device or best)
    cuda = where.type == "cuda"
    if threads:
        torch.set_num_threads(threads)
    name = dtype or ("bfloat16" if cuda else "float32")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise typer.BadParameter(
            f"not a floating dtype: {name}", param_hint="--dtype"
        )
    for shape in case or []:
        if not re.fullmatch(r"\d+,\d+,\d+,\d+", shape):
            raise typer.BadParameter(
                f"expected B,T,d,heads, got {shape}", param_hint="--case"
            )
    rows: list[Measurement] = []
    for shape in track(
        case or (CUDA_CASES if cuda else CPU_CASES),
        console=Console(stderr=True),
        transient=True,
    ):
        rows += measure(shape, where, kind, repeats)
    provenance = {
        "device": device_name(where),
        "dtype": name,
        "torch": torch.__version__,
        "bft_ref": bft_ref.__version__,
        "repeats": repeats,
    }
    console = Console()
    console.print(", ".join(f"{k} {v}" for k, v in provenance.items()))
    console.print(report(rows))
    if json_path is not None:
        record = {**provenance, "rows": [asdict(r) for r in rows]}
        json_path.write_text(json.dumps(record, indent=1) + "\n")
    if plot_path is not None:
        plot(rows, plot_path)


if __name__ == "__main__":
    app()
