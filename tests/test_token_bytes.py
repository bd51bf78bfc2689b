from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.token_bytes import TokenBytes, decode_bytes
from tests.tokenizers import byte_level, sentence_piece, word_piece

BYTE_LEVEL, SENTENCE_PIECE, WORD_PIECE = byte_level(), sentence_piece(prefix=False), word_piece()


def text_of(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    text, rest = decode_bytes(TokenBytes(backend).join([], ids))
    return text + "�" * bool(rest)


@settings(max_examples=500)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=12))
def test_byte_level_bytes_decode_as_the_tokenizer_does(ids: list[int]) -> None:
    assert text_of(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=12))
def test_sentence_piece_bytes_decode_as_the_tokenizer_does(text: str) -> None:
    ids = SENTENCE_PIECE.encode(text).ids
    assert (
        text_of(SENTENCE_PIECE, ids) == SENTENCE_PIECE.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
    )


@given(ids=st.lists(st.integers(4, WORD_PIECE.get_vocab_size() - 1), max_size=10))
def test_other_decoders_are_asked_what_a_token_adds(ids: list[int]) -> None:
    assert text_of(WORD_PIECE, ids) == WORD_PIECE.decode(ids, skip_special_tokens=False)


@given(data=st.binary(max_size=12), cut=st.integers(0, 12))
def test_text_cut_anywhere_continues_where_it_ended(data: bytes, cut: int) -> None:
    text, rest = decode_bytes(data)
    assert (text + "�" * bool(rest)) == data.decode(errors="replace")
    whole = "aé語😀".encode()
    before, unfinished = decode_bytes(whole[:cut])
    after, end = decode_bytes(whole[cut:], unfinished)
    assert (before + after, end) == ("aé語😀", b"")
