"""A model in milliseconds: K and V are hashes of the tokens up to theirs, so a wrong block gives a wrong text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from batchgen.engine.batch import Batch, Draw
from batchgen.engine.beam import Continuation
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.engine import Engine
from batchgen.engine.loading import EngineParts
from batchgen.engine.masks import AllowedTokens
from batchgen.engine.prefix_cache import ChainHash, PrefixCache
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence as EngineSequence
from batchgen.records import Completion, Prompt, TokenLogprob
from batchgen.sampling_params import SamplingParams
from tests.engine import running

VOCAB_SIZE = 97
EOS = 96
BLOCK_SIZE = 4
MAX_MODEL_LEN = 512


def mix(state: int, value: int) -> int:
    """The state after one more token."""
    return hash((state, value))


def state_of(token_ids: Iterable[int]) -> int:
    """The state after all tokens."""
    state = 0
    for token_id in token_ids:
        state = mix(state, token_id)
    return state


@dataclass
class FakeRunner:
    """Computes the state after each token from the state in the slot before it, through the block tables.

    With `checks_context`, every slot of a context must hold the state of its own tokens; else the last one only.
    """

    pool: BlockPool
    checks_context: bool = True
    failures: list[BaseException] = field(default_factory=list)
    """Raised one after another by the next steps, after they have written."""
    max_tokens: int | None = None
    """More tokens than that in a step are too much for the device."""
    batches: list[Batch] = field(default_factory=list)
    """Every batch that ran, where `keeps_batches`."""
    keeps_batches: bool = False
    num_steps: int = 0
    num_computed: int = 0
    num_sampled_rows: int = 0
    num_ahead: int = 0
    """Steps that ran before the tokens of the step before them were known."""

    def __post_init__(self) -> None:
        self._drawn: list[int] = []
        self.states: list[list[int | None]] = [[None] * self.pool.block_size for _ in range(self.pool.num_blocks)]

    def execute(self, batch: Batch, drawn_R: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [L, 1]: the state after each token of the layout."""
        self.num_steps += 1
        self.num_ahead += drawn_R is not None
        self._drawn = [] if drawn_R is None else drawn_R.tolist()
        self.num_computed += batch.num_tokens
        self.num_sampled_rows += len(batch.logits_layout().tokens)
        if self.keeps_batches:
            self.batches.append(batch)
        # Rows of columns: made once, as each call makes them anew.
        chunks, ends = batch.chunks, list(accumulate(batch.counts))
        assert batch.num_tokens == sum(batch.counts)
        self._copy(batch)
        # Every chunk is written before any is read, as each layer does.
        for sequence, start, num_tokens in chunks:
            token_ids = self._token_ids(sequence)
            state = 0 if start == 0 else state_of(token_ids[:start])
            for position in range(start, start + num_tokens):
                state = mix(state, token_ids[position])
                self._write(sequence, position, state)
        if self.max_tokens is not None and batch.num_tokens > self.max_tokens:
            raise torch.OutOfMemoryError(f"{batch.num_tokens} tokens")
        if self.failures:
            raise self.failures.pop(0)
        states = []
        for token in batch.logits_layout().tokens:
            index = bisect_right(ends, token)
            sequence, start, num_tokens = chunks[index]
            states.append(self._read(sequence, start + token - (ends[index] - num_tokens)))
        return torch.tensor(states, dtype=torch.int64).view(-1, 1)

    def _token_ids(self, sequence: EngineSequence) -> Sequence[int]:
        if not sequence.num_unseen:
            return sequence.token_ids
        assert sequence.num_unseen == 1, "two steps are on their way, and a third one is planned"
        return [*sequence.token_ids, self._drawn[sequence.draw]]

    def _copy(self, batch: Batch) -> None:
        destinations = {copy.dst for copy in batch.copies}
        assert len(destinations) == len(batch.copies), "two copies go to one block"
        assert not destinations & {copy.src for copy in batch.copies}, "a block is copied from and to in one step"
        for src, dst in batch.copies:
            self.states[dst] = self.states[src][:]

    def _write(self, sequence: EngineSequence, position: int, state: int) -> None:
        assert sequence.table is not None
        block_id = sequence.table.block_ids[position // self.pool.block_size]
        self.states[block_id][position % self.pool.block_size] = state

    def _read(self, sequence: EngineSequence, position: int) -> int:
        """The state after the token at `position`."""
        assert sequence.table is not None
        size, end = self.pool.block_size, position + 1
        block_ids = sequence.table.block_ids
        if self.checks_context:
            state, token_ids = 0, self._token_ids(sequence)
            for position in range(end):
                state = mix(state, token_ids[position])
                assert self.states[block_ids[position // size]][position % size] == state, (
                    f"slot {position} of {end} holds the K and V of other tokens"
                )
        last = self.states[block_ids[(end - 1) // size]][(end - 1) % size]
        assert last is not None
        return last


class FakeDraws(NamedTuple):
    """What a step drew; known at once."""

    token_ids: torch.Tensor
    draws: list[Draw]
    failures: list[BaseException]

    def read(self) -> list[Draw]:
        """The draws, or the next failure."""
        if self.failures:
            raise self.failures.pop(0)
        return self.draws


@dataclass
class FakeSampler:
    """Tokens by hash of state and key; one in `eos_every` is EOS."""

    eos_every: int = 0
    failures: list[BaseException] = field(default_factory=list)
    """Raised one after another where the next steps are waited for."""

    def sample(
        self,
        logits_LV: torch.Tensor,
        rows: list[int],
        sequences: list[EngineSequence],
        allowed: AllowedTokens | None = None,
    ) -> FakeDraws:
        """One draw per sequence, from the state beside it; where some tokens are allowed, by hash among these."""
        states = logits_LV[:, 0].tolist()
        draws = [Draw(*self.draw(states[row], sequence)) for row, sequence in zip(rows, sequences, strict=True)]
        for index, row in enumerate([] if allowed is None else allowed.rows_C):
            assert allowed is not None
            ids = np.flatnonzero(~allowed.banned_CV[index]).tolist()
            draws[row] = draws[row]._replace(token_id=ids[draws[row].token_id % len(ids)] if ids else 0, ok=bool(ids))
        token_ids_R = torch.tensor([draw.token_id for draw in draws], dtype=torch.int64)
        return FakeDraws(token_ids_R, draws, self.failures)

    def continuations(
        self, logits_LV: torch.Tensor, rows: list[int], beams: list[EngineSequence]
    ) -> list[list[Continuation]]:
        """As many next tokens as a search may want, best first, by hash of the state alone."""
        states = logits_LV[:, 0].tolist()
        result = []
        for row, beam in zip(rows, beams, strict=True):
            assert beam.group.search is not None
            scores = {token: -1.0 - mix(states[row], token) % 997 / 100 for token in range(VOCAB_SIZE)}
            best = sorted(scores, key=lambda token: (-scores[token], token))[: beam.group.search.num_candidates]
            result.append([Continuation(token, scores[token], scores[token]) for token in best])
        return result

    def score(self, logits_RV: torch.Tensor, token_ids: list[int], top: int) -> list[list[TokenLogprob]]:
        """Log-probabilities by hash of state and token."""
        states = logits_RV[:, 0].tolist()
        return [
            [TokenLogprob(token, -1.0 - mix(state, token) % 997 / 100, 1)]
            for state, token in zip(states, token_ids, strict=True)
        ]

    def draw(self, state: int, sequence: EngineSequence) -> tuple[int, float]:
        """Token and log-probability from the state, and the key of the random numbers."""
        group = sequence.group
        value = hash((state, group.seed, group.source, group.row, sequence.sample, sequence.num_generated))
        if self.eos_every and value % self.eos_every == 0:
            return EOS, -0.5
        return value % (VOCAB_SIZE - 1), -1.0 / (1 + value % 1000)


class Fake(NamedTuple):
    """An engine over fakes, and its parts."""

    engine: Engine
    scheduler: Scheduler
    runner: FakeRunner

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        return self.scheduler.pool

    def assert_all_free(self) -> None:
        """Nothing is held any more."""
        self.engine.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
        assert not self.scheduler.has_unfinished


def make_fake(
    num_blocks: int = 64,
    *,
    block_size: int = BLOCK_SIZE,
    max_batch_tokens: int = 64,
    max_sequences: int = 16,
    prefix_caching: bool = True,
    hash_fn: ChainHash | None = None,
    eos_every: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    window: int = 8192,
    checks_context: bool = True,
    keeps_batches: bool = False,
    is_asynchronous: bool = False,
) -> Fake:
    """An engine over a fake model."""
    pool = BlockPool(num_blocks, block_size)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        prefix_cache=PrefixCache(pool, hash_fn) if prefix_caching else None,
    )
    runner = FakeRunner(pool, checks_context=checks_context, keeps_batches=keeps_batches)
    parts = EngineParts(
        runner=runner,
        sampler=FakeSampler(eos_every),
        scheduler=scheduler,
        tokenizer=None,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        is_asynchronous=is_asynchronous,
    )
    return Fake(Engine.from_parts(parts, window), scheduler, runner)


def prompt_ids(length: int, salt: int = 0) -> list[int]:
    """A prompt without EOS, another one for each salt."""
    return [hash((salt, position)) % (VOCAB_SIZE - 1) for position in range(length)]


def params(max_tokens: int | None, n: int = 1) -> SamplingParams:
    """Samples of exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, n=n, seed=5, ignore_eos=True)


def steps(fake: Fake) -> Iterator[list[Completion]]:
    """Step until nothing is left, with every block counted after each step."""
    return running.steps(fake.engine)


def run(
    fake: Fake, prompts: Sequence[Prompt | list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """Add all prompts, step to the end; completions in the order of the prompts. All blocks are free at the end."""
    completions = running.run(fake.engine, prompts, params)
    fake.assert_all_free()
    return completions


def expected_ids(prompt: list[int], params: SamplingParams, row: int, sample: int = 0, eos_every: int = 0) -> list[int]:
    """What one sample must be, computed without an engine."""
    ids, generated = list(prompt), []
    state = state_of(ids)
    assert params.max_tokens is not None
    for position in range(params.max_tokens):
        value = hash((state, params.seed, 0, row, sample, position))
        token = EOS if eos_every and value % eos_every == 0 else value % (VOCAB_SIZE - 1)
        generated.append(token)
        if token == EOS and not params.ignore_eos:
            break
        state = mix(state, token)
    return generated
