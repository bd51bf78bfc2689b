"""One step as data: what the scheduler plans, the model runner executes and the sampler draws for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from batchgen.engine.block_table import BlockCopy
from batchgen.engine.prefix_cache import CachedBlock
from batchgen.engine.sequence import Sequence
from batchgen.records import TokenLogprob

if TYPE_CHECKING:
    import torch


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of a sequence, from `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int


class LogitsLayout(NamedTuple):
    """Which tokens of the flattened step have their logits computed, and in which row."""

    tokens: array[int]
    """Index in the flattened step, one per logits row; int32."""
    last_row: list[int]
    """By chunk: the row of its last token; -1 where nothing is drawn from it."""
    scored_row: dict[int, int]
    """By scored chunk: the row of its first token; the others follow."""


@dataclass(slots=True)
class Batch:
    """Copies run first, then all chunks in one forward pass, then one draw per entry of `samples` and `beams`.

    The chunks are columns: `sequences`, `starts` and `counts` (int32, as kernels read them); an object for each was a
    fifth of what a step took here.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    copies: list[BlockCopy] = field(default_factory=list)
    samples: list[tuple[int, Sequence]] = field(default_factory=list)
    """(index of the chunk whose last token's logits are used, sequence that gets the drawn token)."""
    beams: list[tuple[int, Sequence]] = field(default_factory=list)
    """(index of the chunk, live beam); the beams of a group stand together, best first."""
    scored: list[int] = field(default_factory=list)
    """Indexes of the chunks of which all logits are wanted, for log-probabilities of the prompt."""
    ending: list[Sequence] = field(default_factory=list)
    """Sequences that end with their chunk: nothing is drawn for them."""
    published: list[CachedBlock] = field(default_factory=list)
    """Links that became findable in this step and must be withdrawn if it fails."""
    num_tokens: int = 0
    _layout: LogitsLayout | None = None

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """The columns as rows."""
        return [ScheduledChunk(*row) for row in zip(self.sequences, self.starts, self.counts, strict=True)]

    def add(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Compute the next `num_tokens` tokens of a sequence, from `start` on."""
        self.sequences.append(sequence)
        self.starts.append(start)
        self.counts.append(num_tokens)
        self.num_tokens += num_tokens

    def logits_layout(self) -> LogitsLayout:
        """Rows of the sampled chunks first, in their order, then all tokens of the scored ones; of the whole batch."""
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> LogitsLayout:
        num_chunks = len(self.sequences)
        if not self.scored and [index for index, _ in self.samples] == list(range(num_chunks)):
            # The common case: something is drawn after every chunk.
            return LogitsLayout(_before(accumulate(self.counts)), list(range(num_chunks)), {})
        ends = list(accumulate(self.counts))
        sampled = sorted({index for index, _ in (*self.samples, *self.beams)})
        tokens = _before(ends[index] for index in sampled)
        last_row = [-1] * num_chunks
        for row, index in enumerate(sampled):
            last_row[index] = row
        scored_row: dict[int, int] = {}
        for index in self.scored:
            scored_row[index] = len(tokens)
            tokens.extend(range(ends[index] - self.counts[index], ends[index]))
        return LogitsLayout(tokens, last_row, scored_row)


def _before(ends: Iterable[int]) -> array[int]:
    return array("i", [end - 1 for end in ends])


class Draw(NamedTuple):
    """What was drawn for one entry of `Batch.samples`."""

    token_id: int
    logprob: float
    """Raw: before temperature and filters."""
    ok: bool = True
    """False where every token was masked, or the logits were not finite."""
    alternatives: list[TokenLogprob] | None = None


class Draws(Protocol):
    """What a step draws, one per entry of `Batch.samples`: first on the device, on the host when it is asked."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [R], on the device; 0 where the draw is not ok."""
        ...

    def read(self) -> list[Draw]:
        """Wait for the step."""
        ...
