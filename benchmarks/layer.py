"""How fast: a BFT layer against the standard layer, in one run.

    python -m benchmarks.layer           the cases of the book
    python -m benchmarks.layer --help    other shapes, JSON, a plot

The standard layer is pre-norm, built on ``F.scaled_dot_product_attention``.
Steps alternate between the layers and ratios are taken step by step, so that
a busy machine disturbs both alike; the median ratio is reported. A training
step is forward and backward, gradients of all parameters and inputs.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import bft_ref
from bft_ref import BFTConfig, BFTLayer
from bft_ref.notebook import timing
from bft_ref.training.provenance import device_name

CPU_CASES = ("128,50,64,2", "8,512,256,4", "1,4096,256,4")
CUDA_CASES = ("128,50,64,2", "8,512,256,4", "1,4096,1024,16", "1,16384,256,4")
VARIANTS = {
    "feature, exact norm": BFTConfig(),
    "feature, first term": BFTConfig(jacobian="first"),
    "token, exact norm": BFTConfig(granularity="token"),
    "token, first term": BFTConfig(granularity="token", jacobian="first"),
}


@dataclass(frozen=True)
class Options:
    """Time, memory and flops of a BFT layer over the standard layer."""

    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """shape B,T,d,heads; may be repeated"""
    repeats: int = 9
    """timed steps"""
    device: str = ""
    """cpu or cuda; empty: cuda if there is one"""
    dtype: Literal["", "float32", "float64", "bfloat16", "float16"] = ""
    """empty: bfloat16 on a GPU, float32 on a CPU"""
    threads: int = 0
    """CPU threads; 0: PyTorch's choice"""
    compile: bool = False
    """the layers as torch.compile makes them, standard and filter alike"""
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """write the figures here"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """draw them here"""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats: expected >= 1, got {self.repeats}")
        if self.threads < 0:
            raise ValueError(f"threads: expected >= 0, got {self.threads}")
        for shape in self.case:
            if not re.fullmatch(r"\d+,\d+,\d+,\d+", shape):
                raise ValueError(f"case: expected B,T,d,heads, got {shape}")


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


def layers(
    case: str,
    device: torch.device,
    dtype: torch.dtype,
    variants: dict[str, BFTConfig],
    compiled: bool,
) -> dict[str, timing.Call]:
    """Causal calls of the standard layer and of each variant, same sizes."""
    batch, tokens, d_model, heads = (int(x) for x in case.split(","))
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, d_model, device=device, dtype=dtype)
    x.requires_grad_()

    def made(layer: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(layer)) if compiled else layer

    standard = timing.StandardLayer(d_model, heads).to(device, dtype)
    calls = {"standard": timing.call_of(made(standard), x, None)}
    for name, config in variants.items():
        features = d_model if config.granularity == "feature" else 1
        log_precision = torch.zeros(
            batch, tokens, features, device=device, requires_grad=True
        )
        layer = BFTLayer(
            *(d_model, heads, 4 * d_model, 0.0, F.gelu),
            norm_first=True,
            device=device,
            dtype=dtype,
            config=config,
        )
        calls[name] = timing.call_of(made(layer), x, log_precision)
    return calls


def measure(
    case: str,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    variants: dict[str, BFTConfig] = VARIANTS,
    compiled: bool = False,
) -> list[Measurement]:
    """Every layer at the shape ``case`` = "B,T,d,heads"."""
    calls = layers(case, device, dtype, variants, compiled)
    # a compiler's own kernels are not counted: the products are those of eager
    eager = layers(case, device, dtype, variants, False) if compiled else calls
    return compared(case, calls, eager, device, repeats)


def compared(
    case: str,
    calls: dict[str, timing.Call],
    eager: dict[str, timing.Call],
    device: torch.device,
    repeats: int,
) -> list[Measurement]:
    """Every call over ``standard``; products are counted in ``eager``."""
    times: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in calls
    }
    for step in range(repeats + 1):
        for name, call in calls.items():
            train = timing.seconds(partial(timing.training, call), device)
            infer = timing.seconds(partial(timing.inference, call), device)
            if step:  # the first warms up
                times[name][0].append(train)
                times[name][1].append(infer)
    memory = {
        name: timing.peak_memory(partial(timing.training, call), device)
        for name, call in calls.items()
    }
    work = {
        name: timing.flops(partial(timing.training, call))
        for name, call in eager.items()
    }

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


def run(options: Options) -> dict:
    """Measure what is asked for; the record, as it is written."""
    cuda = torch.cuda.is_available()
    device = torch.device(options.device or ("cuda" if cuda else "cpu"))
    on_gpu = device.type == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    rows: list[Measurement] = []
    for case in track(
        options.case or (CUDA_CASES if on_gpu else CPU_CASES),
        console=Console(stderr=True),
        transient=True,
    ):
        rows += measure(
            *(case, device, getattr(torch, dtype), options.repeats),
            compiled=options.compile,
        )
    record = recorded(rows, device, dtype, options.repeats, options.compile)
    write(record, options.json)
    if options.plot is not None:
        plot(rows, options.plot)
    return record


def recorded(
    rows: list[Measurement],
    device: torch.device,
    dtype: str,
    repeats: int,
    compiled: bool,
    **more,
) -> dict:
    """Print the measurements; the record, with what they were made by."""
    provenance = {
        "device": device_name(device),
        "dtype": dtype,
        "torch": torch.__version__,
        "bft_ref": bft_ref.__version__,
        "repeats": repeats,
        "compile": compiled,
    }
    console = Console()
    console.print(", ".join(f"{k} {v}" for k, v in provenance.items()))
    console.print(report(rows))
    return {**provenance, "rows": [asdict(r) for r in rows], **more}


def write(record: dict, path: Path | None) -> None:
    """As JSON, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    return asked(Options, run, "benchmarks.layer", arguments)


def asked(
    options: Callable[..., Any],
    run: Callable[[Any], Any],
    prog: str,
    arguments: list[str] | None,
) -> int:
    """Run what a command line asks for; 2 where its options are none."""
    try:
        chosen = tyro.cli(options, args=arguments, prog=prog)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
