"""Which tokens a sequence has seen, for the penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """The distinct tokens of prompt and output, and how often each was generated; one step costs O(1)."""

    __slots__ = ("_counts", "_ids", "_index", "_size")

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._counts: NDArray[np.int32] = np.zeros(64, np.int32)
        self._size = 0
        for token_id in prompt_token_ids:
            self._entry(token_id)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Distinct tokens, in the order in which they came."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> NDArray[np.int32]:
        """How often each of `token_ids` was generated; 0 for those of the prompt alone."""
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        # On a line of its own: a new entry may replace the array.
        index = self._entry(token_id)
        self._counts[index] += 1

    def fork(self) -> TokenHistory:
        """An independent copy, for a sample or beam that splits off."""
        twin = TokenHistory(())
        twin._index, twin._size = dict(self._index), self._size
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin

    def _entry(self, token_id: int) -> int:
        index = self._index.get(token_id)
        if index is None:
            if self._size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            index = self._index[token_id] = self._size
            self._ids[index] = token_id
            self._size += 1
        return index
