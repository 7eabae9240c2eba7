"""What a Llama that filters has beyond a Llama's configuration."""

from dataclasses import asdict, fields
from operator import index
from typing import Any, Literal, get_args

from transformers import LlamaConfig

from bft_ref.config import BFTConfig
from bft_ref.support import checks

#: what stands where a plain layer adds attention's output to the state
Variant = Literal["kalman", "plain", "constant", "gate", "tau_bias"]
#: log τ: one number for all tokens, or an MLP of the token's state
Initial = Literal["constant", "mlp"]

#: one precision a token and no gradient through J, which cost least; values
#: of a white normalised state a priori, since a pretrained model's precision
#: has no unit
DEFAULT = BFTConfig(
    granularity="token", prior_scale="unit", jacobian_gradient=False
)


class BFTLlamaConfig(LlamaConfig):
    """A LlamaConfig, and how its layers filter.

    bft: fields of :class:`bft_ref.BFTConfig`; those that are not given are
    :data:`DEFAULT`'s. bft_layers: the indices of the layers that filter, one
    after another; None: all. bft_variant: ``kalman``, the filter, or a
    control: ``constant``, a learned factor for each layer in the gain's
    place; ``gate``, σ(W h + b) for each feature; ``tau_bias``, log τ in the
    scores and nothing else; ``plain``. bft_initial_precision: ``constant``,
    one learned τ for all tokens, or ``mlp``, of the token's state.
    bft_tau: its start, in 1/state². bft_dial: the share of the filter; at 0
    the model is the plain one, to rounding.

    Raises: TypeError, ValueError for options that are none.
    """

    model_type = "bft_llama"

    bft: Any = None  # dict or BFTConfig
    bft_layers: Any = None  # iterable of int
    bft_variant: str = "kalman"
    bft_initial_precision: str = "constant"
    bft_tau: float = 1.0
    bft_dial: float = 1.0

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        checks.choice("bft_variant", self.bft_variant, get_args(Variant))
        checks.choice(
            "bft_initial_precision",
            self.bft_initial_precision,
            get_args(Initial),
        )
        checks.number("bft_tau", self.bft_tau, 0.0)
        checks.within("bft_dial", self.bft_dial, 0.0, 1.0)
        if self.bft_layers is not None:
            self.bft_layers = self._indices(self.bft_layers)
        self.bft = self._filter_options()
        self._check_filter()

    @property
    def filter(self) -> BFTConfig:
        """The options of a layer."""
        # from_pretrained(bft=…) sets what it was given after all checks
        return BFTConfig(**self._filter_options())

    @property
    def filtering(self) -> range:
        """The indices of the layers that filter."""
        if self.bft_layers is None:
            return range(self.num_hidden_layers)
        return range(self.bft_layers[0], self.bft_layers[-1] + 1)

    def _indices(self, layers: Any) -> list[int]:
        count = self.num_hidden_layers
        try:
            given = [index(each) for each in layers]
        except TypeError as error:
            raise TypeError(
                "bft_layers: expected indices of layers, such as "
                f"range({count}), got {layers!r}"
            ) from error
        if not given or given != [*range(given[0], given[0] + len(given))]:
            raise ValueError(
                "bft_layers: expected indices one after another, such as "
                f"range(22, 30), got {given}; precision that leaves the "
                "layers is gone"
            )
        if not 0 <= given[0] <= given[-1] < count:
            raise ValueError(
                f"bft_layers: expected indices in 0…{count - 1}, got {given}"
            )
        return given

    def _filter_options(self) -> dict[str, Any]:
        """All of them, so that a checkpoint outlives our defaults."""
        given, known = self.bft or {}, [f.name for f in fields(BFTConfig)]
        if isinstance(given, BFTConfig):
            return asdict(given)
        if not isinstance(given, dict) or not {*given} <= {*known}:
            raise ValueError(
                "bft: expected fields of BFTConfig by name, of "
                f"{', '.join(known)}; got {given!r}"
            )
        return {**asdict(DEFAULT), **given}

    def _check_filter(self) -> None:
        config = self.filter
        refused = {
            "jacobian": "hutchinson",
            "variance_rule": "row",
            "innovation": "difference",
            "dynamics": "ornstein_uhlenbeck",
        }
        for name, value in refused.items():
            if getattr(config, name) == value:
                raise ValueError(
                    f"bft: {name}={value!r} is not made for a Llama, only "
                    "for BFTLayer"
                )
        width = self.num_attention_heads * (self.head_dim or 0)
        if not config.project_variance and width != self.hidden_size:
            raise ValueError(
                "bft: project_variance=False needs heads as wide as the "
                f"state, {self.hidden_size} features, got {width}"
            )
