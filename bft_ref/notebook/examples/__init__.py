"""The real data of the chapters, small enough to ship with the package.

Every file says in its first lines where it comes from.
"""

from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bft_ref.notebook.examples.laboratory import gravity, silicon, silver
from bft_ref.notebook.examples.mauna_loa import co2
from bft_ref.notebook.examples.stage import plays
from bft_ref.notebook.examples.survey import engel, schools

__all__ = [
    "Nile",
    "co2",
    "engel",
    "gravity",
    "nile",
    "plays",
    "schools",
    "silicon",
    "silver",
]


class Nile(NamedTuple):
    """Annual flow of the Nile at Aswan; both fields have shape (100,)."""

    year: Tensor
    flow: Tensor


def nile() -> Nile:
    """The flow of the Nile at Aswan from 1871 to 1970, year by year.

    Shapes: ``year`` (100,), int64; ``flow`` (100,), float64, in 10⁸ cubic
    metres a year. Public domain, as analysed by Cobb (1978).
    """
    path = resources.files(__name__) / "nile.csv"
    with path.open(encoding="utf8") as file:
        rows = np.loadtxt(file, delimiter=",", comments="#", skiprows=4)
    year, flow = torch.from_numpy(rows).unbind(1)
    return Nile(year.long(), flow.clone())
