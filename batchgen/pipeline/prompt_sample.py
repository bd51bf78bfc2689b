"""The prompts of some rows of a job: how long they are, and how much of them is shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from batchgen.pipeline.plan import RowIndex
from batchgen.pipeline.ports import FeederLike
from batchgen.records import RowRange

SAMPLE_ROWS = 256
"""Rows whose prompts are made."""
_SAMPLE_PIECES = 8
"""Places of the input that they are taken from, so that neighbours with a common prefix are seen."""
_WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class PromptSample:
    """The prompts of some rows of a job."""

    num_rows: int
    lengths: list[int]
    """Tokens of each prompt."""
    errors: dict[str, int]
    """Rows without a prompt, by code."""
    shared_tokens: int
    """Tokens of whole blocks that another prompt of the sample begins with too."""
    token_ids: list[int] = field(repr=False)
    """Some ids that occur."""

    @property
    def mean_length(self) -> float:
        """Tokens of a prompt; 0 where no row has one."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    @property
    def shared_share(self) -> float:
        """Share of the prompt tokens that shared prefixes would serve, 0 to 1."""
        total = sum(self.lengths)
        return self.shared_tokens / total if total else 0.0

    def quantile(self, share: float) -> int:
        """The length that this share of the prompts does not exceed."""
        return int(np.quantile(self.lengths, share, method="higher")) if self.lengths else 0


def spread(ranges: Iterable[RowRange], index: RowIndex, num_rows: int = SAMPLE_ROWS) -> list[RowRange]:
    """About `num_rows` rows in a few pieces, spread evenly over the ranges; all of them where there are no more."""
    every = [rows for rows in ranges if index.count(rows)]
    total = sum(index.count(rows) for rows in every)
    if total <= num_rows:
        return every
    size = num_rows // _SAMPLE_PIECES
    starts = [piece * (total - size) // (_SAMPLE_PIECES - 1) for piece in range(_SAMPLE_PIECES)]
    pieces: list[RowRange] = []
    passed = 0
    for rows in every:
        count = index.count(rows)
        for start in (start - passed for start in starts if passed <= start < passed + count):
            rest = rows if start == 0 else rows._replace(start=index.first(rows, start).stop)
            pieces.append(index.first(rest, min(size, count - start)))
        passed += count
    return pieces


def sample_prompts(feeder: FeederLike, block_size: int) -> PromptSample:
    """Count what the feeder prepares, to its end."""
    prompts: list[list[int]] = []
    errors: Counter[str] = Counter()
    with closing(feeder):
        while not feeder.is_over:
            prepared = feeder.get(_WAIT_SECONDS)
            if prepared is None:
                continue
            if prepared.prompt_token_ids is None:
                errors[prepared.error.code if prepared.error else "unknown"] += 1
            else:
                prompts.append(prepared.prompt_token_ids)
    return PromptSample(
        num_rows=len(prompts) + sum(errors.values()),
        lengths=[len(prompt) for prompt in prompts],
        errors=dict(errors.most_common()),
        shared_tokens=shared_tokens(prompts, block_size),
        token_ids=[token for prompt in prompts[:64] for token in prompt[:64]],
    )


def shared_tokens(prompts: Iterable[list[int]], block_size: int) -> int:
    """Tokens of whole blocks that the next prompt in radix order begins with too; the last token never counts."""
    total = 0
    before: list[int] = []
    for prompt in sorted(prompts):
        common = 0
        for ours, theirs in zip(prompt[:-1], before, strict=False):
            if ours != theirs:
                break
            common += 1
        total += common // block_size * block_size
        before = prompt
    return total


def histogram(lengths: Sequence[int], num_bins: int = 12) -> list[tuple[int, int, int]]:
    """(first length, last length, count) of equal bins."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // num_bins)
    found = Counter((length - low) // width for length in lengths)
    return [
        (low + n * width, min(high, low + (n + 1) * width - 1), found[n]) for n in range(-(-(high - low + 1) // width))
    ]
