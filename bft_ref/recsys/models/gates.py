"""What else may stand between the attention branch and the residual stream.

Each is a rival of the Kalman gain, or a control that could explain its
effect away: the gain is derived from precisions, these are constants or
learned.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bft_ref.support import checks

GateKind = Literal[
    "none",
    "constant",
    "scalar",
    "vector",
    "ligr",
    "qiu-head",
    "qiu-element",
]
GATES: tuple[GateKind, ...] = get_args(GateKind)


class Gate(nn.Module):
    """Scales the attention branch e before it is added to the state h.

    kind: ``none``; ``constant``, e times ``value``; ``scalar`` and
    ``vector``, a learned factor that starts at ``value`` (ReZero and
    LayerScale start near 0); ``ligr``, σ(W h) per feature, the same for the
    FFN branch (LiGR, arXiv 2502.03417); ``qiu-head`` and ``qiu-element``,
    σ(W x) on the heads' output before W_O, x the normed state (Qiu et al.,
    arXiv 2505.06708). The first four compute nothing new: Equation (13.3).

    Shapes: h, x, e (B, T, d); heads' output (B, T, H, d_h).
    Raises: ValueError for another kind.
    """

    def __init__(
        self, kind: GateKind, d_model: int, nhead: int, value: float = 1.0
    ):
        super().__init__()
        checks.choice("gate", kind, GATES)
        self.kind, self.value = kind, value
        if kind in ("scalar", "vector"):
            size = 1 if kind == "scalar" else d_model
            self.scale = nn.Parameter(torch.full((size,), float(value)))
        elif kind == "ligr":
            self.attention = nn.Linear(d_model, d_model)
            self.ffn = nn.Linear(d_model, d_model)
        elif kind.startswith("qiu"):
            opened = nhead if kind == "qiu-head" else d_model
            self.heads = nn.Linear(d_model, opened)

    def on_heads(self, output: Tensor, x: Tensor) -> Tensor:
        """The heads' output before the projection W_O."""
        if not self.kind.startswith("qiu"):
            return output
        gate = torch.sigmoid(self.heads(x))
        return output * gate.unflatten(-1, (output.shape[-2], -1))

    def on_attention(self, branch: Tensor, h: Tensor) -> Tensor:
        """The attention branch, just before it is added."""
        if self.kind == "constant":
            return branch * self.value
        if self.kind in ("scalar", "vector"):
            return branch * self.scale
        if self.kind == "ligr":
            return branch * torch.sigmoid(self.attention(h))
        return branch

    def on_ffn(self, branch: Tensor, h: Tensor) -> Tensor:
        """The feed-forward branch, just before it is added."""
        if self.kind == "ligr":
            return branch * torch.sigmoid(self.ffn(h))
        return branch
