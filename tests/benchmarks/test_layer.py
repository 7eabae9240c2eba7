"""The benchmark counts and weighs right; times are never tested."""

import json

import pytest
import torch
from torch import nn

from benchmarks import layer as bench
from bft_ref.notebook import timing

CPU = torch.device("cpu")


def test_peak_memory_is_the_peak_and_not_the_sum():
    def run():
        for _ in range(3):
            x = torch.ones(2**20)  # 4 MiB each, one at a time
            del x

    assert timing.peak_memory(run, CPU) == pytest.approx(4, abs=0.1)


def test_ratios_are_medians_over_steps_beside_the_standard_layer(monkeypatch):
    steps = [  # standard: training, inference; then the filter's two
        (9e9, 9e9, 1.0, 1.0),  # warming up
        (1.0, 1.0, 3.0, 5.0),
        (2.0, 1.0, 8.0, 7.0),
        (4.0, 1.0, 8.0, 6.0),
    ]
    times = iter([seconds for step in steps for seconds in step])
    monkeypatch.setattr(timing, "seconds", lambda *_: next(times))
    memory, work = iter([2.0, 5.0]), iter([10, 30])
    monkeypatch.setattr(timing, "peak_memory", lambda *_: next(memory))
    monkeypatch.setattr(timing, "flops", lambda *_: next(work))
    found = bench.measure(
        "1,2,4,2", CPU, torch.float32, 3, {"filter": bench.BFTConfig()}
    )
    assert found == [
        bench.Measurement("1,2,4,2", "standard", 2e3, 1, 1, 2.0, 1, 1),
        bench.Measurement("1,2,4,2", "filter", 8e3, 3, 6, 5.0, 2.5, 3),
    ]
    assert next(times, None) is None


def test_training_goes_back_and_inference_keeps_no_graph():
    x = torch.ones(3, requires_grad=True)
    kept = []

    def call():
        kept.append(2 * x)
        return (kept[-1],)

    timing.inference(call)
    assert x.grad is None and not kept[0].requires_grad
    timing.training(call)
    assert x.grad.tolist() == [2, 2, 2]


def test_flops_of_a_product():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert timing.flops(lambda: a @ b) == 2 * 3 * 5 * 7


@pytest.mark.parametrize("tokens", [64])
def test_flops_of_the_layers_are_those_of_the_text(tokens):
    """24d² a token, and 8d², 16d² or next to nothing more; forward alone."""
    d, heads = 32, 2
    rows = {
        m.layer: m.flop_ratio
        for m in bench.measure(
            f"1,{tokens},{d},{heads}", CPU, torch.float32, 1
        )
    }
    # a forward and backward pass is three times the products of a forward
    linear = 3 * 24 * d * d * tokens
    columns = d // heads
    attention = heads * tokens * tokens * (4 + 10) * columns / 2
    standard = linear + attention
    assert rows["standard"] == 1
    jacobian = 3 * 8 * d * d * tokens
    projection = 3 * 2 * d * d * tokens
    width = columns + 1  # [q, 1]; the columns are v, v², c
    wide = 2 * columns + 1

    def kriging(c):
        products = (width + c + 1) + (width + 3 * c + 1 + 2 * width) - c
        return heads * tokens * tokens * products

    # M = γ∘(W₁∘W₂ᵀ) costs no product
    first = linear + jacobian + projection + kriging(wide)
    # the squared projection has no gradient to an input, only to W_O
    assert rows["feature, first term"] == pytest.approx(
        first / standard, rel=0.03
    )
    exact = first + jacobian
    assert rows["feature, exact norm"] == pytest.approx(
        exact / standard, rel=0.03
    )
    assert rows["token, first term"] < 1.1


def test_a_ratio_is_to_the_standard_layer():
    layer = timing.StandardLayer(16, 2)
    other = nn.TransformerEncoderLayer(
        16, 2, 64, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
    ).eval()
    state = {
        "self_attn.in_proj_weight": layer.in_proj.weight,
        "self_attn.in_proj_bias": layer.in_proj.bias,
        "self_attn.out_proj.weight": layer.out_proj.weight,
        "self_attn.out_proj.bias": layer.out_proj.bias,
    }
    for name in ("linear1", "linear2", "norm1", "norm2"):
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = getattr(getattr(layer, name), kind)
    other.load_state_dict(state)
    x = torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    torch.testing.assert_close(layer(x), other(x, mask), rtol=1e-4, atol=1e-5)


def test_the_command_line(tmp_path, capsys):
    out, drawing = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ["--case", "2,8,16,2", "--repeats", "1", "--device", "cpu"]
    options += ["--json", str(out), "--plot", str(drawing)]
    assert bench.main(options) == 0
    record = json.loads(out.read_text())
    assert record["dtype"] == "float32" and "thread" in record["device"]
    layers = [row["layer"] for row in record["rows"]]
    assert layers == ["standard", *bench.VARIANTS]
    assert all(row["training_ms"] > 0 for row in record["rows"])
    assert drawing.stat().st_size > 1000
    assert "standard" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"),
    [("--case", "2,8,16"), ("--dtype", "int64"), ("--repeats", "0")],
)
def test_a_bad_option_is_named(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([option, value])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert option.strip("-") in said.out + said.err
    assert value in said.out + said.err
