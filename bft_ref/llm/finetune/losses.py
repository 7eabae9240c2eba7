"""What fine-tuning minimises at the answer's tokens."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from bft_ref.support import checks

Loss = Literal["sft", "focal"]


def answer_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    loss: Loss = "sft",
    gamma: float = 2.0,
    smoothing: float = 0.0,
) -> Tensor:
    """The mean loss of the answer's tokens.

    ``sft`` is cross-entropy, with ``smoothing`` of the target's weight spread
    evenly over the vocabulary; ``focal`` weighs it by (1 − p)^γ, p the
    label's probability, and learns less from what is known already (Lin et
    al. 2017). Shapes: ``logits`` (n, V), ``labels`` (n,).
    Raises: ValueError for another loss, γ < 0, or smoothing outside [0, 1].
    """
    checks.choice("loss", loss, ("sft", "focal"))
    checks.within("gamma", gamma, 0.0)
    checks.within("smoothing", smoothing, 0.0, 1.0)
    if loss == "sft":
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)
    missed = F.cross_entropy(logits, labels, reduction="none")
    # of nothing missed a power below one has no finite slope
    doubt = -(-missed).expm1().clamp(max=-1e-12)
    return (doubt.pow(gamma) * missed).mean()
