"""What a token believes: a Gaussian, its precision kept as a logarithm."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32, log_mean_exp


class Belief(NamedTuple):
    """A Gaussian belief N(mean, 1/precision), feature by feature.

    Shapes: ``mean`` (..., d) in units of the state; ``log_precision``
    (..., d), or (..., 1) for one precision per token, the logarithm of
    1/state². Make one from precisions or variances with :meth:`of`. Whatever
    the dtypes, precision is computed in float32 or wider.
    """

    mean: Tensor
    log_precision: Tensor

    @classmethod
    def of(
        cls,
        mean: Tensor,
        *,
        precision: Tensor | float | None = None,
        variance: Tensor | float | None = None,
        log_precision: Tensor | float | None = None,
    ) -> "Belief":
        """A checked belief from exactly one of precision, variance, log.

        Shapes: ``mean`` (..., d); the other must broadcast with it: (..., d),
        (..., 1) for one per token, (d,) for one per feature, or a number.
        Raises: TypeError unless exactly one is given; ValueError if a
        precision or variance is not positive and finite, or a value is NaN.
        """
        given = {
            name: value
            for name, value in [
                ("precision", precision),
                ("variance", variance),
                ("log_precision", log_precision),
            ]
            if value is not None
        }
        if len(given) != 1:
            raise TypeError(
                "Belief.of: expected exactly one of precision, variance, "
                f"log_precision, got {sorted(given) or 'none'}"
            )
        checks.finite("mean", mean)
        (name, value), *_ = given.items()
        dtype = (
            None if isinstance(value, Tensor) else at_least_float32(mean).dtype
        )
        if torch.as_tensor(value).dtype == torch.bool:
            raise TypeError(f"{name}: expected numbers, got a boolean")
        x = at_least_float32(
            torch.as_tensor(value, device=mean.device, dtype=dtype)
        )
        checks.broadcastable(name, x, "mean", mean)
        if torch.broadcast_shapes(x.shape, mean.shape) != mean.shape:
            raise ValueError(
                f"{name}: expected a shape that broadcasts to that of mean, "
                f"{tuple(mean.shape)}, got {tuple(x.shape)}"
            )
        if x.dim() < mean.dim():
            x = x.expand(mean.shape)
        else:
            x = x.expand((*mean.shape[:-1], *x.shape[-1:]))
        if name == "log_precision":
            return cls(mean, checks.finite(name, x))
        log = checks.positive(name, x).log()
        return cls(mean, log if name == "precision" else -log)

    @property
    def precision(self) -> Tensor:
        """1/variance, (..., d) or (..., 1), in 1/state²."""
        return at_least_float32(self.log_precision).exp()

    @property
    def variance(self) -> Tensor:
        """1/precision, (..., d) or (..., 1), in state²."""
        return (-at_least_float32(self.log_precision)).exp()

    @property
    def log_token_precision(self) -> Tensor:
        """log λ̄, (...): the mean of λ over features (our choice)."""
        if self.log_precision.shape[-1] == 1:
            return at_least_float32(self.log_precision).squeeze(-1)
        return log_mean_exp(self.log_precision).squeeze(-1)

    def to(self, *args, **kwargs) -> "Belief":
        """The belief elsewhere, or in another dtype, as ``Tensor.to`` has it.

        The precision stays in float32 or wider, whatever the mean becomes.
        """
        mean = self.mean.to(*args, **kwargs)
        log = self.log_precision.to(mean.device)
        if mean.dtype != self.mean.dtype:
            log = log.to(torch.promote_types(mean.dtype, torch.float32))
        return Belief(mean, log)

    def detach(self) -> "Belief":
        """The same belief, without its history of gradients."""
        return Belief(self.mean.detach(), self.log_precision.detach())

    @property
    def at(self) -> "_Tokens":
        """Beliefs of some tokens: ``belief.at[:, -1]`` is each row's last.

        An index stops before the features, which mean and precision may have
        in different number.
        """
        return _Tokens(self)


@dataclass(frozen=True)
class _Tokens:
    belief: Belief

    def __getitem__(self, index) -> Belief:
        mean, log = self.belief
        log = log.expand(*mean.shape[:-1], log.shape[-1])
        whole = [*index] if isinstance(index, tuple) else [index]
        return Belief(*(x[(*whole, slice(None))] for x in (mean, log)))


def fuse(a: Belief, b: Belief) -> Belief:
    """The belief after two independent Gaussian beliefs about one quantity.

    Precisions add, means are averaged by precision: Bayes' rule for a
    Gaussian prior and a Gaussian likelihood.

    Shapes: those of ``a`` and ``b`` broadcast; where both know nothing (log:
    -inf), so does the result's mean: it is NaN. The mean keeps the dtype of
    the means, the log precision is float32 or wider. Raises: TypeError for
    means that are no floats. Equations (2.1), (2.2).
    """
    means = [checks.floating("mean", belief.mean) for belief in (a, b)]
    dtype = torch.promote_types(*(mean.dtype for mean in means))
    x, y = (at_least_float32(mean) for mean in means)
    p, q = (at_least_float32(belief.log_precision) for belief in (a, b))
    # x + K(y − x) would lose a small y beside a large x, even at K = 1
    mean = torch.sigmoid(p - q) * x + torch.sigmoid(q - p) * y
    return Belief(mean.to(dtype), torch.logaddexp(p, q))


def discount(log_precision: Tensor, log_process_noise: Tensor) -> Tensor:
    """log precision after the state has moved by noise of variance Q.

    1/λ'' = 1/λ + Q: variances add, so λ'' stays below both λ and 1/Q.

    Shapes: broadcast. Units: log 1/state², log state²; float32 or wider.
    Equations (2.6) and, with J = 0, (8.1).
    """
    log_variance = -at_least_float32(log_precision)
    return -torch.logaddexp(log_variance, at_least_float32(log_process_noise))
