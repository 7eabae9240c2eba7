"""Carbon dioxide on Mauna Loa, week by week."""

from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class CO2(NamedTuple):
    """Weekly carbon dioxide; both fields have shape (2284,).

    ``date`` is NumPy's ``datetime64[D]``, ``ppm`` a float64 tensor.
    """

    date: np.ndarray
    ppm: Tensor


def co2() -> CO2:
    """Carbon dioxide at Mauna Loa, from 29 March 1958 to 29 December 2001.

    Shapes: ``date`` (2284,), seven days apart; ``ppm`` (2284,), in parts per
    million by volume, to one decimal, NaN in the 59 weeks that are missing.
    Flask air samples of C. D. Keeling and T. P. Whorf (2004), public domain.
    """
    path = resources.files("bft_ref.notebook.examples") / "co2.csv"
    with path.open(encoding="utf8") as file:
        date, ppm = np.genfromtxt(file, str, delimiter=",", skip_header=6).T
    measured = np.where(ppm == "", "nan", ppm).astype(np.float64)
    return CO2(date.astype("datetime64[D]"), torch.from_numpy(measured))
