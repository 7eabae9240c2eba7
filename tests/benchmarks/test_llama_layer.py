"""The standard layer is Llama's, and what is printed is what was measured."""

import json

import pytest
import torch

from benchmarks import llama_layer as bench
from bft_ref import Belief, BFTConfig

SHAPE = bench.Shape(2, 6, 16, 4, 2, 24)


def test_the_filter_without_doubt_is_the_standard_layer():
    """All certain: with τ → 0 the gain is 1, and the weights are alike."""
    torch.manual_seed(0)
    standard = bench.StandardLayer(SHAPE)
    config = BFTConfig(granularity="token", prior_scale="unit")
    layer = bench.filter_layer(SHAPE, config)
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": standard.in_proj.weight,
            "self_attn.out_proj.weight": standard.out_proj.weight,
        }
        | {
            f"{name}.weight": getattr(standard, name).weight
            for name in ["linear1", "linear2", "norm1", "norm2"]
        },
        strict=False,
    )
    x = torch.randn(2, 6, 16)
    found = layer(Belief(x, torch.full((2, 6, 1), -30.0)), is_causal=True)
    torch.testing.assert_close(found.mean, standard(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", bench.GRANULARITIES)
@pytest.mark.parametrize("loss", ["mean", "precision"])
def test_the_gradient_is_almost_all_there_without_the_jacobian(
    granularity, loss
):
    found = bench.gradient_without_jacobian(granularity, loss)
    assert 0.99 < found["cosine"] <= 1 + 1e-6
    assert 1e-4 < found["relative_difference"] < 0.15


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "bench.json"
    options = ["--repeats", "1"]
    for name, size in SHAPE._asdict().items():
        options += [f"--shape.{name.replace('_', '-')}", str(size)]
    assert bench.main([*options, "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = {row["layer"]: row for row in record["rows"]}
    assert list(rows) == ["standard", *bench.VARIANTS]
    without = {k: v["flop_ratio"] for k, v in rows.items() if " no " in k}
    for name, ratio in without.items():
        assert ratio < rows[name.replace(" no ", " with ")]["flop_ratio"]
    assert len(record["gradient_without_jacobian"]) == 4
    assert "cosine" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--repeats", "0"])
