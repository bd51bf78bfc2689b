"""Stop strings, found in the text of a completion across the borders of tokens and characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from batchgen.token_bytes import NUM_CONTEXT_TOKENS, TokenBytes, decode_bytes

if TYPE_CHECKING:
    from batchgen.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """Where a completion ends."""

    stop: str
    text: str
    """The completion before the stop string."""
    num_tokens: int
    """Ids to keep: those of the completion up to the one that completed the stop string."""


class StopStringMatcher:
    """The stop strings of one request; `start` gives each of its samples a matcher."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.token_bytes: TokenBytes = tokenizer.token_bytes
        # Bytes may be compared in place of characters: UTF-8 never has a character inside another one.
        self.stop = [(string, string.encode("utf-8", "surrogatepass")) for string in stop if string]
        self.longest = max((len(data) for _, data in self.stop), default=0)

    def start(self, prompt_ids: Sequence[int], min_tokens: int = 0) -> StopMatcher:
        """A matcher for one completion of a prompt; a stop string that ends before `min_tokens` ids does not count."""
        return StopMatcher(self, list(prompt_ids[-NUM_CONTEXT_TOKENS:]), min_tokens)


class StopMatcher:
    """Follows one completion; what stands in the prompt never matches, not even its end."""

    __slots__ = ("_context", "_data", "_min_tokens", "_num_tokens", "_stops", "_unfinished")

    def __init__(self, stops: StopStringMatcher, context: list[int], min_tokens: int) -> None:
        self._stops = stops
        self._context = context
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._unfinished = stops.token_bytes.unfinished(context)
        self._data = bytearray(self._unfinished)

    def append(self, token_id: int) -> StopMatch | None:
        """Take the next id; the match that begins earliest in the text, if one ends with it.

        Costs a search over the bytes of the token and of the longest stop string, however long the text is.
        """
        stops = self._stops
        added = stops.token_bytes.of(self._context, token_id)
        self._context = [*self._context[1 - NUM_CONTEXT_TOKENS :], token_id]
        self._num_tokens += 1
        before = len(self._data)
        self._data += added
        if not added or self._num_tokens < self._min_tokens:
            return None
        found: tuple[int, int, str] | None = None
        for string, data in stops.stop:
            position = self._data.find(data, max(0, before - len(data) + 1))
            if position >= 0:
                candidate = (position, len(data), string)
                found = candidate if found is None else min(found, candidate)
        if found is None:
            return None
        position, _, string = found
        skipped = len(self._unfinished)
        text, _ = decode_bytes(bytes(self._data[skipped:position]), self._unfinished if position >= skipped else b"")
        return StopMatch(string, text, self._num_tokens)

    def fork(self) -> StopMatcher:
        """An independent matcher at the same place, for a beam that splits."""
        twin = StopMatcher.__new__(StopMatcher)
        twin._stops, twin._min_tokens, twin._num_tokens = self._stops, self._min_tokens, self._num_tokens
        twin._context, twin._unfinished, twin._data = list(self._context), self._unfinished, bytearray(self._data)
        return twin
