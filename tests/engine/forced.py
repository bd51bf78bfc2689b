"""An engine whose logits a test decides: a function of the tokens so far, in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from batchgen.engine.batch import Batch
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.engine import Engine
from batchgen.engine.loading import EngineParts
from batchgen.engine.ops import select_ops
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.tokenizer import Tokenizer
from tests.engine.tiny import EOS, VOCAB_SIZE, letters
from tests.tokenizers import load, save

LogitsOf = Callable[[list[int]], torch.Tensor]
"""Logits [V] of the next token, from all tokens before it."""

LIKELY = 20.0
"""Logit of a token that is as good as certain; all others have 0."""


class ForcedRunner:
    """Computes nothing: asks the test for the logits of every token that needs some."""

    def __init__(self, logits_of: LogitsOf) -> None:
        self._logits_of = logits_of

    def execute(self, batch: Batch) -> torch.Tensor:
        """fp32 [R, V], the rows of `batch.logits_layout()`."""
        contexts = [
            chunk.sequence.token_ids[: position + 1].tolist()
            for chunk in batch.chunks
            for position in range(chunk.start, chunk.start + chunk.num_tokens)
        ]
        rows = [self._logits_of(contexts[index]) for index in batch.logits_layout().tokens]
        return torch.stack(rows) if rows else torch.zeros(0, 1)


def letters_tokenizer(directory: Path) -> Tokenizer:
    """Tokens 5 to 27 are the letters a to w; `</s>` is EOS."""
    return load(save(letters(), directory, bos=False))


def forced_engine(
    logits_of: LogitsOf,
    tokenizer: Tokenizer | None = None,
    *,
    eos: Sequence[int] = (EOS,),
    num_blocks: int = 4096,
    max_sequences: int = 1024,
    max_batch_tokens: int = 1024,
    max_model_len: int = 64,
    vocab_size: int = VOCAB_SIZE,
) -> Engine:
    """An engine over forced logits, with the sampler that this machine would use."""
    pool = BlockPool(num_blocks, 4)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=max_batch_tokens,
        max_sequences=min(max_sequences, max_batch_tokens),
        prefix_cache=PrefixCache(pool),
    )
    parts = EngineParts(
        runner=ForcedRunner(logits_of),
        sampler=Sampler(select_ops(torch.device("cpu"))),
        scheduler=scheduler,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos),
    )
    return Engine.from_parts(parts)


def always(logits_V: torch.Tensor) -> LogitsOf:
    """The same logits everywhere."""
    return lambda token_ids: logits_V


def saying(prompt: list[int], token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> LogitsOf:
    """Logits that make `token_ids` follow the prompt; after them EOS for ever."""

    def logits_of(context: list[int]) -> torch.Tensor:
        position = len(context) - len(prompt)
        logits_V = torch.zeros(vocab_size)
        logits_V[token_ids[position] if 0 <= position < len(token_ids) else EOS] = LIKELY
        return logits_V

    return logits_of


def uneven(seed: int = 0) -> torch.Tensor:
    """Random logits, all different, positive and negative."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
