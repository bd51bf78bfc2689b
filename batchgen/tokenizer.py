"""Text to token ids and back: one tokenizer for the job's data side and for the engine.

A leaf that never imports torch: it loads PreTrainedTokenizerFast, from tokenizer.json alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from batchgen.errors import ModelError
from batchgen.literals import LiteralEncoder
from batchgen.stop_strings import StopMatch, StopMatcher, StopStringMatcher
from batchgen.token_bytes import TokenBytes, decode_bytes

__all__ = ["RenderedPrompt", "StopMatch", "StopMatcher", "StopStringMatcher", "TextPiece", "Tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "vocab.txt", "tiktoken.model")
_CONTROL_FORM = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_TAG = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class RenderedPrompt(NamedTuple):
    """The text of one prompt, ready to be encoded."""

    text: str
    literals: tuple[tuple[int, int], ...] = ()
    """Spans [start, stop) of `text`, in characters, that came from row data: control tokens spelled there are text."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its BOS (and what else it adds); False for chat templates, which write their own."""


class TextPiece(NamedTuple):
    """A part of the text of some ids."""

    text: str
    is_control: bool
    """Whether it is one control token, and not characters that spell it."""


class Tokenizer:
    """Encodes as transformers does, with exactly one BOS, and decodes without changing a byte."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        # tokenizer.json may carry the padding and truncation of the model's training.
        self._backend.no_padding()
        self._backend.no_truncation()
        self.token_bytes = TokenBytes(self._backend)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer | None:
        """The tokenizer of a model directory; None if there is none.

        Raises ModelError if there is one only in a form that needs its Python class (tokenizer.model, vocab.json).
        """
        if not (path / TOKENIZER_FILE).is_file():
            others = [name for name in _OTHER_TOKENIZERS if (path / name).exists()]
            if not others:
                return None
            raise ModelError(
                f"{path}: a tokenizer in {others[0]}, but no {TOKENIZER_FILE}; write one with "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        try:
            return cls(PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: {TOKENIZER_FILE} or tokenizer_config.json cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, added ones included; the model's embedding may have more rows."""
        return len(self._fast)

    def to_json(self) -> str:
        """All of it as one tokenizer.json, added tokens included."""
        text: str = self._backend.to_str()
        return text

    @property
    def bos_token(self) -> str | None:
        """Spelling of the token that begins a text."""
        token: str | None = self._fast.bos_token
        return token

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text."""
        token_id: int | None = self._fast.bos_token_id
        return token_id

    @property
    def eos_token(self) -> str | None:
        """Spelling of the token that ends a text."""
        token: str | None = self._fast.eos_token
        return token

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; the model may have more (`LoadedModel.eos_token_ids`)."""
        token_id: int | None = self._fast.eos_token_id
        return token_id

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """What chat templates get beside the messages: bos_token, eos_token, unk_token, ..."""
        named = self._fast.special_tokens_map.items()
        return {name: str(token) for name, token in named if not isinstance(token, list)}

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template, the one named `default` where there are several."""
        template = self._fast.chat_template
        found: str | None = template.get("default") if isinstance(template, dict) else template
        return found

    @cached_property
    def special_token_strings(self) -> tuple[str, ...]:
        """Spellings that row data must not turn into control tokens, longest first.

        Those declared special, and added ones that are control tokens by their form (`<|...|>`) or by their use in the
        chat template.
        """
        template = self.chat_template or ""
        strings = {
            token.content
            for token in self._backend.get_added_tokens_decoder().values()
            if token.special
            or _CONTROL_FORM.fullmatch(token.content)
            or (_TAG.fullmatch(token.content) and token.content in template)
        }
        return tuple(sorted(strings, key=lambda string: (-len(string), string)))

    def encode(self, text: str) -> list[int]:
        """Ids of one text, its control tokens recognised, with the BOS that the tokenizer adds."""
        return self.encode_batch([RenderedPrompt(text)])[0]

    def encode_batch(self, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Ids of each prompt, in order; runs on all cores, without the GIL."""
        results: list[list[int]] = [[] for _ in prompts]
        for add_special_tokens in (True, False):
            indices = [
                index
                for index, prompt in enumerate(prompts)
                if not prompt.literals and prompt.add_special_tokens == add_special_tokens
            ]
            if not indices:
                continue
            texts = [prompts[index].text for index in indices]
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            for index, encoding in zip(indices, encodings, strict=True):
                results[index] = encoding.ids
        for index, prompt in enumerate(prompts):
            if prompt.literals:
                results[index] = self._literal_encoder.encode(*prompt)
            if prompt.add_special_tokens:
                results[index] = self._with_one_bos(results[index])
        return results

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, all at once, control tokens included, nothing cleaned up."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[TextPiece]:
        """The text of ids, with control tokens told from text that only looks like them."""
        pieces: list[TextPiece] = []
        start = 0
        for index, token_id in enumerate([*ids, None]):
            if token_id is not None and token_id not in self._control_ids:
                continue
            if text := decode_bytes(self.token_bytes.join(ids[:start], ids[start:index]))[0]:
                pieces.append(TextPiece(text, is_control=False))
            if token_id is not None:
                pieces.append(TextPiece(self._control_ids[token_id], is_control=True))
            start = index + 1
        return pieces

    def decode_completion(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[str, bool]:
        """What `ids` add to the text of the prompt, and whether that ends with a whole character.

        A leading space is kept. The bytes of an incomplete last character are left out (then False); invalid bytes
        elsewhere become U+FFFD. Where the prompt ends inside a character, the text begins with that character.
        """
        unfinished = self.token_bytes.unfinished(prompt_ids)
        text, rest = decode_bytes(self.token_bytes.join(prompt_ids, ids), unfinished)
        return text, not rest

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    @cached_property
    def _control_ids(self) -> dict[int, str]:
        spellings = {self._backend.token_to_id(token): token for token in self.special_token_strings}
        return {token_id: token for token_id, token in spellings.items() if token_id is not None}

    @cached_property
    def _literal_encoder(self) -> LiteralEncoder:
        return LiteralEncoder(self._backend, self.special_token_strings)
