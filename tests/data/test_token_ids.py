"""Token ids from rows are what they are, or a row error."""

from __future__ import annotations

from typing import Any

import pytest

from batchgen.data.input_rows import RowFailure
from batchgen.data.token_ids import TokenIdsColumn
from batchgen.errors import JobError


def test_ids_are_taken_as_they_stand() -> None:
    assert list(TokenIdsColumn("ids", 10).ids({"ids": [0, 9, 9]})) == [0, 9, 9]
    assert list(TokenIdsColumn("ids", None).ids({"ids": []})) == []


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (None, "null_prompt", "column 'ids' is null"),
        ("1 2", "bad_token_ids", "holds a string, not a list of ids"),
        ([1, 2.0], "bad_token_ids", "token 1 is a number, not a whole number"),
        ([True], "bad_token_ids", "token 0 is a boolean"),
        ([None], "bad_token_ids", "token 0 is null"),
        ([10], "unknown_token_id", "token 0 is 10; the model has 10 tokens"),
        ([-1], "unknown_token_id", "token 0 is -1"),
    ],
)
def test_each_fault_of_ids_has_its_code(value: Any, code: str, message: str) -> None:
    with pytest.raises(RowFailure, match=message) as caught:
        TokenIdsColumn("ids", 10).ids({"ids": value})
    assert caught.value.error.code == code


def test_an_id_that_four_bytes_cannot_hold_is_unknown_to_any_model() -> None:
    with pytest.raises(RowFailure, match="unknown_token_id"):
        TokenIdsColumn("ids", None).ids({"ids": [2**31]})


def test_the_column_must_be_there() -> None:
    column = TokenIdsColumn("ids", 10)
    assert column.columns(["ids", "x"]) == column.columns([]) == {"ids"}
    with pytest.raises(JobError, match="no column 'ids' in the input; did you mean 'id'"):
        column.columns(["id"])
