"""Everything that needs a GPU, in ten minutes: ``make gpu``.

Three parts, each with its own JSON file in ``results/gpu``, named for the
device: the tests that need CUDA, the benchmark of the layer (bfloat16, up to
16,384 tokens), and a short training of a recommender, plain and filter. A
part whose file is there, made by the same code, is not done again: an
interrupted run goes on where it stopped.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks import layer
from bft_ref import BFTConfig
from bft_ref.recsys.data import simulate
from bft_ref.recsys.models import SASRecConfig
from bft_ref.recsys.train import TrainConfig, fit
from bft_ref.training.provenance import code_version, device_name

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT = 300  # seconds


@dataclass(frozen=True)
class Options:
    """Tests, benchmark and a short training on a GPU, kept as JSON."""

    device: str = "cuda"
    """cpu tries the command out, on small shapes"""
    output: Path = ROOT / "results" / "gpu"
    """folder of the results"""
    again: bool = False
    """do parts again that are there already"""


def tested(device: str) -> dict:
    """The tests marked gpu: how many passed, failed and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        done = subprocess.run(
            [
                *[sys.executable, "-m", "pytest", "-q", "-m", "gpu"],
                *["tests/gpu", f"--junitxml={report}"],
            ],
            cwd=ROOT,
            env=os.environ | {"BFT_DEVICE": device},
            timeout=TEST_LIMIT,
        )
        suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {
        name: int(suite.attrib[name])
        for name in ["tests", "failures", "errors", "skipped"]
    }
    return counts | {"passed": done.returncode == 0 and counts["skipped"] == 0}


def benchmarked(device: str) -> dict:
    """Time and memory over the standard layer; see benchmarks.layer."""
    small = ("2,16,32,2",) if device == "cpu" else ()
    return layer.run(layer.Options(case=small, repeats=5, device=device))


def trained(device: str) -> dict:
    """SASRec on simulated sequences, plain and filter: metrics and times."""
    small = device == "cpu"
    sequences = simulate(
        200 if small else 20000, 100 if small else 4000, seed=1
    ).sequences
    found = {}
    for name, bft in [("plain", None), ("filter", BFTConfig())]:
        model = SASRecConfig(n_items=sequences.n_items, bft=bft)
        epochs = 1 if small else 5
        config = TrainConfig(epochs=epochs, evaluate_every=epochs, seed=1)
        started = time.monotonic()
        result = fit(sequences, model, config, device=device).result
        found[name] = {
            "seconds": time.monotonic() - started,
            "result": result,
        }
    return found


PARTS: dict[str, Callable[[str], dict]] = {
    "tests": tested,
    "layer": benchmarked,
    "training": trained,
}


def run(options: Options) -> int:
    """Do what is missing; 1 if a test failed."""
    device = device_name(torch.device(options.device))
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    code = code_version()
    options.output.mkdir(parents=True, exist_ok=True)
    passed = True
    for name, part in PARTS.items():
        path = options.output / f"{slug}-{name}.json"
        record = json.loads(path.read_text()) if path.is_file() else {}
        if options.again or record.get("code") != code:
            started = time.monotonic()
            found = part(options.device)
            record = {
                "device": device,
                "torch": torch.__version__,
                "code": code,
                "seconds": round(time.monotonic() - started, 1),
                "found": found,
            }
            written = path.with_suffix(".part")
            written.write_text(json.dumps(record, indent=1) + "\n")
            written.replace(path)
        passed &= record["found"].get("passed", True)
        print(f"{name}: {record['seconds']} s, {path}", flush=True)
    return 0 if passed else 1


def main(arguments: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=arguments, prog="benchmarks.gpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: no CUDA device here; --device cpu tries the command out, "
            "on small shapes",
            file=sys.stderr,
        )
        return 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
