"""The map of the code in docs/code.md: each room with its purpose, and arrows as the code imports."""

from tests.test_rooms import ARROWS
from tools import code_map


def test_the_page_has_the_map_as_the_code_has_it() -> None:
    assert code_map.PAGE.read_text() == code_map.page(), "draw it anew: make format"


def test_rooms_import_as_the_arrows_say() -> None:
    assert code_map.arrows() == ARROWS


def test_each_room_has_a_purpose() -> None:
    assert code_map.PURPOSES.keys() == {*ARROWS}


def test_arrows_leave_out_what_others_lead_to() -> None:
    arrows, edges = code_map.arrows(), code_map.imported_rooms()
    assert "errors" in edges["hf"]
    assert "errors" not in arrows["hf"]
    assert arrows["core"] == ["errors"]
