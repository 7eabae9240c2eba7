"""Options: kept in JSON, and refused by name where they do not fit."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig

from bft_ref import BFTConfig
from bft_ref.llm import DEFAULT, BFTLlamaConfig, patch
from tests.unit.llm.factories import LAYERS, llama


@pytest.mark.parametrize(
    "layers", [range(1, 3), [1, 2], (1, 2), np.arange(1, 3), iter([1, 2])]
)
def test_indices_of_layers_however_they_are_given(layers, tmp_path):
    config = BFTLlamaConfig(num_hidden_layers=LAYERS, bft_layers=layers)
    assert config.bft_layers == [1, 2]
    assert config.filtering == range(1, 3)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).bft_layers == [1, 2]


def test_a_filters_options_come_back_from_json(tmp_path):
    given = BFTConfig(granularity="feature", prior_dof=2.5)
    config = BFTLlamaConfig(bft=given, bft_tau=0.3, bft_dial=0.5)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text("utf8"))
    assert written["model_type"] == "bft_llama"
    assert written["bft"]["prior_dof"] == 2.5
    found = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, BFTLlamaConfig)
    assert found.filter == given
    assert (found.bft_tau, found.bft_dial) == (0.3, 0.5)
    assert BFTLlamaConfig().filter == DEFAULT


@pytest.mark.parametrize(
    "options,error,said",
    [
        ({"layers": 3}, TypeError, r"bft_layers: .*range\(3\), got 3"),
        ({"layers": "ab"}, TypeError, "bft_layers: .*got 'ab'"),
        ({"layers": [1.0]}, TypeError, r"bft_layers: .*got \[1.0\]"),
        ({"layers": []}, ValueError, r"bft_layers: .*got \[\]"),
        ({"layers": [0, 2]}, ValueError, r"bft_layers: .*got \[0, 2\]"),
        ({"layers": [2, 3]}, ValueError, r"bft_layers: .*0…2, got \[2, 3\]"),
        ({"layers": [-1]}, ValueError, r"bft_layers: .*got \[-1\]"),
        ({"filter": {}}, TypeError, "filter: .*BFTConfig, got dict"),
        ({"variant": "foo"}, ValueError, "bft_variant: .*kalman.*'foo'"),
        ({"initial_precision": 3}, ValueError, "bft_initial_precision: .*3"),
        ({"tau": 0}, ValueError, "bft_tau: .*got 0"),
        ({"tau": "1"}, TypeError, "bft_tau: .*got str"),
        ({"tau": float("nan")}, ValueError, "bft_tau: .*got nan"),
        ({"dial": 2}, ValueError, r"bft_dial: .*\[0, 1\], got 2"),
        ({"dial": None}, TypeError, "bft_dial: .*got NoneType"),
    ],
)
def test_bad_options_are_refused_by_name(options, error, said):
    with pytest.raises(error, match=said):
        patch(llama(), **options)


@pytest.mark.parametrize(
    "bft,error,said",
    [
        ({"foo": 1}, ValueError, "bft: .*granularity.*got {'foo': 1}"),
        ([1], ValueError, r"bft: .*got \[1\]"),
        ({"granularity": "x"}, ValueError, "granularity: .*'x'"),
        ({"prior_dof": "a"}, TypeError, "prior_dof: .*'a'"),
        ({"jacobian": "hutchinson"}, ValueError, "bft: jacobian='hutch"),
        ({"innovation": "difference"}, ValueError, "bft: innovation="),
        ({"dynamics": "ornstein_uhlenbeck"}, ValueError, "bft: dynamics="),
        (
            {"granularity": "feature", "variance_rule": "row"},
            ValueError,
            "bft: variance_rule=",
        ),
    ],
)
def test_what_a_llamas_filter_cannot_be_is_refused_by_name(bft, error, said):
    with pytest.raises(error, match=said):
        BFTLlamaConfig(bft=bft)


def test_heads_wider_than_the_state_need_their_projection():
    with pytest.raises(ValueError, match="project_variance.*32.*got 48"):
        patch(llama(head_dim=12), BFTConfig(project_variance=False))


def test_a_llamas_own_configuration_is_kept():
    base = llama(attention_bias=True, tie_word_embeddings=True)
    config = patch(base).config
    for name, value in LlamaConfig.to_diff_dict(base.config).items():
        if name not in ("model_type", "transformers_version"):
            assert getattr(config, name) == value, name
