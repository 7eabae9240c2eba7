"""Every numbered equation of chapter 13, from a source of its own.

Densities from scipy, models compared with models.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats

from bft_ref import BFTConfig
from bft_ref.recsys.models import SASRec, SASRecConfig
from bft_ref.recsys.train.diagnostics import _constant_gains
from tests.equations import equation


@equation(
    "13.1",
    r"\mathrm{softmax}_i(\hat h\cdot v_i) = \frac{\pi_i\,\mathcal N(\hat h;"
    r"\, v_i, I)}{\sum_k \pi_k\,\mathcal N(\hat h;\, v_k, I)}, \qquad"
    r" \pi_i \propto e^{\lVert v_i\rVert^2/2}",
)
def test_a_score_is_a_class_of_gaussians():
    """A model's own scores, and scipy's densities of its items."""
    torch.manual_seed(1)
    config = SASRecConfig(
        n_items=11, d_model=6, nhead=2, dim_feedforward=12, dropout=0.0
    )
    model = SASRec(config).double().eval()
    with torch.no_grad():
        model.items.weight.mul_(2.5)
    items = torch.tensor([[3, 5, 3, 8]])
    found = model.scores(items)[0, 1:].softmax(0).numpy()
    with torch.no_grad():
        h = model.query(model(items))[0, -1].numpy()
    places = model.item_embeddings()[0][1:12].detach().numpy()
    prior = np.exp((places**2).sum(1) / 2)
    density = [stats.multivariate_normal(v, 1.0).pdf(h) for v in places]
    posterior = prior * density / (prior * density).sum()
    assert_allclose(found, posterior, rtol=1e-9)


SMALL = SASRecConfig(
    n_items=20,
    d_model=8,
    nhead=2,
    dim_feedforward=16,
    num_layers=1,
    dropout=0.0,
)


def pair(layers=1, source="unit"):
    """A plain model with a constant gate, a filter with its weights."""
    torch.manual_seed(3)
    config = replace(SMALL, num_layers=layers)
    plain = SASRec(replace(config, gate="constant", gate_value=0.3))
    config = replace(config, bft=BFTConfig(), tau=source)
    filtered = SASRec(config, frequency=np.arange(21) ** 2)
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.4)
    own, state = plain.state_dict(), filtered.state_dict()
    for name in state:
        short = name.replace("self_attn.in_proj_", "in_proj.")
        short = short.replace("self_attn.", "")
        if short in own:
            state[name] = own.pop(short)
    assert not own
    filtered.load_state_dict(state)
    return plain.double().eval(), filtered.double().eval()


@equation(
    "13.2",
    r"h'_t = h_t + c\circ e_t, \qquad e_t = W_O\sum_{j\le t}\alpha_{tj}\,"
    r"v_j + b_O",
)
def test_a_constant_gain_is_a_scaled_branch():
    """A whole filter with its gain held at c, and the gated plain model."""
    items = torch.tensor([[3, 1, 7, 7, 12, 19]])
    plain, filtered = pair()
    c = torch.full((8,), 0.3, dtype=torch.float64)
    with torch.no_grad():
        free = filtered(items)
        with _constant_gains(filtered, [c]):
            held = filtered(items)
        torch.testing.assert_close(held, plain(items))
        assert (free - held).abs().max() > 1e-3
        # unequal precisions: the weights are still the filter's own
        plain, filtered = pair(source="frequency")
        with _constant_gains(filtered, [c]):
            assert (filtered(items) - plain(items)).abs().max() > 1e-3
        # two layers: J makes the precisions of the second unequal
        plain, filtered = pair(layers=2)
        with _constant_gains(filtered, [c, c]):
            assert (filtered(items) - plain(items)).abs().max() > 1e-6


@equation(
    "13.3",
    r"h + c\circ(W_O\,\mu + b_O) = h + (\mathrm{diag}(c)\,W_O)\,\mu +"
    r" c\circ b_O",
)
@pytest.mark.parametrize("gate", ["constant", "scalar", "vector"])
def test_a_constant_folds_into_the_projection(gate):
    items = torch.tensor([[3, 1, 7, 7, 12, 19]])
    torch.manual_seed(4)
    config = replace(SMALL, num_layers=2)
    gated = SASRec(replace(config, gate=gate, gate_value=0.3)).double()
    folded = SASRec(config).double()
    for p in gated.parameters():
        torch.nn.init.normal_(p, std=0.5)
    folded.load_state_dict(gated.state_dict(), strict=False)
    assert not torch.allclose(gated(items), folded(items))
    with torch.no_grad():
        for own, theirs in zip(
            folded.encoder.layers, gated.encoder.layers, strict=True
        ):
            c = getattr(theirs.gate, "scale", torch.tensor([0.3]))
            own.out_proj.weight.copy_(
                torch.diag(c.expand(8).double()) @ theirs.out_proj.weight
            )
            own.out_proj.bias.mul_(c)
    torch.testing.assert_close(gated(items), folded(items))


def test_ligr_does_not_fold():
    """No single factor a feature explains what the gate did to a token."""
    torch.manual_seed(5)
    model = SASRec(replace(SMALL, gate="ligr")).double()
    gate = model.encoder.layers[0].gate
    h, e = torch.randn(2, 1, 6, 8, dtype=torch.float64)
    factor = gate.on_attention(e, h) / e
    assert (factor.std(1) > 0.01).all()
