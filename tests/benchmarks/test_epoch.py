"""An epoch of the filter over an epoch of the plain model, pair by pair."""

import json

from benchmarks import epoch
from bft_ref.recsys.data import simulate
from bft_ref.recsys.train import trainer


def test_ratios_are_medians_of_pairs(tmp_path, monkeypatch):
    times = iter([2.0, 4.0, 3.0, 2.0, 1.0, 3.0, 2.0, 1.5, 4.0, 4.0, 8.0, 4.0])
    asked = []

    def seconds(sequences, bft, device, seed):
        asked.append((bft, seed))
        return next(times)

    small = simulate(30, 20, seed=1)
    monkeypatch.setattr(epoch, "seconds", seconds)
    monkeypatch.setattr(epoch, "simulate", lambda *_, **__: small)
    out = tmp_path / "epoch.json"
    assert epoch.main(["--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["plain"] == 2.0
    assert record["ratio"] == {
        "feature": 2.0,
        "feature, first term": 2.0,
        "token": 1.0,
    }
    arms = [None, *epoch.ARMS.values()]
    assert asked == [(bft, seed) for seed in range(3) for bft in arms]


def test_an_epoch_is_timed_without_its_evaluation(monkeypatch):
    def no_ranking(*_):
        raise AssertionError("an evaluation would be paid for, not measured")

    monkeypatch.setattr(trainer, "evaluate", no_ranking)
    sequences = simulate(60, 40, seed=1).sequences
    assert epoch.seconds(sequences, None, "cpu", 0) > 0
