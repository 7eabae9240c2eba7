"""Chapter 6's task and its three residual connections, and what is stored."""

import json
import math
from pathlib import Path

import pytest
import torch

from bft_ref.notebook import residual_rules as rules
from bft_ref.notebook.results import folder


def some(batch: int = 6) -> rules.Copies:
    return rules.copies(batch, torch.Generator().manual_seed(0))


def test_the_best_possible_is_the_posterior_mean_of_the_copies():
    theta, tau, belief = data = some(20_000)
    best = (tau * belief.mean).sum(1, keepdim=True)
    best = best / (tau.sum(1, keepdim=True) + rules.SD**-2)
    error = (best - theta).square().mean().item()
    assert math.isclose(error, rules.floor(data), rel_tol=0.02)
    scaled = (belief.mean - theta).square() * belief.precision
    assert math.isclose(scaled.mean(), 1, rel_tol=0.02)


@pytest.mark.parametrize("rule", rules.RULES)
def test_the_rules_differ_in_the_residual_connection_alone(rule: str):
    torch.manual_seed(1)
    gain = rules.Layer("gain")
    layer = rules.Layer(rule)
    layer.load_state_dict(gain.state_dict())
    belief = some().belief
    seen = gain.observe(belief)
    K = seen.log_precision.exp()
    K = K / (K + belief.precision)
    z, h = seen.innovation, belief.mean
    due = {"one": h + z, "gain": h + K * z, "subtract": h + K * (z - h)}[rule]
    updated, found = layer.update(belief, layer.observe(belief))
    torch.testing.assert_close(updated.mean, due)
    torch.testing.assert_close(found, K)


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(ValueError, match="rule"):
        rules.Layer("two")


def test_a_study_finds_an_innovation_where_there_is_one():
    """Values of −h alone: what is returned depends on h by −1."""
    layer, data = rules.Layer("one"), some(200)

    class Subtracts(rules.Layer):
        def observe(self, belief, *args, **kwargs):
            seen = super().observe(belief, *args, **kwargs)
            return seen._replace(innovation=3 * data.theta - belief.mean)

    layer.__class__ = Subtracts
    found = rules.study(layer, data)
    assert math.isclose(found["on_theta"], 3, rel_tol=1e-6)
    assert math.isclose(found["on_h"], -1, rel_tol=1e-6)
    assert found["prediction"] < found["value"] < found["mean"]
    assert layer.config.reading == "prediction"


def test_training_is_studied_at_its_stops_and_repeats():
    data = some()
    _, once = rules.trained("one", 3, (2, 4), data)
    _, again = rules.trained("one", 3, (4,), data)
    assert len(once) == 2
    assert once[-1] == again[0] != once[0]


def test_what_is_stored_is_complete_and_of_the_same_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stored = json.loads((folder() / "residual-rules.json").read_text("utf8"))
    made = {(row["rule"], row["seed"], row["steps"]) for row in stored["runs"]}
    assert len(made) == len(stored["runs"]) == 45
    monkeypatch.setattr(rules, "STEPS", (1,))
    monkeypatch.setattr(rules, "SEEDS", (1,))
    rules.main(tmp_path / "small.json")
    small = json.loads((tmp_path / "small.json").read_text("utf8"))
    assert small["floor"] == pytest.approx(stored["floor"])
    assert small["command"] == stored["command"]
    assert small["runs"][0].keys() == stored["runs"][0].keys()
