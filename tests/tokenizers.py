"""Small tokenizers for tests, one of each kind of decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from batchgen.tokenizer import Tokenizer

CONTROL = ("<s>", "</s>", "<|turn|>")


def byte_level() -> Backend:
    """Every byte is a token; ` w`, `or` and the first three bytes of an emoji are too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), ("o", "r"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    pieces = [*CONTROL, "<think>", *alphabet, *("".join(merge) for merge in merges)]
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece(prefix: bool = True) -> Backend:
    """Letters, `▁world`, and a token for every byte; with `prefix`, a text starts with a space that decoding drops."""
    pieces = [*CONTROL, "<think>", "▁", *"abcdefghijklmnopqrstuvwxyz", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("w", "o"), ("wo", "r"), ("wor", "l"), ("worl", "d"), ("▁", "world")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def word_piece() -> Backend:
    """Whole words and continuations, whose spaces the decoder invents."""
    pieces = [*CONTROL, "<think>", "[UNK]", "hello", "world", "##s", "##ly", "stop", "here"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


KINDS = {"byte level": byte_level, "sentence piece": sentence_piece, "word piece": word_piece}


def save(backend: Backend, directory: Path, bos: bool = True, **config: Any) -> Path:
    """Write a tokenizer directory with the control tokens of CONTROL, the first of them added as BOS."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    contents = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(contents))
    return directory


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer
