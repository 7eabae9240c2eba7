"""The filter inside RecTools' SASRec.

RecTools asks for other versions than the book is tested with: NumPy 1 before
Python 3.13, pandas 2. Beside them it runs as experiments/README.md says.
"""

import pytest

pytest.importorskip(
    "rectools.models.nn.transformers",
    reason="needs RecTools, whose pins contradict requirements.txt",
)

import numpy as np
import pandas as pd
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import BERT4RecModel, SASRecModel, load_model
from rectools.models.nn.transformers.net_blocks import PreLNTransformerLayers

from bft_ref.recsys.rectools import BFTBackbone, BFTTransformerLayers
from tests.factories import randomise

# of Lightning: few workers, no logger, where a checkpoint is
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, TOKENS, D, HEADS, BLOCKS = 3, 6, 8, 2, 2
ITEMS = torch.tensor(
    [[0, 0, 0, 5, 2, 7], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 9]]
)
CAUSAL = ~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
#: RecTools' names → ours
NAMES = {
    "multi_head_attn.": "self_attn.",
    "layer_norm_": "norm",
    "feed_forward.ff_linear_": "linear",
}


def make(seed=0, **given):
    torch.manual_seed(seed)
    layers = BFTTransformerLayers(BLOCKS, D, HEADS, 0.0, **given)
    return randomise(layers, seed).eval()


def seqs(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, TOKENS, D, generator=generator)


def run(layers, x, items=ITEMS, attn_mask=CAUSAL):
    mask = (items != 0).unsqueeze(-1)
    return layers(x, mask, attn_mask, None, batch={"x": items})


def test_a_filter_that_trusts_each_observation_is_the_pre_ln_stack():
    """Unit prior, τ → 0, Q → ∞: RecTools' own layers, weights and all."""
    torch.manual_seed(0)
    plain = randomise(PreLNTransformerLayers(BLOCKS, D, HEADS, 0.0)).eval()
    ours = make(config={"prior_scale": "unit"})
    with torch.no_grad():
        ours.log_tau.fill_(-80)
        for layer, block in zip(
            ours.layers, plain.transformer_blocks, strict=True
        ):
            weights = {}
            for name, value in block.state_dict().items():
                for theirs, own in NAMES.items():
                    name = name.replace(theirs, own)
                weights[name] = value
            layer.load_state_dict(weights)
            layer.log_process_noise.fill_(80)
    items = ITEMS[1:2]
    found = run(ours, seqs()[1:2], items)
    want = plain(seqs()[1:2], None, CAUSAL, None)
    torch.testing.assert_close(
        found, ours.last_layernorm(want), rtol=1e-4, atol=1e-5
    )


def test_padding_changes_nothing_that_is_seen():
    layers, x = make(), seqs()
    layers.with_items(10)
    randomise(layers)
    seen = ITEMS != 0
    before = run(layers, x)
    after = run(layers, torch.where(seen.unsqueeze(-1), x, 1e3 * x + 7))
    assert before.isfinite().all()
    assert torch.equal(before[seen], after[seen])
    alone = run(layers, x[:1, 3:], ITEMS[:1, 3:], CAUSAL[3:, 3:])
    torch.testing.assert_close(before[:1, 3:], alone, rtol=1e-5, atol=1e-6)


def test_each_item_has_its_tau():
    """The last item's neighbours weigh more where their τ is larger."""
    layers, x = make(), seqs()
    same = run(layers, x)
    layers.with_items(10)
    torch.testing.assert_close(run(layers, x), same)
    with torch.no_grad():
        layers.log_tau[2] += 3
    moved = (run(layers, x) - same).abs().amax(-1) > 1e-4
    met = (ITEMS == 2).cumsum(1) > 0
    assert torch.equal(moved, met)
    with pytest.raises(ValueError, match="batch: expected RecTools' batch"):
        layers(x, (ITEMS != 0).unsqueeze(-1), CAUSAL, None)


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"tau_start": 0.0}, ValueError, "tau_start: expected a number in"),
        ({"config": {"colour": 1}}, TypeError, "colour"),
        ({"config": {"prior_dof": -1.0}}, ValueError, "prior_dof"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_options_that_do_not_fit_are_named(given, error, said):
    with pytest.raises(error, match=said):
        make(**given)


def dataset(users=40, items=30, length=9):
    """Cycles: after item i comes i + 1."""
    rng = np.random.default_rng(0)
    rows = [
        (user, f"item {(start + t) % items}", 1.0, pd.Timestamp(1000 * t))
        for user, start in enumerate(rng.integers(items, size=users))
        for t in range(length - user % 5)
    ]
    names = [Columns.User, Columns.Item, Columns.Weight, Columns.Datetime]
    return Dataset.construct(pd.DataFrame(rows, columns=names))


def fitted(kind, **given):
    torch.manual_seed(0)
    model = kind(
        n_blocks=1,
        n_heads=2,
        n_factors=16,
        session_max_len=8,
        dropout_rate=0.0,
        batch_size=16,
        epochs=30,
        lr=1e-2,
        transformer_layers_type=BFTTransformerLayers,
        transformer_layers_kwargs={"config": {"granularity": "token"}},
        recommend_torch_device="cpu",
        **given,
    )
    return model.fit(dataset())


def recommended(model):
    return model.recommend(
        users=range(40), dataset=dataset(), k=5, filter_viewed=True
    )


@pytest.mark.parametrize("kind", [SASRecModel, BERT4RecModel])
@pytest.mark.parametrize("padding", [False, True])
def test_it_trains_and_is_kept(kind, padding, tmp_path):
    model = fitted(
        kind, backbone_type=BFTBackbone, use_key_padding_mask=padding
    )
    layers = model.torch_model.transformer_layers
    assert len(layers.log_tau) == model.torch_model.item_model.n_items
    moved = layers.log_tau.detach().abs()
    assert moved[-30:].min() > 0 and moved.max() < 3
    found = recommended(model)
    if kind is SASRecModel:
        first = found[found[Columns.Rank] == 1]
        df = dataset().get_raw_interactions()
        last = df.groupby(Columns.User)[Columns.Item].last()
        numbers = [int(x.split()[1]) for x in last[first[Columns.User]]]
        want = [f"item {(n + 1) % 30}" for n in numbers]
        assert np.mean(first[Columns.Item].to_numpy() == want) > 0.8
    model.save(tmp_path / "model.pkl")
    again = recommended(load_model(tmp_path / "model.pkl"))
    pd.testing.assert_frame_equal(again, found)


def test_without_the_backbone_there_is_one_tau():
    model = fitted(SASRecModel)
    assert model.torch_model.transformer_layers.log_tau.shape == (1,)
    assert len(recommended(model)) == 200
