"""A sealed record is whole and unchanged, or it is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.sealed import canonical, seal, unseal

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(), values, max_size=4)


@given(bodies)
def test_what_was_sealed_comes_back(body: dict[str, object]) -> None:
    assert unseal(seal(body)) == body


@given(bodies, st.data())
def test_every_cut_is_noticed(body: dict[str, object], data: st.DataObject) -> None:
    sealed = seal(body)
    assert unseal(sealed[: data.draw(st.integers(0, len(sealed) - 1))]) is None


@given(bodies, st.data())
def test_every_flipped_bit_is_noticed(body: dict[str, object], data: st.DataObject) -> None:
    sealed = bytearray(seal(body))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unseal(bytes(sealed)) is None


def test_the_order_of_keys_does_not_count() -> None:
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


def test_json_of_others_is_no_record() -> None:
    assert [unseal(data) for data in (b"", b"[]", b"1", b'{"body": 1}', b'{"sha256": "", "body": {}}')] == [None] * 5
