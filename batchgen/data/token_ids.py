"""Prompts that rows hold as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

from batchgen.data.chat_messages import type_name
from batchgen.data.input_rows import RowFailure
from batchgen.data.names import near_names
from batchgen.errors import JobError


class TokenIdsColumn:
    """A column of lists of token ids."""

    def __init__(self, column: str, vocab_size: int | None) -> None:
        """`vocab_size` is the number of ids that the model has; None: not known."""
        self._column = column
        self._vocab_size = vocab_size

    def columns(self, available: Collection[str]) -> frozenset[str]:
        """The column; JobError, with near names, where it is not `available` and anything is."""
        if available and self._column not in available:
            near = near_names(self._column, available)
            raise JobError(f"prompt.token_ids_column: no column {self._column!r} in the input{near}")
        return frozenset({self._column})

    def ids(self, values: dict[str, Any]) -> array[int]:
        """The ids of a row; RowFailure `null_prompt`, `bad_token_ids` or `unknown_token_id`."""
        value = values.get(self._column)
        if value is None:
            raise RowFailure("null_prompt", f"column {self._column!r} is null")
        if not isinstance(value, list):
            raise RowFailure("bad_token_ids", f"column {self._column!r} holds {type_name(value)}, not a list of ids")
        for index, token_id in enumerate(value):
            if type(token_id) is not int:
                raise RowFailure("bad_token_ids", f"token {index} is {type_name(token_id)}, not a whole number")
            if not 0 <= token_id < (self._vocab_size or 2**31):
                limit = "" if self._vocab_size is None else f"; the model has {self._vocab_size} tokens"
                raise RowFailure("unknown_token_id", f"token {index} is {token_id}{limit}")
        return array("i", value)
