"""The drawing of the layer: one for all chapters, lit where asked."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from bft_ref.notebook.schematic import PARTS, description, drawing


def boxes(lit):
    svg = re.search(r"<svg.*</svg>", drawing(lit), re.DOTALL)[0]
    root = ElementTree.fromstring(svg.replace("&nbsp;", " "))
    groups = [g for g in root if g.tag == "g"]
    return [
        (g.get("class"), *(float(v) for k, v in g[0].items())) for g in groups
    ]


@pytest.mark.parametrize("name", PARTS)
def test_one_part_is_lit_and_the_others_are_not(name):
    kinds = [kind for kind, *_ in boxes([name])]
    assert kinds.count("lit") == 1
    assert kinds.count("dim") == len(PARTS) - 1
    assert kinds.index("lit") == list(PARTS).index(name)
    assert PARTS[name].name in description([name]).split("Here:")[1]


def test_with_nothing_lit_all_are_equal():
    assert {kind for kind, *_ in boxes([])} == {""}


def test_boxes_do_not_overlap_and_lie_inside():
    found = [rest for _, *rest in boxes([])]
    for i, (x, y, wide, high) in enumerate(found):
        assert 0 <= x <= x + wide <= 480
        assert 0 <= y <= y + high <= 422
        for a, b, *_ in found[:i]:
            assert abs(a - x) >= wide or abs(b - y) >= high


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match="lit: expected one of belief"):
        drawing(["gain"])
