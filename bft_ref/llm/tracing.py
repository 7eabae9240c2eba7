"""What the layers of a model saw, for plots and tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bft_ref.layer import LayerTrace
from bft_ref.llm.layer import BFTLlamaDecoderLayer


@contextmanager
def trace(model: Any) -> Iterator[list[LayerTrace]]:
    """A list that is filled when the block ends: a trace a filtering layer.

    Of the last call of the model in the block; in ``generate`` with a cache
    that is the last token's. Blocks may be nested. ``model`` is what
    :func:`bft_ref.llm.patch` gives, or anything around it, such as peft's::

        with trace(model) as traces:
            model(input_ids)
        traces[0].gain  # (B, T, 1)

    Raises: TypeError for a model without a layer that filters; RuntimeError
    if it was not called in the block.
    """
    layers = [
        each
        for each in getattr(model, "modules", list)()
        if isinstance(each, BFTLlamaDecoderLayer)
        and each.config.bft_variant == "kalman"
    ]
    if not layers:
        raise TypeError(
            "model: expected one with layers that filter, such as patch(llama)"
            f" gives, got {type(model).__name__} without"
        )
    traces: list[LayerTrace] = []
    around = [each.traces for each in layers]
    for each in layers:
        each.traces = []
    try:
        yield traces
        if not all(each.traces for each in layers):
            raise RuntimeError(
                "trace: expected the model to be called in the block, "
                "and it was not"
            )
        traces.extend(each.traces[-1] for each in layers if each.traces)
    finally:
        for each, outer in zip(layers, around, strict=True):
            if outer is not None and each.traces:
                outer[:] = each.traces
            each.traces = outer
