"""What bad input is told: the argument, what was given, what is expected."""

import pytest
import torch

from bft_ref import Belief
from bft_ref.support import checks

GOOD = torch.tensor([0.5, 2.5])


def test_good_values_are_handed_back():
    for check in [
        checks.floating,
        checks.finite,
        checks.positive,
        checks.not_negative,
    ]:
        assert check("x", GOOD) is GOOD
    assert checks.shape("x", GOOD, [2]) is GOOD
    assert checks.shape("x", GOOD, ["n"]) is GOOD
    assert checks.number("x", 2.5, 0.0) == 2.5
    assert checks.choice("x", "a", "ab") == "a"
    assert checks.mask("x", GOOD > 1, (3, 2)).dtype == torch.bool


@pytest.mark.parametrize(
    "check",
    [
        checks.floating,
        checks.finite,
        checks.positive,
        checks.not_negative,
    ],
)
def test_dtypes_are_named(check):
    with pytest.raises(TypeError, match=r"^tau: .*int64.*tau\.float\(\)"):
        check("tau", torch.tensor([1]))
    with pytest.raises(TypeError, match="^tau: expected a tensor, got list"):
        check("tau", [1.0])
    with pytest.raises(TypeError, match="^tau: .*complex64"):
        check("tau", torch.tensor([1j]))


@pytest.mark.parametrize(
    "check,bad,words",
    [
        (checks.finite, torch.nan, "finite values.* 1 of 2"),
        (checks.finite, -torch.inf, "finite values.* 1 of 2"),
        (checks.positive, 0.0, "positive values, got a minimum of 0"),
        (checks.positive, -2.5, "positive.*-2.5"),
        (checks.positive, torch.nan, "finite"),
        (checks.not_negative, -1e-30, ">= 0.*-1e-30"),
    ],
)
def test_values_are_named(check, bad, words):
    with pytest.raises(ValueError, match="^tau: expected .*" + words):
        check("tau", torch.tensor([1.0, bad]))


def test_zero_is_not_negative():
    checks.not_negative("x", torch.zeros(1))


def test_shapes_are_named():
    with pytest.raises(ValueError, match=r"^x: .*\(B, 3, \*\), got \(2,\)"):
        checks.shape("x", GOOD, ["B", 3, None])
    with pytest.raises(ValueError, match=r"^x: expected shape \(3\)"):
        checks.shape("x", GOOD, [3])
    checks.broadcastable("x", GOOD, "y", torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"^x: .*\(2,\).*y.*\(4, 3\)"):
        checks.broadcastable("x", GOOD, "y", torch.ones(4, 3))


@pytest.mark.parametrize(
    "mask,kind,words",
    [
        (torch.ones(2).int(), TypeError, r"int32.*m == 0"),
        ([True], TypeError, "list"),
        (torch.ones(5, 3, 2).bool(), ValueError, r"\(3, 2\).*\(5, 3, 2\)"),
        (torch.ones(3).bool(), ValueError, r"got \(3,\)"),
        (torch.tensor([0.0, torch.nan]), ValueError, "NaN or"),
        (torch.tensor([0.0, torch.inf]), ValueError, "NaN or"),
    ],
)
def test_masks_are_named(mask, kind, words):
    with pytest.raises(kind, match="^m: expected .*" + words):
        checks.mask("m", mask, (3, 2))


@pytest.mark.parametrize("value", [0.0, -1.0, 2.5, torch.nan, torch.inf])
def test_numbers_are_named(value):
    with pytest.raises(ValueError, match=r"^q: .*\(0, 2\], got "):
        checks.number("q", value, 0.0, 2.0)
    if value != 2.5:
        with pytest.raises(ValueError, match=r"^q: .*\(0, inf\), got "):
            checks.number("q", value, 0.0)
    if value != 0:
        with pytest.raises(ValueError, match=r"^q: .*\[0, 2\], got "):
            checks.within("q", value, 0.0, 2.0)
    for check in (checks.number, checks.within):
        for other, kind in [("1", "str"), (True, "bool"), (None, "NoneType")]:
            with pytest.raises(TypeError, match=f"^q: .* number, got {kind}"):
                check("q", other, 0.0, 2.0)


def test_numbers_at_the_ends():
    assert checks.number("q", 2, 0.0, 2.0) == 2.0
    assert checks.within("q", 0, 0.0, 2.0) == 0.0
    assert checks.within("q", 1e300, 0.0) == 1e300
    with pytest.raises(ValueError, match=r"^q: .*\[0, inf\), got inf"):
        checks.within("q", torch.inf, 0.0)


def test_conditions_are_asked_together_where_they_can_be():
    yes, no = torch.tensor([False, True]), torch.zeros(2, 0).bool()
    assert checks.anywhere(yes, no, ~yes) == [True, False, True]
    seen = []

    def asked(x):
        seen.append(checks.anywhere(x > 0))
        return x

    torch.func.vmap(asked)(GOOD)
    torch.compile(asked, backend="eager")(GOOD)
    asked(torch.ones(2, device="meta"))
    assert seen == [None, None, None]


def test_values_are_not_read_under_vmap_or_on_meta_tensors():
    torch.func.vmap(lambda x: checks.finite("x", x))(GOOD)
    checks.positive("x", torch.ones(2, device="meta"))


def test_beliefs_from_numbers_keep_their_digits():
    """0.1 by way of float32 would be off by 1e-9."""
    mean = torch.zeros(2, dtype=torch.float64)
    expected = torch.full_like(mean, 0.1)
    for given in [{"precision": 0.1}, {"variance": 10.0}]:
        found = Belief.of(mean, **given).precision
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
