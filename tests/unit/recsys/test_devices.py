"""A model stays on its device: no tensor is made on another one.

Fake tensors compute nothing and refuse to mix devices, so that this is tested
where there is no GPU; "meta" stands for it.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bft_ref.config import BFTConfig
from bft_ref.recsys.models import build
from tests.unit.recsys.configs import make_config

SHAPE = {"n_items": 30, "d_model": 16, "max_length": 8}
ELSEWHERE = "meta"


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("sasrec", {}),
        ("sasrec", {"gate": "constant", "gate_value": 0.7}),
        ("sasrec", {"gate": "ligr"}),
        ("sasrec", {"bft": BFTConfig()}),
        ("sasrec", {"bft": BFTConfig(), "tau": "mlp"}),
        ("bert4rec", {}),
        ("bert4rec", {"bft": BFTConfig()}),
        ("hstu", {}),
        ("hstu", {"bft": BFTConfig()}),
    ],
    ids=str,
)
def test_a_step_and_the_scores_stay_on_the_model_s_device(model, given):
    with FakeTensorMode():
        with torch.device(ELSEWHERE):
            net = build(make_config(model, **SHAPE, **given))
        items = torch.ones(4, 8, dtype=torch.long, device=ELSEWHERE)
        out = net(items)
        out.sum().backward()
        assert out.device.type == ELSEWHERE
        assert net.eval().scores(items).device.type == ELSEWHERE
        with pytest.raises(RuntimeError):  # or nothing were proved
            out + torch.ones(16)
