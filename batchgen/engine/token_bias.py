"""What is added to single logits before each draw of a group: biases, and bans of stop ids and bad words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from batchgen.engine.sequence import Sequence

BANNED = float("-inf")


class BiasEntries(NamedTuple):
    """Token ids, each once, and what is added to their logits."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class TokenEdits:
    """Made once per distinct parameters, so that a step costs nothing per token."""

    def __init__(
        self,
        bias: Mapping[int, float],
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        bad_words: Iterable[tuple[int, ...]] = (),
    ) -> None:
        """`bad_words` are token ids; a word of several tokens is stopped at its last one."""
        self._min_tokens = min_tokens
        self._stop_token_ids = tuple(stop_token_ids)
        words = tuple(bad_words)
        self._long_words = tuple(word for word in words if len(word) > 1)
        self._always = {**bias, **{word[0]: BANNED for word in words if len(word) == 1}}
        self._late = _entries(self._always)
        self._early = _entries({**self._always, **dict.fromkeys(self._stop_token_ids, BANNED)})

    @property
    def is_active(self) -> bool:
        """Whether there is any."""
        return bool(self._always or self._long_words or (self._min_tokens and self._stop_token_ids))

    @property
    def follow_text(self) -> bool:
        """Whether the edits depend on the tokens drawn so far, not on their number alone."""
        return bool(self._long_words)

    def bias_of(self, sequence: Sequence) -> BiasEntries:
        """What acts on the next token of a sequence."""
        is_early = sequence.num_generated < self._min_tokens
        ended = [word[-1] for word in self._long_words if _ends_with(sequence, word[:-1])]
        if ended:
            stops = self._stop_token_ids if is_early else ()
            return _entries({**self._always, **dict.fromkeys((*stops, *ended), BANNED)})
        return self._early if is_early else self._late


def _ends_with(sequence: Sequence, begun: tuple[int, ...]) -> bool:
    return tuple(sequence.token_ids[-len(begun) :]) == begun


def _entries(bias: Mapping[int, float]) -> BiasEntries:
    return BiasEntries(np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))


NO_EDITS = TokenEdits({})
