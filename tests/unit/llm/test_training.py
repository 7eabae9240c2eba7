"""Training: Trainer, checkpointing, adapters, autocast, graphs."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from tests.unit.llm.factories import (
    FEATURE,
    NEIGHBOURS,
    TOKEN,
    close,
    filtering,
    left_padded,
    llama,
    some_ids,
)

pytestmark = [
    # the older name, which peft and transformers before 5.24 have
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing"),
    # transformers' Trainer on a machine without an accelerator
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream"),
]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
ALL += ["down_proj"]
PRECISION = ["process_noise", "initial_precision"]
CONFIGS = pytest.mark.parametrize(
    "config",
    [TOKEN, FEATURE, NEIGHBOURS],
    ids=["token", "feature", "neighbours"],
)


def gradients(model, ids, **options):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@CONFIGS
def test_every_parameter_learns_but_the_last_noise(config):
    model = filtering(config=config, initial_precision="mlp").train()
    padded, mask, _ = left_padded(some_ids())
    found = gradients(model, padded, attention_mask=mask)
    without = {*dict(model.named_parameters())} - {*found}
    assert without == {"model.layers.2.process_noise.weight"}
    for name, value in found.items():
        assert value.isfinite().all(), name
        dead = "initial_precision.layers.0" in name  # behind zeros
        assert dead or value.abs().sum() > 0, name


@pytest.mark.parametrize("options", [{}, {"mlp_bias": True}], ids=str)
def test_the_growths_gradient_may_be_dropped(options):
    ids, found = some_ids(), []
    for kept in (True, False):
        config = {**TOKEN, "jacobian_gradient": kept}
        model = filtering(llama(**options), config).train()
        found.append(gradients(model, ids))
    assert found[0].keys() == found[1].keys()
    name = "model.layers.0.mlp.up_proj.weight"
    change = (found[1][name] - found[0][name]).norm() / found[0][name].norm()
    assert 1e-6 < change < 1


@pytest.mark.parametrize("use_reentrant", [True, False])
@CONFIGS
def test_checkpointing_has_the_same_gradients(config, use_reentrant):
    model, ids = filtering(config=config).train(), some_ids()
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = gradients(model, ids)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = some_ids(1, 8, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trainer_goes_on_from_its_checkpoint(checkpointing, tmp_path):
    start = filtering(llama(num_hidden_layers=2))
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "gradient_checkpointing": checkpointing,
    }
    found = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer = Trainer(
            copy.deepcopy(start),
            TrainingArguments(str(tmp_path), **options),
            train_dataset=Sentences(),
        )
        trainer.train(resume_from_checkpoint=resume)
        found.append(trainer.model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)
    before = start.model.layers[0].process_noise.weight
    assert (found[0]["model.layers.0.process_noise.weight"] != before).all()


@CONFIGS
def test_autocast_is_the_same_to_eight_bits(config):
    model, ids = filtering(config=config), some_ids()
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids, labels=ids)
    close(found.logits.float(), expected, 0.1)
    found.loss.backward()
    for parameter in model.precision_parameters()[:-1]:
        assert parameter.grad.isfinite().all()
        assert parameter.grad.dtype == torch.float32


def test_compiled_for_other_lengths_without_a_break():
    model = filtering(llama(num_hidden_layers=1), NEIGHBOURS)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for tokens in (12, 9):
        ids = some_ids(2, tokens)
        with torch.no_grad():
            found = compiled(ids, use_cache=False).logits
            close(found, model(ids).logits, 1e-5)


def test_exported():
    model = filtering(llama(num_hidden_layers=1), NEIGHBOURS)
    ids = some_ids()
    program = torch.export.export(model, (ids,), {"use_cache": False})
    found = program.module()(ids, use_cache=False).logits
    close(found, model(ids).logits, 1e-5)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
@CONFIGS
def test_lora_merged_reloaded_and_switched_off(config, options, tmp_path):
    start, ids = filtering(config=config), some_ids()
    expected = start(ids).logits
    lora = LoraConfig(
        r=2,
        target_modules=ALL,
        modules_to_save=[*PRECISION, "input_layernorm"],
        init_lora_weights=False,
        **options,
    )
    model = get_peft_model(copy.deepcopy(start), lora).eval()
    saved = model.base_model.model.model.layers[1]
    with torch.no_grad():
        saved.process_noise.modules_to_save["default"].weight.add_(1.0)
        saved.input_layernorm.modules_to_save["default"].weight.mul_(1.3)
    changed = model(ids).logits
    assert (changed - expected).abs().max() > 0.1
    with model.disable_adapter():
        close(model(ids).logits, expected, 1e-5)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(start), tmp_path)
    close(again(ids).logits, changed, 1e-6)
    model(ids, labels=ids).loss.backward()
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    assert all("layers.2.process_noise" in name for name in without)
    merged = model.merge_and_unload()
    close(merged(ids).logits, changed, 1e-4)
    made = merged.generate(ids, max_new_tokens=3, do_sample=False)
    apart = again.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(made, apart)
