"""Layers and beliefs to test with: nothing at its default, no unit scale."""

import re

import numpy as np
import torch

from bft_ref import Belief, BFTConfig, BFTEncoder, BFTLayer

D_MODEL, HEADS, WIDTH = 8, 2, 12
#: Sizes of states and log precisions: at both ends of float32, short of
#: h²λ > 1e38, where the derivative of log D itself is no number of it.
ENDS = [
    (size, log)
    for size in [0.0, 1e-20, 1e-6, 1.0, 1e4]
    for log in [-80.0, -70.0, 60.0, 80.0]
    if size < 2 or log < 60
]


def label(value):
    """A parameter's name in a test's: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def randomise(module, seed=1):
    """Move every parameter away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            parameter += 0.3 * noise.to(parameter)
    return module


def make_layer(
    *,
    d_model=D_MODEL,
    heads=HEADS,
    width=WIDTH,
    activation="gelu",
    norm_first=True,
    dropout=0.0,
    dtype=torch.float64,
    seed=1,
    options=(),
    **config,
):
    """An evaluated layer with random parameters; config as BFTConfig."""
    torch.manual_seed(seed)
    layer = BFTLayer(
        d_model,
        heads,
        width,
        dropout,
        activation,
        norm_first=norm_first,
        dtype=dtype,
        config=BFTConfig(**config),
        **dict(options),
    )
    return randomise(layer, seed).eval()


def make_encoder(num_layers=2, *, seed=1, checkpointing=False, **arguments):
    layer = make_layer(seed=seed, **arguments)
    encoder = BFTEncoder(
        layer, num_layers, initial_precision=0.7, checkpointing=checkpointing
    )
    return randomise(encoder, seed + 1).to(layer.log_process_noise).eval()


def make_belief(
    batch=2,
    tokens=5,
    d_model=D_MODEL,
    *,
    features=None,
    dtype=torch.float64,
    seed=3,
    spread=1.3,
):
    """Means of scale 1.7, precisions around 0.6 that differ by token."""
    generator = torch.Generator().manual_seed(seed)
    at = {"generator": generator, "dtype": torch.float64}
    mean = 1.7 * torch.randn(batch, tokens, d_model, **at) + 0.4
    log = spread * torch.randn(batch, tokens, features or d_model, **at) - 0.5
    return Belief(mean.to(dtype), log.to(dtype))


def numpy_parameters(module):
    return {
        name: value.detach().double().numpy()
        for name, value in module.state_dict().items()
    }


def left_padding(batch, tokens, lengths):
    """(batch, tokens), True where hidden: the first tokens − length."""
    hidden = np.zeros((batch, tokens), dtype=bool)
    for row, length in enumerate(lengths):
        hidden[row, : tokens - length] = True
    return torch.from_numpy(hidden)
