"""Which tokens the grammars of a step's sequences allow, found while the step runs.

Shapes: C constrained sequences, V vocabulary.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from batchgen.engine.constraint import Constraint
from batchgen.engine.sequence import Sequence

NUM_THREADS = 2
"""Threads of llguidance; a mask takes well under a millisecond."""


class AllowedTokens(NamedTuple):
    """The masks of some draws; the others may draw any token."""

    rows_C: list[int]
    """Places in the list of draws, rising."""
    banned_CV: NDArray[np.bool_]
    """bool: True for what must not come."""


class MaskMaker:
    """Computes masks on threads of its own, which hold no GIL."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, sequences: list[Sequence]) -> Future[AllowedTokens] | None:
        """Begin with the masks for the next tokens of `sequences`; None where no grammar binds one."""
        bound = [(row, s.constraint) for row, s in enumerate(sequences) if s.constraint is not None]
        if not bound:
            return None
        if self._thread is None:
            self._executor = LLExecutor(NUM_THREADS)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        forced = {row: sequences[row].pending[0] for row, _ in bound if sequences[row].pending}
        return self._thread.submit(self._compute, bound, forced)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _compute(self, bound: list[tuple[int, Constraint]], forced: dict[int, int]) -> AllowedTokens:
        # The tokenizer may have more tokens than there are logits.
        words_CW = np.zeros((len(bound), bound[0][1].num_words), np.int32)
        todo = [(index, constraint) for index, (row, constraint) in enumerate(bound) if row not in forced]
        self._fill(words_CW, todo)
        again = [(index, constraint) for index, constraint in todo if constraint.matcher.is_error()]
        for _, constraint in again:
            constraint.recover()
        self._fill(words_CW, again)
        for index, constraint in again:
            if constraint.matcher.is_error():
                words_CW[index] = 0
        np.invert(words_CW, out=words_CW)
        banned_CV = np.unpackbits(words_CW.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        for index, (row, _) in enumerate(bound):
            if row in forced:
                banned_CV[index, forced[row]] = 0
        return AllowedTokens([row for row, _ in bound], banned_CV.view(np.bool_))

    def _fill(self, words_CW: NDArray[np.int32], todo: list[tuple[int, Constraint]]) -> None:
        if not todo:
            return
        assert self._executor is not None
        count, num_words = words_CW.shape
        matchers = [(constraint.matcher, index) for index, constraint in todo]
        self._executor.unsafe_compute_mask_ptr(matchers, words_CW.ctypes.data, num_words * 4, count)
