from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.errors import ModelError
from batchgen.gguf.reader import read_gguf
from batchgen.gguf.vocabulary import write_tokenizer
from batchgen.tokenizer import Tokenizer
from tests.gguf.writing import tokenizer_keys, write_gguf

WEIGHTS = {"w": np.zeros((1, 4), np.float32)}
BYTES = {"llama.context_length": 64}


def ends_of(tmp_path: Path, metadata: dict[str, Any]) -> list[int]:
    file = write_gguf(tmp_path / "m.gguf", "llama", BYTES | metadata, WEIGHTS)
    return write_tokenizer(read_gguf(file), tmp_path)


def tokenizer_of(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    ends_of(tmp_path, metadata)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    return tokenizer


def byte_level(pre: str, merges: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary of the printable ASCII bytes, the space, the newline, and what the merges make."""
    merges = merges or []
    tokens = ["<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ", *(merge.replace(" ", "") for merge in merges)]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "merges": merges or ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    if not merges:
        keys["tokens"], keys["token_type"] = [*tokens, "ab"], [*keys["token_type"], 1]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentence_piece(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary with byte tokens, runs of spaces, and scores that order the merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    normal = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁h", "<turn>"]
    pieces += [*normal, "   "]
    types += [*[1] * (len(normal) - 1), 3, 4]
    keys = {
        "model": "llama",
        "tokens": pieces,
        "token_type": types,
        "scores": [-float(index) for index in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [
        ("gpt-2", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "45"]),
    ],
)
def test_numbers_are_cut_as_the_pre_tokenizer_says(tmp_path: Path, pre: str, numbers: list[str]) -> None:
    merges = ["1 2", "12 3", "123 4", "1234 5", "4 5"]
    tokenizer = tokenizer_of(tmp_path, byte_level(pre, merges, add_bos_token=False))
    assert pieces_of(tokenizer, "12345") == numbers


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_bos_is_added_by_the_file_or_by_the_pre_tokenizer(tmp_path: Path, pre: str) -> None:
    assert tokenizer_of(tmp_path, byte_level(pre)).encode("a")[:1] == ([0] if pre == "llama-bpe" else [66])
    assert tokenizer_of(tmp_path, byte_level(pre, add_bos_token=False)).encode("a") == [66]
    assert tokenizer_of(tmp_path, byte_level(pre, add_bos_token=True)).encode("a") == [0, 66]


def test_sentence_piece_merges_the_best_piece_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentence_piece(add_bos_token=False))
    hello = 259 + 9
    assert tokenizer.encode("hello hello") == [hello, hello]
    assert tokenizer.decode(tokenizer.encode("hello hello")) == "hello hello"


def test_what_no_piece_spells_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentence_piece(add_bos_token=False, add_space_prefix=False))
    assert tokenizer.encode("é") == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9]) == "é"


def test_runs_of_spaces_are_tokens_of_their_own(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentence_piece(add_bos_token=False, add_space_prefix=False))
    assert pieces_of(tokenizer, "o   o") == ["o", "   ", "o"]


def test_control_tokens_are_special_and_others_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, sentence_piece(add_space_prefix=False))
    assert set(tokenizer.special_token_strings) == {"<unk>", "<s>", "</s>", "<turn>"}
    assert tokenizer.encode("<turn>") == [1, 270]


def test_the_end_of_a_turn_in_the_chat_template_ends_a_completion(tmp_path: Path) -> None:
    metadata = byte_level("gpt-2", [])
    metadata["tokenizer.ggml.tokens"][2] = "<|im_end|>"
    metadata["tokenizer.ggml.token_type"][2] = 3
    assert ends_of(tmp_path, metadata) == [1]
    assert ends_of(tmp_path, metadata | {"tokenizer.chat_template": "{{ x }}<|im_end|>"}) == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"tokenizer.ggml.token_type": [1]}, "31 tokens, but 1 token types"),
        ({"tokenizer.ggml.merges": ["a b", "q u"]}, "the merge 'q u' makes no token"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ends_of(tmp_path, tokenizer_keys() | change)
