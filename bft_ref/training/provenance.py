"""Where a result comes from: code, machine, memory."""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import bft_ref


def code_version() -> dict:
    """Package version, git commit if there is one, checksum of the source.

    The commit is that of a repository that holds the package, with ``-dirty``
    after it where its files were changed since.
    """
    root = Path(bft_ref.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if "notebook" not in path.relative_to(root).parts:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    try:
        _git(root, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(
            root,
            "describe",
            "--always",
            "--dirty",
            "--abbrev=40",
            "--exclude=*",
        )
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "bft_ref": bft_ref.__version__,
        "commit": commit,
        "source_sha256": digest.hexdigest(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout.strip()


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} thread(s)"


def peak_memory(device: torch.device) -> int:
    """Bytes: peak allocated on the GPU, or peak resident of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024)
