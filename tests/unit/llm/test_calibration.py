"""A start that is visible and harmless."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from bft_ref import BFTConfig
from bft_ref.llm import calibrate, patch, trace
from bft_ref.llm.layer import BFTLlamaDecoderLayer
from tests.unit.llm.factories import (
    FEATURE,
    TOKEN,
    close,
    left_padded,
    llama,
    some_ids,
)

# peft asks transformers by an older name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


def gains(model, ids, **options):
    """The median of each layer."""
    with torch.no_grad(), trace(model) as traces:
        model(ids, **options)
    return [each.gain.flatten(0, 1).median(0).values for each in traces]


@pytest.mark.parametrize("gain", [0.3, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("config", [TOKEN, FEATURE], ids=["token", "feature"])
@pytest.mark.parametrize("initial", ["constant", "mlp"])
def test_the_gain_that_is_asked_for_is_reached(initial, config, gain):
    ids = some_ids(4, 16)
    model = patch(llama(), BFTConfig(**config), initial_precision=initial)
    reached = calibrate(model, ids, gain)
    found = gains(model, ids)
    for said, seen in zip(reached, found, strict=True):
        assert said == pytest.approx(seen.mean().item(), rel=1e-3)
    # what a layer carries may be vaguer than what is asked for
    assert all(each > gain - 0.03 for each in reached)
    assert reached[0] == pytest.approx(gain, abs=0.02)
    for parameter in model.precision_parameters():
        assert parameter.isfinite().all()


def test_a_second_call_changes_little():
    ids = some_ids(4, 16)
    model = patch(llama())
    calibrate(model, ids, 0.7)
    once = [x.clone() for x in model.precision_parameters()]
    calibrate(model, ids, 0.7)
    for before, after in zip(once, model.precision_parameters(), strict=True):
        torch.testing.assert_close(after, before, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_rescaling_leaves_the_patched_model_alone_and_does_no_harm(bias):
    base, ids = llama(attention_bias=bias), some_ids(4, 16)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    expected = base(ids).logits
    apart = {}
    for rescale in (False, True):
        model = patch(base)
        calibrate(model, ids, 0.5, rescale=rescale)
        apart[rescale] = (model(ids).logits - expected).square().mean().item()
    assert apart[True] < 0.2 * apart[False]
    for name, value in base.state_dict().items():
        assert torch.equal(value, before[name]), name
    own = model.model.layers[0].self_attn.o_proj
    theirs = base.model.layers[0].self_attn.o_proj
    torch.testing.assert_close(own.weight, theirs.weight / 0.5)
    if bias:
        torch.testing.assert_close(own.bias, theirs.bias / 0.5)


def test_padding_counts_for_nothing():
    ids = some_ids()
    one, other = patch(llama()), patch(llama())
    calibrate(one, ids, 0.7)
    padded, mask, _ = left_padded(ids, by=20)
    calibrate(other, padded, 0.7, mask)
    for x, y in zip(
        one.precision_parameters(), other.precision_parameters(), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("variant", ["plain", "constant", "gate", "tau_bias"])
def test_a_controls_factor_is_the_gain(variant):
    ids, base = some_ids(), llama()
    model = patch(base, variant=variant)
    reached = calibrate(model, ids, 0.7)
    with_factor = variant in ("constant", "gate")
    assert reached == [0.7 if with_factor else 1.0] * 3
    for layer in model.filters():
        if with_factor:
            factor = layer.factor(torch.randn(1, 1, 32))
            close(factor, torch.full_like(factor, 0.7), 1e-5)
        elif variant == "plain":
            assert layer.factor(torch.randn(1, 1, 32)) == 1


def test_only_the_layers_that_filter_are_set():
    model = patch(llama(), layers=[2], tau=3.0)
    calibrate(model, some_ids(4, 16), 0.6)
    [gain] = gains(model, some_ids(4, 16))
    assert gain.item() == pytest.approx(0.6, abs=0.02)


def test_extreme_starts_stay_numbers():
    ids = some_ids(1, 1)  # one token: no dispersion
    for tau in (1e-30, 1e30):
        for gain in (1e-6, 1 - 1e-6):
            model = patch(llama(), tau=tau)
            calibrate(model, ids, gain)
            assert all(p.isfinite().all() for p in model.parameters())
            assert model(ids).logits.isfinite().all()


def test_bfloat16_keeps_its_precision_in_float32():
    model = patch(llama().bfloat16())
    ids = some_ids(4, 16)
    reached = calibrate(model, ids, 0.7)
    assert all(0.6 < gain < 0.9 for gain in reached)
    for parameter in model.precision_parameters():
        assert parameter.dtype == torch.float32
    assert model(ids).logits.dtype == torch.bfloat16


def test_every_modules_mode_is_restored_even_after_an_error(monkeypatch):
    model = patch(llama()).train()
    model.model.layers[1].eval()

    def modes():
        return [part.training for part in model.modules()]

    before = modes()
    calibrate(model, some_ids(), 0.7)
    assert modes() == before

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(BFTLlamaDecoderLayer, "update", broken)
    with pytest.raises(RuntimeError, match="broken"):
        calibrate(model, some_ids(), 0.7)
    assert modes() == before
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_the_neighbours_prior_is_refused_by_name():
    model = patch(llama(), BFTConfig(prior_scale="neighbours"))
    with pytest.raises(ValueError, match="prior_scale='unit', got 'neigh"):
        calibrate(model, some_ids())


IDS = some_ids()


@pytest.mark.parametrize(
    "arguments,error,said",
    [
        ((IDS, "a"), TypeError, "gain: .*got str"),
        ((IDS, 1.0), ValueError, r"gain: .*\(0, 1\), got 1"),
        ((IDS, 0), ValueError, "gain: .*got 0"),
        ((IDS, float("nan")), ValueError, "gain: .*got nan"),
        (([1, 2],), TypeError, "input_ids: .*tensor, got list"),
        ((IDS[0],), ValueError, r"input_ids: .*\(B, T\), got \(12,\)"),
        ((IDS.float(),), ValueError, "input_ids: .*whole.*float32"),
        ((IDS[:0],), ValueError, "input_ids: .*at least one"),
        ((IDS + 60,), ValueError, "input_ids: .*0…60, got"),
        ((-IDS,), ValueError, "input_ids: .*0…60, got"),
        ((IDS, 0.7, [1]), TypeError, "attention_mask: .*got list"),
        ((IDS, 0.7, IDS[:, 1:]), ValueError, r"attention_mask: .*\(2, 11\)"),
        ((IDS, 0.7, 0 * IDS), ValueError, "attention_mask: .*got none"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(arguments, error, said):
    model = patch(llama()).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(error, match=said):
        calibrate(model, *arguments, rescale=True)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_other_models_are_refused_by_name():
    lora = LoraConfig(target_modules=["q_proj", "o_proj"])
    wrapped = get_peft_model(patch(llama()), lora)
    for model, kind in [
        (llama(), "LlamaForCausalLM"),
        (wrapped, "PeftModel"),
        (None, "NoneType"),
    ]:
        with pytest.raises(TypeError, match=rf"model: .*patch.*got {kind}"):
            calibrate(model, IDS)
    inner = wrapped.base_model.model
    with pytest.raises(ValueError, match="rescale: .*o_proj.*before adapt"):
        calibrate(inner, IDS, 0.7, rescale=True)
