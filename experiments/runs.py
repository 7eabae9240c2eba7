"""An experiment's runs: each in a process of its own, gone on with if stopped.

A run is what a command line would make of its options, that of
``bft_ref.recsys.train`` or of ``bft_ref.llm.finetune``; :func:`line` says
which of the first.
"""

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any, get_args

from filelock import FileLock, Timeout

from bft_ref.recsys.data import load
from bft_ref.recsys.data.sequences import SplitName
from bft_ref.recsys.metrics import membership
from bft_ref.recsys.train.command import Run, Train, execute

RESULTS = Path(__file__).parents[1] / "results"


def is_done(path: Path, run: Any) -> bool:
    """Whether its file is here, with test items where they are asked for."""
    if not path.is_file():
        return False
    split = "test" if run.evaluate_test else "validation"
    return split in json.loads(path.read_text("utf8"))


def make(
    run: Any,
    result: Path,
    work: Path,
    data_dir: Path | None,
    execute: Callable[[Any], None] = execute,
) -> bool:
    """Make one run, unless another process has it in hand; whether it was.

    Its checkpoint and its log are in ``work``; ``result`` is written when it
    has ended well. ``execute`` does what the run asks for.
    """
    name = result.stem
    try:
        with FileLock(work / f"{name}.lock", blocking=False):
            if is_done(result, run):
                return False
            output = work / f"{name}.json"
            output.unlink(missing_ok=True)  # of another run, or without test
            run = replace(run, output=output, quiet=True, data_dir=data_dir)
            if hasattr(run, "checkpoint"):
                run = replace(run, checkpoint=work / f"{name}.pt")
            # as a fresh interpreter: its memory is the run's own
            process = multiprocessing.get_context("spawn").Process(
                target=_logged, args=(execute, run, work / f"{name}.log")
            )
            process.start()
            process.join()
            print(f"{name}: exit {process.exitcode}", flush=True)
            if process.exitcode != 0:
                return False
            result.parent.mkdir(parents=True, exist_ok=True)
            copyfile(output, result)
            return True
    except Timeout:
        return False


def _logged(execute: Callable[[Any], None], run: Any, log: Path) -> None:
    with open(log, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        execute(run)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def strata(sets: Iterable[str], data_dir: Path | None) -> None:
    """Write who is in which stratum, for comparisons within one."""
    for data in sets:
        output = RESULTS / f"{data}-strata.json"
        if not output.is_file():
            sequences = load(data, folder=data_dir)
            found = {
                name: membership(sequences.split(name))
                for name in get_args(SplitName)
            }
            output.write_text(json.dumps(found))


def line(run: Run) -> str:
    """The command that makes a run."""
    words = ["python -m bft_ref.recsys.train"]
    if isinstance(run, Train):
        words += [run.model.model, *_options(run)]
        if run.model.bft is not None:
            words += ["bft", *_options(run.model.bft)]
    else:
        words += [run.name, *_options(run)]
    return " ".join(words)


def _options(config: Any) -> Iterator[str]:
    """What does not stand at its default, but the filter's."""
    for field in fields(config):
        value = getattr(config, field.name)
        name = field.name.replace("_", "-")
        if field.name == "bft" or value == _default(field):
            continue
        if is_dataclass(value):
            yield from _options(value)
        elif isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, tuple):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", str(value))


def _default(field: Field) -> Any:
    made = field.default_factory
    return field.default if made is MISSING else made()
