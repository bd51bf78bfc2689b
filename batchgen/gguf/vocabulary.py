"""The tokenizer inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` says how text is cut ("gpt2": byte-level BPE; "llama": SentencePiece BPE with byte fallback),
`tokenizer.ggml.pre` which of the published pre-tokenizers runs before byte-level BPE.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from batchgen.errors import ModelError
from batchgen.gguf.reader import GGUFFile

SPACE = "▁"
_SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ends of a turn by name, for files that name one end-of-sequence id only; counted where the chat template writes them.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=False)


def _bytes(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


def _words(num_digits: str) -> str:
    """The word pattern of the GPT-4 family, with numbers cut into pieces of `num_digits`."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + num_digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [_bytes(use_regex=True)]


def _single_digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]


def _llama3() -> list[pre_tokenizers.PreTokenizer]:
    return [_split(_words("{1,3}")), _bytes(use_regex=False)]


def _qwen2() -> list[pre_tokenizers.PreTokenizer]:
    return [_split(_words("")), _bytes(use_regex=False)]


def _tekken() -> list[pre_tokenizers.PreTokenizer]:
    return [_split(_TEKKEN), _bytes(use_regex=False)]


PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    **dict.fromkeys(("smollm", "starcoder", "refact"), _single_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _llama3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _qwen2),
    "tekken": _tekken,
}
"""`tokenizer.ggml.pre` -> the steps before byte-level BPE."""

_NFC = {"qwen2"}
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}


def write_tokenizer(gguf: GGUFFile, directory: Path) -> list[int]:
    """Write the tokenizer files into `directory`; return the ids that end a completion.

    Raises ModelError, by name, for a tokenizer that cannot be written exactly.
    """
    metadata = gguf.metadata
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or model not in ("gpt2", "llama"):
        raise ModelError(f"{gguf.path}: tokenizer model {model!r} is not supported, only 'gpt2' and 'llama'")
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: {len(tokens)} tokens, but {len(types)} token types; the file is damaged")
    tokenizer = _byte_level(gguf, tokens) if model == "gpt2" else _sentence_piece(metadata, tokens, types)
    normalized = model == "llama" and not _adds_space_prefix(metadata)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=normalized)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.USER_DEFINED
        ]
    )
    _add_bos_and_eos(tokenizer, metadata, tokens)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write_config(metadata, tokens, directory)
    return _ends(metadata, tokens, types)


def _byte_level(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = gguf.metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"{gguf.path}: pre-tokenizer {pre!r} is not supported; supported are {known}")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = []
    for merge in gguf.metadata["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ModelError(f"{gguf.path}: the merge {merge!r} makes no token; the file is damaged")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    for token_id, kind in enumerate(types):
        # Runs of spaces are stored as they look; the normalizer has made text spaces into SPACE by then.
        if kind == TokenType.USER_DEFINED:
            tokens[token_id] = tokens[token_id].replace(" ", SPACE)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_by_score(tokens, types, metadata["tokenizer.ggml.scores"], vocabulary)
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    decoder: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normalizer: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if _adds_space_prefix(metadata):
        normalizer.insert(0, normalizers.Prepend(SPACE))
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def _adds_space_prefix(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """The merge list of a SentencePiece BPE vocabulary: every way to make a piece of two, best piece first."""
    ranked: list[tuple[float, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind in (TokenType.CONTROL, TokenType.BYTE, TokenType.UNKNOWN):
            continue
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(score, left, right) for left, right in pairs]
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    return [(left, right) for _, left, right in ranked]


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
    default = model == "llama" or pre in _BOS_BY_DEFAULT
    before, after = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", default):
        before = _special(metadata, tokens, "bos")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        after = _special(metadata, tokens, "eos")
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *after}],
        )


def _special(metadata: dict[str, Any], tokens: list[str], name: str) -> list[str]:
    token_id = metadata.get(f"tokenizer.ggml.{_SPECIAL_KEYS[name]}_token_id")
    return [tokens[token_id]] if token_id is not None and token_id < len(tokens) else []


def _write_config(metadata: dict[str, Any], tokens: list[str], directory: Path) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
    }
    for name in _SPECIAL_KEYS:
        for token in _special(metadata, tokens, name):
            config[f"{name}_token"] = token
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _ends(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> list[int]:
    keys = ("eos", "eot", "eom")
    ends = {metadata[key] for name in keys if (key := f"tokenizer.ggml.{name}_token_id") in metadata}
    template = metadata.get("tokenizer.chat_template", "")
    for name in _TURN_ENDS:
        if name in template and name in tokens and types[tokens.index(name)] == TokenType.CONTROL:
            ends.add(tokens.index(name))
    return sorted(ends)
