"""Encoding text in which some spans only look like control tokens: they came from row data and stay text."""

from __future__ import annotations

import copy
import re
import secrets

import tokenizers
from tokenizers import AddedToken

_FIRST_PRIVATE, _LAST_PRIVATE = 0x100000, 0x10FFFD


class LiteralEncoder:
    """A copy of a tokenizer to which control tokens in text mean nothing.

    Those outside the literal spans are replaced, before encoding, by placeholders that only this copy knows. So the
    text is still encoded in one piece, and every id outside the spans is what the tokenizer itself would give.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_tokens: tuple[str, ...]) -> None:
        flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        self._backend = copy.deepcopy(backend)
        # Some tokenizers declare control tokens as ordinary added ones; only special ones can be switched off.
        self._backend.add_special_tokens([_placeholder(token, flags[token], special=True) for token in control_tokens])
        self._backend.encode_special_tokens = True
        # Not to be guessed by whoever writes the rows.
        nonce = "".join(chr(_FIRST_PRIVATE + secrets.randbelow(_LAST_PRIVATE - _FIRST_PRIVATE)) for _ in range(4))
        self._placeholders = {token: f"{nonce}{index};" for index, token in enumerate(control_tokens)}
        self._backend.add_tokens(
            [_placeholder(spelling, flags[token], special=False) for token, spelling in self._placeholders.items()]
        )
        self._ids = {
            self._backend.token_to_id(spelling): token_id
            for token, spelling in self._placeholders.items()
            if (token_id := backend.token_to_id(token)) is not None
        }
        self._pattern = _pattern(control_tokens, flags)

    def encode(self, text: str, literals: tuple[tuple[int, int], ...], add_special_tokens: bool) -> list[int]:
        """Ids of `text`; no control token overlaps one of the spans [start, stop) of `literals`."""
        pieces, end = [], 0
        for start, stop in [*sorted(literals), (len(text), len(text))]:
            outside = text[end:start]
            pieces.append(self._pattern.sub(lambda match: self._placeholders[match[0]], outside))
            pieces.append(text[max(start, end) : stop])
            end = max(end, stop)
        encoding = self._backend.encode("".join(pieces), add_special_tokens=add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]


def _placeholder(spelling: str, token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(spelling, normalized=False, special=special, lstrip=token.lstrip, rstrip=token.rstrip)


def _pattern(control_tokens: tuple[str, ...], flags: dict[str, AddedToken]) -> re.Pattern[str]:
    """Leftmost, then longest: how tokenizers itself looks for added tokens."""
    choices = []
    for token in sorted(control_tokens, key=len, reverse=True):
        spelling = re.escape(token)
        choices.append(rf"(?<!\w){spelling}(?!\w)" if flags[token].single_word else spelling)
    return re.compile("|".join(choices) or r"(?!)")
