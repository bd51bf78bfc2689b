"""The bytes that each token stands for, so that text can be cut, matched and completed at any byte.

Byte-level BPE and SentencePiece tokens are bytes by construction. For the few other decoders (WordPiece, word-end
suffixes) a token's bytes are what it adds to the decoded text of the tokens before it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

NUM_CONTEXT_TOKENS = 4
"""Tokens before a token that can change its bytes, or hold the first bytes of a character that it completes."""

_SENTENCE_PIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of tokens, for one tokenizer; remembers what it has looked up."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self._from_string = _byte_rule(backend)

    def of(self, context: Sequence[int], token_id: int) -> bytes:
        """The bytes of a token after the tokens of `context` (its last few count); empty for an unknown id."""
        if self._from_string is None:
            return self._added_text([*context[-NUM_CONTEXT_TOKENS:]], token_id)
        known = self._known.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._from_string(token)
        return known

    def join(self, context: Sequence[int], token_ids: Sequence[int]) -> bytes:
        """The bytes of several tokens after those of `context`."""
        if self._from_string is not None:
            return b"".join([self.of((), token_id) for token_id in token_ids])
        before = list(context[-NUM_CONTEXT_TOKENS:])
        pieces = []
        for token_id in token_ids:
            pieces.append(self.of(before, token_id))
            before = [*before[1 - NUM_CONTEXT_TOKENS :], token_id]
        return b"".join(pieces)

    def unfinished(self, token_ids: Sequence[int]) -> bytes:
        """The first bytes of a character that the last of these tokens leave incomplete; mostly empty."""
        return decode_bytes(self.join([], token_ids[-NUM_CONTEXT_TOKENS:]))[1]

    def _added_text(self, context: list[int], token_id: int) -> bytes:
        before: str = self._backend.decode(context, skip_special_tokens=False)
        after: str = self._backend.decode([*context, token_id], skip_special_tokens=False)
        return after.removeprefix(before).encode()


def decode_bytes(data: bytes, unfinished: bytes = b"") -> tuple[str, bytes]:
    """UTF-8 text, U+FFFD for what is invalid, and the bytes at the end that begin a character.

    `unfinished` is what an earlier text ended with: the text starts with that character if `data` completes it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(unfinished + data)
    if unfinished and text.startswith("�"):
        return decode_bytes(data)
    rest = decoder.getstate()[0]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # CPython waits for the third byte of a surrogate, which UTF-8 does not have.
        return text + "�" * len(rest), b""
    return text, rest


def _byte_rule(backend: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        return _ByteLevelRule()
    if kinds <= _SENTENCE_PIECE_STEPS and all(step.get("stop", 0) == 0 for step in steps):
        return _SentencePieceRule(steps)
    return None


class _ByteLevelRule:
    """GPT-2's bijection between bytes and printable characters."""

    def __init__(self) -> None:
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes.update({chr(0x100 + index): byte for index, byte in enumerate(others)})

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(self._bytes[character] for character in token)
        except KeyError:
            # An added token is spelled in plain text.
            return token.encode()


class _SentencePieceRule:
    """Pieces with a mark for the space, and tokens that name one byte.

    What strips the first space of a text is left out: a completion never starts the text.
    """

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        kinds = {step["type"] for step in steps}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        self._replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]

    def __call__(self, token: str) -> bytes:
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()
