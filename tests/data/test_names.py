"""Names that a user may have meant."""

from __future__ import annotations

from batchgen.data.names import near_names


def test_near_names_come_first_whatever_their_case() -> None:
    assert near_names("Topics", ["topic", "id"]) == "; did you mean 'topic'?"


def test_where_none_is_near_all_are_named_up_to_a_point() -> None:
    assert near_names("zzz", ["topic", "id"]) == "; it has 'topic', 'id'"
    assert near_names("zzz", [f"column{number}" for number in range(30)]).endswith("'column19', …")
    assert near_names("zzz", []) == ""
