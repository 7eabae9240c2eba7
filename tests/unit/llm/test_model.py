"""What a user of transformers does with a model: load, save, generate."""

import subprocess
import sys

import pytest
import torch
from torch.nn.utils import prune
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from bft_ref import BFTConfig
from bft_ref.llm import (
    BFTLlamaForCausalLM,
    BFTLlamaModel,
    calibrate,
    patch,
    trace,
)
from tests.unit.llm.factories import (
    LLAMAS,
    NEIGHBOURS,
    TOKEN,
    close,
    filtering,
    left_padded,
    llama,
    some_ids,
)

NEW = {"max_new_tokens": 6, "min_new_tokens": 6}


def test_patching_shares_parameters_and_leaves_the_llama_as_it_was():
    base, ids = llama(), some_ids()
    base.model.embed_tokens.weight.requires_grad_(False)
    expected = base(ids).logits
    model = patch(base)
    theirs = dict(base.named_parameters())
    added = set(dict(model.named_parameters())) - set(theirs)
    assert added == {
        "model.layers.0.initial_precision.weight",
        *(f"model.layers.{i}.process_noise.weight" for i in range(3)),
    }
    assert len(model.precision_parameters()) == len(added)
    for name, parameter in theirs.items():
        mine = model.get_parameter(name)
        assert mine.data_ptr() == parameter.data_ptr()
        assert mine.requires_grad == parameter.requires_grad
    assert torch.equal(base(ids).logits, expected)
    assert patch(base.train()).training


@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS)
@pytest.mark.parametrize("initial", ["constant", "mlp"])
def test_saved_and_loaded_it_is_the_same(initial, options, tmp_path):
    model = filtering(
        llama(**options), layers=[1, 2], initial_precision=initial
    )
    ids = some_ids()
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is BFTLlamaForCausalLM
    assert torch.equal(found(ids).logits, model(ids).logits)
    inner = AutoModel.from_pretrained(tmp_path)
    assert type(inner) is BFTLlamaModel
    expected = model.model(ids).last_hidden_state
    assert torch.equal(inner(ids).last_hidden_state, expected)
    tied = options.get("tie_word_embeddings", False)
    same = found.lm_head.weight is found.model.embed_tokens.weight
    assert same == tied


@pytest.mark.parametrize("variant", ["kalman", "constant", "gate", "tau_bias"])
@pytest.mark.filterwarnings("ignore:You are using a model of type")
def test_a_plain_checkpoint_starts_as_the_options_say(variant, tmp_path):
    base, ids = llama(), some_ids()
    base.save_pretrained(tmp_path)
    options = {"bft_layers": [1, 2], "bft_tau": 2.0, "bft_variant": variant}
    found = BFTLlamaForCausalLM.from_pretrained(
        tmp_path, bft={"granularity": "feature"}, **options
    )
    patched = patch(
        base,
        BFTConfig(granularity="feature", prior_scale="unit"),
        [1, 2],
        tau=2.0,
        variant=variant,
    )
    for name, value in patched.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert torch.equal(found(ids).logits, patched(ids).logits)


@pytest.mark.filterwarnings("ignore:You are using a model of type")
def test_an_mlps_tau_starts_as_the_options_say(tmp_path):
    llama().save_pretrained(tmp_path)
    found = BFTLlamaForCausalLM.from_pretrained(
        tmp_path, bft_initial_precision="mlp", bft_tau=2.0
    )
    for model in (found, patch(llama(), initial_precision="mlp", tau=2.0)):
        log = model.model.layers[0].initial_precision(torch.randn(2, 3, 32))
        close(log.exp(), torch.full_like(log, 2.0), 1e-6)


def test_loaded_in_bfloat16_log_precision_stays_in_float32(tmp_path):
    model, ids = filtering(initial_precision="mlp"), some_ids()
    model.save_pretrained(tmp_path)
    found = BFTLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert found.lm_head.weight.dtype == torch.bfloat16
    for parameter in found.precision_parameters():
        assert parameter.dtype == torch.float32
    logits = found(ids).logits
    assert logits.dtype == torch.bfloat16
    close(logits.float(), model(ids).logits, 0.1)
    mapped = BFTLlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(mapped(ids).logits, model(ids).logits)


def test_layers_on_the_disk_are_refused_by_name(tmp_path):
    model = filtering()
    model.save_pretrained(tmp_path)
    parts = ["embed_tokens", "norm", "rotary_emb", "layers.0", "layers.2"]
    where = {"lm_head": "cpu", "model.layers.1": "disk"}
    where |= {f"model.{part}": "cpu" for part in parts}
    found = BFTLlamaForCausalLM.from_pretrained(
        tmp_path, device_map=where, offload_folder=tmp_path / "off"
    )
    with pytest.raises(ValueError, match="device_map: .*offloaded"):
        found(some_ids())


@pytest.mark.parametrize(
    "config", [TOKEN, NEIGHBOURS], ids=["token", "neighbours"]
)
def test_generation_with_a_cache_and_without(config):
    model = filtering(config=config)
    padded, mask, _ = left_padded(some_ids())
    for options in (
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": False, "num_beams": 3},
    ):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(4)
            made = model.generate(
                padded,
                attention_mask=mask,
                use_cache=use_cache,
                **options,
                **NEW,
            )
            found.append(made)
        assert found[0].shape == (2, 22)
        assert torch.equal(*found)
    greedy = model.generate(some_ids(), do_sample=False, **NEW)
    for options in (
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
    ):
        for one in range(2):
            ids = some_ids()[one : one + 1]
            found = model.generate(ids, do_sample=False, **options, **NEW)
            assert torch.equal(found[0], greedy[one])
    # padding on the left is no part of it
    made = model.generate(padded, attention_mask=mask, do_sample=False, **NEW)
    assert torch.equal(made[:, 4:], greedy)


def test_assisted_by_a_plain_llama():
    base, ids = llama(), some_ids(1)
    model = filtering(base, gain=0.95)
    greedy = model.generate(ids, do_sample=False, **NEW)
    found = model.generate(ids, do_sample=False, assistant_model=base, **NEW)
    assert torch.equal(found, greedy)


@pytest.mark.parametrize("granularity", ["token", "feature"])
def test_hidden_states_are_the_means(granularity):
    config = {"granularity": granularity, "prior_scale": "unit"}
    model, ids = filtering(config=config), some_ids()
    plain = llama()(ids, output_hidden_states=True).hidden_states
    found = model(ids, output_hidden_states=True)
    shapes = [each.shape for each in found.hidden_states]
    assert shapes == [each.shape for each in plain]
    expected = model.lm_head(found.hidden_states[-1])
    close(expected, found.logits, 1e-6)
    # also as tuples
    call = {"output_hidden_states": True, "return_dict": False}
    for made in (model(ids, **call), model.model(ids, **call)):
        assert [each.shape for each in made[-1]] == shapes


def test_weights_of_attention_are_refused_by_name():
    model, ids = filtering(), some_ids()
    model.set_attn_implementation("eager")
    for call in (model, model.model):
        with pytest.raises(ValueError, match="output_attentions: .*trace"):
            call(ids, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions: .*trace"):
        model(ids)


def test_the_other_arguments_of_a_llama():
    model, ids = filtering(), some_ids()
    expected = model(ids)
    found = model(ids, logits_to_keep=2).logits
    close(found, expected.logits[:, -2:], 1e-6)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, expected.logits)
    loss = model(ids, labels=ids).loss
    logits = expected.logits[:, :-1].flatten(0, 1)
    own = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    close(loss, own, 1e-6)
    model.resize_token_embeddings(70)
    assert model(ids).logits.shape[-1] == 70


def test_a_tinyllama_on_the_meta_device_grows_by_a_thousandth_at_most():
    """The sizes of TinyLlama/TinyLlama-1.1B-Chat-v1.0."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config)
    plain = sum(x.numel() for x in base.parameters())
    assert plain == 1_100_048_384
    for granularity, initial, added in [
        ("token", "constant", 23),
        ("token", "mlp", 22 + 2048 * 16 + 16 + 16 + 1),
        ("feature", "constant", 23 * 2048),
    ]:
        model = patch(
            base,
            BFTConfig(granularity=granularity),
            initial_precision=initial,
        )
        assert model.device.type == "meta"
        assert sum(x.numel() for x in model.parameters()) == plain + added
        own = sum(x.numel() for x in model.precision_parameters())
        assert own == added < plain / 1000


def test_other_models_are_refused_by_name():
    base = llama()
    for model in (None, base.model, patch(base), torch.nn.Linear(1, 1)):
        name = type(model).__name__
        with pytest.raises(TypeError, match=f"model: .*got {name}"):
            patch(model)
    prune.l1_unstructured(base.model.layers[0].mlp.up_proj, "weight", 0.5)
    with pytest.raises(ValueError, match="model: .*up_proj.weight_orig"):
        patch(base)
    short = llama()
    del short.model.layers[2]
    with pytest.raises(ValueError, match=r"model: .*without.*layers\.2"):
        patch(short)
    moved = llama()
    moved.model.layers[0]._hf_hook = object()
    with pytest.raises(ValueError, match="model: .*device_map"):
        patch(moved)
    quantised = llama()
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="model: .*quantised"):
        patch(quantised)


def test_no_transformers_is_imported_but_by_the_language_models():
    code = "import sys, bft_ref; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "try: import bft_ref.llm\n"
        "except ImportError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        text=True,
        capture_output=True,
    )
    assert "pip install 'bft_ref[llm]'" in found.stdout


def test_auto_knows_the_configuration():
    config = AutoConfig.for_model("bft_llama", num_hidden_layers=2)
    assert (
        AutoModelForCausalLM.from_config(patch(llama()).config)
        .model.layers[0]
        .is_first
    )
    assert config.bft_layers is None


def test_a_calibrated_model_in_a_copy_and_a_pickle(tmp_path):
    model, ids = filtering(), some_ids()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = patch(llama(seed=5))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(other(ids).logits, model(ids).logits)
    calibrate(other, ids, 0.5)
    with trace(model) as traces:
        model(ids)
    assert all(each.gain.median() > 0.6 for each in traces)
