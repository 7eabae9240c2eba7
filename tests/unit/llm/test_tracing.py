"""What the layers saw."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from bft_ref.layer import LayerTrace
from bft_ref.llm import patch, trace
from tests.unit.llm.factories import FEATURE, close, filtering, llama, some_ids

# peft asks transformers by an older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


def test_a_trace_a_filtering_layer_and_nothing_else_changes():
    model, ids = filtering(layers=[1, 2]), some_ids()
    expected = model(ids).logits
    with trace(model) as traces:
        # weights are kept: another way to the same numbers
        close(model(ids).logits, expected, 1e-5)
        assert traces == []
    assert len(traces) == 2
    for each in traces:
        assert isinstance(each, LayerTrace)
        assert each.gain.shape == (2, 12, 1)
        assert each.n_eff.shape == (2, 4, 12)
        assert each.weights.shape == (2, 4, 12, 12)
        sums = each.weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    model(ids[:, :3])
    assert traces[0].gain.shape == (2, 12, 1)


def test_of_features():
    with trace(model := filtering(config=FEATURE)) as traces:
        model(some_ids())
    assert [each.gain.shape for each in traces] == [(2, 12, 32)] * 3


def test_under_generate_it_is_the_last_tokens():
    model, ids = filtering(), some_ids()
    with trace(model) as traces:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4)
        assert all(len(each.traces) == 1 for each in model.filters())
    assert traces[0].gain.shape == (2, 1, 1)
    assert traces[0].weights.shape == (2, 4, 1, 15)


def test_nested_blocks_each_have_the_last_call():
    model, ids = filtering(), some_ids()
    with trace(model) as outer:
        with trace(model) as inner:
            model(ids)
        between = inner[0].gain
    assert torch.equal(outer[0].gain, between)
    with trace(model) as outer:
        with trace(model) as inner:
            model(ids[:, :3])
        model(ids)
    assert inner[0].gain.shape[1] == 3 and outer[0].gain.shape[1] == 12


def test_an_error_in_the_block_is_handed_on_and_tracing_ends():
    model = filtering()
    with pytest.raises(KeyError, match="mine"), trace(model) as traces:
        model(some_ids())
        raise KeyError("mine")
    assert traces == []
    assert all(each.traces is None for each in model.filters())


def test_through_an_adapter():
    lora = LoraConfig(target_modules=["q_proj", "v_proj"])
    model = get_peft_model(filtering(), lora)
    with trace(model) as traces:
        model(some_ids())
    assert len(traces) == 3


def test_gradients_flow_through_a_trace():
    model = filtering(initial_precision="mlp")
    with trace(model) as traces:
        model(some_ids())
    traces[-1].gain.sum().backward()
    weight = model.model.layers[0].initial_precision.layers[-1].weight
    assert weight.grad.abs().sum() > 0


def test_what_cannot_be_traced_is_refused_by_name():
    for model in (llama(), None, patch(llama(), variant="plain")):
        name = type(model).__name__
        with pytest.raises(TypeError, match=f"model: .*got {name}"):
            trace(model).__enter__()
    with (
        pytest.raises(RuntimeError, match="trace: .*called in the block"),
        trace(filtering()),
    ):
        pass
