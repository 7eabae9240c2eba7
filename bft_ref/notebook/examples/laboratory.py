"""Three laboratories: silicon, silver, and the constant of gravitation."""

import csv
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor


class Replicates(NamedTuple):
    """Repeated measurements: ``instrument``, ``value`` of one length."""

    instrument: Tensor
    value: Tensor


class Gravity(NamedTuple):
    """Measurements of G: ``experiment`` names, ``g`` and ``u`` (16,)."""

    experiment: list[str]
    g: Tensor
    u: Tensor


def silicon() -> Replicates:
    """Resistivity of silicon, five instruments, five measurements each.

    Shapes: ``instrument`` (25,), int64, from 1 to 5; ``value`` (25,),
    float64, in ohm·cm. Source: J. Ehrstein and M. C. Croarkin, data set
    SiRstv of the Statistical Reference Datasets, National Institute of
    Standards and Technology, with certified sums of squares. Public domain.
    """
    return _replicates("silicon.csv")


def silver() -> Replicates:
    """Atomic weight of silver, two instruments, 24 measurements each.

    Shapes: ``instrument`` (48,), int64, 1 or 2; ``value`` (48,), float64,
    in atomic mass units, in the order listed. Source: L. J. Powell,
    T. J. Murphy and J. W. Gramlich, Journal of Research of the National
    Bureau of Standards 87 (1982) 9–19, as data set AtmWtAg of the
    Statistical Reference Datasets (NIST). Public domain.
    """
    return _replicates("silver.csv")


def gravity() -> Gravity:
    """Sixteen measurements of Newton's constant with stated errors.

    Shapes: ``experiment``, sixteen names (laboratory and year); ``g`` (16,)
    and its standard uncertainty ``u`` (16,), float64, both in
    10⁻¹¹ m³ kg⁻¹ s⁻². Source: the measurements of G in the CODATA adjustment
    of 2018, doi:10.1103/RevModPhys.93.025010; published values, so facts.
    """
    rows = _rows("gravity.csv")
    names = [row[0] for row in rows]
    g, u = _numbers([row[1:] for row in rows]).unbind(1)
    return Gravity(names, g.clone(), u.clone())


def _rows(name: str) -> list[list[str]]:
    """The rows of a file, without its comments and its header."""
    text = (resources.files(__package__) / name).read_text("utf8")
    lines = [x for x in text.splitlines() if not x.startswith("#")]
    return list(csv.reader(lines[1:]))


def _numbers(rows: list[list[str]]) -> Tensor:
    table = [[float(x) for x in row] for row in rows]
    return torch.tensor(table, dtype=torch.float64)


def _replicates(name: str) -> Replicates:
    instrument, value = _numbers(_rows(name)).unbind(1)
    return Replicates(instrument.long(), value.clone())
