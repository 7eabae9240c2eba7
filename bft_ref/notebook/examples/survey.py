"""Two published tables: household budgets, and eight schools."""

from typing import NamedTuple

from torch import Tensor

from bft_ref.notebook.examples.laboratory import _numbers, _rows


class Engel(NamedTuple):
    """Household budgets; both fields have shape (235,)."""

    income: Tensor
    food: Tensor


class Schools(NamedTuple):
    """Effects of coaching: names, ``effect`` and ``error`` (8,)."""

    school: list[str]
    effect: Tensor
    error: Tensor


def engel() -> Engel:
    """Income and expenditure on food of 235 working-class households.

    Shapes: ``income`` and ``food`` (235,), float64, in Belgian francs a
    year. Source: E. Engel (1857), as analysed by R. Koenker and G. Bassett,
    Econometrica 50 (1982) 43–61. Public domain.
    """
    income, food = _numbers(_rows("engel.csv")).unbind(1)
    return Engel(income.clone(), food.clone())


def schools() -> Schools:
    """The effect of coaching in eight schools, with standard errors.

    Shapes: ``school``, eight letters; ``effect`` and ``error`` (8,), float64,
    in points of a verbal test. Source: D. B. Rubin, Journal of Educational
    Statistics 6 (1981) 377–401; published values, so facts.
    """
    rows = _rows("schools.csv")
    effect, error = _numbers([row[1:] for row in rows]).unbind(1)
    return Schools([row[0] for row in rows], effect.clone(), error.clone())
