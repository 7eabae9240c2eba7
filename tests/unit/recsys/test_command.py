"""The command line: its options, its errors, resuming, several processes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch

from bft_ref.config import BFTConfig
from bft_ref.recsys import storage
from bft_ref.recsys.data import DATASETS, READERS, Sequences, load, simulate
from bft_ref.recsys.data.readers import Format
from bft_ref.recsys.models import (
    CONFIGS,
    BERT4RecConfig,
    HSTUConfig,
    HSTUFilter,
    SASRecConfig,
)
from bft_ref.recsys.train import TrainConfig, evaluate
from bft_ref.recsys.train import command as command_line
from bft_ref.recsys.train.__main__ import main
from bft_ref.recsys.train.command import ItemKNN, Popularity, Train, parse

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def sequences():
    return simulate(150, 40, length=(4, 9), seed=5).sequences


def write_s3rec(path, sequences):
    lines = [
        " ".join(map(str, [u + 1, *sequences[u]]))
        for u in range(len(sequences))
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def data(sequences, tmp_path_factory):
    """A file."""
    folder = tmp_path_factory.mktemp("data")
    return str(write_s3rec(folder / "d.txt", sequences))


class Said(NamedTuple):
    """What a command left behind, without the boxes around it."""

    status: int | None
    out: str
    err: str


@pytest.fixture
def invoke(capsys):
    def call(*arguments):
        status = 0
        try:
            main([str(each) for each in arguments])
        except SystemExit as stopped:
            status = stopped.code
        out, err = capsys.readouterr()
        return Said(status, out, " ".join(err.replace("│", " ").split()))

    return call


OPTIONS = """--d-model 8 --dim-feedforward 16 --max-length 6
    --num-negatives 16 --epochs 8 --patience 8 --threads 1 --quiet
    --device cpu""".split()
FILTER = ["bft", "--reading", "value"]


def command(data, output, *more):
    python = [sys.executable, "-m", "bft_ref.recsys.train"]
    if "torchrun" in more:
        python = [sys.executable, "-m", "torch.distributed.run"]
        python += ["--standalone", "--nproc-per-node", "2"]
        python += ["-m", "bft_ref.recsys.train"]
    more = [m for m in more if m != "torchrun"]
    files = ["--data", data, "--output", output]
    return [*python, "sasrec", *files, *OPTIONS, *more, *FILTER]


def environment():
    known = {k: v for k, v in os.environ.items() if k != "BFT_DATA"}
    return known | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def without_clocks(path):
    """A result but for its times and its memory, which are never the same."""
    result = json.loads(Path(path).read_text())
    for name in list(result):
        if any(x in name for x in ("seconds", "memory", "bytes")):
            del result[name]
    for record in result["history"]:
        for name in list(record):
            if "seconds" in name:
                del record[name]
    return result


# The command line that stops before the second step of its fourth epoch.
STOPS = """
import sys
import time
from bft_ref.recsys.train import trainer
from bft_ref.recsys.train.__main__ import main

draw, drawn = trainer.uniform_negatives, []

def stop(*given):
    drawn.append(given)
    if len(drawn) == 8:
        print("stopped", flush=True)
        time.sleep(600)
    return draw(*given)

trainer.uniform_negatives = stop
main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_to_the_same_result(data, tmp_path):
    whole, part = str(tmp_path / "whole.json"), str(tmp_path / "part.json")
    subprocess.run(command(data, whole), env=environment(), check=True)
    checkpoint = tmp_path / "run.pt"
    resumable = command(data, part, "--checkpoint", str(checkpoint))
    with subprocess.Popen(
        [sys.executable, "-c", STOPS, *resumable[3:]],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "stopped\n"
        process.kill()
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 3
    assert not Path(part).exists()
    subprocess.run(resumable, env=environment(), check=True)
    assert without_clocks(part) == without_clocks(whole)


def test_two_processes_find_what_one_finds(data, tmp_path):
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    short = ["--dropout", "0", "--epochs", "2", "--batch-size", "33"]
    short += ["--noise-prior-sd", "0.5"]
    subprocess.run(command(data, one, *short), env=environment(), check=True)
    subprocess.run(
        command(data, two, "torchrun", *short), env=environment(), check=True
    )
    a, b = without_clocks(one), without_clocks(two)
    assert (a["processes"], b["processes"]) == (1, 2)
    for x, y in zip(a["history"], b["history"], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["NDCG@10"] == pytest.approx(y["NDCG@10"], abs=2e-3)


def test_the_command_line_runs_baselines(invoke, sequences, data, tmp_path):
    output = tmp_path / "out" / "pop.json"
    ranks = tmp_path / "ranks.npz"
    files = ["--data", data, "--output", output]
    assert invoke("popularity", *files, "--ranks", ranks).status == 0
    result = json.loads(output.read_text())
    assert "test" not in result
    with np.load(ranks) as stored:
        hit = (stored["validation_above"] + stored["validation_tied"]) < 10
    assert hit.mean() == result["validation"]["HR@10"]
    before = output.read_bytes()
    again = invoke("popularity", *files)
    assert again.status == 0 and "nothing to do" in again.err
    again = invoke("popularity", *files, "--evaluate-test")
    assert again.status == 2 and "no test items" in again.err
    again = invoke("item-knn", *files)
    assert again.status == 2 and "another configuration" in again.err
    fewer = write_s3rec(tmp_path / "e.txt", sequences.take(np.arange(9)))
    again = invoke("popularity", "--data", fewer, "--output", output)
    assert again.status == 2 and "another configuration" in again.err
    assert output.read_bytes() == before
    again = invoke("popularity", *files, "--weight-decay", 0.1)
    assert again.status == 2 and "--weight-decay" in again.err
    knn = invoke("item-knn", "--data", data, "--evaluate-test")
    assert "test" in json.loads(knn.out)


def test_a_run_that_is_finished_is_not_made_again(invoke, data, tmp_path):
    output = tmp_path / "run.json"
    line = ["sasrec", "--data", data, "--output", output, *OPTIONS]
    line += ["--epochs", "2", "--read-at", "1", "2"]
    assert invoke(*line, "--evaluate-test").status == 0
    before = output.read_bytes()
    assert set(json.loads(before)["at"]) == {"1", "2"}
    for less in (line, [*line, "--evaluate-test"]):
        again = invoke(*less)
        assert again.status == 0 and "nothing to do" in again.err
    again = invoke(*line, "--lr", "0.1")
    assert again.status == 2 and "another configuration" in again.err
    assert output.read_bytes() == before


def test_what_a_run_finds_out_later_is_a_line_too(invoke, data, tmp_path):
    line = ["sasrec", "--data", data, *OPTIONS, "--epochs", "6"]
    stopped = [*line, "--patience", "1", "--lr", "0.3", "--read-at", "6"]
    found = invoke(*stopped)
    assert found.status == 2
    assert "error: read_at: expected epochs that were trained" in found.err
    found = invoke(*line, "--lr", "1e30")
    assert found.status == 2 and "error: loss: expected a fin" in found.err
    checkpoint = ["--checkpoint", tmp_path / "run.pt"]
    assert invoke(*line, *checkpoint).status == 0
    found = invoke(*line, *checkpoint, "--seed", "1")
    assert found.status == 2
    assert "run.pt belongs to another configuration" in found.err
    assert "Traceback" not in found.err


FILES = ("output", "ranks", "checkpoint", "weights")


@pytest.mark.parametrize(
    "line, said",
    [
        ("sasrec --data nothing.txt", "nothing.txt"),
        ("sasrec bft --reading median", "'--reading'"),
        ("sasrec bft --colour red", "--colour"),
        ("sasrec --gate ligr bft", "gate: expected its default"),
        ("sasrec --gate red", "'--gate'"),
        ("hstu --gate ligr", "--gate"),
        ("hstu bft --reading value", "--reading"),
        ("sasrec --d-model 9", "nhead"),
        ("sasrec --d-model high", "--d-model"),
        ("sasrec --max-length 0", "max_length: expected at least 1"),
        ("sasrec --epochs 0", "epochs"),
        ("sasrec --mask-rate 0.5", "--mask-rate"),
        ("bert4rec --mask-rate 1.5", "mask_rate"),
        ("sasrec --loss full --no-logq-correction", "logq_correction"),
        ("sasrec --gbce-t 0.5", "gbce_t"),
        ("sasrec --gate constant --gate-value high", "--gate-value"),
        ("sasrec --read-at 3 101", "read_at: expected epochs in 1…100"),
        ("sasrec --read-at 0", "read_at: expected epochs in 1…100"),
        ("sasrec --read-at soon", "--read-at"),
        ("popularity --d-model 8", "--d-model"),
        ("sasrec --device gpu", "--device"),
        ("sasrec --threads -1", "--threads"),
        ("gru4rec", "sasrec"),
        ("", "sasrec, bert4rec, hstu, popularity, item-knn"),
        *(
            (f"sasrec --{name} .", f"--{name}: expected a fi")
            for name in FILES
        ),
        *(
            (f"sasrec --{name} file/x/y.json", f"--{name}: expected a fi")
            for name in FILES
        ),
        ("sasrec --output file", "--output: file is there already"),
        ("sasrec --output list.json", "--output: list.json is there already"),
    ],
)
def test_the_command_line_names_the_bad_option(
    invoke, data, tmp_path, monkeypatch, line, said
):
    """In a line or a box on stderr, before any work; no traceback."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("no JSON")
    Path("list.json").write_text("[1]")
    monkeypatch.setattr(command_line, "fit", None)
    words = line.split()
    if words and "--data" not in words and words[0] != "gru4rec":
        words[1:1] = ["--data", data]
    found = invoke(*words)
    assert found.status == 2 and said in found.err
    assert "Traceback" not in found.err and found.out == ""


def test_the_command_line_keeps_the_model_it_reports(invoke, data, tmp_path):
    output, weights = tmp_path / "run.json", tmp_path / "m.safetensors"
    line = ["sasrec", "--data", data, "--output", output, *OPTIONS]
    assert invoke(*line, "--weights", weights, *FILTER).status == 0
    model = storage.load(weights)
    split = load(data).split("validation")
    ranking = evaluate(model, split, torch.device("cpu"))
    told = json.loads(output.read_text())["validation"]
    assert ranking.summary()["NDCG@10"] == pytest.approx(told["NDCG@10"])


@pytest.mark.parametrize("model", ["sasrec", "popularity"])
def test_the_command_line_refuses_data_that_ask_nobody(
    invoke, tmp_path, model
):
    data = write_s3rec(tmp_path / "d.txt", Sequences.of([[1, 2], [2, 1]]))
    found = invoke(model, "--data", data)
    assert found.status == 2
    assert "--data: d: no user has three" in found.err


COMMON = """--data my.txt --data-dir there --format s3rec --max-length 9
    --d-model 24 --num-layers 3 --nhead 3 --dropout 0.1
    --embedding-std 0.3 --tau shuffled --tau-power 0.25 --tau-start 2
    --epochs 7 --patience 3 --evaluate-every 2 --batch-size 17 --lr 0.02
    --precision-lr 0.03 --weight-decay 0.01 --clip 0.5 --every-window --seed 11
    --noise-prior-sd 0.5 --device meta --threads 5 --checkpoint c.pt --quiet
    --evaluate-test --read-at 3 5"""
SIZES = {
    "n_items": 100,
    "max_length": 9,
    "d_model": 24,
    "num_layers": 3,
    "nhead": 3,
    "dropout": 0.1,
    "embedding_std": 0.3,
    "tau": "shuffled",
    "tau_power": 0.25,
    "tau_start": 2.0,
}
BUDGET = {
    "epochs": 7,
    "patience": 3,
    "evaluate_every": 2,
    "batch_size": 17,
    "lr": 0.02,
    "precision_lr": 0.03,
    "weight_decay": 0.01,
    "clip": 0.5,
    "noise_prior_sd": 0.5,
    "every_window": True,
    "seed": 11,
}
LINES = [
    (
        """sasrec {} --residual original --gate vector --gate-value 0.9 0.5 0.2
        --tau-bias --loss sampled --num-negatives 77 --no-logq-correction
        --dim-feedforward 48 --activation relu --head gaussian""",
        SASRecConfig(
            **SIZES,
            residual="original",
            gate="vector",
            gate_value=(0.9, 0.5, 0.2),
            tau_bias=True,
            dim_feedforward=48,
            activation="relu",
            head="gaussian",
        ),
        TrainConfig(**BUDGET, num_negatives=77, logq_correction=False),
    ),
    (
        """bert4rec {} --mask-rate 0.45 --last-rate 0.15 --loss gbce
        --gbce-t 0.35 --head item_temperature bft --granularity token""",
        BERT4RecConfig(
            **SIZES,
            mask_rate=0.45,
            last_rate=0.15,
            head="item_temperature",
            bft=BFTConfig(granularity="token"),
        ),
        TrainConfig(**BUDGET, loss="gbce", gbce_t=0.35),
    ),
    (
        """hstu --temperature 0.2 --head item_bias bft --granularity token
        --prior-scale unit --prior-dof 2 --no-project-variance
        --process-noise 0.5 --dynamics ornstein_uhlenbeck
        --stationary-variance 2.5
        --innovation difference {}""",
        HSTUConfig(
            **SIZES,
            temperature=0.2,
            head="item_bias",
            bft=HSTUFilter(
                granularity="token",
                prior_scale="unit",
                prior_dof=2.0,
                project_variance=False,
                process_noise=0.5,
                innovation="difference",
                dynamics="ornstein_uhlenbeck",
                stationary_variance=2.5,
            ),
        ),
        TrainConfig(**BUDGET),
    ),
]


@pytest.fixture
def asked(monkeypatch):
    """What reaches the reader and the trainer, instead of them."""
    found = {"threads": []}

    def load(data, **given):
        found["load"] = (data, given)
        return SimpleNamespace(n_items=100, describe=dict)

    def fit(_, *configs, **given):
        found["fit"] = (configs, given)
        return SimpleNamespace(result={}, rankings={})

    monkeypatch.setattr(command_line, "load", load)
    monkeypatch.setattr(command_line, "fit", fit)
    monkeypatch.setattr(torch, "set_num_threads", found["threads"].append)
    return found


@pytest.mark.parametrize("line, model, train", LINES)
def test_every_option_arrives(invoke, asked, line, model, train):
    assert invoke(*line.format(COMMON).split()).status == 0
    where = {"folder": Path("there"), "format": "s3rec"}
    assert asked["load"] == ("my.txt", where)
    configs, given = asked["fit"]
    assert configs == (model, train)
    assert [type(each) for each in configs] == [type(model), TrainConfig]
    assert given == {
        "device": torch.device("meta"),
        "checkpoint": Path("c.pt"),
        "evaluate_test": True,
        "read_at": (3, 5),
        "progress": False,
    }
    assert asked["threads"] == [5]


def test_no_option_is_left_out_above():
    """Each field of each configuration differs from its default once."""
    changed = set()
    for _, model, train in LINES:
        for config in (model, train, *filter(None, [model.bft])):
            for field in fields(config):
                if getattr(config, field.name) != field.default:
                    changed.add((type(config), field.name))
    kinds = (*CONFIGS.values(), TrainConfig, HSTUFilter)
    every = {(kind, field.name) for kind in kinds for field in fields(kind)}
    left = {(kind.__name__, name) for kind, name in every - changed}
    shared = {"dim_feedforward", "activation", "gate", "gate_value"}
    assert left == {
        ("SASRecConfig", "bft"),  # which reads no rival of the filter
        *(("BERT4RecConfig", name) for name in {*shared, "tau_bias"}),
    }


@pytest.mark.parametrize("data, length", [("lastfm", 50), ("my.txt", 20)])
def test_the_length_is_the_sets_own(invoke, asked, data, length):
    assert invoke("sasrec", "--data", data).status == 0
    (model, train), _ = asked["fit"]
    assert model == SASRecConfig(n_items=100, max_length=length)
    assert train == TrainConfig()
    assert asked["threads"] == []  # PyTorch's choice
    assert DATASETS["lastfm"].length == 50


def test_the_filter_has_its_defaults_with_a_word():
    plain, filtered = (
        parse(f"sasrec --data x {more}".split()) for more in ("", "bft")
    )
    assert plain.model.bft is None and filtered.model.bft == BFTConfig()
    assert parse("hstu --data x bft".split()).model.bft == HSTUFilter()


def test_the_command_line_offers_all_there_is():
    assert get_args(Format) == tuple(READERS)
    for name in CONFIGS:
        found = parse([name, "--data", "x"])
        assert isinstance(found, Train) and found.model.model == name
    for kind in (Popularity, ItemKNN):
        assert type(parse([kind.name, "--data", "x"])) is kind


def test_help_is_worth_reading(invoke):
    first = " ".join(invoke("--help").out.split())
    for said in ("torchrun", "bft --reading value", "item-knn", "--gate"):
        assert said in first
    text = re.sub(r"\s+", " ", invoke("hstu", "--help").out.replace("│", ""))
    for said in (
        "--evaluate-test",
        "--checkpoint",
        "Width of the state",
        "bft",
    ):
        assert said in text
    for hidden in ("--n-items", "--gate", "{None}"):
        assert hidden not in text
