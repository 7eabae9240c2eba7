"""Losses, batches, resuming, the command line and several processes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from typer.testing import CliRunner

from bft_ref.data import Sequences, simulate
from bft_ref.layer import BFTConfig
from bft_ref.metrics import Ranking
from bft_ref.models import ModelConfig, build
from bft_ref.train import (
    TrainConfig,
    anatomy,
    evaluate,
    fit,
    interventions,
    mechanism,
    next_item_loss,
    trainer,
    training_batches,
)
from bft_ref.train.__main__ import app, filter_config

ROOT = Path(__file__).parent.parent
TINY = {"d": 8, "ffn": 16, "heads": 2, "length": 6, "dropout": 0.2}
N = 20


@pytest.fixture(scope="module")
def sequences():
    return simulate(150, 40, length=(4, 9), seed=5).sequences


def questions(n=7, seed=0):
    torch.manual_seed(seed)
    query, keys = torch.randn(n, 4), torch.randn(N + 1, 4)
    return query, torch.randint(1, N + 1, (n,)), keys, torch.randn(N + 1)


def test_full_loss_is_cross_entropy_over_the_items():
    query, target, keys, bias = questions()
    logits = query @ keys.T + bias
    logits[:, 0] = -torch.inf
    expected = F.cross_entropy(logits, target)
    found = next_item_loss(
        query, target, keys, bias, None, n_items=N, kind="full"
    )
    torch.testing.assert_close(found, expected)


def test_sampled_loss_with_every_item_once_is_the_full_one():
    query, target, keys, bias = questions()
    every = torch.arange(1, N + 1)
    found = next_item_loss(
        query, target, keys, bias, every, n_items=N, correct=False
    )
    full = next_item_loss(
        query, target, keys, bias, None, n_items=N, kind="full"
    )
    torch.testing.assert_close(found, full)


def test_correction_makes_the_sum_over_negatives_unbiased():
    query, target, keys, _ = questions(1)
    draw = torch.Generator().manual_seed(0)
    others = [i for i in range(1, N + 1) if i != int(target)]
    truth = (query @ keys[others].T).exp().sum()
    positive = (query * keys[target]).sum(-1)
    sums = []
    for _ in range(3000):
        # from the other items only: an own target would be left out
        index = torch.randint(len(others), (4,), generator=draw)
        negatives = torch.tensor(others)[index]
        loss = next_item_loss(query, target, keys, None, negatives, n_items=N)
        sums.append(((loss + positive).exp() - positive.exp()).item())
    se = np.std(sums) / math.sqrt(len(sums))
    assert np.mean(sums) == pytest.approx(float(truth), abs=4 * se)


def test_bce_and_gbce_by_their_definitions():
    query, target, keys, bias = questions()
    negatives = torch.tensor([3, 9, 9, int(target[0])])
    total = {"bce": 0.0, "gbce": 0.0}
    rate = 4 / (N - 1)
    beta = rate * (0.75 * (1 - 1 / rate) + 1 / rate)
    for q, t in zip(query, target, strict=True):
        right = torch.sigmoid(q @ keys[t] + bias[t]).log()
        wrong = sum(
            (1 - torch.sigmoid(q @ keys[i] + bias[i])).log()
            for i in negatives
            if i != t
        )
        total["bce"] -= (right + wrong) / 5 / len(query)
        total["gbce"] -= (beta * right + wrong) / 5 / len(query)
    for kind, expected in total.items():
        found = next_item_loss(
            query, target, keys, bias, negatives, n_items=N, kind=kind
        )
        torch.testing.assert_close(found, expected)


def test_gbce_never_scales_the_positive_up():
    """More negatives than items: the rate counts as one, which is bce."""
    query, target, keys, bias = questions()
    negatives = torch.arange(1, N + 1).repeat(3)
    given = (query, target, keys, bias, negatives)
    bce, gbce = (
        next_item_loss(*given, n_items=N, kind=kind)
        for kind in ("bce", "gbce")
    )
    torch.testing.assert_close(gbce, bce)


def test_losses_name_the_bad_argument():
    given = questions()
    with pytest.raises(ValueError, match="negatives"):
        next_item_loss(*given, None, n_items=N)
    with pytest.raises(ValueError, match="loss"):
        next_item_loss(*given, None, n_items=N, kind="hinge")


def epoch(sequences, seed=0, **given):
    given = {"length": 6, "size": 16} | given
    rng = np.random.default_rng(seed)
    return list(training_batches(sequences, rng=rng, **given))


def test_causal_batches_ask_for_each_next_item_once(sequences):
    rows = {}
    for batch in epoch(sequences):
        assert batch.items.shape == batch.target.shape
        # alike in length: nothing is padded by more than the bucket's spread
        for items, target in zip(batch.items, batch.target, strict=True):
            n = int((target > 0).sum())
            assert (target[n:] == 0).all() and (items[n:] == 0).all()
            assert items[1:n].tolist() == target[: n - 1].tolist()
            whole = (int(items[0]), *target[:n].tolist())
            rows[whole] = rows.get(whole, 0) + 1
    expected = {}
    for u in range(len(sequences)):
        whole = tuple(sequences[u][-7:].tolist())
        expected[whole] = expected.get(whole, 0) + 1
    assert rows == expected


def test_every_window_asks_for_every_item():
    sequences = Sequences.of([list(range(1, 24)), [3, 4], [5]])
    asked = np.concatenate(
        [b.target[b.target > 0] for b in epoch(sequences, every_window=True)]
    )
    assert sorted(asked.tolist()) == sorted([*range(2, 24), 4])


def test_cloze_hides_what_it_asks(sequences):
    masks, alone, rows = 0, 0, 0
    for batch in epoch(
        sequences, mask_id=41, mask_rate=0.3, last_rate=0.25, size=64
    ):
        hidden = batch.items == 41
        assert torch.equal(hidden, batch.target > 0)
        assert hidden.any(1).all()
        n = (batch.items > 0).sum(1)
        last = hidden[torch.arange(len(n)), n - 1] & (hidden.sum(1) == 1)
        alone += int(last.sum())
        masks += int(hidden.sum())
        rows += len(n)
    assert rows == len(sequences)
    assert 0.25 * rows < alone < 0.6 * rows
    assert masks > rows


def test_batches_follow_the_seed(sequences):
    first, again, other = (epoch(sequences, s) for s in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.items, b.items)
    assert any(
        a.items.shape != b.items.shape or not torch.equal(a.items, b.items)
        for a, b in zip(first, other, strict=True)
    )


def run(sequences, *, model=None, final=False, **given):
    model = ModelConfig(n_items=sequences.n_items, **(TINY | (model or {})))
    config = TrainConfig(**({"epochs": 3, "negatives": 16} | given))
    return fit(sequences, model, config, progress=False, final=final)


@pytest.mark.parametrize("loss", ["sampled", "full", "bce", "gbce"])
@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_training_lowers_the_loss(sequences, model, loss):
    given = {"model": model, "dropout": 0.0}
    history = run(
        sequences, model=given, loss=loss, epochs=6, lr=3e-3, batch=32
    ).result["history"]
    assert history[-1]["loss"] < history[0]["loss"]


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_a_filter_trains_and_shows_its_anatomy(sequences, model):
    bft = BFTConfig(project=False)
    result = run(sequences, model={"model": model, "bft": bft}).result
    assert result["model"]["bft"]["project"] is False
    for layer in result["anatomy"]["layers"]:
        assert all(0 < k < 1 for k in layer["gain"] if k is not None)
        assert layer["process_noise_mean"] > 0
    assert len(result["anatomy"]["tau"]) == 4


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_interventions_change_what_they_name_and_leave_the_model(
    sequences, model
):
    bft = BFTConfig(project=False, process_noise=0.3)
    fitted = run(sequences, model={"model": model, "bft": bft}, epochs=1)
    split, cpu = sequences.split("validation"), torch.device("cpu")
    net = fitted.model.eval()
    items = torch.randint(1, 41, (4, 6))
    before = net(items)

    def seen(change):
        with torch.no_grad(), change:
            return net(items, trace=True)

    other = net.tau.of_items(net.items.weight).flip(0) + torch.arange(
        net.items.num_embeddings
    ).remainder(3)
    moved = seen(mechanism._initial_precision(net, other))[0]
    assert not torch.allclose(moved, before)
    gains = [torch.full((net.config.d,), k) for k in (0.2, 0.6)]
    _, traces = seen(mechanism._constant_gains(net, gains))
    for trace, gain in zip(traces, gains, strict=True):
        torch.testing.assert_close(
            trace.gain, gain.expand_as(trace.gain), rtol=1e-5, atol=1e-6
        )
    assert torch.equal(net(items), before)
    found = interventions(net, split, lambda: evaluate(net, split, cpu))
    assert list(found) == [
        "trained",
        "tau equal",
        "tau shuffled",
        "gain constant",
    ]
    trained = fitted.result["validation"]["NDCG@10"]
    assert found["trained"]["NDCG@10"] == trained
    for kept in found.values():
        ranks = Ranking.from_top(kept["top"])
        assert ranks.summary()["NDCG@10"] == kept["NDCG@10"]
    assert torch.equal(net(items), before)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_a_process_without_a_question_takes_part(sequences, model):
    """Two processes and one sequence: DDP needs a gradient from both."""
    net = build(ModelConfig(n_items=40, model=model, bft=BFTConfig(), **TINY))
    batch = next(
        training_batches(
            sequences,
            length=6,
            size=1,
            rng=np.random.default_rng(0),
            mask_id=getattr(net, "mask_id", None),
        )
    ).share(1, 2)
    assert len(batch.items) == 0
    loss = trainer._Questions(net)(batch, None, TrainConfig())
    loss.backward()
    assert loss == 0
    for p in net.parameters():
        assert (p.grad == 0).all()


def test_a_plain_model_has_no_anatomy(sequences):
    fitted = run(sequences)
    with pytest.raises(ValueError, match="expected a Bayesian filter"):
        anatomy(
            fitted.model, sequences.split("validation"), torch.device("cpu")
        )


def test_the_command_line_offers_all_there_is():
    from bft_ref.data import READERS
    from bft_ref.data.formats import Format
    from bft_ref.models import MODELS
    from bft_ref.train.__main__ import Model

    assert get_args(Format) == tuple(READERS)
    assert get_args(Model) == (*MODELS, "popularity", "item-knn")


def test_a_trained_model_beats_popularity():
    from bft_ref import metrics

    simulation = simulate(500, 60, noise=(0.05, 0.5), seed=1)
    data = simulation.sequences
    split = data.split()
    baseline = metrics.evaluate(split, metrics.popularity(split)).summary()
    found = run(
        data,
        model={"d": 32, "ffn": 64, "length": 18},
        epochs=15,
        loss="full",
        lr=3e-3,
        batch=32,
        evaluate_every=5,
    ).result["validation"]
    assert found["NDCG@10"] > 1.3 * baseline["NDCG@10"]


def test_result_has_its_provenance(sequences):
    fitted = run(sequences, epochs=2)
    result = json.loads(json.dumps(fitted.result))
    assert result["data"]["interactions"] == len(sequences.items)
    assert result["code"]["torch"] == torch.__version__
    assert len(result["code"]["source_sha256"]) == 64
    assert result["training_peak_bytes"] > 1e6
    assert result["resumed_with"] == []
    assert result["seed"] == 0 and result["epochs"] == 2
    assert str(ROOT) not in json.dumps(result)
    found = result["validation"]
    again = Ranking.from_top(found["top"])
    for k in (5, 10, 20):
        assert again.summary((k,))[f"NDCG@{k}"] == found[f"NDCG@{k}"]
        assert again.summary((k,))[f"HR@{k}"] == found[f"HR@{k}"]


def test_the_best_epoch_is_kept_and_patience_ends_it(sequences):
    result = run(sequences, epochs=40, patience=2, lr=0.3).result
    values = [r["NDCG@10"] for r in result["history"]]
    best = int(np.argmax(values))
    assert result["best_epoch"] == best + 1
    assert result["validation"]["NDCG@10"] == values[best]
    assert result["stopped_early"] and result["epochs"] == best + 3


def test_only_final_looks_at_the_test_items(sequences):
    assert "test" not in run(sequences).result
    last = sequences.offsets[1:] - 1
    changed = sequences.items.copy()
    changed[last] = np.roll(changed[last], 1)
    other = Sequences(changed, sequences.offsets, sequences.n_items)
    a, b = (run(s, final=True) for s in (sequences, other))
    strip = [
        [{k: v for k, v in r.items() if "seconds" not in k} for r in h]
        for h in (a.result["history"], b.result["history"])
    ]
    assert strip[0] == strip[1]
    assert a.result["validation"] == b.result["validation"]
    assert a.result["test"]["users"] == len(sequences)
    assert a.result["test"] != b.result["test"]


def test_a_loss_that_is_not_finite_is_an_error(sequences):
    with pytest.raises(ValueError, match="loss.*finite"):
        run(sequences, lr=1e30, epochs=4)


def test_the_last_epoch_is_evaluated(sequences):
    fitted = run(sequences, epochs=3, evaluate_every=2)
    asked = ["NDCG@10" in record for record in fitted.result["history"]]
    assert asked == [False, True, True]
    assert run(sequences, epochs=1, evaluate_every=5).result["best_epoch"] == 1


def test_what_does_not_fit_is_refused(sequences):
    with pytest.raises(ValueError, match="n_items: expected 40"):
        fit(sequences, ModelConfig(n_items=39, **TINY), TrainConfig())
    with pytest.raises(ValueError, match="mask_rate: .* sasrec does not read"):
        run(sequences, mask_rate=0.5)


def test_a_resumed_run_says_which_code_went_on(
    sequences, tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    model = ModelConfig(n_items=40, **TINY)
    config = TrainConfig(epochs=2, negatives=16)

    class Killed(Exception):
        pass

    def kill(record):
        raise Killed

    with pytest.raises(Killed):
        fit(
            sequences,
            model,
            config,
            checkpoint=path,
            progress=False,
            on_epoch=kill,
        )
    first = trainer.code_version()
    other = first | {"source_sha256": "0" * 64}
    monkeypatch.setattr(trainer, "code_version", lambda: other)
    result = fit(
        sequences, model, config, checkpoint=path, progress=False
    ).result
    assert result["code"] == first and result["resumed_with"] == [other]


def test_a_checkpoint_of_another_run_is_refused(sequences, tmp_path):
    model = ModelConfig(n_items=40, **TINY)
    path = tmp_path / "run.pt"
    fit(
        sequences,
        model,
        TrainConfig(epochs=1),
        checkpoint=path,
        progress=False,
    )
    with pytest.raises(ValueError, match="another configuration"):
        fit(
            sequences,
            model,
            TrainConfig(epochs=1, seed=1),
            checkpoint=path,
            progress=False,
        )


def write_s3rec(path, sequences):
    lines = [
        " ".join(map(str, [u + 1, *sequences[u]]))
        for u in range(len(sequences))
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


LINE = (
    "--d-model 8 --ffn 16 --length 6 --negatives 16 --bft observation=value "
    "--epochs 8 --patience 8 --threads 1 --quiet --device cpu"
)
OPTIONS = LINE.split()


def command(data, output, *more):
    python = [sys.executable, "-m", "bft_ref.train"]
    if "torchrun" in more:
        python = [sys.executable, "-m", "torch.distributed.run"]
        python += ["--standalone", "--nproc-per-node", "2"]
        python += ["-m", "bft_ref.train"]
    more = [m for m in more if m != "torchrun"]
    return [*python, "--data", data, "--output", output, *OPTIONS, *more]


def environment():
    known = {k: v for k, v in os.environ.items() if k != "BFT_DATA"}
    return known | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def without_clocks(path):
    result = json.loads(Path(path).read_text())
    for name in list(result):
        if "seconds" in name or "memory" in name:
            del result[name]
    for record in result["history"]:
        for name in list(record):
            if "seconds" in name:
                del record[name]
    return result


def test_a_killed_run_goes_on_to_the_same_result(sequences, tmp_path):
    data = str(write_s3rec(tmp_path / "d.txt", sequences))
    whole, part = str(tmp_path / "whole.json"), str(tmp_path / "part.json")
    subprocess.run(command(data, whole), env=environment(), check=True)
    checkpoint = tmp_path / "run.pt"
    resumable = command(data, part, "--checkpoint", str(checkpoint))
    process = subprocess.Popen(resumable, env=environment())
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = torch.load(checkpoint, weights_only=True)["epoch"]
    if Path(part).exists() or reached >= 8:
        pytest.fail("the run ended before it could be killed")
    subprocess.run(resumable, env=environment(), check=True)
    assert without_clocks(part) == without_clocks(whole)


def test_two_processes_find_what_one_finds(sequences, tmp_path):
    data = str(write_s3rec(tmp_path / "d.txt", sequences))
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    short = ["--dropout", "0", "--epochs", "2", "--batch", "33"]
    subprocess.run(command(data, one, *short), env=environment(), check=True)
    subprocess.run(
        command(data, two, "torchrun", *short), env=environment(), check=True
    )
    a, b = without_clocks(one), without_clocks(two)
    assert (a["processes"], b["processes"]) == (1, 2)
    for x, y in zip(a["history"], b["history"], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["NDCG@10"] == pytest.approx(y["NDCG@10"], abs=2e-3)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def said(result):
    """What it wrote, without the box around it."""
    return " ".join(result.output.replace("│", " ").split())


def test_the_command_line_runs_baselines(sequences, tmp_path):
    data = write_s3rec(tmp_path / "d.txt", sequences)
    output = tmp_path / "out" / "pop.json"
    ranks = tmp_path / "ranks.npz"
    arguments = ["--data", data, "--model", "popularity", "--output", output]
    assert invoke(*arguments, "--ranks", ranks).exit_code == 0
    result = json.loads(output.read_text())
    assert "test" not in result
    with np.load(ranks) as stored:
        hit = (stored["validation_above"] + stored["validation_tied"]) < 10
    assert hit.mean() == result["validation"]["HR@10"]
    before = output.read_bytes()
    assert invoke(*arguments).exit_code == 0
    again = invoke(*arguments, "--final")
    assert again.exit_code == 2 and "no test items" in said(again)
    again = invoke(*arguments[:3], "item-knn", *arguments[4:])
    assert again.exit_code == 2 and "another configuration" in said(again)
    fewer = write_s3rec(tmp_path / "e.txt", sequences.take(np.arange(9)))
    again = invoke("--data", fewer, *arguments[2:])
    assert again.exit_code == 2 and "another configuration" in said(again)
    assert output.read_bytes() == before
    again = invoke(*arguments, "--weight-decay", 0.1)
    assert again.exit_code == 2 and "--weight-decay" in said(again)
    knn = invoke("--data", data, "--model", "item-knn", "--final")
    assert "test" in json.loads(knn.stdout)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--data", "nothing.txt"], "nothing.txt"),
        (["--bft", "observation=median"], "observation"),
        (["--bft", "colour=red"], "colour"),
        (["--bft", "on", "--gate", "ligr"], "gate"),
        (["--d-model", "9"], "heads"),
        (["--epochs", "0"], "epochs"),
    ],
)
def test_the_command_line_names_the_bad_option(
    sequences, tmp_path, arguments, said
):
    data = write_s3rec(tmp_path / "d.txt", sequences)
    found = invoke("--data", data, *arguments)
    assert found.exit_code == 2
    assert said in " ".join(found.output.split())


def test_help_is_worth_reading():
    text = " ".join(invoke("--help").output.split())
    for said in ("--final", "--bft", "--checkpoint", "torchrun", "--gate"):
        assert said in text


def test_filter_options_become_a_config():
    assert filter_config("off") is None
    assert filter_config("on") == BFTConfig()
    found = filter_config("observation=value,project=false,prior-dof=5")
    assert found == BFTConfig(
        observation="value", project=False, prior_dof=5.0
    )
    for text, complaint in [
        ("prior_dof=abc", "prior_dof: expected a number, got 'abc'"),
        ("project=maybe", "project: expected true or false, got 'maybe'"),
        ("prior=1", "got 'prior=1'"),
        ("observation=x", "observation"),
    ]:
        with pytest.raises(typer.BadParameter, match=complaint):
            filter_config(text)


@pytest.mark.parametrize(
    "given", [{"loss": "x"}, {"epochs": 0}, {"lr": 0.0}, {"mask_rate": 1.5}]
)
def test_training_configuration_names_the_bad_argument(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        TrainConfig(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu(sequences):
    model = ModelConfig(n_items=40, bft=BFTConfig(), **TINY)
    fitted = fit(
        sequences, model, TrainConfig(epochs=2), device="cuda", progress=False
    )
    assert next(fitted.model.parameters()).is_cuda
    assert math.isfinite(fitted.result["history"][-1]["loss"])
