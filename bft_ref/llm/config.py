"""What a Llama that filters has beyond a Llama's configuration."""

from dataclasses import asdict
from typing import Any, Literal, get_args

from transformers import LlamaConfig

from bft_ref.config import BFTConfig
from bft_ref.support import checks

#: what stands where a plain layer adds attention's output to the state
Variant = Literal["kalman", "plain", "constant", "gate", "tau_bias"]
#: log τ: one number for all tokens, or an MLP of the token's state
Initial = Literal["constant", "mlp"]

#: one precision a token, which costs least; values of a white normalised
#: state a priori, since a pretrained model's precision has no unit
DEFAULT = BFTConfig(granularity="token", prior_scale="unit")


class BFTLlamaConfig(LlamaConfig):
    """A LlamaConfig, and how its layers filter.

    bft: fields of :class:`bft_ref.BFTConfig` that differ from
    :data:`DEFAULT`. bft_layers: the indices of the layers that filter, one
    after another; None: all. bft_variant: ``kalman``, the filter, or a
    control: ``constant``, a learned factor for each layer in the gain's
    place; ``gate``, σ(W h + b) for each feature; ``tau_bias``, log τ in the
    scores and nothing else; ``plain``. bft_initial_precision: ``constant``,
    one learned τ for all tokens, or ``mlp``, of the token's state.
    bft_tau: its start, in 1/state². bft_dial: the share of the filter; at 0
    the model is the plain one, to rounding.

    Raises: ValueError, TypeError for options that are none.
    """

    model_type = "bft_llama"

    bft: dict | None = None
    bft_layers: list[int] | None = None
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
        self._check_layers()
        self._check_filter()

    @property
    def filter(self) -> BFTConfig:
        """The options of a layer."""
        return BFTConfig(**{**asdict(DEFAULT), **(self.bft or {})})

    @property
    def filtering(self) -> range:
        """The indices of the layers that filter."""
        if self.bft_layers is None:
            return range(self.num_hidden_layers)
        return range(self.bft_layers[0], self.bft_layers[-1] + 1)

    def _check_layers(self) -> None:
        if self.bft_layers is None:
            return
        count, given = self.num_hidden_layers, [*self.bft_layers]
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

    def _check_filter(self) -> None:
        try:
            config = self.filter
        except TypeError as error:
            raise ValueError(
                f"bft: expected fields of BFTConfig, got {self.bft}"
            ) from error
        unused = {
            "jacobian": ("hutchinson",),
            "variance_rule": ("row",),
            "innovation": ("difference",),
        }
        for name, refused in unused.items():
            if getattr(config, name) in refused:
                raise ValueError(
                    f"bft: {name}={getattr(config, name)!r} is not made for "
                    "a Llama, only for BFTLayer"
                )
        width = self.num_attention_heads * (self.head_dim or 0)
        if not config.project_variance and width != self.hidden_size:
            raise ValueError(
                "bft: project_variance=False needs heads as wide as the "
                f"state, {self.hidden_size} features, got {width}"
            )


def changed(config: BFTConfig) -> dict:
    """The fields that differ from :data:`DEFAULT`, for JSON."""
    default = asdict(DEFAULT)
    return {k: v for k, v in asdict(config).items() if v != default[k]}
