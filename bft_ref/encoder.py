"""A stack of layers: a filter over depth."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.layer import BFTLayer, LayerTrace
from bft_ref.support import checks, door
from bft_ref.support.cache import KeyValueCache, all_or_nothing


class BFTEncoder(nn.Module):
    """``num_layers`` copies of a layer, as nn.TransformerEncoder has them.

    Given a tensor it returns a tensor, given a :class:`Belief` a Belief. A
    tensor starts from the learned precision τ, ``log_initial_precision``,
    (d,) or (1,); a Belief brings its own (from
    :class:`bft_ref.initial_precision.ItemPrecision`, an MLP, or known
    measurement errors).

    Arguments: ``layer``, deep-copied ``num_layers`` times, so that all start
    from the same weights, as in PyTorch; ``norm``, a final module on the mean;
    ``initial_precision`` τ > 0 in 1/state²; ``checkpointing`` recomputes each
    layer in the backward pass. The last layer's Q reaches nothing but the
    precision of the output, so a loss on the mean alone gives it no gradient,
    and DDP needs ``find_unused_parameters=True``.
    Equation (9.5).
    """

    def __init__(
        self,
        layer: BFTLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        initial_precision: float = 1.0,
        checkpointing: bool = False,
    ):
        super().__init__()
        if not isinstance(layer, BFTLayer):
            raise TypeError(
                f"layer: expected a BFTLayer, got {type(layer).__name__}"
            )
        if type(num_layers) is not int or num_layers < 1:
            raise ValueError(
                f"num_layers: expected a positive integer, got {num_layers!r}"
            )
        checks.number("initial_precision", initial_precision, 0.0)
        self.layers = nn.ModuleList(
            copy.deepcopy(layer) for _ in range(num_layers)
        )
        self.norm = norm
        self.checkpointing = checkpointing
        self.log_initial_precision = nn.Parameter(
            torch.full_like(layer.log_process_noise, initial_precision).log()
        )

    @classmethod
    def from_torch(
        cls,
        encoder: nn.TransformerEncoder,
        config: BFTConfig | None = None,
        *,
        initial_precision: float = 1.0,
    ) -> "BFTEncoder":
        """A BFT encoder with the weights of a plain Transformer encoder.

        Takes over sizes, activation, norm order and dropout. How visible the
        patch is at first is set by ``initial_precision`` and
        ``config.process_noise``: in a patch that cannot be seen SGD moves
        nothing, and Adam log Q by up to its rate a step, wherever the sign
        of a tiny gradient points. With the unit prior, τ → 0 and Q → ∞ a
        pre-norm encoder is the plain one. Post-norm gains tend to 1 too, but
        there λ̄ stays unequal, and in the weights, as each norm divides by a
        token's own scale after Q.
        Each layer keeps its own activation, dropout and epsilons.
        Raises: TypeError for anything but nn.TransformerEncoder, or a layer
        of another class than PyTorch's own; ValueError for a layer whose
        dropouts differ.
        """
        if (
            not isinstance(encoder, nn.TransformerEncoder)
            or type(encoder).forward is not nn.TransformerEncoder.forward
        ):
            raise TypeError(
                "encoder: expected nn.TransformerEncoder, got "
                f"{type(encoder).__name__}"
            )
        ours = {  # one for each, though it may stand there several times
            layer: BFTLayer.from_torch(layer, config)
            for layer in encoder.layers
        }
        result = cls(
            ours[encoder.layers[0]],
            len(encoder.layers),
            copy.deepcopy(encoder.norm),
            initial_precision=initial_precision,
        )
        result.layers = nn.ModuleList(ours[layer] for layer in encoder.layers)
        return result.train(encoder.training)

    def steps(
        self, src: Belief | Tensor, *arguments, **options
    ) -> tuple[Belief | Tensor, list[LayerTrace]]:
        """What :meth:`forward` gives, and the internals of every layer.

        Under FSDP2: see :meth:`bft_ref.BFTLayer.step`.
        """
        traces: list[LayerTrace] = []
        out = self(src, *arguments, traces=traces, **options)
        return out, traces

    def forward(
        self,
        src: Belief | Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        caches: list[KeyValueCache] | None = None,
        traces: list[LayerTrace] | None = None,
    ) -> Belief | Tensor:
        """The belief after every layer; a tensor for a tensor.

        Shapes and masks: as :class:`BFTLayer`. ``caches``: one per layer, for
        incremental decoding (make them with :meth:`make_caches`). The layers'
        internals are appended to ``traces``; :meth:`steps` hands them back.
        Raises: as :class:`BFTLayer`; ValueError for a wrong number of caches.
        """
        belief = src
        if isinstance(belief, Tensor):
            log = self.log_initial_precision.expand(*belief.shape[:-1], -1)
            belief = Belief(belief, log)
        door.traces(traces)
        recompute = self.checkpointing and self.training
        slots = self._slots(caches, recompute)
        arguments = (mask, src_key_padding_mask, is_causal)
        layers = cast(Iterable[BFTLayer], self.layers)
        found: list[LayerTrace] = []
        with all_or_nothing(caches or []):
            for layer, cache in zip(layers, slots, strict=True):
                run: Callable = layer if traces is None else layer.step
                run = partial(run, cache=cache)
                if recompute:
                    run = partial(checkpoint, run, use_reentrant=False)
                belief = run(belief, *arguments)
                if traces is not None:
                    belief, trace = belief
                    found.append(trace)
            if self.norm is not None:
                belief = belief._replace(mean=self.norm(belief.mean))
        if traces is not None:
            traces += found
        return belief.mean if isinstance(src, Tensor) else belief

    def _slots(
        self, caches: list[KeyValueCache] | None, recompute: bool
    ) -> Sequence[KeyValueCache | None]:
        """A cache, or None, for each layer."""
        if caches is None:
            return [None] * len(self.layers)
        if not isinstance(caches, list | tuple):
            raise TypeError(
                "caches: expected a list of them (see make_caches), got "
                f"{type(caches).__name__}"
            )
        if recompute:
            raise ValueError(
                "caches: expected None while checkpointing recomputes layers, "
                f"got {len(caches)}"
            )
        if len(caches) != len(self.layers):
            raise ValueError(
                f"caches: expected {len(self.layers)}, got {len(caches)}"
            )
        return caches

    def make_caches(self) -> list[KeyValueCache]:
        """Empty key/value caches, one per layer."""
        return [KeyValueCache() for _ in self.layers]
